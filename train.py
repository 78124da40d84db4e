"""
Trains the byte-level language model of model.py, which learns where its tokens end.

    python train.py                                                   the quick run: small model, Python source, laptop
    python train.py config/fineweb_147m.py --out_dir=out-147m         a file overrides the values below, a flag the file
    torchrun --standalone --nproc_per_node=8 train.py config/fineweb_147m.py     one machine, eight GPUs
    python train.py --resume=True                                     goes on from out_dir/ckpt.pt
"""
import difflib
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
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import prepare
from model import BOS, ModelConfig, load_checkpoint, make_model
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
boundaries = "learned"  # or, to compare with, one of BOUNDARIES below, or another run's ckpt.pt: see experiments/systems.py
downsample_rate_target = 1 / 5  # tokens per byte
policy_window = 1  # w, eq. 21: earlier decisions that a decision sees
policy_scale = 1.5  # S, eq. 22: the smaller, the faster the policy learns
policy_softcap = 5.0  # eq. 23: the decision's logit stays within +- this in training
# loss
num_draws = 2  # K, of each row's boundaries, each judged by how the others fared. 1: the paper's estimator, eq. 15-17
policy_interval = 4  # with more draws than one: steps from one that draws them to the next; L_pi and L_tgt count in these alone
gamma = 0.99  # discount of later rewards, eq. 16
lambda_pi = 1e-2  # weight of the policy's loss, eq. 27
lambda_target = 1e-2  # weight of the boundary rate's loss
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

BOUNDARIES = "learned", "uniform", "random", "whitespace", "bpe", "gumbel", "hnet", "none"
DEFAULTS = {k: v for k, v in globals().items() if k.islower() and type(v) in (int, float, bool, str) and not k.startswith("_")}


# ---------------------------------------------------------------------------------------------------------------------
# The losses. logits (B, N, 257), l and everything else (B, N); nats per byte.


def batch_mean(z):
    """Mean over dimension 0 and over all processes."""
    z = z.mean(0)
    if dist.is_initialized():
        dist.all_reduce(z)
        z = z / dist.get_world_size()
    return z


def log_likelihood(logits, y):
    """log p(y_i | x, a) (B, N)."""
    return -F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y)


def discounted_return(R, gamma):
    """G_i = sum_k gamma^k R_{i+k}, eq. 16. Doubles the terms summed log2(N) times; no power of gamma is divided by."""
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
    """L_pi, eq. 18: mean of -log pi(a_i) A_i. Position 0 is forced, not drawn: it has no term."""
    negative_log_pi = F.binary_cross_entropy_with_logits(l, a.float(), reduction="none")
    return (negative_log_pi * A)[..., 1:].sum() / l.numel()


def target_loss(l, target, mean_p):
    """L_tgt, eq. 24: pushes all logits alike, down when the mean probability is above the target, else up."""
    return l.mean() * (mean_p - target)


def losses(logits, early_logits, l, a, y, gamma, target, mean_p=None):
    """L_auto, L_early, L_pi and L_tgt, eq. 15-18 and 24-26, of one draw or of K, as Model.forward returned them. mean_p is that
    of eq. 24, unless given the one of these rows, of all processes."""
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
# Command line, data, schedule.


def fail(message):
    print(f"train.py: {message}", file=sys.stderr)
    sys.exit(2)


def parse(key, value):
    """A hyperparameter's value, from a flag's text or a configuration file, in the type of its default."""
    if key not in DEFAULTS:
        fail(f"unknown hyperparameter '{key}'; the nearest is '{difflib.get_close_matches(key, DEFAULTS, 1, 0)[0]}'")
    kind = type(DEFAULTS[key])
    try:
        if kind is bool:
            return {"True": True, "False": False}[str(value)]
        if kind is str and isinstance(value, str):
            return value
        number = Fraction(str(value))  # reads 6e9 and 1/5 as well
        if kind is str or kind is int and number.denominator != 1:
            raise ValueError
        return kind(number)
    except (ValueError, KeyError, ZeroDivisionError, OverflowError):
        fail(f"{key}={value!r} is no {kind.__name__}; the default is {DEFAULTS[key]!r}")


