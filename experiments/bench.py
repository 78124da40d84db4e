"""
How fast a training step is, compared with the other systems' and with a matrix product.

    python -m experiments.bench             the quick run's model, and the same with longer rows
    python -m experiments.bench --compile=False --batch_size=4
    python -m experiments.bench --gpu       the paper's 147M model, for one H100 or H200
    python -m experiments.bench --runs=out-learned,out-uniform    finished runs, on their own data

All other flags and configuration files are train.py's. Steps take turns, so that a slow spell
affects all of them alike. Times are medians over the turns, +- half the interquartile range. FLOPs
are those of matrix products. Compare numbers of one run of this program only.
"""
import itertools
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch

import train
from config.command_line import check, device_and_dtype, read_command_line
from config.terminal import argument_parser, one_line_errors
from experiments.measures import executed_flops, muon_flops
from model import load_checkpoint, make_model
from prepare import open_shards

TURNS = 20
SIDE = 8192 if torch.cuda.is_available() else 2048  # of the matrix product


def seconds(function, *arguments):
    """The seconds that a call takes, and what it returns."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    started = time.perf_counter()
    result = function(*arguments)
    wait()
    return time.perf_counter() - started, result


# ---- A setting is (hp, model, shards).
def new_setting(hp, **changes):
    """An untrained model, whose policy is at its target, and random bytes."""
    hp = SimpleNamespace(**vars(hp) | changes)
    torch.manual_seed(0)
    rows = torch.randint(256, (hp.batch_size, hp.seq_len), dtype=torch.uint8)
    return hp, make_model(vars(hp)), [rows.numpy()]


def finished_run(out_dir, hp):
    """A trained model and its training data, on the device that hp names."""
    with one_line_errors():
        model, saved = load_checkpoint(Path(out_dir, "ckpt.pt"))
        machine = {"device": hp.device, "dtype": hp.dtype, "compile": hp.compile}
        hp = SimpleNamespace(**vars(hp) | saved["config"] | machine)
        return hp, model, open_shards(hp.data, "train", hp.seq_len)


def training_step(hp, model, shards):
    """A function that does a training step as train.py does, and returns its boundaries a."""
    model.to(hp.device).train()
    if hp.compile:
        train.compile_model(model)
    many = SimpleNamespace(**vars(hp) | {"effective_batch_size": 32 * hp.batch_size})
    batches = itertools.cycle(train.micro_batches(shards, 0, many, 0, 1, hp.device))
    optimizers = train.make_optimizers(model, hp)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 1e-9  # so small that the number of tokens stays
    autocast = train.prepare_torch(hp.device, hp.dtype)

    def step():
        with autocast:
            logp, early_logp, l, a = model(*next(batches))
        L, _ = train.losses(model, logp, early_logp, l, a, hp)
        L.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), hp.grad_clip)
        with autocast:
            for optimizer in optimizers:
                optimizer.step()
        model.zero_grad()
        return a

    return step


def compare_steps(title, settings):
    """Prints a table of training steps, from a dictionary of settings."""
    steps = {name: training_step(*setting) for name, setting in settings.items()}
    times = {name: [] for name in steps}  # seconds per byte
    for turn in range(1 + TURNS):
        for name, step in steps.items():
            step()  # fills the caches
            duration, a = seconds(step)
            if turn:  # the first one compiles
                times[name].append(duration / a[0].numel())
    last = [*settings][-1]
    width = max(map(len, settings))
    print(f"{title}; the last column is the time per byte, relative to {last}")
    for name, step in steps.items():
        a = step()
        bytes_per_step = a[0].numel()
        hp, model, _ = settings[name]
        _, muon = train.make_optimizers(model, hp)
        flops = executed_flops(model, a).item() + muon_flops(muon)
        low, middle, high = statistics.quantiles(times[name], n=4)
        spread = (high - low) / 2 / middle
        ratio = statistics.median(t / r for t, r in zip(times[name], times[last]))
        print(f"  {name:{width}} {1e-3 / middle:8.1f} kB/s +- {spread:4.0%} "
              f"{1e3 * bytes_per_step * middle:8.1f} ms {flops / 1e9:8.1f} GFLOP "
              f"{flops / bytes_per_step / middle / 1e12:6.2f} TFLOP/s {ratio:6.2f}")


def print_matrix_product(hp):
    """Prints the speed of a matrix product, which no training step can exceed."""
    z = torch.randn(SIDE, SIDE, device=hp.device, dtype=getattr(torch, hp.dtype))
    times = [seconds(torch.mm, z, z)[0] for _ in range(TURNS)]
    print(f"matrix product: {2 * SIDE**3 / statistics.median(times) / 1e12:.2f} TFLOP/s")


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("--gpu", action="store_true", help="the paper's 147M model")
    parser.add_argument("--runs", help="folders of finished runs, separated by commas")
    options, others = parser.parse_known_args(argv)
    if options.gpu:
        others = ["config/fineweb_147m.py", *others]
    hp = SimpleNamespace(**train.DEFAULTS | read_command_line(others, train.DEFAULTS))
    check(hp)
    hp.device, hp.dtype = device_and_dtype(hp.device, hp.dtype)
    train.prepare_torch(hp.device, hp.dtype)  # for the matrix product
    torch._dynamo.config.recompile_limit = 64  # all settings share the layers' code
    print(f"torch {torch.__version__}, {hp.device}, {hp.dtype}, {torch.get_num_threads()} threads")
    print_matrix_product(hp)
    if options.runs:
        runs = {out_dir: finished_run(out_dir, hp) for out_dir in options.runs.split(",")}
        compare_steps("finished runs", runs)
        return
    if options.gpu:
        compare_steps("the paper's model", {"learned": new_setting(hp)})
        print(f"peak GPU memory: {torch.cuda.max_memory_allocated() / 1e9:.3g} GB")
    else:
        compare_steps(f"rows of {hp.seq_len} bytes", {
            "learned": new_setting(hp),
            "learned, K=1": new_setting(hp, num_draws=1),
            "learned, K=4": new_setting(hp, num_draws=4),
            "none": new_setting(hp, boundaries="none"),
            "random": new_setting(hp, boundaries="random"),
            "uniform": new_setting(hp, boundaries="uniform")})
        for N in (1024, 4096):
            size = {"seq_len": N, "batch_size": 8192 // N}
            compare_steps(f"rows of {N} bytes", {
                "none": new_setting(hp, **size, boundaries="none"),
                "learned": new_setting(hp, **size)})


if __name__ == "__main__":
    main()
