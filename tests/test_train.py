import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import train
from conftest import ROOT, TINY, run
from test_model import small_model, some_bytes


def gradients(rows):
    """Of the whole loss, of these rows of one batch with fixed boundaries."""
    model = small_model().train()
    batch, a = some_bytes(4, 33), torch.rand(4, 32, generator=torch.Generator().manual_seed(2)) < 0.3
    a[:, 0] = True
    x, y = batch[rows, :-1], batch[rows, 1:]
    logits, early_logits, l, a = model(x, a[rows])
    L_auto, L_early, L_pi, L_tgt = train.losses(logits, early_logits, l, a, y, 0.99, 0.2)
    (L_auto + L_pi + L_tgt + 0.1 * L_early).backward()
    return [p.grad for p in model.parameters()]


def one_of_two(rank, store, results):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    grads = gradients(slice(2 * rank, 2 * rank + 2))
    for g in grads:
        dist.all_reduce(g)
    if rank == 0:
        torch.save([g / 2 for g in grads], results)  # as DistributedDataParallel averages
    dist.destroy_process_group()


def test_two_processes_give_the_gradient_of_one_with_twice_the_batch(tmp_path):
    mp.spawn(one_of_two, args=(tmp_path / "store", tmp_path / "results"), nprocs=2)
    for one, two in zip(gradients(slice(0, 4)), torch.load(tmp_path / "results")):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)


def test_torchrun_trains_on_disjoint_rows_and_resumes(data, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "train.py", *TINY,
               "--batch_size=1", f"--data={data}", f"--out_dir={tmp_path}"]
    subprocess.run([*command, "--training_bytes=512"], check=True, cwd=ROOT)
    subprocess.run([*command, "--training_bytes=1024", "--resume=True"], check=True, cwd=ROOT)
    assert [r["step"] for r in log_of(tmp_path) if "auto" in r] == list(range(1, 9))


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
    rows = train.shuffled(0, 30, 10)
    assert all(sorted(rows[i : i + 10]) == list(range(10)) for i in (0, 10, 20))
    assert list(rows[:10]) != list(rows[10:20])
    assert list(train.shuffled(7, 9, 10)) == list(rows[7:16])


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path):
    config = tmp_path / "config.py"
    config.write_text("gamma = 0.5\nwarmup_bytes = 5\ndownsample_rate_target = 1 / 4\n")
    chosen = train.read_command_line([str(config), "--gamma=0.25", "--training_bytes=6e9", "--policy_scale=1/2"])
    assert chosen == {"gamma": 0.25, "warmup_bytes": 5, "downsample_rate_target": 0.25, "training_bytes": 6_000_000_000, "policy_scale": 0.5}


@pytest.mark.parametrize("name", ["fineweb_147m", "codeparrot_90m", "aspect_ratio"])
def test_the_papers_configurations_are_read(name):
    assert train.read_command_line([str(ROOT / "config" / f"{name}.py")])["seq_len"] == 4096


@pytest.mark.parametrize("arguments, message", [
    (["--learning_rte=1"], "unknown hyperparameter 'learning_rte'; the nearest is 'learning_rate'"),
    (["--seq_len=many"], "seq_len='many' is no int"),
    (["--seq_len=2.5"], "seq_len='2.5' is no int"),
    (["--compile=1"], "compile='1' is no bool"),
    (["--gamma"], "'--gamma' has no value"),
    (["no/such/config.py"], "cannot read the configuration file 'no/such/config.py'"),
    (["LICENSE"], "cannot read the configuration file 'LICENSE'"),
    (["--gamma=1.5"], "gamma=1.5"),
    (["--num_heads=3"], "embedding_dim=128"),
    (["--effective_batch_size=24"], "effective_batch_size=24"),
    (["--boundaries=bpe"], "boundaries='bpe' is none of learned, uniform"),
    (["--data=no/such/data"], "no/such/data"),
    (["--seq_len=5000"], "seq_len=5000 does not divide"),
    (["--resume=True"], "no checkpoint"),
])
def test_a_mistake_on_the_command_line_is_one_line(arguments, message, data, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main([f"--data={data}", f"--out_dir={tmp_path}", *arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and message in error


def test_a_finished_run_is_not_overwritten(trained, data, capsys):
    before = (trained / "ckpt.pt").read_bytes()
    with pytest.raises(SystemExit):
        train.main([*TINY, f"--data={data}", f"--out_dir={trained}"])
    assert "--resume=True" in capsys.readouterr().err and (trained / "ckpt.pt").read_bytes() == before


def test_a_checkpoint_of_another_shape_is_refused(trained, data, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main([f"--out_dir={trained}", "--resume=True", "--n_mid_layers=3"])
    assert stopped.value.code == 2 and "n_mid_layers" in capsys.readouterr().err
