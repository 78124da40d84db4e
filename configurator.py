"""What the programs share: mistakes, the command line, the device, and text with boundaries."""
import argparse
import codecs
import math
import os
import runpy
import sys
from difflib import get_close_matches
from pathlib import Path

import torch
import torch.distributed as dist

POSITIVE = """seq_len embedding_dim num_heads attention_window policy_scale policy_softcap
    training_bytes effective_batch_size batch_size learning_rate grad_clip log_interval
    eval_interval"""
NOT_NEGATIVE = """policy_window gamma n_down_layers n_mid_layers n_up_layers warmup_bytes seed
    muon_learning_rate policy_learning_rate weight_decay lambda_pi lambda_target lambda_early
    redrawn"""
RULES = [
    *(f"{key} > 0" for key in POSITIVE.split()),
    *(f"{key} >= 0" for key in NOT_NEGATIVE.split()),
    "gamma <= 1",
    "redrawn <= 1",
    "policy_window <= 12",  # the draw needs 2^policy_window numbers per byte
    "eval_rows >= 2",  # for a standard error
    "0.5 / seq_len < downsample_rate_target < 1",  # so that uniform has a token
    "embedding_dim % (2 * num_heads) == 0",
    "effective_batch_size % (batch_size * processes) == 0",
    "redrawn > 0 or system != 'learned' or batch_size * processes > 1",  # eq. 17 compares rows
    "redrawn > 0 or system != 'learned' or lambda_early > 0",  # else the baseline is never trained
    "dtype in ('auto', 'float32', 'bfloat16', 'float16')"]
PALETTE = 33, 75, 110, 145, 186, 220, 226  # of a terminal's 256 colours, from blue to yellow
CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) != "\n"}  # Unicode's pictures
CONTROLS |= {127: "␡"} | {code: "␛" + chr(code - 64) for code in range(128, 160)}


# ---- Mistakes and messages.
class UserError(Exception):
    """A user's mistake. The programs print its message on one line, without a traceback."""


def say(text="", end="\n"):
    """Prints text at once. A terminal or a pipe that is gone is no reason to stop."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(main):
    """Runs a program. It exits with code 2 after a mistake or a failing disk, 130 after Ctrl-C."""
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's lacks it
        sys.stdout.reconfigure(errors="replace")
    code = 0
    try:
        main()
    except BrokenPipeError:  # the reader, for example `head`, has seen enough
        pass
    except KeyboardInterrupt:
        code = 130
    except (UserError, OSError) as error:
        message = printable(" ".join(str(error).split()))
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
        code = 2
    say(end="")  # what the buffer still holds
    if dist.is_initialized():
        os._exit(code)  # a normal exit may abort, because gloo's threads outlive Python
    if code:
        sys.exit(code)


def argument_parser(usage):
    """An argparse parser that shows usage as its help. Mistakes are a UserError."""
    def error(message):
        raise UserError(message)

    parser = argparse.ArgumentParser(
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = error
    return parser


# ---- Hyperparameters. These functions raise UserError.
def parse(key, value, defaults):
    """A hyperparameter's value, from a flag's text or a file, in the type of its default."""
    if key not in defaults:
        nearest = get_close_matches(key, defaults, n=1, cutoff=0)[0]
        raise UserError(f"unknown hyperparameter '{key}'; did you mean '{nearest}'?")
    kind = type(defaults[key])
    try:
        if kind is str and value:
            return os.path.expanduser(value)  # a leading ~
        if kind is bool:
            return {"True": True, "False": False}[str(value)]
        top, _, bottom = str(value).partition("/")  # 1/5
        number = float(top) / float(bottom or 1)
        if kind(number) == number < math.inf:  # 2.5 is no int, and nan is not nan
            return kind(number)
    except (ValueError, KeyError, TypeError, ArithmeticError):
        pass
    raise UserError(f"{key} must be of type {kind.__name__}, got {value!r}; write --{key}=value")


def read_file(path):
    """The hyperparameters that a configuration file assigns."""
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as error:
        raise UserError(f"cannot read the configuration file '{path}': {error}") from error
    # without modules, functions, classes and names that start with _
    assigned = {k: v for k, v in names.items() if k[0] != "_" and not hasattr(v, "__name__")}
    if not assigned:
        raise UserError(f"'{path}' assigns no hyperparameters; write name = value")
    return assigned


def read_command_line(argv, defaults):
    """The hyperparameters that configuration files and flags set; later ones override earlier."""
    chosen = {}
    for argument in argv:
        if argument.startswith("--"):
            key, _, value = argument[2:].partition("=")
            assigned = {key: value}
        else:
            assigned = read_file(argument)
        for key, value in assigned.items():
            chosen[key] = parse(key, value, defaults)
    return chosen


def check(hp, processes=1):
    """Raises UserError if a hyperparameter, or a combination of them, cannot work."""
    values = vars(hp) | {"processes": processes}
    for rule in RULES:
        if not eval(rule, {}, values):
            got = ", ".join(f"{key}={value!r}" for key, value in values.items() if key in rule)
            raise UserError(f"{rule} must hold, but {got}")


def device_and_dtype(device, dtype):
    """The device type and the dtype that "auto" stands for. UserError if torch lacks the device."""
    available = ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.mps.is_available() + ["cpu"]
    if device == "auto":
        device = available[0]
    if device not in available:
        raise UserError(f"device={device!r} must be auto or one that torch finds: {available}")
    if dtype == "auto":
        dtype = "float32"
        if device == "cuda":  # T4 and V100 lack bfloat16
            dtype = "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
        elif device == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16"):
            dtype = "bfloat16"
    return device, dtype


# ---- Text with boundaries.
def printable(text):
    """Text with pictures in place of control characters, except newlines."""
    return text.translate(CONTROLS)


def characters(stream):
    """Decodes a stream of (byte, a, p) as UTF-8 and yields (character, a, p).

    A character's a says whether any of its bytes ends a token; its p is that of its last byte.
    Invalid bytes become U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    a, p = False, 0.0  # of the bytes that wait for the rest of their character
    for byte, next_a, next_p in stream:
        text = decoder.decode(bytes([byte]))
        waiting = decoder.getstate()[0]
        # a byte that cannot continue the waiting ones turns them into U+FFFD
        broken = text if waiting else text[:-1]
        if broken:
            yield printable(broken), a, p
            a = False
        a = a or next_a
        p = next_p
        if text and not waiting:
            yield printable(text[-1]), a, p
            a = False
    if rest := decoder.decode(b"", final=True):
        yield printable(rest), a, p


def marked(stream):
    """Yields the characters of a stream of (byte, a, p), with a mark where each token ends.

    On a terminal, each character is coloured by p, unless NO_COLOR is set.
    """
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    mark = "│" if "│".encode(encoding, "ignore") else "|"
    for text, a, p in characters(stream):
        if colour:
            shade = PALETTE[round(p * (len(PALETTE) - 1))]
            text = f"\x1b[38;5;{shade}m{text}\x1b[0m"
        yield text + mark if a else text
