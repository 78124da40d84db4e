import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import train
from config.command_line import read_command_line
from conftest import ROOT, TINY, run
from model import BOS, Model, ModelConfig, load_checkpoint
from test_model import small_model, some_bytes


def gradients(rows, wrap=lambda model: model):
    """Of the whole loss, of these rows of one batch with fixed boundaries; wrap makes of the model what train.py calls."""
    model = small_model().train()
    batch, a = some_bytes(4, 33), torch.rand(4, 32, generator=torch.Generator().manual_seed(2)) < 0.3
    a[:, 0] = True
    x, y = batch[rows, :-1], batch[rows, 1:]
    net = wrap(model)
    logits, early_logits, l, a = net(x, a[rows])
    L_auto, L_early, L_pi, L_tgt = train.losses(logits, early_logits, l, a, y, 0.99, 0.2)
    (L_auto + L_pi + L_tgt + 0.1 * L_early).backward()
    return [p.grad for p in model.parameters()]


def one_of_two(rank, store, results):
    from torch._dynamo.testing import CompileCounterWithBackend
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


def test_two_processes_give_the_gradient_of_one_with_twice_the_batch_and_their_blocks_compile_whole(tmp_path):
    mp.spawn(one_of_two, args=(tmp_path / "store", tmp_path / "results"), nprocs=2)
    grads, graphs = torch.load(tmp_path / "results")
    for one, two in zip(gradients(slice(0, 4)), grads):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)
    assert graphs == 2  # byte layers and token layers: torch's DDPOptimizer, which cuts graphs into buckets, leaves them alone


def test_a_step_does_not_depend_on_how_its_rows_are_cut(data, tmp_path):
    """8 rows at once, 4 + 4, 8 times 1, and 2 processes with 2 passes each that are stopped and resumed: after four steps at a rate
    that matters the policy has moved, and the gradients' running means are the same."""
    flags = [*TINY, f"--data={data}", f"--training_bytes={4 * 8 * 32}", "--effective_batch_size=8", "--num_draws=2", "--policy_interval=2",
             "--lambda_pi=1", "--lambda_target=1", "--learning_rate=2e-2",
             f"--warmup_bytes={4 * 8 * 32}"]  # the cosine of a run cut short would be another
    for rows in 8, 4, 1:
        train.main([*flags, f"--batch_size={rows}", f"--out_dir={tmp_path}/{rows}"])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "train.py"]
    for more in [f"--training_bytes={2 * 8 * 32}"], ["--resume=True"]:
        subprocess.run([*torchrun, *flags, "--batch_size=2", f"--out_dir={tmp_path}/two", *more], check=True, cwd=ROOT)
    whole, *others = (torch.load(tmp_path / name / "ckpt.pt") for name in ("8", "4", "1", "two"))
    assert whole["model"]["policy.weight"].abs().mean() > 5e-3 and "early_head.weight" not in whole["model"]
    for other in others:
        assert other["step"] == 4
        for i, state in whole["optimizer"]["state"].items():
            expected = state["exp_avg"]
            error = (other["optimizer"]["state"][i]["exp_avg"] - expected).norm() / expected.norm()
            assert error < 1e-3, (i, error)
    assert [r["step"] for r in log_of(tmp_path / "two") if "auto" in r] == [1, 2, 3, 4]


