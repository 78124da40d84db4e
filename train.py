"""
Trains the byte-level language model in model.py, which learns where its tokens end.

    python train.py                            the quick run: a small model, Python source, laptop
    python train.py config/x.py --gamma=0.9    files and flags override the values below
    python train.py --resume=True              continues from out_dir/ckpt.pt
    torchrun --standalone --nproc_per_node=8 train.py config/fineweb_147m.py     eight GPUs
"""
import json
import math
import os
import signal
import time
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # sizes vary

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import prepare
from configurator import (
    UserError, characters, check, device_and_dtype, marked, read_command_line, run, say)
from experiments.optimizer import make_optimizer
from experiments.systems import (
    check_compiler, compile_model, load_weights, loss_of_system, make_model, read_checkpoint,
    save_checkpoint)
from model import BOS, token_layout

# ---- Hyperparameters. The values are the quick run's; config/ holds the paper's. ----------------
# A flag is read as the type of its default, so write 1.0 here for a float. The quick run differs
# from the paper in the following. (What the paper leaves open: experiments/README.md.)
#   1. two draws of the boundaries of half the rows, each the other's baseline, instead of an early
#      exit and the mean over rows
#   2. policy_window 1, not 8 (the paper has it as an ablation), and gamma 0.97, not 0.99
#   3. a policy with its own learning rate
#   4. Muon instead of AdamW for the matrices of the blocks, and a weight decay of 0.3
#   5. a linear decay of the learning rates instead of a cosine
#   6. byte layers that see 8 bytes, not 64

# files
data = "data/stdlib"  # folder of shards made by prepare.py; this one is made on first use
out_dir = "out"  # receives ckpt.pt and log.jsonl
resume = False  # continue from out_dir/ckpt.pt, with its hyperparameters unless flags change them
# model
system = "learned"  # or uniform, hnet, ..., or another run's ckpt.pt: experiments/systems.py
seq_len = 256  # bytes in a row; must divide the row length given to prepare.py
embedding_dim = 128  # D, for bytes and tokens alike
num_heads = 2  # attention heads in every layer
n_down_layers = 2  # byte layers before the middle
n_mid_layers = 4  # token layers
n_up_layers = 1  # byte layers after the middle
attention_window = 8  # a byte layer sees this many bytes, including the current one
# boundaries
downsample_rate_target = 1 / 5  # tokens per byte
policy_window = 1  # w, eq. 21: each decision sees this many earlier decisions
policy_scale = 16.0  # S; eq. 22 calls it D
policy_softcap = 5.0  # eq. 23: keeps p between 0.7% and 99.3%, in training only
# loss
redrawn = 1 / 2  # fraction of a micro-batch's rows drawn twice; 0: the paper's eq. 14-15 and 17
gamma = 0.97  # discount of later rewards, eq. 16; larger looks further ahead, with more noise
lambda_pi = 1e-2  # weight of the policy loss, eq. 27
lambda_target = 1e-2  # weight of L_tgt, which keeps the rate near its target
lambda_early = 1e-1  # weight of the early exit's loss; only used if redrawn is 0
# optimizer
training_bytes = 4_000_000  # length of the run
effective_batch_size = 16  # rows in a training step, over all processes and micro-batches
batch_size = 16  # rows in a micro-batch; eq. 17 and 24 average over those of all processes
learning_rate = 3e-3  # peak, reached after the warm-up; falls to 0 at the end
cosine = False  # True: learning rates fall along a cosine, as in the paper; False: linearly
muon_learning_rate = 6e-3  # peak for the blocks' matrices, trained by Muon; 0: all by AdamW
policy_learning_rate = 0.06  # peak for the policy's matrices, whose output is divided by S
warmup_bytes = 200_000  # linear warm-up
weight_decay = 0.3  # of matrices, except the policy's
grad_clip = 1.0  # maximum gradient norm
# log
log_interval = 40  # training steps between log lines
eval_interval = 125  # training steps between evaluations, each followed by a checkpoint
eval_rows = 512  # validation rows, the same ones every time
# machine
device = "auto"  # "auto", "cpu", "cuda" or "mps"
dtype = "auto"  # "auto", "float32", "bfloat16" or "float16" (with a GradScaler; not on "mps")
compile = True  # torch.compile the model
seed = 1337  # of the weights, the order of rows and the draws

