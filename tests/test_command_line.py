"""train.py's command line and configuration files."""
import re

import pytest

import train
from config.command_line import read_command_line


def read(*argv):
    return read_command_line([str(argument) for argument in argv], train.DEFAULTS)


@pytest.fixture
def error_of(tmp_path, capsys):
    """The one line on stderr with which train.py must end."""
    def error_of(*argv):
        with pytest.raises(SystemExit) as stopped:  # at the data, if it does not mind the rest
            train.main([f"--out_dir={tmp_path}/out", f"--data={tmp_path}", *map(str, argv)])
        error = capsys.readouterr().err
        assert stopped.value.code == 2
        assert error.count("\n") == 1
        return error
    return error_of


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path):
    config = tmp_path / "config.py"
    config.write_text("gamma = 0.5\nwarmup_bytes = 5\ndownsample_rate_target = 1 / 4\n")
    assert read(config, "--gamma=0.25", "--training_bytes=6e9", "--policy_scale=1/2") == {
        "gamma": 0.25, "warmup_bytes": 5, "downsample_rate_target": 0.25,
        "training_bytes": 6_000_000_000, "policy_scale": 0.5}
    assert read("--gamma=0.25", config)["gamma"] == 0.5
    assert read("--seed=9007199254740993") == {"seed": 2**53 + 1}  # no float


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
    ("a.yaml", "gamma: 0.5\n", "a.yaml' is not a .py file"),
    ("a.py", "gamma, seq_length = 0.5, 64", "'seq_length'; did you mean 'seq_len'?"),
    ("a.py", "seq_length = None", "unknown hyperparameter 'seq_length'"),
    ("a.py", "gamma: 0.5\n", "a.py' assigns no hyperparameters"),
    ("a.py", "import math\n_gamma = 0.5\n", "a.py' assigns no hyperparameters"),
    ("a.py", "gamma = 1 / 0", "a.py': division by zero"),
    ("a.py", "gamma = [0.5]", "gamma must be of type float, got [0.5] (default 0.97)"),
    ("a.py", "data = 5", "data must be of type str, got 5"),
    ("a.py", "quit()", "cannot read the configuration file"),
])
def test_a_configuration_file_that_assigns_nothing_or_nothing_fit_is_refused(
        name, text, message, tmp_path, error_of):
    (tmp_path / name).write_text(text)
    assert message in error_of(tmp_path / name)


def test_a_tilde_that_the_shell_left_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "config.py").write_text("data = '~/books'")
    assert read("--out_dir=~/out", "--boundaries=~/a/ckpt.pt", tmp_path / "config.py") == {
        "out_dir": "/home/me/out", "boundaries": "/home/me/a/ckpt.pt", "data": "/home/me/books"}


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_hyperparameter_with_its_default_and_comment(flag, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(["--gamma=0.5", flag])
    out = capsys.readouterr().out
    assert not stopped.value.code
    assert out.startswith(train.__doc__)
    for key in train.DEFAULTS:
        assert re.search(rf"^{key} = .+  # .+", out, re.MULTILINE)


def test_the_rows_of_a_training_step_must_divide_over_all_processes(monkeypatch, error_of):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "must be a multiple of batch_size=4 times the number of processes, 3" in error_of(
        "--batch_size=4")


@pytest.mark.parametrize("arguments, message", [
    ("--learning_rte=1", "did you mean 'learning_rate'?"),
    ("--\x1b[31m=1", "unknown hyperparameter '\u241b[31m'"),
    ("--gamma", "'--gamma' has no value; write --gamma=..."),
    ("no/such/config.py", "cannot read the configuration file 'no/such/config.py'"),
    ("--seq_len=many", "seq_len must be of type int, got 'many' (default 256)"),
    ("--seq_len=2.5", "seq_len must be of type int, got '2.5'"),
    ("--compile=1", "compile must be of type bool, got '1'"),
    ("--learning_rate=1e400", "got '1e400'"),
    ("--learning_rate=nan", "got 'nan'"),
    ("--learning_rate=1/0", "got '1/0'"),
    ("--learning_rate=1e-999999999", "learning_rate=0.0 must be positive"),
    ("--gamma=1.5", "gamma=1.5 must be at most 1"),
    ("--seed=-1", "seed=-1 must not be negative"),
    ("--num_draws=0", "num_draws=0 must be positive"),
    ("--eval_rows=1", "eval_rows=1 must be at least 2"),
    ("--batch_size=0", "batch_size=0 must be positive"),
    ("--policy_window=13", "policy_window=13 must be at most 12"),
    ("--embedding_dim=128 --num_heads=3", "=128 must be a multiple of 2 * num_heads, 6"),
    ("--batch_size=16 --effective_batch_size=24", "effective_batch_size=24 must be a multiple of"),
    ("--downsample_rate_target=1", "downsample_rate_target=1.0 must be between"),
    ("--downsample_rate_target=1/512", "downsample_rate_target=0.001953125 must be"),
    ("--num_draws=1 --batch_size=1", "num_draws=1 needs several rows to compare"),
    ("--boundaries=words", "boundaries='words' must be one of learned, uniform"),
    ("--early_exit=True --lambda_early=0", "early_exit=True needs lambda_early above 0"),
    ("--device=tpu", "device='tpu' must be one of auto, cpu, cuda, mps"),
    ("--dtype=int8", "dtype='int8' must be one of auto, float32"),
    ("--boundaries=no/such/ckpt.pt", "no checkpoint no/such/ckpt.pt"),
    ("--data=no/such/data", "no no/such/data/meta.json; make the data first"),
    ("--seq_len=5000", "seq_len=5000 does not divide the 64 bytes of a row"),
    ("--resume=True", "no checkpoint"),
])
def test_a_mistake_on_the_command_line_is_one_line(arguments, message, data, error_of):
    assert message in error_of(f"--data={data}", *arguments.split())