def read_command_line(argv):
    """The hyperparameters that configuration files and flags set, the later over the earlier."""
    chosen = {}
    if "--help" in argv:
        print(__doc__ + "\nThe hyperparameters, with a line of meaning each, are at the top of train.py.")
        sys.exit()
    for argument in argv:
        if not argument.startswith("--"):
            try:
                values = {}
                exec(Path(argument).read_text(), {}, values)
            except Exception as error:  # it is a program
                fail(f"cannot read the configuration file '{argument}': {error}")
            chosen |= {k: parse(k, v) for k, v in values.items() if not k.startswith("_")}
        elif "=" in argument:
            key, value = argument[2:].split("=", 1)
            chosen[key] = parse(key, value)
        else:
            fail(f"'{argument}' has no value; write {argument}=...")
    return chosen


def check():
    """One line for a combination of hyperparameters that cannot run."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    for key in ("seq_len", "embedding_dim", "num_heads", "attention_window", "policy_scale", "policy_softcap", "training_bytes",
                "num_draws", "policy_interval", "effective_batch_size", "batch_size", "learning_rate", "grad_clip", "log_interval",
                "eval_interval", "eval_rows"):
        if globals()[key] <= 0:
            fail(f"{key}={globals()[key]} is not positive")
    for key in ("n_down_layers", "n_mid_layers", "n_up_layers", "warmup_bytes", "policy_start_bytes", "weight_decay", "lambda_early",
                "seed"):
        if globals()[key] < 0:
            fail(f"{key}={globals()[key]} is negative")
    if embedding_dim % (2 * num_heads):
        fail(f"embedding_dim={embedding_dim} is no multiple of 2 * num_heads={2 * num_heads}")
    if effective_batch_size % (batch_size * world):
        fail(f"effective_batch_size={effective_batch_size} is no multiple of batch_size={batch_size} times {world} processes")
    if not 0.5 < downsample_rate_target * seq_len < seq_len:
        fail(f"downsample_rate_target={downsample_rate_target} is not between 0 and 1, or gives a row of {seq_len} bytes no token")
    if boundaries == "learned" and num_draws == 1 and batch_size * world == 1:
        fail("num_draws=1 compares a row's draw with those of other rows (eq. 17), but batch_size=1 and one process leave none; "
             "take --num_draws=2 or a larger batch_size")
    if boundaries == "bpe" and seq_len % 8:
        fail(f"seq_len={seq_len} is no multiple of 8, which --boundaries=bpe needs")
    if not 0 <= gamma <= 1:
        fail(f"gamma={gamma} is not within 0 and 1")
    if not 0 <= policy_window <= 12:
        fail(f"policy_window={policy_window} is not within 0 and 12: the draw costs 2^policy_window a byte")
    if boundaries not in BOUNDARIES and not boundaries.endswith(".pt"):
        fail(f"boundaries={boundaries!r} is none of {', '.join(BOUNDARIES)}, nor the path of a checkpoint, which ends in .pt")
    for key, allowed in (("device", ("auto", "cpu", "cuda", "mps")),
                         ("dtype", ("auto", "float32", "bfloat16", "float16"))):
        if globals()[key] not in allowed:
            fail(f"{key}={globals()[key]!r} is none of {', '.join(allowed)}")


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
    if device == "mps" and dtype == "float16" and torch.__version__ < "2.8":
        fail(f"dtype='float16' on an Apple GPU needs torch 2.8, for its GradScaler; this is {torch.__version__}; take bfloat16")
    return device, dtype


def open_rows(split):
    """The split's shards, read from disk as they are used: rows of bytes (rows, seq_len) uint8, and for --boundaries=bpe
    their marks, a bit each, (rows, seq_len / 8) uint8."""
    path = Path(data, "meta.json")
    if not path.exists():
        fail(f"no {path}; make the data first: python prepare.py --help")
    try:
        meta = json.loads(path.read_text())
        row_length, held, shard_bytes = meta["seq_len"], meta[split]["bytes"], meta["options"]["shard_bytes"]
        names = sorted(meta[split]["sha256"])
        lengths = [min(shard_bytes, held - start) for start in range(0, held, shard_bytes)]  # of the shards, in bytes of text
        if sum(name.endswith(".bin") for name in names) != len(lengths):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        fail(f"{path} is not what prepare.py writes; make the data anew")
    if row_length % seq_len:
        fail(f"seq_len={seq_len} does not divide the {row_length} bytes of a row in {data}")
    if boundaries == "bpe" and not any(name.endswith(".bpe") for name in names):
        fail(f"data={data!r} has no marks of BPE tokens; make it anew with prepare.py --bpe")

    def read(kind, width):
        shards = [Path(data, name) for name in names if name.endswith(kind)]
        for shard, length in zip(shards, lengths):
            expected = length * width // seq_len
            if not shard.exists() or shard.stat().st_size != expected:
                there = f"has {shard.stat().st_size} bytes" if shard.exists() else "is missing"
                fail(f"{shard} {there}; {path} tells of {expected} bytes; make the data anew")
        return [np.memmap(shard, np.uint8, "r").reshape(-1, width) for shard in shards]

    return read(".bin", seq_len), read(".bpe", seq_len // 8) if boundaries == "bpe" else []


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


@functools.lru_cache(2)
def order(seed, epoch, n):
    return np.random.default_rng([seed, epoch]).permutation(n)


def shuffled(first, count, n):
    """Numbers of the rows that the run reads first, first + 1, ...: a new order of all n rows every epoch."""
    return np.array([order(seed, i // n, n)[i % n] for i in range(first, first + count)])


def inputs_and_targets(rows):
    """x = <bos> and all bytes but the last, y = all bytes; (B, N) int64."""
    y = rows.long()
    return F.pad(y[:, :-1], (1, 0), value=BOS), y


def uniforms(seed, first, shape):
    """What decides the draws of a step that reads the rows from number `first` on: (K, B, N) in [0, 1), float32. All of the step's,
    whatever part of them a process or a forward pass works on, so that the draws do not depend on how a step is cut."""
    return torch.from_numpy(np.random.default_rng([seed, 1, first]).random(shape, np.float32))


def learning_rate_at(bytes_seen):
    """Linear warm-up, then a cosine down to 0; by bytes."""
    if bytes_seen < warmup_bytes:
        return learning_rate * bytes_seen / warmup_bytes
    done = (bytes_seen - warmup_bytes) / max(training_bytes - warmup_bytes, 1)
    return learning_rate * (1 + math.cos(math.pi * min(done, 1))) / 2


def flops_per_byte(model, rate, config):
    """Training FLOPs per byte as the paper counts them: 6 per matrix parameter, per byte or, in the middle, per token. Further draws
    only go forward, and not through the encoder: 2 per parameter of the rest. What `mean_probability` and a teacher cost is left out."""
    further = (config["num_draws"] - 1) / config["policy_interval"] if config["boundaries"] == "learned" else 0

    def matrices(module):
        return sum(p.numel() for p in module.parameters() if p.dim() == 2)

    middle, after = matrices(model.middle), matrices(model.up) + matrices(model.head)
    before = matrices(model) - middle - after - model.embedding.weight.numel()
    return 6 * before + (6 + 2 * further) * (middle * rate + after)


PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12,
              "3090": 71e12, "V100": 125e12, "T4": 65e12}  # dense, 16 bit, from the data sheets


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation and the loop.

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
def evaluate(model, shards, autocast):
    """On fixed validation rows with fixed uniforms: bits per byte of the model and its standard error over rows, bits per
    byte of the early head if there is one, the boundary rate, the decisions' entropy (mean -log pi(a_i), nats), the contrast:
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
    line = list(zip(*(z[0, 1:SHOWN].tolist() for z in (x, a, p))))
    return {name: value.item() for name, value in results.items()} | where_tokens_end(x, a), line


