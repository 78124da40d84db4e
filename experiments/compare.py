"""
Trains systems that place boundaries in different ways on the same rows, and compares them.

    python -m experiments.compare --systems=learned,uniform,hnet --seeds=2 --training_bytes=20e6
    python -m experiments.compare --systems=learned,uniform,none --flops=2e13 --name=flops
    python -m experiments.compare --systems=learned,none config/x.py --gamma=0.9 --name=x
    python -m experiments.compare --systems=learned,uniform --data=data/mine --name=sizes \\
        --shape="--embedding_dim=64 --num_heads=1 --training_bytes=1e6" --shape=

A system is a value of train.py's --system, and a shape is any flags of train.py. Each system trains
in each shape. The configuration file and all other flags go to all runs. With --flops, each system
reads as many bytes as take so many FLOPs of training at its rate, the target or that of a fixed
rule on 64 training rows; the table has the FLOPs that it took. Finished runs are not repeated, and
stopped runs continue. Writes to results/NAME/, from all runs in its folder runs/:

    table.md   means over the seeds of finished runs
    loss.svg   bits per byte over FLOPs: the paper's Figures 3 and 4
"""
import math
import shlex
import subprocess
import sys
from pathlib import Path

from common.checkpoint import make_model, read_checkpoint
from common.commandline import UserError, argument_parser, read_command_line, run_program, say
from experiments.flops import flops_per_byte
from experiments.pictures import plot, write
from experiments.systems import SYSTEMS, Fixed
from experiments.tables import RESULTS, pivot, read_run
from train import Hyperparameters, check, micro_batches, open_data

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
    model = make_model(hp)
    rate = hp.downsample_rate_target
    if isinstance(model, Fixed):
        shards, _ = open_data(hp, {})
        [(x, _, u)] = micro_batches(shards, 0, 64, 64, hp.seed, 0, 1, "cpu")
        rate = model.rule(x, u).float().mean().item()
    step_bytes = hp.effective_batch_size * hp.seq_len
    return math.ceil(flops / flops_per_byte(model, rate) / step_bytes) * step_bytes


def check_unchanged(out_dir, hp):
    """Raises UserError if out_dir holds a run with other hyperparameters."""
    checkpoint = out_dir / "ckpt.pt"
    if not checkpoint.exists():
        return
    old = vars(Hyperparameters()) | read_checkpoint(checkpoint)["config"]
    for key, value in vars(hp).items():
        if key not in ("out_dir", "resume", "device", "compile") and value != old[key]:
            raise UserError(f"{out_dir} was trained with {key}={old[key]!r}, not {value!r}; use "
                            "another --name")


def train_to_end(flags, out_dir):
    """Runs train.py, or continues a run that was stopped; returns whether it succeeded."""
    resume = (out_dir / "ckpt.pt").exists()
    flags = [*flags, f"--out_dir={out_dir}", f"--resume={resume}"]
    process = subprocess.Popen([sys.executable, ROOT / "train.py", *flags])
    try:
        return process.wait() == 0
    finally:
        process.wait()  # Ctrl-C reaches train.py too, which then writes a checkpoint


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
        write(results / "loss.svg", plot(curves))


def main(argv=None):
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
    ours = ["--system=", "--seed=", "--out_dir=", "--resume=", "--init_from="]
    if options.flops:
        ours.append("--training_bytes=")
    for flag in sum(options.shape or [], others):
        if flag.startswith(tuple(ours)):
            raise UserError(f"{flag} is set for each run; use --systems, --first_seed, --name or "
                            "--flops")
    results = RESULTS / options.name
    planned = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for shape in options.shape or [[]]:
            for system in options.systems.split(","):
                folder = ",".join(flag.removeprefix("--") for flag in shape).replace("/", ":")
                flags = [*others, *shape, f"--system={system}", f"--seed={seed}"]
                if options.flops:
                    size = affordable_bytes(hyperparameters(flags), options.flops)
                    flags.append(f"--training_bytes={size}")
                planned.append((flags, results / "runs" / folder / f"{system}-{seed}"))
    for flags, out_dir in planned:
        check_unchanged(out_dir, hyperparameters(flags))
    failed = False
    for flags, out_dir in planned:
        if train_to_end(flags, out_dir):
            write_results(results)
        else:
            failed = True
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    run_program(main)
