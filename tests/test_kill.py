"""kill -9 before each write of train.py, then the same command or --resume: the same result.

Run as a script, it does this in its folder, in forks: torch is imported once, and has no threads.
"""
import itertools
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: who has threads must not fork
import torch
import torch._inductor  # noqa: F401  a child that imported it would need a second each time
from torch.utils._pytree import tree_leaves

from conftest import ROOT, TINY

TRAIN = ["train.py", *TINY, "--out_dir=out", "--training_bytes=1024"]
RESUME = ["train.py", "--out_dir=out", "--resume=True"]  # TRAIN saves at steps 4 and 8
CALLS = "replace", "TextIOWrapper.truncate", "TextIOWrapper.write"  # C functions; and torch.save's:
SAVE = "write_end_of_file"


def run(command, last=None):
    """Runs `python COMMAND`, with kill -9 before call number `last` of CALLS; the exit code."""
    def count(_, event, function):
        writes = event == "c_call" and (
            function.__qualname__ in CALLS or function.__name__ == SAVE)
        if writes and next(number) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    def child():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = command
        if last:
            sys.setprofile(count)
        runpy.run_path(ROOT / command[0], run_name="__main__")

    number, process = itertools.count(1), multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return process.exitcode


def made():
    """Everything that the run made, except headers and what depends on the clock or --resume."""
    saved = torch.load("out/ckpt.pt")
    del saved["log_bytes"], saved["config"]["resume"]
    state = [z.numpy().tobytes() if isinstance(z, torch.Tensor) else z for z in tree_leaves(saved)]
    records = map(json.loads, Path("out/log.jsonl").read_text().splitlines())
    clock = "bytes_per_second", "minutes_left"
    return state, [
        {k: v for k, v in r.items() if k not in clock} for r in records if "step" in r]


def main(data):
    command = [*TRAIN, f"--data={data}"]
    assert run(command) == 0
    undisturbed, kills = made(), 0
    for last in itertools.count(1):
        shutil.rmtree("out")
        ended = run(command, last)
        kills += ended == -signal.SIGKILL
        again = RESUME
        if not Path("out/ckpt.pt").exists():
            again = command
            shutil.rmtree("out", ignore_errors=True)  # a log with training steps is refused
        assert ended == 0 or run(again) == 0, last
        assert made() == undisturbed, last
        if ended == 0:
            break
    assert kills >= 5


def test_killed_at_any_moment_and_started_again_a_run_ends_as_if_nothing_had_been(data, tmp_path):
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    done = subprocess.run([sys.executable, __file__, data], cwd=tmp_path, capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    main(sys.argv[1])
