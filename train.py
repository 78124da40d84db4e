"""
Trains the byte-level language model in model.py, which learns where its tokens end.

    python train.py                            the quick run: a small model of Python source
    python train.py config/x.py --gamma=0.9    files and flags override the values below
    python train.py --resume=True              continues from out_dir/ckpt.pt
    torchrun --standalone --nproc_per_node=8 train.py config/fineweb_147m.py     eight GPUs
"""
import hashlib
import json
import math
import os
import re
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # sizes vary

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import prepare
from common.check import check
from common.checkpoint import (
    device_and_dtype, load_weights, make_model, read_checkpoint, save_checkpoint, versions)
from common.commandline import UserError, read_command_line, run_program, say
from common.muon import MuonAdamW
from common.process import restored, set_up_torch, stop_signals
from common.text import characters, in_word, marked
from model import BOS, Block, Head, Policy

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # the number of processes; torchrun sets it
RANK = int(os.environ["RANK"]) if WORLD_SIZE > 1 else 0  # this process


# ---- Hyperparameters. ---------------------------------------------------------------------------
@dataclass
class Hyperparameters:
    """The quick run's values; config/ holds the paper's. The quick run differs from the paper:

    1. policy_window is 1, not 8 (the paper has it as an ablation), and gamma is 0.97, not 0.99
    2. the policy has a learning rate of its own
    3. Muon instead of AdamW trains the matrices of the blocks, and the weight decay is 0.3
    4. the learning rates fall linearly, not along a cosine
    5. the byte layers see 8 bytes, not 64

    What the paper leaves open: experiments/README.md.
    """

    # files
    data: str = "data/stdlib"  # folder of shards made by prepare.py; this one is made on first use
    out_dir: str = "out"  # receives ckpt.pt and log.jsonl
    resume: bool = False  # continue from out_dir/ckpt.pt; flags override its hyperparameters
    init_from: str = ""  # or begin with the weights and hyperparameters of another run's ckpt.pt
    # model
    system: str = "learned"  # or uniform, hnet, ...: experiments/systems.py
    seq_len: int = 256  # bytes in a row; must divide the row length given to prepare.py
    embedding_dim: int = 128  # D, for bytes and tokens alike
    num_heads: int = 2  # attention heads in every layer
    n_down_layers: int = 2  # byte layers before the middle
    n_mid_layers: int = 4  # token layers
    n_up_layers: int = 1  # byte layers after the middle
    attention_window: int = 8  # a byte layer sees this many bytes, including the current one
    # boundaries
    downsample_rate_target: float = 1 / 5  # tokens per byte
    policy_window: int = 1  # w, eq. 21: each decision sees this many earlier decisions
    policy_scale: float = 16.0  # S; eq. 22 calls it D
    policy_softcap: float = 5.0  # eq. 23: keeps p between 0.7% and 99.3%, in training only
    # loss
    gamma: float = 0.97  # discount of later rewards, eq. 16; larger looks further ahead, with noise
    lambda_pi: float = 1e-2  # weight of the policy loss, eq. 27
    lambda_target: float = 1e-2  # weight of L_tgt, which keeps the rate near its target
    lambda_early: float = 1e-1  # weight of the early exit's loss
    # optimizer
    training_bytes: int = 4_000_000  # length of the run
    effective_batch_size: int = 16  # rows in a training step, over all processes and micro-batches
    batch_size: int = 16  # rows in a micro-batch; eq. 17 and 24 average over those of all processes
    learning_rate: float = 3e-3  # peak, reached after the warm-up; of all but the next two
    muon_learning_rate: float = 6e-3  # peak for the blocks' matrices, by Muon; 0: all by AdamW
    policy_learning_rate: float = 0.06  # peak for its matrix, whose output is divided by S
    cosine: bool = False  # True: they fall to 0 along a cosine, as in the paper; False: linearly
    warmup_bytes: int = 200_000  # linear warm-up
    weight_decay: float = 0.3  # of matrices, except the policy's
    grad_clip: float = 1.0  # maximum gradient norm
    # log
    log_interval: int = 40  # training steps between log lines
    eval_interval: int = 125  # training steps between evaluations, each followed by a checkpoint
    eval_rows: int = 512  # validation rows, the same ones every time
    # machine
    device: str = "auto"  # "auto", "cpu", "cuda" or "mps"
    dtype: str = "auto"  # "auto", "float32", "bfloat16" or "float16" (scaled; not on "mps")
    compile: bool = True  # torch.compile the model
    seed: int = 1337  # of the weights, the order of rows and the draws