@pytest.mark.parametrize("K", [1, 2])
def test_the_loop_takes_the_steps_that_a_loop_written_down_from_the_equations_takes(K, data, tmp_path):
    """Six steps of 8 rows: rows read, draws, eq. 15-18 and 24-27, clipping, AdamW and what it decays, warm-up and cosine, and the steps
    in which the policy is held or learns nothing."""
    N, B, steps, lr, clip, decay, interval = 32, 8, 6, 1e-2, 0.3, 0.5, {1: 1, 2: 2}[K]
    lambda_pi, lambda_target, lambda_early, gamma, target = 0.3, 0.2, 0.1, 0.9, 0.2
    warmup, start, total = 2 * B * N, 2 * B * N, steps * B * N
    train.main([*TINY, f"--data={data}", f"--out_dir={tmp_path}", f"--num_draws={K}", f"--policy_interval={interval}", "--gamma=0.9",
                f"--training_bytes={total}", f"--warmup_bytes={warmup}", f"--policy_start_bytes={start}", "--learning_rate=1e-2",
                "--lambda_pi=0.3", "--lambda_target=0.2", "--lambda_early=0.1", "--effective_batch_size=8", "--batch_size=8",
                "--grad_clip=0.3", "--weight_decay=0.5"])
    model, saved = load_checkpoint(tmp_path / "ckpt.pt")
    reached = {name: p.clone() for name, p in model.named_parameters()}
    torch.manual_seed(1337)
    model = Model(model.config).train()
    m, v = ({name: torch.zeros_like(p) for name, p in model.named_parameters()} for _ in range(2))
    rows = np.fromfile(data / "train_00000.bin", np.uint8).reshape(-1, N)
    order = np.random.default_rng([1337, 0]).permutation(len(rows))
    discount = torch.tensor([[gamma ** (j - i) if j >= i else 0.0 for j in range(N)] for i in range(N)])
    for step in range(1, steps + 1):
        before, after = (step - 1) * B * N, step * B * N
        y = torch.from_numpy(rows[order[(step - 1) * B : step * B]].astype(int))
        x = torch.cat((torch.full((B, 1), 256), y[:, :-1]), 1)
        teaching = step % interval == 0
        u = torch.from_numpy(np.random.default_rng([1337, 1, (step - 1) * B]).random((K, B, N), np.float32))
        G, log_pi, l = [], [], []
        for k in range(K if teaching else 1):
            logits, early_logits, l_k, a = model(x, u=u[k])
            logp = logits.log_softmax(-1).gather(2, y[..., None])[..., 0]
            if k == 0:
                L = -logp.mean()
            reward = logp
            if K == 1:
                early = early_logits.log_softmax(-1).gather(2, y[..., None])[..., 0]
                L, reward = L - lambda_early * early.mean(), logp - early
            G.append(reward.detach() @ discount.T)
            log_pi.append(torch.where(a, l_k.sigmoid(), 1 - l_k.sigmoid()).log())
            l.append(l_k)
        if teaching:
            A = [G[0] - G[0].mean(0)] if K == 1 else [G[0] - G[1], G[1] - G[0]]
            L = L + lambda_pi * sum(-(log_pi[k] * A[k])[:, 1:].sum() for k in range(K)) / (K * B * N)
            l = torch.stack(l)
            L = L + lambda_target * l.mean() * (l.sigmoid().mean().item() - target)
        model.zero_grad()
        L.backward()
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
        norm = sum(g.square().sum() for g in grads.values()).sqrt().item()
        assert norm > clip  # so that clipping matters
        rate = lr * after / warmup if after < warmup else lr * (1 + math.cos(math.pi * (after - warmup) / (total - warmup))) / 2
        with torch.no_grad():
            for name, p in model.named_parameters():
                g, here = grads[name] * clip / norm, 0.0 if name == "policy.weight" and before < start else rate
                m[name], v[name] = 0.9 * m[name] + 0.1 * g, 0.999 * v[name] + 0.001 * g**2
                p *= 1 - here * (decay if p.dim() == 2 else 0)
                p -= here * m[name] / (1 - 0.9**step) / ((v[name] / (1 - 0.999**step)).sqrt() + 1e-8)
    assert model.policy.weight.abs().max() > 5e-3
    for name, p in model.named_parameters():
        torch.testing.assert_close(reached[name], p, atol=1e-4, rtol=1e-3, msg=name)


def test_it_trains_in_16_bits_as_in_32(data, tmp_path):
    reached = {}
    for dtype in "float32", "bfloat16", "float16":
        flags = [f"--dtype={dtype}", "--warmup_bytes=0", "--learning_rate=1e-2", f"--training_bytes={24 * 4 * 32}"]
        train.main([*TINY, *flags, f"--data={data}", f"--out_dir={tmp_path}/{dtype}"])
        reached[dtype] = log_of(tmp_path / dtype)[-1]["val_bpb"]
    assert reached["float32"] < 7.5 and len(set(reached.values())) == 3  # 8 at first
    assert reached == {dtype: pytest.approx(reached["float32"], abs=0.1) for dtype in reached}


