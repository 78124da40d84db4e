"""
Trains the byte-level language model of model.py, which learns where its tokens end.

    python train.py                                                   the quick run: small model, Python source, laptop
    python train.py config/fineweb_147m.py --out_dir=out-147m         a file overrides the values below, a flag the file
    torchrun --standalone --nproc_per_node=8 train.py config/fineweb_147m.py     one machine, eight GPUs
    python train.py --resume=True                                     goes on from out_dir/ckpt.pt
"""
import functools
import json
import math
import os
import shlex
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from types import NoneType, SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import prepare
from config.command_line import check, fail, parse, read_command_line
from model import BOS, ModelConfig, load_checkpoint, make_model
from prepare import printable
from sample import as_terminal


# ---------------------------------------------------------------------------------------------------------------------
# Hyperparameters. The values are the quick run's; config/ holds the paper's.

# files
data = "data/stdlib"  # folder of shards made by prepare.py; this one is made on first use
out_dir = "out"  # receives ckpt.pt and log.jsonl
resume = False  # go on from out_dir/ckpt.pt, with the hyperparameters it was trained with and the flags given now
# model
seq_len = 256  # bytes in a row; divides the shards' row length
embedding_dim = 128  # D, of bytes and tokens alike
num_heads = 2  # attention heads, of all layers
n_down_layers = 2  # byte layers that read
n_mid_layers = 4  # token layers
n_up_layers = 1  # byte layers that predict
attention_window = 8  # bytes that a byte layer sees
# boundaries
boundaries = "learned"  # or, to compare with, uniform, hnet, ... or another run's ckpt.pt: see experiments/systems.py
downsample_rate_target = 1 / 5  # tokens per byte
policy_window = 1  # w, eq. 21: earlier decisions that a decision sees
policy_scale = 1.5  # S, eq. 22: the smaller, the faster the policy learns
policy_softcap = 5.0  # eq. 23: the decision's logit stays within +- this in training
# loss
num_draws = 2  # K, of each row's boundaries, each judged by how the others fared. 1: the paper's estimator, eq. 15-17
policy_interval = 4  # with more draws than one, every how many steps they are drawn; L_pi and L_tgt count in these steps alone
gamma = 0.99  # discount of later rewards, eq. 16
lambda_pi = 1e-2  # weight of the policy's loss, eq. 27
lambda_target = 1e-2  # weight of L_tgt, which keeps the rate
lambda_early = 1e-1  # weight of the early head's loss; only num_draws=1 has such a head, and none if this is 0
# optimizer: AdamW
training_bytes = 8_000_000  # length of the run
effective_batch_size = 16  # rows in a step, over all processes and accumulation
batch_size = 16  # rows in one forward pass of one process; with num_draws=1 eq. 17 averages over these, of all processes
learning_rate = 3e-3  # reached after warm-up; falls to 0 along a cosine
warmup_bytes = 200_000  # linear warm-up
policy_start_bytes = 500_000  # until then the policy stays at the target: boundaries are random while tokens become useful
weight_decay = 0.01  # of matrices; torch's default
grad_clip = 1.0  # largest gradient norm
# log
log_interval = 20  # steps between lines
eval_interval = 250  # steps between evaluations, each followed by a checkpoint
eval_rows = 512  # validation rows, the same every time
# machine
device = "auto"  # "auto", "cpu", "cuda" or "mps"
dtype = "auto"  # "auto", "float32", "bfloat16" or "float16" (then with a GradScaler)
compile = True  # torch.compile the model
seed = 1337  # of weights, order of rows and draws

DEFAULTS = {k: v for k, v in globals().items() if k.islower() and type(v) in (int, float, bool, str) and not k.startswith("_")}


# ---------------------------------------------------------------------------------------------------------------------
# The losses. logits (B, N, 257), y (B, N); what draws have, l, a, R, G, A, is (K, B, N). Log-likelihoods are in nats.


def batch_mean(z):
    """Mean over dimension 0 and over all processes."""
    z = z.mean(0)
    if dist.is_initialized():
        dist.all_reduce(z)
        z = z / dist.get_world_size()
    return z


def log_likelihood(logits, y):
    """log p(y_i | x, a) (B, N) in nats, of logits (B, N, 257) and y (B, N)."""
    return -F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y)


