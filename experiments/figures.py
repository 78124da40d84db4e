"""
Draws what compare.py's runs learned, and any other checkpoints; or how the boundaries of one run came about.

    python experiments/figures.py --name=try                               all runs of experiments/results/try
    python experiments/figures.py --name=rates out-2/ckpt.pt out-4/ckpt.pt out-6/ckpt.pt --text=FILE
    python experiments/figures.py --watch=out/log.jsonl                    a run of train.py, finished or not

The first two write into experiments/results/NAME/
    boundaries.html, boundaries.png    each system's boundaries on the same held-out text (the paper's Figures 2, 5-12)
    entropy.png, entropy.svg           mean -log pi(a_i | a_<i) over training, nats (Figure 13)
the third beside the log
    watch.html                         the same held-out text at every evaluation, with a slider over training
    watch.svg                          the first characters of it, at four evaluations
The probability of a boundary is drawn in cividis (dark blue 0, yellow 1), which the colour-blind tell apart as well, and
a red bar stands where a token was drawn to end.
"""
import argparse
import html
import json
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import train
from experiments.compare import LINES, RESULTS, STYLES, plt
from model import load_checkpoint
from sample import as_html, cell_colours, characters, page, scored, write

COLUMNS = 100  # characters of a line of the picture
WATCH_STYLE = """
@media (prefers-reduced-motion: no-preference) { .text span { transition: background-color .2s, color .2s; } }
.controls { display: flex; gap: 1em; align-items: center; }
.controls input { flex: auto; min-width: 0; } .controls button { width: 5em; font: inherit; }
svg { display: block; width: 100%; max-width: 38em; font: 14px sans-serif; fill: currentColor; stroke-width: 2; }
"""
WATCH_SCRIPT = """
const [text, slider, play, words, curve, point] = "text slider play words curve point".split(" ").map(i => document.getElementById(i));
let timer;
function show() {
  const record = records[slider.value], {x, y} = curve.points[slider.value];
  [...text.children].forEach((span, i) => span.className = record.cells[i]);
  words.textContent = record.words;
  slider.setAttribute("aria-valuetext", record.words);
  point.setAttribute("transform", `translate(${x} ${y})`);
}
function stop(live) { // the slider tells its value itself; the words under it are read out only where playing stops
  timer = clearInterval(timer);
  play.textContent = "Play";
  words.setAttribute("aria-live", live);
  show();
}
slider.oninput = () => stop("off");
play.onclick = () => {
  if (timer) return stop("polite");
  if (slider.value == slider.max) slider.value = 0;
  stop("off");
  play.textContent = "Pause";
  timer = setInterval(() => {
    slider.value = +slider.value + Math.ceil(records.length / 40);
    slider.value == slider.max ? stop("polite") : show();
  }, 400);
};
show();
"""


def held_out_text(saved):
    """The first validation row of a checkpoint's data."""
    config = saved["config"]
    return train.open_rows(config["data"], "val", config["seq_len"])[0][0][0].tobytes()


def boundaries(path, text):
    """A checkpoint's label, the name of its system, its boundaries on the text, [(byte, a, p, nats)], and its evaluations."""
    model, saved = load_checkpoint(path)
    torch.manual_seed(0)
    steps = list(scored(model, text or held_out_text(saved), argparse.Namespace(device="cpu")))
    records = train.read_log(path.with_name("log.jsonl"))
    label = f"{path.resolve().parent.name}, target 1/{1 / model.config.downsample_rate_target:g}"
    return label, model.config.boundaries, steps, [r for r in records if "val_entropy" in r]


