"""
Trains the byte-level language model of model.py, which learns where its tokens end.

    python train.py                            the quick run: small model, Python source, laptop
    python train.py config/x.py --gamma=0.9    a file overrides the values below, a flag the file
    python train.py --resume=True              goes on from out_dir/ckpt.pt
    torchrun --standalone --nproc_per_node=8 train.py config/fineweb_147m.py     eight GPUs
"""
import io
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as M varies

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import experiments.systems  # noqa: F401  the paper's other systems, for --boundaries
import prepare
from config.command_line import check, parse, read_command_line
from experiments.measures import executed_flops, where_tokens_end
from model import ModelConfig, inputs_and_targets, load_checkpoint, make_model
from prepare import fail, open_shards, read_rows
from sample import as_terminal

# ---- Hyperparameters. The values are the quick run's; config/ holds the paper's. ----------------
# A flag takes the type of the value here: what may be 0.5 is written 1.0, not 1.

# files
data = "data/stdlib"  # folder of shards made by prepare.py; this one is made on first use
out_dir = "out"  # receives ckpt.pt and log.jsonl
resume = False  # go on from out_dir/ckpt.pt with its hyperparameters and the flags given now
# model
seq_len = 256  # bytes in a row; divides the shards' row length
embedding_dim = 128  # D, of bytes and tokens alike
num_heads = 2  # attention heads, of all layers
n_down_layers = 2  # byte layers that read
n_mid_layers = 4  # token layers
n_up_layers = 1  # byte layers that predict
attention_window = 8  # bytes that a byte layer sees
# boundaries
boundaries = "learned"  # or uniform, hnet, ..., or another run's ckpt.pt: experiments/systems.py
downsample_rate_target = 1 / 5  # tokens per byte
policy_window = 1  # w, eq. 21: earlier decisions that a decision sees
policy_scale = 16.0  # S, eq. 22
policy_softcap = 5.0  # eq. 23: the decision's logit stays within +- this in training
# loss
num_draws = 2  # K draws of a row, each judged by the others; 1: the paper's estimator, eq. 15-17
redrawn = 1 / 2  # share of a pass's rows, rounded up, with further draws; only they have A != 0
gamma = 0.97  # discount of later rewards, eq. 16: the larger, the noisier
lambda_pi = 1e-2  # weight of the policy's loss, eq. 27
lambda_target = 1e-2  # weight of L_tgt, which keeps the rate
lambda_early = 1e-1  # weight of the early head's loss; only num_draws=1 has such a head
# optimizer: AdamW
training_bytes = 8_000_000  # length of the run
effective_batch_size = 16  # rows in a step, over all processes and accumulation
batch_size = 16  # rows in a pass of one process; eq. 17 and 24 average over a pass of all processes
learning_rate = 3e-3  # reached after warm-up; falls to 0 along a cosine
warmup_bytes = 200_000  # linear warm-up
policy_learning_rate = 0.12  # of the policy's weights, which act through 1 / S
policy_start_bytes = 500_000  # until then p stays near the target, while tokens become useful
weight_decay = 0.01  # of matrices but the policy's; torch's default
grad_clip = 1.0  # largest gradient norm
# log
log_interval = 40  # steps between lines
eval_interval = 250  # steps between evaluations, each followed by a checkpoint
eval_rows = 512  # validation rows, the same every time
# machine
device = "auto"  # "auto", "cpu", "cuda" or "mps"
dtype = "auto"  # "auto", "float32", "bfloat16" or "float16" (with a GradScaler; not on "mps")
compile = True  # torch.compile the model
seed = 1337  # of weights, order of rows and draws

DEFAULTS = {key: value for key, value in list(globals().items())
            if type(value) in (int, float, bool, str) and key.islower() and key[0] != "_"}


# ---- The losses. Of all draws, (K, B, N): logp, R, G, A, l, a. Log-likelihoods are in nats.
def mean_over_processes(z):
    """The mean of a tensor over all processes, which must all call this."""
    if dist.is_initialized():
        dist.all_reduce(z)
        z = z / dist.get_world_size()
    return z


def discounted_return(R, gamma):
    """G_i = sum_k gamma^k R_{i+k}, eq. 16, in log2(N) doublings; R and G (..., N)."""
    G, reach = R, 1
    while reach < R.size(-1):
        G = torch.add(G, F.pad(G[..., reach:], (0, reach)), alpha=gamma**reach)
        reach *= 2
    return G