def discounted_return(R, gamma):
    """G_i = sum_k gamma^k R_{i+k}, eq. 16; R and G (..., N). Doubles the terms summed log2(N) times; no power of gamma is divided by."""
    G, reach = R, 1
    while reach < R.size(-1):
        G = G + gamma**reach * F.pad(G[..., reach:], (0, reach))
        reach *= 2
    return G


def advantage(G):
    """A (K, B, N): the return G (K, B, N) less what other draws had at the same position."""
    K = len(G)
    if K == 1:
        return G - batch_mean(G[0])  # eq. 17: the draws of other rows, and the row's own
    return (G - G.mean(0)) * K / (K - 1)  # the row's other draws: G_k - mean of G_j, j != k


def policy_loss(l, a, A):
    """L_pi, eq. 18: mean of -log pi(a_i) A_i; l, a and A (K, B, N), A without a gradient. Position 0 is forced, not drawn: it has no term."""
    negative_log_pi = F.binary_cross_entropy_with_logits(l, a.float(), reduction="none")
    return (negative_log_pi * A)[..., 1:].sum() / l.numel()


def target_loss(l, target, mean_p):
    """L_tgt, eq. 24: pushes all logits alike, down when the mean probability is above the target, else up."""
    return l.mean() * (mean_p - target)


def losses(logits, early_logits, l, a, y, gamma, target, mean_p=None):
    """L_auto, L_early, L_pi and L_tgt, eq. 15-18 and 24-26, from what Model.forward returned of one draw or of K, and y (B, N). L_auto, of
    the first draw, and L_early, 0 without an early head, are in nats per byte. mean_p is eq. 24's mean of p; where it is not given,
    that of these rows, over all processes."""
    if l.dim() == 2:
        logits, l, a = [logits], l[None], a[None]
    logp = torch.stack([log_likelihood(draw, y) for draw in logits])  # (K, B, N)
    early_logp = log_likelihood(early_logits, y) if early_logits is not None else torch.zeros_like(logp[0])
    R = (logp - early_logp).detach()  # eq. 15
    A = advantage(discounted_return(R, gamma))  # eq. 16-17
    if mean_p is None:
        mean_p = batch_mean(l.detach().sigmoid().mean((0, 2)))
    return -logp[0].mean(), -early_logp.mean(), policy_loss(l, a, A), target_loss(l, target, mean_p)


# ---------------------------------------------------------------------------------------------------------------------
# The loop. h has the hyperparameters above, after configuration files and flags.


def learning_rate_at(bytes_seen, h):
    """Linear warm-up, then a cosine down to 0; by bytes."""
    if bytes_seen < h.warmup_bytes:
        return h.learning_rate * bytes_seen / h.warmup_bytes
    done = (bytes_seen - h.warmup_bytes) / max(h.training_bytes - h.warmup_bytes, 1)
    return h.learning_rate * (1 + math.cos(math.pi * min(done, 1))) / 2


def make_optimizer(model, h):
    """AdamW in three groups: matrices, vectors, which do not decay, and last the policy, which may be held."""
    policy = model.policy.weight
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not policy]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": h.weight_decay}, {"params": vectors, "weight_decay": 0.0},
              {"params": [policy], "weight_decay": h.weight_decay}]
    return torch.optim.AdamW(groups, h.learning_rate, fused=True)  # betas 0.9, 0.999 as in the paper


@torch.no_grad()
def mean_probability(model, passes, autocast):
    """Eq. 24's mean of p over all rows of a step that is cut into passes: encoder and draw once more, before the first of them."""
    means = []
    for x, _, _, u in passes:
        with autocast:
            z = model.read(model.encode(x))[1]
        means.append(model.boundary_logits(z, model.boundaries(z, u)).sigmoid().mean())
    return batch_mean(torch.stack(means))


