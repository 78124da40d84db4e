"""
Draws what runs of compare.py or other checkpoints learned, or how a single run learned.

    python -m experiments.figures --name=try     the runs of results/try
    python -m experiments.figures --name=rates out-2 out-4 --text="def main(argv):"
    python -m experiments.figures --watch=out    a run of train.py, finished or not, or its log

The first two write these files into results/NAME/:
    boundaries.html, boundaries.svg  boundaries in the same text: that of --text, or the first
                                     validation row of the first run (Figures 2, 5-12)
The third writes these beside the log:
    watch.html                       validation text at every evaluation, with a slider
    watch.svg                        its first characters near 0, 0.5 and 1 MB and at the end
"""
import html
import math
import os
from pathlib import Path

import torch

from common.checkpoint import checkpoint_path, load_model
from common.commandline import UserError, argument_parser, run_program
from common.text import characters
from experiments.pictures import boundaries_page, html_cell, html_page, picture, write
from experiments.tables import RESULTS, read_log
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


# ---- Boundaries.
def draw_boundaries(checkpoints, given, folder):
    """Writes the boundaries of the models in these checkpoints, in a given text (bytes) or None."""
    texts = {}  # by label
    for path in checkpoints:
        model, _ = load_model(path)
        if given is None:
            given = open_shards(model.hp.data, "val", model.hp.seq_len)[0][0].tobytes()
        torch.manual_seed(0)
        label = str(checkpoint_path(path).parent).removeprefix(f"{folder}/runs/")
        texts[label] = list(scored(model, given))
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "boundaries.html", boundaries_page(texts))
    shown = {label: list(characters(step[:3] for step in text)) for label, text in texts.items()}
    write(folder / "boundaries.svg", picture(shown, columns=100))


# ---- How a run learned, from its evaluations.
def caption(record):
    return (f"{record['bytes'] / 1e6:.2f} MB read, {record['val_bpb']:.3f} bits per byte, "
            f"rate {record['val_rate']:.3f}")


def round_numbers(low, high):
    """The multiples of 1, 2 or 5 times a power of ten from low to high, at most six."""
    power = 10 ** math.floor(math.log10((high - low) / 5))
    step = next(m * power for m in (1, 2, 5, 10) if 5 * m * power >= high - low)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def curve(records, width=440, height=150):
    """An SVG of bits per byte during training, with a circle for every evaluation."""
    end = records[-1]["bytes"] / 1e6 or 1
    bits = [r["val_bpb"] for r in records]
    low = min(bits)
    high = max(bits) if max(bits) > low else low + 1

    def place(megabytes, value):
        return width * megabytes / end, height * (high - value) / (high - low)

    places = [place(r["bytes"] / 1e6, value) for r, value in zip(records, bits)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    circles = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in places)
    grid = ""
    for value in round_numbers(low, high):
        _, y = place(0, value)
        grid += f"""<path stroke="#8886" d="M0 {y:.1f}h{width}"/>
<text x="-6" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>
"""
    for megabytes in round_numbers(0, end):
        x, _ = place(megabytes, 0)
        grid += f'<text x="{x:.1f}" y="{height + 18}" text-anchor="middle">{megabytes:g}</text>\n'
    return f"""<svg viewBox="-50 -30 {width + 75} {height + 70}" role="img"
aria-label="bits per byte during training">{grid}
<text x="-44" y="-14">bits per byte of validation text</text>
<text x="{width / 2}" y="{height + 36}" text-anchor="middle">MB read</text>
<polyline fill="none" stroke="currentColor" points="{points}"/>{circles}</svg>"""


def watch(records, name):
    """A page on which a slider chooses the evaluation. It begins with the last one."""
    stills = ""
    for r in records:
        text = "".join(html_cell(*character) for character in characters(r["line"]))
        stills += (f'<div class="still"><p>{caption(r)}</p>'
                   f'<div class="text">{text}</div></div>\n')
    last = len(records) - 1
    return html_page("Watch it learn", f"""<style>{WATCH_STYLE}</style>
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
    add("checkpoints", nargs="*", help="out_dirs of train.py, instead of the runs in the folder")
    add("--name", default="try", help="folder of results (%(default)s)")
    add("--text", type=os.fsencode, help="show boundaries in this text")
    add("--watch", metavar="RUN", help="show how this run learned instead")
    options = parser.parse_args(argv)
    if options.watch:
        log = Path(options.watch).expanduser()
        if log.suffix != ".jsonl":
            log = checkpoint_path(log).with_name("log.jsonl")
        records = [record for record in read_log(log) if "line" in record]
        if not records:
            raise UserError(f"{log} holds no evaluations; use the log.jsonl of a run")
        write(log.with_name("watch.html"), watch(records, log.resolve().parent.name))
        write(log.with_name("watch.svg"), learning(records))
        return

    folder = RESULTS / options.name
    checkpoints = options.checkpoints or sorted(folder.glob("runs/**/ckpt.pt"))
    if not checkpoints:
        raise UserError(f"there are no runs in {folder}; make them with compare.py, or name "
                        "checkpoints")
    if options.text == b"":
        raise UserError("the text is empty")
    draw_boundaries(checkpoints, options.text, folder)


if __name__ == "__main__":
    run_program(main)
