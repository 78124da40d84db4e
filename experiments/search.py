"""
Where tokens begin to pay: trains systems at equal FLOPs, over shapes of the model and budgets.

    python experiments/search.py --name=width --data=data/english --systems=none,whitespace --flops=1.3e13,3.75e13 \\
        --shape="--embedding_dim=64 --num_heads=1" --shape="--embedding_dim=96" --shape="--embedding_dim=128"

Every system reads as many bytes as the FLOPs allow it in that shape, with its schedule over exactly those; FLOPs as in compare.py. A shape
is any flags of train.py; others go to all runs. Runs that are there already are not repeated. Writes experiments/results/NAME/, anew
from all runs in it: runs.jsonl, a line a run; table.md; search.png and search.svg, bits per byte against the model's parameters.
"""
import argparse
import json
import math
import shlex
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments import compare
from experiments.compare import LINES, RESULTS, STYLES, plt
from model import load_checkpoint


def read(results):
    """A record for each run that has ended."""
    records = []
    for path in sorted(results.glob("runs/*/*/*/ckpt.pt")):
        budget, shape, name = path.parts[-4:-1]
        system, seed = name.rsplit("-", 1)
        evaluations = compare.read_run(system, int(seed), path.parent)
        last = evaluations[-1] if evaluations else None
        if last and last["bytes"] >= last["length"]:
            model = load_checkpoint(path)[0]
            records.append({"budget": float(budget), "shape": shape, "system": system, "seed": int(seed),
                            "parameters": sum(p.numel() for p in model.parameters()), "bytes": last["bytes"], "bpb": last["val_bpb"],
                            "rate": last["val_rate"], "ends_between": last["ends_between"], "flops": last["flops"], "seconds": last["seconds"]})
    return sorted(records, key=lambda r: (r["budget"], r["parameters"], r["shape"], r["system"], r["seed"]))


def bits(records):
    """Bits per byte, mean over seeds."""
    return statistics.mean(r["bpb"] for r in records)


def write(results):
    """The records, as runs.jsonl, as a table of their means over seeds, and as a figure."""
    records = read(results)
    (results / "runs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    cells = {}
    for r in records:
        cells.setdefault((r["budget"], r["shape"], r["system"]), []).append(r)
    systems = sorted({system for _, _, system in cells}, key=list(STYLES).index)
    lines = [["FLOPs", "shape", "parameters", *systems]]
    lines.append(["---"] * len(lines[0]))
    for budget, shape in dict.fromkeys(key[:2] for key in cells):
        here = {system: cells.get((budget, shape, system), []) for system in systems}
        size = next(r["parameters"] for some in here.values() for r in some)
        mean = {system: f"{bits(some):.3f} ({some[0]['bytes'] / 1e6:.1f} MB"
                        + (f", {len(some)} seeds)" if len(some) > 1 else ")") if some else "" for system, some in here.items()}
        lines.append([f"{budget:.3g}", shape, f"{size / 1e6:.2f}M", *mean.values()])
    (results / "table.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    if not records:
        return

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    budgets = sorted({budget for budget, _, _ in cells})
    for budget, system in dict.fromkeys((budget, system) for budget, _, system in cells):
        points = sorted((some[0]["parameters"] / 1e6, bits(some)) for key, some in cells.items() if key[::2] == (budget, system))
        colour, marker = STYLES[system]
        axes.plot(*zip(*points), color=colour, marker=marker, linestyle=LINES[budgets.index(budget) % len(LINES)], linewidth=1, markersize=5)
    sizes = [math.log2(r["parameters"] / 1e6) for r in records]
    ticks = [2.0**k for k in range(math.floor(min(sizes)), math.ceil(max(sizes)) + 1)]
    axes.set(xscale="log", xlabel="parameters, millions", ylabel="bits per byte, held-out rows")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    handles = [plt.Line2D([], [], color=STYLES[system][0], marker=STYLES[system][1], linestyle="", label=system) for system in systems]
    handles += [plt.Line2D([], [], color="grey", linestyle=LINES[i % len(LINES)], label=f"{budget:.3g} FLOPs") for i, budget in enumerate(budgets)]
    figure.legend(handles=handles, frameon=False, loc="outside right upper")
    axes.grid(alpha=0.2)
    for suffix in ("png", "svg"):
        figure.savefig(results / f"search.{suffix}", dpi=150)
    plt.close(figure)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--systems", default="none,whitespace")
    parser.add_argument("--flops", required=True, help="budgets, by commas")
    parser.add_argument("--shape", action="append", default=[], help="flags of train.py; more than one --shape")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--name", default="search", help="of the folder of results")
    parser.error = compare.fail
    options, others = parser.parse_known_args(argv)
    results, todo = RESULTS / options.name, []
    for system in options.systems.split(","):
        if system not in STYLES:
            compare.fail(f"--systems={system!r} is none of {', '.join(STYLES)}")
    for budget in options.flops.split(","):
        try:
            flops, shapes = float(budget), [shlex.split(shape) for shape in options.shape or [""]]
        except ValueError as error:  # a number's, or a quotation mark without its other
            compare.fail(f"--flops={budget!r} or --shape={options.shape!r}: {error}")
        for shape in shapes:
            for system in options.systems.split(","):
                flags, h = compare.hyperparameters(system, options.seed, [*others, *shape])
                length = flops / compare.flops_of_a_byte(h)
                if not 1 <= length < 2**63:
                    compare.fail(f"--flops={budget!r} is no number of FLOPs that trains on a byte; write for example 1.3e13")
                slug = ",".join(flag.removeprefix("--") for flag in shape).replace("/", ":") or "default"
                out_dir = results / "runs" / f"{flops:g}" / slug / f"{system}-{options.seed}"
                compare.check_made(out_dir, h | {"training_bytes": round(length)})
                todo.append(([*flags, f"--training_bytes={round(length)}"], out_dir))
    for flags, out_dir in todo:
        compare.run(flags, out_dir)
    write(results)
    print((results / "table.md").read_text())
    failures = [out_dir / "failure.txt" for _, out_dir in todo if (out_dir / "failure.txt").exists()]
    for path in failures:
        print(f"{path.parent} failed: {path.read_text()}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
