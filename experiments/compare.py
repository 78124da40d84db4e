"""
Trains systems that place boundaries in different ways on the same rows and compares them.

    python experiments/compare.py --systems=learned,uniform,hnet --seeds=2 --bytes=20e6
    python experiments/compare.py --systems=learned-w8,learned-w1,gumbel --name=english --data=data/english config/x.py --gamma=0.99

    python experiments/compare.py --systems=learned,uniform,none --bytes=10e6 --equal=seconds

A system is a value of train.py's --boundaries, but no path; learned-w8 sets policy_window to 8. The configuration file and every other flag
go to train.py. Runs that are there already are not repeated, stopped ones go on. Writes experiments/results/NAME/, anew from all
runs in it: evaluations.jsonl, a line per evaluation; table.md; loss.png and loss.svg, bits per byte against training FLOPs. FLOPs
are those of the paper's Figures 3 and 4: 6 per matrix parameter per byte or token, attention's products left out.

With --equal=flops or --equal=seconds --bytes is the length of the first system's runs, and every other system reads as many bytes as the
same FLOPs or seconds allow, with its schedule over exactly those. A short run of each system, kept in NAME/pilots, tells what seconds a
byte takes it: on this machine, beside whatever else it does at that time.
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

import matplotlib

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt

os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # the same runs draw the same svg, byte for byte: git sees only what changed
plt.rcParams["svg.hashsalt"] = "tokens"

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results"
sys.path.insert(0, str(ROOT))
import train
from config.command_line import BOUNDARIES, check, read_command_line
from model import ModelConfig, load_checkpoint, make_model
from prepare import printable

STYLES = {  # of a system in every figure: Okabe and Ito's colours, and a marker for those who do not see them apart
    "learned": ("#000000", "o"), "uniform": ("#E69F00", "s"), "random": ("#56B4E9", "^"), "whitespace": ("#009E73", "D"),
    "bpe": ("#F0E442", "v"), "gumbel": ("#0072B2", "P"), "hnet": ("#D55E00", "X"), "none": ("#CC79A7", "*")}
LINES = "-", "--", ":", "-."  # tell a system's variants apart


def fail(message):
    print(f"{Path(sys.argv[0]).name}:", printable(message), file=sys.stderr)
    sys.exit(2)


def hyperparameters(system, seed, arguments):
    """The flags of train.py that make a run of this system, and what they set, which can run."""
    boundaries, _, window = system.partition("-w")
    flags = [*arguments, f"--boundaries={boundaries}", f"--seed={seed}", *([f"--policy_window={window}"] if window else [])]
    h = train.DEFAULTS | read_command_line(flags, train.DEFAULTS)
    check(SimpleNamespace(**h))
    return flags, h


def run(flags, out_dir):
    """Trains to the end, or goes on where it stopped. Leaves the last line of what failed in out_dir/failure.txt."""
    command = [sys.executable, ROOT / "train.py", *flags, f"--out_dir={out_dir}"]
    if (out_dir / "ckpt.pt").exists():
        command.append("--resume=True")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        errors = process.communicate()[1]
    except KeyboardInterrupt:  # train.py has got it too, and saves
        process.communicate()
        sys.exit(130)
    sys.stderr.write(errors)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "failure.txt").unlink(missing_ok=True)
    if process.returncode:
        line = errors.strip().splitlines()[-1] if errors.strip() else f"exit code {process.returncode}"
        (out_dir / "failure.txt").write_text(line.replace("|", "/"))


def check_made(out_dir, wanted):
    """Ends the program if a run is there that was made with other hyperparameters."""
    if (out_dir / "ckpt.pt").exists():
        made = load_checkpoint(out_dir / "ckpt.pt")[1]["config"]
        for key in wanted.keys() - {"out_dir", "resume", "device", "compile"}:
            if made.get(key) != wanted[key]:
                fail(f"{out_dir} was made with {key}={made.get(key)!r}, not {wanted[key]!r}; give another --name")


def flops_of_a_byte(h):
    """Training FLOPs per byte of a run with the hyperparameters h. What learns or draws its boundaries is taken to reach the rate asked for,
    what follows a rule to have that of the first 256 rows."""
    model, rate = make_model(ModelConfig(**train.model_config_of(h))), h["downsample_rate_target"]
    if h["boundaries"] not in ("learned", "gumbel", "hnet", "random"):
        shards = train.open_rows(h["data"], "train", h["seq_len"], h["boundaries"] == "bpe")
        x, _, a = train.fetch(shards, range(min(256, sum(map(len, shards[0])))))
        rate = (model.place(x) if a is None else a).float().mean().item()
    return train.flops_per_byte(model, rate, h)


def seconds_of_a_byte(flags, out_dir):
    """Seconds per byte on this machine, from a run of 80 steps."""
    h = train.DEFAULTS | read_command_line(flags, train.DEFAULTS)
    h |= {"training_bytes": 80 * h["effective_batch_size"] * h["seq_len"], "log_interval": 20}
    check_made(out_dir, h)
    run([*flags, f"--training_bytes={h['training_bytes']}", "--log_interval=20"], out_dir)
    if not (out_dir / "ckpt.pt").exists():
        fail(f"no pilot run: {(out_dir / 'failure.txt').read_text()}")
    steps = [record for record in train.read_log(out_dir / "log.jsonl") if "auto" in record][1:]  # the first line's have compiled
    return 1 / statistics.median(record["bytes_per_second"] for record in steps)


def entropy_halved(records):
    """Bytes after which the decisions' entropy in training, the mean of five log lines, is half of what it was at first; None if
    that never was."""
    steps = [r for r in records if "entropy" in r]
    for i in range(len(steps) - 4):
        if statistics.mean(r["entropy"] for r in steps[i : i + 5]) < steps[0]["entropy"] / 2:
            return steps[i + 4]["bytes"]


def read_run(system, seed, out_dir):
    """The run's evaluations: system, seed, training FLOPs until then, seconds at the run's median speed, the run's length in
    bytes, those until the policy's entropy was halved, and what train.py's log has."""
    model, saved = load_checkpoint(out_dir / "ckpt.pt")
    length, learned = saved["config"]["training_bytes"], saved["config"]["boundaries"] == "learned"
    records = [{k: math.nan if v is None else v for k, v in r.items() if k != "line"} for r in train.read_log(out_dir / "log.jsonl")]
    speed = statistics.median([r["bytes_per_second"] for r in records if "auto" in r] or [math.nan])
    evaluations, flops, before, halved = [], 0.0, 0, entropy_halved(records) if learned else None
    for record in records:
        per_byte = train.flops_per_byte(model, record["rate" if "auto" in record else "val_rate"], saved["config"])
        flops += (record["bytes"] - before) * per_byte
        before = record["bytes"]
        if "val_bpb" in record:
            seconds = record["bytes"] / speed
            evaluations.append({"system": system, "seed": seed, "flops": flops, "seconds": seconds, "length": length, "halved": halved, **record})
    return evaluations


def summarize(system, runs, failures):
    """The system's row of the table, from its runs' last evaluations."""
    last = [evaluations[-1] for evaluations in runs if evaluations]
    bad = failures + [f"seed {r['seed']} diverged: {r['val_bpb']}" for r in last if not math.isfinite(r["val_bpb"])]
    bad += [f"seed {r['seed']} stopped at {r['bytes'] / 1e6:.1f} MB" for r in last if r["bytes"] < r["length"]]
    if bad or not last:
        return [system, str(len(last)), "; ".join(bad) or "no evaluation", *[""] * 7]
    keys = "val_bpb", "val_stderr", "val_rate", "ends_between", "flops", "seconds"
    mean = {key: statistics.mean(r[key] for r in last) for key in keys}
    each = ", ".join(f"{r['val_bpb']:.3f}" for r in last)
    halved = ", ".join("never" if r["halved"] is None else f"{r['halved'] / 1e6:.1f}" for r in last) if system.startswith("learned") else ""
    return [system, str(len(last)), f"{mean['val_bpb']:.4f}", f"{mean['val_stderr']:.4f}", each, f"{mean['val_rate']:.3f}",
            f"{mean['ends_between']:.0%}", halved, f"{mean['flops']:.3g}", f"{mean['seconds'] / 60:.1f}"]


def draw_loss(evaluations, path):
    """Bits per byte against training FLOPs, a line a run, a colour and a marker a system."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    systems = list(dict.fromkeys(e["system"] for e in evaluations))
    for system in systems:
        base = system.partition("-")[0]
        colour, marker = STYLES[base]
        line = LINES[[other for other in systems if other.startswith(base)].index(system) % len(LINES)]
        for seed in dict.fromkeys(e["seed"] for e in evaluations if e["system"] == system):
            points = [e for e in evaluations if (e["system"], e["seed"]) == (system, seed)]
            axes.plot([e["flops"] for e in points], [e["val_bpb"] for e in points], color=colour, marker=marker, markersize=4,
                      linewidth=1, linestyle=line, markeredgecolor="black", markeredgewidth=0.3,
                      label=system if seed == min(e["seed"] for e in evaluations if e["system"] == system) else None)
    axes.set(xscale="log", xlabel="training FLOPs", ylabel="bits per byte, held-out rows")
    axes.tick_params("x", which="minor", labelsize=6)  # within a decade all have labels
    axes.legend(frameon=False)
    axes.grid(alpha=0.2)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=150)
    plt.close(figure)


