"""
How fast a training step is, compared with the other systems' and with a matmul.

    python -m experiments.bench             the quick run's model
    python -m experiments.bench --compile=False --batch_size=4
    python -m experiments.bench --seq_len=4096 --batch_size=2 --setting=--system=none --setting=""
    python -m experiments.bench config/fineweb_147m.py --setting=""     for one H100 or H200

A setting, a row of the table, is any flags of train.py; other flags and configuration files go to
all settings. The text is random bytes, and p stays where it starts. Steps take turns, so that a
slow spell affects all of them alike. Times are medians over the turns, +- half the interquartile
range. FLOPs are those of matmuls. The last column is the time relative to the last setting.
Compare numbers of one run of this program only. Before the table stands how long the first step of
the first setting took, which includes the compiler.
"""
import itertools
import os
import shlex
import statistics
import tempfile
import time

import torch

import train
from common.commandline import argument_parser, read_command_line, run_program, say
from common.models import make_model
from experiments.flops import flops_per_byte
from experiments.report import table

SETTINGS = "", "--system=none", "--system=random", "--system=uniform"
TURNS = 20
SIDE = 8192 if torch.cuda.is_available() else 2048  # of the matmul


def seconds(function):
    """The seconds that a call takes. The GPU must be idle before, as it is afterwards."""
    started = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def make_step(hp):
    """A function that does the next training step of a new model; a step's bytes and FLOPs."""
    torch.manual_seed(0)
    size = hp.effective_batch_size, hp.seq_len
    shards = [torch.randint(256, size, dtype=torch.uint8).numpy()]
    hp.device, hp.dtype, autocast = train.set_up_torch(hp.device, hp.dtype)
    model = make_model(hp).to(hp.device)
    flops = flops_per_byte(model, shards) * shards[0].size
    if hp.compile:
        train.compile_model(model)
    optimizer = train.make_optimizer(model, hp, hp.dtype)
    scaler = torch.amp.GradScaler(hp.device, enabled=hp.dtype == "float16")
    first_rows = itertools.count(0, hp.effective_batch_size)
    fraction = 1e-9  # of the learning rates: so small that the number of tokens stays

    def step():
        batches = train.micro_batches(
            shards, next(first_rows), hp.effective_batch_size, hp.batch_size, device=hp.device)
        return train.training_step(model, batches, optimizer, fraction, scaler, autocast, hp)

    return step, shards[0].size, flops


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("--setting", action="append", metavar="FLAGS", help="may be repeated")
    options, others = parser.parse_known_args(argv)
    torch._dynamo.config.recompile_limit = 64  # all settings share the layers' code
    settings = {}
    for flags in options.setting or SETTINGS:
        chosen = read_command_line([*others, *shlex.split(flags)], train.Hyperparameters)
        hp = train.Hyperparameters(**chosen)
        train.check(hp)
        settings[flags] = make_step(hp)
        if len(settings) == 1:
            step, _, _ = settings[flags]
            say(f"the first step, with an empty compiler cache: {seconds(step):.1f} s")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # counting FLOPs takes more than training

    z = torch.randn(SIDE, SIDE, device=hp.device, dtype=getattr(torch, hp.dtype))
    matmul = statistics.median(seconds(lambda: z @ z) for _ in range(TURNS))
    say(f"torch {torch.__version__}, {hp.device}, {hp.dtype}, {torch.get_num_threads()} threads; "
        f"a matmul runs at {2 * SIDE**3 / matmul / 1e12:.2f} TFLOP/s")
    times = {flags: [] for flags in settings}  # seconds per byte
    for _ in range(TURNS):
        for flags, (step, size, _) in settings.items():
            seconds(step)  # fills the caches
            times[flags].append(seconds(step) / size)
    rows = []
    for flags, (_, size, flops) in settings.items():
        low, middle, high = statistics.quantiles(times[flags], n=4)
        ratios = [one / last for one, last in zip(times[flags], times[[*settings][-1]])]
        rows.append([
            flags or "default",
            f"{1e-3 / middle:.1f}",
            f"{(high - low) / 2 / middle:.0%}",
            f"{1e3 * size * middle:.1f}",
            f"{flops / 1e9:.1f}",
            f"{flops / size / middle / 1e12:.2f}",
            f"{statistics.median(ratios):.2f}"])
    head = ["setting", "kB/s", "+-", "ms", "GFLOP", "TFLOP/s", "relative time"]
    say(table(head, rows))
    if torch.cuda.is_available():
        say(f"peak GPU memory: {torch.cuda.max_memory_allocated() / 1e9:.3g} GB")


if __name__ == "__main__":
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # the compiler's cache
    run_program(main)
