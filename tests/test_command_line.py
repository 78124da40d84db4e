"""train.py's command line and configuration files."""
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

import sample
import train
from common.commandline import UserError, read_command_line, run_program
from common.device import device_and_dtype
from common.text import marked
from conftest import ROOT, TINY, run


def read(*argv):
    return read_command_line([str(argument) for argument in argv], train.Hyperparameters)


@pytest.fixture
def error_of(tmp_path):
    """The mistake that train.py must report."""
    def error_of(*argv):
        with pytest.raises(UserError) as caught:  # at the data, if it does not mind the rest
            train.main([f"--out_dir={tmp_path}/out", f"--data={tmp_path}", *map(str, argv)])
        return str(caught.value)
    return error_of


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path):
    config = tmp_path / "config.py"
    config.write_text("gamma = 0.5\nwarmup_bytes = 5\ndownsample_rate_target = 1 / 4\n")
    assert read(config, "--gamma=0.25", "--training_bytes=6e9", "--policy_scale=1/2") == {
        "gamma": 0.25, "warmup_bytes": 5, "downsample_rate_target": 0.25,
        "training_bytes": 6_000_000_000, "policy_scale": 0.5}
    assert read("--gamma", "0.25", "--seed", "5", config) == {
        "gamma": 0.5, "seed": 5, "warmup_bytes": 5, "downsample_rate_target": 0.25}


def test_a_configuration_files_own_names_are_no_hyperparameters(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(
        "\ufeffimport math\nfrom pathlib import Path\n_third = 1 / 3\n"
        "def half(x): return _third * more(x)\ndef more(x): return 1.5 * x\n"
        "for _i in range(8): seed = _i\ngamma = half(1)\nn_mid_layers = math.isqrt(9)\n"
        "out_dir = str(Path(__file__).parent / 'out')\n")
    assert read(config) == {
        "gamma": 0.5, "out_dir": f"{tmp_path}/out", "n_mid_layers": 3, "seed": 7}


@pytest.mark.parametrize("name, text, message", [
    ("a.yaml", "gamma: {a: 0.5", "cannot read the configuration file"),
    ("a.py", "gamma, seq_length = 0.5, 64", "'seq_length'; try seq_len"),
    ("a.py", "seq_length = None", "unknown name 'seq_length'"),
    ("a.py", "gamma: 0.5\n", "a.py' assigns no hyperparameters"),
    ("a.py", "import math\n_gamma = 0.5\n", "a.py' assigns no hyperparameters"),
    ("a.py", "gamma = 1 / 0", "a.py': division by zero"),
    ("a.py", "gamma = [0.5]", "gamma cannot be [0.5] (type float, default 0.97)"),
    ("a.py", "data = 5", "data cannot be 5 (type str, default 'data/stdlib')"),
    ("a.py", "quit()", "cannot read the configuration file"),
])
def test_a_configuration_file_that_assigns_nothing_or_nothing_fit_is_refused(
        name, text, message, tmp_path, error_of):
    (tmp_path / name).write_text(text)
    assert message in error_of(tmp_path / name)


def test_a_tilde_that_the_shell_left_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "config.py").write_text("data = '~/books'")
    assert read("--out_dir=~/out", "--init_from=~/a/ckpt.pt", tmp_path / "config.py") == {
        "out_dir": "/home/me/out", "init_from": "/home/me/a/ckpt.pt", "data": "/home/me/books"}


@pytest.mark.parametrize("program, settings, flag", [
    (train, train.Hyperparameters, "-h"), (sample, sample.Settings, "--help")])
def test_help_lists_every_setting_with_its_default_and_comment(program, settings, flag, capsys):
    out, _ = run(f"{program.__name__}.py", "--seed=2", flag)
    assert out.startswith(program.__doc__)
    for field in fields(settings):
        kind = field.type.__name__
        assert re.search(rf"^ *{field.name}: {kind} = .+  # .+", out, re.MULTILINE)
    with pytest.raises(SystemExit):  # also from another program, such as this one
        program.main([flag])
    assert capsys.readouterr().out == out


def test_the_rows_of_a_training_step_must_divide_over_all_processes(monkeypatch, error_of):
    monkeypatch.setattr(train, "WORLD_SIZE", 3)
    message = "effective_batch_size=16 must be a multiple of the number of processes, 3; change one"
    assert message in error_of("--batch_size=4")
    monkeypatch.setattr(train, "WORLD_SIZE", 2)
    message = ("effective_batch_size=16 must be a multiple of batch_size=16 times the number of "
               "processes, 2; change batch_size")
    assert message in error_of()


