"""train.py's command line, the checks of its hyperparameters, and the choice of a device."""
import os
import runpy
import sys
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path

import torch

from config.terminal import fail

POSITIVE = """seq_len embedding_dim num_heads attention_window policy_scale policy_softcap num_draws
    redrawn training_bytes effective_batch_size batch_size learning_rate grad_clip log_interval
    eval_interval"""
NOT_NEGATIVE = """policy_window gamma n_down_layers n_mid_layers n_up_layers warmup_bytes seed
    muon_learning_rate policy_learning_rate weight_decay lambda_pi lambda_target lambda_early"""
MAXIMA = {"gamma": 1, "redrawn": 1, "policy_window": 12}  # the draw needs 2^policy_window numbers
CHOICES = {
    "device": ("auto", "cpu", "cuda", "mps"),
    "dtype": ("auto", "float32", "bfloat16", "float16")}


def parse(key, value, defaults):
    """A hyperparameter's value, from a flag's text or a file, in the type of its default."""
    if key not in defaults:
        nearest = get_close_matches(key, defaults, n=1, cutoff=0)[0]
        fail(f"unknown hyperparameter '{key}'; did you mean '{nearest}'?")
    kind = type(defaults[key])
    try:
        if kind is bool:
            return {"True": True, "False": False}[str(value)]
        if kind is str:
            return os.path.expanduser(value)  # a leading ~
        text = str(value)
        exact = "/" in text or text.isdecimal()  # 1/5, and whole numbers of any size
        number = Fraction(text if exact else float(text))  # 6e9
        if kind is int and number.denominator != 1:
            raise ValueError
        return kind(number)
    except (ValueError, KeyError, TypeError, ArithmeticError):
        fail(f"{key} must be of type {kind.__name__}, got {value!r} (default {defaults[key]!r})")


def read_file(path):
    """The hyperparameters that a configuration file assigns."""
    if not path.endswith(".py"):
        fail(f"'{path}' is not a .py file; a configuration file assigns hyperparameters: name = 1")
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as error:
        fail(f"cannot read the configuration file '{path}': {error}")
    # without modules, functions, classes and names that start with _
    assigned = {k: v for k, v in names.items() if k[0] != "_" and not hasattr(v, "__name__")}
    if not assigned:
        fail(f"'{path}' assigns no hyperparameters; write name = value")
    return assigned


def read_command_line(argv, defaults, program=None):
    """The hyperparameters set by configuration files and flags; later ones override earlier ones.

    --help prints the docstring and the hyperparameters of the program's source file.
    """
    if "-h" in argv or "--help" in argv:
        source = Path(program).read_text()
        usage, _, rest = source.partition("import ")
        print(usage.replace('"""', "") + rest[rest.index("# ----") : rest.index("DEFAULTS")])
        sys.exit()
    chosen = {}
    for argument in argv:
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            if not equals:
                fail(f"'{argument}' has no value; write {argument}=...")
            assigned = {key: value}
        else:
            assigned = read_file(argument)
        for key, value in assigned.items():
            chosen[key] = parse(key, value, defaults)
    return chosen


def check(hp, world=1):
    """Ends the program if a hyperparameter, or a combination of them, cannot work."""
    for key, value in vars(hp).items():
        if key in POSITIVE.split() and value <= 0:
            fail(f"{key}={value} must be positive")
        if key in NOT_NEGATIVE.split() and value < 0:
            fail(f"{key}={value} must not be negative")
        if key in MAXIMA and value > MAXIMA[key]:
            fail(f"{key}={value} must be at most {MAXIMA[key]}")
        if key in CHOICES and value not in CHOICES[key]:
            fail(f"{key}={value!r} must be one of {', '.join(CHOICES[key])}")
    if hp.eval_rows < 2:
        fail(f"eval_rows={hp.eval_rows} must be at least 2: a standard error needs two rows")
    if hp.embedding_dim % (2 * hp.num_heads):
        fail(f"embedding_dim={hp.embedding_dim} must be a multiple of 2 * num_heads, "
             f"{2 * hp.num_heads}")
    if hp.effective_batch_size % (hp.batch_size * world):
        fail(f"effective_batch_size={hp.effective_batch_size} must be a multiple of batch_size="
             f"{hp.batch_size} times the number of processes, {world}")
    if not 0.5 / hp.seq_len < hp.downsample_rate_target < 1:  # every row has a token
        fail(f"downsample_rate_target={hp.downsample_rate_target} must be between 0.5 / seq_len "
             "and 1")
    if hp.boundaries == "learned" and hp.num_draws * hp.batch_size * world == 1:
        fail("num_draws=1 needs several rows to compare (eq. 17); increase num_draws or batch_size")
    if hp.early_exit and hp.lambda_early == 0:
        fail("early_exit=True needs lambda_early above 0, or its baseline is never trained")


def device_and_dtype(device, dtype):
    """The device type and the dtype that "auto" stands for.

    Ends the program if the device is missing.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
                 "cpu": True}
    if device == "auto":
        device = next(kind for kind in available if available[kind])
    if not available[device]:
        fail(f"device={device!r}, but torch finds none on this machine; use another --device")
    if dtype == "auto" and device == "cuda":
        dtype = "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"  # T4
    elif dtype == "auto":
        fast = device == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16")
        dtype = "bfloat16" if fast else "float32"
    return device, dtype
