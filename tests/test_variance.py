import itertools
import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from conftest import TINY
from experiments import variance
from model import load_checkpoint
from test_model import small_model, some_bytes


def sequences(N):
    """All boundaries of a row of N bytes, of which the first is forced."""
    return torch.tensor([(1, *rest) for rest in itertools.product((0, 1), repeat=N - 1)], dtype=torch.bool)


def everything(model, x, y):
    """All boundaries of one row, their log p, l, and log pi of each decision, all (2^(N - 1), N)."""
    a = sequences(x.size(1))
    logits, _, l, _ = model(x.expand(len(a), -1), a)
    return a, train.log_likelihood(logits, y.expand(len(a), -1)).detach(), l, F.pad(F.logsigmoid(torch.where(a, l, -l))[:, 1:], (1, 0))


def test_the_share_of_signal_is_that_of_a_mean_under_noise_and_its_error_that_of_repetitions():
    g = torch.randn(20_000, 10, generator=torch.Generator().manual_seed(0))
    pairs = (g[0] @ g[1] + g[0] @ g[2] + g[1] @ g[2]) / 3  # |E g|^2 from three samples
    assert variance.share(g[:3])[0] == pytest.approx((pairs / g[:3].square().sum(1).mean()).item(), rel=1e-4)
    assert variance.share(g)[0] == pytest.approx(0, abs=1e-3)
    assert variance.share(g + 1)[0] == pytest.approx(10 / 20, abs=0.01)  # |1|^2 = 10, of the noise 10
    values, errors = zip(*(variance.share(some + 0.3) for some in g.split(100)))
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.15)


