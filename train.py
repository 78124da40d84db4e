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
import re
import signal
import threading
import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
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
    UserError, characters, check, device_and_dtype, load_weights, marked, read_checkpoint,
    read_command_line, run, save_checkpoint, say)
from model import BOS, Block, Head, Policy, make_model

RANK = int(os.environ.get("RANK", 0))  # this process and the number of all; torchrun sets them
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


# ---- Hyperparameters. ---------------------------------------------------------------------------
@dataclass
class Hyperparameters:
    """The quick run's values; config/ holds the paper's. The quick run differs from the paper:

    1. policy_window is 1, not 8 (the paper has it as an ablation), and gamma is 0.97, not 0.99
    2. the policy has a learning rate of its own
    3. Muon instead of AdamW trains the matrices of the blocks, and the weight decay is 0.3
    4. the learning rates fall linearly, not along a cosine
    5. the byte layers see 8 bytes, not 64

    pruning_bytes, which is off here, is not in the paper either: see target_rate.
    What the paper leaves open: experiments/README.md.
    """

    # files
    data: str = "data/stdlib"  # folder of shards made by prepare.py; this one is made on first use
    out_dir: str = "out"  # receives ckpt.pt and log.jsonl
    resume: bool = False  # continue from out_dir/ckpt.pt; flags override its hyperparameters
    init_from: str = ""  # or begin with the weights and hyperparameters of another run's ckpt.pt
    # model
    system: str = "learned"  # or uniform, hnet, ..., or a run's ckpt.pt: experiments/systems.py
    seq_len: int = 256  # bytes in a row; must divide the row length given to prepare.py
    embedding_dim: int = 128  # D, for bytes and tokens alike
    num_heads: int = 2  # attention heads in every layer
    n_down_layers: int = 2  # byte layers before the middle
    n_mid_layers: int = 4  # token layers
    n_up_layers: int = 1  # byte layers after the middle
    attention_window: int = 8  # a byte layer sees this many bytes, including the current one
    # boundaries
    downsample_rate_target: float = 1 / 5  # tokens per byte
    pruning_bytes: int = 0  # the target falls to that rate over this many bytes; 0: it is constant
    downsample_rate_start: float = 0.8  # where it starts to fall; only used with pruning_bytes
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
    batch_size: int = 16  # rows in a micro-batch; eq. 17 and 24 average over it
    learning_rate: float = 3e-3  # peak, reached after the warm-up; of all but the next two
    muon_learning_rate: float = 6e-3  # peak for the blocks' matrices, by Muon; 0: all by AdamW
    policy_learning_rate: float = 0.06  # peak for the policy; large, since its output is over S
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


RULES = """\
seq_len > 0
num_heads > 0
training_bytes > 0
batch_size > 0
effective_batch_size > 0
embedding_dim % (2 * num_heads) == 0  # RoPE rotates pairs
attention_window > 0
0.5 / seq_len < downsample_rate_target < 1  # so that uniform has a token
0 < downsample_rate_start < 1
0 <= policy_window <= 12  # the draw needs 2^policy_window numbers per byte
policy_softcap > 0
0 <= gamma <= 1
lambda_early > 0 or system != 'learned'  # trains the baseline of eq. 15
batch_size * processes > 1 or system != 'learned'  # eq. 17 compares rows
effective_batch_size % (batch_size * processes) == 0  # e.g. halve batch_size for two processes
grad_clip > 0
log_interval > 0
eval_interval > 0
eval_rows > 0
0 <= seed < 2**63
dtype in ('auto', 'float32', 'bfloat16', 'float16')"""

VAL_LINE = ("step {step} val {val_bpb:.3f} bits/byte, rate {val_rate:.3f} | "
            "{ends_outside:.0%} of tokens end on a space or punctuation")
# undecided: the mean of p (1 - p), relative to that of p = target; it can exceed 1
LOG_LINE = ("step {step} {bytes:,} bytes | {bpb:.3f} bits/byte, rate {rate:.3f}, "
            "{undecided:.0%} undecided | {bytes_per_second:,.0f} bytes/s, "
            "{minutes_left:.1f} min left")


