"""
Generates text with a trained model and shows where its tokens end.

    python sample.py --start="def main" --num_samples=3 --max_new_bytes=300 --temperature=0.8 --top_k=50
    python sample.py --score=FILE                shows the boundaries of given text instead
    python sample.py --score=FILE --html=out.html    the same as a page (the paper's Figure 2)

A mark │ stands where a token ends. On a terminal the colour is the policy's probability of a boundary after that
character: blue low, yellow high.
"""
import argparse
import codecs
import html
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from model import BOS, load_checkpoint

MARK = "│"
PALETTE = 33, 75, 110, 145, 186, 220, 226  # of a terminal's 256 colours, from blue through grey to yellow
CIVIDIS = (0, 34, 78), (124, 123, 120), (254, 232, 56)  # the same for a page; told apart by the colour-blind as well


def printable(text):
    """Text that is safe to send to a terminal: control characters become their pictures."""
    return "".join(c if c.isprintable() or c == "\n" else chr(0x2400 + ord(c)) if ord(c) < 32 else "\ufffd" for c in text)


def characters(stream):
    """Turns (byte, a, p) into (text, a, p), a character each: a if any of its bytes ends a token, p of its last byte.
    What is not UTF-8 becomes U+FFFD."""
    decoder, ends, p = codecs.getincrementaldecoder("utf-8")("replace"), False, 0.0
    for byte, a, next_p in stream:
        text = decoder.decode(bytes([byte]))
        own = "" if decoder.getstate()[0] else text[-1]  # what this byte ends; it begins the next character if it has to wait
        if before := text[: len(text) - len(own)]:  # this byte showed that those before it were no character
            yield printable(before), ends, p
            ends = False
        ends, p = ends or a, next_p
        if own:
            yield printable(own), ends, p
            ends = False
    if text := decoder.decode(b"", final=True):
        yield printable(text), ends, p


def as_terminal(stream, colour):
    """Text with a mark where each token ends, and coloured by p, piece by piece as the stream comes."""
    for text, ends, p in characters(stream):
        if colour:
            text = f"\x1b[38;5;{PALETTE[round(p * (len(PALETTE) - 1))]}m{text}\x1b[0m"
        yield text + MARK * ends


def as_html(streams):
    """A page with one block of text for each of the lists of (byte, a, p)."""
    blocks = []
    for stream in streams:
        spans = []
        for text, ends, p in characters(stream):
            low, high, t = (*CIVIDIS[:2], 2 * p) if p < 0.5 else (*CIVIDIS[1:], 2 * p - 1)
            background = ",".join(str(round(x + (y - x) * t)) for x, y in zip(low, high))
            spans.append(f'<span style="background:rgb({background});color:{"white" if p < 0.5 else "black"}" title="p = {p:.2f}"'
                         f'{" class=end" if ends else ""}>{html.escape(text).replace(chr(10), "⏎" + chr(10))}</span>')
        blocks.append(f"<pre>{''.join(spans)}</pre>")
    gradient = ",".join(f"rgb{colour}" for colour in CIVIDIS)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Token boundaries</title>
<style>
body {{ font-family: sans-serif; margin: 2em auto; max-width: 60em; }}
pre {{ font-size: 15px; line-height: 1.7; white-space: pre-wrap; overflow-wrap: anywhere; }}
.end {{ border-right: 3px solid #e00; }}
.scale {{ display: inline-block; width: 12em; height: .8em; background: linear-gradient(to right,{gradient}); }}
</style>
<p>probability of a boundary after the character: 0 <span class="scale"></span> 1
&emsp; <span class="end">&nbsp;</span> a token ends here</p>
{"".join(blocks)}
</html>
"""


def generated(model, prompt, options):
    """Yields (byte, a, p, nats) of the prompt's bytes and of new ones."""
    x = torch.tensor([[BOS, *prompt]], device=options.device)
    for step in model.generate(x, options.max_new_bytes, options.temperature, options.top_k):
        yield tuple(z.item() for z in step)


@torch.no_grad()
def scored(model, text, options):
    """Yields (byte, a, p, nats) of the text's bytes, read in rows as long as the training rows."""
    seq_len = model.config.seq_len
    for start in range(0, len(text), seq_len):
        y = torch.tensor([list(text[start : start + seq_len])])
        x = F.pad(y, (1, 0), value=BOS)
        logits, _, l, a = model(x.to(options.device), u=torch.rand(x.shape).to(options.device))
        nats = F.cross_entropy(logits[0, :-1], y[0].to(options.device), reduction="none")
        yield from zip(y[0].tolist(), a[0, 1:].tolist(), l[0, 1:].sigmoid().tolist(), nats.tolist())


def fail(message):
    print(f"sample.py: {message}", file=sys.stderr)
    sys.exit(2)


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


def temperature(text):
    if float(text) != 0 and not 0.001 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is neither 0 nor a number from 0.001 on")
    return float(text)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--out_dir", default="out", help="where train.py left ckpt.pt (%(default)s)")
    add("--start", default="", help="the text to continue")
    add("--num_samples", type=positive, default=1, help="texts to generate (%(default)s)")
    add("--max_new_bytes", type=positive, default=300, help="length of each (%(default)s)")
    add("--temperature", type=temperature, default=0.8, help="below 1: likelier bytes; 0: the likeliest (%(default)s)")
    add("--top_k", type=positive, default=50, help="choose among so many bytes (%(default)s)")
    add("--score", metavar="FILE", help="show the boundaries of this text instead of generating")
    add("--html", metavar="FILE", help="write a page as well")
    add("--seed", type=int, default=1337)
    add("--device", default="cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu",
        help="(%(default)s)")
    options = parser.parse_args(argv)

    try:
        model = load_checkpoint(Path(options.out_dir, "ckpt.pt"))[0].to(options.device)
        texts = [Path(options.score).read_bytes()] if options.score else [os.fsencode(options.start)] * options.num_samples
        if options.html:
            open(options.html, "a").close()  # before the work, not after it
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # the last two: no such device
        fail(str(error).splitlines()[0])
    if options.score and not texts[0]:
        fail(f"--score={options.score} is an empty file")
    torch.manual_seed(options.seed)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    run = scored if options.score else generated

    shown, started = [], time.perf_counter()
    for text in texts:
        shown.append([])

        def stream():
            for byte, a, p, nats in run(model, text, options):
                shown[-1].append((byte, a, p, nats))
                yield byte, a, p

        for piece in as_terminal(stream(), colour):
            print(piece, end="", flush=True)
        print("\n" + "-" * 80)
    seconds = time.perf_counter() - started
    steps = [step for text in shown for step in text]
    tokens = sum(a for _, a, _, _ in steps)
    bits = sum(nats for *_, nats in steps) / math.log(2)
    print(f"{len(steps)} bytes, {tokens} tokens, {len(steps) / max(tokens, 1):.2f} bytes per token, "
          f"{bits / len(steps):.3f} bits per byte, {len(steps) / seconds:.0f} bytes per second")
    if options.html:
        Path(options.html).write_text(as_html([[step[:3] for step in text] for text in shown]), encoding="utf-8")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # no vocabulary for --boundaries=bpe
        fail(error)
