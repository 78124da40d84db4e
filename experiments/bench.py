"""
How fast the model is on this machine, against what the machine can do and against its rivals, all in one run.

    python experiments/bench.py                  the quick run's model; eight to 25 minutes on two cores
    python experiments/bench.py --quick          uncompiled, fewer rounds, one to two minutes
    python experiments/bench.py --quick --compile=True --config=config/aspect_ratio.py --batch_size=1
    python experiments/bench.py --fits --config=config/fineweb_147m.py    nothing is run: the rows that GPUs hold, by count

Every hyperparameter of train.py is a flag. --json=FILE writes the table. Every measured step lives in a process of its own
(so that its peak memory and its compilations are its own); the processes take turns, half a second each, round after round,
and a row is the median of its rounds, +- half the interquartile range. Compare rows of one run only.
"""
import contextlib
import functools
import io
import itertools
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[1]))
import prepare
import train
from config.command_line import check, read_command_line
from experiments.systems import SYSTEMS
from model import BOS, TOKEN_MULTIPLE, VOCAB_SIZE, Model, ModelConfig, draw, select, token_positions


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(function):
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def median(times):
    """The median, and half the interquartile range."""
    if len(times) < 2:
        return times[0], 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, (high - low) / 2


def take_turns(timers, rounds):
    """{name: seconds of each round}; a timer runs its work once and returns the seconds. The first round is not counted."""
    times = {name: [] for name in timers}
    for i in range(rounds + 1):
        for name, timer in timers.items():
            times[name].append(timer())
    return {name: values[1:] for name, values in times.items()}


# ---------------------------------------------------------------------------------------------------------------------
# What is measured. h is the dictionary of hyperparameters.


class Plain(nn.Module):
    """The rival: a nanoGPT-like byte transformer (LayerNorm, learned positions, GELU), torch's own causal attention."""

    def __init__(self, dim, num_heads, n_layers, seq_len):
        super().__init__()
        self.num_heads = num_heads
        self.embedding, self.position = nn.Embedding(VOCAB_SIZE, dim), nn.Embedding(seq_len, dim)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm1": nn.LayerNorm(dim, bias=False), "qkv": nn.Linear(dim, 3 * dim, bias=False),
                           "out": nn.Linear(dim, dim, bias=False), "norm2": nn.LayerNorm(dim, bias=False),
                           "up": nn.Linear(dim, 4 * dim, bias=False), "down": nn.Linear(4 * dim, dim, bias=False)})
            for _ in range(n_layers))
        self.norm, self.head = nn.LayerNorm(dim, bias=False), nn.Linear(dim, VOCAB_SIZE, bias=False)

    def forward(self, x):
        x = self.embedding(x) + self.position.weight
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm1"](x)).unflatten(-1, (3, self.num_heads, -1)).transpose(1, -2).unbind(2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](y.transpose(1, 2).flatten(-2))
            x = x + layer["down"](F.gelu(layer["up"](layer["norm2"](x))))
        return self.head(self.norm(x))


def linear_parameters(model):
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def plain_rival(h):
    """The Plain model of the learned model's width, with the depth that makes the matrix parameters most nearly equal."""
    with torch.device("meta"):
        ours = linear_parameters(make_model(h))
    D = h["embedding_dim"]
    return Plain(D, h["num_heads"], round((ours - VOCAB_SIZE * D) / (12 * D * D)), h["seq_len"])


def make_model(h):
    return Model(ModelConfig(**train.model_config_of(h)))


def model_flops(h, kind):
    """Model FLOPs of a training step, per byte: train.py's for the matrices, further draws included, and for attention over the
    window (byte layers) or the causal half (tokens) 12 per visible key and dimension."""
    with torch.device("meta"):
        model = plain_rival(h) if kind == "plain" else make_model(h)
    N, D, rate = h["seq_len"], h["embedding_dim"], 1.0 if kind == "none" else h["downsample_rate_target"]
    if kind == "plain":
        return 6 * linear_parameters(model) + len(model.layers) * 12 * D * N / 2
    byte_attention = (h["n_down_layers"] + h["n_up_layers"]) * 12 * D * h["attention_window"]
    return train.flops_per_byte(model, rate, h) + byte_attention + h["n_mid_layers"] * rate * 12 * D * rate * N / 2