def draw_boundaries(systems, path):
    """One strip of text a system: the background is p of the character's last byte."""
    strips = [(label, list(characters(step[:3] for step in steps))) for label, _, steps, _ in systems]
    lines = [-(-len(strip) // COLUMNS) + 1.5 for _, strip in strips]
    figure = plt.figure(figsize=(0.085 * COLUMNS, 0.19 * sum(lines)))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-1, COLUMNS + 1), ylim=(sum(lines), 0))
    axes.axis("off")
    top = 0.0
    for (label, strip), height in zip(strips, lines):
        axes.text(0, top + 0.6, label, va="center", fontsize=8, weight="bold")
        for i, (character, ends, p) in enumerate(strip):
            column, line = i % COLUMNS, top + 1 + i // COLUMNS
            axes.add_patch(plt.Rectangle((column, line), 1, 0.95, color=plt.cm.cividis(p), linewidth=0))
            shown = character.replace("\n", "⏎").replace("$", r"\$")
            axes.text(column + 0.5, line + 0.5, shown, ha="center", va="center", fontsize=7, family="monospace",
                      color="white" if p < 0.5 else "black")
            if ends:
                axes.plot((column + 0.97,) * 2, (line, line + 0.95), color="#e00000", linewidth=1.5)
        top += height
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_entropy(systems, path):
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    drawn = []
    for label, system, _, evaluations in systems:
        colour, marker = STYLES[system]
        axes.plot([r["bytes"] / 1e6 for r in evaluations], [r["val_entropy"] for r in evaluations], color=colour, marker=marker,
                  markersize=4, linestyle=LINES[drawn.count(system) % len(LINES)], label=label)
        drawn.append(system)
    axes.set(xlabel="training bytes (MB)", ylabel="entropy of a decision, nats", ylim=(0, None))
    axes.legend(frameon=False)
    axes.grid(alpha=0.2)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=150)


def evaluations(path):
    """Of a log's evaluations those with the same text as the last: in words, MB read, bits per byte, and [(character, a, p)] of each."""
    try:
        records = [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]  # train.py may be writing
        records = [record for record in records if record.get("line") and record["val_bpb"]]
    except (ValueError, AttributeError):
        raise ValueError(f"{path} is not what train.py writes; take its out_dir/log.jsonl")
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror}); train.py writes out_dir/log.jsonl")
    if not records:
        raise ValueError(f"{path} has no evaluation with a line of text, which older runs did not log; train anew or on with --resume=True")
    shown = []
    for record in (record for record in records if record["line"]["text"] == records[-1]["line"]["text"]):
        megabytes, bits, line = record["bytes"] / 1e6, record["val_bpb"], record["line"]
        steps = zip(line["text"].encode("latin-1"), range(len(line["text"])), bytes.fromhex(line["p"]))
        shown.append((f"{megabytes:.2f} MB read, {bits:.3f} bits per byte, rate {record['val_rate']:.3f}", megabytes, bits,
                      list(characters((byte, i in line["ends"], p / 255) for byte, i, p in steps))))
    return shown


def watch(shown, run):
    """The page of `evaluations`: the text, a slider that colours it as it was, and the curve of bits per byte."""
    (_, megabytes, bits, _), width, height = zip(*shown), 440, 150
    low, high = math.floor(10 * min(bits)) / 10, math.floor(10 * max(bits) + 1) / 10
    curve = " ".join(f"{width * x / megabytes[-1]:.1f},{height * (high - y) / (high - low):.1f}" for x, y in zip(megabytes, bits))
    records = [{"words": words, "cells": [f"c{round(100 * p)}{' end' * a}{' line' * (c == chr(10))}" for c, a, p in line]}
               for words, _, _, line in shown]
    grid = "".join(f'<path d="M0 {height * i / 2}h{width}" stroke="#8886"/><text x="-6" y="{height * i / 2 + 4}" text-anchor="end">'
                   f'{high + (low - high) * i / 2:.2f}</text><text x="{width * i / 2}" y="{height + 18}" text-anchor="middle">'
                   f'{round(megabytes[-1] * i / 2, 2):g}</text>' for i in range(3))
    return page("Watch it learn", f"""<style>{WATCH_STYLE}</style>
<p>The same held-out text at each of {len(shown)} evaluations of the run {html.escape(run)}.</p>
<div class="text" id="text">{"".join(f"<span>{html.escape(character)}</span>" for character, *_ in shown[0][3])}</div>
<p class="controls"><button id="play">Play</button><label for="slider">training</label>
<input id="slider" type="range" min="0" max="{len(shown) - 1}" value="0" autocomplete="off"></p>
<p id="words" role="status" aria-live="off"></p>
<svg viewBox="-50 -30 {width + 75} {height + 70}" role="img" aria-label="bits per byte from {bits[0]:.3f} to {bits[-1]:.3f}">{grid}
<text x="-44" y="-14">bits per byte of validation text</text><text x="{width / 2}" y="{height + 36}" text-anchor="middle">MB read</text>
<polyline id="curve" fill="none" stroke="currentColor" points="{curve}"/><circle id="point" r="6" fill="#e00" stroke="Canvas"/></svg>
<script>const records = {json.dumps(records)};{WATCH_SCRIPT}</script>""")