@pytest.mark.parametrize("arguments, message", [
    ("--learning_rte=1", "unknown name 'learning_rte'; try learning_rate"),
    ("--lr=1", "unknown name 'lr'; try learning_rate"),
    ("--block_size=512", "unknown name 'block_size'; try seq_len"),
    ("--resume", "--resume has no value; write --resume=value"),
    ("--resume --seed=5", "--resume has no value; write --resume=value"),
    ("--gamma=", "gamma cannot be '' (type float, "),
    ("--out_dir=", "out_dir cannot be '' (type str, default 'out')"),
    ("no/such/config.py", "cannot read the configuration file 'no/such/config.py'"),
    ("--seq_len=many", "seq_len cannot be 'many' (type int, "),
    ("--seq_len=2.5", "seq_len cannot be '2.5' (type int, "),
    ("--seed=True", "seed cannot be 'True' (type int, "),
    ("--compile=1", "compile cannot be '1' (type bool, "),
    ("--learning_rate=1e400", "learning_rate cannot be '1e400'"),
    ("--learning_rate=nan", "learning_rate cannot be 'nan'"),
    ("--learning_rate=1/0", "learning_rate cannot be '1/0'"),
    ("--seq_len=0", "seq_len=0 must be above 0"),
    ("--training_bytes=-5", "training_bytes=-5 must be above 0"),
    ("--num_heads=0", "num_heads=0 must be above 0"),
    ("--embedding_dim=-32", "embedding_dim=-32 must be above 0"),
    ("--policy_scale=0", "policy_scale=0.0 must be above 0"),
    ("--n_mid_layers=-2", "n_mid_layers=-2 must not be negative"),
    ("--learning_rate=-1", "learning_rate=-1.0 must not be negative"),
    ("--warmup_bytes=-1", "warmup_bytes=-1 must not be negative"),
    ("--gamma=1.5", "gamma=1.5 must be from 0 to 1"),
    ("--seed=-1", "seed=-1 must not be negative"),
    ("--seed=2**63", "must be below 2**63"),
    ("--policy_window=13", "policy_window=13 must be at most 12, because a draw"),
    ("--embedding_dim=128 --num_heads=3", "embedding_dim=128 must be a multiple of 2 * num_heads"),
    ("--downsample_rate_target=1", "downsample_rate_target=1.0 is tokens per byte"),
    ("--downsample_rate_target=5", "5.0 is tokens per byte, for example 1/5; it must be above"),
    ("--downsample_rate_target=0.99999999", "downsample_rate_target=0.99999999 is tokens"),
    ("--downsample_rate_target=1/64", "must be above 0.5 / seq_len, 0.016, and below 1"),
    ("--batch_size=1", "batch_size=1 leaves eq. 17 no other rows to compare with; use 2"),
    ("--lambda_early=0", "lambda_early=0.0 would not train the baseline of eq. 15"),
    ("--system=words", "system='words' must be one of learned, uniform"),
    ("--device=tpu", "device='tpu' must be auto or one that torch finds: ['cpu']"),
    ("--dtype=int8", "dtype='int8' must be auto, float32, bfloat16 or float16"),
    ("--data=no/such/data", "no no/such/data/meta.json; make the data first"),
    ("--seq_len=5000", "seq_len=5000 does not divide the 64 bytes of a row"),
    ("--resume=True", "no checkpoint"),
])
def test_a_mistake_is_explained(arguments, message, data, error_of):
    assert message in error_of(f"--data={data}", "--seq_len=32", *arguments.split())


def test_a_notebooks_output_will_do():
    class Plain:
        """A stdout that only has what print needs."""

        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    for out in Plain(), io.StringIO():
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as end:
            run_program(lambda argv: print(*marked([(97, True, 0.5)])))
        assert (out.text if isinstance(out, Plain) else out.getvalue()) == "a│\n"
        assert end.value.code == 0


@pytest.mark.parametrize("device, bfloat16_gpu, bfloat16_cpu, expected", [
    ("cuda", True, False, "bfloat16"), ("cuda", False, True, "float16"),
    ("cpu", False, True, "bfloat16"), ("cpu", False, False, "float32"),
    ("mps", False, False, "float32")])
def test_dtype_auto_is_what_the_machine_is_fast_at(
        device, bfloat16_gpu, bfloat16_cpu, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(torch.mps, "is_available", lambda: device == "mps")
    monkeypatch.setattr(  # a T4 emulates bfloat16
        torch.cuda, "is_bf16_supported",
        lambda including_emulation=True: including_emulation or bfloat16_gpu)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": bfloat16_cpu})
    assert device_and_dtype("auto", "auto") == (device, expected)
    assert device_and_dtype("cpu", "float16") == ("cpu", "float16")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.mps, "is_available", lambda: False)
    assert device_and_dtype("auto", "auto") == ("cpu", "float32")


def test_every_configuration_file_is_accepted():
    for path in (ROOT / "config").glob("[a-z]*.py"):
        train.check(train.Hyperparameters(**read(path)))


def test_what_only_the_early_exit_needs_is_not_asked_of_other_systems():
    hp = train.Hyperparameters(system="uniform", lambda_early=0.0, batch_size=1)
    train.check(hp)


def test_eight_processes_may_have_one_row_each():
    hp = train.Hyperparameters(effective_batch_size=8, batch_size=1)
    train.check(hp, processes=8)


def test_a_program_prints_a_mistake_on_one_line_and_keeps_other_tracebacks(tmp_path):
    _, error = run("train.py", "--\x1b[31m=\n", f"--out_dir={tmp_path}", code=2)
    assert error == "train.py: unknown name '␛[31m'; try --help\n"
    program = "from common.commandline import run_program; run_program(lambda argv: int('x'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("encoding, mark", [("utf-8", "│"), ("ascii", "|"), ("cp1252", "|")])
