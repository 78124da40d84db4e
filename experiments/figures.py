"""
Draws what runs of compare.py, or any other checkpoints, learned; or how one run learned it.

    python experiments/figures.py --name=try             all runs of experiments/results/try
    python experiments/figures.py --name=rates out-2/ckpt.pt out-4/ckpt.pt --text=FILE
    python experiments/figures.py --watch=out/log.jsonl  a run of train.py, finished or not

The first two write into experiments/results/NAME/
    boundaries.html, boundaries.png  boundaries on the same held-out text (Figures 2, 5-12)
    entropy.png, entropy.svg         mean -log pi(a_i | a_<i) over training, nats (Figure 13)
the third beside the log
    watch.html                       held-out text at every evaluation, with a slider
    watch.svg                        its first characters, at four evaluations
"""
import html
import json
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments.compare import LINES, RESULTS, STYLES, parser_of, plt, save_figure
from experiments.page import as_html, cell_colours, page, span, user_path, write
from model import load_checkpoint
from prepare import fail, open_shards
from sample import characters, scored

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


def evaluations(path):
    """The evaluations in a log; a last line that train.py is still writing is left out."""
    try:
        lines = path.read_text().splitlines(True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        found = [r for r in records if "line" in r and math.isfinite(r["val_bpb"])]
    except (TypeError, ValueError):
        raise ValueError(f"{path} is not what train.py writes; take its out_dir/log.jsonl")
    if not found:
        raise ValueError(f"{path} has no evaluation; train.py begins with one")
    return found


# --------------------------------------------------------------------------------------------------
# Checkpoints.


def boundaries(path, text):
    """A checkpoint's label, its system, [(byte, a, p, nats)] of a text, and its evaluations."""
    model, saved = load_checkpoint(path)
    h = saved["config"]
    text = text or open_shards(h["data"], "val", h["seq_len"])[0][0].tobytes()
    torch.manual_seed(0)
    steps = list(scored(model, text, "cpu"))
    label = f"{path.resolve().parent.name}, target 1/{1 / h['downsample_rate_target']:g}"
    return label, h["boundaries"], steps, evaluations(path.with_name("log.jsonl"))


def draw_boundaries(systems, path, columns=100):
    """One strip of text a system: the background is p, a red bar stands where a token ends."""
    strips = [(label, list(characters(step[:3] for step in steps)))
              for label, _, steps, _ in systems]
    heights = [math.ceil(len(strip) / columns) + 1.5 for _, strip in strips]  # in lines of text
    figure = plt.figure(figsize=(0.085 * columns, 0.19 * sum(heights)))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-1, columns + 1), ylim=(sum(heights), 0))
    axes.axis("off")
    top = 0.0
    for (label, strip), height in zip(strips, heights):
        axes.text(0, top + 0.6, label, va="center", fontsize=8, weight="bold")
        for i, (character, ends, p) in enumerate(strip):
            x, y = i % columns, top + 1 + i // columns
            background, colour = cell_colours(p)
            axes.add_patch(plt.Rectangle((x, y), 1, 0.95, color=background, linewidth=0))
            axes.text(x + 0.5, y + 0.5, character.replace("\n", "⏎"), color=colour, fontsize=7,
                      family="monospace", ha="center", va="center", parse_math=False)
            if ends:
                axes.plot((x + 0.97, x + 0.97), (y, y + 0.95), color="#e00000", linewidth=1.5)
        top += height
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_entropy(systems, path):
    """The decisions' entropy over training, a line a system."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for i, (label, system, _, records) in enumerate(systems):
        colour, marker = STYLES[system]
        axes.plot([r["bytes"] / 1e6 for r in records], [r["val_entropy"] for r in records],
                  LINES[i % len(LINES)], color=colour, marker=marker, markersize=4, label=label)
    axes.set(xlabel="training bytes (MB)", ylabel="entropy of a decision, nats", ylim=(0, None))
    axes.legend(frameon=False)
    axes.grid(alpha=0.2)
    save_figure(figure, path)


# --------------------------------------------------------------------------------------------------
# How a run learned.


def stills(path):
    """Of each evaluation: what to say, MB read, bits per byte, [(character, a, p)] of its text."""
    records, shown = evaluations(path), []
    text = [byte for byte, _, _ in records[-1]["line"]]
    for r in records:
        if [byte for byte, _, _ in r["line"]] == text:  # else the run went on with other data
            words = (f"{r['bytes'] / 1e6:.2f} MB read, {r['val_bpb']:.3f} bits per byte, "
                     f"rate {r['val_rate']:.3f}")
            shown.append((words, r["bytes"] / 1e6, r["val_bpb"], list(characters(r["line"]))))
    return shown


def curve(megabytes, bits, width=440, height=150):
    """An SVG of bits per byte over training: a circle an evaluation."""
    low, high = 0.95 * min(bits), 1.05 * max(bits)
    end, share = megabytes[-1] or 1, [math.log(high / b) / math.log(high / low) for b in bits]
    points = [f"{width * x / end:.1f},{height * y:.1f}" for x, y in zip(megabytes, share)]
    circles = "".join('<circle cx="{}" cy="{}" r="2"/>'.format(*xy.split(",")) for xy in points)
    grid = "".join(f"""<path stroke="#8886" d="M0 {height * i / 2}h{width}"/>
