"""Text with boundaries: the characters of a stream of bytes, and marks where tokens end."""
import codecs
import os
import sys
import unicodedata

PALETTE = 33, 75, 110, 145, 186, 220, 226  # of a terminal's 256 colours, from blue to yellow
# Unicode's pictures of control characters; a newline stays
CONTROLS = {code: 0x2400 + code for code in range(32) if code != 10} | {127: "␡"}
CONTROLS |= {code: "␛" + chr(code - 64) for code in range(128, 160)}


def printable(text):
    """Text with pictures in place of control characters, except newlines."""
    return text.translate(CONTROLS)


def in_word(character):
    """Whether a character is a letter, a digit or a mark on a letter, such as an accent."""
    return character.isalnum() or unicodedata.category(character[0])[0] == "M"


def characters(stream):
    """Decodes a stream of (byte, a, p, ...) as UTF-8 and yields (character, a, p).

    A character's a says whether any of its bytes ends a token; its p is that of its last byte.
    Invalid bytes become U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    a, p = False, None  # of the bytes that wait for the rest of their character
    for byte, next_a, next_p, *_ in stream:
        text = decoder.decode(bytes([byte]))
        waiting, _ = decoder.getstate()
        earlier = text if waiting else text[:-1]  # of bytes that this one does not continue
        if earlier:
            yield "\ufffd", a, p
            a = False
        a = a or next_a
        p = next_p
        if text and not waiting:
            yield printable(text[-1]), a, p
            a = False
    if decoder.decode(b"", final=True):
        yield "\ufffd", a, p


def trimmed(steps):
    """A list of (byte, ...) without the bytes of characters that its ends cut in two."""
    first = 0
    while first < min(3, len(steps)) and 128 <= steps[first][0] < 192:
        first += 1
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(bytes(step[0] for step in steps[first:]))
    waiting, _ = decoder.getstate()
    return steps[first : len(steps) - len(waiting)]


def marked(stream):
    """Yields the characters of a stream of (byte, a, p, ...), with a mark where each token ends.

    What looks like a mark in the text is shown as ¦. On a terminal, each character is coloured by
    p, unless NO_COLOR is set.
    """
    # a notebook, or a program's own sys.stdout, may have neither attribute
    colour = getattr(sys.stdout, "isatty", bool)() and not os.environ.get("NO_COLOR")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    mark = "│" if "│".encode(encoding, "ignore") else "|"
    for text, a, p in characters(stream):
        text = text.replace(mark, "¦")
        if colour:
            text = f"\x1b[38;5;{PALETTE[round(6 * float(p))]}m{text}\x1b[0m"
        yield text + mark if a else text