@pytest.mark.parametrize("shape", [(2, 64), (2, 2, 64)])
def test_a_compiled_step_is_compiled_once_though_the_number_of_tokens_varies(shape):
    from torch._dynamo.testing import CompileCounterWithBackend
    torch._dynamo.reset()  # of what other tests compiled
    model, net, counter, compiled = small_model().train(), small_model().train(), CompileCounterWithBackend("eager"), []
    train.compile_blocks(net, backend=counter)
    for i, rate in enumerate([0.3, 0.1, 0.9, 0.5, 1.0, 0.0, 0.7]):
        a = torch.rand(shape, generator=torch.Generator().manual_seed(i)) < rate
        a[..., 0] = True
        outputs, expected = net(some_bytes(2, 64), a), model(some_bytes(2, 64), a)
        (outputs[0][0].sum() + outputs[2].sum()).backward()
        for one, other in zip(outputs[0], expected[0]):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        compiled.append(counter.frame_count)
    assert compiled[0] == compiled[-1] == (4 if len(shape) == 3 else 2)  # byte layers and token layers, with and without gradient


def log_of(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def curve(out):
    return [{k: v for k, v in record.items() if k not in ("bytes_per_second", "seconds_left")} for record in log_of(out)]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_stopped_and_resumed_is_the_run_that_was_not(how, data, trained, tmp_path):
    flags = [*TINY, f"--data={data}", f"--out_dir={tmp_path}", f"--training_bytes={12 * 4 * 32}"]
    process = subprocess.Popen([sys.executable, ROOT / "train.py", *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 6 "):
            process.send_signal(how)
            break
    rest = process.stdout.read()
    if how == signal.SIGINT:
        assert process.wait() == 0 and "--resume=True" in rest
    else:
        assert process.wait() == -signal.SIGKILL
    reached = torch.load(tmp_path / "ckpt.pt")["step"]
    assert 4 <= reached < 12
    out, _ = run("train.py", "--resume=True", f"--out_dir={tmp_path}")
    assert f"step {reached + 1} " in out and f"step {reached} " not in out
    assert curve(tmp_path) == curve(trained)


def test_every_epoch_reads_every_row_once_in_its_own_order():
    rows = train.shuffled(1337, 0, 30, 10)
    assert all(sorted(rows[i : i + 10]) == list(range(10)) for i in (0, 10, 20))
    assert list(rows[:10]) != list(rows[10:20])
    assert list(train.shuffled(1337, 7, 9, 10)) == list(rows[7:16])


def test_where_tokens_end_is_counted_against_words():
    x = torch.tensor([[BOS, *"It is ö ".encode()]])
    a = torch.tensor([[i in (0, 2, 3, 4, 7) for i in range(x.size(1))]])  # <bos>, t, the space, i and the first half of ö
    assert train.where_tokens_end(x, a) == pytest.approx(
        {"ends_before": 1 / 4, "ends_between": 1 / 4, "ends_after": 2 / 4, "token_length": 7 / 4, "token_length_std": (2.75 / 3) ** 0.5})


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path):
    config = tmp_path / "config.py"
    config.write_text("gamma = 0.5\nwarmup_bytes = 5\ndownsample_rate_target = 1 / 4\n")
    chosen = read_command_line([str(config), "--gamma=0.25", "--training_bytes=6e9", "--policy_scale=1/2"], train.DEFAULTS)
    assert chosen == {"gamma": 0.25, "warmup_bytes": 5, "downsample_rate_target": 0.25, "training_bytes": 6_000_000_000, "policy_scale": 0.5}


def test_a_configuration_files_own_names_are_no_hyperparameters(tmp_path):
    config = tmp_path / "config.py"
    config.write_text("\ufeffimport math\nfrom pathlib import Path\n_half = 0.5\ndef half(x): return _half * whole(x)\ndef whole(x): return x\n"
                      "for i in range(2): pass\nif i: seed = 7\ngamma = half(1)\nout_dir = str(Path(__file__).parent / 'out')\n"
                      "n_mid_layers = math.isqrt(9)\n")
    chosen = read_command_line([str(config)], train.DEFAULTS)
    assert chosen == {"gamma": 0.5, "out_dir": f"{tmp_path}/out", "n_mid_layers": 3, "seed": 7}


@pytest.mark.parametrize("text", ["seq_length = 64", "seq_length: int = 64", "gamma, seq_length = 0.5, 64"])
def test_a_misspelt_name_in_a_configuration_file_is_noticed_however_it_is_assigned(text, tmp_path, capsys):
    (tmp_path / "config.py").write_text(text)
    with pytest.raises(SystemExit):
        read_command_line([str(tmp_path / "config.py")], train.DEFAULTS)
    assert "unknown hyperparameter 'seq_length'; the nearest is 'seq_len'" in capsys.readouterr().err


@pytest.mark.parametrize("environment", [{"WORLD_SIZE": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "1"}, {"RANK": "-1"}])
def test_what_is_left_of_a_torchrun_in_the_environment_is_refused_in_one_line(environment, data, tmp_path, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        train.main([*TINY, f"--data={data}", f"--out_dir={tmp_path}", "--training_bytes=128"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and "without it they are to be unset" in error


def test_the_log_of_a_run_whose_checkpoint_was_moved_is_kept(data, trained, tmp_path):
    shutil.copy(trained / "log.jsonl", tmp_path)
    train.main([*TINY, f"--data={data}", f"--out_dir={tmp_path}", "--training_bytes=128"])
    assert log_of(tmp_path)[-1]["step"] == 1
    assert (tmp_path / "log.jsonl.old").read_bytes() == (trained / "log.jsonl").read_bytes()


def test_of_a_log_the_lines_that_are_no_records_are_left_out_with_a_word(tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    for step in 1, 2, 3:
        train.log(log, {"step": step, "bytes": step, "auto": math.inf, "rate": 0.2, "bytes_per_second": 1.0})
    log.write_bytes(b'\xff\x00\n[]\n{}\n{"step": 1, "bytes": 2, "val_bpb": "3", "val_rate": 0}\n' + b"[" * 10**5 + b"\n" + log.read_bytes()[:-9])
    train.shorten(log, 3)
    assert [(r["step"], r["auto"]) for r in map(json.loads, log.read_text().splitlines())] == [(1, None), (2, None)]
    assert "6 lines" in capsys.readouterr().err


def test_a_full_disk_ends_in_one_line_and_leaves_the_checkpoint_whole(data, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "out")
    before = (tmp_path / "out/ckpt.pt").read_bytes()
    limited = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); sys.argv = sys.argv[1:]; " \
              "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", limited, ROOT / "train.py", "--resume=True", f"--out_dir={tmp_path}/out",
                           f"--training_bytes={16 * 4 * 32}"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "what was saved before is whole" in done.stderr
    assert (tmp_path / "out/ckpt.pt").read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_run_whose_output_nobody_takes_saves_and_stops(data, tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, ROOT / "train.py", *TINY, f"--data={data}", f"--out_dir={tmp_path}", "--training_bytes=1e9"],
                              stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stderr.count("\n") == 1 and "the last, and saved" in done.stderr
    assert load_checkpoint(tmp_path / "ckpt.pt")[1]["step"] == 1


@pytest.mark.parametrize("name, flags, count, values", [  # Table 2
    ("fineweb_147m", [], 146_938_368, (1.5e-3, 128, 4.5e8, 6e9, 1 / 5)),
    ("codeparrot_90m", [], 90_296_832, (2e-3, 128, 2.5e8, 3.4e9, 1 / 5)),
    ("aspect_ratio", ["--n_mid_layers=2", "--downsample_rate_target=1/2"], 23_489_536, (3e-3, 64, 1.1e8, 1.5e9, 1 / 2)),
    ("aspect_ratio", [], 31_882_240, (3e-3, 64, 1.1e8, 1.5e9, 1 / 4)),
    ("aspect_ratio", ["--n_mid_layers=6", "--downsample_rate_target=1/6"], 40_274_944, (3e-3, 64, 1.1e8, 1.5e9, 1 / 6)),
])
def test_the_papers_configurations_have_the_papers_sizes_and_values(name, flags, count, values):
    c = train.DEFAULTS | read_command_line([str(ROOT / "config" / f"{name}.py"), *flags], train.DEFAULTS)
    with torch.device("meta"):
        model = Model(ModelConfig(**train.model_config_of(c)))
    assert sum(p.numel() for p in model.parameters()) == count
    assert (c["learning_rate"], c["effective_batch_size"], c["warmup_bytes"], c["training_bytes"], c["downsample_rate_target"]) == values
    assert (c["seq_len"], c["attention_window"], c["policy_window"], c["policy_scale"], c["policy_start_bytes"]) == (4096, 64, 8, 16, 0)
    assert (c["gamma"], c["lambda_pi"], c["lambda_target"], c["lambda_early"], c["num_draws"]) == (0.99, 1e-2, 1e-2, 1e-1, 1)


@pytest.mark.parametrize("arguments, message", [
    (["--learning_rte=1"], "unknown hyperparameter 'learning_rte'; the nearest is 'learning_rate'"),
    (["--seq_len=many"], "seq_len='many' is no int"),
    (["--seq_len=2.5"], "seq_len='2.5' is no int"),
    (["--compile=1"], "compile='1' is no bool"),
    (["--gamma"], "'--gamma' has no value"),
    (["no/such/config.py"], "cannot read the configuration file 'no/such/config.py'"),
    (["LICENSE"], "cannot read the configuration file 'LICENSE'"),
    (["--gamma=1.5"], "gamma=1.5"),
    (["--embedding_dim=128", "--num_heads=3"], "embedding_dim=128"),
    (["--batch_size=16", "--effective_batch_size=24"], "effective_batch_size=24"),
    (["--num_draws=1", "--batch_size=1"], "num_draws=1 compares a row's draw with those of other rows"),
    (["--num_draws=0"], "num_draws=0 is not within 1 and"),
    (["--boundaries=no/such/ckpt.pt", "--seq_len=64"], "no checkpoint no/such/ckpt.pt"),
    (["--batch_size=0"], "batch_size=0 is not within 1 and"),
    (["--learning_rate=1e400"], "learning_rate='1e400'"),
    (["--learning_rate=1e-999999999"], "learning_rate=0.0 is not within"),
    (["--embedding_dim=1e9"], "embedding_dim=1000000000 is not within"),
    (["--\x1b[31m=1"], "unknown hyperparameter '\u241b[31m'"),
    (["--seed=-1"], "seed=-1 is not within 0 and"),
    (["--BOS=1"], "unknown hyperparameter 'BOS'"),
    (["--boundaries=words"], "boundaries='words' is none of learned, uniform"),
    (["--boundaries=bpe", "--seq_len=64"], "has no marks of BPE tokens"),
    (["--data=no/such/data"], "no/such/data"),
    (["--seq_len=5000"], "seq_len=5000 does not divide"),
    (["--resume=True"], "no checkpoint"),
])
def test_a_mistake_on_the_command_line_is_one_line(arguments, message, data, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main([f"--data={data}", f"--out_dir={tmp_path}", *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and message in error


@pytest.mark.parametrize("how", [["--learning_rate=1e30"], ["--learning_rate=1e9", "--eval_interval=1"]])  # of the second the weights are finite
@pytest.mark.parametrize("boundaries", ["uniform", "learned"])
def test_a_run_that_diverges_ends_in_one_line_and_keeps_the_checkpoint_before(boundaries, how, data, tmp_path, capsys):
    flags = [*TINY, f"--data={data}", f"--out_dir={tmp_path}", f"--boundaries={boundaries}", "--warmup_bytes=0"]
    train.main([*flags, "--training_bytes=512"])
    before = (tmp_path / "ckpt.pt").read_bytes()
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        train.main([*flags, "--training_bytes=2048", "--resume=True", *how])
    error = capsys.readouterr().err
    assert stopped.value.code == 1 and error.count("\n") == 1 and "not finite" in error and "is kept as it was" in error
    assert (tmp_path / "ckpt.pt").read_bytes() == before
    for record in log_of(tmp_path):
        assert "NaN" not in json.dumps(record)


def test_a_second_run_in_a_folder_ends_in_one_line_and_a_killed_one_leaves_it_free(data, tmp_path):
    flags = [*TINY, f"--data={data}", f"--out_dir={tmp_path}", "--training_bytes=1e9", "--eval_interval=1000000"]
    first = subprocess.Popen([sys.executable, ROOT / "train.py", *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert any(line.startswith("step 1 ") for line in first.stdout)
        _, error = run("train.py", *flags, code=2)
    finally:
        first.kill()
        first.communicate()
    assert error.count("\n") == 1 and f"another run is at work in {tmp_path}" in error
    run("train.py", *flags, "--training_bytes=512")


def test_ranks_whose_torchrun_was_killed_stop_and_save(data, tmp_path):
    flags = [*TINY, f"--data={data}", f"--out_dir={tmp_path}", "--training_bytes=1e9", "--batch_size=1", "--eval_interval=1000000"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "train.py"]
    launcher = subprocess.Popen([*torchrun, *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert any(line.startswith("step 2 ") for line in launcher.stdout)
    launcher.kill()
    try:
        rest, _ = launcher.communicate(timeout=60)  # until the last rank has closed it
    finally:
        if shutil.which("pkill"):  # what a failure left behind
            subprocess.run(["pkill", "-f", str(tmp_path)])
    assert "stopped after step" in rest and (tmp_path / "ckpt.pt").exists()


@pytest.mark.parametrize("damage, message", [
    (lambda shard, meta: shard.unlink(), "val_00000.bin is missing"),
    (lambda shard, meta: shard.write_bytes(shard.read_bytes()[:-64]), "val_00000.bin has"),
    (lambda shard, meta: meta.write_text("[]"), "meta.json is not what prepare.py writes"),
    (lambda shard, meta: meta.write_text(meta.read_text().replace('"seq_len": 64', '"seq_len": 96', 1)), "meta.json is not what prepare.py writes"),
    (lambda shard, meta: meta.write_text(meta.read_text().replace('"seq_len": 64', '"seq_len": 16', 1)), "seq_len=32 does not divide"),
])
def test_data_that_is_not_what_its_meta_file_says_ends_in_one_line_before_training(damage, message, data, tmp_path, capsys):
    shutil.copytree(data, tmp_path / "data")
    damage(tmp_path / "data/val_00000.bin", tmp_path / "data/meta.json")
    with pytest.raises(SystemExit) as stopped:
        train.main([*TINY, f"--data={tmp_path}/data", f"--out_dir={tmp_path}/out"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and message in error


@pytest.mark.parametrize("damage", ["a flipped bit", "a file marked a folder", "a weight that is not finite", "a size that is missing"])
def test_a_checkpoint_that_was_damaged_is_refused(damage, trained, tmp_path):
    path = shutil.copy(trained / "ckpt.pt", tmp_path / "ckpt.pt")
    if damage == "a flipped bit":
        raw = bytearray(path.read_bytes())
        raw[raw.index(torch.load(path)["model"]["head.weight"].numpy().tobytes())] ^= 1
        path.write_bytes(raw)
    elif damage == "a file marked a folder":
        raw = bytearray(path.read_bytes())
        raw[raw.rindex(b"PK\1\2", 0, raw.rindex(b"/data/0")) + 38] ^= 16  # in the archive's directory, a bit of the file's attributes
        path.write_bytes(raw)
    else:
        saved = torch.load(path)
        if damage == "a size that is missing":
            del saved["model_config"]["policy_softcap"]  # the same as the default
        else:
            saved["model"]["head.weight"][0, 0] = float("nan")
        torch.save(saved, path)
    with pytest.raises(ValueError, match="damaged|not finite"):
        load_checkpoint(path)


def test_a_finished_run_is_not_overwritten(trained, data, capsys):
    before = (trained / "ckpt.pt").read_bytes()
    with pytest.raises(SystemExit):
        train.main([*TINY, f"--data={data}", f"--out_dir={trained}"])
    assert "--resume=True" in capsys.readouterr().err and (trained / "ckpt.pt").read_bytes() == before


def test_a_checkpoint_of_another_shape_is_refused(trained, data, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main([f"--out_dir={trained}", "--resume=True", "--n_mid_layers=3"])
    assert stopped.value.code == 2 and "n_mid_layers" in capsys.readouterr().err