# ---- Losses. Log-likelihoods are in nats; logp, early_logp, l and a are (B, N).
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
    """The total loss, and its terms for the log: a dictionary of scalar tensors by name.

    In eq. 11 the gradient of the expected log-likelihood (eq. 10) has two parts. -grad L_auto
    estimates eq. 12 per byte: better predictions with the boundaries as they are. -grad L_pi
    estimates eq. 13 per byte: better boundaries. If gamma is 1, its mean over draws is eq. 13
    times 1 - 1 / n, because each of the n rows in eq. 17's mean is also in its own baseline.

    All terms are means over bytes, as in the authors' code of June 2025 (which has a quadratic loss
    of the rate in place of eq. 24). The paper writes eq. 18, 25 and 26 as sums over the N positions
    of a row, but eq. 24 as a mean. So beside the others, L_tgt weighs N times as much here as in
    eq. 27 as printed.
    """
    L_auto = -logp.mean()  # eq. 25
    L_early = -early_logp.mean()  # eq. 26
    R = (logp - early_logp).detach()  # eq. 15
    G = discounted_return(R, hp.gamma)  # eq. 16
    A = G - mean_over_processes(G.mean(0))  # eq. 17
    negative_log_pi = F.binary_cross_entropy_with_logits(l, a.float(), reduction="none")
    L_pi = (negative_log_pi * A)[:, 1:].sum() / l.numel()  # eq. 18; position 0 is forced
    # mean l needs no mean over processes, since gradients are averaged. Position 0 counts here,
    # with the policy's own p instead of the forced 1.
    mean_p = mean_over_processes(l.detach().sigmoid().mean())
    L_tgt = l.mean() * (mean_p - hp.downsample_rate_target)  # eq. 24
    L = L_auto + hp.lambda_early * L_early  # eq. 27, and the next line
    L = L + hp.lambda_pi * L_pi + hp.lambda_target * L_tgt
    # how much of the return's variance the two baselines, eq. 15 and 17, remove
    removed = 1 - A.var() / discounted_return(logp.detach(), hp.gamma).var()
    terms = {"auto": L_auto, "early": L_early, "pi": L_pi, "target": L_tgt,
             "variance_removed": removed}
    return L, terms


# ---- The training step.
def learning_rate_fraction(bytes_seen, end, hp):
    """The fraction of the peak learning rates, for a run that ends after `end` bytes."""
    if bytes_seen < hp.warmup_bytes:
        return bytes_seen / hp.warmup_bytes
    fraction = (end - bytes_seen) / (end - hp.warmup_bytes)
    if hp.cosine:
        fraction = (1 - math.cos(math.pi * fraction)) / 2
    return fraction


def training_step(model, batches, optimizer, fraction, scaler, autocast, hp):
    """One training step, at this fraction of the peak learning rates.

    Returns what to log, scalar tensors by name that are means over the micro-batches, and the
    gradient's norm.
    """
    target = torch.tensor(hp.downsample_rate_target)
    logged = {}
    for x, y, u in batches:
        with autocast:
            logp, early_logp, l, a = model(x, y, u)
        system_losses = getattr(model, "losses", losses)  # other systems bring their own
        L, terms = system_losses(logp, early_logp, l, a, hp)
        scaler.scale(L / len(batches)).backward()
        p = l.detach().sigmoid()
        terms["bpb"] = terms["auto"] / math.log(2)
        terms["rate"] = a.float().mean()
        # the mean of p (1 - p), relative to that of p = target; it can exceed 1
        terms["undecided"] = (p * (1 - p)).mean() / (target * (1 - target))
        for name, z in terms.items():
            logged[name] = logged.get(name, 0) + z.detach() / len(batches)
    for parameter in model.parameters():
        if parameter.grad is not None:
            mean_over_processes(parameter.grad)
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), hp.grad_clip).item()
    # the scale is 1 without float16; with it, it starts at 65,536 and each overflow halves it
    if not math.isfinite(grad_norm) and scaler.get_scale() <= 1:
        raise UserError("the gradient is not finite; use smaller learning rates")
    for group in optimizer.param_groups:
        peak = group.setdefault("peak", group["lr"])  # at the first step lr is make_optimizer's
        group["lr"] = peak * fraction
    scaler.step(optimizer)  # nothing, after an overflow of float16
    scaler.update()  # float16: halves the scale after an overflow
    model.zero_grad()
    return logged, grad_norm


# ---- Data order: which rows a training step reads, and the uniforms of its draws.
@lru_cache(2)
def row_order(seed, epoch, n):
    """A random permutation of n rows, another one for every epoch."""
    return np.random.default_rng([seed, epoch, 0]).permutation(n)


