"""What the programs print: one-line errors, and text with a mark where each token ends."""
import argparse
import codecs
import os
import sys
from contextlib import contextmanager
from pathlib import Path

MARK = "│"
PALETTE = 33, 75, 110, 145, 186, 220, 226  # of a terminal's 256 colours, from blue to yellow


def printable(text):
    """Makes text safe to print: control characters are replaced by their Unicode pictures."""
    pictures = {code: 0x2400 + code for code in range(32) if chr(code) != "\n"}
    text = text.translate(pictures)
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def fail(message, code=2):
    """Ends the program: prints the message on one line of stderr and exits with the code."""
    one_line = " ".join(str(message).split())
    print(f"{Path(sys.argv[0]).name}: {printable(one_line)}", file=sys.stderr)
    sys.exit(code)


@contextmanager
def one_line_errors():
    """Ends the program with one line if what is inside raises OSError or ValueError."""
    try:
        yield
    except (OSError, ValueError) as error:
        fail(error)


def argument_parser(usage):
    """An argparse parser that shows usage as its help, and reports mistakes on one line."""
    parser = argparse.ArgumentParser(
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = fail
    return parser


def whole_number(text):
    """Parses a positive whole number, which may be written as 6e9."""
    number = float(text)
    if number < 1 or number % 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive whole number")
    return int(number)


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
    for text, a, p in characters(stream):
        if colour:
            shade = PALETTE[round(p * (len(PALETTE) - 1))]
            text = f"\x1b[38;5;{shade}m{text}\x1b[0m"
        yield text + MARK if a else text
