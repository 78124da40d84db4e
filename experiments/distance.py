"""
Where tokens begin to pay, in one figure: how far each system is below plain bytes in the same shape at the same FLOPs.

    python experiments/distance.py

Reads what search.py wrote, isoflop/runs.jsonl and isoflop-rows/runs.jsonl in experiments/results, and draws distance.png and
distance.svg there: bits per byte of `none` less those of each system, against how much `none` reads per parameter (of which a smaller
budget or a larger model makes less), the length of a row, and the number of middle layers. Above zero tokens pay in that shape. Rings:
the best shape of `none` against the best of tokens, one for each budget.
"""
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments.compare import LINES, RESULTS, STYLES, plt


def distances(records, x):
    """{(budget, system): points (x(record of none), bits per byte of none less the system's)}, over all shapes that both have, by x."""
    lines, none = {}, {(r["budget"], r["shape"], r["seed"]): r for r in records if r["system"] == "none"}
    for r in records:
        plain = none.get((r["budget"], r["shape"], r["seed"]))
        if plain and r is not plain:
            lines.setdefault((r["budget"], r["system"]), []).append((x(plain), plain["bpb"] - r["bpb"]))
    return {key: sorted(points) for key, points in lines.items()}


def best(records, x):
    """Points (x(record of none), bits per byte of none less those of tokens), each in its best shape, one for each budget."""
    points = []
    for budget in sorted({r["budget"] for r in records}):
        plain, tokens = (min((r for r in records if r["budget"] == budget and (r["system"] == "none") == is_none), key=lambda r: r["bpb"])
                         for is_none in (True, False))
        points.append((x(plain), plain["bpb"] - tokens["bpb"]))
    return points


def per_parameter(record):
    return record["bytes"] / record["parameters"]


def flag(name, default):
    """The value of a flag in a record's shape."""
    return lambda record: int(dict(pair.split("=") for pair in record["shape"].split(",")).get(name, default))


def main():
    shapes, rows = ([json.loads(line) for line in open(RESULTS / name / "runs.jsonl")] for name in ("isoflop", "isoflop-rows"))
    layers = [r for r in shapes if flag("embedding_dim", 128)(r) == 96 and r["budget"] == 1.3e13]
    panels = [("bytes that none reads per parameter", distances(shapes, per_parameter)),
              ("bytes in a row", distances(rows, flag("seq_len", 256))),
              ("middle layers", distances(layers, flag("n_mid_layers", 4)))]
    budgets = sorted({budget for _, lines in panels for budget, _ in lines})
    systems = sorted({system for _, lines in panels for _, system in lines}, key=list(STYLES).index)
    figure, all_axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True, layout="constrained", width_ratios=(2, 1, 1))
    for axes, (label, lines) in zip(all_axes, panels):
        for (budget, system), points in lines.items():
            colour, marker = STYLES[system]
            axes.plot(*zip(*points), color=colour, marker=marker, linestyle=LINES[budgets.index(budget)], linewidth=1, markersize=5)
        axes.axhline(0, color="grey", linewidth=1)
        axes.set(xscale="log", xlabel=label)
        ticks = sorted({x for points in lines.values() for x, _ in points}) if axes is not all_axes[0] else [0.5, 1, 2, 4, 8, 16]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.2)
    all_axes[0].plot(*zip(*best(shapes, per_parameter)), "o", color="grey", markersize=10, markerfacecolor="none")
    all_axes[0].set_ylabel("bits per byte below none")
    all_axes[0].text(0.98, 0.95, "tokens pay", ha="right", va="top", transform=all_axes[0].transAxes, color="grey")
    handles = [plt.Line2D([], [], color=STYLES[system][0], marker=STYLES[system][1], linestyle="", label=system) for system in systems]
    handles += [plt.Line2D([], [], color="grey", linestyle=LINES[i], label=f"{budget:.3g} FLOPs") for i, budget in enumerate(budgets)]
    handles.append(plt.Line2D([], [], color="grey", marker="o", markersize=10, markerfacecolor="none", linestyle="", label="each in its best"))
    figure.legend(handles=handles, frameon=False, loc="outside right upper")
    for suffix in ("png", "svg"):
        figure.savefig(RESULTS / f"distance.{suffix}", dpi=150)


if __name__ == "__main__":
    main()
