"""train.py: the loop, data order, evaluation, and stopping and resuming."""
import hashlib
import importlib
import itertools
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import train
from common.commandline import UserError, read_command_line
from common.models import load_model, make_model
from conftest import ROOT, TINY
from model import BOS, Output, UNet
from prepare import open_shards
from test_model import small_model, some_bytes, uniforms_for

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
NEVER = "--eval_interval=1000000"
STEP = 4 * 32  # bytes in a training step of TINY


def log_of(out):
    """The records of steps and evaluations, without headers."""
    records = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [record for record in records if "step" in record]


def steps_of(out):
    """The log without what depends on the clock."""
    clock = "bytes_per_second", "minutes_left"
    return [{k: v for k, v in record.items() if k not in clock} for record in log_of(out)]


def refused(*arguments):
    """The mistake that train.py reports."""
    with pytest.raises(UserError) as caught:
        train.main([*TINY, *arguments])
    return str(caught.value)


# ---- The loop.
@pytest.mark.paper
@pytest.mark.parametrize("quick", [False, True])
def test_training_steps_are_those_of_the_written_equations(quick, data, tmp_path):
    """Six steps of 8 rows in two micro-batches, against a loop that shares only the model.

    Covers row order, draws, eq. 15-18 and 24-27, clipping, AdamW, Muon and what they decay,
    warm-up, and what is logged. A cosine goes without Muon, as in the paper.
    """
    N, rows_per_step, steps, seed = 32, 8, 6, 7
    lr, decay = 1e-2, 0.5
    muon_lr, clip = (0.04, 100.0) if quick else (0.0, 0.3)  # clipping matters once
    lambda_pi, lambda_target, lambda_early, gamma, target = 0.3, 0.2, 0.1, 0.9, 0.2
    total = steps * rows_per_step * N
    warmup = 2 * rows_per_step * N
    train.main([
        *TINY, f"--data={data}", f"--out_dir={tmp_path}", f"--seed={seed}",
        f"--gamma={gamma}", f"--lambda_pi={lambda_pi}",
        f"--lambda_target={lambda_target}", f"--lambda_early={lambda_early}",
        f"--effective_batch_size={rows_per_step}", "--batch_size=4",
        f"--training_bytes={total - 99}",
        f"--learning_rate={lr}", f"--warmup_bytes={warmup}", f"--muon_learning_rate={muon_lr}",
        f"--cosine={not quick}",
        f"--weight_decay={decay}", f"--grad_clip={clip}"])
    trained, _ = load_model(tmp_path / "ckpt.pt")
    reached = dict(trained.named_parameters())
    logged = [record for record in log_of(tmp_path) if "auto" in record]

    torch.manual_seed(seed)
    model = make_model(trained.hp).train()
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    m = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    v = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    shard = np.fromfile(data / "train_00000.bin", np.uint8)
    rows = shard[: len(shard) // 64 * 64].reshape(-1, N)  # without prepare.py's last, cut row
    order = np.random.default_rng([seed, 0]).permutation(len(rows))
    i, j = torch.arange(N)[:, None], torch.arange(N)
    discount = torch.where(j >= i, gamma ** (j - i).float(), 0.0)

    def log_p(head, Z, y):
        logits = 30 * torch.tanh(head.linear(head.norm(Z)) / 30)
        return logits.log_softmax(-1).gather(2, y[..., None])[..., 0]

    def drawn(table, u):
        """Decisions and their logits, from the logits after each decision, from left to right."""
        a, l = torch.ones(u.shape), [table[:, 0, 0]]
        for i in range(1, N):
            before = a[:, i - 1].long() if i > 1 else torch.ones(len(u), dtype=torch.long)
            l.append(table[torch.arange(len(u)), i, before])
            a[:, i] = u[:, i] < l[-1].sigmoid()
        return a.bool(), torch.stack(l, 1)

    for step in range(1, steps + 1):
        first_row = (step - 1) * rows_per_step
        u = np.random.default_rng([seed, first_row, 1]).random((rows_per_step, N), np.float32)
        L = 0
        expected = Counter()  # means over the micro-batches
        for part in (slice(0, 4), slice(4, 8)):
            numbers = order[first_row : first_row + rows_per_step][part]
            y = torch.from_numpy(rows[numbers].astype(int))
            x = torch.cat((torch.full((4, 1), BOS), y[:, :-1]), 1)
            X = model.encode(x)
            a, l = drawn(model.policy(X), torch.from_numpy(u[part]))
            logp = log_p(model.head, model.through_tokens(X, a), y)
            early_logp = log_p(model.early_head, X, y)
            L_auto, L_early = -logp.mean(), -early_logp.mean()
            G = (logp - early_logp).detach() @ discount.T
            A = G - G.mean(0)
            log_pi = torch.where(a, l.sigmoid(), 1 - l.sigmoid()).log()
            L_pi = -(log_pi * A)[:, 1:].sum() / a.numel()
            p = l.sigmoid().detach()
            L_tgt = l.mean() * (p.mean() - target)
            L = L + (L_auto + lambda_early * L_early + lambda_pi * L_pi + lambda_target * L_tgt) / 2
            parts = {
                "auto": L_auto, "early": L_early, "pi": L_pi, "target": L_tgt,
                "bpb": L_auto / math.log(2), "rate": a.float().mean(),
                "entropy": -(p * p.log2() + (1 - p) * (1 - p).log2()).mean(),
                # the rest, as it is nearly everything
                "unexplained": (logp - early_logp).var() / logp.var()}
            expected.update({name: value.item() / 2 for name, value in parts.items()})
        record = logged[step - 1] | {"unexplained": 1 - logged[step - 1]["explained_variance"]}
        for name, value in expected.items():
            assert record[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
        model.zero_grad()
        L.backward()
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt().item()
        assert (norm > clip) == (not quick)
        middle = (step - 0.5) * rows_per_step * N
        done = max(middle - warmup, 0) / (total - warmup)
        fall = 1 - done if quick else (1 + math.cos(math.pi * done)) / 2
        scale = min(middle / warmup, 1) * fall
        with torch.no_grad():
            for name, p in model.named_parameters():
                g = p.grad * min(clip / norm, 1)
                if muon_lr and p.dim() == 2 and name.split(".")[0] in ("down", "middle", "up"):
                    m[name] = 0.95 * m[name] + 0.05 * g
                    U, s, V = (0.95 * m[name] + 0.05 * g).svd()
                    s /= s.norm()
                    for _ in range(5):  # Newton-Schulz brings all singular values near 1
                        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
                    p *= 1 - muon_lr * scale * decay
                    p -= muon_lr * scale * 0.2 * max(p.shape) ** 0.5 * (U * s) @ V.T
                    continue
                m[name] = 0.9 * m[name] + 0.1 * g
                v[name] = 0.999 * v[name] + 0.001 * g**2
                if p.dim() == 2 and name != "policy.linear.weight":
                    p *= 1 - lr * scale * decay
                m_hat = m[name] / (1 - 0.9**step)
                v_hat = v[name] / (1 - 0.999**step)
                p -= lr * scale * m_hat / (v_hat.sqrt() + 1e-8)
    assert model.policy.linear.weight.abs().max() > 5e-3
    for name, p in model.named_parameters():
        error = (reached[name] - p).norm() / (p - initial[name]).norm()
        assert error < 1e-3, name


@pytest.mark.paper
@pytest.mark.parametrize("B", [2, 3])
def test_the_policy_loss_has_the_gradient_of_the_expected_loss_on_average(B):
    """Over all combinations of the 4 possible draws of B rows of 3 bytes. gamma is 1.

    Times 1 - 1 / B, because the mean of eq. 17 includes the row itself.
    """
    model = small_model()
    y = torch.tensor([[7, 8, 9]]).expand(4, -1)
    x = F.pad(y[:, :-1], (1, 0), value=BOS)
    possible = torch.tensor([[1, 0, 0], [1, 0, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)

    def passes(a):
        out = model(x[: len(a)], uniforms_for(a))
        return out, F.logsigmoid(torch.where(a, out.l, -out.l))[:, 1:].sum(1).exp()  # pi of each

    def gradient(loss):
        return torch.autograd.grad(loss, model.policy.linear.weight)[0]

    hp = train.Hyperparameters(gamma=1.0)
    expected = 0
    for numbers in itertools.product(range(4), repeat=B):
        out, pi = passes(possible[list(numbers)])
        _, terms = train.losses(model, out, y[:B], hp)
        expected = expected + pi.prod().detach() * gradient(terms["pi"])
    exact = 0
    for a in possible:
        out, pi = passes(a[None])
        exact = exact + gradient(-pi[0] * model.head.logp(out.Z, y[:1]).mean().detach())
    assert exact.norm() > 1e-3
    torch.testing.assert_close(expected, (1 - 1 / B) * exact, atol=2e-6, rtol=1e-3)


def test_the_forced_position_teaches_the_policy_nothing():
    model, l = make_model(train.Hyperparameters(embedding_dim=32)), torch.randn(6, 5)
    l.requires_grad_()
    out = Output(torch.randn(6, 5, 32), torch.randn(6, 5, 32), l, torch.ones(6, 5))
    _, terms = train.losses(model, out, some_bytes(6, 5)[1], train.Hyperparameters())
    terms["pi"].backward()
    assert not l.grad[:, 0].any()
    assert l.grad[:, 1:].all()


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_the_discounted_return_is_the_sum_from_the_right(gamma):
    """Of a row so long that 0.9**N is 0 in float32."""
    R = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    G = R.double()
    for i in reversed(range(999)):
        G[:, i] += gamma * G[:, i + 1]
    torch.testing.assert_close(train.discounted_return(R, gamma).double(), G, atol=1e-4, rtol=1e-4)


def test_every_epoch_reads_every_row_once_in_its_own_order_on_any_number_of_processes():
    rows = np.arange(10, dtype=np.uint8)[:, None].repeat(8, 1)
    shards = [rows[:4], rows[4:8], rows[8:]]

    def read(world):
        """The number and first uniforms of every row, in the order of the run."""
        rows = []
        for first in range(0, 20, 4):
            batches = [train.micro_batches(shards, first, 4, 1, 1, rank, world, "cpu")
                       for rank in range(world)]
            for of_all_ranks in zip(*batches):
                rows += [(y[0, 0].item(), u.tolist()) for _, y, u in of_all_ranks]
        return rows

    order = [number for number, _ in read(1)]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]
    assert read(1) == read(2) == read(4)


def error_of_moments(one, other):
    """The largest relative error between two checkpoints' running means of gradients."""
    errors = []
    for number, values in one["optimizer"].items():
        for key in {"momentum", "exp_avg"} & values.keys():
            mean, other_mean = values[key], other["optimizer"][number][key]
            errors.append((other_mean - mean).norm() / mean.norm())
    return max(errors)


def test_a_training_step_does_not_depend_on_the_number_of_processes(data, tmp_path, monkeypatch):
    """Two processes become one in the middle. Some matrices are frozen."""
    program = tmp_path / "program.py"
    program.write_text("import train\nfrom common.commandline import run_program\n"
                       "make_model = train.make_model\n"
                       "def frozen(hp):\n"
                       "    model = make_model(hp)\n"
                       "    model.down[0].mlp.requires_grad_(False)\n"
                       "    return model\n"
                       "if __name__ == '__main__':\n"
                       "    train.make_model = frozen\n"
                       "    run_program(train.main)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(train, "make_model", importlib.import_module("program").frozen)
    flags = [*TINY, f"--data={data}", "--training_bytes=1024", "--effective_batch_size=8",
             "--lambda_pi=1", "--lambda_target=10",
             "--learning_rate=2e-2", "--warmup_bytes=1024"]  # no decay: one run is cut short

    def trained(name, *more, processes=1):
        arguments = [*flags, f"--out_dir={tmp_path}/{name}", *more]
        if processes == 1:
            train.main(arguments)
        else:
            command = [*TORCHRUN, f"--nproc_per_node={processes}", program, *arguments]
            path = {"PYTHONPATH": str(ROOT)}
            subprocess.run(command, check=True, cwd=ROOT, env=os.environ | path)
        return torch.load(tmp_path / name / "ckpt.pt")

    whole = trained("whole", "--batch_size=8")
    assert whole["step"] == 4
    trained("processes", "--batch_size=4", "--training_bytes=512", processes=2)
    changed = trained("processes", "--batch_size=8", "--resume=True")
    assert error_of_moments(whole, changed) < 1e-3
    logs = [[record for record in steps_of(tmp_path / name) if "auto" in record]
            for name in ("whole", "processes")]
    for one, other in zip(*logs, strict=True):
        del one["explained_variance"], other["explained_variance"]  # of the rows of one process
        assert other == pytest.approx(one, rel=1e-3, abs=1e-4)
    assert error_of_moments(whole, trained("passes", "--batch_size=2")) > 1e-2  # eq. 17 and 24
    whole = trained("uniform", "--batch_size=8", "--system=uniform")
    both = trained("both", "--batch_size=2", "--system=uniform", processes=2)
    assert error_of_moments(whole, both) < 1e-3  # and here micro-batches make no difference


def test_a_training_step_is_compiled_once_though_the_tokens_vary_and_serves_evaluation():
    torch._dynamo.reset()  # forget what other tests compiled
    model, compiled = small_model(), small_model()
    x, y = some_bytes(2, 64)
    counter = CompileCounterWithBackend("eager")
    train.compile_model(compiled, backend=counter)
    graphs = []
    for i, rate in enumerate([0.3, 0.1, 0.9, 0.5, 1.0, 0.0, 0.7]):
        a = torch.rand(2, 64, generator=torch.Generator().manual_seed(i)) < rate
        a[:, 0] = True
        expected = model(x, uniforms_for(a))
        out = compiled(x, uniforms_for(a))
        (compiled.head.logp(out.Z, y).sum() + out.l.sum()).backward()
        torch.testing.assert_close(out.Z, expected.Z, atol=1e-4, rtol=1e-4)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1] == 2  # byte layers and token layers
    hp = train.Hyperparameters(seq_len=64)
    train.evaluate(compiled, [y.byte().numpy()], hp, torch.autocast("cpu", enabled=False))
    assert counter.frame_count == 2


def test_the_first_text_does_not_wait_for_the_compiler(data, tmp_path, monkeypatch):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compile_model, evaluate, graphs = train.compile_model, train.evaluate, []

    def counted(*arguments):
        results = evaluate(*arguments)
        graphs.append(counter.frame_count)
        return results

    monkeypatch.setattr(train, "compile_model", lambda model: compile_model(model, backend=counter))
    monkeypatch.setattr(train, "evaluate", counted)
    train.main([*TINY, f"--data={data}", f"--out_dir={tmp_path}", "--compile=True",
                f"--training_bytes={STEP}"])
    assert graphs == [0, 2]


def test_it_trains_in_16_bits_as_in_32_and_float16_scales_its_loss(data, tmp_path):
    logs = {}
    for dtype in "float32", "bfloat16", "float16":
        train.main([*TINY, f"--dtype={dtype}", "--warmup_bytes=0", "--learning_rate=3e-3",
                    f"--training_bytes={24 * STEP}", f"--data={data}",
                    f"--out_dir={tmp_path}/{dtype}"])
        logs[dtype] = log_of(tmp_path / dtype)
    reached = {dtype: log[-1]["val_bpb"] for dtype, log in logs.items()}
    norms = {dtype: log[1]["grad_norm"] for dtype, log in logs.items()}
    assert reached["float32"] < 7.5  # 8 at first
    assert len(set(reached.values())) == len(set(norms.values())) == 3
    assert reached == {dtype: pytest.approx(reached["float32"], abs=0.02) for dtype in reached}
    assert norms == {dtype: pytest.approx(norms["float32"], rel=0.02) for dtype in norms}
    saved = torch.load(tmp_path / "float16/ckpt.pt")
    assert saved["scaler"]["scale"] > 1

    saved["scaler"]["scale"] = 2.0**60  # overflows: the next steps are skipped, and halve it
    torch.save(saved, tmp_path / "float16/ckpt.pt")
    train.main([f"--out_dir={tmp_path}/float16", "--resume=True", f"--training_bytes={28 * STEP}"])
    skipped = torch.load(tmp_path / "float16/ckpt.pt")
    assert skipped["scaler"]["scale"] == 2.0**56
    assert log_of(tmp_path / "float16")[-2]["grad_norm"] is None  # it was infinite
    assert not re.search("NaN|Infinity", (tmp_path / "float16/log.jsonl").read_text())
    for name, weights in saved["model"].items():
        assert torch.equal(weights, skipped["model"][name])


def test_settings_that_are_automatic_are_those_of_the_machine(data, tmp_path, monkeypatch):
    """As on a T4: float16, which needs a scaler, by itself."""
    monkeypatch.setattr(train, "device_and_dtype", lambda *_: ("cpu", "float16"))
    seen, evaluate = [], train.evaluate

    def spy(model, *arguments):
        def hook(*_):
            seen.append((torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")))
        with model.down[0].register_forward_hook(hook):
            return evaluate(model, *arguments)

    monkeypatch.setattr(train, "evaluate", spy)
    train.main([*TINY, "--dtype=auto", f"--data={data}", f"--out_dir={tmp_path}",
                f"--training_bytes={STEP}"])
    assert torch.load(tmp_path / "ckpt.pt")["scaler"]["scale"] > 1
    assert {*seen} == {(torch.float16, True)}


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_each_process_has_a_gpu_of_its_own_and_apples_do_not_compile(
        device, data, tmp_path, monkeypatch):
    calls = []

    def stop(*_):
        raise InterruptedError

    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(train, "device_and_dtype", lambda *_: (device, "float32"))
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, device: model)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: None)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *_, **__: None)
    monkeypatch.setattr(train, "evaluate", lambda *_: {"val_bpb": math.nan})
    monkeypatch.setattr(train, "write_evaluation", lambda *_: None)
    monkeypatch.setattr(train, "compile_model", lambda model: calls.append("compiled"))
    monkeypatch.setattr(train, "micro_batches", stop)
    with pytest.raises(InterruptedError):
        train.main([*TINY, f"--data={data}", f"--out_dir={tmp_path}", "--compile=True"])
    assert calls == {"cuda": [3, "compiled"], "mps": []}[device]


def test_layers_that_draw_do_so_anew_in_every_step_and_process(data, tmp_path, monkeypatch):
    seeds, micro_batches = [], train.micro_batches

    def spy(*arguments, **device):
        seeds.append(torch.initial_seed())
        return micro_batches(*arguments, **device)

    monkeypatch.setattr(train, "micro_batches", spy)
    for rank in 1, 2:
        monkeypatch.setattr(train, "RANK", rank)  # no evaluations
        train.main([*TINY, f"--data={data}", f"--out_dir={tmp_path}",
                    f"--training_bytes={3 * STEP}"])
    assert len({*seeds}) == len(seeds) == 6


def test_a_float32_run_goes_on_in_float16_and_ends_if_no_scale_helps(
        trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "out")
    flags = [f"--out_dir={tmp_path}/out", "--resume=True", "--dtype=float16", NEVER]
    train.main([*flags, f"--training_bytes={14 * STEP}"])
    assert torch.load(tmp_path / "out/ckpt.pt")["scaler"]["scale"] > 1
    losses = train.losses
    monkeypatch.setattr(
        train, "losses", lambda *z: (math.nan * losses(*z)[0], losses(*z)[1]))
    with pytest.raises(UserError, match="the gradient is not finite"):
        train.main([*flags, f"--training_bytes={99 * STEP}", "--log_interval=1000"])


def test_a_failing_compiler_is_quoted_on_one_line(data, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exec c++ --version\n'
                        'echo "x.cpp:2: fatal error: y.h is missing" >&2; exit 1\n')
    compiler.chmod(0o700)
    command = [sys.executable, ROOT / "train.py", *TINY, f"--data={data}", "--compile=True",
               f"--out_dir={tmp_path}/out", "--training_bytes=1"]
    env = os.environ | {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "fatal error: y.h is missing; use --compile=False" in done.stderr


def test_compile_reaches_the_model_on_the_cpu(data, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(train, "compile_model", compiled.append)
    for flag in "--compile=True", "--compile=False":
        train.main([*TINY, f"--data={data}", f"--out_dir={tmp_path}/{flag}", flag,
                    "--training_bytes=1"])
    assert len(compiled) == 1


def test_the_first_run_makes_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.main([*TINY, "--training_bytes=1"])
    assert (tmp_path / "data/stdlib/meta.json").exists()
    assert len(log_of(tmp_path / "out")) == 3  # at step 0, the step, at the end


# ---- Evaluation.
def test_the_metrics_of_an_evaluation_are_those_of_a_plain_count(data):
    """Also if more rows are asked for than there are, and some do not fill a batch."""
    model, shards = small_model(seq_len=32), open_shards(data, "val", 32)
    rows = np.concatenate(shards)
    assert len(rows) % 11
    hp = train.Hyperparameters(seq_len=32, batch_size=11, eval_rows=10**6)
    record = train.evaluate(model, shards, hp, torch.autocast("cpu", enabled=False))
    assert model.training
    model.eval()
    order = np.random.default_rng([0, 0]).permutation(len(rows))
    u = np.random.default_rng([0, 0, 1]).random((len(rows), 32), np.float32)
    bits, tokens, ends, lines = [], 0, [], []
    for number, row_u in zip(order, u):
        row = rows[number].tolist()
        x = torch.tensor([[BOS, *row[:-1]]])
        out = model(x, torch.from_numpy(row_u)[None])
        logp = model.head.logits(out.Z[0]).log_softmax(-1)[range(32), row]
        decisions = out.a[0].tolist()
        lines.append([*zip(row[:-1], decisions[1:], out.l[0, 1:].sigmoid().tolist())])
        bits.append(-logp.sum().item() / math.log(2) / 32)
        tokens += sum(decisions)
        ends += [chr(byte) for byte, end in zip(row[:-1], decisions[1:]) if end]
    torch.testing.assert_close(
        torch.tensor(record.pop("line")), torch.tensor(lines[0]), atol=1e-4, rtol=1e-4)
    assert record == pytest.approx({
        "val_bpb": sum(bits) / len(rows), "val_rate": tokens / (len(rows) * 32),
        "outside": sum(end in " \n" for end in ends) / len(ends)}, rel=1e-4)


def share_outside_words(text, ends):
    """Of a text of which tokens end after these characters, numbered from 0."""
    last = [len(text[: i + 1].encode()) - 1 for i in ends]
    a = torch.zeros(1, len(text.encode()), dtype=torch.bool)
    a[0, last] = True
    return train.share_outside_words(torch.tensor([[*text.encode()]]), a)


def test_tokens_that_end_outside_words_are_counted_in_characters_of_any_alphabet():
    """Marks, such as accents and the vowels of Hindi, belong to the letters before them."""
    assert share_outside_words("It’s öé Ж.", [1, 2, 3, 6, 8]) == pytest.approx(1 / 5)  # after ’
    for word in "कि", "e\u0301", "ที่", "tie\u0302\u0301ng", "שָׁלוֹם":
        assert share_outside_words(word + " " + word, range(2 * len(word) + 1)) == pytest.approx(
            1 / (2 * len(word) + 1))
    two = torch.tensor([[True, True, False]])  # ’ has three bytes; a token ends at two
    assert train.share_outside_words(torch.tensor([[*"’".encode()]]), two) == 1


def test_a_log_line_shows_the_loss_in_bits_and_the_speed_since_the_last_line(
        data, tmp_path, monkeypatch, capsys):
    """Step k takes k seconds; a line stands after every other step, and at the end.

    The first step after a line is left out, because the run's first one may compile.
    """
    clock = itertools.accumulate(k for n in itertools.count(1) for k in (0, n))
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    train.main([*TINY, f"--data={data}", f"--out_dir={tmp_path}", "--batch_size=2",
                "--log_interval=2", f"--training_bytes={5 * STEP}"])
    log = log_of(tmp_path)
    assert [record["step"] for record in log if "val_bpb" in record] == [0, 4, 5]
    steps = [record for record in log if "auto" in record]
    lines = [line for line in capsys.readouterr().out.splitlines() if "entropy" in line]
    for record, line, mean_seconds in zip(steps, lines, (2, 4, 5), strict=True):
        speed = STEP / mean_seconds
        assert record["bytes"] == record["step"] * STEP
        assert record["bytes_per_second"] == pytest.approx(speed)
        assert line.startswith(f"step {record['step']} {record['bytes']} bytes | "
                               f"{record['auto'] / math.log(2):.3f} bits/byte, ")
        minutes = (5 - record["step"]) * mean_seconds / 60
        assert line.endswith(f" {record['entropy']:.2f} bits | {speed:.0f} bytes/s, "
                             f"{minutes:.1f} min left")


def test_a_log_begins_with_the_commit_versions_data_and_hyperparameters(trained, data):
    header = json.loads((trained / "log.jsonl").read_text().splitlines()[0])
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert commit.stdout.startswith(header["commit"].removesuffix("-dirty"))
    assert header["torch"] == torch.__version__
    assert (header["device"], header["dtype"]) == ("cpu", "float32")
    assert header["hyperparameters"] == torch.load(trained / "ckpt.pt")["config"]
    rows = (data / "val_00000.bin").read_bytes()
    rows = rows[: len(rows) // 64 * 64]  # the shards keep a remainder
    assert header["held_out"] == hashlib.sha256(rows).hexdigest()


# ---- Stopping, resuming, and what is refused.
def test_a_run_begins_with_anothers_weights_and_hyperparameters_and_its_own_schedule(
        data, trained, tmp_path, capsys):
    """It also resumes, and what is not a flag comes from the other run, as gamma does here."""
    source = tmp_path / "source"
    train.main([*TINY, f"--data={data}", f"--out_dir={source}", "--gamma=0.5",
                f"--training_bytes={3 * STEP}"])
    capsys.readouterr()
    flags = [f"--out_dir={tmp_path}/out", "--seed=5", "--eval_interval=1"]
    train.main([f"--init_from={source}/ckpt.pt", *flags, f"--training_bytes={2 * STEP}"])
    assert "seed was 1 and is now 5\n" in capsys.readouterr().out
    first, *_, last = log_of(tmp_path / "out")
    assert first["val_bpb"] == log_of(source)[-1]["val_bpb"]
    assert (first["step"], last["step"]) == (0, 2)
    train.main(["--resume=True", *flags, f"--training_bytes={4 * STEP}"])
    saved = torch.load(tmp_path / "out/ckpt.pt")
    assert (saved["step"], saved["config"]["gamma"]) == (4, 0.5)
    assert "cannot change" in refused(f"--init_from={source}/ckpt.pt", "--seq_len=16",
                                      f"--out_dir={tmp_path}/other")


def test_a_part_that_is_frozen_or_unused_stays_as_it_is_and_the_rest_learns(
        data, tmp_path, monkeypatch):
    """A layer of the middle is left out of every other step."""
    make_model, run_blocks = train.make_model, UNet.transform

    def frozen(hp):
        model = make_model(hp)
        model.down.requires_grad_(False)
        model.unused = torch.nn.Linear(3, 3)
        return model

    def sometimes(model, blocks, *arguments, **options):
        if blocks is model.middle and model.training and next(calls) % 2:
            blocks = blocks[:1]
        return run_blocks(model, blocks, *arguments, **options)

    calls = itertools.count()
    monkeypatch.setattr(train, "make_model", frozen)
    monkeypatch.setattr(UNet, "transform", sometimes)
    flags = [*TINY, f"--data={data}", f"--out_dir={tmp_path}", "--n_mid_layers=2"]
    train.main([*flags, f"--training_bytes={2 * STEP}"])
    before = torch.load(tmp_path / "ckpt.pt")["model"]
    train.main([*flags, f"--training_bytes={4 * STEP}", "--resume=True"])
    after = torch.load(tmp_path / "ckpt.pt")["model"]
    for name in before:
        still = name.startswith(("down.", "unused."))
        assert torch.equal(before[name], after[name]) == still, name


def test_without_experiments_it_trains_resumes_samples_and_scores(data, tmp_path):
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common")
    program = """
import sys, sample, train
*flags, out = sys.argv[1:]
train.main([*flags, out, "--training_bytes=128"])
train.main(["--resume=True", out, "--training_bytes=256"])
sample.main([out, "--max_new_bytes=5"])
sample.main([out, f"--score={sample.__file__}"])
"""
    command = [sys.executable, "-c", program, *TINY, f"--data={data}", f"--out_dir={tmp_path}/out"]
    subprocess.run(command, cwd=tmp_path, check=True)


@pytest.mark.parametrize("function, call, step", [("losses", 6, 6), ("make_optimizer", 1, 1)])
def test_a_run_that_is_stopped_and_resumed_is_the_run_that_was_not(
        function, call, step, data, tmp_path, monkeypatch, capsys):
    """In float16, which has a GradScaler, and with dropout; test_kill.py does it in float32."""
    encode = UNet.encode
    monkeypatch.setattr(
        UNet, "encode", lambda model, *x: F.dropout(encode(model, *x), 0.1, model.training))
    flags = [*TINY, f"--data={data}", "--dtype=float16", f"--training_bytes={24 * STEP}"]
    train.main([*flags, f"--out_dir={tmp_path}/whole"])
    original, calls = getattr(train, function), itertools.count(1)

    def interrupted(*arguments):
        if next(calls) == call:
            signal.raise_signal(signal.SIGHUP)  # its terminal is closed
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train, function, interrupted)
        assert train.main([*flags, f"--out_dir={tmp_path}/out"]) == 128 + signal.SIGHUP
    hint = f"after step {step}; go on with: python train.py --resume=True --out_dir={tmp_path}/out"
    assert f"{hint}\n" in capsys.readouterr().out
    assert torch.load(tmp_path / "out/ckpt.pt")["step"] == step
    assert train.main(["--resume=auto", f"--out_dir={tmp_path}/out"]) == 0
    assert steps_of(tmp_path / "out") == steps_of(tmp_path / "whole")
    one, other = (torch.load(tmp_path / name / "ckpt.pt") for name in ("whole", "out"))
    assert one["scaler"] == other["scaler"]
    for name, weights in one["model"].items():
        assert torch.equal(weights, other["model"][name])


def test_training_goes_on_when_its_terminal_is_gone_and_nohup_is_obeyed(data, tmp_path):
    command = [sys.executable, ROOT / "train.py", *TINY, f"--data={data}", f"--out_dir={tmp_path}",
               f"--training_bytes={64 * STEP}", NEVER]
    process = subprocess.Popen(
        ["nohup", *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    process.send_signal(signal.SIGHUP)
    assert b"Error" not in process.stderr.read()
    assert process.wait() == 0
    assert torch.load(tmp_path / "ckpt.pt")["step"] == 64


def test_a_second_ctrl_c_ends_the_program_at_once(data, tmp_path):
    code = ("import os, signal, sys, train; stop = lambda: os.kill(os.getpid(), signal.SIGINT); "
            "train.losses = lambda *_: [stop(), stop(), print('goes on')]; "
            "train.main(sys.argv[1:])")
    command = [sys.executable, "-c", code, *TINY, f"--data={data}", f"--out_dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert "goes on" not in done.stdout


def test_a_flag_given_on_resume_overrides_the_checkpoint(trained, tmp_path):
    """Any hyperparameter that does not change the shapes of the weights."""
    shutil.copytree(trained, tmp_path / "out")
    flags = {"weight_decay": 0.25, "policy_softcap": 1.0, "attention_window": 4,
             "downsample_rate_target": 0.4, "training_bytes": 16 * STEP}
    train.main([f"--out_dir={tmp_path}/out", "--resume=True",
                *[f"--{key}={value}" for key, value in flags.items()]])
    model, saved = load_model(tmp_path / "out")
    assert {key: saved["config"][key] for key in flags} == flags
    assert model.hp.downsample_rate_target == 0.4


@pytest.mark.paper
def test_a_flag_given_on_resume_reaches_the_optimizer(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "out")
    decays, training_step = set(), train.training_step

    def spy(model, batches, optimizer, *others):
        decays.update(group["weight_decay"] for group in optimizer.param_groups)
        return training_step(model, batches, optimizer, *others)

    monkeypatch.setattr(train, "training_step", spy)
    train.main([f"--out_dir={tmp_path}/out", "--resume=True", "--weight_decay=0.25",
                f"--training_bytes={13 * STEP}"])
    assert decays == {0.25, 0}


def test_a_run_resumes_at_its_next_row_with_another_batch_size(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "out")
    micro_batches, first_rows = train.micro_batches, []

    def spy(shards, first_row, *others, **device):
        if not device:  # evaluations give nothing else
            first_rows.append(first_row)
        return micro_batches(shards, first_row, *others, **device)

    monkeypatch.setattr(train, "micro_batches", spy)
    train.main([f"--out_dir={tmp_path}/out", "--resume=True", "--effective_batch_size=20",
                f"--training_bytes={21 * STEP}"])  # not a whole number of steps
    assert first_rows == [12 * 4, 12 * 4 + 20]
    *_, last_step, _ = log_of(tmp_path / "out")
    assert (last_step["bytes"], last_step["minutes_left"]) == (22 * STEP, 0)


def test_a_finished_run_goes_on_with_more_bytes_and_needs_no_log(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "out")
    (tmp_path / "out/log.jsonl").unlink()
    train.main([f"--out_dir={tmp_path}/out", "--resume=True", f"--training_bytes={13 * STEP}"])
    assert [record["step"] for record in log_of(tmp_path / "out")] == [13, 13]


def test_a_hyperparameter_that_a_checkpoint_lacks_has_its_default_in_training(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "out")
    saved = torch.load(tmp_path / "out/ckpt.pt")
    del saved["config"]["gamma"]
    torch.save(saved, tmp_path / "out/ckpt.pt")
    train.main([f"--out_dir={tmp_path}/out", "--resume=True", f"--training_bytes={13 * STEP}"])
    saved = torch.load(tmp_path / "out/ckpt.pt")
    assert saved["config"]["gamma"] == train.Hyperparameters.gamma
    del saved["config"]["policy_window"]
    torch.save(saved, tmp_path / "out/ckpt.pt")
    with pytest.raises(UserError, match="another version of train.py wrote .*policy_window"):
        load_model(tmp_path / "out/ckpt.pt")


@pytest.mark.parametrize("how", [["--learning_rate=1e30"], ["--learning_rate=1e9", NEVER]])
def test_a_run_that_diverges_says_so_and_keeps_the_last_checkpoint(
        how, trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / "out")
    before = (out / "ckpt.pt").read_bytes()
    error = refused(f"--out_dir={out}", "--resume=True", "--warmup_bytes=0",
                    f"--training_bytes={64 * STEP}", *how)
    assert "is not finite; use smaller learning rates" in error
    assert (out / "ckpt.pt").read_bytes() == before


def test_weights_that_make_the_validation_loss_overflow_are_not_saved(
        data, tmp_path, monkeypatch):
    evaluate = train.evaluate

    def overflowing(*arguments):
        return evaluate(*arguments) | {"val_bpb": math.inf}

    monkeypatch.setattr(train, "evaluate", overflowing)
    with pytest.raises(UserError, match="the validation loss is not finite"):
        train.main([*TINY, f"--data={data}", f"--out_dir={tmp_path}"])
    assert not (tmp_path / "ckpt.pt").exists()


def test_a_full_disk_ends_in_one_line_and_leaves_the_checkpoint_whole(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "out")
    before = (tmp_path / "out/ckpt.pt").read_bytes()
    limited = ("import resource, runpy, sys; sys.argv = sys.argv[1:]; "
               "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
               "runpy.run_path(sys.argv[0], run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", limited, ROOT / "train.py", "--resume=True",
                           f"--out_dir={tmp_path}/out", f"--training_bytes={16 * STEP}"],
                          capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot write" in done.stderr
    assert (tmp_path / "out/ckpt.pt").read_bytes() == before


def test_a_second_run_in_a_folder_is_refused(data, tmp_path):
    flags = [*TINY, f"--data={data}", f"--out_dir={tmp_path}", "--training_bytes=1e9", NEVER]
    command = [sys.executable, ROOT / "train.py", *flags]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert any(line.startswith("step 1 ") for line in first.stdout)
        error = refused(*flags, "--training_bytes=512")
    finally:
        first.kill()
        first.communicate()
    assert f"another process is writing to {tmp_path}" in error


class Payload:
    """What a malicious checkpoint would make torch.load do."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_a_damaged_or_malicious_checkpoint_is_refused(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ckpt.pt"
    whole = (trained / "ckpt.pt").read_bytes()
    for damaged in whole[:-1000], b"", b"not a checkpoint":
        path.write_bytes(damaged)
        message = "ckpt.pt is damaged, or is no checkpoint of train.py"
        assert message in refused(f"--out_dir={tmp_path}", "--resume=True")
    for other in {"config": Payload()}, {"model": {}}, [1]:
        torch.save(other, path)
        assert message in refused(f"--out_dir={tmp_path}", "--resume=True")
    assert not (tmp_path / "executed").exists()


def test_sigterm_to_one_process_of_several_stops_all_with_a_checkpoint(data, tmp_path):
    command = [*TORCHRUN, "--nproc_per_node=2", ROOT / "train.py", *TINY, f"--data={data}", NEVER,
               f"--out_dir={tmp_path}", "--batch_size=2", "--training_bytes=1e9"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(60, process.terminate)  # if one of the two waits for ever
    watchdog.daemon = True
    watchdog.start()
    for line in process.stdout:
        if line.startswith("step 2 "):
            children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True)
            os.kill(int(children.stdout.split()[-1]), signal.SIGTERM)
            break
    rest = process.stdout.read()
    assert process.wait() == 1  # torchrun's code for any failure; the process ended with 143
    step = torch.load(tmp_path / "ckpt.pt")["step"]
    assert f"ended after step {step}; go on with: torchrun ... train.py --resume=True" in rest


def test_a_stray_RANK_does_not_count_without_WORLD_SIZE(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert runpy.run_path(ROOT / "train.py")["RANK"] == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert runpy.run_path(ROOT / "train.py")["RANK"] == 1


def test_a_run_is_not_overwritten_nor_its_log(trained, data, tmp_path):
    before = (trained / "ckpt.pt").read_bytes()
    assert "--resume=True" in refused(f"--data={data}", f"--out_dir={trained}")
    assert (trained / "ckpt.pt").read_bytes() == before
    shutil.copy(trained / "log.jsonl", tmp_path)  # but no checkpoint
    flags = [f"--data={data}", f"--out_dir={tmp_path}", "--training_bytes=1"]
    error = refused(*flags, "--resume=auto")
    assert error == (f"{tmp_path}/log.jsonl is the log of another run; remove it, or use another "
                     "--out_dir")
    lines = (trained / "log.jsonl").read_text().splitlines(True)
    assert (tmp_path / "log.jsonl").read_text() == "".join(lines)
    (tmp_path / "log.jsonl").write_text("".join(lines[:2]))  # the evaluation before the first step
    train.main([*TINY, *flags, "--resume=auto"])
    assert len(log_of(tmp_path)) == 3


def test_a_checkpoint_that_is_a_link_stays_one(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "disk")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/ckpt.pt").symlink_to("../disk/ckpt.pt")
    train.main([f"--out_dir={tmp_path}/out", "--resume=True", f"--training_bytes={13 * STEP}"])
    assert (tmp_path / "out/ckpt.pt").is_symlink()
    assert torch.load(tmp_path / "disk/ckpt.pt")["step"] == 13


def test_a_warm_up_that_does_not_end_is_pointed_out(data, tmp_path, capsys):
    train.main([*TINY, f"--data={data}", f"--out_dir={tmp_path}", "--training_bytes=128",
                "--warmup_bytes=128"])
    assert "warmup_bytes=128 is not below training_bytes=128, so" in capsys.readouterr().out


@pytest.mark.parametrize("error", [MemoryError, RuntimeError("can't allocate memory"), OSError])
def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged(
        error, trained, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        load_model(trained)


def test_a_checkpoint_of_another_shape_or_meaning_is_refused(trained):
    error = refused(f"--out_dir={trained}", "--resume=True", "--n_mid_layers=3")
    assert error == f"n_mid_layers cannot change; it was 1 in {trained}/ckpt.pt, now it is 3"
    # the weights would fit, but mean something else, and Muon's moments are not AdamW's
    for flag in "--seq_len=16", "--num_heads=1":
        assert "cannot change; it was" in refused(f"--out_dir={trained}", "--resume=True", flag)
    error = refused(f"--out_dir={trained}", "--resume=True", "--muon_learning_rate=0")
    assert "muon_learning_rate cannot become or stop being 0" in error


@pytest.mark.paper
@pytest.mark.parametrize("name, flags, count, values", [  # Table 2
    ("fineweb_147m", [], 146_937_600, (1.5e-3, 128, 4.5e8, 6e9, 1 / 5)),
    ("codeparrot_90m", [], 90_296_064, (2e-3, 128, 2.5e8, 3.4e9, 1 / 5)),
    ("aspect_ratio", ["--n_mid_layers=2", "--downsample_rate_target=1/2"], 23_489_024,
     (3e-3, 64, 1.1e8, 1.5e9, 1 / 2)),
    ("aspect_ratio", [], 31_881_728, (3e-3, 64, 1.1e8, 1.5e9, 1 / 4)),
    ("aspect_ratio", ["--n_mid_layers=6", "--downsample_rate_target=1/6"], 40_274_432,
     (3e-3, 64, 1.1e8, 1.5e9, 1 / 6)),
])
def test_the_papers_configurations_have_the_papers_sizes_and_values(name, flags, count, values):
    path = str(ROOT / "config" / f"{name}.py")
    hp = train.Hyperparameters(**read_command_line([path, *flags], train.Hyperparameters))
    with torch.device("meta"):
        model = make_model(hp)
    hp = vars(hp)
    assert sum(p.numel() for p in model.parameters()) == count
    keys = "learning_rate effective_batch_size warmup_bytes training_bytes downsample_rate_target"
    assert tuple(hp[key] for key in keys.split()) == values
    assert (hp["muon_learning_rate"], hp["cosine"]) == (0, True)
    keys = "seq_len attention_window policy_window policy_scale num_heads"
    heads = hp["embedding_dim"] // 64
    assert tuple(hp[key] for key in keys.split()) == (4096, 64, 8, 16, heads)
    keys = "gamma lambda_pi lambda_target lambda_early"
    assert tuple(hp[key] for key in keys.split()) == (0.99, 1e-2, 1e-2, 1e-1)
