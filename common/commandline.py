"""A user's mistakes, messages, and the flags and configuration files of train.py and sample.py."""
import argparse
import errno
import inspect
import math
import os
import runpy
import signal
import sys
from dataclasses import fields
from difflib import get_close_matches

from common.text import printable

NANOGPT = {  # its names of some of our hyperparameters
    "block_size": "seq_len", "n_embd": "embedding_dim", "n_head": "num_heads",
    "n_layer": "n_mid_layers", "lr": "learning_rate", "max_iters": "training_bytes",
    "warmup_iters": "warmup_bytes"}


# ---- Mistakes and messages.
class UserError(Exception):
    """A user's mistake. The programs print its message on one line, without a traceback."""


def discard_output():
    """From now on, what is printed goes nowhere, also what the buffer still holds."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # 1 is stdout


def say(*texts, **options):
    """Prints at once. A terminal or a pipe that is gone is no reason to stop, a full disk is."""
    try:
        print(*texts, **options, flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        discard_output()


def run_program(main):
    """Calls main with the command line's arguments, and exits with the code that it returns.

    The exit code is 2 after a mistake or a failing disk, and 128 + n after signal n.
    """
    for name in {"SIGTERM", "SIGHUP"} & {*dir(signal)}:  # Windows has no SIGHUP
        number = getattr(signal, name)
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's lacks it
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            code = main(sys.argv[1:]) or 0
        except SystemExit as end:  # after --help, or a signal
            code = end.code or 0
        say(end="")  # what the buffer still holds
    except BrokenPipeError:  # the reader, for example `head`, has seen enough
        discard_output()
        code = 0
    except KeyboardInterrupt:
        code = 130
    except (UserError, OSError) as error:
        message = printable(" ".join(str(error).split()))
        print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
        discard_output()
        code = 2
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
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


# ---- Settings: the fields of a dataclass. These functions raise UserError.
def parse(field, value):
    """The value of a field, from a flag's text or a configuration file, in the field's type."""
    kind = field.type
    try:
        if kind is bytes:
            return os.fsencode(value)
        if kind is str and (value or not field.default):  # empty, only if the default is
            return os.path.expanduser(value)  # a leading ~
        number = eval(str(value))  # 1/5 or 6e9
        # True is no 1, and 2.5 is no int
        if isinstance(number, bool) == (kind is bool) and kind(number) == number < math.inf:
            return kind(number)
    except Exception:
        pass
    raise UserError(f"{field.name} cannot be {value!r} (type {kind.__name__}, default "
                    f"{field.default!r})")


def read_file(path):
    """The settings that a configuration file assigns."""
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
    """The settings that files and flags give, fields of the dataclass kind; later ones override.

    For --help, prints the docstring of the program and the source of the dataclass, and exits.
    """
    given = {}
    arguments = iter(argv)
    for argument in arguments:
        if argument in ("-h", "--help"):
            say(f"{sys.modules[kind.__module__].__doc__}\n{inspect.getsource(kind)}")
            raise SystemExit
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            if not equals:
                value = next(arguments, "--")
                if value.startswith("--"):
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