def stills(shown, columns=50, length=100):
    """An SVG of the text's first characters at the first evaluation, the last, and two between."""
    chosen = [shown[i] for i in sorted({round(i * (len(shown) - 1) / 3) for i in range(4)})]
    w, h, drawn, top = 10, 20, [], 15  # of a cell; where a still begins
    for words, _, _, line in chosen:
        cells = text = ends = ""
        for i, (character, a, p) in enumerate(line[:length]):
            x, y, (background, colour) = w * (i % columns), top + 7 + h * (i // columns), cell_colours(round(100 * p))
            cells += f'<path fill="{background}" d="M{x} {y}h{w}v{h - 1}h-{w}"/>'
            text += f'<tspan x="{x + w / 2:g}" y="{y + 15}" fill="{colour}">{html.escape(character.replace(chr(10), "⏎"))}</tspan>'
            ends += f"M{x + w - 1} {y}v{h - 1}" * a
        drawn.append(f'<text class="words" y="{top}">{words}</text>\n{cells}<path stroke="#fff" stroke-width="3" d="{ends}"/>'
                     f'<path stroke="#e00" stroke-width="2" d="{ends}"/>\n<text class="cells" xml:space="preserve">{text}</text>\n')
        top = y + h + 25
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w * columns} {top - 25}" width="{w * columns}" role="img">
<title>Boundaries on the same held-out text: {'; '.join(words for words, *_ in chosen)}</title>
<style>.words {{ font: 14px sans-serif; fill: #222 }} .cells {{ font: 15px monospace; text-anchor: middle }}
@media (prefers-color-scheme: dark) {{ .words {{ fill: #ddd }} }}</style>
{"".join(drawn)}</svg>
"""


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("checkpoints", nargs="*", help="instead of each system's run of the lowest seed")
    parser.add_argument("--name", default="try", help="of the folder of results")
    parser.add_argument("--text", metavar="FILE", help="show the boundaries of this text; without it, of a held-out row")
    parser.add_argument("--watch", metavar="LOG", type=Path, help="show how this run learned, instead")
    parser.error = lambda message: parser.exit(2, f"figures.py: {message}\n")
    options = parser.parse_args(argv)
    results = RESULTS / options.name
    first = {}  # of each system
    for path in sorted(results.glob("runs/*/ckpt.pt")):
        first.setdefault(path.parent.name.rpartition("-")[0], path)
    paths = [Path(path) for path in options.checkpoints] or list(first.values())
    try:
        if options.watch:
            shown = evaluations(options.watch)
            write(options.watch.with_name("watch.html"), watch(shown, options.watch.resolve().parent.name))
            return write(options.watch.with_name("watch.svg"), stills(shown))
        if not paths:
            raise OSError(f"no runs in {results}; make them with compare.py, or name checkpoints")
        text = Path(options.text).read_bytes() if options.text else None
        systems = [boundaries(path, text) for path in paths]
    except (OSError, ValueError) as error:
        parser.error(error)
    results.mkdir(parents=True, exist_ok=True)
    write(results / "boundaries.html", as_html([(label, steps) for label, _, steps, _ in systems]))
    draw_boundaries(systems, results / "boundaries.png")
    probable = [system for system in systems if system[1] in ("learned", "gumbel", "hnet")]  # that have probabilities
    if probable:
        draw_entropy(probable, results / "entropy")


if __name__ == "__main__":
    main(sys.argv[1:])
