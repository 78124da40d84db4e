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
from prepare import printable

MARK = "│"
PALETTE = 33, 75, 110, 145, 186, 220, 226  # of a terminal's 256 colours, from blue through grey to yellow
CIVIDIS = (0, 34, 78), (124, 123, 120), (254, 232, 56)  # the same for a page; told apart by the colour-blind as well


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


STYLE = """
:root { color-scheme: light dark; } body { font: 16px/1.5 sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; }
.text { font: 15px/1.7 monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.text > div { content-visibility: auto; contain-intrinsic-size: auto 50em; }
.text span:is(:focus, :hover) { outline: 2px solid CanvasText; outline-offset: 1px; scroll-margin: 6em; }
.line::before { content: "⏎"; }
.end { box-shadow: inset -2px 0 #e00, inset -3px 0 #fff; }
.end::after { content: "│"; position: absolute; opacity: 0; pointer-events: none; } /* for those who hear the page */
#told { position: sticky; bottom: 0; padding: .5em 0; border-top: 1px solid; background: Canvas; }
"""
SCRIPT = r"""
const told = document.getElementById("told");
function cells(chunk) { // a span a character, made when the chunk comes near: a million at once would take seconds
  const all = chunk?.dataset.of.split(" ");
  if (all && !chunk.firstElementChild) chunk.replaceChildren(...[...chunk.textContent].map((textContent, i) => {
    const of = all[i].split(","); // bytes in hex, 100 p, 100 bits, whether a token ends
    const className = `c${of[1]}${of[3] ? " end" : ""}${textContent == "\n" ? " line" : ""}`;
    return Object.assign(document.createElement("span"), {textContent, className, of, tabIndex: -1});
  }));
  return [...chunk?.children || []];
}
function tell({target: {of, textContent}}) {
  if (of) told.textContent = `${textContent == "\n" ? "⏎" : textContent} \u2002 p = ${(of[1] / 100).toFixed(2)}, bytes `
    + `${of[0].match(/../g).join(" ")}, ${(of[2] / 100).toFixed(2)} bits${of[3] ? ", a token ends" : ""}`;
}
function across(span, lines) { // the character in the same column, or the last before it
  const {left, top, height} = span.getClientRects()[0], y = top + height / 2 + lines * parseFloat(getComputedStyle(span).lineHeight);
  for (let x = left + 4, at; x > 0; x -= 4) if ((at = document.elementFromPoint(x, y))?.of) return at;
}
const moves = {ArrowRight: span => span.nextSibling || cells(span.parentNode.nextElementSibling)[0], ArrowDown: span => across(span, 1),
  ArrowLeft: span => span.previousSibling || cells(span.parentNode.previousElementSibling).at(-1), ArrowUp: span => across(span, -1)};
const near = new IntersectionObserver(seen => seen.forEach(one => one.isIntersecting && cells(one.target)), {rootMargin: "100%"});
document.querySelectorAll(".text > div").forEach(chunk => near.observe(chunk));
for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, tell);
document.addEventListener("keydown", event => {
  const {key, target} = event, text = target.closest(".text");
  if (!text || !moves[key] || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  text.at = target.of ? moves[key](target) || target : text.at || cells(text.firstChild)[0];
  text.at.focus();
});
"""
CHUNK = 2000  # characters of a page that are laid out together


def cell_colours(percent):
    """Of a cell and of the text in it, #rrggbb: the text's contrast is at least 4.5."""
    low, high, t = (*CIVIDIS[:2], percent / 50) if percent < 50 else (*CIVIDIS[1:], percent / 50 - 1)
    return "#" + bytes(round(x + (y - x) * t) for x, y in zip(low, high)).hex(), "#ffffff" if percent < 47 else "#000000"


def page(title, body):
    """An HTML page that needs no other file: legend, body, and the style of spans of class c0 to c100, 100 p, and end."""
    rules = "".join(".c{} {{ background: {}; color: {}; }}\n".format(percent, *cell_colours(percent)) for percent in range(101))
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>{STYLE}{rules}</style>
<h1>{title}</h1>
<p>probability p of a boundary after the character: 0 <span style="padding: 0 6em; background: linear-gradient(to right,
{", ".join(cell_colours(i)[0] for i in (0, 50, 100))})"></span>&nbsp;1 &emsp; <span class="c50 end">&nbsp;</span> a token ends here</p>
{body}
</html>
"""


def as_html(texts):
    """A page of texts, each (heading, [(byte, a, p, nats)]): the colour is p; a character that is pointed at tells p, bytes and bits."""
    blocks = []
    for heading, steps in texts:
        chunks, first, heading = [[]], 0, html.escape(printable(heading))
        for text, ends, last in characters((byte, a, i) for i, (byte, a, *_) in enumerate(steps)):  # in p's place the byte's number
            own, before = steps[first : last + 1], chunks[-1]
            first, bits = last + 1, sum(nats for *_, nats in own) / math.log(2)
            if len(before) >= CHUNK and (before[-1][0] == "\n" or len(before) == 2 * CHUNK):
                chunks.append([])
            cell = f"{bytes(byte for byte, *_ in own).hex()},{round(100 * own[-1][2])},{round(100 * bits)}{',1' * ends}"
            chunks[-1].append((html.escape(text, quote=False), cell))
        divs = "".join('<div data-of="{1}">{0}</div>'.format("".join(text for text, _ in chunk), " ".join(cell for _, cell in chunk))
                       for chunk in chunks)
        blocks.append(f'<h2>{heading}</h2>\n<div class="text" role="application" tabindex="0" aria-label="{heading}: arrow keys go from '
                      f'character to character">{divs}</div>')
    hint = "Point at a character, or press Tab and then arrow keys, to see its p, its bytes and the bits that they cost."
    return page("Token boundaries", f'{"".join(blocks)}<p id="told" role="status">{hint}</p><script>{SCRIPT}</script>')


def write(path, text):
    """Writes a file whole or, if the disk is full, not at all."""
    Path(f"{path}.part").write_text(text, encoding="utf-8")
    os.replace(f"{path}.part", path)


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
    print("sample.py:", " ".join(printable(str(message)).split()), file=sys.stderr)
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
    except (OSError, ValueError, RuntimeError, AssertionError, ImportError) as error:  # the last three: no such device
        fail(str(error).splitlines()[0])
    if options.score and not texts[0]:
        fail(f"--score={options.score} is an empty file")
    torch.manual_seed(options.seed % 2**64)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    run = scored if options.score else generated

    def show(piece):
        try:
            print(piece, end="", flush=True)
        except BrokenPipeError:  # the reader, `head` say, has seen enough; a page is made all the same
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not options.html:
                sys.exit()

    shown, started = [], time.perf_counter()
    for text in texts:
        shown.append([])

        def stream():
            for byte, a, p, nats in run(model, text, options):
                shown[-1].append((byte, a, p, nats))
                yield byte, a, p

        for piece in as_terminal(stream(), colour):
            show(piece)
        show("\n" + "-" * 80 + "\n")
    seconds = time.perf_counter() - started
    steps = [step for text in shown for step in text]
    tokens = sum(a for _, a, _, _ in steps)
    bits = sum(nats for *_, nats in steps) / math.log(2)
    show(f"{len(steps)} bytes, {tokens} tokens, {len(steps) / max(tokens, 1):.2f} bytes per token, "
         f"{bits / len(steps):.3f} bits per byte, {len(steps) / seconds:.0f} bytes per second\n")
    if options.html:
        write(options.html, as_html([(options.score or f"sample {i}", text) for i, text in enumerate(shown, 1)]))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:  # no vocabulary for --boundaries=bpe
        fail(error)
