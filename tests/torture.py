"""
Tortures train.py and prepare.py with mistakes, damaged files and kill -9. For Linux.

    python tests/torture.py --minutes=10 --seed=1       the same time for every kind of case
    python tests/torture.py --seed=1 --only=kill --case=17     repeats a case, keeps its folder

A case follows from seed, kind and number, but for what the clock decides. Programs run in forks
of this process, after the imports. That leaves out torch.compile and several processes.
"""
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a process that has threads must not fork
import argparse
import itertools
import json
import multiprocessing
import random
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import torch
import torch._inductor  # noqa: F401  of what train.py imports the slowest
from torch.utils._pytree import tree_leaves

import model
import train
from conftest import TINY

FORK = multiprocessing.get_context("fork")
BASE = Path(tempfile.mkdtemp(prefix="torture-"))
PREPARE = ("prepare.py", "--dataset=files", f"--input={BASE}/texts", "--out_dir=data",
           "--seq_len=256", "--val_fraction=0.2", "--shard_bytes=20480")
TRAIN = "train.py", *TINY, "--data=data", "--out_dir=out", f"--training_bytes={12 * 4 * 32}"
RESUME = "train.py", "--out_dir=out", "--resume=True"  # TRAIN saves at steps 4, 8 and 12
CALLS = ("replace", "unlink", "truncate", "TextIOWrapper.truncate", "TextIOWrapper.write",
         "BufferedWriter.write")  # the functions of C that change files
LAST = {TRAIN: (46, 0.7), PREPARE: (110, 0.1)}  # events of CALLS, and seconds, that it takes


