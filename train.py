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
import shutil
import signal
import subprocess
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# before torch is imported: the number of tokens varies, which fragments a GPU's memory
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import prepare
from common.check import check
from common.checkpoint import read_checkpoint, write_checkpoint
from common.commandline import UserError, read_command_line, run_program, say
from common.device import device_and_dtype
from common.files import locked
from common.models import load_weights, make_model
from common.muon import MuonAdamW
from common.text import characters, in_word, marked, trimmed
from model import BOS, Block

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # the number of processes; torchrun sets it
RANK = int(os.environ["RANK"]) if WORLD_SIZE > 1 else 0  # this process


# ---- Hyperparameters. ---------------------------------------------------------------------------
@dataclass
class Hyperparameters:
    """The quick run's values. README lists how they differ from the paper's; config/ has those."""

    # files
    data: str = "data/stdlib"  # folder of shards made by prepare.py; this one is made on first use
    out_dir: str = "out"  # receives ckpt.pt and log.jsonl
    resume: str = "False"  # True: continue out_dir's run; auto: continue it if it exists
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
    policy_scale: float = 0.8  # S, eq. 22; a smaller one makes the policy learn faster
    policy_softcap: float = 5.0  # eq. 23: keeps p between 0.7% and 99.3%, in training only
    # loss
    gamma: float = 0.97  # discount of later rewards, eq. 16; larger looks further ahead, with noise
    lambda_pi: float = 1e-2  # weight of the policy loss, eq. 27
    lambda_target: float = 1e-2  # weight of L_tgt, which keeps the rate near its target
    lambda_early: float = 1e-1  # weight of the early exit's loss
    # optimizer
    training_bytes: int = 4_000_000  # length of the run
    effective_batch_size: int = 16  # rows in a training step, over all processes and micro-batches
    batch_size: int = 16  # rows in a process's micro-batch; eq. 17, 24 average all processes' rows
    learning_rate: float = 3e-3  # AdamW's peak, reached after the warm-up
    muon_learning_rate: float = 6e-3  # Muon's, for the layers' matrices; 0: AdamW trains them too
    cosine: bool = False  # True: cosine decay, as in the paper; False: linear decay; both to 0
    warmup_bytes: int = 200_000  # linear warm-up
    weight_decay: float = 0.3  # of matrices, except the policy's
    grad_clip: float = 1.0  # maximum gradient norm
    # log
    log_interval: int = 40  # training steps between log lines
    eval_interval: int = 125  # training steps between evaluations, each followed by a checkpoint
    eval_rows: int = 512  # validation rows, the same ones every time
    # machine
    device: str = "auto"  # "auto", "cpu", "cuda" or "mps"
    dtype: str = "auto"  # "auto", "float32", "bfloat16" or "float16" (scaled loss; no "mps")
    compile: bool = True  # torch.compile the layers
    seed: int = 1  # seeds the weights, the order of rows and the draws


# ---- Losses. Log-likelihoods are in nats, and their means are per byte. -------------------------
def mean_over_processes(z):
    """Overwrites a tensor with its mean over all processes. Every process must call this."""
    if dist.is_initialized():
        dist.all_reduce(z, dist.ReduceOp.AVG)
    return z


def discounted_return(R, gamma):
    """G_i = sum_k gamma^k R_{i+k}, eq. 16; R and G (B, N).

    Our R_i rewards the prediction made at i; it is the paper's R_{i+1}.
    """
    i = torch.arange(R.size(1), device=R.device)
    discount = (gamma ** (i[:, None] - i).float()).tril()  # discount[j, i] = gamma^(j-i), j >= i
    with torch.autocast(R.device.type, enabled=False):
        return R @ discount