# ---- The hyperparameters by name, and the lines that are printed.
DEFAULTS = {key: value for key, value in globals().items()
            if type(value) in (int, float, bool, str) and key[0].islower()}

VAL_LINE = ("step {step} val {val_bpb:.3f} bits/byte, rate {val_rate:.3f} | "
            "{ends_between:.0%} of tokens end between words")
# undecided: the mean of p (1 - p), relative to that of p = target; it can exceed 1
LOG_LINE = ("step {step} {bytes:,} bytes | {bpb:.3f} bits/byte, rate {rate:.3f}, "
            "{undecided:.0%} undecided | {bytes_per_second:,.0f} bytes/s, "
            "{minutes_left:.1f} min left")


# ---- Losses. Log-likelihoods are in nats. The boundaries of the first K of B rows are drawn twice;
# second draws stand at the end, so logp, l, a and A are (B + K, N). If redrawn is 0, so is K.
# Where the paper sums over positions (eq. 18, 25, 26), these are means, as in the authors' code.
def mean_over_processes(z):
    """Overwrites a tensor with its mean over all processes. Every process must call this."""
    if dist.is_initialized():
        dist.all_reduce(z, dist.ReduceOp.AVG)
    return z


def discounted_return(R, gamma):
    """G_i = sum_k gamma^k R_{i+k}, eq. 16, in log2(N) doublings; R and G (..., N).

    Our R_i rewards the prediction made at i; it is the paper's R_{i+1}.
    """
    G = R
    reach = 1  # G_i sums this many rewards so far
    while reach < R.size(-1):
        later = F.pad(G[..., reach:], (0, reach))
        G = torch.add(G, later, alpha=gamma**reach)
        reach *= 2
    return G


def losses(logp, early_logp, l, a, hp):
    """The total loss, and its terms for the log: a dictionary of scalar tensors by name."""
    if hp.system != "learned":
        return loss_of_system(logp, early_logp)  # other systems return their own loss as early_logp
    B = hp.batch_size
    L_auto = -logp[:B].mean()  # eq. 25
    if hp.redrawn == 0:  # the paper's baselines: an early exit, and the mean over rows
        R = (logp - early_logp).detach()  # eq. 15
        G = discounted_return(R, hp.gamma)  # eq. 16
        A = G - mean_over_processes(G.mean(0))  # eq. 17
    else:  # each of a row's two draws is the other's baseline (Kool, van Hoof & Welling, 2019)
        K = len(logp) - B
        R = (logp[:K] - logp[B:]).detach()
        G = discounted_return(R, hp.gamma)
        A = torch.cat((G, torch.zeros_like(logp[K:B]), -G))  # 0: rows that are drawn once
    # If gamma is 1, -grad L_pi estimates eq. 13, times a factor. With second draws that is
    # 2 K / (B + K), the fraction of draws that have an A. With redrawn = 0 it is 1 - 1 / n, because
    # the mean of eq. 17, over n rows, includes the row itself.
    # -grad L_auto estimates eq. 12. The gradient of eq. 10 is the sum of the two, eq. 11; eq. 27
    # weights eq. 13 by lambda_pi. Position 0 is forced and adds nothing to L_pi.
    negative_log_pi = F.binary_cross_entropy_with_logits(l, a.float(), reduction="none")
    L_pi = (negative_log_pi * A)[:, 1:].sum() / l.numel()  # eq. 18
    # mean l needs no mean over processes, since gradients are averaged. Position 0 counts here,
    # with the policy's own l instead of the forced 1.
    mean_p = mean_over_processes(l.detach().sigmoid().mean())
    L_tgt = l.mean() * (mean_p - hp.downsample_rate_target)  # eq. 24
    L = L_auto + hp.lambda_pi * L_pi + hp.lambda_target * L_tgt  # eq. 27
    terms = {
        "auto": L_auto, "pi": L_pi, "target": L_tgt,
        "advantage_std": A.std()}  # includes the zeros of rows drawn once
    if hp.redrawn == 0:
        L_early = -early_logp.mean()  # eq. 26
        L = L + hp.lambda_early * L_early
        terms["early"] = L_early
    return L, terms