def child(command, stderr, last, stop):
    """Does what `python COMMAND` does, until make_model if `stop`, or kill -9 at the last event."""
    def count(_, event, function):
        if event[:2] == "c_" and function.__qualname__ in CALLS and next(number) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    number = itertools.count(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(stderr.fileno(), 2)
    if stop:
        model.make_model = lambda config: sys.exit()
    if last:
        sys.setprofile(count)
    sys.argv = [*command]
    runpy.run_path(ROOT / command[0], run_name="__main__")


def start(command, last=None, stop=False):
    stderr = tempfile.TemporaryFile("w+", errors="replace")
    process = FORK.Process(target=child, args=(command, stderr, last, stop))
    process.start()
    return process, stderr


def finish(started, seconds=300):
    """The exit code and stderr of a program; kill -9 after so many seconds."""
    process, stderr = started
    process.join(seconds)
    process.kill()
    process.join()
    stderr.seek(0)
    return process.exitcode, stderr.read()


def wrong(ended, *codes):
    """What is wrong with an end, which may have these exit codes: 1 and 2 with one line."""
    code, err = ended
    if code not in codes or code > 0 and not (err.endswith("\n") and err[:-1].isprintable()):
        return f"exit code {code}, {err.count(chr(10))} lines: {err[-300:]}"


def made(command, folder):
    """All that the command made in a folder, but for what the clock or --resume decides."""
    if command == PREPARE:
        return {path.name: path.read_bytes() for path in (folder / "data").iterdir()}
    saved = torch.load(folder / "out/ckpt.pt")
    del saved["log_bytes"], saved["config"]["resume"]
    state = [z.numpy().tobytes() if isinstance(z, torch.Tensor) else z for z in tree_leaves(saved)]
    records = map(json.loads, (folder / "out/log.jsonl").read_text().splitlines())
    return state, [{k: v for k, v in r.items() if k != "bytes_per_second"} for r in records]


def other_end(command):
    """What is wrong if the command, now ended, made something else than undisturbed."""
    if made(command, Path()) != made(command, BASE):
        return f"silent difference: {command[0]} made something else"

TEXTS = ["", " ", "null", "nan", "-inf", "-1", "0", "0.5", "1e9", "1e400", "1e-400", "1/0", "½",
         "1e999999999", "9" * 5000, "0x10", "1,5", "1j", "true", "[]", '{"x": 1}', "../x", "x.pt",
         "\x1b[31mred", "\u202eleft", "\udcff", "a\nb", "x" * 300, "cuda", "float16"]
CONFIGS = ["1 / 0", "raise SystemExit", "exit(3)", "seq_len = (", "\0", " gamma = 1", "gamma = 1j",
           "num_heads = [2]", "batch_size = 1.5", "learning_rate = 10 ** 400", "compile = 1", "",
           "learning_rte = 3", "import no_such_module", "def f():\n    return f()\nf()",
           "gamma = 'x\\x1b[31m'", "gamma = float('nan')", "gamma: 0.5", '{"gamma": 0.5}']


class Payload:
    """What a malicious checkpoint would have torch.load do."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def damage(raw, rng):
    """Bytes as a bad disk, a copy that was cut short, an editor or another version leaves them."""
    i, j = sorted(rng.randrange(len(raw)) for _ in range(2))
    text, word = rng.choice(TEXTS), re.compile(rb'"[^"\n]*"|[\w.+-]+|$').search(raw, i)
    text = rng.choice([text.encode(errors="replace"), json.dumps(text).encode()])
    return rng.choice([raw[: word.start()] + text + raw[word.end() :]] * 4 + [
        raw[:i] + bytes([raw[i] ^ 1 << rng.randrange(8)]) + raw[i + 1 :], raw[:i], raw[i:], text,
        raw[:i] + bytes(j - i) + raw[j:], raw[:i] + raw[j:], b"[" * 100000, bytes(512)])


# Each kind makes a case in the current folder, which holds data; it returns what was wrong, if any.


def mistakes(rng):
    """Command lines and configuration files, mistaken mostly."""
    command, keys = rng.choice([(TRAIN, [*train.DEFAULTS]), (PREPARE, [
        "seq_len", "val_fraction", "max_bytes", "shard_bytes", "input", "out_dir"])])
    key = rng.choice(keys * 9 + ["", "seq-len", "__name__", *TEXTS])
    value = rng.choice([*TEXTS, rng.randint(-9, 99), 2 ** rng.randint(0, 70), rng.random()])
    flag = rng.choice([f"--{key}={value}"] * 20 + [f"--{key}", f"-{key}=1", key, "--", "data"])
    if configured := rng.random() < 0.3:
        command, flag = TRAIN, "config.py"
        Path(flag).write_text(value := rng.choice(CONFIGS))
    what = wrong(finish(start([*command, flag], stop=True)), 2, *[0] * (not configured))
    return what and f"{what}; {flag} {value}"


def shards(rng):
    """Shards, finished or not, one of whose files is damaged: the same end, or one line."""
    if rng.random() < 0.5:
        shutil.rmtree("data")
        finish(start(PREPARE, last=rng.randint(5, 110)))
    command = TRAIN if Path("data/meta.json").exists() else PREPARE
    path = rng.choice([*Path("data").glob("*.bin"), *[*Path("data").glob("*.json")] * 5])
    raw = path.read_bytes()
    others = [b"", raw[: len(raw) // 2], raw + bytes(100)]
    path.write_bytes(damage(raw, rng) if path.suffix == ".json" else rng.choice(others))
    ended = finish(start(command))
    what = wrong(ended, 0, 2)
    if ended[0] == 0 and (command == TRAIN or path.suffix == ".bin"):  # progress.json has no seal
        what = other_end(command)
    return what and f"{what}; {path}"


def checkpoint(rng):
    """A checkpoint that is damaged, of another version or malicious: refused, not executed."""
    shutil.copytree(BASE / "half", "out")
    path = Path("out/ckpt.pt")
    saved, act = torch.load(path), rng.choice(["damage", "payload", "not finite", "another key"])
    if act == "payload":
        saved["step"] = Payload()
    elif act == "not finite":
        weight = rng.choice([*saved["model"].values()]).view(-1)
        weight[rng.randrange(len(weight))] = rng.choice([torch.nan, torch.inf])
    elif act == "another key":
        part = rng.choice([saved, saved["config"], saved["model_config"], saved["model"]])
        key = rng.choice(sorted(part.keys() - {"resume"}))
        part[f"{key}x"] = part.pop(key)
        act = f"{key} became {key}x"
    torch.save(saved, path)
    if act == "damage":
        path.write_bytes(damage(path.read_bytes(), rng))
    before, ended = path.read_bytes(), finish(start(RESUME))
    if act == "damage" and ended[0] == 0:  # of bytes that say nothing
        return other_end(TRAIN)
    what = wrong(ended, 2)
    if Path("executed").exists() or path.read_bytes() != before:
        what = "it was executed or changed"
    return what and f"{what}; {act}"


def kill(rng):
    """kill -9 up to five times, then the same command: the end is as if nothing had happened."""
    command = TRAIN if rng.random() < 0.7 else PREPARE
    if command == PREPARE:
        shutil.rmtree("data")
    for disturbed in [True] * rng.randint(1, 5) + [False]:
        again = RESUME if Path("out/ckpt.pt").exists() else command
        last, seconds = LAST[command]
        last = rng.randint(1, last) if disturbed and rng.random() < 0.7 else None
        seconds = rng.uniform(0, seconds) if disturbed and not last else 300
        ended = finish(start(again, last), seconds)
        if what := wrong(ended, 0, *[-signal.SIGKILL] * disturbed):
            return what
    return other_end(command)


KINDS = {kind.__name__: kind for kind in (mistakes, shards, checkpoint, kill)}


def undisturbed():
    """Makes in BASE texts, data, a run in out, and in half what kill -9 left of that run."""
    os.chdir(BASE)
    rng = random.Random(0)
    Path("texts").mkdir()
    for i in range(40):
        words = rng.choices(["the ", "fox ", "över ", "17 ", "end. "], k=rng.randint(100, 800))
        Path(f"texts/{i}").write_text("".join(words))
    for command in PREPARE, TRAIN:
        assert (what := wrong(finish(start(command)), 0)) is None, what
    half = start([*TRAIN, "--out_dir=half"])
    while not Path("half/ckpt.pt").exists():
        time.sleep(0.001)
    finish(half, 0)


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds (%(default)s)")
    parser.add_argument("--case", type=int, help="its number")
    options = parser.parse_args(argv)
    undisturbed()
    names, failures = options.only.split(","), Counter()
    for name in names:
        end = time.monotonic() + 60 * options.minutes / len(names)
        for number in itertools.count(options.case or 0):
            shutil.rmtree(BASE / "case", ignore_errors=True)
            shutil.copytree(BASE / "data", BASE / "case/data")
            os.chdir(BASE / "case")
            try:
                what = KINDS[name](random.Random(f"{options.seed} {name} {number}"))
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
            if what:
                failures[name] += 1
                print(f"--seed={options.seed} --only={name} --case={number}: {ascii(what)[1:-1]}")
            if options.case is not None or time.monotonic() > end:
                break
        print(f"{name}: {number + 1} cases, {failures[name]} failures", flush=True)
    print(f"files: {BASE}/case") if options.case is not None else shutil.rmtree(BASE)
    return int(failures.total() > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
