import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experiments import variance
from model import Model, ModelConfig, inputs_and_targets, load_checkpoint
from train import advantage, discounted_return, policy_loss

ESTIMATORS = ["raw", "raw + batch mean", "early exit", "early exit + batch mean", "2 draws",
              "4 draws"]


def small_model(**changes):
    """A model in training mode whose boundaries and losses depend on what it reads."""
    torch.manual_seed(0)
    config = dict(seq_len=32, embedding_dim=16, num_heads=2, n_down_layers=1, n_mid_layers=1,
                  n_up_layers=1, attention_window=8, policy_window=2, policy_scale=1.0)
    model = Model(ModelConfig(**config | changes)).train()
    torch.nn.init.normal_(model.policy.linear.weight)
    torch.nn.init.normal_(model.head.linear.weight)
    return model


def test_signal_is_the_mean_over_pairs_and_its_error_a_jackknife():
    def mean_over_pairs(g):
        pairs = [first @ second for first, second in itertools.combinations(g, 2)]
        return (sum(pairs) / len(pairs) / g.square().sum(1).mean()).item()

    g = 1 + torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    value, error = variance.signal(g)
    assert value == pytest.approx(mean_over_pairs(g), rel=1e-4)
    without = [mean_over_pairs(torch.cat((g[:i], g[i + 1 :]))) for i in range(4)]
    assert error == pytest.approx(math.sqrt(3 * np.var(without)), rel=1e-3)


def test_every_estimator_is_the_gradient_of_the_expected_loss_on_average():
    """A row of 3 bytes has 4 possible draws. Every estimator takes 4 draws: 4^4 possibilities."""
    model = small_model(early_exit=False)
    y = torch.tensor([[7, 8, 9]]).expand(4, -1)
    x = F.pad(y[:, :-1], (1, 0), value=256)
    a = torch.tensor([[1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    u = 1 - a.float()  # draws just these boundaries
    logp, _, l, _ = (output[0] for output in model(x, y, u[None]))
    logp = logp.detach()
    pi = F.logsigmoid(torch.where(a, l, -l))[:, 1:].sum(1).exp()  # of each draw

    def gradient(loss):
        weight = model.policy.linear.weight
        return torch.autograd.grad(loss, weight, retain_graph=True)[0]

    exact = gradient((pi * -logp.mean(1)).sum())
    assert exact.norm() > 1e-3
    early_G = torch.randn(3).expand(4, 3)  # any baseline that does not depend on the draw
    mean_loss = {}
    for four in itertools.product(range(4), repeat=4):
        probability = pi[list(four)].prod().detach()
        for name in ESTIMATORS:
            K = int(name[0]) if "draws" in name else 1
            drawn = torch.tensor(four).view(K, 4 // K)
            G = torch.zeros(4, 4, 3)
            G[:K, : 4 // K] = discounted_return(logp[drawn], 1.0)
            A = variance.advantages(G, early_G)[name]
            loss = probability * policy_loss(l[drawn], a[drawn], A)
            mean_loss[name] = mean_loss.get(name, 0) + loss
    for name, loss in mean_loss.items():
        scale = 3 / 4 if "batch mean" in name else 1  # the mean over 4 rows holds the row itself
        torch.testing.assert_close(gradient(loss), scale * exact, atol=2e-6, rtol=1e-3)


def test_the_gradients_are_those_of_train_py(data):
    shards = variance.open_shards(data, "train", 32)
    got = variance.policy_gradients(small_model(), shards, batches=1)
    numbers = np.random.default_rng(0).integers(0, sum(map(len, shards)), 16)
    x, y = inputs_and_targets(variance.read_rows(shards, numbers))
    u = torch.from_numpy(np.random.default_rng([0, 1, 0]).random((4, 16, 32), np.float32))
    model = small_model()
    for name, K, B in ("early exit + batch mean", 1, 16), ("2 draws", 2, 8), ("4 draws", 4, 4):
        logp, early_logp, l, a = model(x[:B], y[:B], u[:K, :B])
        A = advantage(discounted_return((logp - early_logp).detach(), 0.97))
        weight = model.policy.linear.weight
        expected = torch.autograd.grad(policy_loss(l, a, A), weight)[0]
        assert expected.norm() > 1e-4
        torch.testing.assert_close(got[name, 0.97], expected.flatten()[None], atol=1e-6, rtol=1e-4)


def test_the_table_has_a_line_per_estimator(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(variance, "BATCHES", {32: 3})
    monkeypatch.setattr(variance, "RESULTS", tmp_path)
    variance.main([f"{trained}/ckpt.pt"])
    lines = (tmp_path / "variance/table.md").read_text().splitlines()
    assert [line.split(" | ")[2] for line in lines[4:]] == ESTIMATORS


@pytest.mark.parametrize("arguments, message", [
    (["{tmp}/uniform.pt"], "has boundaries=uniform; use one with learned boundaries"),
    (["{trained}/ckpt.pt", "--data=nowhere"], "no nowhere/meta.json"),
    (["{tmp}/none.pt"], "there is no checkpoint")])
def test_mistakes_give_one_line(arguments, message, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(variance, "BATCHES", {32: 4})
    _, saved = load_checkpoint(trained / "ckpt.pt")
    saved["config"]["boundaries"] = "uniform"
    saved["model"] = {k: v for k, v in saved["model"].items() if not k.startswith("policy.")}
    torch.save(saved, tmp_path / "uniform.pt")
    with pytest.raises(SystemExit) as stopped:
        variance.main([argument.format(tmp=tmp_path, trained=trained) for argument in arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and message in error and error.count("\n") == 1
