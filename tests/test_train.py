"""train.py: the loop, data order, evaluation, and stopping and resuming."""
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

import train
from config.command_line import read_command_line
from conftest import ROOT, TINY, run
from experiments.measures import where_tokens_end
from model import BOS, Model, load_checkpoint, make_model
from prepare import open_shards
from test_model import small_model, some_bytes, uniforms_for

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
NEVER = "--eval_interval=1000000"
STEP = 4 * 32  # bytes in a training step of TINY


def log_of(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def steps_of(out):
    """The log without what depends on the clock."""
    return [{k: v for k, v in record.items() if k != "bytes_per_second"} for record in log_of(out)]


def refused(capsys, *arguments):
    """Runs train.py, which must end with exit code 2; returns the one line on stderr."""
    with pytest.raises(SystemExit) as stopped:
        train.main([*TINY, *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2
    assert error.count("\n") == 1
    return error


# ---- The loop.
@pytest.mark.parametrize("K", [1, 2])
def test_training_steps_are_those_of_the_written_equations(K, data, tmp_path):
    """Six steps of 8 rows in two micro-batches, against a loop that shares only the model.

    Covers row order, draws, eq. 15-18 and 24-27, clipping, AdamW, Muon (with K = 2) and what they
    decay, warm-up, cosine (K = 1), the policy's own learning rate, and the terms of the second
    micro-batch, which are logged.
    """
    N, rows_per_step, steps, seed = 32, 8, 6, 7
    lr, policy_lr, decay = 1e-2, 0.05, 0.5
    muon_lr = {1: 0.0, 2: 0.04}[K]
    clip = {1: 0.3, 2: 100.0}[K]  # once it matters, once it does not
    lambda_pi, lambda_target, lambda_early, gamma, target = 0.3, 0.2, 0.1, 0.9, 0.2
    total = steps * rows_per_step * N
    warmup = 2 * rows_per_step * N
    train.main([
        *TINY, f"--data={data}", f"--out_dir={tmp_path}", f"--seed={seed}", f"--num_draws={K}",
        f"--early_exit={K == 1}", "--redrawn=0.5", f"--gamma={gamma}", f"--lambda_pi={lambda_pi}",
        f"--lambda_target={lambda_target}", f"--lambda_early={lambda_early}",
        f"--effective_batch_size={rows_per_step}", "--batch_size=4", f"--training_bytes={total}",
        f"--learning_rate={lr}", f"--warmup_bytes={warmup}", f"--muon_learning_rate={muon_lr}",
        f"--cosine={K == 1}",
        f"--policy_learning_rate={policy_lr}", f"--weight_decay={decay}", f"--grad_clip={clip}"])
    trained, _ = load_checkpoint(tmp_path / "ckpt.pt")
    reached = dict(trained.named_parameters())
    logged = [record for record in log_of(tmp_path) if "auto" in record]

    torch.manual_seed(seed)
    model = Model(trained.config).train()
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    m = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    v = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    rows = np.fromfile(data / "train_00000.bin", np.uint8).reshape(-1, N)
    order = np.random.default_rng([seed, 0]).permutation(len(rows))
    i, j = torch.arange(N)[:, None], torch.arange(N)
    discount = torch.where(j >= i, gamma ** (j - i).float(), 0.0)

    def log_p(head, Z, y):
        logits = 30 * torch.tanh(head.linear(head.norm(Z)) / 30)
        return logits.log_softmax(-1).gather(2, y[..., None])[..., 0]

    for step in range(1, steps + 1):
        first_row = (step - 1) * rows_per_step
        after = step * rows_per_step * N
        u = np.random.default_rng([seed, 1, first_row]).random((K, rows_per_step, N), np.float32)
        L = 0
        for part in (slice(0, 4), slice(4, 8)):
            numbers = order[first_row : first_row + rows_per_step][part]
            y = torch.from_numpy(rows[numbers].astype(int))
            x = torch.cat((torch.full((4, 1), BOS), y[:, :-1]), 1)
            X = model.encode(x)
            table = model.policy(X)  # (B, N, 2)
            a, l, G = [], [], []
            for k in range(K):
                uniforms = torch.from_numpy(u[k, part])
                if k > 0:
                    uniforms[2:] = torch.from_numpy(u[0, part])[2:]  # these rows are drawn once
                a_k, l_k = torch.ones(4, N), [table[:, 0, 0]]
                for i in range(1, N):
                    l_i = table[torch.arange(4), i, a_k[:, i - 1].long() if i > 1 else 1]
                    a_k[:, i] = uniforms[:, i] < l_i.sigmoid()
                    l_k.append(l_i)
                a.append(a_k.bool())
                l.append(torch.stack(l_k, 1))
                logp = log_p(model.head, model.predict(X if k == 0 else X.detach(), a[k]), y)
                reward = logp
                if k == 0:
                    L_auto = -logp.mean()
                L_early = torch.tensor(0.0)
                if K == 1:
                    early_logp = log_p(model.early_head, X, y)
                    L_early = -early_logp.mean()
                    reward = logp - early_logp
                G.append(reward.detach() @ discount.T)
            A = [G[0] - G[0].mean(0)] if K == 1 else [G[0] - G[1], G[1] - G[0]]
            log_pi = [torch.where(a[k], l[k].sigmoid(), 1 - l[k].sigmoid()).log() for k in range(K)]
            L_pi = sum(-(log_pi[k] * A[k])[:, 1:].sum() for k in range(K)) / (K * 4 * N)
            mean_l = torch.stack(l).mean()
            mean_p = torch.stack(l).sigmoid().mean().item()
            L_tgt = mean_l * (mean_p - target)
            L = L + (L_auto + lambda_early * L_early + lambda_pi * L_pi + lambda_target * L_tgt) / 2
        expected = {"auto": L_auto, "early": L_early, "pi": L_pi, "target": L_tgt,
                    "rate": a[0].float().mean(), "entropy": -log_pi[0][:, 1:].mean()}
        for name, value in expected.items():
            assert logged[step - 1][name] == pytest.approx(value.item(), rel=1e-3, abs=1e-4), name
        model.zero_grad()
        L.backward()
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad
                 for name, p in model.named_parameters()}
        norm = sum(g.square().sum() for g in grads.values()).sqrt().item()
        assert (norm > clip) == (K == 1)
        done = max(after - warmup, 0) / (total - warmup)
        fall = (1 + math.cos(math.pi * done)) / 2 if K == 1 else 1 - done
        scale = min(after / warmup, 1) * fall
        with torch.no_grad():
            for name, p in model.named_parameters():
                g = grads[name] * min(clip / norm, 1)
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
                lr_now = lr * scale
                if name == "policy.linear.weight":
                    lr_now = policy_lr * scale
                elif p.dim() == 2:
                    p *= 1 - lr_now * decay
                m_hat = m[name] / (1 - 0.9**step)
                v_hat = v[name] / (1 - 0.999**step)
                p -= lr_now * m_hat / (v_hat.sqrt() + 1e-8)
    assert model.policy.linear.weight.abs().max() > 5e-3
    for name, p in model.named_parameters():
        error = (reached[name] - p).norm() / (p - initial[name]).norm()
        assert error < 1e-3, name


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_the_discounted_return_is_the_sum_from_the_right(gamma):
    """Of a row so long that 0.9**N is 0 in float32."""
    R = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    G = R.double()
    for i in reversed(range(999)):
        G[:, i] += gamma * G[:, i + 1]
    torch.testing.assert_close(train.discounted_return(R, gamma).double(), G, atol=1e-4, rtol=1e-4)


def test_every_epoch_reads_every_row_once_in_its_own_order_on_any_number_of_processes():
    shards = [np.arange(10, dtype=np.uint8)[:, None].repeat(8, 1)]
    hp = SimpleNamespace(seed=1, effective_batch_size=4, batch_size=1, seq_len=8, num_draws=1,
                         boundaries="learned")

    def read(world):
        """The number and first uniform of every row, in the order of the run."""
        rows = []
        for first in range(0, 20, 4):
            batches = [train.micro_batches(shards, first, hp, rank, world, "cpu")
                       for rank in range(world)]
            for of_all_ranks in zip(*batches):
                rows += [(y[0, 0].item(), u[0, 0, 0].item()) for _, y, u in of_all_ranks]
        return rows

    order = [number for number, _ in read(1)]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]
    assert read(1) == read(2) == read(4)


def error_of_moments(one, other):
    """The largest relative error between two checkpoints' running means of gradients."""
    errors = []
    for name, state in one["optimizer"].items():
        key = "momentum" if "momentum" in state else "exp_avg"
        mean = state[key]
        other_mean = other["optimizer"][name][key]
        errors.append((other_mean - mean).norm() / mean.norm())
    return max(errors)


def test_a_training_step_does_not_depend_on_the_number_of_processes(data, tmp_path):
    """Nor, without eq. 24, on the number of micro-batches. Processes change in the middle."""
    flags = [*TINY, f"--data={data}", "--training_bytes=1024", "--effective_batch_size=8",
             "--num_draws=2", "--redrawn=1", "--lambda_pi=1", "--lambda_target=10",
             "--learning_rate=2e-2", "--warmup_bytes=1024"]  # no decay: one run is cut short

    def trained(name, *more, processes=1):
        arguments = [*flags, f"--out_dir={tmp_path}/{name}", *more]
        if processes == 1:
            train.main(arguments)
        else:
            command = [*TORCHRUN, f"--nproc_per_node={processes}", ROOT / "train.py", *arguments]
            subprocess.run(command, check=True, cwd=ROOT)
        return torch.load(tmp_path / name / "ckpt.pt")

    whole = trained("whole", "--batch_size=8")
    assert whole["model"]["policy.linear.weight"].abs().mean() > 5e-3
    assert whole["step"] == 4
    trained("processes", "--batch_size=4", "--training_bytes=512", processes=2)
    changed = trained("processes", "--batch_size=2", "--resume=True", processes=4)
    assert error_of_moments(whole, changed) < 1e-3
    logs = [[record for record in steps_of(tmp_path / name) if "auto" in record]
            for name in ("whole", "processes")]
    for one, other in zip(*logs, strict=True):
        del one["flops_per_byte"], other["flops_per_byte"]  # depends on each process's longest row
        assert other == pytest.approx(one, rel=1e-3, abs=1e-4)
    assert error_of_moments(whole, trained("passes", "--batch_size=2")) > 1e-2  # eq. 24
    whole = trained("untargeted", "--batch_size=8", "--lambda_target=0")
    both = trained("both", "--batch_size=2", "--lambda_target=0", processes=2)
    assert error_of_moments(whole, both) < 1e-3


def gradients(rows, wrap=lambda model: model):
    """Gradients of L on some of 4 rows with fixed boundaries, by the paper's estimator."""
    model = small_model().train()
    (x, y), generator = some_bytes(4, 32), torch.Generator().manual_seed(2)
    a = torch.rand(4, 32, generator=generator) < 0.3
    a[:, 0] = True
    net = wrap(model)
    outputs = net(x[rows], y[rows], uniforms_for(a[None, rows]))
    hp = SimpleNamespace(boundaries="learned", gamma=0.99, downsample_rate_target=0.5, lambda_pi=1,
                         lambda_target=10, lambda_early=1)
    L, _ = train.losses(model, *outputs, hp)
    L.backward()
    return [p.grad for p in model.parameters()]


def one_of_two(rank, store, results):
    counter = CompileCounterWithBackend("eager")

    def wrap(model):
        train.compile_model(model, backend=counter)
        dist._DEFAULT_FIRST_BUCKET_BYTES = 100  # so that even these small blocks could be cut
        return DistributedDataParallel(model, bucket_cap_mb=1e-3)

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    grads = gradients(slice(2 * rank, 2 * rank + 2), wrap)
    if rank == 0:
        torch.save((grads, counter.frame_count), results)
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_give_the_gradient_of_one_and_their_blocks_compile_whole(tmp_path):
    mp.spawn(one_of_two, args=(tmp_path / "store", tmp_path / "results"), nprocs=2)
    grads, graphs = torch.load(tmp_path / "results")
    for one, two in zip(gradients(slice(0, 4)), grads):
        torch.testing.assert_close(two, one, atol=1e-5, rtol=1e-4)
    assert graphs == 4  # byte layers, token layers, heads, policy


@pytest.mark.parametrize("K", [1, 2])
def test_a_training_step_is_compiled_once_though_the_number_of_tokens_varies(K):
    torch._dynamo.reset()  # forget what other tests compiled
    model, compiled = small_model().train(), small_model().train()
    x, y = some_bytes(2, 64)
    counter = CompileCounterWithBackend("eager")
    train.compile_model(compiled, backend=counter)
    graphs = []
    for i, rate in enumerate([0.3, 0.1, 0.9, 0.5, 1.0, 0.0, 0.7]):
        a = torch.rand(K, 2, 64, generator=torch.Generator().manual_seed(i)) < rate
        a[..., 0] = True
        expected = model(x, y, uniforms_for(a))
        outputs = compiled(x, y, uniforms_for(a))
        (outputs[0].sum() + outputs[2].sum()).backward()
        torch.testing.assert_close(outputs[0], expected[0], atol=1e-4, rtol=1e-4)
        graphs.append(counter.frame_count)
    # byte layers, token layers and head, with gradient and for K = 2 without; and the policy
    assert graphs[0] == graphs[-1] == 3 * K + 1


def test_it_trains_in_16_bits_as_in_32_and_float16_scales_its_loss(data, tmp_path):
    reached = {}
    for dtype in "float32", "bfloat16", "float16":
        train.main([*TINY, f"--dtype={dtype}", "--warmup_bytes=0", "--learning_rate=1e-2",
                    f"--training_bytes={24 * STEP}", f"--data={data}",
                    f"--out_dir={tmp_path}/{dtype}"])
        reached[dtype] = log_of(tmp_path / dtype)[-1]["val_bpb"]
    assert reached["float32"] < 7.5  # 8 at first
    assert len(set(reached.values())) == 3
    assert reached == {dtype: pytest.approx(reached["float32"], abs=0.1) for dtype in reached}
    saved = torch.load(tmp_path / "float16/ckpt.pt")
    assert saved["scaler"]["scale"] > 1

    saved["scaler"]["scale"] = 2.0**60  # overflows: the next steps are skipped, and halve it
    torch.save(saved, tmp_path / "float16/ckpt.pt")
    train.main([f"--out_dir={tmp_path}/float16", "--resume=True", f"--training_bytes={28 * STEP}"])
    skipped = torch.load(tmp_path / "float16/ckpt.pt")
    assert skipped["scaler"]["scale"] == 2.0**56
    for name, weights in saved["model"].items():
        assert torch.equal(weights, skipped["model"][name])


# ---- Evaluation.
def test_the_metrics_of_an_evaluation_are_those_of_a_plain_count(data):
    model, shards = small_model(seq_len=32), open_shards(data, "val", 32)
    metrics, shown = train.evaluate(model, shards, 6, 4, torch.autocast("cpu", enabled=False))
    model.eval()
    rows = np.concatenate(shards)
    rows = [rows[i] for i in np.linspace(0, len(rows) - 1, 6).astype(int)]
    generator = torch.Generator().manual_seed(0)
    u = [*torch.rand(4, 32, generator=generator), *torch.rand(2, 32, generator=generator)]
    bits, tokens, entropy = [], 0, []
    for row, row_u in zip(rows, u):
        x, y = torch.tensor([[BOS, *row[:-1]]]), torch.tensor([[*row.tolist()]])
        logp, _, l, a = model(x, y, row_u[None, None])
        p = l[0, 0].sigmoid().tolist()
        decisions = a[0, 0].tolist()
        if not bits:
            assert shown == [(byte, decision, pytest.approx(q, rel=1e-4)) for byte, decision, q in
                             zip(row[:-1].tolist(), decisions[1:], p[1:])]
        bits.append(-logp[0, 0].sum().item() / math.log(2) / 32)
        tokens += sum(decisions)
        entropy += [-math.log(q if decision else 1 - q)
                    for q, decision in zip(p[1:], decisions[1:])]
    expected = {
        "val_bpb": sum(bits) / 6, "val_stderr": np.std(bits, ddof=1) / math.sqrt(6),
        "val_rate": tokens / (6 * 32), "val_entropy": sum(entropy) / len(entropy)}
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-4)


