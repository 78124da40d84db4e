"""
Trains systems that place boundaries in different ways on the same rows, and compares them.

    python -m experiments.compare --systems=learned,uniform,hnet --seeds=2 --training_bytes=20e6
    python -m experiments.compare --systems=learned,uniform,none --flops=2e13 --name=flops
    python -m experiments.compare --systems=learned,none config/x.py --gamma=0.9 --name=x
    python -m experiments.compare --systems=learned,uniform --data=data/mine --name=sizes \\
        --shape="--embedding_dim=64 --num_heads=1 --training_bytes=1e6" --shape=

A system is a value of train.py's --system, and a shape is any flags of train.py. Each system trains
in each shape. The configuration file and all other flags go to all runs. With --flops, each system
reads as many bytes as so many FLOPs of training pay for, if its model makes as many tokens as a new
one; the table has the FLOPs of the trained models. Finished runs are not repeated, and stopped runs
continue. Writes to results/NAME/, from all runs in its folder runs/:

    table.md   means over the seeds of finished runs
    loss.svg   bits per byte over FLOPs: the paper's Figures 3 and 4
"""
import math
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from common.checkpoint import read_checkpoint
from common.commandline import UserError, argument_parser, read_command_line, run_program, say
from common.models import make_model
from experiments.figures import loss, write
from experiments.flops import flops_per_byte
from experiments.report import RESULTS, pivot, read_run
from experiments.systems import SYSTEMS
from train import Hyperparameters, check, open_data

ROOT = Path(__file__).parents[1]


# ---- Training.
def hyperparameters(flags):
    """The hyperparameters that these arguments give train.py. Raises UserError."""
    hp = Hyperparameters(**read_command_line(flags, Hyperparameters))
    check(hp)
    if hp.system not in ("learned", *SYSTEMS):
        raise UserError(f"system={hp.system!r} must be one of learned, {', '.join(SYSTEMS)}")
    return hp


def affordable_bytes(hp, flops):
    """The bytes that take so many FLOPs of training, rounded up to whole steps."""
    shards, _ = open_data(hp)
    if hp.system == "hnet":  # a new one makes hardly any tokens, a trained one as many as uniform
        hp = replace(hp, system="uniform")
    per_byte = flops_per_byte(make_model(hp), shards)
    step_bytes = hp.effective_batch_size * hp.seq_len
    return math.ceil(flops / per_byte / step_bytes) * step_bytes


def check_unchanged(out_dir, hp):
    """Raises UserError if a run that shares a mean with out_dir's has other hyperparameters."""
    for checkpoint in sorted(out_dir.parent.glob("*/ckpt.pt")):
        old = vars(Hyperparameters()) | read_checkpoint(checkpoint)["config"]
        if old["system"] != hp.system:
            continue
        for key, value in vars(hp).items():
            free = "seed", "out_dir", "resume", "device", "compile"
            if key not in free and value != old[key]:
                raise UserError(f"{checkpoint.parent} was trained with {key}={old[key]!r}, not "
                                f"{value!r}; use another --name")


def train_to_end(flags, out_dir):
    """Runs train.py, or continues a run that was stopped. Returns its exit code."""
    resume = (out_dir / "ckpt.pt").exists()
    flags = [*flags, f"--out_dir={out_dir}", f"--resume={resume}"]
    process = subprocess.Popen([sys.executable, ROOT / "train.py", *flags])
    try:
        return process.wait()
    finally:
        process.terminate()  # if a signal stops this program; train.py writes a checkpoint
        process.wait()


# ---- Results.
def write_results(results):
    """Writes the table of the finished runs in the folder, and the figure of all."""
    folder = results / "runs"
    finished = []
    curves = {}  # by label, which is the shape's name, if any, and the system
    for checkpoint in sorted(folder.glob("**/ckpt.pt")):
        place = checkpoint.parent.relative_to(folder)
        about, evaluations = read_run(checkpoint.parent)
        label, _, _ = place.as_posix().rpartition("-")
        curves.setdefault(label, []).append(evaluations)
        if about["finished"]:
            shape, _, _ = label.rpartition("/")
            finished.append({"text": shape} | about | evaluations[-1])
    made = pivot(finished, ["bits", "rate", "outside", "MB", "FLOPs", "minutes"])
    write(results / "table.md", made)
    say(made)
    if any(sum(curves.values(), [])):
        write(results / "loss.svg", loss(curves))


def main(argv=None):
    """Runs the command line. Returns the largest exit code of its runs. Raises UserError."""
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--systems", default="learned,uniform,random,whitespace,gumbel,hnet,none")
    add("--shape", type=shlex.split, action="append", help="flags of train.py; may be repeated")
    add("--flops", type=float, help="of training, for each run")
    add("--seeds", type=int, default=1, help="number of runs per system")
    add("--first_seed", type=int, default=1337)
    add("--name", default="try", help="writes to results/NAME (%(default)s)")
    options, others = parser.parse_known_args(argv)
    for name in "seeds", "flops":
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name}={value} must be above 0")
    ours = ["--system", "--seed", "--out_dir", "--resume", "--init_from"]
    if options.flops:
        ours.append("--training_bytes")
    for argument in sum(options.shape or [], others):
        flag, _, _ = argument.partition("=")
        if flag in ours:  # a configuration file may have them; they are overridden
            raise UserError(f"{flag} is set for each run; use --systems, --first_seed, --name or "
                            "--flops")
    results = RESULTS / options.name
    planned = []
    for shape in options.shape or [[]]:
        folder = ",".join(flag.removeprefix("--") for flag in shape).replace("/", ":")
        for system in options.systems.split(","):
            flags = [*others, *shape, f"--system={system}"]
            if options.flops:
                size = affordable_bytes(hyperparameters(flags), options.flops)
                flags.append(f"--training_bytes={size}")
            for seed in range(options.first_seed, options.first_seed + options.seeds):
                out_dir = results / "runs" / folder / f"{system}-{seed}"
                planned.append((seed, [*flags, f"--seed={seed}"], out_dir))
    planned.sort(key=lambda run: run[0])  # all systems' first seeds come first
    for _, flags, out_dir in planned:
        check_unchanged(out_dir, hyperparameters(flags))
    codes = [0]
    for _, flags, out_dir in planned:
        codes.append(train_to_end(flags, out_dir))
        if codes[-1] == 0:
            write_results(results)
    return max(codes)


if __name__ == "__main__":
    run_program(main)