# ---- Schedules: functions of the bytes read so far.
def learning_rate_fraction(bytes_seen, end, hp):
    """The fraction of the peak learning rates, for a run that ends after `end` bytes."""
    if bytes_seen < hp.warmup_bytes:
        return bytes_seen / hp.warmup_bytes
    fraction = (end - bytes_seen) / (end - hp.warmup_bytes)
    if hp.cosine:
        fraction = (1 - math.cos(math.pi * fraction)) / 2
    return fraction


def target_rate(bytes_seen, hp):
    """The target of eq. 22 and 24, in tokens per byte.

    It may start high and fall. The middle then learns with a token on nearly every byte, and the
    policy learns which tokens it can lose. (This is not in the paper.)
    """
    if bytes_seen >= hp.pruning_bytes:
        return hp.downsample_rate_target
    left = 1 - bytes_seen / hp.pruning_bytes
    return hp.downsample_rate_target + (hp.downsample_rate_start - hp.downsample_rate_target) * left


# ---- Losses. Log-likelihoods are in nats; logp, early_logp, l and a are (B, N). Where the paper
# sums over positions (eq. 18, 25, 26), these are means, as in the authors' code.
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


def losses(logp, early_logp, l, a, target, hp):
    """The total loss, and its terms for the log: a dictionary of scalar tensors by name.

    target is the rate that eq. 24 aims at. The gradient of eq. 10 is the sum, eq. 11, of eq. 12 and
    eq. 13. -grad L_auto estimates eq. 12. If gamma is 1, -grad L_pi estimates eq. 13 times
    1 - 1 / n, because the mean over n rows in eq. 17 includes the row itself. All per byte.
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
    L_tgt = l.mean() * (mean_p - target)  # eq. 24
    L = L_auto + hp.lambda_early * L_early  # eq. 27, and the next line
    L = L + hp.lambda_pi * L_pi + hp.lambda_target * L_tgt
    terms = {
        "auto": L_auto, "early": L_early, "pi": L_pi, "target": L_tgt, "advantage_std": A.std()}
    return L, terms


# ---- The optimizer: AdamW, and Muon (Jordan et al., 2024) for the matrices of the blocks. See
# https://kellerjordan.github.io/posts/muon. Muon is not part of the paper's method.
def make_optimizer(model, hp):
    """An optimizer of all parameters, in four groups; some may be empty.

    A group's "peak" is its peak learning rate, from which training_step sets its "lr".
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
        {"params": vectors, "peak": lr, "weight_decay": 0, "muon": False},
        {"params": policy, "peak": hp.policy_learning_rate, "weight_decay": 0, "muon": False},
        {"params": blocks, "peak": hp.muon_learning_rate, "weight_decay": decay, "muon": True},
        {"params": others, "peak": lr, "weight_decay": decay, "muon": False}]
    return MuonAdamW(groups, fused=True)  # torch's defaults are the paper's betas


def orthogonalized(matrices):
    """Brings the singular values of each matrix in (n, rows, columns) near 1.

    It takes five Newton-Schulz iterations.
    """
    if matrices.size(1) > matrices.size(2):
        return orthogonalized(matrices.mT).mT  # so that the gram matrices are small
    z = F.normalize(matrices, dim=(1, 2), eps=1e-7)
    for _ in range(5):
        gram = z @ z.mT
        gram = torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
        z = torch.baddbmm(z, gram, z, beta=3.4445)  # 3.4445 z + gram z
    return z


class MuonAdamW(torch.optim.AdamW):
    """Muon steps along the orthogonalized momentum of matrices. All else is torch's AdamW.

    A step removes the gradients of Muon's matrices. Their update is that of torch.optim.Muon with
    adjust_lr_fn="match_rms_adamw". We do not use that class: it always computes in bfloat16, which
    is slow on a T4 and twenty times slower on CPUs without AVX512, and it updates one matrix at a
    time.
    """

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if group["muon"]:
                self.muon_step(group)
        super().step()

    def muon_step(self, group):
        by_shape = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:  # it is None if p is frozen or was not used
                by_shape[p.shape].append(p)
        for (rows, columns), matrices in by_shape.items():
            for p in matrices:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                    self.state[p]["step"] = torch.zeros(())  # AdamW loads no state without it
            grads = torch.stack([p.grad for p in matrices])
            momenta = [self.state[p]["momentum"] for p in matrices]
            # a GPU would take longer to start a kernel for each matrix than to run it
            torch._foreach_lerp_(momenta, grads.unbind(), 0.05)
            nesterov = grads.lerp(torch.stack(momenta), 0.95)
            update = orthogonalized(nesterov).float()
            size = 0.2 * max(rows, columns) ** 0.5
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(matrices, update.unbind(), alpha=group["lr"] * size)
            for p in matrices:
                p.grad = None  # AdamW skips it


