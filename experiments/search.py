"""
Where tokens start to pay: trains systems with equal FLOPs, for several model shapes and budgets.

    python -m experiments.search --name=width --systems=none,whitespace --flops=1.3e13,3.75e13 \\
        --data=data/english --shape="--embedding_dim=64 --num_heads=1" --shape="--embedding_dim=96"

Each run reads as many bytes as its FLOPs allow, and its learning rate reaches 0 with the last of
them. A shape is any flags of train.py; other flags go to all runs. Finished runs are not repeated,
and stopped runs continue. Writes to experiments/results/NAME/, from all runs in its folder runs/:

    runs.jsonl  the last evaluation of each run
    table.md    means over seeds
    flops.svg   bits per byte over FLOPs, each system in its best shape
"""
import shlex
import statistics
from operator import itemgetter
from types import SimpleNamespace

import matplotlib.pyplot as plt

import train
from configurator import argument_parser, run
from experiments.compare import (
    RESULTS, hyperparameters, last_evaluations, read_run, save_figure, train_all, write_jsonl,
    write_table)
from experiments.measures import flops_per_byte, redrawn
from experiments.systems import SYSTEMS, Fixed, make_model
from model import token_layout
from prepare import open_shards


def expected_flops_per_byte(hp):
    """FLOPs per training byte, over 16 micro-batches of training rows.

    Boundaries are those of a fixed system's rule, or else random ones at the target rate.
    """
    model = make_model(vars(hp))
    shards = open_shards(hp.data, "train", hp.seq_len)
    sample = SimpleNamespace(**vars(hp))
    sample.effective_batch_size = 16 * hp.batch_size
    sample.redrawn = redrawn(model)
    sample.seed = 0  # so that all seeds train on equally many bytes
    flops = []
    for x, _, u in train.micro_batches(shards, 0, sample, 0, 1, "cpu"):
        if isinstance(model, Fixed):
            a = model.rule(x, u)
        else:
            a = u < hp.downsample_rate_target
        a[:, 0] = True
        _, _, positions, places = token_layout(a)
        flops.append(flops_per_byte(model, hp, len(places), positions.size(1)))
    return statistics.mean(flops)


def write_results(results):
    """Writes the last evaluation of each finished run, and a table and a figure with means."""
    records = []
    for path in results.glob("runs/*/*/*"):
        budget, shape, _ = path.parts[-3:]
        for last in last_evaluations([read_run(path)]):
            records.append({"budget": float(budget), "shape": shape, **last})
    records.sort(key=itemgetter("budget", "parameters", "shape", "system", "seed"))
    write_jsonl(results / "runs.jsonl", records)
    groups = {}  # the seeds of each row of the table
    for record in records:
        key = record["budget"], record["shape"], record["system"]
        groups.setdefault(key, []).append(record)
    rows = []
    best = {}  # best[system][budget]: bits per byte in the best shape
    for (budget, shape, system), seeds in groups.items():
        bits = statistics.mean(record["val_bpb"] for record in seeds)
        points = best.setdefault(system, {})
        points[budget] = min(bits, points.get(budget, bits))
        rows.append([
            f"{budget:.3g}",
            shape,
            f"{seeds[0]['parameters'] / 1e6:.2f}M",
            system,
            str(len(seeds)),
            f"{seeds[0]['bytes'] / 1e6:.1f}",
            f"{bits:.3f}"])
    head = ["FLOPs", "shape", "parameters", "system", "seeds", "MB", "bits per byte"]
    write_table(results, head, rows)

    _, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    systems = sorted(best, key=[*SYSTEMS].index)
    for system, style in zip(systems, plt.rcParams["axes.prop_cycle"]()):
        axes.plot(*zip(*best[system].items()), **style, label=system)
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="validation bits per byte")
    save_figure(axes, results / "flops.svg")


def budgets(text):
    return [float(budget) for budget in text.split(",")]


def main(argv=None):
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--systems", default="none,whitespace")
    add("--flops", type=budgets, required=True, help="budgets, separated by commas")
    add("--shape", type=shlex.split, action="append", help="flags of train.py; may be repeated")
    add("--seed", type=int, default=1337)
    add("--name", default="search", help="folder of results")
    options, others = parser.parse_known_args(argv)
    planned = []
    results = RESULTS / options.name
    for system in options.systems.split(","):
        for shape in options.shape or [[]]:
            flags = [*others, *shape, f"--system={system}", f"--seed={options.seed}"]
            per_byte = expected_flops_per_byte(hyperparameters(flags))
            shape_name = ",".join(flag.removeprefix("--") for flag in shape) or "default"
            for budget in options.flops:
                folder = results / "runs" / f"{budget:g}" / shape_name.replace("/", ":")
                length = f"--training_bytes={budget / per_byte:.0f}"
                planned.append(([*flags, length], folder / f"{system}-{options.seed}"))
    train_all(planned, results, write_results)


if __name__ == "__main__":
    run(main)