def test_the_validation_line_shows_the_metrics_of_validation_rows(data, trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "out")
    train.main([f"--out_dir={tmp_path}/out", "--resume=True", f"--training_bytes={13 * STEP}"])
    model, _ = load_checkpoint(tmp_path / "out/ckpt.pt")
    metrics, _ = train.evaluate(model, open_shards(data, "val", 32), 8, 2,
                                torch.autocast("cpu", enabled=False))
    logged = log_of(tmp_path / "out")[-1]
    assert {key: logged[key] for key in metrics} == pytest.approx(metrics, rel=1e-4)
    line = next(line for line in capsys.readouterr().out.splitlines() if "step 13 val" in line)
    assert line == (
        f"step 13 val {metrics['val_bpb']:.3f} bits/byte, rate {metrics['val_rate']:.3f} | "
        f"{metrics['ends_between']:.0%} of tokens end between words")


def test_a_log_line_shows_the_loss_in_bits_and_the_speed_since_the_last_line(
        data, tmp_path, monkeypatch, capsys):
    seconds = itertools.count(step=60)  # the clock's next reading is always a minute later
    monkeypatch.setattr(train.time, "perf_counter", lambda: next(seconds))
    train.main([*TINY, f"--data={data}", f"--out_dir={tmp_path}", f"--training_bytes={4 * STEP}"])
    steps = [record for record in log_of(tmp_path) if "auto" in record]
    lines = [line for line in capsys.readouterr().out.splitlines() if "entropy" in line]
    for record, line in zip(steps, lines, strict=True):
        assert record["bytes_per_second"] == STEP / 60
        assert f"| {record['auto'] / math.log(2):.3f} bits/byte, " in line
        assert f"{4 - record['step']:.1f} min left" in line


