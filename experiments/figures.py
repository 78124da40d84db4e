"""
Draws the tokens that models make of a text, how a run learned to make them, or results.

    python -m experiments.figures --name=try     the runs of results/try
    python -m experiments.figures --name=rates out-2 out-4 --text="def main(argv):"
    python -m experiments.figures --watch=out    a run of train.py, finished or not, or its log
    python -m experiments.figures --results      the runs of the table `rates` in runs.jsonl

The first two write results/NAME/boundaries.svg (the paper's Figures 2 and 5 to 12): the same text
for all models, that of --text or the first validation row of the first run. The third writes
watch.svg beside the log: the start of a validation text near 0, 0.5 and 1 MB and at the end. The
last one writes assets/rates.svg, bits over the rate, and assets/words.svg, bits along words.
"""
import html
import io
import json
import math
import os
import re
import statistics
from pathlib import Path

import torch

from common.checkpoint import checkpoint_path
from common.commandline import UserError, argument_parser, run_program, say
from common.files import write_text
from common.models import load_model
from common.text import characters
from experiments.report import RESULTS, RUNS, read_log
from prepare import open_shards
from sample import scored

ASSETS = Path(__file__).parents[1] / "assets"
BLUE = 0, 34, 78  # of p = 0
YELLOW = 254, 232, 56  # of p = 1
FORBIDDEN = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # in XML 1.0
STYLE = """
text { font: 15px monospace; text-anchor: middle }
.end { fill: #e00; stroke: #fff; stroke-width: .5 }
.words { font: 14px sans-serif; text-anchor: start; fill: #222 }
"""


def allowed(text):
    """The text with U+FFFD for characters that XML forbids, among them what UTF-8 cannot write."""
    return FORBIDDEN.sub("\ufffd", text)


def write(path, text):
    """Writes what is allowed of a text. Raises OSError."""
    write_text(path, allowed(text))
    say(f"wrote {path}")


# ---- Text with boundaries.
def cell_colours(p):
    """The colours of a character's cell and of its text, legible to the colour-blind as well."""
    mixed = [round(low + (high - low) * p) for low, high in zip(BLUE, YELLOW)]
    return f"#{bytes(mixed).hex()}", "#ffffff" if p < 0.45 else "#000000"


LEGEND = f"""<path fill="{cell_colours(1)[0]}" d="M0 4h10v19h-10"/>
<text class="words" x="15" y="19">a boundary is likely</text>
<path fill="{cell_colours(0)[0]}" d="M190 4h10v19h-10"/>
<text class="words" x="205" y="19">unlikely</text>
<path class="end" d="M300 4h2v19h-2z"/><text class="words" x="308" y="19">a token ends</text>
"""


def svg_cell(x, y, character, a, p):
    """A character, coloured by p, with a red bar where a token ends."""
    background, colour = cell_colours(p)
    text = html.escape(character).replace("\n", "⏎")
    made = (f'<path fill="{background}" d="M{x} {y}h10v19h-10"/>'
            f'<text x="{x + 5}" y="{y + 14}" fill="{colour}">{text}</text>')
    if a:
        made += f'<path class="end" d="M{x + 8} {y}h2v19h-2z"/>'
    return made


