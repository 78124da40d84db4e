"""
Trains systems that place boundaries in different ways on the same rows, and compares them.

    python -m experiments.compare --systems=learned,uniform,hnet --seeds=2 --training_bytes=20e6
    python -m experiments.compare --systems=learned,none config/x.py --gamma=0.9 --name=x

A system is a value of train.py's --boundaries. The configuration file and all other flags go to
train.py. Finished runs are not repeated, and stopped runs continue. Writes to
experiments/results/NAME/, from all runs in its folder runs/:

    evaluations.jsonl   one line per evaluation
    table.md            means over seeds of the last evaluations
    loss.svg            bits per byte over FLOPs: the paper's Figures 3 and 4
"""
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
from cycler import cycler

from config.command_line import check, read_command_line
from config.terminal import argument_parser, fail, one_line_errors
from experiments.measures import paper_flops_per_byte
from experiments.systems import SYSTEMS
from model import load_checkpoint, read_checkpoint
from train import DEFAULTS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results"
NAMES = ["learned", *SYSTEMS]

# a figure's lines differ in colour, marker and dashes
plt.rcParams["axes.prop_cycle"] = cycler(
    color=plt.get_cmap("tab10").colors, marker=[*"os^DvPX*<>"], linestyle=["-", "--"] * 5)
plt.rcParams["svg.hashsalt"] = "tokens"  # the same runs give the same svg, byte for byte
os.environ.setdefault("SOURCE_DATE_EPOCH", "0")


def table(head, rows):
    """A Markdown table of strings."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def save_figure(axes, path):
    """Adds a legend and a grid, and writes the figure."""
    axes.legend(frameon=False)
    axes.grid(alpha=0.2)
    axes.figure.savefig(path)
    plt.close(axes.figure)


# ---- Training.
def hyperparameters(system, seed, arguments):
    """The flags of train.py for a run of the system, and the hyperparameters they give."""
    if system not in NAMES:
        fail(f"unknown system '{system}'; choose from {', '.join(NAMES)}")
    flags = [*arguments, f"--boundaries={system}", f"--seed={seed}"]
    hp = SimpleNamespace(**DEFAULTS | read_command_line(flags, DEFAULTS))
    check(hp)
    return flags, hp


def check_unchanged(out_dir, hp):
    """Ends the program if out_dir holds a run with other hyperparameters."""
    checkpoint = out_dir / "ckpt.pt"
    if not checkpoint.exists():
        return
    with one_line_errors():
        old = DEFAULTS | read_checkpoint(checkpoint)["config"]
    for key, value in vars(hp).items():
        if key not in ("out_dir", "resume", "device", "compile") and value != old[key]:
            fail(f"{out_dir} was trained with {key}={old[key]!r}, not {value!r}; "
                 "use another --name")


def train_to_end(flags, out_dir):
    """Runs train.py, or continues a run that was stopped; returns whether it succeeded."""
    resume = (out_dir / "ckpt.pt").exists()
    command = [sys.executable, ROOT / "train.py", *flags]
    process = subprocess.Popen([*command, f"--out_dir={out_dir}", f"--resume={resume}"])
    try:
        return process.wait() == 0
    except KeyboardInterrupt:  # train.py receives it too, and writes a checkpoint
        process.wait()
        sys.exit(130)


# ---- Results.
def read_run(out_dir):
    """A run's evaluations: a list of dictionaries, empty if there are none yet.

    Adds the FLOPs of training that led to each, and the seconds, at the run's median speed.
    """
    if not (out_dir / "ckpt.pt").exists():
        return []
    with one_line_errors():  # for example a rule that is no longer in SYSTEMS
        model, saved = load_checkpoint(out_dir / "ckpt.pt")
    hp = SimpleNamespace(**saved["config"])
    system, seed = out_dir.name.rsplit("-", 1)
    parameters = sum(p.numel() for p in model.parameters())
    draws = hp.num_draws if hp.boundaries == "learned" else 1
    log = (out_dir / "log.jsonl").read_text()
    records = [json.loads(line) for line in log.splitlines()]
    steps = [record for record in records if "auto" in record]
    if not steps:  # shorter than log_interval
        return []
    speed = statistics.median(step["bytes_per_second"] for step in steps)
    evaluations = []
    step = steps[0]  # the latest one: its rate and FLOPs hold for the bytes since the last record
    last_bytes = flops = paper_flops = 0
    for record in records:
        if "auto" in record:
            step = record
        new_bytes = record["bytes"] - last_bytes
        last_bytes = record["bytes"]
        flops += new_bytes * step["flops_per_byte"]
        paper_flops += new_bytes * paper_flops_per_byte(model, step["rate"], draws)
        if "val_bpb" in record and record["bytes"]:
            del record["line"]  # the printed text
            new_keys = {
                "flops": flops, "paper_flops": paper_flops, "seconds": record["bytes"] / speed,
                "training_bytes": hp.training_bytes, "parameters": parameters}
            evaluations.append({"system": system, "seed": int(seed), **new_keys, **record})
    return evaluations


def table_row(system, runs):
    """The system's row of the table: means over the last evaluations of its runs."""
    last = [evaluations[-1] for evaluations in runs if evaluations]
    problems = ["a run failed, or logged nothing"] * (len(runs) - len(last))
    for e in last:
        if e["bytes"] < e["training_bytes"]:
            problems.append(f"seed {e['seed']} stopped at {e['bytes'] / 1e6:.1f} MB")
    if problems:
        return [system, str(len(last)), "; ".join(problems), *[""] * 6]

    def mean(key):
        return statistics.mean(e[key] for e in last)

    return [
        system,
        str(len(last)),
        f"{mean('val_bpb'):.4f}",
        f"{mean('val_stderr'):.4f}",
        ", ".join(f"{e['val_bpb']:.3f}" for e in last),
        f"{mean('val_rate'):.3f}",
        f"{mean('ends_between'):.0%}",
        f"{mean('flops'):.3g}",
        f"{mean('seconds') / 60:.1f}"]


