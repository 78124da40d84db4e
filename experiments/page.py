"""
Shows where the tokens of a text end, on a self-contained HTML page (the paper's Figure 2).

    python -m experiments.page --out_dir=out --score=FILE --html=page.html
    python -m experiments.page --out_dir=out --text="def main(argv):" --html=page.html
    python -m experiments.page --out_dir=out --start="def main" --html=page.html

--score reads a file, and --start generates text. The colour of a character is the policy's
probability p of a boundary after it: dark blue is 0, yellow is 1. A red bar stands where a token
ends. Point at a character to see its p and the bits that it costs. Below the text are its most
common tokens.
"""
import html
import math
import os
from collections import Counter
from pathlib import Path

import torch

from common.commandline import argument_parser, run_program, say
from common.text import characters, printable
from sample import generate, load, prompt, scored

NEW_BYTES = 1000  # that --start generates
BLUE = 0, 34, 78  # of p = 0
YELLOW = 254, 232, 56  # of p = 1
STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em 3em }
.text { font: 15px/1.7 monospace; white-space: break-spaces; overflow-wrap: anywhere }
[data-p] { font: inherit; padding-bottom: 3px } /* underscores lie that low */
b { box-shadow: inset -2px 0 #e00, inset -3px 0 #fff }
.text [data-p]:hover { outline: 2px solid CanvasText; outline-offset: 1px }
.text [data-p]:hover::after {
  content: "p = " attr(data-p) "%"; position: fixed; inset: auto 0 0 0; padding: .5em 1em;
  border-top: 1px solid; background: Canvas; color: CanvasText; pointer-events: none }
.text [data-b]:hover::after { content: "p = " attr(data-p) "%, " attr(data-b) " bits" }
ul { columns: 11em; font-size: 14px; padding: 0; list-style: none; overflow-wrap: anywhere }
"""


def cell_colours(p):
    """The colours of a character's cell and of its text, legible to the colour-blind as well."""
    mixed = [round(low + (high - low) * p) for low, high in zip(BLUE, YELLOW)]
    return f"#{bytes(mixed).hex()}", "#ffffff" if p < 0.45 else "#000000"


def cell(text, a, p, attributes=""):
    """A character as HTML, coloured by p. The element is <b> where a token ends, else <i>."""
    tag = "b" if a else "i"
    text = html.escape(text).replace("\n", "⏎\n")
    return f"<{tag} data-p={100 * p:.0f}{attributes}>{text}</{tag}>"


def cells(steps):
    """The characters of [(byte, a, p, nats)] as HTML."""
    made = ""
    first = 0
    numbered = [(byte, a, i) for i, (byte, a, _, _) in enumerate(steps)]
    for text, a, last in characters(numbered):  # the numbers of a character's bytes
        p = steps[last][2]
        nats = sum(step[3] for step in steps[first : last + 1])
        made += cell(text, a, p, f" data-b={nats / math.log(2):.1f}")
        first = last + 1
    return made


def common_tokens(steps):
    """The most common tokens of [(byte, a, p, nats)], as HTML."""
    tokens = Counter()
    token = b""
    for byte, a, _, _ in steps:
        token += bytes([byte])
        if a:
            tokens[token] += 1
            token = b""
    items = ""
    for token, count in tokens.most_common(50):
        text = printable(token.decode(errors="backslashreplace"))
        text = text.replace("\n", "⏎").replace(" ", "␣")
        items += f"<li>{count} <code>{html.escape(text)}</code>\n"
    return f"""<h3>The fifty most common of {tokens.total()} tokens, and their counts</h3>
<ul>{items}</ul>"""


def page(title, body):
    """A whole HTML page: title, legend and body."""
    legend = "".join(cell(f" {p:.0%} ", False, p) for p in (0, 0.25, 0.5, 0.75, 1))
    rules = ""
    for percent in range(101):
        background, colour = cell_colours(percent / 100)
        rules += f'[data-p="{percent}"] {{ background: {background}; color: {colour} }}\n'
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{STYLE}{rules}</style>
<h1>{title}</h1>
<p>p, the probability of a boundary after the character: {legend}
<br><b data-p=50>&nbsp;</b> a token ends here</p>
{body}
</html>
"""


def as_html(texts):
    """A page of texts, {heading: [(byte, a, p, nats)]}."""
    body = ""
    for heading, steps in texts.items():
        body += f"""<h2>{html.escape(printable(heading))}</h2>
<div class="text">{cells(steps)}</div>
{common_tokens(steps)}
"""
    return page("Token boundaries", body)


def write(path, text):
    path.write_text(text, encoding="utf-8")
    say(f"wrote {path}")


def main(argv=None):
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--out_dir", default="out", help="folder where train.py left ckpt.pt (%(default)s)")
    add("--html", metavar="FILE", required=True, help="the page to write")
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--score", metavar="FILE", help="show this file")
    add("--text", help="show this text")
    add("--start", help="continue this text and show the result; FILE:PATH reads it from a file")
    options = parser.parse_args(argv)
    model = load(options.out_dir)
    torch.manual_seed(0)
    if options.start is not None:
        heading = f"generated after {options.start}"
        x = prompt(os.fsencode(options.start))
        stream = generate(model, x, NEW_BYTES, temperature=0.8, top_k=50)
    elif options.text is not None:
        heading = "given text"
        stream = scored(model, os.fsencode(options.text))
    else:
        heading = options.score
        stream = scored(model, Path(options.score).expanduser().read_bytes())
    steps = [(int(byte), bool(a), float(p), float(nats)) for byte, a, p, nats in stream]
    write(Path(options.html).expanduser(), as_html({heading: steps}))


if __name__ == "__main__":
    run_program(main)