def losses(model, out, y, hp):
    """The total loss of a forward pass, and its terms for the log: scalar tensors by name.

    out is what the model returned for a micro-batch, y (B, N) are the next bytes.

    The policy is trained by REINFORCE. -grad L_pi estimates the policy gradient, eq. 13, divided by
    N, and -grad L_auto estimates the gradient for fixed boundaries, eq. 12, divided by N. The mean
    in eq. 17 includes the row itself; that only scales eq. 13 by 1 - 1 / (number of rows).
    gamma < 1 trades some bias for much less variance.
    """
    logp = model.head.logp(out.Z, y)  # (B, N), eq. 6
    early_logp = model.early_head.logp(out.X, y)  # eq. 14
    L_auto = -logp.mean()  # eq. 25
    L_early = -early_logp.mean()  # eq. 26
    R = (logp - early_logp).detach()  # the reward, eq. 15
    G = discounted_return(R, hp.gamma)  # eq. 16
    A = G - mean_over_processes(G.mean(0))  # the advantage, eq. 17
    log_pi = -F.binary_cross_entropy_with_logits(out.l, out.a.float(), reduction="none")
    L_pi = -(log_pi * A)[:, 1:].sum() / A.numel()  # eq. 18, without the forced a_0
    # eq. 24 includes position 0, with p as it was before forcing. mean l needs no mean over
    # processes, because gradients are averaged.
    mean_p = mean_over_processes(out.l.detach().sigmoid().mean())
    L_tgt = out.l.mean() * (mean_p - hp.downsample_rate_target)  # eq. 24
    L = (L_auto + hp.lambda_pi * L_pi + hp.lambda_target * L_tgt
         + hp.lambda_early * L_early)  # eq. 27
    # the fraction of the log-likelihood's variance that the early exit predicts
    explained = 1 - R.var() / logp.detach().var()
    terms = {"auto": L_auto, "early": L_early, "pi": L_pi, "target": L_tgt,
             "explained_variance": explained}
    return L, terms


# ---- The training step. -------------------------------------------------------------------------
def training_step(model, batches, optimizer, fraction, scaler, autocast, hp):
    """One training step, at this fraction of the peak learning rates.

    Returns what to log, scalar tensors by name that are means over the micro-batches, and the
    gradient's norm.
    """
    logged = {}
    for x, y, u in batches:
        with autocast:
            out = model(x, u)
            if hasattr(model, "losses"):  # another system's, in experiments/systems.py
                L, terms = model.losses(out, y, hp)
            else:
                L, terms = losses(model, out, y, hp)
        scaler.scale(L / len(batches)).backward()
        l = out.l.detach()
        terms["bpb"] = terms["auto"] / math.log(2)
        terms["rate"] = out.a.float().mean()
        # entropy is the cross-entropy of p with itself; in bits
        terms["entropy"] = F.binary_cross_entropy_with_logits(l, l.sigmoid()) / math.log(2)
        for name, z in terms.items():
            logged[name] = logged.get(name, 0) + z.detach() / len(batches)
    for parameter in model.parameters():
        if parameter.grad is not None:
            mean_over_processes(parameter.grad)
    scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), hp.grad_clip).item()
    # in float16 the scaler skips such a step and halves its scale, which is 1 in other dtypes
    if not math.isfinite(grad_norm) and scaler.get_scale() <= 1:
        raise UserError("the gradient is not finite; use smaller learning rates")
    for group in optimizer.param_groups:
        peak = group.setdefault("peak", group["lr"])  # at the first step, as make_optimizer set it
        group["lr"] = peak * fraction
    scaler.step(optimizer)
    scaler.update()
    model.zero_grad()
    return logged, grad_norm


def learning_rate_fraction(bytes_seen, end, hp):
    """The fraction of the peak learning rates, for a run that ends after `end` bytes."""
    if bytes_seen < hp.warmup_bytes:
        return bytes_seen / hp.warmup_bytes
    fraction = (end - bytes_seen) / (end - hp.warmup_bytes)
    if hp.cosine:
        fraction = (1 - math.cos(math.pi * fraction)) / 2
    return fraction


def make_optimizer(model, hp, dtype):
    """An optimizer for all parameters, with the schedule's peaks as its learning rates.

    Muon trains the layers' matrices, with matmuls in this dtype, and AdamW trains the rest.
    """
    undecayed, blocks, others = [], [], []
    for name, p in model.named_parameters():
        if p.dim() < 2 or name.startswith("policy."):
            undecayed.append(p)
        elif hp.muon_learning_rate and name.startswith(("down.", "middle.", "up.")):
            blocks.append(p)
        else:
            others.append(p)
    lr, decay = hp.learning_rate, hp.weight_decay
    groups = [
        {"params": undecayed, "lr": lr, "weight_decay": 0},
        {"params": blocks, "lr": hp.muon_learning_rate, "weight_decay": decay, "muon": True},
        {"params": others, "lr": lr, "weight_decay": decay}]
    return MuonAdamW(groups, getattr(torch, dtype))


