"""
Trains systems that place boundaries in different ways on the same rows and compares them.

    python experiments/compare.py --systems=learned,uniform,hnet --seeds=2 --bytes=20e6
    python experiments/compare.py --systems=learned-w8,none config/x.py --gamma=0.9 --equal=flops

A system is a value of train.py's --boundaries, but no path; learned-w8 sets policy_window to 8.
The configuration file and all other flags go to train.py. Finished runs are not repeated, stopped
ones go on. Writes experiments/results/NAME/, anew from all runs in it: evaluations.jsonl, a line
an evaluation; table.md; loss.png and loss.svg, the paper's Figures 3 and 4.

With --equal=flops --bytes is the length of the first system's runs. The others read as many bytes
as the same FLOPs allow, as executed, with a schedule over exactly those.
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results"
sys.path.insert(0, str(ROOT))
import train
from config.command_line import check, read_command_line
from experiments.measures import executed_flops, paper_flops_per_byte
from model import ModelConfig, inputs_and_targets, load_checkpoint, make_model
from prepare import fail, open_shards, read_rows

STYLES = {  # of a system in every figure: Okabe and Ito's colours, and a marker beside them
    "learned": ("#000000", "o"), "uniform": ("#E69F00", "s"), "random": ("#56B4E9", "^"),
    "whitespace": ("#009E73", "D"), "bpe": ("#F0E442", "v"), "gumbel": ("#0072B2", "P"),
    "hnet": ("#D55E00", "X"), "none": ("#CC79A7", "*")}
LINES = "-", "--", ":", "-."  # tell a system's variants apart
plt.rcParams["svg.hashsalt"] = "tokens"  # the same runs draw the same svg, byte for byte
os.environ.setdefault("SOURCE_DATE_EPOCH", "0")


# ---- For all scripts in this folder.


def parser_of(usage):
    """A command line's parser, with `usage` as its help."""
    parser = argparse.ArgumentParser(
        description=usage, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.error = fail
    return parser


def table(head, rows):
    """Markdown of lists of cells."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def save_figure(figure, path):
    """Writes path.png and path.svg."""
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=150)
    plt.close(figure)


# ---- A run and its cost. h is a dictionary of train.py's hyperparameters.


def hyperparameters(system, seed, arguments):
    """The flags of train.py that make a run of this system, and h, which can run."""
    boundaries, _, window = system.partition("-w")
    if boundaries not in STYLES:
        fail(f"--systems={system!r} is none of {', '.join(STYLES)}, learned-w8, ...")
    flags = [*arguments, f"--boundaries={boundaries}", f"--seed={seed}"]
    flags += [f"--policy_window={window}"] * bool(window)
    h = train.DEFAULTS | read_command_line(flags, train.DEFAULTS)
    check(SimpleNamespace(**h))
    return flags, h


def run(flags, out_dir):
    """Trains to the end, or goes on where it stopped; returns whether that went well."""
    try:
        out_dir.mkdir(parents=True, exist_ok=True)  # a run that fails has a row in the table too
    except OSError as error:
        fail(error)
    command = [sys.executable, ROOT / "train.py", *flags, f"--out_dir={out_dir}"]
    process = subprocess.Popen(command + ["--resume=True"] * (out_dir / "ckpt.pt").exists())
    try:
        return process.wait() == 0
    except KeyboardInterrupt:  # train.py has got it too, and saves
        process.wait()
        sys.exit(130)


def check_made(out_dir, h):
    """Ends the program if a run is there that was made with other hyperparameters."""
    if (out_dir / "ckpt.pt").exists():
        made = load_checkpoint(out_dir / "ckpt.pt")[1]["config"]
        for key in h.keys() - {"out_dir", "resume", "device", "compile"}:
            if made.get(key) != h[key]:
                fail(f"{out_dir} was made with {key}={made.get(key)!r}, not {h[key]!r}; "
                     "give another --name")


def expected_flops_per_byte(h):
    """Of 256 training rows: at the boundaries of the system's rule, or else at the target rate."""
    model = make_model(ModelConfig(**train.model_config_of(h)))
    try:
        shards = open_shards(h["data"], "train", h["seq_len"])
    except ValueError as error:
        fail(error)
    x, _ = inputs_and_targets(read_rows(shards, np.arange(sum(map(len, shards)))[:256]))
    draws = h["num_draws"] if h["boundaries"] == "learned" else 1
    u = torch.rand(draws, *x.shape, generator=torch.Generator().manual_seed(0))
    a = model.rule(x, u[0])[None] if hasattr(model, "rule") else u < h["downsample_rate_target"]
    a[..., 0] = True
    passes = a.split(h["batch_size"], dim=1)
    return sum(executed_flops(model, part).item() for part in passes) / x.numel()


# ---- What the runs came to.


def entropy_halved(steps):
    """Bytes after which the decisions' entropy, mean of five log lines, is half of the first's."""
    for i in range(len(steps) - 4):
        if statistics.mean(r["entropy"] for r in steps[i : i + 5]) < steps[0]["entropy"] / 2:
            return steps[i + 4]["bytes"]


def read_run(system, seed, out_dir):
    """A run's evaluations, with the FLOPs and, at its median speed, the seconds that led there."""
    model, saved = load_checkpoint(out_dir / "ckpt.pt")
    h, evaluations, flops, paper_flops, before = saved["config"], [], 0.0, 0.0, 0
    records = [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]
    steps = [record for record in records if "auto" in record]
    speed = statistics.median([r["bytes_per_second"] for r in steps] or [math.nan])
    learned = h["boundaries"] == "learned"
    halved, draws = entropy_halved(steps) if learned else None, h["num_draws"] if learned else 1
    latest = steps[0] if steps else {"flops_per_byte": math.nan, "rate": math.nan}
    for record in records:
        latest = record if "auto" in record else latest
        flops += (record["bytes"] - before) * latest["flops_per_byte"]
        per_byte = paper_flops_per_byte(model, latest["rate"], draws)
        paper_flops += (record["bytes"] - before) * per_byte
        before = record["bytes"]
        if record["bytes"] and "val_bpb" in record:
            record.pop("line")  # the text that is shown
            evaluations.append({"system": system, "seed": seed, "flops": flops,
                                "paper_flops": paper_flops, "seconds": record["bytes"] / speed,
                                "length": h["training_bytes"], "halved": halved, **record})
    return evaluations


def summarize(system, runs):
    """The system's row of the table, from its runs' last evaluations."""
    last = [evaluations[-1] for evaluations in runs if evaluations]
    bad = ["a run without evaluation"] * (len(runs) - len(last)) + [
        f"seed {r['seed']} stopped at {r['bytes'] / 1e6:.1f} MB"
        for r in last if r["bytes"] < r["length"]]
    if bad:
        return [system, str(len(last)), "; ".join(bad), *[""] * 7]
    mean = {key: statistics.mean(r[key] for r in last) for key in (
        "val_bpb", "val_stderr", "val_rate", "ends_between", "flops", "seconds")}
    each = ", ".join(f"{r['val_bpb']:.3f}" for r in last)
    halved = ", ".join("never" if r["halved"] is None else f"{r['halved'] / 1e6:.1f}" for r in last)
    return [system, str(len(last)), f"{mean['val_bpb']:.4f}", f"{mean['val_stderr']:.4f}", each,
            f"{mean['val_rate']:.3f}", f"{mean['ends_between']:.0%}",
            halved if system.startswith("learned") else "", f"{mean['flops']:.3g}",
            f"{mean['seconds'] / 60:.1f}"]


def draw_loss(runs, path):
    """The paper's Figures 3 and 4, with its count of FLOPs: a colour and a marker a system."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for system in runs:
        base = system.partition("-")[0]
        colour, marker = STYLES[base]
        line = LINES[[name for name in runs if name.startswith(base)].index(system) % len(LINES)]
        for i, evaluations in enumerate(runs[system]):
            axes.plot([e["paper_flops"] for e in evaluations], [e["val_bpb"] for e in evaluations],
                      line, color=colour, marker=marker, markersize=4, linewidth=1,
                      markeredgewidth=0.3, markeredgecolor="black", label=None if i else system)
    axes.set(xscale="log", xlabel="training FLOPs, the paper's count",
             ylabel="bits per byte, held-out rows")
    axes.tick_params("x", which="minor", labelsize=6)  # within a decade all have labels
    axes.legend(frameon=False)
    axes.grid(alpha=0.2)
    save_figure(figure, path)


def write(results):
    """Writes the results of all runs in the folder."""
    runs, paths = {}, sorted(path for path in results.glob("runs/*-*") if path.is_dir())
    for path in sorted(paths, key=lambda path: [*STYLES].index(path.name.partition("-")[0])):
        system, seed = path.name.rsplit("-", 1)
        evaluations = read_run(system, int(seed), path) if (path / "ckpt.pt").exists() else []
        runs.setdefault(system, []).append(evaluations)
    lines = [json.dumps(e) + "\n" for system in runs for run in runs[system] for e in run]
    (results / "evaluations.jsonl").write_text("".join(lines))
    head = ["system", "seeds", "bits per byte", "standard error over rows", "each seed", "rate",
            "tokens ending between words", "entropy halved at MB", "training FLOPs", "minutes"]
    rows = [summarize(system, runs[system]) for system in runs]
    (results / "table.md").write_text(table(head, rows))
    draw_loss(runs, results / "loss")


def main(argv):
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--systems", default="learned,uniform,random,whitespace,gumbel,hnet,none")
    add("--seeds", type=int, default=1, help="how many")
    add("--first_seed", type=int, default=1337, help="of so many that follow each other")
    add("--bytes", help="training bytes of a run; train.py's --training_bytes")
    add("--equal", choices=("bytes", "flops"), default="bytes", help="what all systems get alike")
    add("--name", default="try", help="of the folder of results")
    options, others = parser.parse_known_args(argv)
    systems, results, todo = options.systems.split(","), RESULTS / options.name, []
    if options.seeds < 1:
        fail(f"--seeds={options.seeds} is not positive")
    others += [f"--training_bytes={options.bytes}"] if options.bytes else []
    costs = {system: expected_flops_per_byte(hyperparameters(system, 0, others)[1])
             if options.equal == "flops" else 1.0 for system in systems}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for system in systems:
            flags, h = hyperparameters(system, seed, others)
            length = round(h["training_bytes"] * costs[systems[0]] / costs[system])
            out_dir = results / "runs" / f"{system}-{seed}"
            check_made(out_dir, h | {"training_bytes": length})
            todo.append(([*flags, f"--training_bytes={length}"], out_dir))
    failed = False
    for flags, out_dir in todo:
        failed |= not run(flags, out_dir)
        write(results)
    print((results / "table.md").read_text())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
