"""
Tortures train.py and prepare.py, and compare.py and sample.py where they read what those wrote: odd command lines and configuration
files, damaged files, kill -9, full disks, two runs in one folder. For Linux.

    python tests/torture.py --minutes=10 --seed=1               equal shares of the time for all kinds of cases, at least one case of each
    python tests/torture.py --minutes=60 --only=kill,disk
    python tests/torture.py --seed=1 --only=flags --case=17     repeats one case and keeps its folder

Prints the number of cases of each kind and a line for every failure; the exit code is 1 if there was one. A case is a function of seed,
kind and number, but for the moment at which a kill by the clock, or the second of two runs, meets the program.

No program starts Python anew: it runs in a fork of this process, which has imported torch, or (the kinds of INLINE) as one of many in
such a fork. What that leaves out: kills during Python's start and the imports, torch.compile, several processes, and loss of power. A
full disk is a limit on the size of each file.
"""
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a process that has threads must not fork
import argparse
import atexit
import contextlib
import gc
import io
import itertools
import json
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, namedtuple
from dataclasses import asdict
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import torch

import model
import prepare
import train
from config.command_line import BOUNDARIES
from conftest import TINY
from experiments import compare

CODE = {name: compile((ROOT / name).read_text(), ROOT / name, "exec") for name in ("train.py", "prepare.py", "sample.py")}
BASE = Path(tempfile.mkdtemp(prefix="torture-"))
TRAIN = "train.py", *TINY, "--data=data", "--out_dir=out", f"--training_bytes={12 * 4 * 32}"  # checkpoints at steps 4, 8 and 12
RESUME = "train.py", "--out_dir=out", "--resume=True"
PREPARE = ("prepare.py", "--dataset=files", f"--input={BASE}/texts", "--out_dir=data", "--seq_len=256", "--val_fraction=0.2",
           "--shard_bytes=20480")
SAMPLE = "sample.py", "--max_new_bytes=40", "--html=page.html"
LIMIT = 60  # seconds after which a program hangs
CALLS = "open", "write", "write_record", "write_end_of_file", "truncate", "close", "__exit__", "replace", "unlink"  # of files, mostly
MEMORY = 8 << 30  # bytes of address space that a program gets
TOOK, LAST = {}, {PREPARE: 220}  # seconds and, about, calls of an undisturbed TRAIN and PREPARE
Ended = namedtuple("Ended", "code out err")
kills, inline = Counter(), False


# ---------------------------------------------------------------------------------------------------------------------
# Programs.


def program(name, *arguments, environment={}, stop=None):
    """A function that does what `python NAME ARGUMENTS` does; with stop="model" until it makes a model, which model.json then describes,
    with stop="optimizer" until it makes an optimizer, when the data is open."""
    def make_model(config):
        Path("model.json").write_text(json.dumps(asdict(config)))
        sys.exit()

    def work():
        with (mock.patch.dict(os.environ, environment), mock.patch.object(sys, "argv", [name, *arguments]),
              mock.patch.object(model, "make_model", make_model if stop == "model" else model.make_model),
              mock.patch.object(torch.optim, "AdamW", (lambda *_, **__: sys.exit()) if stop == "optimizer" else torch.optim.AdamW)):
            exec(CODE[name], {"__name__": "__main__", "__file__": str(ROOT / name)})
    return work


def exit_code(work):
    try:
        work()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def start(work, room=None, calls=None):
    """Forks; the child does work(). No file of it can grow beyond `room` bytes; kill -9 meets it after so many calls of CALLS.
    Returns its pid and the pipes of its stdout and stderr."""
    def count(_, event, function):
        if event == "c_return" and function.__name__ in CALLS and next(number) == calls:
            os.kill(os.getpid(), signal.SIGKILL)

    pipes, number = [os.pipe(), os.pipe()], itertools.count(1)
    if pid := os.fork():
        for _, write in pipes:
            os.close(write)
        return pid, [read for read, _ in pipes]
    code = 1
    try:
        for fd, (_, write) in enumerate(pipes, 1):
            os.dup2(write, fd)
        sys.stdout, sys.stderr = open(1, "w", encoding="utf-8"), open(2, "w", 1, encoding="utf-8", errors="backslashreplace")
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        if room is not None:  # Python ignores SIGXFSZ: a write fails
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        if calls is not None:
            sys.setprofile(count)
        code = exit_code(work)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def finish(pid, pipes, seconds=LIMIT):
    """Reads what the child prints until it ends; kill -9 after so many seconds."""
    deadline, left, printed = time.monotonic() + seconds, list(pipes), {pipe: b"" for pipe in pipes}
    while left and (ready := select.select(left, [], [], max(0, deadline - time.monotonic()))[0]):
        for pipe in ready:
            printed[pipe] += (block := os.read(pipe, 1 << 16))
            if not block:
                left.remove(pipe)
    if left:
        os.kill(pid, signal.SIGKILL)
    for pipe in pipes:
        os.close(pipe)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Ended(code, *(text.decode(errors="replace") for text in printed.values()))