# ---- Data order: which rows a training step reads, and the uniforms of its draws.
@lru_cache(2)
def row_order(seed, epoch, n):
    """A random permutation of n rows, another one for every epoch."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def micro_batches(shards, first_row, hp, rank, world, device):
    """This process's micro-batches of the training step that starts at row first_row of the run.

    A list of (x, y, u): <bos> and all but the last byte of a row (B, N), the row (B, N), uniforms
    for all draws (B + K, N). Rows and uniforms do not depend on the number of processes or
    micro-batches, but which rows are drawn twice does: the first K of each micro-batch.
    """
    shard_rows = len(shards[0])  # in every shard but the last
    n = sum(map(len, shards))
    rows = []
    for i in range(first_row + rank, first_row + hp.effective_batch_size, world):
        number = row_order(hp.seed, i // n, n)[i % n]
        rows.append(shards[number // shard_rows][number % shard_rows])
    y = torch.from_numpy(np.stack(rows)).to(device).long()
    x = F.pad(y[:, :-1], (1, 0), value=BOS)
    # 1: not row_order's random numbers, except those of epoch 1 at first_row 0, which is harmless
    generator = np.random.default_rng([hp.seed, 1, first_row])
    # one array for first draws, one for second draws
    u = generator.random((2, hp.effective_batch_size, hp.seq_len), np.float32)
    u = torch.from_numpy(u[:, rank::world]).to(device)
    B = hp.batch_size
    K = math.ceil(hp.redrawn * B)
    batches = zip(x.split(B), y.split(B), u.split(B, dim=1))
    return [(x, y, torch.cat((both[0], both[1, :K]))) for x, y, both in batches]


# ---- The training step.
def training_step(model, batches, optimizer, fraction, scaler, autocast, hp):
    """One training step, at this fraction of the peak learning rates.

    Returns the terms of the loss, l and a, all of the last micro-batch, and the gradient's norm.
    """
    for x, y, u in batches:
        with autocast:
            logp, early_logp, l, a = model(x, y, u)
        L, terms = losses(logp, early_logp, l, a, hp)
        scaler.scale(L / len(batches)).backward()
    for p in model.parameters():
        mean_over_processes(p.grad)
    scaler.unscale_(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * fraction
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), hp.grad_clip).item()
    if math.isfinite(grad_norm):  # if not, the step is left out, as by scaler.step
        with autocast:  # for Muon's matrix products
            optimizer.step()
    elif scaler.get_scale() <= 1:  # float16 starts far above 1, and the other dtypes stay at 1
        raise UserError("the gradient is not finite; use smaller learning rates")
    scaler.update()  # float16: halves the scale after an overflow
    model.zero_grad()
    return terms, l, a, grad_norm


# ---- Evaluation.
@torch.no_grad()
def evaluate(model, shards, hp, autocast):
    """Validation metrics. Rows and uniforms are the same every time.

    val_bpb is in bits per byte, val_rate in tokens per byte. ends_between is the fraction of tokens
    whose last character is neither a letter nor a digit. line has (byte, a, p) of a row's bytes.
    """
    rows = min(hp.eval_rows, sum(map(len, shards)))
    # micro_batches gives each row one draw; the model keeps its own value of redrawn
    fixed = SimpleNamespace(**vars(hp) | {"seed": 0, "effective_batch_size": rows, "redrawn": 0})
    nats = 0
    shown = []  # (byte, a, p) of what the model reads, except <bos>
    model.eval()
    for x, y, u in micro_batches(shards, 0, fixed, 0, 1, model.embedding.weight.device):
        with autocast:
            logp, _, l, a = model(x, y, u)
        nats -= logp.sum().item()
        columns = [z[:, 1:].flatten().tolist() for z in (x, a, l.sigmoid())]
        shown += zip(*columns)
    model.train()
    tokens = rows + sum(a for _, a, _ in shown)  # <bos> is a token too
    # a token may end at any of a character's bytes; two in the same character count as one
    between = [not character.isalnum() for character, a, _ in characters(shown) if a]
    return {
        "val_bpb": nats / math.log(2) / (rows * hp.seq_len),
        "val_rate": tokens / (rows * hp.seq_len),
        "ends_between": sum(between) / max(len(between), 1),
        "line": shown[: min(hp.seq_len - 1, 160)]}


# ---- The program. hp holds the hyperparameters above, as changed by files and flags.
def prepare_torch(device, dtype):
    """Sets torch up for training; returns the autocast context of passes and Muon's products."""
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(device == "cpu")  # resumed runs repeat to the last bit
    torch.utils.deterministic.fill_uninitialized_memory = False
    return torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32")