@torch.no_grad()
def mean_probability(model, passes, autocast):
    """Eq. 24's mean of p over all rows of a step that is cut into passes: encoder and draw once more, before the first of them."""
    means = []
    for x, _, _, u in passes:
        with autocast:
            z = model.read(model.encode(x))[1]
        means.append(model.boundary_logits(z, model.boundaries(z, u)).sigmoid().mean())
    return batch_mean(torch.stack(means))


def compiler_works(where):
    """Whether torch.compile runs here: it needs a C++ compiler on the CPU, Triton on a GPU."""
    try:
        torch.compile(lambda z: z + 1)(torch.zeros(1, device=where))
    except Exception as error:  # whatever the missing part raises
        print(f"torch.compile does not work here ({type(error).__name__}): the model runs uncompiled", file=sys.stderr)
        return False
    return True


def model_config_of(config):
    """What hyperparameters say of the model, as ModelConfig's arguments. Only one draw's reward needs the early exit."""
    needed = config["boundaries"] == "learned" and config["num_draws"] == 1
    values = config | {"early_exit": needed and config["lambda_early"] > 0}
    return {field.name: values[field.name] for field in fields(ModelConfig)}


def main(argv):
    chosen, saved = read_command_line(argv), None
    checkpoint = Path(chosen.get("out_dir", DEFAULTS["out_dir"]), "ckpt.pt")
    rank, world, parent = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), os.getppid()
    held_lock = prepare.lock(checkpoint.parent) if rank == 0 else True
    if not held_lock:
        fail(f"another run is at work in {checkpoint.parent}; wait for it, or take another --out_dir")
    if chosen.get("resume"):
        try:
            model, saved = load_checkpoint(checkpoint)
        except (OSError, ValueError) as error:
            fail(f"cannot resume: {error}")
        chosen = saved["config"] | chosen
    elif checkpoint.exists():
        fail(f"{checkpoint} exists; go on from it with --resume=True, or keep it and start anew with another --out_dir")
    globals().update(DEFAULTS | chosen)
    check()
    config = {key: globals()[key] for key in DEFAULTS}
    model_config = model_config_of(config)
    if saved and ModelConfig(**model_config) != model.config:
        there = asdict(model.config)
        others = ", ".join(f"{key}={there[key]!r}, not {value!r}" for key, value in model_config.items() if there[key] != value)
        fail(f"{checkpoint} holds another model: {others}")

    # processes, device, dtype
    kind, precision = device_and_dtype(device, dtype)
    where = torch.device(kind)
    if kind == "cuda":
        where = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(where)
    if world > 1:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    autocast = torch.autocast(kind, getattr(torch, precision), enabled=precision != "float32")
    torch.set_float32_matmul_precision("high")
    if kind == "cpu":  # a resumed run repeats to the last bit: compiled gathers add their gradients in a fixed order
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    say = print if rank == 0 else lambda *_, **__: None

    # data
    if rank == 0 and data == DEFAULTS["data"] and not Path(data, "meta.json").exists():
        prepare.main([f"--out_dir={data}"])
    if world > 1:
        dist.barrier()
    train_shards, val_shards = open_rows("train"), open_rows("val")
    n_rows = sum(map(len, train_shards[0]))
    accumulation = effective_batch_size // (batch_size * world)

    # model and optimizer
    torch.manual_seed(seed)
    if not saved:
        try:
            model = make_model(ModelConfig(**model_config))
        except (OSError, ValueError) as error:
            fail(f"boundaries={boundaries!r}: {error}")
    model = model.to(where).train()
    policy = model.policy.weight
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not policy]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0},
              {"params": [policy], "weight_decay": weight_decay}]
    optimizer = torch.optim.AdamW(groups, learning_rate, fused=True)  # betas 0.9, 0.999 as in the paper
    scaler = torch.amp.GradScaler(kind, enabled=precision == "float16")
    step, rows_seen = 0, 0
    if saved:
        step, rows_seen = saved["step"], saved["rows_seen"]
        optimizer.load_state_dict(saved["optimizer"] | {"param_groups": optimizer.state_dict()["param_groups"]})  # flags count
        if saved["scaler"]:
            scaler.load_state_dict(saved["scaler"])
    learned = boundaries == "learned"
    net = torch.compile(model) if compile and kind != "mps" and compiler_works(where) else model
    if world > 1:
        net = DistributedDataParallel(net, broadcast_buffers=False)  # the only one is a table

    # the log; what a killed run wrote after its last checkpoint is written again
    log_file = checkpoint.with_name("log.jsonl")
    if rank == 0:
        lines = log_file.read_text().splitlines(True) if saved and log_file.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        log_file.with_suffix(".part").write_text("".join(kept))
        os.replace(log_file.with_suffix(".part"), log_file)

    def log(record):
        if rank == 0:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
            with log_file.open("a") as file:
                file.write(json.dumps(finite) + "\n")

    def diverged(what):
        if rank == 0:
            print(f"train.py: step {step}: {what} not finite; try a smaller learning_rate or a longer warmup_bytes. "
                  f"{checkpoint} is {'kept as it was' if checkpoint.exists() else 'not written'}", file=sys.stderr)
        sys.exit(1)

    def save():
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
                     "step": step, "rows_seen": rows_seen, "config": config, "model_config": model_config}
            torch.save(state, checkpoint.with_suffix(".part"))
            os.replace(checkpoint.with_suffix(".part"), checkpoint)

    asked = []  # Ctrl-C fills it: the step is finished and saved
    signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))  # what torchrun passes on

    say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters, {kind} {precision}, {n_rows} rows of {seq_len} bytes")
    if learned and num_draws == 1 and accumulation > 1:
        say(f"num_draws=1: eq. 17 averages over {batch_size * world} of a step's {effective_batch_size} rows")
    peak = None
    if kind == "cuda" and precision != "float32":
        peak = next((flops for name, flops in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)
    last_bytes, last_time = rows_seen * seq_len, time.perf_counter()
    finished, stopping = rows_seen * seq_len >= training_bytes, False
    while not finished and not stopping:
        rows = shuffled(rows_seen, effective_batch_size, n_rows)[rank::world]
        teaching = learned and (num_draws == 1 or (step + 1) % policy_interval == 0)
        policy_weight, target_weight, K = (lambda_pi, lambda_target, num_draws) if teaching else (0.0, 0.0, 1)
        draws = uniforms(seed, rows_seen, (K, effective_batch_size, seq_len))[:, rank::world]
        held = rows_seen * seq_len < policy_start_bytes
        step, rows_seen = step + 1, rows_seen + effective_batch_size
        bytes_seen = rows_seen * seq_len
        finished = bytes_seen >= training_bytes
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(bytes_seen)
        if held:
            optimizer.param_groups[-1]["lr"] = 0.0
        passes = []  # x, y, a, u of each
        for part in (slice(i, i + batch_size) for i in range(0, len(rows), batch_size)):
            batch = *fetch(train_shards, rows[part]), draws[:, part].squeeze(0)
            passes.append([z if z is None else z.to(where) for z in batch])
        mean_p = mean_probability(model, passes, autocast) if teaching and accumulation > 1 else None
        terms = torch.zeros(5, device=where)
        for x, y, a, u in passes:
            with nullcontext() if world == 1 or x is passes[-1][0] else net.no_sync():
                with autocast:
                    logits, early_logits, l, a = net(x, a, u)
                L_auto, L_early, L_pi, L_tgt = losses(logits, early_logits, l, a, y, gamma, downsample_rate_target, mean_p)
                L = L_auto + policy_weight * L_pi + target_weight * L_tgt + lambda_early * L_early  # eq. 27
                if not learned:
                    L = L + model.boundary_loss(l, a)
                scaler.scale(L / accumulation).backward()
            terms += torch.stack((L_auto, L_early, L_pi, L_tgt, a.float().mean())).detach() / accumulation
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        if not math.isfinite(grad_norm) and scaler.get_scale() <= 1:  # 1 without a scaler; one skips such a step and halves it
            diverged(f"the gradient's norm, {grad_norm.item()}, or the loss, {terms[0].item():.4g}, is")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

        if step % log_interval == 0 or finished:
            L_auto, L_early, L_pi, L_tgt, rate = batch_mean(terms[None]).tolist()
            now = time.perf_counter()
            speed = (bytes_seen - last_bytes) / (now - last_time)
            last_bytes, last_time = bytes_seen, now
            used = speed * flops_per_byte(model, rate, config) / (world * peak) if peak else None
            left = max(training_bytes - bytes_seen, 0) / speed
            entropy = policy_loss(l, a, torch.ones(())).item()  # of the last pass: mean -log pi(a_i)
            early = f" early {L_early:.4f}" if model_config["early_exit"] else ""
            policy = f" pi {L_pi:+.4f} target {L_tgt:+.4f}" if teaching else ""
            say(f"step {step} {bytes_seen / 1e6:.2f} MB | auto {L_auto:.4f}{early}{policy}"
                f" | {L_auto / math.log(2):.3f} bits/byte rate {rate:.3f} | norm {grad_norm:.2f} | {speed / 1e3:.1f} kB/s"
                + (f" {used:.0%} MFU" if peak else "") + f" | {left / 60:.0f} min left")
            log({"step": step, "bytes": bytes_seen, "auto": L_auto, "early": L_early, "pi": L_pi if teaching else None,
                 "target": L_tgt if teaching else None,
                 "bpb": L_auto / math.log(2), "rate": rate, "entropy": entropy, "grad_norm": grad_norm.item(),
                 "lr": optimizer.param_groups[0]["lr"], "bytes_per_second": speed, "mfu": used, "seconds_left": left})
        stopping = bool(asked)
        if world > 1:  # all processes stop at the same step, and when torchrun was killed
            votes = torch.tensor(float(stopping or os.getppid() != parent), device=where)
            dist.all_reduce(votes)
            stopping = votes.item() > 0
        due = step % eval_interval == 0 or finished
        if (due or stopping) and not all(p.isfinite().all() for p in model.parameters()):
            diverged("weights are")
        if due and rank == 0:
            started = time.perf_counter()
            results, line = evaluate(model, val_shards, autocast)
            print(f"step {step} validation: {results['val_bpb']:.4f} bits/byte, rate {results['val_rate']:.3f}, "
                  f"contrast {results['contrast']:.2f} | tokens end {results['ends_before']:.0%} on last letters, "
                  f"{results['ends_between']:.0%} between words, {results['ends_after']:.0%} on first letters | "
                  f"{results['token_length']:.1f} +- {results['token_length_std']:.1f} bytes")
            print("".join(as_terminal(line, sys.stdout.isatty() and "NO_COLOR" not in os.environ)))
            shown = {"text": bytes(byte for byte, *_ in line).decode("latin-1"), "ends": [i for i, (_, a, _) in enumerate(line) if a],
                     "p": bytes(round(255 * p) for *_, p in line).hex()}
            log({"step": step, "bytes": bytes_seen} | results | {"line": shown})
            last_time += time.perf_counter() - started
        if due or stopping:
            save()
    if not finished:
        launcher = "python" if world == 1 else f"torchrun --standalone --nproc_per_node={world}"
        say(f"stopped after step {step}; to go on: {launcher} {shlex.join([sys.argv[0], *argv, '--resume=True'])}")
    else:
        say(f"done: {checkpoint} holds the model; python sample.py --out_dir={shlex.quote(out_dir)} shows what it writes")
    if world > 1:
        dist.barrier()  # gloo's thread drops its last tensors meanwhile; torch may deadlock if it has to do so during the teardown
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    main(sys.argv[1:])
