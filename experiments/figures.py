"""
Draws what runs of compare.py or other checkpoints learned, or how a single run learned.

    python -m experiments.figures --name=try     the runs of experiments/results/try
    python -m experiments.figures --name=rates out-2/ckpt.pt out-4/ckpt.pt
    python -m experiments.figures --watch=out    a run of train.py, finished or not, or its log

The first two write these files into experiments/results/NAME/:
    boundaries.html, boundaries.svg  boundaries in the first validation row (Figures 2, 5-12)
The third writes these beside the log:
    watch.html                       validation text at every evaluation, with a slider
    watch.svg                        its first characters near 0, 0.5 and 1 MB and at the end
"""
import html
import math
from pathlib import Path

import torch

from common.checkpoint import load_model
from common.commandline import UserError, argument_parser, run_program
from common.text import characters
from experiments.compare import RESULTS, read_log
from experiments.page import as_html, cell, cell_colours, page, write
from prepare import open_shards
from sample import scored

WATCH_STYLE = """
label { display: flex; gap: 1em } input { flex: auto; min-width: 0 }
.still:not(.now) { display: none }
svg { margin-top: 1em; max-width: 38em; font: 14px sans-serif; fill: currentColor }
circle.now { r: 6px; fill: #e00; stroke: Canvas; stroke-width: 2 }
"""
WATCH_SCRIPT = """
const slider = document.querySelector("input");
const stills = document.querySelectorAll(".still"), points = document.querySelectorAll("circle");
slider.oninput = () => {
  for (const all of [stills, points])
    all.forEach((one, i) => one.classList.toggle("now", i == slider.value));
  slider.ariaValueText = stills[slider.value].firstChild.textContent;
};
slider.oninput();
"""
PICTURE_STYLE = """
text { font: 15px monospace; text-anchor: middle }
.end { fill: #e00; stroke: #fff; stroke-width: .5 }
.words { font: 14px sans-serif; text-anchor: start; fill: #222 }
"""


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


# ---- How a run learned, from its evaluations.
def caption(record):
    return (f"{record['bytes'] / 1e6:.2f} MB read, {record['val_bpb']:.3f} bits per byte, "
            f"rate {record['val_rate']:.3f}")


def curve(records, width=440, height=150):
    """An SVG of bits per byte during training, with a circle for every evaluation."""
    end = records[-1]["bytes"] / 1e6 or 1
    high = 1.05 * max(r["val_bpb"] for r in records)
    low = 0.95 * min(r["val_bpb"] for r in records)
    points = []
    circles = grid = ""
    for r in records:
        x = width * r["bytes"] / 1e6 / end
        y = height * math.log(high / r["val_bpb"]) / math.log(high / low)
        points.append(f"{x:.1f},{y:.1f}")
        circles += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>'
    for part in 0, 0.5, 1:
        y = height * part
        grid += f"""<path stroke="#8886" d="M0 {y}h{width}"/>
<text x="-6" y="{y + 4}" text-anchor="end">{high * (low / high) ** part:.2f}</text>
<text x="{width * part}" y="{height + 18}" text-anchor="middle">{end * part:.3g}</text>
"""
    return f"""<svg viewBox="-50 -30 {width + 75} {height + 70}" role="img"
aria-label="bits per byte during training">{grid}
<text x="-44" y="-14">bits per byte of validation text, logarithmic</text>
<text x="{width / 2}" y="{height + 36}" text-anchor="middle">MB read</text>
<polyline fill="none" stroke="currentColor" points="{' '.join(points)}"/>{circles}</svg>"""


def watch(records, name):
    """A page on which a slider chooses the evaluation. It begins with the last one."""
    stills = ""
    for r in records:
        text = "".join(cell(*character) for character in characters(r["line"]))
        stills += (f'<div class="still"><p>{caption(r)}</p>'
                   f'<div class="text">{text}</div></div>\n')
    last = len(records) - 1
    return page("Watch it learn", f"""<style>{WATCH_STYLE}</style>
<p>The same validation text at every evaluation of {html.escape(name)}.</p>
<label>training
<input type="range" min="0" max="{last}" value="{last}" autocomplete="off"></label>
{stills}
{curve(records)}
<script>{WATCH_SCRIPT}</script>""")


def learning(records):
    """The picture of a text's first characters near 0, 0.5 and 1 MB and at the end of a run."""
    texts = {}
    for place in 0, 0.5e6, 1e6, records[-1]["bytes"]:
        nearest = min(records, key=lambda r: abs(r["bytes"] - place))
        texts[caption(nearest)] = list(characters(nearest["line"]))[:100]
    return picture(texts, columns=50)


def main(argv=None):
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("checkpoints", nargs="*", help="instead of the runs in the folder")
    add("--name", default="try", help="folder of results (%(default)s)")
    add("--watch", metavar="RUN", help="show how this run learned instead")
    options = parser.parse_args(argv)
    if options.watch:
        log = Path(options.watch).expanduser()
        if log.is_dir():
            log = log / "log.jsonl"
        records = [record for record in read_log(log) if "line" in record]
        if not records:
            raise UserError(f"{log} holds no evaluations; use the log.jsonl of a run")
        write(log.with_name("watch.html"), watch(records, log.resolve().parent.name))
        write(log.with_name("watch.svg"), learning(records))
        return

    results = RESULTS / options.name
    texts, shown = {}, {}  # by label
    for path in map(Path, options.checkpoints or sorted(results.glob("runs/**/ckpt.pt"))):
        model, saved = load_model(path)
        hp = saved["config"]
        row = open_shards(hp["data"], "val", hp["seq_len"])[0][0]
        torch.manual_seed(0)
        label = str(path.parent).removeprefix(f"{results}/runs/")
        texts[label] = list(scored(model, row.tobytes()))
        shown[label] = list(characters(step[:3] for step in texts[label]))
    if not texts:
        raise UserError(f"there are no runs in {results}; make them with compare.py, or name "
                        "checkpoints")
    results.mkdir(parents=True, exist_ok=True)
    write(results / "boundaries.html", as_html(texts))
    write(results / "boundaries.svg", picture(shown, columns=100))


if __name__ == "__main__":
    run_program(main)