# ---- Data order: which rows a training step reads, and the uniforms of its draws. ---------------
@lru_cache(2)
def row_order(seed, epoch, n):
    """A random permutation of n rows, another one for every epoch."""
    return np.random.default_rng([seed, epoch, 0]).permutation(n)


def micro_batches(shards, first_row, rows, batch_size, seed=0, rank=0, world=1, device="cpu"):
    """This process's share of the run's next `rows` rows, which begin with number first_row.

    Returns a list of micro-batches (x, y, u), each (batch_size, N); the last may have fewer rows.
    y is a row; x is <bos> and the row without its last byte; u are uniforms. The rows of a training
    step do not depend on the number of processes.
    """
    shard_rows, N = shards[0].shape  # all shards but the last have this many rows
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


# ---- Evaluation. --------------------------------------------------------------------------------
def evaluate(model, shards, hp, autocast):
    """Evaluates the model on the same validation rows every time, and returns a log record.

    val_bpb and val_rate are bits and tokens per byte; outside is the share of tokens that end
    outside words; line is the beginning of the first row, (byte, a, p) for each byte.
    """
    rows = min(hp.eval_rows, sum(map(len, shards)))
    device = model.embedding.weight.device
    nats = 0
    read = []
    model.eval()
    # with torch.no_grad, torch.compile would compile every layer again
    for x, y, u in micro_batches(shards, 0, rows, hp.batch_size, device=device):
        with autocast:
            out = model(x, u)
            nats -= model.head.logp(out.Z, y).sum().item()
        read.append((x, out.a, out.l.detach().sigmoid()))
    model.train()
    x, a, p = [torch.cat(z)[:, 1:].cpu() for z in zip(*read)]  # without <bos>
    tokens = a.sum().item() + rows  # <bos> is one
    line = trimmed([*zip(x[0, :160].tolist(), a[0, :160].tolist(), p[0, :160].tolist())])
    return {"val_bpb": nats / math.log(2) / rows / hp.seq_len,
            "val_rate": tokens / rows / hp.seq_len,
            "outside": share_outside_words(x, a), "line": line}


def share_outside_words(x, a):
    """The fraction of tokens whose last character is not in a word (in_word); x, a (rows, N).

    A token may end at any of a character's bytes; two in the same character count as one.
    """
    x, a = x.flatten().tolist(), a.flatten().tolist()
    steps = zip(x, a, a)  # characters wants p as the third, and only passes it on
    outside = [not in_word(text) for text, end, _ in characters(steps) if end]
    return sum(outside) / max(len(outside), 1)