def test_help_and_marks_are_shown_on_terminals_of_any_encoding(encoding, mark):
    marked = ("from common.text import marked;"
              "print(*marked([(97, True, 0.5), (98, False, 0.5)]), sep='')")
    for command, end in (["-c", marked], f"a{mark}b\n"), (["sample.py", "--help"], "likeliest bytes"):
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, capture_output=True,
            env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C",
                              "PYTHONCOERCECLOCALE": "0"})
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode(encoding).rstrip().endswith(end.rstrip())


FORKS = """
import builtins, os, runpy, signal, sys, torch, torch._inductor, torch.utils.flop_counter

def stop(*texts, **options):  # a print in which a signal arrives
    builtins.print = shown
    signal.raise_signal(number)
    shown(*texts, **options)

shown = print
for line in sys.stdin:
    ending, program, *arguments = line.split()
    if os.fork() == 0:
        read, write = os.pipe()
        if ending == "pipe":
            os.close(read)
        os.dup2(os.open(ending, os.O_WRONLY) if ending == "/dev/full" else write, 1)
        if ending.startswith("SIG"):
            number = getattr(signal, ending)
            builtins.print = stop
        sys.argv[1:] = arguments
        run = runpy.run_path if program.endswith(".py") else runpy.run_module
        try:
            run(program, run_name="__main__")
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code)  # a normal exit takes two seconds
    print("end", ending, program, os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr)
"""
CODES = {"/dev/full": 2, "pipe": 0, "SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
PROGRAMS = {  # each prints its help, its results or its progress
    "train.py": "{tiny} --out_dir={tmp}/out", "train.py ": "--help", "prepare.py": "--help",
    "prepare.py ": "--dataset=files --input={tmp}/x.txt --seq_len=9 --out_dir={tmp}/x",
    "sample.py": "--out_dir={trained} --score={tmp}/x.txt", "experiments.report": "--help",
    "experiments.evaluate": "{trained} heldout={data}", "experiments.worth": "{trained} --flips=64",
    "experiments.figures": "--watch={tmp}", "experiments.bench": "{larger} --setting=",
    "experiments.compare": "--name={tmp}/runs --systems=uniform {larger}"}


@pytest.fixture(scope="module")
def endings(data, trained, tmp_path_factory):
    """For each ending, its folder, and what all programs print on stderr and how they end."""
    folders, commands = {}, []
    for ending in CODES:
        tmp = folders[ending] = tmp_path_factory.mktemp("ending")
        (tmp / "x.txt").write_text("some text\n" * 99)
        shutil.copy(trained / "log.jsonl", tmp)
        tiny = f"{' '.join(TINY)} --data={data} --training_bytes=128 --warmup_bytes=0"
        larger = f"{tiny} --effective_batch_size=128 --batch_size=128"  # FLOPs are counted faster
        names = {"data": data, "trained": trained, "tmp": tmp, "tiny": tiny, "larger": larger}
        commands += [f"{ending} {program} {arguments.format(**names)}"
                     for program, arguments in PROGRAMS.items()]
    done = subprocess.run(
        [sys.executable, "-c", FORKS], cwd=ROOT, input="\n".join(commands), text=True,
        capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = [line for line in done.stderr.splitlines() if "%" not in line]  # progress bars
    found = {}
    for ending in CODES:
        last = max(i for i, line in enumerate(lines) if line.startswith(f"end {ending} "))
        found[ending] = folders[ending], lines[: last + 1]
        lines = lines[last + 1 :]
    return found


@pytest.mark.parametrize("ending", CODES)
def test_a_program_ends_with_the_code_that_a_shell_expects(ending, endings):
    """When what it prints fills the disk or has no reader, or when a signal stops it."""
    folder, lines = endings[ending]
    ends = [line for line in lines if line.startswith("end ")]
    assert ends == [f"end {ending} {program.strip()} {CODES[ending]}" for program in PROGRAMS]
    errors = [line for line in lines if line not in ends]
    assert len(errors) >= len(ends) if ending == "/dev/full" else not errors
    for error in errors:
        assert re.fullmatch(r"[^:]*: .*\[Errno 28\] No space left on device.*", error)
    # training goes on without its reader, and a signal makes it save
    assert (folder / "out/ckpt.pt").exists() or ending == "/dev/full"


def test_a_comparison_that_is_stopped_leaves_a_run_that_can_go_on(data, tmp_path):
    command = [sys.executable, "-m", "experiments.compare", "--systems=learned", "--seeds=2",
               f"--name={tmp_path}", *TINY, f"--data={data}", "--training_bytes=1e5",
               "--eval_interval=999999"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert any(line.startswith("step 1 ") for line in process.stdout)
        process.terminate()
        rest = process.stdout.read()  # to the end of all processes
    assert process.returncode == 143
    checkpoint, = tmp_path.rglob("ckpt.pt")
    assert rest.endswith(
        f"go on with: python train.py --resume=True --out_dir={checkpoint.parent}\n")
