"""Reads train.py's command line and configuration files, and checks what they say."""
import os
import runpy
import sys
from difflib import get_close_matches as nearest
from fractions import Fraction

from model import SYSTEMS
from prepare import fail


def parse(key, value, defaults):
    """A hyperparameter's value, from a flag's text or a file, in the type of its default."""
    if key not in defaults:
        fail(f"unknown hyperparameter '{key}'; the nearest is '{nearest(key, defaults, 1, 0)[0]}'")
    kind = type(defaults[key])
    try:
        if kind is bool:
            return {"True": True, "False": False}[str(value)]
        if kind is str and isinstance(value, str):
            return os.path.expanduser(value)  # of no effect but on paths
        text = str(value)  # 6e9 and 1/5 as well; whole numbers exactly
        number = Fraction(text if "/" in text or text.isdecimal() else float(text))
        if kind is str or kind is int and number.denominator != 1:
            raise ValueError
        return kind(number)
    except (ValueError, KeyError, ZeroDivisionError, OverflowError):
        fail(f"{key}={value!r} is no {kind.__name__}; the default is {defaults[key]!r}")


def read_file(path):
    """What a configuration file assigns, but for modules, functions, classes and names with _."""
    try:
        names = runpy.run_path(path) if path.endswith(".py") else {}
    except (Exception, SystemExit) as error:
        fail(f"cannot read the configuration file '{path}': {error}")
    assigned = {k: v for k, v in names.items() if k[0] != "_" and not hasattr(v, "__name__")}
    return assigned or fail(f"'{path}' is no .py file that assigns hyperparameters: name = value")


def read_command_line(argv, defaults, usage=""):
    """The hyperparameters that configuration files and flags set, the later over the earlier."""
    if {"-h", "--help"} & {*argv}:
        print(f"{usage}\nThe hyperparameters, each with its meaning, are at the top of train.py.")
        sys.exit()
    chosen = {}
    for argument in argv:
        key, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and not equals:
            fail(f"'{argument}' has no value; write {argument}=...")
        found = {key: value} if argument.startswith("--") else read_file(argument)
        chosen |= {key: parse(key, value, defaults) for key, value in found.items()}
    return chosen


def check(h):
    """Ends the program for a hyperparameter, or a combination of some, that cannot run."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not 0 <= rank < world or world > 1 and "MASTER_ADDR" not in os.environ:
        fail(f"RANK={rank} and WORLD_SIZE={world} are not torchrun's, which sets both; unset them")
    for low, high, keys in ((1, 2**20, "seq_len embedding_dim num_heads attention_window eval_rows "
            "num_draws effective_batch_size batch_size"), (0, 12, "policy_window"),  # 2^w a byte
            (0, 1000, "n_down_layers n_mid_layers n_up_layers"), (0, 1, "gamma"),
            (1, 2**63, "training_bytes log_interval eval_interval"),
            (0, 2**63, "warmup_bytes policy_start_bytes seed weight_decay lambda_early"),
            (0, 1e99, "policy_learning_rate"), (1e-9, 1, "redrawn"),
            (1e-9, 1e99, "learning_rate grad_clip policy_scale policy_softcap")):
        for key in keys.split():
            if not low <= getattr(h, key) <= high:
                fail(f"{key}={getattr(h, key)} is not within {low} and {high}")
    if h.embedding_dim % (2 * h.num_heads):
        fail(f"embedding_dim={h.embedding_dim} is no multiple of 2 * num_heads={2 * h.num_heads}")
    if h.effective_batch_size % (h.batch_size * world):
        fail(f"effective_batch_size={h.effective_batch_size} is no multiple of {world} times "
             f"batch_size={h.batch_size}; change one of the two")
    if not 0.5 / h.seq_len < h.downsample_rate_target < 1:  # a row has a token
        fail(f"downsample_rate_target={h.downsample_rate_target} is not within 0.5 / seq_len and 1")
    if h.boundaries == "learned" and h.num_draws == h.batch_size * world == 1:
        fail("num_draws=1 compares draws of several rows (eq. 17); take num_draws=2 or more rows")
    if h.boundaries not in SYSTEMS and not h.boundaries.endswith(".pt"):
        fail(f"boundaries={h.boundaries!r} is none of {', '.join(SYSTEMS)} (a path)")
    for key, allowed in ("device", "auto cpu cuda mps"), ("dtype", "auto float32 bfloat16 float16"):
        if getattr(h, key) not in allowed.split():
            fail(f"{key}={getattr(h, key)!r} is none of {allowed}")