def test_where_tokens_end_is_counted_against_words():
    x = torch.tensor([[BOS, *"It’s öé Ж".encode()]])
    ends = 0, 2, 3, 4, 5, 6, 8, 9, 11, 13  # <bos>; t; in ’, in it, ’; s; in ö, ö; é; in Ж
    a = torch.tensor([[i in ends for i in range(x.size(1))]])
    expected = {"ends_before": 2 / 9, "ends_between": 1 / 9, "ends_after": 2 / 9,
                "ends_within": 4 / 9}
    assert where_tokens_end(x, a) == pytest.approx(expected)


# ---- Stopping, resuming, and what is refused.
def test_a_run_that_is_stopped_and_resumed_is_the_run_that_was_not(
        data, tmp_path, monkeypatch, capsys):
    """In float16, which has a GradScaler; test_kill.py does it in float32."""
    flags = [*TINY, f"--data={data}", "--dtype=float16", f"--training_bytes={24 * STEP}"]
    train.main([*flags, f"--out_dir={tmp_path}/whole"])
    losses, calls = train.losses, itertools.count(1)

    def interrupted(*arguments):
        if next(calls) == 6:
            signal.raise_signal(signal.SIGINT)
        return losses(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train, "losses", interrupted)
        patch.setattr(train, "stop_signals", [])
        train.main([*flags, f"--out_dir={tmp_path}/out"])
    hint = f"stopped after step 6; continue with --resume=True --out_dir={tmp_path}/out\n"
    assert hint in capsys.readouterr().out
    assert torch.load(tmp_path / "out/ckpt.pt")["step"] == 6
    train.main(["--resume=True", f"--out_dir={tmp_path}/out"])
    assert steps_of(tmp_path / "out") == steps_of(tmp_path / "whole")
    one, other = (torch.load(tmp_path / name / "ckpt.pt") for name in ("whole", "out"))
    assert one["scaler"] == other["scaler"]
    for name, weights in one["model"].items():
        assert torch.equal(weights, other["model"][name])