def picture(texts, columns):
    """An SVG of texts, {heading: [(character, a, p)]}, with a legend.

    It has its own white background, because it may be shown on a dark page.
    """
    body = LEGEND
    top = 34
    for heading, text in texts.items():
        body += f'<text class="words" y="{top + 15}">{html.escape(heading)}</text>\n'
        for i, cell in enumerate(text):
            body += svg_cell(10 * (i % columns), top + 22 + 20 * (i // columns), *cell)
        top += 20 * math.ceil(len(text) / columns) + 32
    width = 10 * columns
    size = f'viewBox="0 0 {width} {top - 8}" width="{width}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>
{body}</svg>
"""


def boundaries(checkpoints, given, folder):
    """The picture of what the models in these checkpoints make of a given text (bytes) or None.

    Runs in the folder of results are called by their place in it. Raises UserError.
    """
    texts = {}
    for path in checkpoints:
        model, _ = load_model(path)
        if given is None:
            given = open_shards(model.hp.data, "val", model.hp.seq_len)[0][0].tobytes()
        torch.manual_seed(0)
        label = str(checkpoint_path(path).parent).removeprefix(f"{folder}/runs/")
        texts[label] = list(characters(scored(model, given)))
    return picture(texts, columns=100)


def learning(records):
    """The picture of a text's first characters near 0, 0.5 and 1 MB and at the end of a run."""
    texts = {}
    for place in 0, 0.5e6, 1e6, records[-1]["bytes"]:
        nearest = min(records, key=lambda record: abs(record["bytes"] - place))
        caption = (f"{nearest['bytes'] / 1e6:.2f} MB read, {nearest['val_bpb']:.3f} bits per byte, "
                   f"rate {nearest['val_rate']:.3f}")
        texts[caption] = list(characters(nearest["line"]))[:100]
    return picture(texts, columns=50)


# ---- Curves.
def draw(panels, size, **settings):
    """An SVG of panels side by side, {title: [(label, xs, ys), ...]}; ys are bits per byte."""
    os.environ.pop("MPLBACKEND", None)  # a notebook's may not exist here, and none is needed
    import matplotlib  # here because most programs plot nothing
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    labels = [*dict.fromkeys(label for lines in panels.values() for label, _, _ in lines)]
    shown = {}
    for axes, (title, lines) in zip(all_axes, panels.items()):
        for label, xs, ys in lines:
            n = labels.index(label)
            shown[allowed(label)], = axes.plot(
                xs, ys, color=f"C{n}", marker="os^DvPX*<>"[n % 10], markersize=4,
                linestyle=("-", "--")[n % 2])
        axes.set(title=title, **settings)
        axes.tick_params("x", which="minor", labelsize=6)
        axes.grid(alpha=0.2)
    all_axes[0].set(ylabel="validation bits per byte")
    all_axes[-1].legend(shown.values(), shown, frameon=False)
    file = io.StringIO()
    # the same runs give the same svg, byte for byte
    with matplotlib.rc_context({"svg.hashsalt": "tokens"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def loss(runs):
    """Bits over FLOPs, from {label: evaluations of its runs, as of read_run}."""
    lines = [(label, [e["paper's FLOPs"] for e in run], [e["bits"] for e in run])
             for label in runs for run in runs[label]]
    return draw({"": lines}, (7, 4.5), xscale="log",
                xlabel="training FLOPs, counted as in the paper")


def rates(runs):
    """Bits over the rate, from lines of runs.jsonl: means over seeds, a panel for each text."""
    panels = {}
    for text in dict.fromkeys(run["text"] for run in runs):
        panels[text] = []
        for system in dict.fromkeys(run["system"] for run in runs):
            points = {}  # by target
            for run in runs:
                if (run["text"], run["system"]) == (text, system):
                    target = run["flags"].get("downsample_rate_target")
                    points.setdefault(target, []).append((run["rate"], run["bits"]))
            means = sorted(tuple(map(statistics.mean, zip(*point))) for point in points.values())
            if means:
                panels[text].append((system, *zip(*means)))
    return draw(panels, (4 * len(panels), 3.5), xlabel="tokens per byte")


def words(runs):
    """Bits along words, from the lines of runs.jsonl that have them."""
    panels = {}
    for run in runs:
        for kind in "repeated", "new":
            if kind in run:
                line = run["system"], range(1, 1 + len(run[kind])), run[kind]
                panels.setdefault(f"{run['text']}: {kind} words", []).append(line)
    return draw(panels, (4 * len(panels), 3.5), xlabel="byte of the word")


def main(argv=None):
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("checkpoints", nargs="*", help="out_dirs of train.py, instead of the runs in the folder")
    add("--name", default="try", help="folder of results (%(default)s)")
    add("--text", type=os.fsencode, help="show boundaries in this text")
    add("--watch", metavar="RUN", help="show how this run learned instead")
    add("--results", action="store_true", help="draw the results in runs.jsonl instead")
    options = parser.parse_args(argv)
    if options.results:
        runs = [run for run in map(json.loads, RUNS.open()) if run["table"] == "rates"]
        write(ASSETS / "rates.svg", rates(runs))
        write(ASSETS / "words.svg", words(runs))
        return
    if options.watch:
        log = Path(options.watch).expanduser()
        if log.suffix != ".jsonl":
            log = checkpoint_path(log).with_name("log.jsonl")
        records = [record for record in read_log(log) if "line" in record]
        if not records:
            raise UserError(f"{log} holds no evaluations; use the log.jsonl of a run")
        write(log.with_name("watch.svg"), learning(records))
        return

    folder = RESULTS / options.name
    checkpoints = options.checkpoints or sorted(folder.glob("runs/**/ckpt.pt"))
    if not checkpoints:
        raise UserError(f"there are no runs in {folder}; make them with compare.py, or name "
                        "checkpoints")
    if options.text == b"":
        raise UserError("the text is empty")
    made = boundaries(checkpoints, options.text, folder)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "boundaries.svg", made)


if __name__ == "__main__":
    run_program(main)