def advantage(G):
    """A (K, B, N): the return G (K, B, N) less what was to be expected at the same position."""
    K = len(G)
    if K == 1:
        return G - mean_over_processes(G.mean(1))  # eq. 17: all rows of this pass
    return (G - G.mean(0)) * K / (K - 1)  # G_k less the mean of the row's other draws' G_j


def policy_loss(l, a, A):
    """L_pi, eq. 18: the mean of -log pi(a_i) A_i. Position 0 is forced and has no term."""
    negative_log_pi = F.binary_cross_entropy_with_logits(l, a.float(), reduction="none")
    return (negative_log_pi * A)[..., 1:].sum() / l.numel()


def target_loss(l, target):
    """L_tgt, eq. 24: it pushes all logits down when the mean p is above the target, else up.

    The mean is that of one pass of all processes, so L_tgt depends on batch_size.
    """
    mean_p = mean_over_processes(l.detach().sigmoid().mean())
    return l.mean() * (mean_p - target)


# ---- Data: the order of rows, and the uniforms of the draws.
@lru_cache(2)
def row_order(seed, epoch, n):
    return np.random.default_rng([seed, epoch]).permutation(n)


def micro_batches(shards, first_row, K, h, rank, world, device):
    """This process's passes of the step that begins with the run's row number `first_row`.

    A list of x and y (B, N) int64 and u (K, B, N). Each epoch has its own order. Draws do not
    depend on the number of processes or passes.
    """
    n, B = sum(map(len, shards)), h.effective_batch_size
    rows = [row_order(h.seed, i // n, n)[i % n] for i in range(first_row, first_row + B)]
    u = np.random.default_rng([h.seed, 1, first_row]).random((K, B, h.seq_len), np.float32)
    rows, u, batches = rows[rank::world], torch.from_numpy(u[:, rank::world]), []
    for part in (slice(i, i + h.batch_size) for i in range(0, len(rows), h.batch_size)):
        x, y = inputs_and_targets(read_rows(shards, rows[part]))
        batches.append((x.to(device), y.to(device), u[:, part].to(device)))
    return batches


# ---- Evaluation.
@torch.no_grad()
def evaluate(model, shards, eval_rows, batch_size, autocast):
    """The numbers of validation rows, and the first row's [(byte, a, p)] to look at.

    Rows and uniforms are the same every time. Bits are per byte, val_stderr is over rows,
    val_entropy is the mean -log pi(a_i) in nats.
    """
    n, device = sum(map(len, shards)), model.embedding.weight.device
    rows = np.linspace(0, n - 1, min(eval_rows, n)).astype(int)
    generator, passes = torch.Generator().manual_seed(0), []
    model.eval()
    for part in np.split(rows, range(batch_size, len(rows), batch_size)):
        x, y = (z.to(device) for z in inputs_and_targets(read_rows(shards, part)))
        u = torch.rand(1, *x.shape, generator=generator).to(device)
        with autocast:
            logp, _, l, a = model(x, y, u)
        passes.append((x, -logp[0] / math.log(2), l[0], a[0].bool()))
    model.train()
    x, bits, l, a = map(torch.cat, zip(*passes))
    results = {"val_bpb": bits.mean(), "val_stderr": bits.mean(1).std() / math.sqrt(len(bits)),
               "val_rate": a.float().mean(), **where_tokens_end(x, a),
               "val_entropy": F.binary_cross_entropy_with_logits(l[:, 1:], a[:, 1:].float())}
    shown = list(zip(*(z[0, 1:161].tolist() for z in (x, a, l.sigmoid()))))
    return {name: value.item() for name, value in results.items()}, shown


# ---- What a run prints and leaves: log.jsonl and ckpt.pt.
def log(path, record):
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def log_step(path, step, bytes_seen, terms, grad_norm, speed, h):
    """Logs and prints a step: terms as main collects them, speed in bytes a second."""
    names = "auto", "early", "pi", "target", "rate", "entropy", "flops_per_byte"
    r = dict(zip(names, terms))
    log(path, {"step": step, "bytes": bytes_seen, **r, "grad_norm": grad_norm,
               "bytes_per_second": speed})
    print(f"step {step} {bytes_seen / 1e6:.2f} MB | {r['auto'] / math.log(2):.3f} bits/byte, "
          f"rate {r['rate']:.3f}, entropy {r['entropy']:.3f} | norm {grad_norm:.2f} | "
          f"{speed / 1e3:.1f} kB/s, {(h.training_bytes - bytes_seen) / speed / 60:.0f} min left")


def log_evaluation(path, r, shown):
    """Logs and prints an evaluation's record r and the line of held-out text."""
    log(path, r | {"line": [(byte, int(a), round(p, 2)) for byte, a, p in shown]})
    print(f"step {r['step']} val {r['val_bpb']:.3f} bits/byte, rate {r['val_rate']:.3f} | ends: "
          f"{r['ends_between']:.0%} between words, {r['ends_before']:.0%} on last letters, "
          f"{r['ends_after']:.0%} first")
    pieces = as_terminal(shown[:80], sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    print("".join(pieces).replace("\n", "⏎"))


def diverged(step, checkpoint):
    """Ends the program with exit code 1; the last checkpoint stays."""
    there = "is kept as it was" if checkpoint.exists() else "was not written"
    line = (f"train.py: step {step}: gradients, weights or loss are not finite; take a smaller "
            f"learning_rate or a longer warmup_bytes. {checkpoint} {there}")
    sys.exit(line if os.environ.get("RANK", "0") == "0" else 1)


def save(checkpoint, log_file, h, model, optimizer, scaler, step, rows_seen):
    """Writes a checkpoint beside the old one, then moves it there: ckpt.pt is always whole."""
    if not all(p.isfinite().all() for p in model.parameters()):
        diverged(step, checkpoint)
    part = checkpoint.with_suffix(".part")
    state = {"model": model.state_dict(), "model_config": asdict(model.config), "config": vars(h),
             "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(), "step": step,
             "rows_seen": rows_seen, "log_bytes": log_file.stat().st_size}
    torch.save(state, buffer := io.BytesIO())  # a full disk is then an OSError
    part.write_bytes(buffer.getbuffer())
    os.replace(part, checkpoint)


# ---- Setting up: hyperparameters, machine, model, optimizer.
def model_config_of(h):
    """ModelConfig's arguments, from a dictionary of hyperparameters."""
    early_exit = h["boundaries"] == "learned" and h["num_draws"] == 1 and h["lambda_early"] > 0
    values = h | {"early_exit": early_exit}
    return {field.name: values[field.name] for field in fields(ModelConfig)}


def begin(argv, rank):
    """The run's hyperparameters, model and checkpoint; the paths of its checkpoint and log."""
    chosen = read_command_line(argv, DEFAULTS, __doc__)
    checkpoint, saved, model = Path(chosen.get("out_dir", out_dir), "ckpt.pt"), None, None
    if rank == 0 and not prepare.lock(checkpoint.parent):  # until this process ends
        fail(f"another run is at work in {checkpoint.parent}; take another --out_dir")
    if checkpoint.exists() and not chosen.get("resume", resume):
        fail(f"{checkpoint} exists; go on from it with --resume=True, or take another --out_dir")
    try:
        if chosen.get("resume", resume):
            model, saved = load_checkpoint(checkpoint)
            needed = {"optimizer", "scaler", "step", "rows_seen", "log_bytes", "config"}
            if needed - saved.keys() or saved["config"].keys() != DEFAULTS.keys():
                raise ValueError(f"{checkpoint} was made by another version of train.py")
            before = {key: parse(key, value, DEFAULTS) for key, value in saved["config"].items()}
            chosen = before | chosen
        h = SimpleNamespace(**DEFAULTS | chosen)
        check(h)
        config = ModelConfig(**model_config_of(vars(h)))
        torch.manual_seed(h.seed)
        model = model or make_model(config)
    except (OSError, ValueError) as error:
        fail(error)
    if changed := [key for key, v in asdict(config).items() if getattr(model.config, key) != v]:
        fail(f"{checkpoint} holds a model with other {', '.join(changed)} (early_exit: num_draws)")
    if rank == 0:
        print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters; "
              "the first steps may take a minute, if they are compiled")
    return h, model, saved, checkpoint, checkpoint.with_name("log.jsonl")


def device_and_dtype(device, dtype):
    """The device's kind and the dtype that "auto" stands for; checks those that are asked for."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        device = next((kind for kind in found if found[kind]), "cpu")
    if not found.get(device, True):
        fail(f"device={device!r}, but torch finds none on this machine")
    if dtype == "auto":
        fast = (torch.cuda.get_device_capability() >= (8, 0) if device == "cuda" else
                device == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16"))
        dtype = "bfloat16" if fast else "float16" if device == "cuda" else "float32"  # T4: float16
    return device, dtype


def set_up_machine(h, world):
    """Starts the group of processes; returns this one's device, autocast and gradient scaler."""
    kind, precision = device_and_dtype(h.device, h.dtype)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
        if device.index >= torch.cuda.device_count():
            fail(f"there are {torch.cuda.device_count()} GPUs; start as many processes")
        torch.cuda.set_device(device)
    if world > 1:
        backend, of = ("nccl", device) if kind == "cuda" else ("gloo", None)
        dist.init_process_group(backend, device_id=of)
        torch._dynamo.config.optimize_ddp = False  # it cuts a large block into several graphs
    torch.set_float32_matmul_precision("high")
    if kind == "cpu":  # a resumed run repeats to the last bit
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    autocast = torch.autocast(kind, getattr(torch, precision), precision != "float32")
    return device, autocast, torch.amp.GradScaler(kind, enabled=precision == "float16")


def open_data(h, rank, device):
    """The shards of training and validation; makes the quick run's where they are missing."""
    if rank == 0 and h.data == "data/stdlib" and not Path(h.data, "meta.json").exists():
        prepare.main([])
    mean_over_processes(torch.zeros((), device=device)).item()  # all wait for the data
    try:
        return [open_shards(h.data, split, h.seq_len) for split in ("train", "val")]
    except ValueError as error:
        fail(error)


def compile_blocks(model, **options):
    """Compiles, in place, the layers (all of a kind share their code), the heads, the policy."""
    for block in (*model.down, *model.up):
        block.compile(dynamic=False, **options)
    for block in model.middle:  # the number of tokens varies
        block.compile(dynamic=True, **options)
    names = ["log_likelihood", "policy_terms"]
    if model.policy.weight.is_cuda:  # on a CPU they cost less than to compile them
        names += ["boundaries", "boundary_logits"]
    for name in names:
        setattr(model, name, torch.compile(getattr(model, name), dynamic=False, **options))


def make_optimizer(model, h):
    """AdamW in three groups: matrices, and without decay vectors and, last, the policy."""
    policy = model.policy.weight
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not policy]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": h.weight_decay},
              {"params": vectors, "weight_decay": 0.0}, {"params": [policy], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, h.learning_rate, fused=True)  # the paper's betas: 0.9, 0.999


def restore(saved, optimizer, scaler, log_file, rank):
    """Puts back what a checkpoint holds, if any; returns the steps and rows of the run so far."""
    if rank == 0:
        with log_file.open("a") as file:  # what a killed run logged after its checkpoint goes
            file.truncate(min(file.tell(), saved["log_bytes"] if saved else 0))
    if not saved:
        return 0, 0
    groups = optimizer.state_dict()["param_groups"]  # flags may have changed them
    optimizer.load_state_dict(saved["optimizer"] | {"param_groups": groups})
    if saved["scaler"]:
        scaler.load_state_dict(saved["scaler"])
    return saved["step"], saved["rows_seen"]


def set_learning_rates(optimizer, end, h):
    """For the step up to byte `end`: linear warm-up, a cosine to 0; the policy's once it starts."""
    done = (end - h.warmup_bytes) / max(h.training_bytes - h.warmup_bytes, 1)
    scale = (1 + math.cos(math.pi * min(max(done, 0), 1))) / 2
    scale *= min(end / max(h.warmup_bytes, 1), 1)
    for group in optimizer.param_groups:
        group["lr"] = h.learning_rate * scale
    started = end > h.policy_start_bytes
    optimizer.param_groups[-1]["lr"] = h.policy_learning_rate * scale * started


# ---- The loop. h has the hyperparameters above, after configuration files and flags.
stop = []  # Ctrl-C fills it: the run ends after its step, with a checkpoint


def main(argv):
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    h, model, saved, checkpoint, log_file = begin(argv, rank)
    device, autocast, scaler = set_up_machine(h, world)
    train_shards, val_shards = open_data(h, rank, device)
    optimizer = make_optimizer(model.to(device).train(), h)
    step, rows_seen = restore(saved, optimizer, scaler, log_file, rank)
    first_step, logged_step, seconds = step, step, 0.0
    learned = h.boundaries == "learned"
    K = h.num_draws if learned else 1
    if h.compile and device.type != "mps":
        compile_blocks(model)
    net = model if world == 1 else DistributedDataParallel(model, gradient_as_bucket_view=True)
    for number in signal.SIGINT, signal.SIGTERM:  # torchrun passes SIGTERM on
        signal.signal(number, lambda *_: stop.append(True))
    while True:
        bytes_seen = rows_seen * h.seq_len
        finished = bytes_seen >= h.training_bytes
        stopping = mean_over_processes(torch.tensor(float(len(stop)), device=device)).item() > 0
        due = (step % h.eval_interval == 0 or finished) and (step > first_step or not saved)
        if due and rank == 0:
            B = math.ceil(h.redrawn * h.batch_size)  # compiled once with the second draw
            results, shown = evaluate(model, val_shards, h.eval_rows, B, autocast)
            log_evaluation(log_file, {"step": step, "bytes": bytes_seen} | results, shown)
        if (due or stopping) and step > first_step and rank == 0:
            save(checkpoint, log_file, h, model, optimizer, scaler, step, rows_seen)
        if finished or stopping:
            break

        step, started = step + 1, time.perf_counter()
        batches = micro_batches(train_shards, rows_seen, K, h, rank, world, device)
        rows_seen += h.effective_batch_size
        set_learning_rates(optimizer, rows_seen * h.seq_len, h)
        terms = torch.zeros(7, device=device)
        for i, (x, y, u) in enumerate(batches):
            net.require_backward_grad_sync = i == len(batches) - 1  # once a step
            with autocast:
                logp, early_logp, l, a = net(x, y, u)  # early_logp is 0 without an early exit
            R = (logp - early_logp).detach()  # eq. 15
            A = advantage(discounted_return(R, h.gamma))  # eq. 16-17
            L_pi = learned * policy_loss(l, a, A)
            L_tgt = learned * target_loss(l, h.downsample_rate_target)
            L_auto, L_early = -logp[0].mean(), -early_logp.mean()  # eq. 25-26
            L = L_auto + h.lambda_pi * L_pi + h.lambda_target * L_tgt + h.lambda_early * L_early
            if not learned:
                L = L + model.boundary_loss(l, a)  # experiments/systems.py
            scaler.scale(L / len(batches)).backward()  # eq. 27
            if step % h.log_interval == 0:
                entropy = F.binary_cross_entropy_with_logits(l[..., 1:], a[..., 1:].float())
                flops_per_byte = executed_flops(model, a) / x.numel()
                terms += torch.stack((L_auto, L_early, L_pi, L_tgt, a.float().mean(), entropy,
                                      flops_per_byte)).detach()
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), h.grad_clip).item()
        if not math.isfinite(grad_norm) and scaler.get_scale() <= 1:  # float16 skips such a step
            diverged(step, checkpoint)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        seconds += time.perf_counter() - started
        if step % h.log_interval == 0:
            terms = mean_over_processes(terms / len(batches)).tolist()
            speed = (step - logged_step) * h.effective_batch_size * h.seq_len / seconds
            if rank == 0:
                log_step(log_file, step, rows_seen * h.seq_len, terms, grad_norm, speed, h)
            logged_step, seconds = step, 0.0
    if rank == 0:
        print(f"done: python sample.py --out_dir={h.out_dir} shows what it writes" if finished else
              f"stopped after step {step}" + "; add --resume=True to go on" * checkpoint.exists())
    if world > 1:
        dist.barrier()
        os._exit(0)  # gloo's threads need Python to free a tensor, and abort where it has ended


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    try:
        main(sys.argv[1:])
    except Exception as error:
        if stop:  # Ctrl-C reaches the compiler as well
            sys.exit("train.py: stopped within a step; what was saved before is whole")
        if isinstance(error, torch._dynamo.exc.TorchDynamoException):
            fail(f"torch.compile fails: {str(error).splitlines()[0]}; take --compile=False")
        if isinstance(error, OSError):
            fail(f"{error}; what was saved before is whole")
        raise
