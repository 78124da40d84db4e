import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = ["--seq_len=32", "--embedding_dim=16", "--num_heads=2", "--attention_window=8",
        "--n_down_layers=1", "--n_mid_layers=1", "--n_up_layers=1", "--effective_batch_size=4",
        "--batch_size=4", "--log_interval=1", "--eval_interval=4", "--eval_rows=8",
        "--compile=False", "--device=cpu", "--dtype=float32"]

@pytest.fixture(autouse=True)
def signals():
    """train.main catches them; a shell's background job ignores Ctrl-C, one of nohup SIGHUP."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder of byte shards."""
    folder = tmp_path_factory.mktemp("data")
    for i in range(40):
        text = f"{i} the quick brown fox jumps over the lazy dog\n" * 6
        (folder / f"{i}.txt").write_text(text)
    run("prepare.py", "--dataset=files", "--input", str(folder), "--seq_len=64",
        "--val_fraction=0.2", f"--out_dir={folder}/shards")
    return folder / "shards"


@pytest.fixture(scope="session")
def trained(data, tmp_path_factory):
    """An out_dir with a checkpoint and a log of 12 steps."""
    out = tmp_path_factory.mktemp("trained")
    run("train.py", *TINY, f"--data={data}", f"--out_dir={out}", f"--training_bytes={12 * 4 * 32}")
    return out


def run(*command, code=0):
    """Runs a program of the repository; returns what it printed on stdout and on stderr."""
    done = subprocess.run([sys.executable, ROOT / command[0], *command[1:]],
                          capture_output=True, cwd=ROOT, timeout=120)
    assert done.returncode == code, done.stderr.decode()
    return done.stdout.decode(), done.stderr.decode()