def backward(net, model, passes, teaching, h, autocast, scaler):
    """Adds up the gradient of eq. 27 over a step's passes, each x, y, a, u; with the policy's part if the step is one that teaches it.
    Returns L_auto, L_early, L_pi, L_tgt, the rate and the decisions' entropy, mean -log pi(a_i) in nats: (6,), of this process."""
    mean_p = mean_probability(model, passes, autocast) if teaching and len(passes) > 1 else None
    terms = []
    for x, y, a, u in passes:
        last = x is passes[-1][0]
        with nullcontext() if last or net is model else net.no_sync():  # processes add their gradients up once a step
            with autocast:
                logits, early_logits, l, a = net(x, a, u)
            L_auto, L_early, L_pi, L_tgt = losses(logits, early_logits, l, a, y, h.gamma, h.downsample_rate_target, mean_p)
            L = L_auto + teaching * (h.lambda_pi * L_pi + h.lambda_target * L_tgt) + h.lambda_early * L_early  # eq. 27
            if h.boundaries != "learned":
                L = L + model.boundary_loss(l, a)
            scaler.scale(L / len(passes)).backward()
        entropy = F.binary_cross_entropy_with_logits(l[..., 1:], a[..., 1:].float())
        terms.append(torch.stack((L_auto, L_early, L_pi, L_tgt, a.float().mean(), entropy)).detach())
    return torch.stack(terms).mean(0)


def read_step(shards, first, K, h, rank, world, where):
    """This process's part of the step that reads the rows from number `first` on, on the device `where`, cut into passes: x and y (B, N)
    int64, boundaries a (B, N) bool or, where the data has none, None, and what decides the draws, u (K, B, N), or (B, N) if K is 1."""
    rows = shuffled(h.seed, first, h.effective_batch_size, sum(map(len, shards[0])))[rank::world]
    draws = uniforms(h.seed, first, (K, h.effective_batch_size, h.seq_len))[:, rank::world]
    passes = []
    for part in (slice(i, i + h.batch_size) for i in range(0, len(rows), h.batch_size)):
        batch = *fetch(shards, rows[part]), draws[:, part].squeeze(0)
        passes.append([z if z is None else z.to(where) for z in batch])
    return passes