def test_a_second_ctrl_c_ends_the_program_at_once(data, tmp_path):
    code = ("import os, signal, sys, train; stop = lambda: os.kill(os.getpid(), signal.SIGINT); "
            "train.losses = lambda *_: [stop(), stop(), print('goes on')]; "
            "train.main(sys.argv[1:])")
    command = [sys.executable, "-c", code, *TINY, f"--data={data}", f"--out_dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert "goes on" not in done.stdout


def test_a_flag_given_on_resume_overrides_the_checkpoint(trained, tmp_path, monkeypatch):
    """Any hyperparameter that does not change the shapes of the weights."""
    shutil.copytree(trained, tmp_path / "out")
    decays = []

    class AdamW(torch.optim.AdamW):
        def step(self):
            decays[:] = [group["weight_decay"] for group in self.param_groups]
            super().step()

    monkeypatch.setattr(torch.optim, "AdamW", AdamW)
    flags = {"weight_decay": 0.25, "redrawn": 1.0, "policy_softcap": 1.0, "attention_window": 4,
             "downsample_rate_target": 0.4, "num_draws": 3, "training_bytes": 16 * STEP,
             "muon_learning_rate": 1e-3}
    train.main([f"--out_dir={tmp_path}/out", "--resume=True",
                *[f"--{key}={value}" for key, value in flags.items()]])
    model, saved = load_checkpoint(tmp_path / "out/ckpt.pt")
    assert {key: saved["config"][key] for key in flags} == flags
    assert model.config.downsample_rate_target == 0.4
    assert decays == [0.25, 0, 0]


def test_a_run_from_before_a_hyperparameter_existed_takes_its_default(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "out")
    saved = torch.load(tmp_path / "out/ckpt.pt")
    del saved["config"]["gamma"], saved["config"]["policy_scale"]
    torch.save(saved, tmp_path / "out/ckpt.pt")
    load_checkpoint(tmp_path / "out/ckpt.pt")
    assert capsys.readouterr().err == "ModelConfig's defaults are used for policy_scale\n"
    train.main([f"--out_dir={tmp_path}/out", "--resume=True"])
    lines = capsys.readouterr().out.splitlines()
    assert "does not set gamma; using the default, 0.97" in lines[0]
    assert "does not set policy_scale; using the default, 16.0" in lines[1]
    del saved["config"]["seq_len"]
    torch.save(saved, tmp_path / "out/ckpt.pt")
    error = refused(capsys, f"--out_dir={tmp_path}/out", "--resume=True", "--seq_len=64")
    assert "seq_len cannot change when a run resumes; it was 256" in error
    saved["config"]["temperature"] = 1.0
    torch.save(saved, tmp_path / "out/ckpt.pt")
    error = refused(capsys, f"--out_dir={tmp_path}/out", "--resume=True")
    assert "sets temperature, which train.py does not know" in error


@pytest.mark.parametrize("how", [["--learning_rate=1e30"], ["--learning_rate=1e9", NEVER]])
def test_a_run_that_diverges_ends_in_one_line_and_keeps_the_last_checkpoint(
        how, trained, tmp_path):
    out = shutil.copytree(trained, tmp_path / "out")
    before = (out / "ckpt.pt").read_bytes()
    _, error = run("train.py", f"--out_dir={out}", "--resume=True", "--warmup_bytes=0",
                   f"--training_bytes={64 * STEP}", *how, code=1)
    assert error.count("\n") == 1
    assert "is not finite; use a smaller learning_rate" in error
    assert (out / "ckpt.pt").read_bytes() == before


def test_weights_that_make_the_validation_loss_overflow_are_not_saved(data, tmp_path):
    with pytest.raises(FloatingPointError, match="step 1: the validation loss is not finite"):
        train.main([*TINY, f"--data={data}", f"--out_dir={tmp_path}", "--eval_interval=1",
                    "--warmup_bytes=0", "--muon_learning_rate=1e30"])
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


def test_a_second_run_in_a_folder_is_refused(data, tmp_path, capsys):
    flags = [*TINY, f"--data={data}", f"--out_dir={tmp_path}", "--training_bytes=1e9", NEVER]
    command = [sys.executable, ROOT / "train.py", *flags]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert any(line.startswith("step 1 ") for line in first.stdout)
        error = refused(capsys, *flags, "--training_bytes=512")
    finally:
        first.kill()
        first.communicate()
    assert f"another process is writing to {tmp_path}" in error


class Payload:
    """What a malicious checkpoint would make torch.load do."""

    def __reduce__(self):
        return print, ("executed",)


def test_a_damaged_or_malicious_checkpoint_is_refused(trained, tmp_path, capsys):
    path = tmp_path / "ckpt.pt"
    whole = (trained / "ckpt.pt").read_bytes()
    for damaged in whole[:-1000], b"", b"not a checkpoint":
        path.write_bytes(damaged)
        assert "is damaged, or not a checkpoint" in refused(
            capsys, f"--out_dir={tmp_path}", "--resume=True")
    torch.save({"config": Payload()}, path)
    assert "is damaged" in refused(capsys, f"--out_dir={tmp_path}", "--resume=True")
    torch.save({"model": {}}, path)
    assert "is not a checkpoint of train.py" in refused(
        capsys, f"--out_dir={tmp_path}", "--resume=True")


def test_processes_that_see_different_data_end_in_one_line(data, tmp_path):
    """As on two nodes without a shared disk."""
    other = shutil.copytree(data, tmp_path / "data")
    with open(other / "meta.json", "a") as file:
        file.write("\n")
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    processes = []
    for rank, folder in enumerate([data, other]):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
                            "MASTER_PORT": str(port)}
        command = [sys.executable, ROOT / "train.py", *TINY, f"--data={folder}", "--batch_size=2",
                   "--training_bytes=512", f"--out_dir={tmp_path}/{rank}"]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE))
    for process in processes:
        _, error = process.communicate()
        assert process.returncode == 2
        assert b"train.py: the processes see different checkpoints or data" in error


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
    assert process.wait() == 0
    step = torch.load(tmp_path / "ckpt.pt")["step"]
    assert f"stopped after step {step}; continue with --resume=True" in rest