def run(work, seconds=LIMIT, **limits):
    if not inline:
        return finish(*start(work, **limits), seconds)
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = exit_code(work)
    return Ended(code, "", err.buffer.getvalue().decode())


def wrong(ended, codes=(0, 2)):
    """What is wrong with the end of a program that may have one of these exit codes, and with any but 0 one line on stderr; or None."""
    code, _, err = ended
    if "Traceback" in err:
        frames = re.findall(rf'File "{ROOT}/([\w/]+\.py)", line (\d+)', err)
        return f"traceback: {err.splitlines()[-1]} ({':'.join(frames[-1])})"
    if code == -signal.SIGKILL:
        return f"still at work after {LIMIT} s"
    if code not in codes:
        return f"exit code {code}: {err}"
    if code and not (err.endswith("\n") and err[:-1].isprintable()):
        return f"not one printable line: {err}"


# ---------------------------------------------------------------------------------------------------------------------
# What must be the same whatever happened.


def plain(value):
    """What a checkpoint holds, without tensors, which compare badly, and without --resume."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key != "resume"}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def log_of(folder):
    """The log's records without what the clock decides; ValueError if a number is not finite."""
    records = [json.loads(line, parse_constant=int) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in ("bytes_per_second", "seconds_left", "mfu")} for record in records]


