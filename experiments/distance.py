"""
Where tokens begin to pay, in one figure: how far each system is below plain bytes at equal FLOPs.

    python experiments/distance.py

Reads what search.py wrote, isoflop/runs.jsonl and isoflop-rows/runs.jsonl in experiments/results,
and draws distance.png and distance.svg there: bits per byte of `none` less those of each system in
the same shape, against how much `none` reads per parameter, the length of a row, and the number of
middle layers. Above zero tokens pay. Rings: the best shape of `none` against the best of tokens.
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments.compare import LINES, RESULTS, STYLES, plt, save_figure


def distances(records, x):
    """{(budget, system): points (x(record of none), bits per byte of none less the system's)}."""
    lines = {}
    none = {(r["budget"], r["shape"], r["seed"]): r for r in records if r["system"] == "none"}
    for r in records:
        plain = none.get((r["budget"], r["shape"], r["seed"]))
        if plain and r is not plain:
            point = x(plain), plain["bpb"] - r["bpb"]
            lines.setdefault((r["budget"], r["system"]), []).append(point)
    return {key: sorted(points) for key, points in lines.items()}


def best(records, x):
    """A point as in `distances` for each budget, of none and of tokens in their best shapes."""
    points = []
    for budget in sorted({r["budget"] for r in records}):
        here = sorted((r for r in records if r["budget"] == budget), key=lambda r: r["bpb"])
        plain = next(r for r in here if r["system"] == "none")
        tokens = next(r for r in here if r["system"] != "none")
        points.append((x(plain), plain["bpb"] - tokens["bpb"]))
    return points


def flag(name, default):
    """A function: the value of a flag in a record's shape."""
    return lambda r: int(dict(pair.split("=") for pair in r["shape"].split(",")).get(name, default))


def main():
    def per_parameter(record):
        return record["bytes"] / record["parameters"]

    shapes, rows = ([json.loads(line) for line in open(RESULTS / name / "runs.jsonl")]
                    for name in ("isoflop", "isoflop-rows"))
    layers = [r for r in shapes if flag("embedding_dim", 128)(r) == 96 and r["budget"] == 1.3e13]
    panels = [("bytes that none reads per parameter", distances(shapes, per_parameter)),
              ("bytes in a row", distances(rows, flag("seq_len", 256))),
              ("middle layers", distances(layers, flag("n_mid_layers", 4)))]
    budgets = sorted({budget for _, lines in panels for budget, _ in lines})
    systems = {system for _, lines in panels for _, system in lines}
    figure, all_axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True, layout="constrained",
                                    width_ratios=(2, 1, 1))
    for axes, (label, lines) in zip(all_axes, panels):
        for (budget, system), points in lines.items():
            colour, marker = STYLES[system]
            axes.plot(*zip(*points), LINES[budgets.index(budget)], color=colour, marker=marker,
                      linewidth=1, markersize=5)
        axes.axhline(0, color="grey", linewidth=1)
        axes.set(xscale="log", xlabel=label)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        ticks = [0.5, 1, 2, 4, 8, 16] if axes is all_axes[0] else ticks
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.2)
    ring = {"color": "grey", "marker": "o", "markersize": 10, "markerfacecolor": "none"}
    all_axes[0].plot(*zip(*best(shapes, per_parameter)), linestyle="", **ring)
    all_axes[0].set_ylabel("bits per byte below none")
    all_axes[0].text(0.98, 0.95, "tokens pay", ha="right", va="top", color="grey",
                     transform=all_axes[0].transAxes)

    handles = [plt.Line2D([], [], color=STYLES[name][0], marker=STYLES[name][1], linestyle="",
                          label=name) for name in STYLES if name in systems]
    handles += [plt.Line2D([], [], color="grey", linestyle=line, label=f"{budget:.3g} FLOPs")
                for line, budget in zip(LINES, budgets)]
    handles.append(plt.Line2D([], [], linestyle="", label="each in its best", **ring))
    figure.legend(handles=handles, frameon=False, loc="outside right upper")
    save_figure(figure, RESULTS / "distance")


if __name__ == "__main__":
    main()