<text x="-6" y="{height * i / 2 + 4}" text-anchor="end">{high * (low / high) ** (i / 2):.2f}</text>
<text x="{width * i / 2}" y="{height + 18}" text-anchor="middle">{end * i / 2:.3g}</text>
""" for i in range(3))
    return f"""<svg viewBox="-50 -30 {width + 75} {height + 70}" role="img"
aria-label="bits per byte from {bits[0]:.3f} to {bits[-1]:.3f}">{grid}
<text x="-44" y="-14">bits per byte of validation text, logarithmic</text>
<text x="{width / 2}" y="{height + 36}" text-anchor="middle">MB read</text>
<polyline fill="none" stroke="currentColor" points="{' '.join(points)}"/>{circles}</svg>"""


def watch(shown, log):
    """The page of `stills`: a slider chooses one; the curve shows where it stands."""
    _, megabytes, bits, _ = zip(*shown)
    texts = "\n".join(
        f'<div class="still"><p>{words}</p><div class="text">'
        f'{"".join(span(*character) for character in line)}</div></div>'
        for words, _, _, line in shown)
    return page("Watch it learn", f"""<style>{WATCH_STYLE}</style>
<p>The same held-out text at every evaluation of {html.escape(log.parent.name)}.</p>
<label>training <input type="range" value="0" max="{len(shown) - 1}" autocomplete="off"></label>
{texts}
{curve(megabytes, bits)}
<script>{WATCH_SCRIPT}</script>""")


def picture(shown, columns=50, lines=2):
    """An SVG of the text's first characters at the first evaluation, the last, and two between."""
    chosen = sorted({round(i * (len(shown) - 1) / 3) for i in range(4)})
    drawn, step = "", 20 * lines + 32  # from an evaluation to the next
    size = f'viewBox="0 0 {10 * columns} {step * len(chosen) - 10}" width="{10 * columns}"'
    for top, i in zip(range(0, 4 * step, step), chosen):
        words, _, _, line = shown[i]
        drawn += f'<text class="words" y="{top + 15}">{words}</text>\n'
        for j, (character, ends, p) in enumerate(line[: columns * lines]):
            x, y = 10 * (j % columns), top + 22 + 20 * (j // columns)
            background, colour = cell_colours(p)
            character = html.escape(character).replace("\n", "⏎")
            drawn += (f'<path fill="{background}" d="M{x} {y}h10v19h-10"/>'
                      f'<text x="{x + 5}" y="{y + 15}" fill="{colour}">{character}</text>')
            if ends:
                drawn += f'<path class="end" d="M{x + 8} {y}h2v19h-2z"/>'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<title>Boundaries in the same held-out text, while they are learned</title>
<style>text {{ font: 15px monospace; text-anchor: middle }}
.end {{ fill: #e00; stroke: #fff; stroke-width: .5 }}
.words {{ font: 14px sans-serif; text-anchor: start; fill: #222 }}
@media (prefers-color-scheme: dark) {{ .words {{ fill: #ddd }} }}</style>
{drawn}</svg>
"""


def main(argv):
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("checkpoints", nargs="*", type=Path, help="instead of each system's run of lowest seed")
    add("--name", default="try", help="of the folder of results (%(default)s)")
    add("--text", type=user_path, metavar="FILE", help="score this text, not a held-out row")
    add("--watch", type=user_path, metavar="LOG", help="show how this run learned, instead")
    options = parser.parse_args(argv)
    results, first = RESULTS / options.name, {}  # of each system
    for path in sorted(results.glob("runs/*/ckpt.pt")):
        first.setdefault(path.parent.name.rpartition("-")[0], path)
    try:
        if options.watch:
            shown = stills(options.watch)
            write(options.watch.with_name("watch.html"), watch(shown, options.watch.resolve()))
            return write(options.watch.with_name("watch.svg"), picture(shown))
        text = options.text.read_bytes() if options.text else None
        systems = [boundaries(path, text) for path in options.checkpoints or first.values()]
    except (OSError, ValueError) as error:
        fail(error)
    if not systems:
        fail(f"no runs in {results}; make them with compare.py, or name checkpoints")
    results.mkdir(parents=True, exist_ok=True)
    write(results / "boundaries.html", as_html((name, steps) for name, _, steps, _ in systems))
    draw_boundaries(systems, results / "boundaries.png")
    probable = [one for one in systems if one[1] in ("learned", "gumbel", "hnet")]  # have a p
    if probable:
        draw_entropy(probable, results / "entropy")


if __name__ == "__main__":
    main(sys.argv[1:])