def test_a_finished_run_is_not_overwritten(trained, data, capsys):
    before = (trained / "ckpt.pt").read_bytes()
    assert "--resume=True" in refused(capsys, f"--data={data}", f"--out_dir={trained}")
    assert (trained / "ckpt.pt").read_bytes() == before


def test_a_checkpoint_of_another_shape_or_meaning_is_refused(trained, capsys):
    error = refused(capsys, f"--out_dir={trained}", "--resume=True", "--n_mid_layers=3")
    assert "ckpt.pt does not fit the model" in error
    assert "middle.2" in error
    # the weights would fit, but mean something else, and Muon's moments are not AdamW's
    for flag in "--seq_len=16", "--num_heads=1", "--muon_learning_rate=0":
        error = refused(capsys, f"--out_dir={trained}", "--resume=True", flag)
        assert "cannot change" in error
        assert "when a run resumes" in error


@pytest.mark.parametrize("name, flags, count, values", [  # Table 2
    ("fineweb_147m", [], 146_939_136, (1.5e-3, 128, 4.5e8, 6e9, 1 / 5)),
    ("codeparrot_90m", [], 90_297_600, (2e-3, 128, 2.5e8, 3.4e9, 1 / 5)),
    ("aspect_ratio", ["--n_mid_layers=2", "--downsample_rate_target=1/2"], 23_490_048,
     (3e-3, 64, 1.1e8, 1.5e9, 1 / 2)),
    ("aspect_ratio", [], 31_882_752, (3e-3, 64, 1.1e8, 1.5e9, 1 / 4)),
    ("aspect_ratio", ["--n_mid_layers=6", "--downsample_rate_target=1/6"], 40_275_456,
     (3e-3, 64, 1.1e8, 1.5e9, 1 / 6)),
])
def test_the_papers_configurations_have_the_papers_sizes_and_values(name, flags, count, values):
    path = str(ROOT / "config" / f"{name}.py")
    hp = train.DEFAULTS | read_command_line([path, *flags], train.DEFAULTS)
    with torch.device("meta"):
        model = make_model(hp)
    assert sum(p.numel() for p in model.parameters()) == count
    keys = "learning_rate effective_batch_size warmup_bytes training_bytes downsample_rate_target"
    assert tuple(hp[key] for key in keys.split()) == values
    assert hp["policy_learning_rate"] == values[0]
    assert (hp["muon_learning_rate"], hp["cosine"]) == (0, True)
    assert hp["early_exit"]
    keys = "seq_len attention_window policy_window policy_scale num_draws"
    assert tuple(hp[key] for key in keys.split()) == (4096, 64, 8, 16, 1)
    keys = "gamma lambda_pi lambda_target lambda_early"
    assert tuple(hp[key] for key in keys.split()) == (0.99, 1e-2, 1e-2, 1e-1)
