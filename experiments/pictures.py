"""Pictures and pages of boundaries, and the figure of bits per byte over FLOPs."""
import html
import io
import math
import os
import re

from common.commandline import UserError, say
from common.text import characters, printable

BLUE = 0, 34, 78  # of p = 0
YELLOW = 254, 232, 56  # of p = 1
FORBIDDEN = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML 1.0
PICTURE_STYLE = """
text { font: 15px monospace; text-anchor: middle }
.end { fill: #e00; stroke: #fff; stroke-width: .5 }
.words { font: 14px sans-serif; text-anchor: start; fill: #222 }
"""
PAGE_STYLE = """
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
"""


def allowed(text):
    """The text with U+FFFD for characters that XML forbids, among them what UTF-8 cannot write."""
    return FORBIDDEN.sub("\ufffd", text)


def write(path, text):
    """Writes what is allowed of a text, whole or not at all. Raises OSError or UserError."""
    if path.exists() and not path.is_file():  # such as /dev/stdout, which must not be replaced
        raise UserError(f"{path} is not a file")
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(allowed(text), encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    say(f"wrote {path}")


def cell_colours(p):
    """The colours of a character's cell and of its text, legible to the colour-blind as well."""
    mixed = [round(low + (high - low) * p) for low, high in zip(BLUE, YELLOW)]
    return f"#{bytes(mixed).hex()}", "#ffffff" if p < 0.45 else "#000000"


# ---- SVG.
def svg(width, height, body):
    """An SVG file. It has its own white background, because it may be opened on a dark page."""
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<style>{PICTURE_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>
{body}</svg>
"""


def svg_cell(x, y, text, a, p, width=10):
    """A character of a picture, coloured by p, with a red bar where a token ends."""
    background, colour = cell_colours(p)
    text = html.escape(text).replace("\n", "⏎")
    made = (f'<path fill="{background}" d="M{x} {y}h{width}v19h-{width}"/>'
            f'<text x="{x + width / 2:g}" y="{y + 14}" fill="{colour}">{text}</text>')
    if a:
        made += f'<path class="end" d="M{x + width - 2} {y}h2v19h-2z"/>'
    return made


LEGEND = f"""<path fill="{cell_colours(1)[0]}" d="M0 4h10v19h-10"/>
<text class="words" x="15" y="19">a boundary is likely</text>
<path fill="{cell_colours(0)[0]}" d="M190 4h10v19h-10"/>
<text class="words" x="205" y="19">unlikely</text>
<path class="end" d="M300 4h2v19h-2z"/><text class="words" x="308" y="19">a token ends</text>
"""


def picture(texts, columns):
    """An SVG of texts, {heading: [(character, a, p)]}, with a legend."""
    body = LEGEND
    top = 34
    for heading, text in texts.items():
        body += f'<text class="words" y="{top + 15}">{html.escape(heading)}</text>\n'
        for i, cell in enumerate(text):
            body += svg_cell(10 * (i % columns), top + 22 + 20 * (i // columns), *cell)
        top += 20 * math.ceil(len(text) / columns) + 32
    return svg(10 * columns, top - 8, body)


def plot(runs):
    """An SVG of bits per byte over FLOPs, from {label: evaluations of its runs, as of read_run}."""
    os.environ.pop("MPLBACKEND", None)  # a notebook's may not exist here, and none is needed
    import matplotlib  # here because most programs plot nothing
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for n, label in enumerate(runs):
        style = {"color": f"C{n}", "marker": "os^DvPX*<>"[n % 10], "linestyle": ("-", "--")[n % 2]}
        for i, run in enumerate(runs[label]):
            flops = [e["paper's FLOPs"] for e in run]
            bits = [e["bits"] for e in run]
            axes.plot(flops, bits, **style, label=None if i else allowed(label), markersize=4)
    axes.set(xscale="log", xlabel="training FLOPs, counted as in the paper",
             ylabel="validation bits per byte")
    axes.tick_params("x", which="minor", labelsize=6)
    axes.legend(frameon=False)
    axes.grid(alpha=0.2)
    file = io.StringIO()
    # the same runs give the same svg, byte for byte
    with matplotlib.rc_context({"svg.hashsalt": "tokens"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


# ---- HTML.
def html_cell(text, a, p, attributes=""):
    """A character as HTML, coloured by p. The element is <b> where a token ends, else <i>."""
    tag = "b" if a else "i"
    text = html.escape(text).replace("\n", "⏎\n")
    return f"<{tag} data-p={100 * p:.0f}{attributes}>{text}</{tag}>"


def html_cells(steps):
    """The characters of [(byte, a, p, nats)] as HTML."""
    made = ""
    first = 0
    numbered = [(byte, a, i) for i, (byte, a, _, _) in enumerate(steps)]
    for text, a, last in characters(numbered):  # the numbers of a character's bytes
        nats = sum(step[3] for step in steps[first : last + 1])
        made += html_cell(text, a, steps[last][2], f" data-b={nats / math.log(2):.1f}")
        first = last + 1
    return made


def html_page(title, body):
    """A whole HTML page: title, legend and body."""
    legend = "".join(html_cell(f" {p:.0%} ", False, p) for p in (0, 0.25, 0.5, 0.75, 1))
    rules = ""
    for percent in range(101):
        background, colour = cell_colours(percent / 100)
        rules += f'[data-p="{percent}"] {{ background: {background}; color: {colour} }}\n'
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{PAGE_STYLE}{rules}</style>
<h1>{title}</h1>
<p>p, the probability of a boundary after the character: {legend}
<br><b data-p=50>&nbsp;</b> a token ends here</p>
{body}
</html>
"""


def boundaries_page(texts):
    """A page of texts, {heading: [(byte, a, p, nats)]}."""
    body = ""
    for heading, steps in texts.items():
        body += f"""<h2>{html.escape(printable(heading))}</h2>
<div class="text">{html_cells(steps)}</div>
"""
    return html_page("Token boundaries", body)