def main(argv):
    rank, world, launcher = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), os.getppid()
    chosen = read_command_line(argv, DEFAULTS, __doc__)
    checkpoint = Path(chosen.get("out_dir", DEFAULTS["out_dir"]), "ckpt.pt")
    held_lock = prepare.lock(checkpoint.parent) if rank == 0 else True  # until this process ends
    if not held_lock:
        fail(f"another run is at work in {checkpoint.parent}; wait for it, or take another --out_dir")
    h, model, saved = begin(chosen, checkpoint)
    where, precision = use_machine(h, world)
    if rank == 0 and h.data == DEFAULTS["data"] and not Path(h.data, "meta.json").exists():
        prepare.main([f"--out_dir={h.data}"])
    if world > 1:
        dist.barrier()
    train_shards, val_shards = (open_rows(h.data, split, h.seq_len, h.boundaries == "bpe") for split in ("train", "val"))
    n_rows = sum(map(len, train_shards[0]))

    model = model.to(where).train()
    autocast = torch.autocast(where.type, getattr(torch, precision), enabled=precision != "float32")
    optimizer, scaler = make_optimizer(model, h), torch.amp.GradScaler(where.type, enabled=precision == "float16")
    step, rows_seen = 0, 0
    if saved:
        step, rows_seen = go_on(saved, optimizer, scaler)
    compiling = h.compile and where.type != "mps" and compiler_works(where)
    if compiling:
        compile_blocks(model)
    net = DistributedDataParallel(model, forward_sync_buffers=False) if world > 1 else model  # the only buffer is a table
    log_file = checkpoint.with_name("log.jsonl")
    if rank == 0:
        shorten(log_file, step)

    asked = []  # Ctrl-C fills it, and a stdout that nobody reads: the step is finished and saved
    signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))  # what torchrun passes on
    bar = tqdm(total=h.training_bytes, initial=rows_seen * h.seq_len, unit="B", unit_scale=True, dynamic_ncols=True,
               disable=rank > 0 or not sys.stdout.isatty())

    def say(line):
        try:
            if rank == 0:
                bar.write(line)
        except OSError:  # `| head`, a full disk
            sys.stdout = open(os.devnull, "w")
            print("train.py: what is printed can no longer be written; this step is the last, and saved", file=sys.stderr)
            asked.append(True)

    def diverged(what):
        bar.close()
        if rank == 0:
            print(f"train.py: step {step}: {what} not finite; try a smaller learning_rate or a longer warmup_bytes. "
                  f"{checkpoint} is {'kept as it was' if checkpoint.exists() else 'not written'}", file=sys.stderr)
        sys.exit(1)

    say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {where.type} {precision}, {n_rows} rows of {h.seq_len} bytes"
        + ("; the first steps compile, which may take a minute" if compiling else ""))
    learned, passes_per_step = h.boundaries == "learned", h.effective_batch_size // (h.batch_size * world)
    if learned and h.num_draws == 1 and passes_per_step > 1:
        say(f"num_draws=1: eq. 17 averages over {h.batch_size * world} of a step's {h.effective_batch_size} rows")
    last_bytes, last_time = rows_seen * h.seq_len, time.perf_counter()
    finished, stopping = last_bytes >= h.training_bytes, False
    while not finished and not stopping:
        held = rows_seen * h.seq_len < h.policy_start_bytes
        step += 1
        teaching = learned and (h.num_draws == 1 or step % h.policy_interval == 0)  # whether L_pi and L_tgt count
        passes = read_step(train_shards, rows_seen, h.num_draws if teaching else 1, h, rank, world, where)
        rows_seen += h.effective_batch_size
        bytes_seen = rows_seen * h.seq_len
        finished = bytes_seen >= h.training_bytes
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(bytes_seen, h)
        if held:
            optimizer.param_groups[-1]["lr"] = 0.0
        terms = backward(net, model, passes, teaching, h, autocast, scaler)
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), h.grad_clip)
        if not math.isfinite(grad_norm) and scaler.get_scale() <= 1:  # 1 without a scaler; one skips such a step and halves it
            diverged(f"the gradient's norm, {grad_norm.item()}, or the loss, {terms[0].item():.4g}, is")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        bar.update(h.effective_batch_size * h.seq_len)

        if step % h.log_interval == 0 or finished:
            L_auto, L_early, L_pi, L_tgt, rate, entropy = batch_mean(terms[None]).tolist()
            now = time.perf_counter()
            speed = (bytes_seen - last_bytes) / (now - last_time)
            last_bytes, last_time = bytes_seen, now
            record = {"step": step, "bytes": bytes_seen, "auto": L_auto, "early": L_early if model.config.early_exit else None,
                      "pi": L_pi if teaching else None, "target": L_tgt if teaching else None, "bpb": L_auto / math.log(2), "rate": rate,
                      "entropy": entropy, "grad_norm": grad_norm.item(), "lr": optimizer.param_groups[0]["lr"], "bytes_per_second": speed,
                      "mfu": share_of_peak(speed / world, model, rate, vars(h), where),
                      "seconds_left": max(h.training_bytes - bytes_seen, 0) / speed}
            bar.set_postfix_str(f"{record['bpb']:.3f} bits/byte, rate {rate:.3f}")
            if bar.disable:
                say(step_line(record))
            log(log_file, record, rank)
        stopping = bool(asked)
        if world > 1:  # all processes stop at the same step, and when torchrun was killed
            votes = torch.tensor(float(stopping or os.getppid() != launcher), device=where)
            dist.all_reduce(votes)
            stopping = votes.item() > 0
        due = step % h.eval_interval == 0 or finished
        if (due or stopping) and not all(p.isfinite().all() for p in model.parameters()):
            diverged("weights are")
        if due and rank == 0:
            started = time.perf_counter()
            results, line = evaluate(model, val_shards, h.eval_rows, h.batch_size, autocast)
            if not math.isfinite(results["val_bpb"]):
                diverged("the held-out bits per byte are")
            say(validation_line(step, results))
            say("".join(as_terminal(line, sys.stdout.isatty() and "NO_COLOR" not in os.environ)))
            log(log_file, {"step": step, "bytes": bytes_seen} | results | {"line": as_record(line)})
            last_time += time.perf_counter() - started
        if (due or stopping) and rank == 0:
            save(checkpoint, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(), "step": step,
                              "rows_seen": rows_seen, "config": vars(h), "model_config": asdict(model.config)})
    bar.close()
    if finished:
        say(f"done: {checkpoint} holds the model; python sample.py --out_dir={shlex.quote(h.out_dir)} shows what it writes")
    else:
        command = "python" if world == 1 else f"torchrun --standalone --nproc_per_node={world}"
        say(f"stopped after step {step}; to go on: {command} {shlex.join([sys.argv[0], *argv, '--resume=True'])}")
    if world > 1:
        dist.barrier()  # gloo's thread drops its last tensors meanwhile; torch may deadlock if it has to do so during the teardown
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation.

