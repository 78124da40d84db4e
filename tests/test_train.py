import json
import math
import shutil
import signal
import subprocess
import sys
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
from model import BOS, Model, ModelConfig, load_checkpoint
from prepare import open_shards
from test_model import small_model, some_bytes, uniforms_for

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
NEVER = "--eval_interval=1000000"


def log_of(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def steps_of(out):
    return [{k: v for k, v in record.items() if k != "bytes_per_second"} for record in log_of(out)]


def refused(capsys, *arguments):
    """Runs train.py, which must end with exit code 2; returns the one line that it says."""
    with pytest.raises(SystemExit) as stopped:
        train.main([*TINY, *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1
    return error


# ---- The loop.


@pytest.mark.parametrize("K", [1, 2])
def test_the_loop_takes_the_steps_that_the_equations_written_down_take(K, data, tmp_path):
    """Six steps of 8 rows in two passes: rows, draws, eq. 15-18 and 24-27, clipping, AdamW and what
    it decays, warm-up and cosine, and the policy held at first, then at its own rate."""
    N, B, steps, lr, clip, decay, seed = 32, 8, 6, 1e-2, {1: 0.3, 2: 100.0}[K], 0.5, 7
    lambda_pi, lambda_target, lambda_early, gamma, target = 0.3, 0.2, 0.1, 0.9, 0.2
    warmup, start, policy_lr, total = 2 * B * N, 2 * B * N, 0.05, steps * B * N
    train.main([*TINY, f"--data={data}", f"--out_dir={tmp_path}", f"--num_draws={K}", "--seed=7",
                "--gamma=0.9", f"--training_bytes={total}",
                f"--warmup_bytes={warmup}", f"--policy_start_bytes={start}",
                f"--policy_learning_rate={policy_lr}", f"--grad_clip={clip}",
                "--learning_rate=1e-2", "--lambda_pi=0.3", "--lambda_target=0.2", "--batch_size=4",
                "--lambda_early=0.1", "--effective_batch_size=8", "--weight_decay=0.5",
                "--redrawn=0.5"])
    model, saved = load_checkpoint(tmp_path / "ckpt.pt")
    reached = {name: p.clone() for name, p in model.named_parameters()}
    torch.manual_seed(seed)
    model = Model(model.config).train()
    m, v = ({name: torch.zeros_like(p) for name, p in model.named_parameters()} for _ in range(2))
    rows = np.fromfile(data / "train_00000.bin", np.uint8).reshape(-1, N)
    order = np.random.default_rng([seed, 0]).permutation(len(rows))
    discount = [[gamma ** (j - i) if j >= i else 0.0 for j in range(N)] for i in range(N)]
    discount = torch.tensor(discount)
    for step in range(1, steps + 1):
        draws, after, L = range(K), step * B * N, 0
        u = np.random.default_rng([seed, 1, (step - 1) * B]).random((K, B, N), np.float32)
        for part in (slice(0, 4), slice(4, 8)):
            numbers = order[(step - 1) * B : step * B][part]
            y = torch.from_numpy(rows[numbers].astype(int))
            x = torch.cat((torch.full((4, 1), BOS), y[:, :-1]), 1)
            X = model.encode(x)
            z, G, log_pi, l = model.policy_terms(X), [], [], []
            for k in draws:
                a = model.boundaries(z, torch.from_numpy(u[k, None, part]))
                first = a if k == 0 else first
                a[:, 2:] = first[:, 2:]  # these rows of the pass are drawn once
                l.append(model.boundary_logits(z, a))
                Z = model.norm(model.predict(X if k == 0 else X.detach(), a[0]))
                logits = 30 * torch.tanh(model.head(Z) / 30)
                logp = logits.log_softmax(-1).gather(2, y[..., None])[..., 0]
                if k == 0:
                    L = L - logp.mean() / 2
                reward = logp
                if K == 1:
                    logits = 30 * torch.tanh(model.early_head(model.early_norm(X)) / 30)
                    early = logits.log_softmax(-1).gather(2, y[..., None])[..., 0]
                    L, reward = L - lambda_early * early.mean() / 2, logp - early
                G.append(reward.detach() @ discount.T)
                log_pi.append(torch.where(a, l[k].sigmoid(), 1 - l[k].sigmoid()).log()[0])
            A = [G[0] - G[0].mean(0)] if K == 1 else [G[0] - G[1], G[1] - G[0]]
            terms = sum(-(log_pi[k] * A[k])[:, 1:].sum() for k in draws) / (K * 4 * N)
            l = torch.cat(l)
            L_tgt = l.mean() * (l.sigmoid().mean().item() - target)
            L = L + (lambda_pi * terms + lambda_target * L_tgt) / 2
        model.zero_grad()
        L.backward()
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad
                 for name, p in model.named_parameters()}
        norm = sum(g.square().sum() for g in grads.values()).sqrt().item()
        assert (norm > clip) == (K == 1)  # so that clipping matters, and once the size of L
        cosine = 1.0
        if after >= warmup:
            cosine = (1 + math.cos(math.pi * (after - warmup) / (total - warmup))) / 2
        with torch.no_grad():
            for name, p in model.named_parameters():
                g = grads[name] * min(clip / norm, 1)
                own, decays = lr * min(after / warmup, 1) * cosine, p.dim() == 2
                if name == "policy.weight":
                    own, decays = own * policy_lr / lr * (after > start), False
                m[name], v[name] = 0.9 * m[name] + 0.1 * g, 0.999 * v[name] + 0.001 * g**2
                p *= 1 - own * decay * decays
                p -= own * m[name] / (1 - 0.9**step) / ((v[name] / (1 - 0.999**step)).sqrt() + 1e-8)
    assert model.policy.weight.abs().max() > 5e-3
    for name, p in model.named_parameters():
        torch.testing.assert_close(reached[name], p, atol=1e-4, rtol=1e-3, msg=name)


def test_every_epoch_reads_every_row_once_in_its_own_order_on_any_number_of_processes():
    shards = [np.arange(10, dtype=np.uint8)[:, None].repeat(8, 1)]
    h = SimpleNamespace(seed=1, effective_batch_size=4, batch_size=1, seq_len=8)

    def read(world):
        """Every row's number and first uniform, in the order of the run."""
        steps = [[train.micro_batches(shards, first, 1, h, rank, world, "cpu")
                  for rank in range(world)] for first in range(0, 20, 4)]
        return [(y[0, 0].item(), u[0, 0, 0].item()) for step in steps for row in zip(*step)
                for x, y, u in row]

    alone = [row for row, _ in read(1)]
    assert sorted(alone[:10]) == sorted(alone[10:]) == list(range(10)) and alone[:10] != alone[10:]
    assert read(1) == read(2) == read(4)


def error_of_moments(one, other):
    """The largest relative error between two checkpoints' running means of gradients."""
    errors = []
    for i, state in one["optimizer"]["state"].items():
        mean = state["exp_avg"]
        errors.append((other["optimizer"]["state"][i]["exp_avg"] - mean).norm() / mean.norm())
    return max(errors)


def test_a_step_depends_on_its_passes_by_eq_24_alone_and_not_on_processes(data, tmp_path):
    """Four steps at a rate that matters; the last two of one run by four processes, not by two."""
    flags = [*TINY, f"--data={data}", "--training_bytes=1024", "--effective_batch_size=8",
             "--num_draws=2", "--redrawn=1", "--lambda_pi=1", "--lambda_target=10",
             "--learning_rate=2e-2", "--warmup_bytes=1024"]  # no cosine: one run is cut short

    def trained(name, *more, processes=1):
        arguments = [*flags, f"--out_dir={tmp_path}/{name}", *more]
        if processes == 1:
            train.main(arguments)
        else:
            command = [*TORCHRUN, f"--nproc_per_node={processes}", ROOT / "train.py", *arguments]
            subprocess.run(command, check=True, cwd=ROOT)
        return torch.load(tmp_path / name / "ckpt.pt")

    whole = trained("whole", "--batch_size=8")
    assert whole["model"]["policy.weight"].abs().mean() > 5e-3 and whole["step"] == 4
    trained("processes", "--batch_size=4", "--training_bytes=512", processes=2)
    cut = trained("processes", "--batch_size=2", "--resume=True", processes=4)
    assert error_of_moments(whole, cut) < 1e-3
    assert error_of_moments(whole, trained("passes", "--batch_size=2")) > 1e-2  # eq. 24
    whole = trained("untargeted", "--batch_size=8", "--lambda_target=0")
    assert error_of_moments(whole, trained("one", "--batch_size=1", "--lambda_target=0")) < 1e-3
    steps = [r["step"] for r in log_of(tmp_path / "processes") if "auto" in r]
    assert steps == [1, 2, 3, 4]


def gradients(rows, wrap=lambda model: model):
    """Of L of these rows with fixed boundaries, by the paper's estimator; eq. 24 counts tenfold."""
    model = small_model().train()
    (x, y), generator = some_bytes(4, 32), torch.Generator().manual_seed(2)
    a = torch.rand(4, 32, generator=generator) < 0.3
    a[:, 0] = True
    net = wrap(model)
    logp, early_logp, l, a = net(x[rows], y[rows], uniforms_for(a[None, rows]))
    A = train.advantage(train.discounted_return((logp - early_logp).detach(), 0.99))
    L = -logp.mean() - early_logp.mean()
    (L + train.policy_loss(l, a, A) + 10 * train.target_loss(l, 0.5)).backward()
    return [p.grad for p in model.parameters()]


def one_of_two(rank, store, results):
    counter = CompileCounterWithBackend("eager")

    def wrap(model):
        train.compile_blocks(model, backend=counter)
        return DistributedDataParallel(model)

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
    assert graphs == 4  # byte layers, token layers, heads, policy: DDPOptimizer cuts none


@pytest.mark.parametrize("K", [1, 2])
def test_a_step_is_compiled_once_though_the_number_of_tokens_varies(K):
    torch._dynamo.reset()  # of what other tests compiled
    model, net, (x, y) = small_model().train(), small_model().train(), some_bytes(2, 64)
    counter, compiled = CompileCounterWithBackend("eager"), []
    train.compile_blocks(net, backend=counter)
    for i, rate in enumerate([0.3, 0.1, 0.9, 0.5, 1.0, 0.0, 0.7]):
        a = torch.rand(K, 2, 64, generator=torch.Generator().manual_seed(i)) < rate
        a[..., 0] = True
        outputs, expected = (one(x, y, uniforms_for(a)) for one in (net, model))
        (outputs[0].sum() + outputs[2].sum()).backward()
        torch.testing.assert_close(outputs[0], expected[0], atol=1e-4, rtol=1e-4)
        compiled.append(counter.frame_count)
    assert compiled[0] == compiled[-1] == 3 * K + 1  # layers and head, with gradient or not; policy


def test_it_trains_in_16_bits_as_in_32(data, tmp_path):
    reached = {}
    for dtype in "float32", "bfloat16", "float16":
        train.main([*TINY, f"--dtype={dtype}", "--warmup_bytes=0", "--learning_rate=1e-2",
                    f"--training_bytes={24 * 4 * 32}", f"--data={data}",
                    f"--out_dir={tmp_path}/{dtype}"])
        reached[dtype] = log_of(tmp_path / dtype)[-1]["val_bpb"]
    assert reached["float32"] < 7.5 and len(set(reached.values())) == 3  # 8 at first
    assert reached == {dtype: pytest.approx(reached["float32"], abs=0.1) for dtype in reached}


# ---- Evaluation.


def test_an_evaluations_numbers_are_those_of_a_plain_count(data):
    model, shards = small_model(seq_len=32), open_shards(data, "val", 32)
    results, shown = train.evaluate(model, shards, 6, 4, torch.autocast("cpu", enabled=False))
    model.eval()
    rows = np.concatenate(shards)
    rows = [rows[i] for i in np.linspace(0, len(rows) - 1, 6).astype(int)]
    generator = torch.Generator().manual_seed(0)
    u = [row for B in (4, 2) for row in torch.rand(1, B, 32, generator=generator)[0]]
    bits, tokens, entropy = [], 0, []
    for row, own_u in zip(rows, u):
        x, y = torch.tensor([[BOS, *row[:-1]]]), torch.tensor([[*row.tolist()]])
        logp, _, l, a = model(x, y, own_u[None, None])
        bits.append(sum(-logp[0, 0].tolist()[i] / math.log(2) for i in range(32)) / 32)
        tokens += a.sum().item()
        entropy += [-math.log(p if d else 1 - p)
                    for p, d in zip(l[0, 0].sigmoid().tolist()[1:], a[0, 0].tolist()[1:])]
    mean = sum(bits) / 6
    deviation = math.sqrt(sum((b - mean) ** 2 for b in bits) / 5)
    expected = {"val_bpb": mean, "val_stderr": deviation / math.sqrt(6),
                "val_rate": tokens / (6 * 32),
                "val_entropy": sum(entropy) / len(entropy)}
    assert {key: results[key] for key in expected} == pytest.approx(expected, rel=1e-4)
    assert bytes(byte for byte, _, _ in shown) == rows[0][:-1].tobytes()


def test_where_tokens_end_is_counted_against_words():
    x = torch.tensor([[BOS, *"It’s öé Ж".encode()]])
    ends = 0, 2, 3, 4, 5, 6, 8, 9, 11, 13  # <bos>; t; in ’, in it, ’; s; in ö, ö; é; in Ж
    a = torch.tensor([[i in ends for i in range(x.size(1))]])
    expected = {"ends_before": 2 / 9, "ends_between": 1 / 9, "ends_after": 2 / 9,
                "ends_within": 4 / 9}
    assert where_tokens_end(x, a) == pytest.approx(expected)


# ---- Stopping, going on, and what is refused.


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("dtype", ["float32", "float16"])  # float16 has a GradScaler
def test_a_run_stopped_and_resumed_is_the_run_that_was_not(how, dtype, data, tmp_path):
    flags = [*TINY, f"--data={data}", f"--dtype={dtype}", f"--training_bytes={12 * 4 * 32}"]
    train.main([*flags, f"--out_dir={tmp_path}/whole"])
    command = [sys.executable, ROOT / "train.py", *flags, f"--out_dir={tmp_path}/out"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 6 "):
            process.send_signal(how)
            break
    rest = process.stdout.read()
    if how == signal.SIGINT:
        assert process.wait() == 0 and "--resume=True" in rest
    else:
        assert process.wait() == -signal.SIGKILL
    reached = torch.load(tmp_path / "out/ckpt.pt")["step"]
    assert 4 <= reached < 12
    train.main(["--resume=True", f"--out_dir={tmp_path}/out"])
    assert steps_of(tmp_path / "out") == steps_of(tmp_path / "whole")
    one, other = (torch.load(tmp_path / name / "ckpt.pt") for name in ("whole", "out"))
    assert one["scaler"] == other["scaler"]
    for name, weights in one["model"].items():
        assert torch.equal(weights, other["model"][name])


def test_a_flag_given_on_resume_overrides_the_checkpoints(data, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "out")
    train.main([f"--out_dir={tmp_path}/out", "--resume=True", "--weight_decay=0.25",
                f"--training_bytes={16 * 4 * 32}"])
    groups = torch.load(tmp_path / "out/ckpt.pt")["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.25, 0, 0]


@pytest.mark.parametrize("how", [["--learning_rate=1e30"], ["--learning_rate=1e9", NEVER]])
@pytest.mark.parametrize("boundaries", ["uniform", "learned"])
def test_a_run_that_diverges_ends_in_one_line_and_keeps_the_checkpoint_before(
        boundaries, how, data, tmp_path):
    flags = [*TINY, f"--data={data}", f"--out_dir={tmp_path}", f"--boundaries={boundaries}",
             "--warmup_bytes=0"]
    run("train.py", *flags, "--training_bytes=512")
    before = (tmp_path / "ckpt.pt").read_bytes()
    _, error = run("train.py", *flags, "--training_bytes=2048", "--resume=True", *how, code=1)
    assert error.count("\n") == 1 and "not finite" in error and "is kept as it was" in error
    assert (tmp_path / "ckpt.pt").read_bytes() == before


def test_a_full_disk_ends_in_one_line_and_leaves_the_checkpoint_whole(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "out")
    before = (tmp_path / "out/ckpt.pt").read_bytes()
    limited = ("import resource, runpy, sys; sys.argv = sys.argv[1:]; "
               "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
               "runpy.run_path(sys.argv[0], run_name='__main__')")
    done = subprocess.run([sys.executable, "-c", limited, ROOT / "train.py", "--resume=True",
                           f"--out_dir={tmp_path}/out", f"--training_bytes={16 * 4 * 32}"],
                          capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "what was saved before is whole" in done.stderr
    assert (tmp_path / "out/ckpt.pt").read_bytes() == before


def test_a_second_run_in_a_folder_is_refused_and_a_killed_one_leaves_it_free(data, tmp_path):
    flags = [*TINY, f"--data={data}", f"--out_dir={tmp_path}", "--training_bytes=1e9", NEVER]
    command = [sys.executable, ROOT / "train.py", *flags]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert any(line.startswith("step 1 ") for line in first.stdout)
        _, error = run("train.py", *flags, code=2)
    finally:
        first.kill()
        first.communicate()
    assert error.count("\n") == 1 and f"another run is at work in {tmp_path}" in error
    run("train.py", *flags, "--training_bytes=512")


class Payload:
    """What a malicious checkpoint would have torch.load do."""

    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize("damage", ["a flipped bit", "an entry marked a folder", "a payload",
                                    "a weight that is not finite", "a size that is missing"])
def test_a_checkpoint_that_was_damaged_is_refused(damage, trained, tmp_path, capsys):
    path = shutil.copy(trained / "ckpt.pt", tmp_path / "ckpt.pt")
    raw, saved = bytearray(path.read_bytes()), torch.load(path)
    if damage == "a flipped bit":
        raw[raw.index(saved["model"]["head.weight"].numpy().tobytes())] ^= 1
        path.write_bytes(raw)
    elif damage == "an entry marked a folder":  # by a bit in the archive's directory
        raw[raw.rindex(b"PK\1\2", 0, raw.rindex(b"/data/0")) + 38] ^= 16
        path.write_bytes(raw)
    else:
        if damage == "a size that is missing":
            del saved["model_config"]["policy_softcap"]  # the same as the default
        elif damage == "a payload":
            saved["step"] = Payload()
        else:
            saved["model"]["head.weight"][0, 0] = float("nan")
        torch.save(saved, path)
    with pytest.raises(ValueError, match="is no checkpoint of this version"):
        load_checkpoint(path)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("key", ["config", "optimizer", "scaler", "step", "rows_seen", "log_bytes"])
def test_a_checkpoint_that_lacks_a_part_is_refused(key, trained, tmp_path, capsys):
    saved = torch.load(trained / "ckpt.pt")
    del saved[key]
    torch.save(saved, tmp_path / "ckpt.pt")
    assert "another version" in refused(capsys, f"--out_dir={tmp_path}", "--resume=True")


def test_a_finished_run_is_not_overwritten(trained, data, capsys):
    before = (trained / "ckpt.pt").read_bytes()
    assert "--resume=True" in refused(capsys, f"--data={data}", f"--out_dir={trained}")
    assert (trained / "ckpt.pt").read_bytes() == before


def test_a_checkpoint_of_another_shape_is_refused(trained, capsys):
    error = refused(capsys, f"--out_dir={trained}", "--resume=True", "--n_mid_layers=3")
    assert "n_mid_layers" in error


@pytest.mark.parametrize("name, flags, count, values", [  # Table 2
    ("fineweb_147m", [], 146_938_368, (1.5e-3, 128, 4.5e8, 6e9, 1 / 5)),
    ("codeparrot_90m", [], 90_296_832, (2e-3, 128, 2.5e8, 3.4e9, 1 / 5)),
    ("aspect_ratio", ["--n_mid_layers=2", "--downsample_rate_target=1/2"], 23_489_536,
     (3e-3, 64, 1.1e8, 1.5e9, 1 / 2)),
    ("aspect_ratio", [], 31_882_240, (3e-3, 64, 1.1e8, 1.5e9, 1 / 4)),
    ("aspect_ratio", ["--n_mid_layers=6", "--downsample_rate_target=1/6"], 40_274_944,
     (3e-3, 64, 1.1e8, 1.5e9, 1 / 6)),
])
def test_the_papers_configurations_have_the_papers_sizes_and_values(name, flags, count, values):
    path = str(ROOT / "config" / f"{name}.py")
    h = train.DEFAULTS | read_command_line([path, *flags], train.DEFAULTS)
    with torch.device("meta"):
        model = Model(ModelConfig(**train.model_config_of(h)))
    assert sum(p.numel() for p in model.parameters()) == count
    keys = "learning_rate effective_batch_size warmup_bytes training_bytes downsample_rate_target"
    assert tuple(h[key] for key in keys.split()) == values
    assert (h["policy_learning_rate"], h["policy_start_bytes"]) == (values[0], 0)
    keys = "seq_len attention_window policy_window policy_scale num_draws"
    assert tuple(h[key] for key in keys.split()) == (4096, 64, 8, 16, 1)
    keys = "gamma lambda_pi lambda_target lambda_early"
    assert tuple(h[key] for key in keys.split()) == (0.99, 1e-2, 1e-2, 1e-1)