# ---- Data order: which rows a training step reads, and the uniforms of its draws.
@lru_cache(2)
def row_order(seed, epoch, n):
    """A random permutation of n rows, another one for every epoch."""
    return np.random.default_rng([seed, epoch, 0]).permutation(n)


def micro_batches(shards, first_row, hp, rank, world, device):
    """This process's micro-batches of the training step that starts at row first_row of the run.

    A list of (x, y, u), each (B, N): <bos> and all but the last byte of a row, the row, uniforms.
    The rows and uniforms of a step, over all processes together, do not depend on their number.
    """
    shard_rows = len(shards[0])  # in every shard but the last
    n = sum(map(len, shards))
    rows = []
    for i in range(first_row + rank, first_row + hp.effective_batch_size, world):
        number = row_order(hp.seed, i // n, n)[i % n]
        rows.append(shards[number // shard_rows][number % shard_rows])
    y = torch.from_numpy(np.stack(rows)).to(device).long()
    x = F.pad(y[:, :-1], (1, 0), value=BOS)
    generator = np.random.default_rng([hp.seed, first_row, 1])
    u = generator.random((hp.effective_batch_size, hp.seq_len), np.float32)
    u = torch.from_numpy(u[rank::world]).to(device)
    B = hp.batch_size
    return list(zip(x.split(B), y.split(B), u.split(B)))


# ---- The training step.
def compile_model(model, **options):
    """Compiles the parts of the model in place. Layers of one kind share their compiled code."""
    torch._dynamo.config.specialize_float = True  # soft-caps become constants in dynamic graphs
    for part in model.modules():
        if isinstance(part, (Block, Policy, Head)):
            part.compile(dynamic=part in model.middle, **options)  # the number of tokens varies


def training_step(model, batches, optimizer, fraction, scaler, autocast, hp):
    """One training step, at this fraction of the peak learning rates.

    Returns the terms of the loss, l and a, all of the last micro-batch, and the gradient's norm.
    """
    for x, y, u in batches:
        with autocast:
            logp, early_logp, l, a = model(x, y, u)
        if hp.system == "learned":
            L, terms = losses(logp, early_logp, l, a, model.target, hp)
        else:
            L, terms = model.losses(logp, l, a)
        scaler.scale(L / len(batches)).backward()
    for p in model.parameters():
        if p.grad is not None:
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

    val_bpb is in bits per byte, val_rate in tokens per byte. ends_outside is the fraction of tokens
    whose last character is neither a letter nor a digit. line has (byte, a, p) of a row's bytes.
    """
    rows = min(hp.eval_rows, sum(map(len, shards)))
    fixed = SimpleNamespace(**vars(hp) | {"seed": 0, "effective_batch_size": rows})
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
    outside = [not character.isalnum() for character, a, _ in characters(shown) if a]
    return {
        "val_bpb": nats / math.log(2) / (rows * hp.seq_len),
        "val_rate": tokens / (rows * hp.seq_len),
        "ends_outside": sum(outside) / max(len(outside), 1),
        "line": shown[: min(hp.seq_len - 1, 160)]}


# ---- The program.
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


def averages(terms, l, a, target):
    """The terms of the loss and three more of the last micro-batch: means over all processes."""
    p = l.sigmoid()
    terms = terms | {
        "undecided": (p * (1 - p)).mean() / (target * (1 - target)),
        "rate": a.float().mean(), "bpb": terms["auto"] / math.log(2)}
    return {name: mean_over_processes(z.detach()).item() for name, z in terms.items()}


def read_hyperparameters(argv):
    """The run's hyperparameters, and the checkpoint that it continues or begins with, or {}."""
    chosen = read_command_line(argv, Hyperparameters)
    hp = Hyperparameters(**chosen)
    checkpoint = Path(hp.out_dir, "ckpt.pt")
    saved = {}
    if hp.resume or hp.init_from:
        saved = read_checkpoint(checkpoint if hp.resume else hp.init_from)
        old = saved["config"] | ({} if hp.resume else {"pruning_bytes": 0})  # it has been pruned
        vars(hp).update(old | chosen | {"out_dir": hp.out_dir, "resume": hp.resume})
        for key in sorted(chosen.keys() - {"out_dir", "resume", "init_from"}):
            if RANK == 0 and chosen[key] != old.get(key):
                say(f"{key} was {old.get(key)!r} and is now {chosen[key]!r}")
    if checkpoint.exists() and not hp.resume:
        raise UserError(f"{checkpoint} exists; continue it with --resume=True, or use another "
                        "--out_dir")
    check(vars(hp) | {"processes": WORLD_SIZE}, RULES)
    return hp, saved


def setup(hp, saved):
    """The model, its optimizer, the loss scaler, autocast and the shards of both splits."""
    torch.manual_seed(hp.seed)
    model = make_model(hp)
    if saved:
        load_weights(model, saved, f"{hp.out_dir}/ckpt.pt" if hp.resume else hp.init_from)
        del saved["model"]  # frees the memory

    device, dtype = device_and_dtype(hp.device, hp.dtype)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    autocast = prepare_torch(device, dtype)
    scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
    model.to(device)
    compiled = hp.compile and device != "mps"
    if compiled:
        compile_model(model)

    optimizer = make_optimizer(model, hp)
    if hp.resume:
        if "optimizer_state" not in saved or (
                (saved["config"]["muon_learning_rate"] == 0) != (hp.muon_learning_rate == 0)):
            raise UserError(f"{hp.out_dir}/ckpt.pt does not fit the optimizer; another version of "
                            "train.py wrote it, or muon_learning_rate became or stopped being 0")
        # keeps this run's groups, because flags may have changed their settings
        optimizer.load_state_dict(optimizer.state_dict() | {"state": saved.pop("optimizer_state")})
        if saved["scaler"]:  # the saved run used float16
            scaler.load_state_dict(saved["scaler"])

    meta = Path(hp.data, "meta.json")
    if RANK == 0 and hp.data == Hyperparameters.data and not meta.exists():
        prepare.main([])
    if WORLD_SIZE > 1:
        dist.barrier()  # the others wait for the data
    shards = [prepare.open_shards(hp.data, split, hp.seq_len) for split in ("train", "val")]
    if WORLD_SIZE > 1:
        mine = saved.get("step"), meta.read_bytes()
        everyones = [None] * WORLD_SIZE
        dist.all_gather_object(everyones, mine)
        if everyones.count(mine) < WORLD_SIZE:
            dist.barrier()  # torchrun kills all when one exits; this lets others say so too
            raise UserError("the processes see different checkpoints or data; with several nodes, "
                            "put out_dir and data on a disk that all of them share")
    if RANK == 0:
        note = "; compiling may take a minute" if compiled else ""
        say(f"{sum(p.numel() for p in model.parameters()):,} parameters{note}")
    return model, optimizer, scaler, autocast, *shards


def train(hp, saved):
    """The loop. saved is the checkpoint to continue, or to take the weights from, or {}."""
    model, optimizer, scaler, autocast, train_shards, val_shards = setup(hp, saved)
    device = model.embedding.weight.device
    checkpoint = Path(hp.out_dir, "ckpt.pt")
    if not hp.resume:
        saved = {}  # the weights have been loaded
    step_bytes = hp.effective_batch_size * hp.seq_len
    step = first_step = saved.get("step", 0)
    bytes_seen = saved.get("bytes_seen", 0)
    end = bytes_seen + math.ceil((hp.training_bytes - bytes_seen) / step_bytes) * step_bytes
    if RANK == 0:
        log = checkpoint.with_name("log.jsonl").open("a", buffering=1)
        log.truncate(min(log.tell(), saved.get("log_bytes", 0)))  # drop lines after the checkpoint
        if saved and saved["config"]["training_bytes"] <= bytes_seen < end:
            say("the learning rates had reached 0; for the added bytes they rise again")
    seconds = []  # of each training step since the last log line

    while True:
        model.target.fill_(target_rate(bytes_seen, hp))
        finished = bytes_seen >= end
        stopping = torch.tensor(float(len(stop_signals)), device=device)
        stopping = mean_over_processes(stopping).item() > 0
        evaluating = finished or step % hp.eval_interval == 0
        # boundaries form early
        evaluating |= step in (hp.eval_interval // 4, hp.eval_interval // 2)
        if RANK == 0 and evaluating and (step > first_step or not saved):
            metrics = evaluate(model, val_shards, hp, autocast)
            if not math.isfinite(metrics["val_bpb"]):
                raise UserError("the validation loss is not finite; use smaller learning rates")
            report(log, {"step": step, "bytes": bytes_seen, **metrics}, VAL_LINE)
            say("".join(marked(metrics["line"][:80])).replace("\n", "⏎"))
        if RANK == 0 and (stopping or evaluating and step > first_step):
            state = optimizer.state_dict()["state"]
            save_checkpoint(checkpoint, {
                "model": model.state_dict(), "optimizer_state": state,
                "scaler": scaler.state_dict(), "config": vars(hp), "step": step,
                "bytes_seen": bytes_seen, "log_bytes": os.path.getsize(log.name)})
        if finished or stopping:
            break

        step += 1
        started = time.perf_counter()
        torch.manual_seed(hash((hp.seed, step, RANK)))  # for layers you add, such as dropout
        batches = micro_batches(
            train_shards, bytes_seen // hp.seq_len, hp, RANK, WORLD_SIZE, device)
        fraction = learning_rate_fraction(bytes_seen + step_bytes / 2, end, hp)
        terms, l, a, grad_norm = training_step(
            model, batches, optimizer, fraction, scaler, autocast, hp)
        bytes_seen += step_bytes
        seconds.append(time.perf_counter() - started)
        if step % hp.log_interval == 0 or bytes_seen >= end:
            terms = averages(terms, l, a, model.target)
            speed = step_bytes / np.mean(seconds[1:] or seconds)  # the first one may compile
            seconds.clear()
            if RANK == 0:
                minutes = (end - bytes_seen) / speed / 60
                record = {"step": step, "bytes": bytes_seen, **terms, "grad_norm": grad_norm}
                record |= {"bytes_per_second": speed, "minutes_left": minutes}
                report(log, record, LOG_LINE)

    if RANK == 0 and finished and step == first_step:
        say(f"finished already; to go on, give more than --training_bytes={hp.training_bytes}")
    elif RANK == 0:
        program = "torchrun ... train.py" if WORLD_SIZE > 1 else "python train.py"
        program = "python sample.py" if finished else f"{program} --resume=True"
        say(f"ended after step {step}; go on with: {program} --out_dir={hp.out_dir}")
    if WORLD_SIZE > 1:
        dist.barrier()  # exiting breaks connections that other processes still use


stop_signals = []  # Ctrl-C, schedulers and closed terminals add to it: the run saves and ends


def request_stop(number, _):
    stop_signals.append(number)
    signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C ends the program at once


@contextmanager
def global_settings_restored():
    """Restores torch's global settings and the signals' handlers, for programs that call main."""
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    handlers = {}
    stop_signals.clear()
    if threading.current_thread() is threading.main_thread():  # others may not handle signals
        for name in {"SIGINT", "SIGTERM", "SIGHUP"} & {*dir(signal)}:  # Windows has no SIGHUP
            number = getattr(signal, name)
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                handlers[number] = signal.signal(number, request_stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def main(argv):
    """Trains as train.py does with these arguments. Raises UserError."""
    hp, saved = read_hyperparameters(argv)
    locked = prepare.locked(hp.out_dir) if RANK == 0 else nullcontext()
    with global_settings_restored(), locked:
        try:
            train(hp, saved)
        except RuntimeError as error:
            if stop_signals:  # Ctrl-C ends the compiler as well, and torch complains
                raise KeyboardInterrupt from None
            if isinstance(error, torch._dynamo.exc.ShortenTraceback):
                lines = re.findall(".*error: .*", str(error)) or str(error).splitlines()
                raise UserError(f"torch.compile: {lines[0]}; use --compile=False") from error
            raise


if __name__ == "__main__":
    run(main)