def micro_batches(shards, first_row, rows, batch_size, seed, rank, world, device):
    """The run's next `rows` rows, from number first_row on: this process's share of them.

    A list of micro-batches (x, y, u), each (batch_size, N). y is a row; x is <bos> and the row
    without its last byte; u are uniforms. What all processes together read does not depend on how
    many they are.
    """
    shard_rows, N = shards[0].shape  # all shards but the last have so many rows
    n = sum(map(len, shards))
    y = []
    for i in range(first_row + rank, first_row + rows, world):
        number = row_order(seed, i // n, n)[i % n]
        y.append(shards[number // shard_rows][number % shard_rows])
    y = torch.from_numpy(np.stack(y)).to(device).long()
    x = F.pad(y[:, :-1], (1, 0), value=BOS)
    u = np.random.default_rng([seed, first_row, 1]).random((rows, N), np.float32)
    u = torch.from_numpy(u[rank::world]).to(device)
    return list(zip(x.split(batch_size), y.split(batch_size), u.split(batch_size)))


# ---- Evaluation.
def evaluate(model, shards, rows, batch_size, autocast):
    """Bits per byte (val_bpb) and tokens per byte (val_rate), and what the model read.

    Rows and uniforms are the same every time. What was read is x, a and p (rows, N), on the CPU.
    Gradients may stay on: without them, torch.compile would compile every layer a second time.
    """
    rows = min(rows, sum(map(len, shards)))
    device = model.embedding.weight.device
    nats = 0
    read = []
    model.eval()
    for x, y, u in micro_batches(shards, 0, rows, batch_size, 0, 0, 1, device):
        with autocast:
            logp, _, l, a = model(x, y, u)
        nats -= logp.sum().item()
        read.append((x, a, l.detach().sigmoid()))
    model.train()
    x, a, p = (torch.cat(z).cpu() for z in zip(*read))
    metrics = {"val_bpb": nats / math.log(2) / x.numel(), "val_rate": a.sum().item() / a.numel()}
    return metrics, x, a, p


def share_outside_words(x, a):
    """The fraction of tokens whose last character is not in a word (in_word); x, a (rows, N).

    A token may end at any of a character's bytes; two in the same character count as one.
    """
    x, a = (z[:, 1:].flatten().tolist() for z in (x, a))  # without <bos>
    outside = [not in_word(text) for text, end, _ in characters(zip(x, a, a)) if end]
    return sum(outside) / max(len(outside), 1)


# ---- Set-up.
def read_hyperparameters(argv):
    """The run's hyperparameters, and the checkpoint that it continues or begins with, or {}."""
    chosen = read_command_line(argv, Hyperparameters)
    hp = Hyperparameters(**chosen)
    checkpoint = Path(hp.out_dir, "ckpt.pt")
    saved = {}
    if hp.resume or hp.init_from:
        saved = read_checkpoint(checkpoint if hp.resume else hp.init_from)
        old = saved["config"]
        vars(hp).update(old | chosen | {"out_dir": hp.out_dir, "resume": hp.resume})
        for key in sorted(chosen.keys() - {"out_dir", "resume", "init_from"}):
            if RANK == 0 and chosen[key] != old.get(key):
                say(f"{key} was {old.get(key)!r} and is now {chosen[key]!r}")
    if checkpoint.exists() and not hp.resume:
        raise UserError(f"{checkpoint} exists; continue it with --resume=True, or use another "
                        "--out_dir")
    check(hp, WORLD_SIZE)
    return hp, saved


def open_data(hp, saved):
    """The shards of both splits. The default data is made if it does not exist."""
    meta = Path(hp.data, "meta.json")
    if RANK == 0 and hp.data == Hyperparameters.data and not meta.exists():
        prepare.main([])
    if WORLD_SIZE > 1:
        dist.barrier()  # the others wait for the data
        mine = saved.get("step"), meta.read_bytes() if meta.exists() else None
        everyones = [None] * WORLD_SIZE
        dist.all_gather_object(everyones, mine)
        if everyones.count(mine) < WORLD_SIZE:
            dist.barrier()  # torchrun kills all when one exits; this lets others say so too
            raise UserError("the processes see different checkpoints or data; with several nodes, "
                            "put out_dir and data on a disk that all of them share")
    return [prepare.open_shards(hp.data, split, hp.seq_len) for split in ("train", "val")]


def compile_model(model, **options):
    """Compiles the parts of the model in place. Layers of one kind share their compiled code."""
    torch._dynamo.config.specialize_float = True  # soft-caps become constants in dynamic graphs
    for part in model.modules():
        if isinstance(part, (Block, Policy)):
            part.compile(dynamic=part in model.middle, **options)  # the number of tokens varies
        if isinstance(part, Head):
            part.logp = torch.compile(part.logp, dynamic=False, **options)


def make_optimizer(model, hp, dtype):
    """An optimizer of all parameters, whose learning rates are the peaks of the schedule.

    Muon trains the blocks' matrices, with products in the dtype, and AdamW trains the rest.
    """
    vectors, policy, blocks, others = [], [], [], []
    for name, p in model.named_parameters():
        if p.dim() < 2:
            vectors.append(p)
        elif name.startswith("policy."):
            policy.append(p)
        elif hp.muon_learning_rate and name.startswith(("down.", "middle.", "up.")):
            blocks.append(p)
        else:
            others.append(p)
    lr, decay = hp.learning_rate, hp.weight_decay
    groups = [
        {"params": vectors, "lr": lr, "weight_decay": 0},
        {"params": policy, "lr": hp.policy_learning_rate, "weight_decay": 0},
        {"params": blocks, "lr": hp.muon_learning_rate, "weight_decay": decay, "muon": True},
        {"params": others, "lr": lr, "weight_decay": decay}]
    return MuonAdamW(groups, getattr(torch, dtype))


def load_optimizer(optimizer, scaler, saved, hp):
    """Loads the optimizer's state and the scaler's, but keeps the settings, which flags change."""
    was_muon = saved["config"]["muon_learning_rate"] > 0
    if "optimizer_state" not in saved or was_muon != (hp.muon_learning_rate > 0):
        raise UserError(f"{hp.out_dir}/ckpt.pt does not fit the optimizer; another version of "
                        "train.py wrote it, or muon_learning_rate became or stopped being 0")
    optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["optimizer_state"]})
    if saved["scaler"]:  # the saved run used float16
        scaler.load_state_dict(saved["scaler"])


# ---- The loop.
def write_record(log, record):
    """Adds a line to log.jsonl. JSON has no NaN or infinity; they become null."""
    for key, value in record.items():
        if isinstance(value, float) and not math.isfinite(value):
            record[key] = None
    try:
        print(json.dumps(record), file=log)
    except OSError as error:
        raise UserError(f"cannot write {log.name}: {error}") from error


def train(hp, saved):
    """Trains. saved is the checkpoint to continue, or the one to take the weights from, or {}."""
    device, dtype = device_and_dtype(hp.device, hp.dtype)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    autocast = set_up_torch(device, dtype)
    train_shards, val_shards = open_data(hp, saved)

    torch.manual_seed(hp.seed)
    model = make_model(hp)
    data_hash = hashlib.sha256(Path(hp.data, "meta.json").read_bytes()).hexdigest()
    checkpoint = Path(hp.out_dir, "ckpt.pt")
    if saved:
        load_weights(model, saved, checkpoint if hp.resume else hp.init_from)
    model.to(device)
    compiled = hp.compile and device != "mps"
    if compiled:
        compile_model(model)
    optimizer = make_optimizer(model, hp, dtype)
    scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
    step = bytes_seen = log_bytes = 0
    if hp.resume:
        load_optimizer(optimizer, scaler, saved, hp)
        step, bytes_seen, log_bytes = saved["step"], saved["bytes_seen"], saved["log_bytes"]
    first_step = step
    step_bytes = hp.effective_batch_size * hp.seq_len
    end = bytes_seen + math.ceil((hp.training_bytes - bytes_seen) / step_bytes) * step_bytes
    if RANK == 0:
        log = checkpoint.with_name("log.jsonl").open("a", buffering=1)
        log.truncate(min(log.tell(), log_bytes))  # drop lines after the checkpoint
        held_out = hashlib.sha256(np.concatenate(val_shards)).hexdigest()
        write_record(log, versions(device, dtype) | {
            "held_out": held_out, "hyperparameters": vars(hp)})
        parameters = sum(p.numel() for p in model.parameters())
        say(f"{parameters:,} parameters{'; compiling may take a minute' if compiled else ''}")
        if hp.resume and saved["config"]["training_bytes"] <= bytes_seen < end:
            say("the learning rates had reached 0; for the added bytes they rise again")
        if hp.resume and saved.get("data_hash", data_hash) != data_hash:
            say(f"data: {hp.data} has changed since the checkpoint")
    saved.clear()  # frees the memory

    seconds = []  # of each training step since the last log line
    while True:
        finished = bytes_seen >= end
        stopping = torch.tensor(float(len(stop_signals)), device=device)
        stopping = mean_over_processes(stopping).item() > 0
        evaluating = finished or step % hp.eval_interval == 0
        # boundaries form early
        evaluating |= step in (hp.eval_interval // 4, hp.eval_interval // 2)
        # a resumed run does not evaluate the step that it starts from
        if RANK == 0 and evaluating and (step > first_step or not hp.resume):
            # before the first step nothing is compiled, so that the first text comes at once
            stance = "default" if step else "force_eager"
            with torch.compiler.set_stance(stance), torch.set_grad_enabled(step > 0):
                metrics, x, a, p = evaluate(
                    model, val_shards, hp.eval_rows, hp.batch_size, autocast)
            if not math.isfinite(metrics["val_bpb"]):
                raise UserError("the validation loss is not finite; use smaller learning rates")
            metrics["outside"] = share_outside_words(x, a)
            line = list(zip(*(z[0, 1:161].tolist() for z in (x, a, p))))
            write_record(log, {"step": step, "bytes": bytes_seen, **metrics, "line": line})
            say(f"step {step} val {metrics['val_bpb']:.3f} bits/byte, rate "
                f"{metrics['val_rate']:.3f} | {metrics['outside']:.0%} of tokens end on a "
                "space or punctuation")
            say("".join(marked(line[:80])).replace("\n", "⏎"))
        if RANK == 0 and (stopping or evaluating and step > first_step):
            state = optimizer.state_dict()["state"]
            save_checkpoint(checkpoint, {
                "model": model.state_dict(), "optimizer_state": state,
                "scaler": scaler.state_dict(), "config": vars(hp), "data_hash": data_hash,
                "step": step, "bytes_seen": bytes_seen, "log_bytes": os.path.getsize(log.name)})
        if finished or stopping:
            break

        started = time.perf_counter()
        step += 1
        torch.manual_seed(hash((hp.seed, step, RANK)))  # for layers you add, such as dropout
        batches = micro_batches(
            train_shards, bytes_seen // hp.seq_len, hp.effective_batch_size, hp.batch_size, hp.seed,
            RANK, WORLD_SIZE, device)
        # the schedule's value in the middle of the step
        fraction = learning_rate_fraction(bytes_seen + step_bytes / 2, end, hp)
        logged, grad_norm = training_step(
            model, batches, optimizer, fraction, scaler, autocast, hp)
        bytes_seen += step_bytes
        seconds.append(time.perf_counter() - started)
        if step % hp.log_interval == 0 or bytes_seen >= end:
            logged = {name: mean_over_processes(z).item() for name, z in logged.items()}
            speed = step_bytes / np.mean(seconds[1:] or seconds)  # the first one may be slow
            seconds.clear()
            if RANK == 0:
                minutes = (end - bytes_seen) / speed / 60
                write_record(log, {
                    "step": step, "bytes": bytes_seen, **logged, "grad_norm": grad_norm,
                    "bytes_per_second": speed, "minutes_left": minutes})
                say(f"step {step} {bytes_seen:,} bytes | {logged['bpb']:.3f} bits/byte, "
                    f"rate {logged['rate']:.3f}, {logged['undecided']:.0%} undecided | "
                    f"{speed:,.0f} bytes/s, {minutes:.1f} min left")

    if RANK == 0 and finished and step == first_step:
        say(f"finished already; to go on, give more than --training_bytes={bytes_seen}")
    elif RANK == 0:
        program = "torchrun ... train.py" if WORLD_SIZE > 1 else "python train.py"
        program = "python sample.py" if finished else f"{program} --resume=True"
        say(f"ended after step {step}; go on with: {program} --out_dir={hp.out_dir}")
    if WORLD_SIZE > 1:
        dist.barrier()  # exiting breaks connections that other processes still use


def main(argv):
    """Trains as train.py does with these arguments. Raises UserError."""
    hp, saved = read_hyperparameters(argv)
    locked = prepare.locked(hp.out_dir) if RANK == 0 else nullcontext()
    with restored(), locked:
        try:
            train(hp, saved)
        except RuntimeError as error:
            if stop_signals:  # Ctrl-C ends the compiler as well, and torch complains
                raise KeyboardInterrupt from None
            if isinstance(error, torch._dynamo.exc.ShortenTraceback):
                from torch._inductor.runtime.cache_dir_utils import cache_dir  # this takes a second
                text = str(error)
                lines = re.findall(".*error: .*", text) or re.findall(".*Error: .*", text)
                raise UserError(f"torch.compile: {[*lines, text][0]}; use --compile=False, or "
                                f"remove the compiler's cache, {cache_dir()}") from error
            raise


if __name__ == "__main__":
    run_program(main)
