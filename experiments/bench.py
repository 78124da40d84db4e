"""
How fast a training step is on this machine, against the other systems' and a matrix product.

    python experiments/bench.py             the quick run's model; minutes, then all lines at once
    python experiments/bench.py --compile=False --batch_size=4
    python experiments/bench.py --gpu       the paper's 147M model alone, for one H100 or H200
    python experiments/bench.py --runs=out-learned,out-uniform   finished runs', on their texts

Every hyperparameter of train.py is a flag or in a configuration file. In a comparison each step
lives in a process of its own, and the processes take turns, half a second each. Numbers are
medians of the rounds, +- half the interquartile range. Compare those of one run only.
"""
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import train
from config.command_line import check, read_command_line
from experiments.compare import ROOT, parser_of
from experiments.measures import executed_flops
from model import ModelConfig, load_checkpoint, make_model
from prepare import fail, open_shards

ROUNDS = 20
SIDE = 8192 if torch.cuda.is_available() else 2048  # of the matrix product
PIECES = "encode", "policy_terms", "boundaries", "boundary_logits", "predict", "log_likelihood"
os.environ["KINETO_LOG_LEVEL"] = "6"  # torch's profiler, which counts memory, is silent


def seconds(function):
    """What one call takes."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


def row(name, values, unit, note=""):
    """Prints a line of a table."""
    low, middle, high = statistics.quantiles(values, n=4)
    print(f"  {name:30} {middle:9.4g} +- {(high - low) / 2:<8.2g} {unit:8} {note}".rstrip())


# ---- What is measured. h is a dictionary of train.py's hyperparameters.


def new_model(h):
    """A model in training."""
    return make_model(ModelConfig(**train.model_config_of(h))).to(h["device"]).train()


def loss(logp, early_logp, l, a, h):
    """Eq. 15-18 and 24-27, as in train.py's loop."""
    A = train.advantage(train.discounted_return((logp - early_logp).detach(), h["gamma"]))
    L_pi = train.policy_loss(l, a, A)
    L_tgt = train.target_loss(l, h["downsample_rate_target"])
    L = -logp[0].mean() - h["lambda_early"] * early_logp.mean()
    return L + (h["boundaries"] == "learned") * (h["lambda_pi"] * L_pi + h["lambda_target"] * L_tgt)


def finished_run(out_dir, h):
    """The run's hyperparameters, on h's machine, and where its weights are."""
    path = Path(out_dir, "ckpt.pt")
    try:
        made = load_checkpoint(path)[1]["config"]
        open_shards(made["data"], "train", made["seq_len"])
    except (OSError, ValueError) as error:
        fail(error)
    return made | {"weights": path} | {key: h[key] for key in ("device", "dtype", "compile")}


