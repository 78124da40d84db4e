"""
Draws what compare.py's runs learned, and any other checkpoints.

    python experiments/figures.py --name=try                               all runs of experiments/results/try
    python experiments/figures.py --name=rates out-2/ckpt.pt out-4/ckpt.pt out-6/ckpt.pt --text=FILE

writes into experiments/results/NAME/
    boundaries.html, boundaries.png    each system's boundaries on the same held-out text (the paper's Figures 2, 5-12)
    entropy.png, entropy.svg           mean -log pi(a_i | a_<i) over training, nats (Figure 13)
The probability of a boundary is drawn in cividis (dark blue 0, yellow 1), which the colour-blind tell apart as well, and
a red bar stands where a token was drawn to end.
"""
import argparse
import html
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import train
from experiments.compare import LINES, RESULTS, STYLES, plt
from model import load_checkpoint
from sample import as_html, characters, scored

COLUMNS = 100  # characters of a line of the picture


def held_out_text(saved):
    """The first validation row of a checkpoint's data."""
    config = saved["config"]
    return train.open_rows(config["data"], "val", config["seq_len"])[0][0][0].tobytes()


def boundaries(path, text):
    """A checkpoint's label, the name of its system, its boundaries on the text, [(byte, a, p)], and its evaluations."""
    model, saved = load_checkpoint(path)
    torch.manual_seed(0)
    steps = [step[:3] for step in scored(model, text or held_out_text(saved), argparse.Namespace(device="cpu"))]
    records = [json.loads(line) for line in path.with_name("log.jsonl").read_text().splitlines()]
    label = f"{path.resolve().parent.name}, target 1/{1 / model.config.downsample_rate_target:g}"
    return label, model.config.boundaries, steps, [r for r in records if "val_entropy" in r]


def draw_boundaries(systems, path):
    """One strip of text a system: the background is p of the character's last byte."""
    strips = [(label, list(characters(steps))) for label, _, steps, _ in systems]
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


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("checkpoints", nargs="*", help="instead of each system's run of the lowest seed")
    parser.add_argument("--name", default="try", help="of the folder of results")
    parser.add_argument("--text", metavar="FILE", help="show the boundaries of this text; without it, of a held-out row")
    parser.error = lambda message: sys.exit(f"figures.py: {message}")
    options = parser.parse_args(argv)
    results = RESULTS / options.name
    first = {}  # of each system
    for path in sorted(results.glob("runs/*/ckpt.pt")):
        first.setdefault(path.parent.name.rpartition("-")[0], path)
    paths = [Path(path) for path in options.checkpoints] or list(first.values())
    try:
        if not paths:
            raise OSError(f"no runs in {results}; make them with compare.py, or name checkpoints")
        text = Path(options.text).read_bytes() if options.text else None
        systems = [boundaries(path, text) for path in paths]
    except (OSError, ValueError) as error:
        sys.exit(f"figures.py: {error}")
    results.mkdir(parents=True, exist_ok=True)
    page = as_html([steps for _, _, steps, _ in systems])
    for label, *_ in systems:  # a heading over each block
        page = page.replace("<pre>", f"<h3>{html.escape(label)}</h3>\n<pre >", 1)
    (results / "boundaries.html").write_text(page, encoding="utf-8")
    draw_boundaries(systems, results / "boundaries.png")
    probable = [system for system in systems if system[1] in ("learned", "gumbel", "hnet")]  # that have probabilities
    if probable:
        draw_entropy(probable, results / "entropy")


if __name__ == "__main__":
    main(sys.argv[1:])
