import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from experiments import variance
from model import inputs_and_targets, load_checkpoint
from test_model import small_model, some_bytes, uniforms_for

ESTIMATORS = [*variance.advantages(torch.zeros(4, 4, 1), torch.zeros(4, 1))]


def test_the_share_of_signal_is_that_of_a_mean_under_noise_and_its_error_that_of_repetitions():
    g = torch.randn(20_000, 10, generator=torch.Generator().manual_seed(0))
    pairs = (g[0] @ g[1] + g[0] @ g[2] + g[1] @ g[2]) / 3  # |E g|^2 from three samples
    expected = (pairs / g[:3].square().sum(1).mean()).item()
    assert variance.share(g[:3])[0] == pytest.approx(expected, rel=1e-4)
    assert variance.share(g)[0] == pytest.approx(0, abs=1e-3)
    assert variance.share(g + 1)[0] == pytest.approx(10 / 20, abs=0.01)  # |1|^2 = 10 = the noise's
    values, errors = zip(*(variance.share(some + 0.3) for some in g.split(100)))
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.15)


def test_all_estimators_have_the_gradient_of_the_expected_loss_as_their_mean():
    """Of log p, on the policy's weights. A row of 3 bytes has 4 sequences of boundaries.

    Every estimator takes 4 draws in all, of which there are 4^4.
    """
    model, (x, y) = small_model(early_exit=False).train(), some_bytes(1, 3)
    sequences = [(1, *rest) for rest in itertools.product((0, 1), repeat=2)]
    a = torch.tensor(sequences, dtype=torch.bool)
    logp, _, l, _ = (z[0] for z in model(x.expand(4, -1), y.expand(4, -1), uniforms_for(a[None])))
    pi = F.logsigmoid(torch.where(a, l, -l))[:, 1:].sum(1).exp()

    def gradient(value):
        return torch.autograd.grad(value, model.policy.weight, retain_graph=True)[0]

    logp = logp.detach()
    exact = gradient((pi * -logp.mean(1)).sum())
    early_G = train.discounted_return(torch.randn(3), 1.0).expand(4, 3)  # does not depend on a
    sums = dict.fromkeys(ESTIMATORS, 0)
    for four in itertools.product(range(4), repeat=4):
        probability = pi[list(four)].prod().detach()
        for name in sums:
            K = {"2 draws": 2, "4 draws": 4}.get(name, 1)
            drawn = torch.tensor(four).view(K, 4 // K)  # of 4 / K rows, all the same
            G = torch.zeros(4, 4, 3)
            G[:K, : 4 // K] = train.discounted_return(logp[drawn], 1.0)
            A = variance.advantages(G, early_G)[name]
            sums[name] = sums[name] + probability * train.policy_loss(l[drawn], a[drawn], A)
    assert exact.norm() > 1e-3
    for name, total in sums.items():
        own = 1 - 1 / 4 if "batch mean" in name else 1  # the batch's mean holds the row itself
        torch.testing.assert_close(gradient(total), own * exact, atol=2e-6, rtol=1e-3)


def test_the_estimators_that_train_py_has_are_train_pys(data):
    """A batch's gradient against train.py's functions on as many rows and draws as it has."""
    shards = variance.open_shards(data, "train", 32)
    model = small_model(seq_len=32).train()
    got = variance.policy_gradients(model, shards, torch.autocast("cpu", enabled=False), 1)
    numbers = np.random.default_rng(0).integers(0, sum(map(len, shards)), 16)
    x, y = inputs_and_targets(variance.read_rows(shards, numbers))
    u = torch.from_numpy(np.random.default_rng([0, 1, 0]).random((4, 16, 32), np.float32))
    for name, K, B in ("early exit + batch mean", 1, 16), ("2 draws", 2, 8), ("4 draws", 4, 4):
        logp, early_logp, l, a = model(x[:B], y[:B], u[:K, :B])
        G = train.discounted_return((logp - early_logp).detach(), 0.97)
        L_pi = train.policy_loss(l, a, train.advantage(G))
        expected = torch.autograd.grad(L_pi, model.policy.weight)[0]
        assert expected.norm() > 1e-4
        torch.testing.assert_close(got[name, 0.97], expected.flatten()[None], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("arguments, said", [
    (["{uniform}"], "has boundaries='uniform'; name a checkpoint with learned ones"),
    (["{trained}", "{trained}"], "as another checkpoint is; put it into another folder"),
    (["{trained}", "--data=nowhere"], "no nowhere/meta.json; make the data first")])
def test_a_mistake_is_one_line(arguments, said, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(variance, "BATCHES", {32: 4})
    saved = load_checkpoint(trained / "ckpt.pt")[1]
    torch.save(saved | {"config": saved["config"] | {"boundaries": "uniform"}}, tmp_path / "u.pt")
    paths = {"trained": trained / "ckpt.pt", "uniform": tmp_path / "u.pt"}
    with pytest.raises(SystemExit) as stopped:
        variance.main([argument.format(**paths) for argument in arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and error.count("\n") == 1
