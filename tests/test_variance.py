import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from configurator import UserError
from experiments import variance
from experiments.systems import load_checkpoint, make_model
from train import discounted_return, policy_loss

ESTIMATORS = ["raw", "raw + batch mean", "early exit", "early exit + batch mean", "2 draws",
              "4 draws"]


def small_model(**changes):
    """A model in training mode whose boundaries and losses depend on what it reads."""
    torch.manual_seed(0)
    shape = {"seq_len": 32, "embedding_dim": 16, "n_mid_layers": 1, "policy_window": 2,
             "policy_scale": 1.0}
    model = make_model(train.DEFAULTS | shape | changes).train()
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
    model = small_model(redrawn=1.0)
    y = torch.tensor([[7, 8, 9]]).expand(4, -1)
    x = F.pad(y[:, :-1], (1, 0), value=256)
    a = torch.tensor([[1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    u = 1 - a.float()  # draws just these boundaries
    logp, _, l, _ = model(x, y, u)
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
            loss = policy_loss(l[list(four)], a[list(four)], A.flatten(0, 1))
            mean_loss[name] = mean_loss.get(name, 0) + probability * loss
    for name, loss in mean_loss.items():
        scale = 3 / 4 if "batch mean" in name else 1  # the mean over 4 rows holds the row itself
        torch.testing.assert_close(gradient(loss), scale * exact, atol=2e-6, rtol=1e-3)


def policy_gradient(model, x, y, u, redrawn):
    """The gradient of L_pi as train.py computes it."""
    hp = SimpleNamespace(**train.DEFAULTS | {"redrawn": redrawn, "batch_size": len(x)})
    _, terms = train.losses(*model(x, y, u), hp)
    return torch.autograd.grad(terms["pi"], model.policy.linear.weight)[0].flatten()[None]


def test_the_gradients_are_those_of_train_py(data, monkeypatch):
    monkeypatch.setattr(variance, "BATCHES", 1)
    size = {"data": str(data), "seq_len": 32, "effective_batch_size": 64, "batch_size": 64}
    hp = SimpleNamespace(**size, seed=0, redrawn=0)
    [(x, y, u)] = train.micro_batches(variance.open_shards(data, "train", 32), 0, hp, 0, 1, "cpu")
    for name, redrawn, rows, draws in [
            ("early exit + batch mean", 0.0, 16, u[:16]),
            ("2 draws", 1.0, 8, torch.cat((u[:8], u[16:24])))]:
        model = small_model(redrawn=redrawn)
        expected = policy_gradient(model, x[:rows], y[:rows], draws, redrawn)
        got = variance.policy_gradients(model, {"config": size})[name, 0.97]
        assert expected.norm() > 1e-4
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-4)


def test_the_table_has_a_line_per_estimator(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(variance, "BATCHES", 3)
    monkeypatch.setattr(variance, "RESULTS", tmp_path)
    variance.main([f"{trained}/ckpt.pt"])
    lines = (tmp_path / "variance/table.md").read_text(encoding="utf-8").splitlines()
    assert [line.split(" | ")[1] for line in lines[2:]] == ESTIMATORS


def test_a_model_without_a_policy_is_refused(trained, tmp_path):
    _, saved = load_checkpoint(trained / "ckpt.pt")
    saved["config"]["system"] = "uniform"
    saved["model"] = make_model(saved["config"]).state_dict()
    torch.save(saved, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match="has system=uniform; use one with learned boundaries"):
        variance.main([f"{tmp_path}/ckpt.pt"])