def write(results):
    """The results of all runs in the folder; returns whether all of them ended well."""
    runs, failures = {}, {}
    order = list(STYLES)
    for folder in sorted(results.glob("runs/*-*"), key=lambda folder: (order.index(folder.name.partition("-")[0]), folder.name)):
        system, seed = folder.name.rsplit("-", 1)
        runs.setdefault(system, []).extend([read_run(system, int(seed), folder)] if (folder / "ckpt.pt").exists() else [])
        failures.setdefault(system, []).extend(f"seed {seed}: {path.read_text()}" for path in folder.glob("failure.txt"))
    evaluations = [e for system in runs for run in runs[system] for e in run]
    results.mkdir(parents=True, exist_ok=True)
    (results / "evaluations.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evaluations))
    head = ["system", "seeds", "bits per byte", "standard error over rows", "each seed", "rate", "tokens ending between words",
            "entropy halved at MB", "training FLOPs", "minutes"]
    rows = [summarize(system, runs[system], failures[system]) for system in runs]
    lines = [head, ["---"] * len(head), *rows]
    (results / "table.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    if evaluations:
        draw_loss(evaluations, results / "loss")
    return all(row[-1] for row in rows)  # what went wrong stands in a row without numbers


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--systems", default="learned,uniform,random,whitespace,gumbel,hnet,none")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--first_seed", type=int, default=1337, help="of so many that follow each other")
    parser.add_argument("--bytes", help="training bytes of a run; train.py's --training_bytes")
    parser.add_argument("--equal", choices=("bytes", "flops", "seconds"), default="bytes", help="what all systems get alike (%(default)s)")
    parser.add_argument("--name", default="try", help="of the folder of results")
    parser.error = fail
    options, others = parser.parse_known_args(argv)
    if options.seeds < 1:
        fail(f"--seeds={options.seeds} is not positive")
    for system in options.systems.split(","):
        name, hyphen, window = system.partition("-w")
        if name not in BOUNDARIES or hyphen and not (name == "learned" and window.isdigit()):
            fail(f"--systems={system!r} is none of {', '.join(BOUNDARIES)}, learned-w8, learned-w1, ...")
    others += [f"--training_bytes={options.bytes}"] if options.bytes else []
    results, todo, systems = RESULTS / options.name, [], options.systems.split(",")
    lengths = {system: [] for system in systems}
    if options.equal != "bytes":
        costs = {}
        for system in systems:
            flags, h = hyperparameters(system, options.first_seed, others)
            costs[system] = flops_of_a_byte(h) if options.equal == "flops" else seconds_of_a_byte(flags, results / "pilots" / system)
        length = hyperparameters(systems[0], options.first_seed, others)[1]["training_bytes"]
        lengths = {system: [f"--training_bytes={round(length * costs[systems[0]] / costs[system])}"] for system in systems}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for system in systems:
            flags, wanted = hyperparameters(system, seed, [*others, *lengths[system]])
            out_dir = results / "runs" / f"{system}-{seed}"
            todo.append((flags, out_dir))
            check_made(out_dir, wanted)
    for flags, out_dir in todo:
        run(flags, out_dir)
        well = write(results)
    print((results / "table.md").read_text())
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