def matrix_products(h):
    """A function that runs all products of a training step's linear layers, forward and backward, and nothing else."""
    rows, dtype = h["batch_size"] * h["seq_len"], getattr(torch, h["dtype"])
    with torch.device("meta"):
        model = make_model(h)
    work = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            n = round(rows * h["downsample_rate_target"]) if name.startswith("middle") else rows
            shapes = (n, module.in_features), (module.out_features, module.in_features), (n, module.out_features)
            work.append([torch.randn(shape, device=h["device"], dtype=dtype) for shape in shapes])

    def run():
        for x, weight, dy in work:
            x @ weight.T, dy @ weight, dy.T @ x

    return run


def fixed_forward(model, x, a):
    """Model.forward without anything that learning boundaries needs: no policy, no early head."""
    return model.predict(model.encode(x), a)


def training_step(h, kind):
    """A function that does one optimizer step as train.py does it, on random bytes.

    kind is "learned", "uniform" (evenly spaced tokens), "random" (as many, drawn anew each step), "none" (every byte a token) or
    "plain" (the rival).
    """
    torch.manual_seed(0)
    where = torch.device(h["device"])
    model = (plain_rival(h) if kind == "plain" else make_model(h)).to(where).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-9, fused=True)  # so slow that the policy stays at the target
    autocast = torch.autocast(where.type, getattr(torch, h["dtype"]), enabled=h["dtype"] != "float32")
    rows = torch.randint(256, (h["batch_size"], h["seq_len"]))
    x, y = (z.to(where) for z in train.inputs_and_targets(rows))
    if kind in SYSTEMS:
        rule = SYSTEMS[kind](model.config).rule
    forward = fixed_forward if kind in SYSTEMS else Model.forward if kind == "learned" else Plain.forward
    if h["compile"] and kind != "plain":
        train.compile_blocks(model)
    elif h["compile"]:
        forward = torch.compile(forward)

    numbers = itertools.count(1)

    def step():
        teaching = kind == "learned" and (h["num_draws"] == 1 or next(numbers) % h["policy_interval"] == 0)
        with autocast:
            u = torch.rand(h["num_draws"] if teaching else 1, *x.shape).squeeze(0).to(where)
            if kind == "learned":
                outputs = forward(model, x, u=u)
            elif kind == "plain":
                logits = forward(model, x)
            else:
                a = rule(x, u)
                a[..., 0] = True
                logits = forward(model, x, a)
        if kind == "learned":
            L_auto, L_early, L_pi, L_tgt = train.losses(*outputs, y, h["gamma"], h["downsample_rate_target"])
            L = L_auto + teaching * (h["lambda_pi"] * L_pi + h["lambda_target"] * L_tgt) + h["lambda_early"] * L_early
        else:
            L = -train.log_likelihood(logits, y).mean()
        L.backward()
        nn.utils.clip_grad_norm_(model.parameters(), h["grad_clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# A process for each system.


def peak_memory(function, where):
    """The most bytes that one call holds beyond what was held before it, as torch's allocators count them."""
    if where == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - held
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def serve(connection, make, *arguments):
    """The child: makes a function and calls it, then again for every message, and answers each time with a call's seconds.
    Message None: answers with the peak memory of one call and the graphs compiled."""
    try:
        function, interval = make(*arguments), arguments[0]["policy_interval"]  # of so many calls one may differ
        connection.send(seconds(lambda: [function() for _ in range(interval)]))
        while connection.recv():
            calls = math.ceil(0.5 / seconds(function) / interval) * interval  # the call before: into caches that another filled
            connection.send(seconds(lambda: [function() for _ in range(calls)]) / calls)
        peak = peak_memory(lambda: [function() for _ in range(interval)], arguments[0]["device"])
        connection.send((peak, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    except (RuntimeError, MemoryError) as error:  # out of memory, mostly
        connection.send(str(error).splitlines()[0])


class Worker:
    """Calling it runs the child's function once and returns the seconds."""

    def __init__(self, make, *arguments):
        self.connection, theirs = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, make, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        try:
            self.first = self.connection.recv()
        except EOFError:
            self.first = "killed: not enough memory"

    def __call__(self):
        self.connection.send(True)
        return self.connection.recv()

    def close(self):
        self.connection.send(None)
        result = self.connection.recv()
        self.process.join()
        return result


# The sections of the table.

rows = []  # of the table, as --json writes them


def section(name):
    print(f"\n{name}")
    rows.append({"section": name, "rows": []})


def row(name, value, unit, spread=None, note=""):
    rows[-1]["rows"].append({"name": name, "value": value, "unit": unit, "spread": spread, "note": note})
    plus_minus = "" if spread is None else f"+- {spread:.2g}"
    print(f"  {name:40} {value:10.4g} {plus_minus:11} {unit:9} {note}".rstrip())


def bench_training(h, rounds):
    """The systems' steps and the machine's ceiling, in turns."""
    same_bytes = h | {"seq_len": 1024, "batch_size": max(h["batch_size"] * h["seq_len"] // 1024, 1)}
    fixed = h | {"boundaries": "none"}
    draws = {f"learned, K={K}, every step": (h | {"num_draws": K, "policy_interval": 1}, "learned") for K in (1, 2, 4)}
    systems = {"learned": (h, "learned"), **draws, "uniform": (fixed, "uniform"), "random": (fixed, "random"),
               "every byte a token": (fixed, "none"), "learned, N=1024": (same_bytes, "learned"), "plain transformer, N=1024": (same_bytes, "plain")}
    dtypes = dict.fromkeys(("float32", h["dtype"]))
    workers = {dtype: Worker(matrix_products, h | {"dtype": dtype}) for dtype in dtypes}
    workers |= {name: Worker(training_step, *spec) for name, spec in systems.items()}
    failed = {name: worker.first for name, worker in workers.items() if isinstance(worker.first, str)}
    if "learned" in failed:
        sys.exit(f"bench.py: {failed['learned']}")
    working = {name: worker for name, worker in workers.items() if name not in failed}
    times = take_turns(working, rounds)
    ends = {name: worker.close() for name, worker in working.items()}

    section(f"matrix products of one step, alone ({h['batch_size']} rows of {h['seq_len']} bytes)")
    flops = train.flops_per_byte(make_model(h), h["downsample_rate_target"], h | {"num_draws": 1}) * h["batch_size"] * h["seq_len"]
    ceiling = {dtype: flops / median(times[dtype])[0] for dtype in dtypes}
    for dtype in dtypes:
        middle, spread = median(times[dtype])
        row(f"ceiling, {dtype}", ceiling[dtype] / 1e9, "GFLOP/s", ceiling[dtype] / 1e9 * spread / middle)
    section("training step")
    speed = {}
    for name, (g, kind) in systems.items():
        if name in failed:
            row(name, math.nan, "kB/s", note=failed[name])
            continue
        middle, spread = median(times[name])
        speed[name] = g["batch_size"] * g["seq_len"] / middle
        done = speed[name] * model_flops(g, kind)  # FLOP/s
        row(name, speed[name] / 1e3, "kB/s", speed[name] / 1e3 * spread / middle,
            f"{done / 1e9:.4g} GFLOP/s, " + ", ".join(f"{done / ceiling[dtype]:.2f} of the {dtype} ceiling" for dtype in dtypes))
    for name, (g, kind) in systems.items():
        if name in speed:
            model = plain_rival(g) if kind == "plain" else make_model(g)
            parameters = sum(p.numel() for p in model.parameters())
            row(f"{name}: memory", (12 * parameters + ends[name][0]) / 1e6, "MB",
                note=f"of which weights and AdamW's moments {12 * parameters / 1e6:.0f}; {linear_parameters(model) / 1e6:.3f}M in matrices")
    row("first steps, compilation included", workers["learned"].first, "s", note=f"{h['policy_interval']} of them")
    row("graphs compiled", ends["learned"][1], "", note="in all steps of learned")
    for a, b, note in (("uniform", "learned", "what learning the boundaries costs, unequal rows included"),
                       *(("uniform", name, "") for name in draws),
                       ("random", "learned", "what it costs beside them: as many tokens, rows as unequal, nothing learned"),
                       ("learned", "every byte a token", ""), ("learned, N=1024", "plain transformer, N=1024", "")):
        if a in speed and b in speed:
            middle, spread = median([slow / fast for slow, fast in zip(times[b], times[a])])
            row(f"{a} / {b}", middle, "times", spread, note)
    return median(times["learned"])[0]


def bench_memory(h):
    section("memory of a learned step of one row, uncompiled, beyond weights and AdamW's moments")
    for N in (1024, 2048, 4096, 8192):
        values = []
        for layers in (h["n_mid_layers"], 0):
            worker = Worker(training_step, h | {"seq_len": N, "batch_size": 1, "n_mid_layers": layers, "compile": False}, "learned")
            values.append(worker.close()[0] / 1e6)
        row(f"N={N}", values[0], "MB", note=f"without the middle layers {values[1]:.4g} MB, {1e6 * values[1] / N:.0f} bytes a byte")


def bytes_kept(h, rate):
    """Bytes that an uncompiled forward pass of one row in 16 bits keeps for its backward pass, at that many tokens per byte. Counted on
    tensors without data."""
    M, kept = TOKEN_MULTIPLE * math.ceil(h["seq_len"] * rate / TOKEN_MULTIPLE), {}
    with FakeTensorMode():
        model = make_model(h | {"num_draws": 2}).train()  # the early head is counted by hand: a copy of a fake tensor has a mode of its own
        x, positions = torch.zeros(1, h["seq_len"], dtype=torch.long), torch.zeros(1, M, dtype=torch.long)
        weights = {p.untyped_storage()._cdata for p in model.parameters()}

        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                kept[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
            X = model.encode(x)
            l = model.boundary_logits(model.read(X)[1], x > 0)
            tokens = model.run(model.middle, select(X, positions), positions)
            logits = model.decode(X + select(tokens, x))
            sum(train.losses(logits, None, l, x > 0, x, h["gamma"], h["downsample_rate_target"]))
    early = 12 * VOCAB_SIZE * h["seq_len"] if h["num_draws"] == 1 else 0  # logits, their soft-cap and softmax in float32
    return sum(storage.nbytes() for storage in kept.values()) + early


def bench_fit(h):
    """How many rows of a configuration GPUs hold in one forward and backward pass: weights, gradients and AdamW's moments, 16 bytes a
    parameter, a tenth of the card for CUDA, and what a row keeps, a sixth more for the backward pass itself (measured on a CPU: 0.185 GB
    for 4 rows of 1024 of the quick run's model, counted 0.16). A row with more tokens than the target pads all rows."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in make_model(h).parameters())
    section(f"rows of {h['seq_len']} bytes in one pass, {parameters / 1e6:.0f}M parameters, uncompiled")
    for rate in h["downsample_rate_target"], 0.3, 0.5, 1.0:
        row_bytes = bytes_kept(h, rate) * 7 / 6
        fit = ", ".join(f"{max(0, int((0.9e9 * card - 16 * parameters) / row_bytes))} on {card} GB" for card in (16, 24, 80, 141))
        row(f"{rate:.2f} tokens a byte", row_bytes / 1e9, "GB a row", note=fit)


def bench_pieces(h, rounds, whole):
    """Forward and backward of the step's pieces, each alone."""
    where = torch.device(h["device"])
    model = make_model(h).to(where).train()
    if h["compile"]:
        train.compile_blocks(model)
    autocast = torch.autocast(where.type, getattr(torch, h["dtype"]), enabled=h["dtype"] != "float32")
    x, y = (z.to(where) for z in train.inputs_and_targets(torch.randint(256, (h["batch_size"], h["seq_len"]))))
    u = torch.rand(h["num_draws"], *x.shape).squeeze(0).to(where)

    def middle(X, a):
        positions, token = token_positions(a)
        return X + select(model.run(model.middle, select(X, positions), positions), token)

    @torch.no_grad()
    def predict(X, a):
        return [model.predict(X, other) for other in a]

    def loss(l, a, logits, *early_logits):
        logits, early_logits = [logits, *others] if others else logits, early_logits[0] if early_logits else None
        L_auto, L_early, L_pi, L_tgt = train.losses(logits, early_logits, l, a, y, h["gamma"], h["downsample_rate_target"])
        return L_auto + h["lambda_pi"] * L_pi + h["lambda_target"] * L_tgt + h["lambda_early"] * L_early

    with autocast:
        X = model.encode(x)
        early_logits, z = model.read(X)
        a = model.boundaries(z, u)
        l, first = model.boundary_logits(z, a), a.view(-1, *x.shape)[0]
        Y = middle(X, first)
        logits, others = model.decode(Y), predict(X, a.view(-1, *x.shape)[1:])
    early_logits = [] if early_logits is None else [early_logits]
    pieces = {"encoder": (model.encode, x), "policy and early head, if any": (model.read, X), "draw": (model.boundaries, z.detach(), u),
              "decisions' logits": (model.boundary_logits, z, a), "select, middle, upsample": (middle, X, first),
              "decoder and head": (model.decode, Y), "losses": (loss, l, a, logits, *early_logits)}
    if others:
        pieces["the other draws"] = predict, X, a[1:]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-9, fused=True)
    timers = {}
    for name, (function, *inputs) in pieces.items():
        inputs = [t.detach().requires_grad_(t.is_floating_point() and name not in ("draw", "the other draws")) for t in inputs]
        outputs = []

        def forward(function=function, inputs=inputs, outputs=outputs):
            with autocast:
                result = function(*inputs)
            outputs[:] = [t for t in (result if isinstance(result, (tuple, list)) else (result,))
                          if t is not None and t.requires_grad]

        def backward(inputs=inputs, outputs=outputs):
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
            for t in inputs:
                t.grad = None

        timers[name, "forward"] = functools.partial(seconds, forward)
        if name not in ("draw", "the other draws"):
            timers[name, "backward"] = functools.partial(seconds, backward)

    def optimize():
        nn.utils.clip_grad_norm_(model.parameters(), h["grad_clip"])
        optimizer.step()

    timers["clipping and AdamW", ""] = functools.partial(seconds, optimize)
    times = take_turns(timers, rounds)
    section("where the step's time goes: its pieces, each alone")
    for (name, direction), values in times.items():
        middle_time, spread = median(values)
        row(f"{name} {direction}", 1e3 * middle_time, "ms", 1e3 * spread, f"{middle_time / whole:.1%} of the whole step")
    total = sum(median(values)[0] for values in times.values())
    row("sum", 1e3 * total, "ms", note=f"{total / whole:.1%} of the whole step")


def loop_draw(z, threshold):
    """The draw from left to right, a row's positions one after the other."""
    history, a = torch.zeros(z.size(0), z.size(2) - 1, device=z.device), []
    for i in range(z.size(1)):
        a.append(z[:, i, 0] + (history * z[:, i, 1:]).sum(1) > threshold[:, i])
        history = torch.cat((a[-1][:, None].float(), history), 1)[:, : z.size(2) - 1]
    return torch.stack(a, 1)


def bench_draw(h, rounds, whole):
    where, w = h["device"], h["policy_window"]
    z = torch.zeros(h["batch_size"], h["seq_len"], 1 + w, device=where)
    typical, second, never = z + 0.1 * torch.randn_like(z), z.clone(), z.clone()
    typical[..., 0] -= 1.4
    second[..., 0], second[..., 1:2] = 20, -40
    never[..., 0], never[..., 1:] = 20, -40
    threshold = torch.logit(torch.rand(z.shape[:2])).to(where)
    policies = {"near the target": typical, "every second byte": second, f"never within {w} bytes of the last": never}
    times = take_turns({name: functools.partial(seconds, functools.partial(draw, z, threshold)) for name, z in policies.items()}
                       | {"left to right, near the target": functools.partial(seconds, functools.partial(loop_draw, typical, threshold))}, rounds)
    section(f"the draw, w={w}, {h['batch_size']} rows of {h['seq_len']} bytes")
    for name, values in times.items():
        middle, spread = median(values)
        row(name, 1e3 * middle, "ms", 1e3 * spread, f"{middle / whole:.2%} of the training step")


@torch.no_grad()
def bench_generation(h, rounds, batches):
    """Bytes per second of all rows together, eager: a cached byte against a full pass over the context for each byte."""
    model = make_model(h).to(h["device"]).eval()
    timers = {}
    for batch in batches:
        for context in (512, 4096):
            x = F.pad(torch.randint(256, (batch, context - 1)), (1, 0), value=BOS).to(h["device"])
            generator = model.generate(x, 10**9)
            for _ in range(context - 1):  # the prompt's
                next(generator)

            def some_bytes(generator=generator):
                for _ in range(32):
                    next(generator)

            def cached(f=some_bytes):
                f()  # into caches that the full pass filled
                return seconds(f) / 32

            timers[batch, context, "cached"] = cached
            timers[batch, context, "full pass"] = functools.partial(seconds, functools.partial(model, x))
    times = take_turns(timers, rounds)
    section("generation")
    for (batch, context, how), values in times.items():
        middle, spread = median(values)
        note = ""
        if how == "cached":
            note = (f"{median(times[batch, context, 'full pass'])[0] / middle:.1f} times the full pass, a byte costs "
                    f"{middle / median(times[batch, 512, 'cached'])[0]:.2f} times its cost at 512")
        row(f"batch {batch}, context {context}, {how}", batch / middle, "bytes/s", batch / middle * spread / middle, note)


def bench_prepare(rounds):
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        source.mkdir()
        for i in range(1000):
            (source / str(i)).write_bytes(os.urandom(64_000))
        values = []
        for i in range(rounds):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                values.append(seconds(lambda: prepare.main(["--dataset=files", f"--input={source}", f"--out_dir={folder}/{i}"])))
        middle, spread = median(values)
        section("prepare.py")
        row("1000 files of 64 kB", 64 / middle, "MB/s", 64 / middle * spread / middle)


def main(argv):
    flags = [argument.removeprefix("--config=") for argument in argv if argument not in ("--quick", "--fits") and not argument.startswith("--json=")]
    h = train.DEFAULTS | ({"compile": False} if "--quick" in argv else {}) | read_command_line(flags, train.DEFAULTS)
    check(SimpleNamespace(**h))
    if "--fits" in argv:
        return bench_fit(h)
    h["device"], h["dtype"] = train.device_and_dtype(h["device"], h["dtype"])
    quick = "--quick" in argv
    rounds = 5 if quick else 20
    print(f"torch {torch.__version__}, {h['device']} {h['dtype']}, {torch.get_num_threads()} threads, "
          f"{torch.cuda.get_device_name() if h['device'] == 'cuda' else platform.processor() or platform.machine()}")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # empty, so that compilation is measured
        whole = bench_training(h, rounds)
        bench_pieces(h, rounds, whole)
        bench_draw(h, rounds, whole)
    bench_generation(h, 5, (1,) if quick else (1, 32))
    if not quick:
        bench_memory(h)
    bench_prepare(3)
    for argument in argv:
        if argument.startswith("--json="):
            Path(argument.removeprefix("--json=")).write_text(json.dumps({"hyperparameters": h, "table": rows}, indent=1))


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    main(sys.argv[1:])