def draw_loss(runs, path):
    """The paper's Figures 3 and 4: bits per byte over FLOPs, one line per run."""
    _, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for (system, seeds), style in zip(runs.items(), plt.rcParams["axes.prop_cycle"]()):
        for i, evaluations in enumerate(seeds):
            flops = [e["paper_flops"] for e in evaluations]
            bits = [e["val_bpb"] for e in evaluations]
            label = None if i else system
            axes.plot(flops, bits, **style, label=label, markersize=4)
    axes.set(xscale="log", xlabel="training FLOPs, counted as in the paper",
             ylabel="validation bits per byte")
    axes.tick_params("x", which="minor", labelsize=6)
    save_figure(axes, path)


def write(results):
    """Writes the table, the figure and all evaluations of the runs in the folder."""
    runs = {}
    for path in sorted(results.glob("runs/*-*")):
        system, _ = path.name.rsplit("-", 1)
        runs.setdefault(system, []).append(read_run(path))
    runs = {system: runs[system] for system in sorted(runs, key=NAMES.index)}
    with open(results / "evaluations.jsonl", "w") as file:
        for evaluations in sum(runs.values(), []):
            for e in evaluations:
                print(json.dumps(e), file=file)
    head = ["system", "seeds", "bits per byte", "standard error over rows", "each seed", "rate",
            "tokens ending between words", "training FLOPs", "minutes"]
    rows = [table_row(system, runs[system]) for system in runs]
    (results / "table.md").write_text(table(head, rows))
    draw_loss(runs, results / "loss.svg")


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("--systems", default="learned,uniform,random,whitespace,gumbel,hnet,none")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs per system")
    parser.add_argument("--first_seed", type=int, default=1337)
    parser.add_argument("--name", default="try", help="folder of results")
    options, others = parser.parse_known_args(argv)
    results = RESULTS / options.name
    planned = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for system in options.systems.split(","):
            flags, hp = hyperparameters(system, seed, others)
            out_dir = results / "runs" / f"{system}-{seed}"
            check_unchanged(out_dir, hp)
            planned.append((flags, out_dir))
    succeeded = []
    for flags, out_dir in planned:
        succeeded.append(train_to_end(flags, out_dir))
        write(results)
    print((results / "table.md").read_text())
    return 0 if all(succeeded) else 1


if __name__ == "__main__":
    sys.exit(main())