SHOWN = 160  # bytes of a validation row that are printed
LETTERS = torch.tensor([chr(b).isalnum() or b > 127 for b in range(BOS)] + [False])  # a byte beyond ASCII is part of a letter, mostly


def where_tokens_end(x, a):
    """Of the boundaries a (B, N) bool in the bytes x (B, N), <bos>'s left out: the shares that lie on a word's last letter, between
    words, and on a word's first letter (those of one letter included); the rest lies inside words. A word is letters and digits.
    And the mean and standard deviation of the tokens' lengths in bytes."""
    letter = LETTERS.to(x.device)[x]
    previous, following = F.pad(letter, (1, 0))[:, :-1], F.pad(letter, (0, 1), value=True)[:, 1:]
    ends = a[:, 1:].sum()
    shares = {name: ((a & kind)[:, 1:].sum() / ends).item() for name, kind in (
        ("ends_before", letter & previous & ~following), ("ends_between", ~letter), ("ends_after", letter & ~previous))}
    row, position = a.nonzero(as_tuple=True)
    length = position.diff()[row.diff() == 0].float()
    return shares | {"token_length": length.mean().item(), "token_length_std": length.std().item()}


@torch.no_grad()
def evaluate(model, shards, eval_rows, batch_size, autocast):
    """On fixed validation rows with fixed uniforms: bits per byte of the model and its standard error over rows, bits per
    byte of the early head if there is one, the rate, the decisions' entropy (mean -log pi(a_i), nats), the contrast:
    the mean p on bytes that are no letters or digits over the mean p on letters and digits; and `where_tokens_end`. Also the
    first row's bytes, boundaries and p, to look at."""
    n, where = sum(map(len, shards[0])), model.embedding.weight.device
    rows = np.linspace(0, n - 1, min(eval_rows, n)).astype(int)
    generator = torch.Generator().manual_seed(0)
    outputs = []  # x, a, p, bits of model and early head, and entropy, of each part
    model.eval()
    for some in np.split(rows, range(batch_size, len(rows), batch_size)):
        x, y, a = fetch(shards, some)
        u = torch.rand(x.shape, generator=generator)
        x, y, a, u = (z if z is None else z.to(where) for z in (x, y, a, u))
        with autocast:
            logits, early_logits, l, a = model(x, a, u)
        bits, early_bits = (None if z is None else -log_likelihood(z, y) / math.log(2) for z in (logits, early_logits))
        entropy = F.binary_cross_entropy_with_logits(l, a.float(), reduction="none")[:, 1:]
        outputs.append((x, a.bool(), l.sigmoid(), bits, early_bits, entropy))
    model.train()
    x, a, p, bits, early_bits, entropy = (None if z[0] is None else torch.cat(z) for z in zip(*outputs))
    letter = LETTERS.to(where)[x]
    results = {"val_bpb": bits.mean(), "val_stderr": bits.mean(1).std() / math.sqrt(len(rows)), "val_rate": a.float().mean(),
               "val_entropy": entropy.mean(), "contrast": p[~letter & (x != BOS)].mean() / p[letter].mean()}
    if early_bits is not None:
        results["val_early_bpb"] = early_bits.mean()
    line = list(zip(*(z[0, 1 : SHOWN + 1].tolist() for z in (x, a, p))))
    return {name: value.item() for name, value in results.items()} | where_tokens_end(x, a), line


def step_line(r):
    """What is printed of a step's record."""
    early = "" if r["early"] is None else f" early {r['early']:.4f}"
    policy = "" if r["pi"] is None else f" pi {r['pi']:+.4f} target {r['target']:+.4f}"
    used = f" {r['mfu']:.0%} MFU" if r["mfu"] else ""
    return (f"step {r['step']} {r['bytes'] / 1e6:.2f} MB | auto {r['auto']:.4f}{early}{policy} | {r['bpb']:.3f} bits/byte rate "
            f"{r['rate']:.3f} | norm {r['grad_norm']:.2f} | {r['bytes_per_second'] / 1e3:.1f} kB/s{used} | {r['seconds_left'] / 60:.0f} min left")