def otherwise(command):
    """What tells what the command made in the current folder from what it made in BASE, undisturbed; or None."""
    if command == PREPARE:
        here, there = ({path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
                       for folder in (Path("data"), BASE / "data"))
        others = sorted(name for name in here | there if here.get(name) != there.get(name))
    else:
        others = ["ckpt.pt"] * (plain(torch.load("out/ckpt.pt")) != plain(torch.load(BASE / "out/ckpt.pt")))
        others += ["log.jsonl"] * (log_of("out") != log_of(BASE / "out"))
    return f"silent difference: {', '.join(others)}" if others else None


# ---------------------------------------------------------------------------------------------------------------------
# Odd values and damage.

TEXTS = ["", " ", "nan", "-inf", "-0", "+1", "1e9", "1e400", "1e-400", "1e4000", "1e999999999", "1e-999999999", "9" * 4000, "9" * 5000,
         "1/0", "1/3", "1 / 5", "0x10", "1_000", "１２", "½", "1,5", "1.", "1j", "None", "none", "true", "True", "False", "\x1b[31mred",
         "\u202eleft", "a\u0301" * 30, "\udcff", "a\nb", "x" * 300, "x/../y", "..", ".", "x.pt", "ä", "cuda", "float16", "learned", "bpe"]
WORDS = ["null", "true", "-1", "0", "1", "3", "0.5", "1e9", "1e18", str(2**31), str(2**63), str(2**64), "1e-320", "1e308", "1e400", "NaN",
         "9" * 400, "9" * 5000, '""', '"x"', '"1"', '"1/5"', '"a/b"', '"../x"', '"\\u001b[31mred"', '"\\u202eleft"', '"\\udcff"', "[]",
         "[1]", "{}", '{"x": 1}']  # of JSON
WORD = re.compile(rb'"[^"\n]*"|[\w.+-]+')
FILES = [b"", b"null", b"[]", b"{}", b"3", b'"x"', b"NaN", b"[" * 100000, b'{"a":' * 100000, b"9" * 5000, b"\xff\xfe", b"\0" * 512, b"[[]]",
         b"{}\n3\n"]
GOOD = {  # lines of a configuration file, and what they set
    "import math, os.path\nfrom pathlib import Path": {}, "# ä": {}, "if seq_len := 64:\n    pass": {"seq_len": 64},
    "def f(n):\n    return n\ndef g(n):\n    return f(n)\npolicy_window = g(3)": {"policy_window": 3},
    "attention_window = max(i for i in range(9))": {"attention_window": 8}, "policy_scale = (lambda s: 2 * s)(2.5)": {"policy_scale": 5.0},
    "class C:\n    w = 2\npolicy_window = C.w": {"policy_window": 2}, "_w = 3\nattention_window = _w * 4": {"attention_window": 12},
    "policy_window = len(__file__) and 2": {"policy_window": 2}, "n_mid_layers = [_ + 1 for _ in range(3)][-1]": {"n_mid_layers": 3},
    "downsample_rate_target = '1/4'": {"downsample_rate_target": 0.25},
    "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    n_up_layers = 2": {"n_up_layers": 2}}
EITHER = ["for i in range(3):\n    n_down_layers = 1", "with open(__file__) as file:\n    text = file.read()", "print('\\x1b[31m')",
          "boundaries = 'a\\0b.pt'"]
BAD = ["1 / 0", "raise SystemExit", "raise SystemExit('text')", "import sys\nsys.exit(0)", "exit(3)", "seq_len = (", " gamma = 1",
       "gamma = 1j", "gamma = None", "num_heads = [2]", "batch_size = 1.5", "data = b'x'", "learning_rate = float('nan')", "\0",
       "grad_clip = -float('inf')", "learning_rte = 3", "import no_such_module", "def f():\n    return f()\nf()", "gamma = 'x\\x1b[31m'",
       "learning_rate = 10 ** 400", "assert False, 'a\\nb'", "compile = 1",
       "raise ValueError('\\x1b[31m')", "dtype = float"]


def damage(raw, rng):
    """Bytes as a bad disk, a copy that was cut short, an editor or another version of the program leaves them."""
    i, j = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    word = WORD.search(raw, i) or WORD.search(raw)
    flipped = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 8])):
        flipped[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return rng.choice([raw[: word.start()] + rng.choice(WORDS).encode() + raw[word.end() :]] * 5 + [bytes(flipped)] * 3 + [
        raw[:i], raw[:i] + raw[j:], raw[:i] + bytes(j - i) + raw[j:], raw[:i] + raw, raw[:i] + rng.randbytes(rng.randint(1, 64)) + raw[i:],
        b"\xef\xbb\xbf" + raw, raw.replace(b"\n", b"\r\n"), rng.choice(FILES)])


# ---------------------------------------------------------------------------------------------------------------------
# The kinds: each makes a case in the current folder, which has the data and nothing else, and returns what was wrong with it, or None.


def flags(rng):
    """Command lines of train.py."""
    Path("file").write_text("text")
    arguments, odd = list(TRAIN[1:] if rng.random() < 0.7 else TRAIN[-3:-1]), []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        key = rng.choice([*train.DEFAULTS] * 20 + ["", "BOS", "seq-len", "__name__", *TEXTS])
        number = rng.choice([rng.randint(-9, 99), 2 ** rng.randint(0, 70), rng.random(), f"{rng.randint(-9, 99)}e{rng.randint(-400, 400)}"])
        forms = [f"--{key}={rng.choice(TEXTS)}", f"--{key}={number}"] * 50 + [f"--{key}", f"-{key}=1", key, "--", "--=", "file", "data"]
        odd.append(rng.choice(forms))
        arguments.insert(rng.randint(0, len(arguments)), odd[-1])
    environment = rng.choice([{}] * 50 + [{"WORLD_SIZE": size} for size in ("0", "-1")])
    what = wrong(run(program("train.py", *arguments, environment=environment, stop="model")))
    return what and f"{what}; {odd} {environment}"


def configs(rng):
    """Configuration files: the good ones set what they say."""
    either, bad = (rng.sample(some, 1) if rng.random() < share else [] for some, share in ((EITHER, 0.1), (BAD, 0.4)))
    pieces = [*rng.sample([*GOOD], rng.randint(0, 4)), *either, *bad]
    rng.shuffle(pieces)
    raw = "\n".join([*pieces, ""]).encode()
    raw = rng.choice([raw] * 7 + [b"\xef\xbb\xbf" + raw, raw.replace(b"\n", b"\r\n"), raw + b"\xff"])
    Path("config.py").write_bytes(raw)
    ended = run(program(*TRAIN, "config.py", stop="model"))
    what = wrong(ended, (2,) if bad or raw.endswith(b"\xff") else (0, 2) if either else (0,))
    if not what and ended.code == 0:
        expected = {key: value for piece in pieces for key, value in GOOD.get(piece, {}).items()}
        if not expected.items() <= json.loads(Path("model.json").read_text()).items():
            what = f"silent difference: {expected} was not set"
    return what and f"{what}; {raw[:300]}"


def meta(rng):
    """meta.json, as train.py reads it: accepted only if it still names the same rows."""
    path = Path("data/meta.json")
    before = json.loads(path.read_text())
    path.write_bytes(damage(path.read_bytes(), rng))
    seq_len = rng.choice([32, 96])  # the data's rows have 256 bytes
    ended = run(program(*TRAIN, f"--seq_len={seq_len}", stop="optimizer"))
    if ended.code == 0:
        after = json.loads(path.read_bytes())
        if seq_len == 96 or any((before[split]["bytes"], {*before[split]["sha256"]}) != (after[split]["bytes"], {*after[split]["sha256"]})
                                for split in ("train", "val")):
            return "silent difference: accepted, but these are other rows"
    return wrong(ended)


def shards(rng):
    """A shard that is not as long as it was."""
    path = rng.choice(sorted(Path("data").glob("*.bin")))
    raw = path.read_bytes()
    path.unlink()
    other = rng.choice(["missing", "a folder", b"", raw[: rng.randrange(len(raw))], raw + raw[: rng.randint(1, len(raw))]])
    if other == "a folder":
        path.mkdir()
    elif other != "missing":
        path.write_bytes(other)
    return wrong(run(program(*TRAIN, stop="optimizer")), (2,))


def progress(rng):
    """What a killed prepare.py goes on from, progress.json and shards: it ends with the same data or in one line."""
    shutil.rmtree("data")
    shutil.copytree(rng.choice(sorted((BASE / "killed").iterdir())), "data")
    path = rng.choice([Path("data/progress.json")] * 3 + sorted(Path("data").glob("*_*")))
    raw = path.read_bytes()
    path.write_bytes(damage(raw, rng) if path.suffix == ".json" else raw[: rng.randrange(len(raw) + 1)])
    ended = run(program(*PREPARE))
    return wrong(ended) or (otherwise(PREPARE) if ended.code == 0 else None)


def log(rng):
    """log.jsonl: compare.py reads it and train.py goes on; lines that are as they were stay, others may go."""
    shutil.copytree(BASE / "out", "out")
    path = Path("out/log.jsonl")
    before = path.read_bytes()
    path.write_bytes(damage(before, rng))
    whole = {*before.splitlines(True)} & {*path.read_bytes().splitlines(True)}
    what = wrong(run(lambda: compare.read_run("learned", 1337, Path("out"))), (0,)) or wrong(run(program(*RESUME)), (0,))
    if not what and not whole <= {*path.read_bytes().splitlines(True)}:
        what = "silent difference: whole lines of log.jsonl are gone"
    if not what and not all("step" in json.loads(line) for line in path.read_text().splitlines()):
        what = "silent difference: log.jsonl keeps what is no record"
    return what


def bits(rng):
    """A checkpoint with damaged bytes: refused, or all it holds is as it was."""
    def load():
        try:
            loaded, saved = model.load_checkpoint(path)
        except (FileNotFoundError, ValueError) as error:
            print(prepare.printable(str(error)), file=sys.stderr)
            sys.exit(2)
        there = torch.load(BASE / "out/ckpt.pt")
        assert plain(saved) == plain(there) and plain(loaded.state_dict()) == plain(there["model"]), "silent difference"

    path = Path("ckpt.pt")
    path.write_bytes(damage((BASE / "out/ckpt.pt").read_bytes(), rng))
    return wrong(run(load))


def keys(rng):
    """A whole checkpoint that lacks a key, has another one or holds what is no number: train.py does not go on from it."""
    shutil.copytree(BASE / "out", "out")
    saved = torch.load("out/ckpt.pt")
    where = rng.choice(["top", "config", "model_config", "model"])
    part = saved if where == "top" else saved[where]
    key = rng.choice(sorted(part.keys() - {"resume"}))
    act = rng.choice(["missing", "renamed", "unknown"] + ["not finite"] * (where == "model"))
    if act == "not finite":
        part[key].view(-1)[rng.randrange(part[key].numel())] = rng.choice([torch.nan, torch.inf, -torch.inf])
    elif act == "unknown":
        part["unknown"] = part[key]
    else:
        value = part.pop(key)
        part |= {f"{key}x": value} if act == "renamed" else {}
    torch.save(saved, "out/ckpt.pt")
    what = wrong(run(program(*RESUME)), (0, 2) if act == "unknown" and where in ("top", "config") else (2,))
    return what and f"{what}; {act}: {key} of {where}"


def runs(rng):
    """Three steps with odd numbers: finite weights and a log that is JSON, or one line."""
    values = {int: ["0", "1", "2", "3", "1e9", "1e18", 2**63, 2**64 - 1],
              float: ["0", "1e-320", "1e-30", "0.999999", "1", "1e9", "1e30", "1e308"]}
    numbers = {key: type(value) for key, value in train.DEFAULTS.items() if type(value) in values and key != "training_bytes"}
    odd = [f"--{key}={rng.choice(values[numbers[key]])}" for key in rng.sample([*numbers], rng.choice([1, 1, 2]))]
    odd.append(f"--boundaries={rng.choice([name for name in BOUNDARIES if name != 'bpe'])}")
    ended = run(program(*TRAIN, "--training_bytes=384", *odd))
    what = wrong(ended, (0, 1, 2))
    if not what and ended.code == 0:
        log_of("out")
        what = wrong(run(lambda: model.load_checkpoint("out/ckpt.pt")), (0,))
    return what and f"{what}; {odd}"


def go_on(command):
    """The command that goes on with what `command` began."""
    return RESUME if command == TRAIN and Path("out/ckpt.pt").exists() else command


def kill(rng):
    """kill -9 up to five times, after a call or by the clock: in the end all is as if nothing had happened."""
    command = TRAIN if rng.random() < 0.7 else PREPARE
    if command == PREPARE:
        shutil.rmtree("data")
    for _ in range(rng.randint(1, 5)):
        moment = {"calls": rng.randint(1, LAST[command])} if rng.random() < 0.5 else {"seconds": rng.uniform(0.01, TOOK[command])}
        ended = run(program(*go_on(command)), **{"seconds": 5 * LIMIT} | moment)  # counting calls takes time
        kills[command[0]] += ended.code == -signal.SIGKILL
        if ended.code != -signal.SIGKILL and (what := wrong(ended, (0,))):
            return what
    return wrong(run(program(*go_on(command))), (0,)) or otherwise(command)


def disk(rng):
    """A full disk: one line, and with room again the program goes on from a whole checkpoint or shard; an old page stays."""
    command, most = rng.choice([(TRAIN, 220_000), (PREPARE, 22_000), (SAMPLE, 8000)])
    if command == PREPARE:
        shutil.rmtree("data")
    elif command == SAMPLE or rng.random() < 0.7:
        shutil.copytree(BASE / ("half" if command == TRAIN else "out"), "out")
    Path("page.html").write_text("old")
    ended = run(program(*go_on(command)), room=rng.randrange(rng.choice([3000, most])))
    what, page = wrong(ended, (0, 1, 2)), Path("page.html").read_bytes()
    if not what and command != SAMPLE:
        what = wrong(run(program(*go_on(command))), (0,)) or otherwise(command)
    elif not what and not (page.endswith(b"</html>\n") if ended.code == 0 else page == b"old"):
        what = "silent difference: neither the old page nor a new one"
    return what and f"{command[0]}: {what}"


def race(rng):
    """Two runs of a command, the second a little later: one of them does the work."""
    command = rng.choice([TRAIN, PREPARE])
    if command == PREPARE:
        shutil.rmtree("data")
    first = start(program(*command))
    time.sleep(rng.choice([0, rng.uniform(0, 0.5) * TOOK[command]]))
    both = [finish(*started) for started in (first, start(program(*command)))]
    late = [ended.code == 2 or "already there" in ended.out for ended in both]
    return wrong(both[0]) or wrong(both[1]) or (f"two at work in one folder: {both}" if sum(late) != 1 else otherwise(command))


INLINE = flags, configs, meta, shards, progress, log, bits, keys
KINDS = {kind.__name__: kind for kind in (*INLINE, runs, kill, disk, race)}


# ---------------------------------------------------------------------------------------------------------------------


def undisturbed():
    """Makes in BASE what cases copy and compare with: texts, data, in killed what kills leave of it, a run in out, and in half what a kill
    after its first checkpoint leaves."""
    os.chdir(BASE)
    rng = random.Random(0)
    Path("texts").mkdir()
    for i in range(40):
        words = (rng.choice(["the", "fox", "jumps", "över", "17", "end."]) for _ in range(rng.randint(100, 800)))
        Path(f"texts/{i}").write_text(" ".join(words))
    for command in PREPARE, TRAIN:
        began = time.monotonic()
        ended = run(program(*command))
        assert ended.code == 0, ended.err
        TOOK[command] = time.monotonic() - began
    Path("killed").mkdir()
    Path("data").rename("whole")
    for calls in range(20, 230, 12):
        run(program(*PREPARE), calls=calls)
        if Path("data/progress.json").exists():
            Path("data").rename(f"killed/{calls}")
    shutil.rmtree("data", ignore_errors=True)
    Path("whole").rename("data")
    Path("out").rename("whole")
    for calls in itertools.count(500, 500):
        run(program(*TRAIN), 10 * LIMIT, calls=calls)  # counting takes time
        if Path("out/ckpt.pt").exists():
            break
    LAST[TRAIN] = 3 * calls  # of three checkpoints
    Path("out").rename("half")
    Path("whole").rename("out")


def case(kind, seed, number):
    """What was wrong with the case, in one line, or None."""
    shutil.rmtree(BASE / "case", ignore_errors=True)
    shutil.copytree(BASE / "data", BASE / "case/data")
    os.chdir(BASE / "case")
    try:
        what = kind(random.Random(f"{seed} {kind.__name__} {number}"))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
    return what and ascii(what)[1:-1][:600]


def batch(kind, seed, number, seconds):
    """Prints number and outcome of cases that run in this process, from this number on, for so many seconds."""
    global inline
    inline, end = True, time.monotonic() + seconds
    for number in itertools.count(number):
        print(json.dumps([number, case(kind, seed, number)]), flush=True)
        if time.monotonic() >= end:
            break


def outcomes(kind, seed, number, seconds):
    """Number and outcome of this case, and for the kinds of INLINE of those after it, for so many seconds."""
    if kind not in INLINE:
        return [(number, case(kind, seed, number))]
    ended = finish(*start(lambda: batch(kind, seed, number, seconds)))
    done = [json.loads(line) for line in ended.out.splitlines()]
    return done + [(number + len(done), wrong(ended, (0,)))] * (ended.code != 0)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds (%(default)s)")
    parser.add_argument("--case", type=int, help="its number")
    options = parser.parse_args(argv)
    names, counts, failures = options.only.split(","), Counter(), Counter()
    if others := set(names) - set(KINDS):
        parser.error(f"--only={','.join(others)} is none of {', '.join(KINDS)}")
    seconds = 60 * options.minutes / len(names) if options.case is None else 0
    if options.case is None:
        atexit.register(shutil.rmtree, BASE, ignore_errors=True)
    undisturbed()
    gc.freeze()  # forks then copy fewer pages
    for name in names:
        number, end = options.case or 0, time.monotonic() + seconds
        while not counts[name] or time.monotonic() < end:
            for number, what in outcomes(KINDS[name], options.seed, number, min(2, seconds)):
                counts[name] += 1
                if what:
                    failures[name] += 1
                    print(f"{name}: {what} | python tests/torture.py --seed={options.seed} --only={name} --case={number}", flush=True)
            number += 1
        print(f"{name}: {counts[name]} cases, {failures[name]} failures", flush=True)
    print(f"{counts.total()} cases, {kills['train.py']} kills of train.py, {kills['prepare.py']} of prepare.py, {failures.total()} failures"
          + (f"; files: {BASE}/case" if options.case is not None else ""))
    return int(failures.total() > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