# ---- The loop. ----------------------------------------------------------------------------------
def train(hp, saved):
    """Trains. saved is the checkpoint to continue, or the one to take the weights from, or {}."""
    device, dtype, autocast = set_up_torch(hp.device, hp.dtype)
    train_shards, val_shards = open_data(hp)
    torch.manual_seed(hp.seed)
    model = make_model(hp)
    path = Path(hp.out_dir, "ckpt.pt")
    if saved:
        load_weights(model, saved, path if hp.resume else hp.init_from)
    model.to(device)
    optimizer = make_optimizer(model, hp, dtype)
    scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
    step = bytes_seen = log_bytes = 0
    if hp.resume:
        load_optimizer(optimizer, scaler, saved, hp)
        step, bytes_seen, log_bytes = saved["step"], saved["bytes_seen"], saved["log_bytes"]
    step_bytes = hp.effective_batch_size * hp.seq_len
    # whole steps from here on; a resumed run's earlier steps may have had another size
    end = bytes_seen + math.ceil((hp.training_bytes - bytes_seen) / step_bytes) * step_bytes

    if RANK == 0:
        log = open_log(path.with_name("log.jsonl"), log_bytes, device, dtype, val_shards, hp)
        say(f"{sum(p.numel() for p in model.parameters()):,} parameters")
        if not hp.resume:
            record = {"step": 0, "bytes": 0, **evaluate(model, val_shards, hp, autocast)}
            write_evaluation(log, record)
    saved.clear()  # frees the memory
    if hp.compile and device != "mps":
        if RANK == 0 and bytes_seen < end:
            say("compiling; the first step may take a minute")
        compile_model(model)  # after the first evaluation, which need not wait for the compiler

    first_step = step
    stopping = False
    seconds = []  # of each training step since the last log line
    while bytes_seen < end and not stopping:
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
                    f"rate {logged['rate']:.3f}, policy entropy {logged['entropy']:.2f} bits | "
                    f"{speed:,.0f} bytes/s, {minutes:.1f} min left")
        # a signal to one process stops all of them
        stopping = mean_over_processes(torch.tensor(float(len(stop_signals)), device=device)) > 0
        evaluating = step % hp.eval_interval == 0 or bytes_seen >= end
        if RANK == 0 and evaluating:
            record = {"step": step, "bytes": bytes_seen}
            write_evaluation(log, record | evaluate(model, val_shards, hp, autocast))
        if RANK == 0 and (evaluating or stopping):
            save_checkpoint(path, model, optimizer, scaler, hp, {
                "step": step, "bytes_seen": bytes_seen, "log_bytes": os.path.getsize(log.name)})

    if RANK == 0 and step == first_step:
        say(f"finished already; to go on, give more than --training_bytes={bytes_seen}")
    elif RANK == 0:
        program = "torchrun ... train.py" if WORLD_SIZE > 1 else "python train.py"
        program = "python sample.py" if bytes_seen >= end else f"{program} --resume=True"
        say(f"ended after step {step}; go on with: {program} --out_dir={hp.out_dir}")
    if WORLD_SIZE > 1:
        dist.barrier()  # exiting breaks connections that other processes still use


# ---- Machinery: checkpoints. --------------------------------------------------------------------
def save_checkpoint(path, model, optimizer, scaler, hp, progress):
    write_checkpoint(path, {
        "model": model.state_dict(), "optimizer": optimizer.state_dict()["state"],
        "scaler": scaler.state_dict(), "config": vars(hp), **progress})


def load_optimizer(optimizer, scaler, saved, hp):
    """Loads the optimizer's state and the scaler's, but keeps the settings, which flags change."""
    if (saved["config"]["muon_learning_rate"] > 0) != (hp.muon_learning_rate > 0):
        raise UserError("muon_learning_rate cannot become or stop being 0 in a run")
    optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["optimizer"]})
    if saved["scaler"]:  # the saved run used float16
        scaler.load_state_dict(saved["scaler"])


# ---- Machinery: the log. ------------------------------------------------------------------------
def open_log(path, length, device, dtype, val_shards, hp):
    """Opens log.jsonl after its first `length` bytes, and writes a header about the run."""
    # only training steps have "bpb"; a log without any may be overwritten
    if not hp.resume and path.exists() and '"bpb": ' in path.read_text():
        raise UserError(f"{path} is the log of another run; remove it, or use another --out_dir")
    log = path.open("a", buffering=1)
    log.truncate(min(log.tell(), length))  # drop lines after the checkpoint
    commit = ""  # outside of git
    if shutil.which("git"):
        command = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty",
                   "--exclude=*"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    write_record(log, {
        "commit": commit, "torch": torch.__version__, "device": device, "dtype": dtype,
        "held_out": hashlib.sha256(np.concatenate(val_shards)).hexdigest(),
        "hyperparameters": vars(hp)})
    return log


def write_record(log, record):
    """Adds a line to log.jsonl. JSON has no NaN or infinity; they become null."""
    for key, value in record.items():
        if isinstance(value, float) and not math.isfinite(value):
            record[key] = None
    try:
        print(json.dumps(record), file=log)
    except OSError as error:
        raise UserError(f"cannot write {log.name}: {error}") from error


def write_evaluation(log, record):
    """Logs and prints an evaluation. UserError if the model has diverged."""
    if not math.isfinite(record["val_bpb"]):
        raise UserError("the validation loss is not finite; use smaller learning rates")
    write_record(log, record)
    say(f"step {record['step']} val {record['val_bpb']:.3f} bits/byte, rate "
        f"{record['val_rate']:.3f} | {record['outside']:.0%} of tokens end on a space or "
        "punctuation")
    say("".join(marked(trimmed(record["line"][:80]))).replace("\n", "⏎"))


