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
import json
import shlex
import statistics
import sys
from operator import itemgetter
from types import SimpleNamespace

import matplotlib.pyplot as plt

import train
from config.terminal import argument_parser, fail, one_line_errors
from experiments import compare
from experiments.compare import RESULTS, save_figure, table
from experiments.measures import executed_flops, muon_flops
from experiments.systems import Fixed
from model import make_model
from prepare import open_shards


def expected_flops_per_byte(hp):
    """FLOPs per training byte, over 16 micro-batches of training rows.

    Boundaries are those of a fixed system's rule, or else random ones at the target rate.
    """
    sample = SimpleNamespace(**vars(hp))
    sample.effective_batch_size = 16 * hp.batch_size
    sample.seed = 0  # so that all seeds train on equally many bytes
    with one_line_errors():
        model = make_model(vars(hp))
        shards = open_shards(hp.data, "train", hp.seq_len)
    per_byte = []
    for x, _, u in train.micro_batches(shards, 0, sample, 0, 1, "cpu"):
        if isinstance(model, Fixed):
            a = model.rule(x, u[0])[None]
        else:
            a = u < hp.downsample_rate_target
        a[..., 0] = True
        per_byte.append(executed_flops(model, a).item() / x.numel())
    _, muon = train.make_optimizers(model, hp)
    return statistics.mean(per_byte) + muon_flops(muon) / (hp.effective_batch_size * hp.seq_len)


def read_finished(results):
    """The last evaluation of each finished run in the folder, with its budget and shape."""
    records = []
    for path in results.glob("runs/*/*/*/ckpt.pt"):
        budget, shape, _ = path.parts[-4:-1]
        evaluations = compare.read_run(path.parent)
        if evaluations and evaluations[-1]["bytes"] >= evaluations[-1]["training_bytes"]:
            records.append({"budget": float(budget), "shape": shape, **evaluations[-1]})
    return sorted(records, key=itemgetter("budget", "parameters", "shape", "system", "seed"))


def write(results):
    """Writes runs.jsonl, and the table and the figure with means over seeds."""
    groups = {}  # the seeds of each row of the table
    with open(results / "runs.jsonl", "w") as file:
        for record in read_finished(results):
            print(json.dumps(record), file=file)
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
    (results / "table.md").write_text(table(head, rows))

    _, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    systems = sorted(best, key=compare.NAMES.index)
    for system, style in zip(systems, plt.rcParams["axes.prop_cycle"]()):
        axes.plot(*zip(*best[system].items()), **style, label=system)
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="validation bits per byte")
    save_figure(axes, results / "flops.svg")


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("--systems", default="none,whitespace")
    parser.add_argument("--flops", required=True, help="budgets, separated by commas")
    parser.add_argument("--shape", action="append", help="flags of train.py; may be repeated")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--name", default="search", help="folder of results")
    options, others = parser.parse_known_args(argv)
    results = RESULTS / options.name
    try:
        budgets = [float(budget) for budget in options.flops.split(",")]
        shapes = [shlex.split(shape) for shape in options.shape or [""]]
    except ValueError as error:
        fail(f"cannot read --flops={options.flops!r} or --shape={options.shape!r}: {error}")
    planned = []
    for system in options.systems.split(","):
        for shape in shapes:
            flags, hp = compare.hyperparameters(system, options.seed, [*others, *shape])
            per_byte = expected_flops_per_byte(hp)
            shape_name = ",".join(flag.removeprefix("--") for flag in shape) or "default"
            for budget in budgets:
                if not 1 <= budget / per_byte < 2**63:
                    fail(f"--flops={budget:g} trains on {budget / per_byte:g} bytes; try 1.3e13")
                hp.training_bytes = round(budget / per_byte)
                folder = results / "runs" / f"{budget:g}" / shape_name.replace("/", ":")
                out_dir = folder / f"{system}-{options.seed}"
                compare.check_unchanged(out_dir, hp)
                planned.append(([*flags, f"--training_bytes={hp.training_bytes}"], out_dir))
    succeeded = [compare.train_to_end(flags, out_dir) for flags, out_dir in planned]
    write(results)
    print((results / "table.md").read_text())
    return 0 if all(succeeded) else 1


if __name__ == "__main__":
    sys.exit(main())