def report(log, record, text):
    """Adds a record to the log, and prints the text, in which {key} is a value of the record."""
    try:
        print(json.dumps(record), file=log)
    except OSError as error:
        raise UserError(f"cannot write {log.name}: {error}") from error
    say(text.format(**record))


def train(argv):
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))

    # ---- hyperparameters
    chosen = read_command_line(argv, DEFAULTS)
    hp = SimpleNamespace(**DEFAULTS | chosen)
    checkpoint = Path(hp.out_dir, "ckpt.pt")
    saved = {}
    if rank == 0:
        prepare.lock(checkpoint.parent)  # no other run may write there
    if hp.resume:
        saved = read_checkpoint(checkpoint)
        hp = SimpleNamespace(**DEFAULTS | saved["config"] | chosen)
    elif checkpoint.exists():
        raise UserError(f"{checkpoint} exists; continue it with --resume=True, or use another "
                        "--out_dir")
    check(hp, world)
    torch.manual_seed(hp.seed)
    model = make_model(vars(hp))  # a Model, unless --system says otherwise
    if saved:
        load_weights(model, saved, checkpoint)

    # ---- machine
    device, precision = device_and_dtype(hp.device, hp.dtype)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    autocast = prepare_torch(device, precision)
    scaler = torch.amp.GradScaler(device, enabled=precision == "float16")

    # ---- data
    if rank == 0 and hp.data == DEFAULTS["data"] and not Path(hp.data, "meta.json").exists():
        prepare.main([])
    if world > 1:
        dist.barrier()  # the others wait for the data
    train_shards = prepare.open_shards(hp.data, "train", hp.seq_len)
    val_shards = prepare.open_shards(hp.data, "val", hp.seq_len)
    if world > 1:
        mine = saved.get("step"), Path(hp.data, "meta.json").read_bytes()
        everyones = [None] * world
        dist.all_gather_object(everyones, mine)
        if everyones.count(mine) < world:
            dist.barrier()  # torchrun kills all when one exits; this lets others say so too
            raise UserError("the processes see different checkpoints or data; with several nodes, "
                            "put out_dir and data on a disk that all of them share")

    # ---- model
    model.to(device)
    compiled = hp.compile and device != "mps"
    if compiled:
        check_compiler(device)
        compile_model(model)

    # ---- optimizer
    optimizer = make_optimizer(model, hp)
    if saved:
        old = saved["config"]["muon_learning_rate"]
        if "optimizer_state" not in saved or (old == 0) != (hp.muon_learning_rate == 0):
            raise UserError(f"{checkpoint} does not fit the optimizer; another version of train.py "
                            "wrote it, or muon_learning_rate became or stopped being 0")
        # keeps this run's groups, because flags may have changed their settings
        optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["optimizer_state"]})
        if saved["scaler"]:  # the saved run used float16
            scaler.load_state_dict(saved["scaler"])

    # ---- loop
    step_bytes = hp.effective_batch_size * hp.seq_len
    end = math.ceil(hp.training_bytes / step_bytes) * step_bytes
    step = first_step = saved.get("step", 0)
    bytes_seen = saved.get("bytes_seen", 0)
    early_steps = hp.eval_interval // 4, hp.eval_interval // 2  # boundaries form early
    seconds = []  # of each training step since the last log line
    if rank == 0:
        log = checkpoint.with_name("log.jsonl").open("a", buffering=1)
        log.truncate(min(log.tell(), saved.get("log_bytes", 0)))  # drop lines after the checkpoint
        say(f"{sum(p.numel() for p in model.parameters()):,} parameters"
            + "; compiling may take a minute" * compiled)
        if saved and saved["config"]["training_bytes"] <= bytes_seen < end:
            say("the learning rates had reached 0; for the added bytes they rise again")

    while True:
        finished = bytes_seen >= end
        stopping = torch.tensor(float(len(stop_signals)), device=device)
        stopping = mean_over_processes(stopping) > 0
        evaluating = finished or step % hp.eval_interval == 0 or step in early_steps
        if rank == 0 and evaluating and (step > first_step or not saved):
            metrics = evaluate(model, val_shards, hp, autocast)
            if not math.isfinite(metrics["val_bpb"]):
                raise UserError("the validation loss is not finite; use smaller learning rates")
            report(log, {"step": step, "bytes": bytes_seen, **metrics}, VAL_LINE)
            say("".join(marked(metrics["line"][:80])).replace("\n", "⏎"))
        if rank == 0 and (stopping or evaluating and step > first_step):
            state = optimizer.state_dict()["state"]
            save_checkpoint(checkpoint, {
                "model": model.state_dict(), "optimizer_state": state,
                "scaler": scaler.state_dict(), "config": vars(hp), "step": step,
                "bytes_seen": bytes_seen, "log_bytes": os.path.getsize(log.name)})
        if finished or stopping:
            break

        step += 1
        started = time.perf_counter()
        torch.manual_seed(hash((hp.seed, step, rank)))  # for layers you add, such as dropout
        first_row = bytes_seen // hp.seq_len
        batches = micro_batches(train_shards, first_row, hp, rank, world, device)
        bytes_seen += step_bytes
        midpoint = bytes_seen - step_bytes / 2
        if midpoint < hp.warmup_bytes:
            fraction = midpoint / hp.warmup_bytes
        else:
            fraction = (end - midpoint) / (end - hp.warmup_bytes)
            if hp.cosine:
                fraction = (1 - math.cos(math.pi * fraction)) / 2
        terms, l, a, grad_norm = training_step(
            model, batches, optimizer, fraction, scaler, autocast, hp)
        seconds.append(time.perf_counter() - started)

        if step % hp.log_interval == 0 or bytes_seen >= end:  # shows the last micro-batch
            p, target = l.sigmoid(), hp.downsample_rate_target
            terms |= {
                "undecided": (p * (1 - p)).mean() / (target * (1 - target)),
                "rate": a.float().mean(), "bpb": terms["auto"] / math.log(2)}
            terms = {name: mean_over_processes(z.detach()).item() for name, z in terms.items()}
            # T and M, of all draws together, are for experiments/measures.py
            _, _, positions, slots = token_layout(a > 0.5)  # system gumbel's a is a float
            speed = step_bytes / np.mean(seconds)
            seconds.clear()
            if rank == 0:
                record = {
                    "step": step, "bytes": bytes_seen, **terms, "T": len(slots),
                    "M": positions.size(1), "grad_norm": grad_norm, "bytes_per_second": speed,
                    "minutes_left": (end - bytes_seen) / speed / 60}
                report(log, record, LOG_LINE)

    if rank == 0:
        program = "sample.py" if finished else "train.py --resume=True"
        say(f"ended after step {step}; go on with: python {program} --out_dir={hp.out_dir}")
    if world > 1:
        dist.barrier()  # exiting breaks connections that other processes still use


stop_signals = []  # Ctrl-C, schedulers and closed terminals add to it: the run saves and ends


def request_stop(number, _):
    stop_signals.append(number)
    signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C ends the program at once


def main(argv):
    """Trains as train.py does with these arguments. Raises UserError."""
    stop_signals.clear()
    handlers = {}
    for number in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGINT)}:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            handlers[number] = signal.signal(number, request_stop)
    try:
        train(argv)
    except RuntimeError:
        if stop_signals:  # Ctrl-C ends the compiler as well, and torch complains
            raise KeyboardInterrupt from None
        raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    run(main)