# ---- Machinery: set-up. -------------------------------------------------------------------------
def read_hyperparameters(argv):
    """The run's hyperparameters, and the checkpoint that it continues or begins with, or {}."""
    chosen = read_command_line(argv, Hyperparameters)
    hp = Hyperparameters(**chosen)
    path = Path(hp.out_dir, "ckpt.pt")
    if hp.resume not in ("True", "False", "auto"):
        raise UserError(f"resume={hp.resume} must be True, False or auto")
    hp.resume = hp.resume == "True" or hp.resume == "auto" and path.exists()
    saved = {}
    if hp.resume or hp.init_from:
        saved = read_checkpoint(path if hp.resume else hp.init_from)
        own = {"out_dir": hp.out_dir, "resume": hp.resume}  # these are never inherited
        vars(hp).update(saved["config"] | chosen | own)
        for name in sorted(chosen.keys() - {"out_dir", "resume", "init_from"}):
            old = saved["config"].get(name)
            if RANK == 0 and chosen[name] != old:
                say(f"{name} was {old!r} and is now {chosen[name]!r}")
    if path.exists() and not hp.resume:
        raise UserError(f"{path} exists; continue it with --resume=True, or use another --out_dir")
    check(hp, WORLD_SIZE)
    if RANK == 0 and hp.warmup_bytes >= hp.training_bytes:
        say(f"warmup_bytes={hp.warmup_bytes} is not below training_bytes={hp.training_bytes}, so "
            "the learning rates do not reach their peaks")
    return hp, saved


def set_up_torch(device, dtype):
    """Sets up torch and its processes. Returns device, dtype and the autocast context of passes."""
    device, dtype = device_and_dtype(device, dtype)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if WORLD_SIZE > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(device == "cpu")  # resumed runs repeat to the last bit
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would fill each new tensor
    autocast = torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32")
    return device, dtype, autocast


def open_data(hp):
    """The shards of both splits. The default data is made if it does not exist."""
    if RANK == 0 and hp.data == Hyperparameters.data and not Path(hp.data, "meta.json").exists():
        prepare.main([])
    if WORLD_SIZE > 1:
        dist.barrier()  # the others wait for the data
    return [prepare.open_shards(hp.data, split, hp.seq_len) for split in ("train", "val")]


def compile_model(model, **options):
    """Compiles the layers in place. Those of one kind share their compiled code.

    For the policy and the heads, the compiler takes longer than it saves in the quick run.
    """
    torch._dynamo.config.specialize_float = True  # compile soft-caps as constants
    for part in model.modules():
        if isinstance(part, Block):
            part.compile(dynamic=part in model.middle, **options)  # the number of tokens varies


stop_signals = []  # Ctrl-C, schedulers and closed terminals add to it: the run saves and ends


def catch_signals():
    """Makes Ctrl-C, SIGTERM and SIGHUP add to stop_signals. The second of a kind kills."""
    def request_stop(number, _):
        stop_signals.append(number)
        signal.signal(number, signal.SIG_DFL)

    stop_signals.clear()
    for name in {"SIGINT", "SIGTERM", "SIGHUP"} & {*dir(signal)}:  # Windows has no SIGHUP
        number = getattr(signal, name)
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, request_stop)


def main(argv):
    """Trains as train.py does with these arguments. Returns the exit code. Raises UserError."""
    hp, saved = read_hyperparameters(argv)
    catch_signals()
    with locked(hp.out_dir) if RANK == 0 else nullcontext():
        try:
            train(hp, saved)
        except RuntimeError as error:
            if stop_signals:  # Ctrl-C ends the compiler as well, and torch complains
                raise KeyboardInterrupt from None
            if not isinstance(error, torch._dynamo.exc.ShortenTraceback):
                raise
            text = str(error)
            lines = [*re.findall(".*error: .*", text), *re.findall(".*Error: .*", text), text]
            raise UserError(f"torch.compile: {lines[0]}; use --compile=False") from error
    return 128 + stop_signals[0] if stop_signals else 0


if __name__ == "__main__":
    run_program(main)
