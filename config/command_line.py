"""
Reads train.py's command line and configuration files, and checks what they say.

A configuration file is a Python program. What it assigns at its top level, `name = value`, must be hyperparameters, so that a misspelt one
is noticed; its modules, functions, loop variables and names that begin with _ are its own.
"""
import ast
import difflib
import math
import os
import sys
from fractions import Fraction
from pathlib import Path

from prepare import printable

BOUNDARIES = "learned", "uniform", "random", "whitespace", "bpe", "gumbel", "hnet", "none"


def fail(message):
    """Ends the program the way every mistake does: one line on stderr, exit code 2."""
    print("train.py:", " ".join(printable(message).split()), file=sys.stderr)
    sys.exit(2)


def parse(key, value, defaults):
    """A hyperparameter's value, from a flag's text or a configuration file, in the type of its default."""
    if key not in defaults:
        fail(f"unknown hyperparameter '{key}'; the nearest is '{difflib.get_close_matches(key, defaults, 1, 0)[0]}'")
    kind = type(defaults[key])
    try:
        if kind is bool:
            return {"True": True, "False": False}[str(value)]
        if kind is str and isinstance(value, str):
            return value
        text = str(value)  # 6e9 and 1/5 as well; whole numbers exactly
        number = Fraction(text) if "/" in text or text.isdecimal() else Fraction(float(text))
        if kind is str or kind is int and number.denominator != 1:
            raise ValueError
        return kind(number)
    except (ValueError, KeyError, ZeroDivisionError, OverflowError):
        fail(f"{key}={value!r} is no {kind.__name__}; the default is {defaults[key]!r}")


def read_file(path, defaults):
    """The hyperparameters that a configuration file sets, and whatever else it assigns at its top level."""
    try:
        text, values = Path(path).read_text(encoding="utf-8-sig"), {"__file__": path}
        exec(compile(text, path, "exec"), values)
    except (Exception, SystemExit) as error:  # it is a program
        fail(f"cannot read the configuration file '{path}': {error}")
    assigned = [node for node in ast.parse(text).body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    targets = [node for one in assigned for target in getattr(one, "targets", None) or [one.target] for node in ast.walk(target)]
    names = {node.id for node in targets if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)} | defaults.keys()
    return {name: value for name, value in values.items() if name in names and not name.startswith("_")}


def read_command_line(argv, defaults, usage=""):
    """The hyperparameters that configuration files and flags set, the later over the earlier."""
    chosen = {}
    if "--help" in argv:
        print(usage + "\nThe hyperparameters, with a line of meaning each, are at the top of train.py.")
        sys.exit()
    for argument in argv:
        if not argument.startswith("--"):
            chosen |= {key: parse(key, value, defaults) for key, value in read_file(argument, defaults).items()}
        elif "=" in argument:
            key, value = argument[2:].split("=", 1)
            chosen[key] = parse(key, value, defaults)
        else:
            fail(f"'{argument}' has no value; write {argument}=...")
    return chosen


def check(h):
    """Ends the program with one line for a hyperparameter, or a combination of some, that cannot run."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not 0 <= rank < world or world > 1 and "MASTER_ADDR" not in os.environ:
        fail(f"RANK={rank} and WORLD_SIZE={world} are set, but not by torchrun, which sets both; without it they are to be unset")
    for low, high, keys in (
            (1, 2**20, "seq_len embedding_dim num_heads attention_window num_draws effective_batch_size batch_size eval_rows"),
            (0, 1000, "n_down_layers n_mid_layers n_up_layers"),
            (0, 12, "policy_window"),  # the draw costs 2^policy_window a byte
            (1, 2**63, "training_bytes policy_interval log_interval eval_interval"),
            (0, 2**63, "warmup_bytes policy_start_bytes seed"),
            (1e-9, math.inf, "learning_rate grad_clip policy_scale policy_softcap"),
            (0, math.inf, "weight_decay lambda_early"),
            (0, 1, "gamma")):
        for key in keys.split():
            if not low <= getattr(h, key) <= high:
                fail(f"{key}={getattr(h, key)} is not within {low} and {high}")
    if h.embedding_dim % (2 * h.num_heads):
        fail(f"embedding_dim={h.embedding_dim} is no multiple of 2 * num_heads={2 * h.num_heads}")
    if h.effective_batch_size % (h.batch_size * world):
        fail(f"effective_batch_size={h.effective_batch_size} is no multiple of batch_size={h.batch_size} times {world} processes")
    if not 0.5 < h.downsample_rate_target * h.seq_len < h.seq_len:
        fail(f"downsample_rate_target={h.downsample_rate_target} is not between 0 and 1, or gives a row of {h.seq_len} bytes no token")
    if h.boundaries == "learned" and h.num_draws == 1 and h.batch_size * world == 1:
        fail("num_draws=1 compares a row's draw with those of other rows (eq. 17), but batch_size=1 and one process leave none; "
             "take --num_draws=2 or a larger batch_size")
    if h.boundaries == "bpe" and h.seq_len % 8:
        fail(f"seq_len={h.seq_len} is no multiple of 8, which --boundaries=bpe needs")
    if h.boundaries not in BOUNDARIES and not h.boundaries.endswith(".pt"):
        fail(f"boundaries={h.boundaries!r} is none of {', '.join(BOUNDARIES)}, nor the path of a checkpoint, which ends in .pt")
    for key, allowed in (("device", ("auto", "cpu", "cuda", "mps")), ("dtype", ("auto", "float32", "bfloat16", "float16"))):
        if getattr(h, key) not in allowed:
            fail(f"{key}={getattr(h, key)!r} is none of {', '.join(allowed)}")