def validation_line(step, r):
    """What is printed of an evaluation."""
    return (f"step {step} validation: {r['val_bpb']:.4f} bits/byte, rate {r['val_rate']:.3f} | tokens end {r['ends_before']:.0%} on last "
            f"letters, {r['ends_between']:.0%} between words, {r['ends_after']:.0%} on first letters | {r['token_length']:.1f} +- "
            f"{r['token_length_std']:.1f} bytes")


def as_record(line):
    """The shown line, [(byte, a, p)], for the log: a character a byte (latin-1), where tokens end, and 255 p in two hexadecimal digits."""
    return {"text": bytes(byte for byte, _, _ in line).decode("latin-1"), "ends": [i for i, (_, a, _) in enumerate(line) if a],
            "p": bytes(round(255 * p) for _, _, p in line).hex()}


def flops_per_byte(model, rate, config):
    """Training FLOPs per byte at a rate, in tokens per byte, as the paper counts them: 6 per matrix parameter, per byte or, in the middle, per
    token. Further draws only go forward, and not through the encoder: 2 per parameter of the rest. What `mean_probability` and a teacher
    cost is left out."""
    further = (config["num_draws"] - 1) / config["policy_interval"] if config["boundaries"] == "learned" else 0

    def matrices(module):
        return sum(p.numel() for p in module.parameters() if p.dim() == 2)

    middle, after = matrices(model.middle), matrices(model.up) + matrices(model.head)
    before = matrices(model) - middle - after - model.embedding.weight.numel()
    return 6 * before + (6 + 2 * further) * (middle * rate + after)


PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12,
              "3090": 71e12, "V100": 125e12, "T4": 65e12}  # dense, 16 bit, from the data sheets


def share_of_peak(speed, model, rate, config, where):
    """The share of the GPU's FLOPs in 16 bits that training at `speed` bytes a second takes; None where that peak is not known."""
    words = torch.cuda.get_device_name().replace("-", " ").split() if where.type == "cuda" else []
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in words), None)
    return peak and speed * flops_per_byte(model, rate, config) / peak


# ---------------------------------------------------------------------------------------------------------------------
# Data.


