"""
Shows the boundaries of a text as a page that needs no other file (the paper's Figure 2).

    python experiments/page.py --out_dir=out --score=FILE --html=page.html

The colour of a character is the policy's probability p of a boundary after it: dark blue 0,
yellow 1. A red bar stands where a token ends. A character that the mouse points at, or that Tab
reaches, tells its p, its bytes and the bits that they cost.
"""
import html
import math
import os
import sys
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.colors import to_hex

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments.compare import parser_of
from model import load_checkpoint
from prepare import fail, printable
from sample import characters, scored

STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em 3em }
.text { font: 15px/1.7 monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.end { box-shadow: inset -2px 0 #e00, inset -3px 0 #fff }
.text span:is(:hover, :focus) { outline: 2px solid CanvasText; outline-offset: 1px }
.text span:is(:hover, :focus)::after {
  content: attr(data-told); position: fixed; inset: auto 0 0 0; padding: .5em 1em;
  border-top: 1px solid; background: Canvas; color: CanvasText; pointer-events: none }
.text span:hover::after { z-index: 1 }
"""


def cell_colours(p):
    """A cell's colour, told apart by the colour-blind as well, and its text's: #rrggbb, twice."""
    return to_hex(colormaps["cividis"](p)), "#ffffff" if p < 0.47 else "#000000"


def span(character, ends, p, told=""):
    """A character as HTML, coloured by p, with a bar if a token ends; `told` stands after its p."""
    told = f"p = {p:.2f}{told}{', a token ends' * ends}"
    return (f'<span class="c{round(100 * p)}{" end" * ends}" tabindex="0" data-told="{told}">'
            f'{html.escape(character).replace(chr(10), "⏎" + chr(10))}</span>')


def spans(steps):
    """The characters of [(byte, a, p, nats)] as HTML; each tells its p, bytes and bits."""
    made, first = [], 0
    for character, ends, last in characters((step[0], step[1], i) for i, step in enumerate(steps)):
        byte, _, p, nats = zip(*steps[first : last + 1])
        told = f", bytes {bytes(byte).hex(' ')}, {sum(nats) / math.log(2):.2f} bits"
        made.append(span(character, ends, p[-1], told))
        first = last + 1
    return "".join(made)


def page(title, body):
    """A whole HTML page: title, legend and body."""
    colours = [cell_colours(percent / 100) for percent in range(101)]
    rules = "\n".join(f".c{percent} {{ background: {background}; color: {colour} }}"
                      for percent, (background, colour) in enumerate(colours))
    gradient = f"linear-gradient(to right, {', '.join(colour for colour, _ in colours[::10])})"
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{STYLE}{rules}</style>
<h1>{title}</h1>
<p>probability p of a boundary after the character:
0 <span style="padding: 0 6em; background: {gradient}"></span>&nbsp;1 &emsp;
<span class="c50 end">&nbsp;</span> a token ends here</p>
{body}
</html>
"""


def as_html(texts):
    """A page of texts, each (heading, [(byte, a, p, nats)])."""
    return page("Token boundaries", "\n".join(
        f'<h2>{html.escape(printable(heading))}</h2><div class="text">{spans(steps)}</div>'
        for heading, steps in texts))


def write(path, text):
    """Writes a file whole or, if the disk is full, not at all."""
    Path(f"{path}.part").write_text(text, encoding="utf-8")
    os.replace(f"{path}.part", path)


def user_path(text):
    return Path(text).expanduser()


def main(argv):
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--out_dir", type=user_path, default="out", help="that train.py wrote to (%(default)s)")
    add("--score", type=user_path, metavar="FILE", required=True, help="the text")
    add("--html", type=user_path, metavar="FILE", required=True, help="the page to write")
    options = parser.parse_args(argv)
    try:
        text = options.score.read_bytes()
        if options.html.exists() and options.html.samefile(options.score):
            fail(f"--html={options.html} is the text; give the page another name")
        model, _ = load_checkpoint(options.out_dir / "ckpt.pt")
        torch.manual_seed(0)  # of the draws
        write(options.html, as_html([(str(options.score), list(scored(model, text, "cpu")))]))
    except (OSError, ValueError) as error:
        fail(error)


if __name__ == "__main__":
    main(sys.argv[1:])