def test_all_estimators_have_the_gradient_of_the_expected_loss_as_their_mean():
    """Of log p, on the policy's weights. A row of 3 bytes has 4 boundary sequences and every estimator takes 4 draws in all."""
    model = small_model().train()
    row = some_bytes(1, 4)
    a, logp, l, log_pi = everything(model, row[:, :-1], row[:, 1:])
    pi = log_pi.sum(1).exp()
    gradient = lambda value: torch.autograd.grad(value, model.policy.weight, retain_graph=True)[0]
    exact = gradient((pi * -logp.mean(1)).sum())
    early_G = train.discounted_return(torch.randn(3), 1.0).expand(4, 3)  # whatever does not depend on a
    sums = dict.fromkeys(variance.STYLES, 0)
    for four in itertools.product(range(4), repeat=4):
        for name in sums:
            K = {"2 draws": 2, "4 draws": 4}.get(name, 1)
            grid = torch.zeros(4, 4, dtype=torch.long)  # 4 draws of 4 rows
            grid[:K, : 4 // K] = torch.tensor(four).view(K, 4 // K)
            A = variance.advantages(train.discounted_return(logp[grid], 1.0), early_G)[name]
            assert A.shape == (K, 4 // K, 3)
            drawn = grid[:K, : 4 // K]
            sums[name] = sums[name] + pi[list(four)].prod().detach() * train.policy_loss(l[drawn], a[drawn], A)
    assert exact.norm() > 1e-3
    for name, total in sums.items():
        own = 1 - 1 / 4 if "batch mean" in name else 1  # the batch's mean holds the row itself
        torch.testing.assert_close(gradient(total), own * exact, atol=2e-6, rtol=1e-3)


@pytest.mark.parametrize("name, K", [("early exit + batch mean", 1), ("2 draws", 2), ("4 draws", 4)])
def test_an_estimator_that_train_py_has_is_train_pys(name, K):
    model, row, u = small_model().train(), some_bytes(8, 21), torch.rand(4, 8, 20)
    logp, early_logp, l, a = variance.likelihoods(model, row[:, :-1], row[:, 1:], u)
    A = variance.advantages(*(train.discounted_return(z, 0.9) for z in (logp, early_logp)))[name]
    B = 8 // K
    x, y = row[:B, :-1], row[:B, 1:]
    L_pi = train.losses(*model(x, u=u[:K, :B]), y, 0.9, 0.2)[2]
    one, other = (torch.autograd.grad(z, model.policy.weight)[0] for z in (L_pi, train.policy_loss(l[:K, :B], a[:K, :B], A)))
    assert one.norm() > 1e-3
    torch.testing.assert_close(other, one, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("i, gamma", [(1, 0.5), (3, 0.5), (3, 1.0)])
def test_the_advantage_by_brute_force_is_that_of_all_boundary_sequences(i, gamma):
    model, row, n = small_model().train(), some_bytes(1, 7), 1000
    x, y, past = row[:, :-1], row[:, 1:], torch.rand(6, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    forced = variance.forced_returns(model, x, y, past, i, n, gamma)
    a, logp, l, log_pi = everything(model, x, y)
    fixed = model(x, u=past[None])[3][0, :i]
    Q = []
    for decision in 0, 1:
        chosen = (a[:, :i] == fixed).all(1) & (a[:, i] == decision)
        pi = log_pi[chosen, i + 1 :].sum(1).exp()
        assert pi.sum().item() == pytest.approx(1, abs=1e-5)
        Q.append(sum(pi @ logp[chosen, k] * gamma ** (k - i) for k in range(i, 6)).item())
    difference = forced[1] - forced[0]
    assert forced.mean(1).tolist() == pytest.approx(Q, abs=4 * forced.std().item() / n**0.5)
    assert abs(Q[1] - Q[0]) > 10 * difference.std().item() / n**0.5  # there is something to find
    assert difference.mean().item() == pytest.approx(Q[1] - Q[0], abs=4 * difference.std().item() / n**0.5)


def test_the_correlation_is_that_of_samples_whose_decision_is_drawn():
    generator = torch.Generator().manual_seed(0)
    p, truth = torch.tensor([0.05, 0.2, 0.5, 0.7]), torch.tensor([1.0, -2.0, 0.5, 3.0])
    A = torch.randn(4, 2, 50_000, generator=generator) + torch.stack((-truth * p, truth * (1 - p)), 1)[..., None]
    a = torch.rand(4, 50_000, generator=generator) < p[:, None]
    samples = (a.float() - p[:, None]) * torch.where(a, A[:, 1], A[:, 0]) / (p * (1 - p))[:, None]
    assert samples.mean(1).tolist() == pytest.approx(truth.tolist(), abs=0.1)
    expected = np.corrcoef(samples.flatten(), truth[:, None].expand(4, 50_000).flatten())[0, 1]
    assert variance.correlation(A, p, truth)[0] == pytest.approx(expected, abs=0.01)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A run of a second, in tmp_path/x."""
    for name, value in {"RESULTS": tmp_path, "BATCHES": {32: 4, 64: 3}, "POSITIONS": 2, "SAMPLES": 4, "DRAWS": 3}.items():
        monkeypatch.setattr(variance, name, value)


def test_no_comparison_changes_what_a_decision_adds_at_a_position(trained, small, monkeypatch):
    monkeypatch.setattr(variance, "DRAWS", 100)
    monkeypatch.setattr(variance, "SAMPLES", 100)
    model, saved = load_checkpoint(trained / "ckpt.pt")
    val_shards = train.open_rows(saved["config"]["data"], "val", 32)
    records, A = variance.true_advantages(model.train(), val_shards, nullcontext(), 0.9)
    early_G = A["raw"] - A["early exit"]
    torch.testing.assert_close(early_G, early_G[:, :1, :1].expand_as(early_G))  # the same whatever is drawn
    added = A["raw"][:, 1] - A["raw"][:, 0]
    for name in A:
        own = 1 - 1 / 16 if "batch mean" in name else 1  # the batch's mean holds the row itself
        torch.testing.assert_close((A[name][:, 1] - A[name][:, 0]) / own, added, atol=1e-4, rtol=1e-4)
    for record, here in zip(records, added):
        assert record["advantage"] == pytest.approx(here.mean().item(), abs=5 * 2**0.5 * record["stderr"])


def test_the_results_have_every_estimator_that_a_checkpoint_has(data, trained, tmp_path, small):
    train.main([*TINY, f"--data={data}", "--num_draws=1", "--training_bytes=512", f"--out_dir={tmp_path}/one"])
    variance.main([f"{tmp_path}/one/ckpt.pt", str(trained / "ckpt.pt"), "--name=x"])
    records = [json.loads(line) for line in (tmp_path / "x/results.jsonl").read_text().splitlines()]
    count = lambda key, part: sum(key in r and part in r["checkpoint"] for r in records)
    assert [count("share", "trained"), count("correlation", "trained")] == [2 * 4 * 4, 4]
    assert [count(key, "one") for key in ("share", "correlation", "advantage")] == [2 * 6 * 4, 6, 3 * 2]
    table = (tmp_path / "x/table.md").read_text()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines() if line.startswith("|")]
    assert [row[1:3] for row in cells[2:8]] == [["32", name] for name in variance.STYLES]
    first = records[0]
    assert cells[2][3] == f"{first['share']:.2%} ± {first['stderr']:.2%}" and cells[2][0] == first["checkpoint"]
    for r in records:
        if "advantage" in r:
            before = r["context"][: r["context"].index("‖")][-2:]
            letters = [c.isalnum() for c in before]
            assert r["kind"] == ("between words" if not letters[-1] else "inside a word" if letters == [True, True] else "first letter")
    for name in "variance.png", "variance.svg":
        assert (tmp_path / "x" / name).stat().st_size > 1000


@pytest.mark.parametrize("arguments, said", [
    ([], "variance.py: the following arguments are required: checkpoints"),
    (["nowhere.pt"], "variance.py: no checkpoint nowhere.pt; train.py makes one"),
    (["{uniform}"], "has boundaries='uniform'; name a checkpoint with learned ones"),
    (["{trained}", "{trained}"], "as another checkpoint is; put it into a folder of another name"),
    (["{trained}", "--data=nowhere"], "train.py: no nowhere/meta.json; make the data first")])
def test_a_mistake_is_one_line(arguments, said, trained, tmp_path, small, capsys):
    saved = load_checkpoint(trained / "ckpt.pt")[1]
    torch.save(saved | {"model_config": saved["model_config"] | {"boundaries": "uniform"}}, tmp_path / "ckpt.pt")
    with pytest.raises(SystemExit) as stopped:
        variance.main([argument.format(trained=trained / "ckpt.pt", uniform=tmp_path / "ckpt.pt") for argument in arguments])
    error = capsys.readouterr().err or f"{stopped.value.code}\n"  # Python prints a code that is text
    assert said in error and error.count("\n") == 1