def open_rows(data, split, seq_len, marks=False):
    """The split's shards in the folder `data`, read from disk as they are used: rows of bytes (rows, seq_len) uint8, and with `marks`
    those of BPE tokens, a bit each, (rows, seq_len / 8) uint8. Ends the program with a line where they are not what meta.json names."""
    path = Path(data, "meta.json")
    if not path.exists():
        fail(f"no {path}; make the data first: python prepare.py --help")
    try:
        meta = json.loads(path.read_text())
        row_length, held, shard_bytes = meta["seq_len"], meta[split]["bytes"], meta["options"]["shard_bytes"]
        names = sorted(meta[split]["sha256"])
        lengths = [min(shard_bytes, held - start) for start in range(0, held, shard_bytes)[: len(names) + 1]]  # of shards, in bytes of text
        if sum(name.endswith(".bin") for name in names) != len(lengths) or not lengths or any(length % row_length for length in lengths):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError, MemoryError):
        fail(f"{path} is not what prepare.py writes; make the data anew")
    if row_length % seq_len:
        fail(f"seq_len={seq_len} does not divide the {row_length} bytes of a row in {data}")
    if marks and not any(name.endswith(".bpe") for name in names):
        fail(f"data={data!r} has no marks of BPE tokens; make it anew with prepare.py --bpe")

    def read(kind, width):
        shards = [Path(data, name) for name in names if name.endswith(kind)]
        for shard, length in zip(shards, lengths):
            expected = length * width // seq_len
            if not shard.exists() or shard.stat().st_size != expected:
                there = f"has {shard.stat().st_size} bytes" if shard.exists() else "is missing"
                fail(f"{shard} {there}; {path} tells of {expected} bytes; make the data anew")
        return [np.memmap(shard, np.uint8, "r").reshape(-1, width) for shard in shards]

    return read(".bin", seq_len), read(".bpe", seq_len // 8) if marks else []


def fetch(shards, rows):
    """The rows with these numbers: x = <bos> and all bytes but the last, y = all bytes, (B, N) int64; and the boundaries
    (B, N) bool where the data has them, else None."""
    shards, marks = shards
    ends = np.cumsum([len(shard) for shard in shards])
    where = [(s, r - ends[s]) for s, r in zip(np.searchsorted(ends, rows, "right"), rows)]  # negative: from the end
    x, y = inputs_and_targets(torch.from_numpy(np.stack([shards[s][r] for s, r in where])))
    if not marks:
        return x, y, None
    a = torch.from_numpy(np.unpackbits(np.stack([marks[s][r] for s, r in where]), axis=1)).bool()
    return x, y, F.pad(a[:, :-1], (1, 0), value=True)


def inputs_and_targets(rows):
    """x = <bos> and all bytes but the last, y = all bytes; (B, N) int64."""
    y = rows.long()
    return F.pad(y[:, :-1], (1, 0), value=BOS), y


@functools.lru_cache(2)
def order(seed, epoch, n):
    return np.random.default_rng([seed, epoch]).permutation(n)


def shuffled(seed, first, count, n):
    """Numbers of the rows that the run reads first, first + 1, ...: a new order of all n rows every epoch."""
    return np.array([order(seed, i // n, n)[i % n] for i in range(first, first + count)])


def uniforms(seed, first, shape):
    """What decides the draws of a step that reads the rows from number `first` on: (K, B, N) in [0, 1), float32. All of the step's,
    whatever part of them a process or a forward pass works on, so that the draws do not depend on how a step is cut."""
    return torch.from_numpy(np.random.default_rng([seed, 1, first]).random(shape, np.float32))


# ---------------------------------------------------------------------------------------------------------------------
# Files that a run leaves: ckpt.pt and log.jsonl.


def save(path, state):
    """Writes the checkpoint beside `path` and moves it there: whatever happens, `path` is one whole checkpoint. Raises OSError."""
    part = path.with_suffix(".part")
    try:
        torch.save(state, part)
    except RuntimeError as error:  # torch's name for a full disk
        raise OSError(f"cannot write {part}: {str(error).splitlines()[0]}") from None
    os.replace(part, path)


def log(path, record, rank=0):
    """Adds a line of JSON; null stands for what is not finite. Process 0 writes, the others do not."""
    if rank == 0:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        with path.open("a") as file:
            file.write(json.dumps(finite) + "\n")


def read_log(path):
    """The records of a log.jsonl. Lines that are none, such as a torn last one, are left out, with a word on stderr."""
    records, others = [], 0
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
            wanted = {"step", "bytes"} | ({"rate", "bytes_per_second"} if "auto" in record else {"val_bpb", "val_rate"})
            numbers = all(isinstance(value, (int, float, NoneType)) for key, value in record.items() if key != "line")
            if not (wanted <= record.keys() and numbers) or None in (record["step"], record["bytes"]):
                raise KeyError
            records.append(record)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            others += 1
    if others:
        print(f"{printable(str(path))}: {others} lines that are no records of train.py are left out", file=sys.stderr)
    return records


def shorten(path, step):
    """Leaves in a log what came up to this step: what a killed run wrote after its last checkpoint is written again. A run that starts
    anew begins a new one, and the log of a run whose checkpoint is gone becomes log.jsonl.old."""
    if not step and path.exists() and path.stat().st_size:
        os.replace(path, path.with_suffix(".jsonl.old"))
    kept = [record for record in read_log(path) if record["step"] <= step] if path.exists() else []
    path.with_suffix(".part").write_text("".join(json.dumps(record) + "\n" for record in kept))
    os.replace(path.with_suffix(".part"), path)


# ---------------------------------------------------------------------------------------------------------------------
# Setting up: machine, compiler, model, checkpoint.


def device_and_dtype(device, dtype):
    """The kind of device and the dtype that "auto" stands for on this machine; others are checked and returned."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device != "cpu" and not {"cuda": torch.cuda, "mps": torch.backends.mps}[device].is_available():
        fail(f"device={device!r}, but torch finds none on this machine")
    if dtype == "auto":  # bfloat16 from Ampere on and on CPUs that multiply it, float16 on a T4, float32 elsewhere
        dtype = "float32"
        if device == "cuda":
            dtype = "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
        elif device == "cpu" and getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16"):
            dtype = "bfloat16"
    if device == "mps" and dtype == "float16":
        fail("dtype='float16' on an Apple GPU: torch's fused AdamW takes the steps there that its GradScaler wants skipped; take bfloat16")
    return device, dtype


def use_machine(h, world):
    """Starts the processes' group and sets torch up; the device of this process, and the dtype of products as torch names it."""
    kind, precision = device_and_dtype(h.device, h.dtype)
    where = torch.device(kind)
    if kind == "cuda":
        where = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
        if where.index >= torch.cuda.device_count():
            fail(f"LOCAL_RANK={where.index}, but torch finds {torch.cuda.device_count()} GPUs; take --nproc_per_node={torch.cuda.device_count()}")
        torch.cuda.set_device(where)
    if world > 1:
        if kind == "mps":
            fail(f"{world} processes, but an Apple GPU takes one; start python train.py without torchrun")
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    torch.set_float32_matmul_precision("high")
    if kind == "cpu":  # a resumed run repeats to the last bit: compiled gathers add their gradients in a fixed order
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    return where, precision


def compiler_works(where):
    """Whether torch.compile runs here: it needs a C++ compiler on the CPU, Triton on a GPU."""
    try:
        torch.compile(lambda z: z + 1)(torch.zeros(1, device=where))
    except Exception as error:  # whatever the missing part raises
        print(f"torch.compile does not work here ({type(error).__name__}): the model runs uncompiled", file=sys.stderr)
        return False
    return True


def compile_blocks(model, **options):
    """Compiles the model's layers in place: one of each kind, whose code all others run. In the middle the number of tokens varies."""
    for block in (*model.down, *model.up):
        block.compile(**options)
    for block in model.middle:
        block.compile(dynamic=True, **options)


def model_config_of(config):
    """What hyperparameters say of the model, as ModelConfig's arguments. Only one draw's reward needs the early exit."""
    needed = config["boundaries"] == "learned" and config["num_draws"] == 1
    values = config | {"early_exit": needed and config["lambda_early"] > 0}
    return {field.name: values[field.name] for field in fields(ModelConfig)}


def begin(chosen, checkpoint):
    """The run's hyperparameters, checked; its model; and all that its checkpoint holds, or None if it starts anew."""
    saved = None
    if chosen.get("resume"):
        try:
            model, saved = load_checkpoint(checkpoint)
            if saved["config"].keys() != DEFAULTS.keys():
                raise ValueError(f"{checkpoint} was made by another version of train.py, with other hyperparameters")
        except (OSError, ValueError) as error:
            fail(f"cannot resume: {error}")
        chosen = {key: parse(key, value, DEFAULTS) for key, value in saved["config"].items()} | chosen
    elif checkpoint.exists():
        fail(f"{checkpoint} exists; go on from it with --resume=True, or keep it and start anew with another --out_dir")
    h = SimpleNamespace(**DEFAULTS | chosen)
    check(h)
    config = ModelConfig(**model_config_of(vars(h)))
    if not saved:
        torch.manual_seed(h.seed)
        try:
            return h, make_model(config), None
        except (OSError, ValueError) as error:
            fail(f"boundaries={h.boundaries!r}: {error}")
    if config != model.config:
        there, asked = asdict(model.config), asdict(config)
        others = ", ".join(f"{key}={there[key]!r}, not {asked[key]!r}" for key in asked if there[key] != asked[key])
        fail(f"{checkpoint} holds another model: {others}")
    return h, model, saved


def go_on(saved, optimizer, scaler):
    """Puts the checkpoint's state into optimizer and scaler, but for learning rates and weight decays, which flags may have changed. Returns
    its step, and how many rows were read."""
    optimizer.load_state_dict(saved["optimizer"] | {"param_groups": optimizer.state_dict()["param_groups"]})
    if saved["scaler"]:
        scaler.load_state_dict(saved["scaler"])
    return saved["step"], saved["rows_seen"]


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    try:
        main(sys.argv[1:])
    except OSError as error:
        fail(f"{error}; what was saved before is whole")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate memory" not in str(error):  # a CPU's
            raise
        fail("out of memory; a smaller batch_size needs less; what was saved before is whole")