def training_step(h, timed=lambda name, function: function):
    """A function that does a step as train.py does it, on random bytes or on a run's text."""
    torch.manual_seed(0)
    model = new_model(h)
    if "weights" in h:
        model.load_state_dict(load_checkpoint(h["weights"])[0].state_dict())
        shards = open_shards(h["data"], "train", h["seq_len"])
    else:
        shards = [torch.randint(256, (h["batch_size"], h["seq_len"]), dtype=torch.uint8).numpy()]
    learned = h["boundaries"] == "learned"
    batches = itertools.cycle(train.micro_batches(
        shards, 0, h["num_draws"] if learned else 1,
        SimpleNamespace(**h | {"effective_batch_size": 32 * h["batch_size"]}), 0, 1, h["device"]))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-9, fused=True)  # p stays at the target
    autocast = torch.autocast(h["device"], getattr(torch, h["dtype"]), h["dtype"] != "float32")
    if h["compile"]:
        train.compile_blocks(model)
    for name in PIECES if learned else ():
        setattr(model, name, timed(name, getattr(model, name)))

    def update():
        nn.utils.clip_grad_norm_(model.parameters(), h["grad_clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def step():
        with autocast:
            outputs = model(*next(batches))
        L = timed("losses", loss)(*outputs, h)
        if not learned:
            L = L + model.boundary_loss(*outputs[2:])
        timed("backward", L.backward)()
        timed("clipping and AdamW", update)()

    return step


def matrix_product(h):
    """A function: SIDE^3 multiplications and additions."""
    z = torch.randn(SIDE, SIDE, device=h["device"], dtype=getattr(torch, h["dtype"]))
    return partial(torch.mm, z, z)


# ---- A process for each of them.


def begin(make, h):
    global function
    function = make(h)
    function()  # compiles


def measure():
    """Seconds of a call, the mean over half a second of them."""
    calls = math.ceil(0.5 / seconds(function))  # this call fills the caches again
    return seconds(lambda: [function() for _ in range(calls)]) / calls


def peak_memory():
    """The most bytes that a call holds beyond what was held before it."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def print_share(steps, products, h):
    """Prints FLOP/s as executed, over those of the matrix product, of their seconds."""
    u = torch.rand(h["num_draws"], h["batch_size"], h["seq_len"])
    flops = executed_flops(new_model(h), u < h["downsample_rate_target"]).item()
    ceiling = [2 * SIDE**3 / one for one in products]
    row("matrix product", [one / 1e12 for one in ceiling], "TFLOP/s")
    row("learned, of the product's", [flops / a / b for a, b in zip(steps, ceiling)], "")


def bench_steps(settings, h):
    """Prints the table of training steps, of hyperparameters by name; returns all seconds."""
    measured = {name: (training_step, one) for name, one in settings.items()}
    measured["matrix product"] = matrix_product, h
    spawn = multiprocessing.get_context("spawn")
    workers = {name: ProcessPoolExecutor(1, spawn, begin, arguments)
               for name, arguments in measured.items()}

    def of(name, function):
        return workers[name].submit(function).result()

    rounds = [{name: of(name, measure) for name in measured} for _ in range(ROUNDS + 1)]
    times = {name: [one[name] for one in rounds[1:]] for name in measured}
    memory = {name: of(name, peak_memory) for name in settings}
    for worker in workers.values():
        worker.shutdown()

    print("training step; its peak memory beyond weights; its time a byte over the last one's")
    speeds = {name: [g["batch_size"] * g["seq_len"] / one for one in times[name]]
              for name, (_, g) in measured.items()}
    for name in settings:
        ratio = statistics.median(a / b for a, b in zip(speeds[[*settings][-1]], speeds[name]))
        row(name, [speed / 1e3 for speed in speeds[name]], "kB/s",
            f"{memory[name] / 1e6:.0f} MB, {ratio:.2f} times")
    return times


def bench_pieces(h):
    """Prints where the milliseconds of a learned step go, and its three dearest kernels."""
    spent = defaultdict(float)

    def timed(name, function):
        def call(*arguments):
            results = []
            spent[name] += seconds(lambda: results.append(function(*arguments)))
            return results[0]
        return call

    step = training_step(h, timed)
    step()
    spent.clear()
    whole = seconds(lambda: [step() for _ in range(ROUNDS)])
    print("pieces of a learned step")
    for name, one in spent.items():
        print(f"  {name:30} {1e3 * one / ROUNDS:9.4g} ms, {one / whole:.1%}")
    with torch.profiler.profile() as profile:
        step()
    time = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    kernels = sorted(profile.key_averages(), key=lambda event: -getattr(event, time))
    for event in kernels[:3]:
        print(f"  {event.key[:60]} {getattr(event, time) / 1e3:.4g} ms, {event.count} calls")


def bench_alone(h):
    """Prints speed, share of the machine's FLOP/s, and memory of learned steps in this process."""
    begin(training_step, h)
    times = [measure() for _ in range(ROUNDS)]
    row("learned", [h["batch_size"] * h["seq_len"] / 1e3 / one for one in times], "kB/s",
        f"{peak_memory() / 1e9:.3g} GB beyond weights")
    begin(matrix_product, h)
    print_share(times, [measure() for _ in range(ROUNDS)], h)


def main(argv):
    parser = parser_of(__doc__)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--runs", help="their --out_dirs")
    options, others = parser.parse_known_args(argv)
    others = [f"{ROOT}/config/fineweb_147m.py"] * options.gpu + others
    h = train.DEFAULTS | read_command_line(others, train.DEFAULTS)
    check(SimpleNamespace(**h))
    h["device"], h["dtype"] = train.device_and_dtype(h["device"], h["dtype"])
    print("torch", torch.__version__, h["device"], h["dtype"], torch.get_num_threads(), "threads")
    if options.runs:
        return bench_steps({run: finished_run(run, h) for run in options.runs.split(",")}, h)
    if options.gpu:
        bench_alone(h)
    else:
        times = bench_steps({
            "learned": h, **{f"learned, K={K}": h | {"num_draws": K} for K in (1, 4)},
            **{rule: h | {"boundaries": rule} for rule in ("random", "none", "uniform")}}, h)
        print_share(times["learned"], times["matrix product"], h)
    bench_pieces(h)


if __name__ == "__main__":
    main(sys.argv[1:])
