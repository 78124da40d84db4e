"""What the programs share: mistakes, the command line, the device, and text with boundaries."""
import argparse
import inspect
import os
import runpy
import sys
from difflib import get_close_matches

import torch

import __main__

# train.py's rules, one a line, as a user who breaks one reads them
RULES = """\
seq_len > 0
embedding_dim > 0
num_heads > 0
embedding_dim % (2 * num_heads) == 0
n_down_layers >= 0
n_mid_layers >= 0
n_up_layers >= 0
attention_window > 0
0.5 / seq_len < downsample_rate_target < 1  # so that uniform has a token
0 <= policy_window <= 12  # the draw needs 2^policy_window numbers per byte
policy_scale > 0
policy_softcap > 0
0 <= redrawn <= 1
redrawn > 0 or system != 'learned' or batch_size * processes > 1  # eq. 17 compares rows
redrawn > 0 or system != 'learned' or lambda_early > 0  # else the baseline is never trained
0 <= gamma <= 1
lambda_pi >= 0
lambda_target >= 0
lambda_early >= 0
training_bytes > 0
effective_batch_size > 0
batch_size > 0
effective_batch_size % (batch_size * processes) == 0
learning_rate > 0
muon_learning_rate >= 0
policy_learning_rate >= 0
warmup_bytes >= 0
weight_decay >= 0
grad_clip > 0
log_interval > 0
eval_interval > 0
eval_rows > 0
0 <= seed < 2**63
dtype in ('auto', 'float32', 'bfloat16', 'float16')"""
PALETTE = 33, 75, 110, 145, 186, 220, 226  # of a terminal's 256 colours, from blue to yellow
# Unicode's pictures of control characters; a newline stays
CONTROLS = {code: 0x2400 + code for code in range(32) if code != 10} | {127: "␡"}
CONTROLS |= {code: "␛" + chr(code - 64) for code in range(128, 160)}


# ---- Mistakes and messages.
class UserError(Exception):
    """A user's mistake. The programs print its message on one line, without a traceback."""


def say(*texts, **options):
    """Prints at once. A terminal or a pipe that is gone is no reason to stop."""
    try:
        print(*texts, **options, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # 1 is stdout


def run(main):
    """Calls main with the command line's arguments.

    Exits with code 2 after a mistake or a failing disk, and with 130 after Ctrl-C.
    """
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's lacks it
        sys.stdout.reconfigure(errors="replace")
    code = 0
    try:
        main(sys.argv[1:])
    except BrokenPipeError:  # the reader, for example `head`, has seen enough
        pass
    except KeyboardInterrupt:
        code = 130
    except (UserError, OSError) as error:
        message = printable(" ".join(str(error).split()))
        print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
        code = 2
    say(end="")  # what the buffer still holds
    if torch.distributed.is_initialized():
        os._exit(code)  # a normal exit may abort, because gloo's threads outlive Python
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
        similar = get_close_matches(key, defaults) or ["--help"]
        raise UserError(f"unknown name '{key}'; try {' or '.join(similar)}")
    kind = type(defaults[key])
    try:
        if kind is bytes:
            return os.fsencode(value)
        if kind is str and value:
            return os.path.expanduser(value)  # a leading ~
        number = eval(str(value))  # 1/5 or 6e9; nan is no name
        # True is no 1, and 2.5 is no int
        if isinstance(number, bool) == (kind is bool) and kind(number) == number < torch.inf:
            return kind(number)
    except Exception:
        pass
    raise UserError(f"{key} cannot be {value!r} (type {kind.__name__}, default {defaults[key]!r})")


def read_file(path):
    """The hyperparameters that a configuration file assigns."""
    try:
        assigned = {  # without modules, functions, classes and names that start with _
            key: value for key, value in runpy.run_path(path).items()
            if key[0] != "_" and not hasattr(value, "__name__")}
    except (Exception, SystemExit) as error:
        raise UserError(f"cannot read the configuration file '{path}': {error}")
    if not assigned:
        raise UserError(f"'{path}' assigns no hyperparameters; write name = value")
    return assigned


def read_command_line(argv, defaults):
    """The hyperparameters that configuration files and flags set; later ones override earlier.

    For --help, prints the program's docstring and the first section of its source, and exits.
    """
    given = {}
    for argument in argv:
        if argument in ("-h", "--help"):
            settings = inspect.getsource(__main__).split("\n# ---- ")[1]
            say(f"{__main__.__doc__}\n{settings}")
            raise SystemExit
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            if not equals:
                raise UserError(f"{argument} has no value; write {argument}=value")
            given[key] = value
        else:
            given |= read_file(argument)
    return {key: parse(key, value, defaults) for key, value in given.items()}


def check(hp, processes=1, rules=RULES):
    """Raises UserError if a hyperparameter, or a combination of them, cannot work."""
    values = vars(hp) | {"processes": processes}
    for rule in rules.splitlines():
        if not eval(rule, values):
            got = ", ".join(f"{key}={value!r}" for key, value in values.items() if key in rule)
            raise UserError(f"{got} breaks the rule {rule}")


def device_and_dtype(device, dtype):
    """The device type and the dtype that "auto" stands for. UserError if torch lacks the device."""
    available = [kind for kind in ("cuda", "mps", "cpu") if getattr(torch, kind).is_available()]
    if device == "auto":
        device = available[0]
    if device not in available:
        raise UserError(f"device={device!r} must be auto or one that torch finds: {available}")
    if dtype == "auto":
        dtype = "float32"
        if device == "cuda":
            dtype = "float16"  # T4 and V100 lack bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False):
                dtype = "bfloat16"
        elif torch.cpu.get_capabilities().get("avx512_bf16"):  # no Mac has it
            dtype = "bfloat16"
    return device, dtype


# ---- Text with boundaries.
def printable(text):
    """Text with pictures in place of control characters, except newlines."""
    return text.translate(CONTROLS)


def characters(stream):
    """Decodes a stream of (byte, a, p, ...) as UTF-8 and yields (character, a, p).

    A character's a says whether any of its bytes ends a token; its p is that of its last byte.
    Invalid bytes become U+FFFD, a byte and the continuation bytes after it at a time.
    """
    text, a = b"", False
    for byte, next_a, next_p, *_ in stream:
        # text is a whole character, or this byte cannot continue it
        if text.decode(errors="ignore") or text and not 128 <= byte < 192:
            yield printable(text.decode(errors="replace")), a, p
            text, a = b"", False
        text += bytes([byte])
        a = a or next_a
        p = next_p
    if text:
        yield printable(text.decode(errors="replace")), a, p


def marked(stream):
    """Yields the characters of a stream of (byte, a, p, ...), with a mark where each token ends.

    On a terminal, each character is coloured by p, unless NO_COLOR is set.
    """
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    mark = "│" if "│".encode(sys.stdout.encoding or "utf-8", "ignore") else "|"
    for text, a, p in characters(stream):
        if colour:
            text = f"\x1b[38;5;{PALETTE[round(6 * float(p))]}m{text}\x1b[0m"
        yield text + mark if a else text
