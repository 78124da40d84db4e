"""
Where tokens begin to pay: trains systems at equal FLOPs, over shapes of the model and budgets.

    python experiments/search.py --name=width --systems=none,whitespace --flops=1.3e13,3.75e13 \\
        --data=data/english --shape="--embedding_dim=64 --num_heads=1" --shape="--embedding_dim=96"

Every system reads as many bytes as the FLOPs allow it in that shape, with a schedule over exactly
those; FLOPs as in compare.py. A shape is any flags of train.py; others go to all runs. Finished
runs are not repeated. Writes runs.jsonl and table.md in experiments/results/NAME/, of all its runs.
"""
import json
import shlex
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments import compare
from experiments.compare import RESULTS, STYLES
from model import load_checkpoint
from prepare import fail


def read(results):
    """A record for each run that has ended."""
    records = []
    for path in results.glob("runs/*/*/*/ckpt.pt"):
        budget, shape, name = path.parts[-4:-1]
        system, seed = name.rsplit("-", 1)
        evaluations = compare.read_run(system, int(seed), path.parent)
        if evaluations and evaluations[-1]["bytes"] >= evaluations[-1]["length"]:
            last, model = evaluations[-1], load_checkpoint(path)[0]
            records.append({"budget": float(budget), "shape": shape, "system": system,
                            "seed": int(seed), "bytes": last["bytes"], "bpb": last["val_bpb"],
                            "parameters": sum(p.numel() for p in model.parameters()),
                            "rate": last["val_rate"], "ends_between": last["ends_between"],
                            "flops": last["flops"], "seconds": last["seconds"]})
    keys = "budget", "parameters", "shape", "system", "seed"
    return sorted(records, key=lambda r: [r[key] for key in keys])


def write(results):
    """The records, as runs.jsonl and as a table of their means over seeds."""
    records, cells, rows = read(results), {}, {}
    (results / "runs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for r in records:
        cells.setdefault((r["budget"], r["shape"], r["system"]), []).append(r)
    systems = sorted({system for _, _, system in cells},
                     key=lambda system: [*STYLES].index(system.partition("-")[0]))
    for (budget, shape, system), some in cells.items():
        size = f"{some[0]['parameters'] / 1e6:.2f}M"
        row = rows.setdefault((budget, shape), [f"{budget:.3g}", shape, size] + [""] * len(systems))
        bits, megabytes = statistics.mean(r["bpb"] for r in some), some[0]["bytes"] / 1e6
        seeds = f", {len(some)} seeds" if len(some) > 1 else ""
        row[3 + systems.index(system)] = f"{bits:.3f} ({megabytes:.1f} MB{seeds})"
    head = ["FLOPs", "shape", "parameters", *systems]
    (results / "table.md").write_text(compare.table(head, rows.values()))


def main(argv):
    parser = compare.parser_of(__doc__)
    add = parser.add_argument
    add("--systems", default="none,whitespace")
    add("--flops", required=True, help="budgets, by commas")
    add("--shape", action="append", default=[], help="flags of train.py; more than one --shape")
    add("--seed", type=int, default=1337)
    add("--name", default="search", help="of the folder of results")
    options, others = parser.parse_known_args(argv)
    results, todo = RESULTS / options.name, []
    try:
        budgets = [float(budget) for budget in options.flops.split(",")]
        shapes = [shlex.split(shape) for shape in options.shape or [""]]
    except ValueError as error:  # a number's, or a quotation mark without its other
        fail(f"--flops={options.flops!r} or --shape={options.shape!r}: {error}")
    for system in options.systems.split(","):
        for shape in shapes:
            flags, h = compare.hyperparameters(system, options.seed, [*others, *shape])
            cost = compare.expected_flops_per_byte(h)
            slug = ",".join(flag.removeprefix("--") for flag in shape).replace("/", ":")
            for budget in budgets:
                if not 1 <= budget / cost < 2**63:
                    fail(f"--flops={budget} trains on no byte; write for example 1.3e13")
                length, folder = round(budget / cost), results / "runs" / f"{budget:g}"
                out_dir = folder / (slug or "default") / f"{system}-{options.seed}"
                compare.check_made(out_dir, h | {"training_bytes": length})
                todo.append(([*flags, f"--training_bytes={length}"], out_dir))
    well = [compare.run(flags, out_dir) for flags, out_dir in todo]
    write(results)
    print((results / "table.md").read_text())
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
