"""What the programs share: mistakes, command line, device, checkpoints, text with boundaries."""
import argparse
import inspect
import os
import runpy
import sys
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace

import torch

from model import make_model

NANOGPT = {  # its names of some of our hyperparameters
    "block_size": "seq_len", "n_embd": "embedding_dim", "n_head": "num_heads",
    "n_layer": "n_mid_layers", "max_iters": "training_bytes", "warmup_iters": "warmup_bytes"}
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


# ---- Hyperparameters: the fields of a dataclass. These functions raise UserError.
def parse(field, value):
    """The value of a field, from a flag's text or a configuration file, in the field's type."""
    kind = field.type
    try:
        if kind is bytes:
            return os.fsencode(value)
        if kind is str and (value or not field.default):
            return os.path.expanduser(value)  # a leading ~
        number = eval(str(value))  # 1/5 or 6e9; nan is no name
        # True is no 1, and 2.5 is no int
        if isinstance(number, bool) == (kind is bool) and kind(number) == number < torch.inf:
            return kind(number)
    except Exception:
        pass
    raise UserError(f"{field.name} cannot be {value!r} (type {kind.__name__}, default "
                    f"{field.default!r})")


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


def read_command_line(argv, kind):
    """The hyperparameters that files and flags set, of the dataclass kind; later ones override.

    For --help, prints the docstring of the program and the source of the dataclass, and exits.
    """
    given = {}
    for argument in argv:
        if argument in ("-h", "--help"):
            say(f"{sys.modules[kind.__module__].__doc__}\n{inspect.getsource(kind)}")
            raise SystemExit
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            if not equals:
                raise UserError(f"{argument} has no value; write {argument}=value")
            given[key] = value
        else:
            given |= read_file(argument)
    known = {field.name: field for field in fields(kind)}
    for key in given:
        if key not in known:
            similar = [NANOGPT[key]] if key in NANOGPT else get_close_matches(key, known)
            similar = similar or ["--help"]
            raise UserError(f"unknown name '{key}'; try {' or '.join(similar)}")
    return {key: parse(known[key], value) for key, value in given.items()}


def check(values, rules):
    """Raises UserError if the dictionary of values breaks one of the rules, which are lines."""
    for rule in rules.splitlines():
        if not eval(rule, {}, values):
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


# ---- Checkpoints: train.py's ckpt.pt.
def save_checkpoint(path, saved):
    """Writes a checkpoint. A crash or a full disk leaves the one before it as it was."""
    part = path.with_suffix(".part")
    try:
        with open(part, "wb") as file:
            torch.save(saved, file)
        part.replace(path)
    except (OSError, RuntimeError) as error:  # torch's own error hides the OSError
        part.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {path} (is the disk full?): {error.__context__ or error}") from error


def read_checkpoint(path):
    """What train.py saved, on the CPU. UserError if there is nothing, or nothing that fits."""
    if not Path(path).exists():
        raise UserError(f"there is no checkpoint {path}; train.py writes one")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        saved["config"]["system"], saved["model"].keys()
    except Exception as error:  # damaged bytes can raise nearly anything
        raise UserError(f"cannot read the checkpoint {path}; is it damaged? {error}") from error
    return saved


def load_weights(model, saved, path):
    """Loads the weights that train.py saved. UserError if they are not this model's."""
    for key in "seq_len", "num_heads":  # the weights would fit, but mean something else
        old = saved["config"][key]
        if getattr(model.hp, key) != old:
            raise UserError(f"{key} cannot change; it was {old} in {path}")
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError as error:
        start = str(error)[:200]  # all of it names every parameter
        raise UserError(f"{path} does not fit the model: {start}...") from error


def load_checkpoint(path):
    """The saved model, in evaluation mode on the CPU, and the checkpoint. Raises UserError."""
    saved = read_checkpoint(path)
    try:
        model = make_model(SimpleNamespace(**saved["config"]))
    except AttributeError as error:  # a hyperparameter that did not exist
        raise UserError(f"another version of train.py wrote {path}: {error}") from error
    load_weights(model, saved, path)
    return model.eval(), saved


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
    # a notebook, or a program's own sys.stdout, may have neither attribute
    colour = getattr(sys.stdout, "isatty", bool)() and "NO_COLOR" not in os.environ
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    mark = "│" if "│".encode(encoding, "ignore") else "|"
    for text, a, p in characters(stream):
        if colour:
            text = f"\x1b[38;5;{PALETTE[round(6 * float(p))]}m{text}\x1b[0m"
        yield text + mark if a else text
