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
import sys
import time
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # sizes vary

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._inductor import exc as inductor
from torch.nn.parallel import DistributedDataParallel

import prepare
from config.command_line import check, device_and_dtype, read_command_line
from config.terminal import fail, marked, one_line_errors
from experiments.measures import executed_flops, muon_flops, where_tokens_end
from model import (
    Block, Head, Policy, inputs_and_targets, load_weights, make_model, read_checkpoint)

# ---- Hyperparameters. The values are the quick run's; config/ holds the paper's. ----------------
# A flag takes the type of its default, so the default is 1.0, not 1, where 0.5 makes sense.

# files
data = "data/stdlib"  # folder of shards made by prepare.py; this one is made on first use
out_dir = "out"  # receives ckpt.pt and log.jsonl
resume = False  # continue from out_dir/ckpt.pt, with its hyperparameters unless flags change them
# model
seq_len = 256  # bytes in a row; must divide the row length given to prepare.py
embedding_dim = 128  # D, for bytes and tokens alike
num_heads = 2  # attention heads in every layer
n_down_layers = 2  # byte layers before the middle
n_mid_layers = 4  # token layers
n_up_layers = 1  # byte layers after the middle
attention_window = 8  # a byte layer sees this many bytes, including the current one
# boundaries
boundaries = "learned"  # or uniform, hnet, ..., or another run's ckpt.pt: experiments/systems.py
downsample_rate_target = 1 / 5  # tokens per byte
policy_window = 1  # w, eq. 21: each decision sees this many earlier decisions
policy_scale = 16.0  # S, eq. 22
policy_softcap = 5.0  # eq. 23: keeps logits between -5 and 5, in training only
# loss
num_draws = 2  # K draws per row, each compared with the others; 1: the paper's estimator, eq. 15-17
redrawn = 1 / 2  # fraction of rows drawn K times; if K > 1, only these teach the policy
early_exit = False  # a second head predicts from X alone and gives the paper's baseline, eq. 14-15
gamma = 0.97  # discount of later rewards, eq. 16; larger looks further ahead, with more noise
lambda_pi = 1e-2  # weight of the policy loss, eq. 27
lambda_target = 1e-2  # weight of L_tgt, which keeps the rate near its target
lambda_early = 1e-1  # weight of the early exit's loss
# optimizers
training_bytes = 4_000_000  # length of the run
effective_batch_size = 16  # rows in a training step, over all processes and micro-batches
batch_size = 16  # rows in a micro-batch; eq. 17 and 24 average over one from each process
learning_rate = 3e-3  # peak, reached after the warm-up; falls to 0 at the end
cosine = False  # learning rates fall along a cosine, as in the paper; if False, linearly
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

DEFAULTS = {key: value for key, value in globals().items()
            if type(value) in (int, float, bool, str) and key[0] != "_"}


# ---- Losses. logp, R, G, A, l and a are (K, B, N), for all draws. Log-likelihoods are in nats.
def mean_over_processes(z):
    """Replaces a tensor by its mean over all processes. Every process must call this."""
    if dist.is_initialized():
        dist.all_reduce(z, dist.ReduceOp.AVG)
    return z


def discounted_return(R, gamma):
    """G_i = sum_k gamma^k R_{i+k}, eq. 16, in log2(N) doublings; R and G (..., N)."""
    G, reach = R, 1
    while reach < R.size(-1):
        G = torch.add(G, F.pad(G[..., reach:], (0, reach)), alpha=gamma**reach)
        reach *= 2
    return G


def advantage(G):
    """A (K, B, N): the return G (K, B, N) minus the return expected at that position."""
    K = len(G)
    if K == 1:
        return G - mean_over_processes(G.mean(1))  # eq. 17: the mean over this micro-batch
    return (G - G.mean(0)) * K / (K - 1)  # G_k minus the mean G_j of the row's other draws


def negative_log_pi(l, a):
    """-log pi(a) in nats, for decisions a with logits l."""
    return F.binary_cross_entropy_with_logits(l, a.float(), reduction="none")


def policy_loss(l, a, A):
    """L_pi, eq. 18: the mean of -log pi(a_i) A_i. Position 0 is forced and adds nothing.

    With K > 1, rows drawn only once have A = 0 but count in the mean.
    """
    return (negative_log_pi(l, a) * A)[..., 1:].sum() / l.numel()


def losses(model, logp, early_logp, l, a, hp):
    """The total loss, and its terms for the log: a dictionary of scalar tensors by name."""
    L_auto = -logp[0].mean()  # eq. 25
    if hp.boundaries != "learned":
        L_boundary = model.boundary_loss(l, a)  # experiments/systems.py
        return L_auto + L_boundary, {"auto": L_auto, "boundary": L_boundary}
    R = (logp - early_logp).detach()  # eq. 15; early_logp is 0 without an early exit
    A = advantage(discounted_return(R, hp.gamma))  # eq. 16-17
    L_pi = policy_loss(l, a, A)
    mean_p = mean_over_processes(l.detach().sigmoid().mean())  # of one micro-batch per process
    L_tgt = l.mean() * (mean_p - hp.downsample_rate_target)  # eq. 24
    L_early = -early_logp.mean()  # eq. 26
    L = (L_auto + hp.lambda_pi * L_pi + hp.lambda_target * L_tgt
         + hp.lambda_early * L_early)  # eq. 27
    return L, {"auto": L_auto, "early": L_early, "pi": L_pi, "target": L_tgt}


# ---- Data order: which rows a training step reads, and the uniforms of its draws.
@lru_cache(2)
def row_order(seed, epoch, n):
    """A random permutation of n rows, another one for every epoch."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def micro_batches(shards, first_row, hp, rank, world, device):
    """This process's micro-batches of the training step that starts at row first_row of the run.

    A list of (x, y, u): x and y (B, N) int64, u (K, B, N). The rows and draws of a training step do
    not depend on the number of processes or micro-batches.
    """
    n = sum(map(len, shards))
    K = hp.num_draws if hp.boundaries == "learned" else 1
    mine = range(first_row + rank, first_row + hp.effective_batch_size, world)
    rows = prepare.read_rows(shards, [row_order(hp.seed, i // n, n)[i % n] for i in mine])
    generator = np.random.default_rng([hp.seed, 1, first_row])
    u = generator.random((K, hp.effective_batch_size, hp.seq_len), np.float32)
    x, y = inputs_and_targets(rows, device)
    u = torch.from_numpy(u[:, rank::world]).to(device)
    B = hp.batch_size
    return list(zip(x.split(B), y.split(B), u.split(B, 1)))


# ---- Optimizers.
def orthogonalized(G):
    """Brings the singular values of each matrix in G (n, rows, columns) near 1.

    It takes five Newton-Schulz iterations; see https://kellerjordan.github.io/posts/muon
    """
    if G.size(1) > G.size(2):
        return orthogonalized(G.mT).mT  # so that X @ X.mT is the smaller product
    X = F.normalize(G, dim=(1, 2), eps=1e-7)
    for _ in range(5):
        A = X @ X.mT
        A = torch.baddbmm(A, A, A, beta=-4.775, alpha=2.0315)  # -4.775 A + 2.0315 A A
        X = torch.baddbmm(X, A, X, beta=3.4445)  # 3.4445 X + A X
    return X


class Muon(torch.optim.Optimizer):
    """Steps along each matrix's orthogonalized momentum; Jordan et al., 2024.

    The same as torch.optim.Muon with adjust_lr_fn="match_rms_adamw". We do not use that class: it
    always computes in bfloat16, slow on a T4 and on many CPUs, and updates one matrix at a time.
    """

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for shape in {p.shape for p in group["params"]}:
                parameters = [p for p in group["params"] if p.shape == shape]
                updates = []
                for p in parameters:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 0.05)
                    updates.append(p.grad.lerp(momentum, 0.95))  # Nesterov momentum
                updates = orthogonalized(torch.stack(updates))
                lr = group["lr"]
                for p, update in zip(parameters, updates):
                    p.mul_(1 - lr * group["weight_decay"])
                    p.sub_(update, alpha=lr * 0.2 * max(shape) ** 0.5)


def make_optimizers(model, hp):
    """AdamW, and Muon for the matrices of the blocks unless muon_learning_rate is 0.

    A group's "peak" is its peak learning rate.
    """
    block_matrices, matrices, vectors, policy = [], [], [], []
    for name, p in model.named_parameters():
        if p.dim() < 2:
            vectors.append(p)
        elif name.startswith("policy."):
            policy.append(p)
        elif hp.muon_learning_rate and name.startswith(("down.", "middle.", "up.")):
            block_matrices.append(p)
        else:
            matrices.append(p)
    groups = [
        {"params": matrices, "peak": hp.learning_rate, "weight_decay": hp.weight_decay},
        {"params": vectors, "peak": hp.learning_rate},
        {"params": policy, "peak": hp.policy_learning_rate}]
    # the paper's betas, 0.9 and 0.999, are torch's defaults
    adamw = torch.optim.AdamW(groups, weight_decay=0, fused=True)
    group = {"params": block_matrices, "peak": hp.muon_learning_rate}
    return adamw, Muon([group], {"weight_decay": hp.weight_decay})


# ---- Evaluation.
@torch.no_grad()
def evaluate(model, shards, eval_rows, batch_size, autocast):
    """Validation metrics, and (byte, a, p) for the first 160 bytes of a row, for printing.

    Rows and uniforms are the same every time. val_bpb is in bits per byte, val_stderr its standard
    error over rows, and val_entropy the mean of -log pi(a_i) in nats.
    """
    n = sum(map(len, shards))
    numbers = np.linspace(0, n - 1, min(eval_rows, n), dtype=int)
    x, y = inputs_and_targets(prepare.read_rows(shards, numbers), model.embedding.weight.device)
    u = torch.rand(1, *x.shape, generator=torch.Generator().manual_seed(0)).to(x.device)
    outputs = []
    model.eval()
    for batch in zip(x.split(batch_size), y.split(batch_size), u.split(batch_size, 1)):
        with autocast:
            logp, _, l, a = model(*batch)
        outputs.append((-logp[0] / math.log(2), l[0], a[0]))
    model.train()
    bits, l, a = map(torch.cat, zip(*outputs))
    metrics = {
        "val_bpb": bits.mean().item(),
        "val_stderr": bits.mean(1).std().item() / math.sqrt(len(bits)),
        "val_rate": a.float().mean().item(),
        "val_entropy": negative_log_pi(l[:, 1:], a[:, 1:]).mean().item(),
        **where_tokens_end(x, a)}
    shown = zip(*(z[0, 1:161].tolist() for z in (x, a, l.sigmoid())))
    return metrics, list(shown)


# ---- The program. hp holds the hyperparameters above, as changed by files and flags.
def prepare_torch(device, dtype):
    """Sets torch up for training; returns the context for passes and Muon's matrix products."""
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(device == "cpu")  # resumed runs repeat to the last bit
    torch.utils.deterministic.fill_uninitialized_memory = False
    return torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32")


def compile_model(model, **options):
    """Compiles the parts of the model in place. Layers of one kind share their compiled code."""
    torch._dynamo.config.specialize_float = True  # soft-caps become constants in dynamic graphs
    torch._dynamo.config.optimize_ddp = False  # else DDP cuts a large block into several graphs
    for part in model.modules():
        if isinstance(part, (Block, Policy, Head)):
            part.compile(dynamic=part in model.middle, **options)  # the number of tokens varies


stop_signals = []  # Ctrl-C adds to it: the run then saves a checkpoint and ends


def request_stop(number, _):
    stop_signals.append(number)
    signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C ends the program at once


def main(argv):
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))

    # ---- hyperparameters
    chosen = read_command_line(argv, DEFAULTS, __file__)
    hp = SimpleNamespace(**DEFAULTS | chosen)
    checkpoint = Path(hp.out_dir, "ckpt.pt")
    saved = {}
    with one_line_errors():
        if rank == 0:
            prepare.lock(checkpoint.parent)
        if hp.resume:
            saved = read_checkpoint(checkpoint)
            old = saved["config"]
            if unknown := sorted(old.keys() - DEFAULTS.keys()):
                fail(f"{checkpoint} sets {', '.join(unknown)}, which train.py does not know")
            for key in sorted(DEFAULTS.keys() - old.keys()):
                print(f"{checkpoint} does not set {key}; using the default, {DEFAULTS[key]}")
            old = DEFAULTS | old
            hp = SimpleNamespace(**old | chosen)
            for key in "seq_len", "num_heads":
                if vars(hp)[key] != old[key]:
                    fail(f"{key} cannot change when a run resumes; it was {old[key]}")
            if (hp.muon_learning_rate > 0) != (old["muon_learning_rate"] > 0):
                fail("muon_learning_rate cannot change from or to 0 when a run resumes; it was "
                     f"{old['muon_learning_rate']}")
        elif checkpoint.exists():
            fail(f"{checkpoint} exists; continue it with --resume=True, or use another --out_dir")
        check(hp, world)
        torch.manual_seed(hp.seed)
        model = make_model(vars(hp))
        if saved:
            load_weights(model, saved, checkpoint)

    # ---- machine
    device, precision = device_and_dtype(hp.device, hp.dtype)
    gpu = None
    if device == "cuda":
        gpu = int(os.environ.get("LOCAL_RANK", 0))
        if gpu >= torch.cuda.device_count():
            fail(f"this machine has {torch.cuda.device_count()} GPUs; start one process for each")
        torch.cuda.set_device(gpu)
    if world > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo", device_id=gpu)
    autocast = prepare_torch(device, precision)
    scaler = torch.amp.GradScaler(device, enabled=precision == "float16")

    # ---- data
    if rank == 0 and hp.data == "data/stdlib" and not Path(hp.data, "meta.json").exists():
        prepare.main([])
    if world > 1:
        dist.barrier()  # the others wait for the data
    with one_line_errors():
        train_shards = prepare.open_shards(hp.data, "train", hp.seq_len)
        val_shards = prepare.open_shards(hp.data, "val", hp.seq_len)
    if world > 1:
        mine = saved.get("step"), Path(hp.data, "meta.json").read_bytes()
        everyones = [None] * world
        dist.all_gather_object(everyones, mine)
        if everyones.count(mine) < world:
            dist.destroy_process_group()  # gloo's threads may abort once Python has ended
            fail("the processes see different checkpoints or data; with several nodes, put out_dir "
                 "and data on a disk that all of them share")

    # ---- model
    model.to(device)
    compiled = hp.compile and device != "mps"
    if compiled:
        compile_model(model)
    net = DistributedDataParallel(model, gradient_as_bucket_view=True) if world > 1 else model

    # ---- optimizers
    optimizers = make_optimizers(model, hp)
    adamw, muon = optimizers
    muon.state = adamw.state  # one dictionary for all parameters
    if saved:
        for name, p in model.named_parameters():  # by name, since flags or code may change groups
            state = saved["optimizer"][name]
            adamw.state[p] = {key: value.to(device) for key, value in state.items()}
        if saved["scaler"]:  # the saved run used float16
            scaler.load_state_dict(saved["scaler"])

    # ---- loop
    step_bytes = hp.effective_batch_size * hp.seq_len
    step = first_step = saved.get("step", 0)
    rows_seen = saved.get("rows_seen", 0)
    bytes_seen = rows_seen * hp.seq_len
    seconds = []  # of each training step since the last log line
    if rank == 0:
        log = checkpoint.with_name("log.jsonl").open("a", buffering=1)
        log.truncate(min(log.tell(), saved.get("log_bytes", 0)))  # drop lines after the checkpoint
        print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters"
              + "; compiling the first training steps may take a minute" * compiled)
    signal.signal(signal.SIGINT, request_stop)
    signal.signal(signal.SIGTERM, request_stop)  # from schedulers

    while True:
        finished = bytes_seen >= hp.training_bytes
        stopping = torch.tensor(float(len(stop_signals)), device=device)
        stopping = mean_over_processes(stopping) > 0
        evaluating = step % hp.eval_interval == 0 or finished
        if rank == 0 and evaluating and (step > first_step or not saved):
            rows = math.ceil(hp.redrawn * hp.batch_size)  # as in second draws: reuses their graph
            metrics, shown = evaluate(model, val_shards, hp.eval_rows, rows, autocast)
            if not math.isfinite(metrics["val_bpb"]):
                raise FloatingPointError(f"step {step}: the validation loss is not finite")
            record = {"step": step, "bytes": bytes_seen, **metrics, "line": shown}
            print(json.dumps(record), file=log)
            print(f"step {step} val {metrics['val_bpb']:.3f} bits/byte, "
                  f"rate {metrics['val_rate']:.3f} | "
                  f"{metrics['ends_between']:.0%} of tokens end between words")
            print("".join(marked(shown[:80])).replace("\n", "⏎"))
        if rank == 0 and (evaluating or stopping) and step > first_step:
            moments = {name: adamw.state[p] for name, p in model.named_parameters()}
            state = {
                "model": model.state_dict(), "optimizer": moments,
                "scaler": scaler.state_dict(), "config": vars(hp), "step": step,
                "rows_seen": rows_seen, "log_bytes": os.path.getsize(log.name)}
            part = checkpoint.with_suffix(".part")
            try:
                torch.save(state, part)
                part.replace(checkpoint)  # so that ckpt.pt is never half-written
            except (OSError, RuntimeError) as error:
                fail(f"cannot write {checkpoint}, which is unchanged: {error}")
        if finished or stopping:
            break

        step += 1
        started = time.perf_counter()
        batches = micro_batches(train_shards, rows_seen, hp, rank, world, device)
        rows_seen += hp.effective_batch_size
        bytes_seen += step_bytes
        for i, (x, y, u) in enumerate(batches):
            net.require_backward_grad_sync = i == len(batches) - 1  # average gradients once
            with autocast:
                logp, early_logp, l, a = net(x, y, u)
            L, terms = losses(model, logp, early_logp, l, a, hp)
            scaler.scale(L / len(batches)).backward()

        turns = [0, hp.warmup_bytes, max(hp.warmup_bytes, hp.training_bytes)]
        fraction = np.interp(bytes_seen, turns, [0, 1, 0])  # of the peak learning rate
        if hp.cosine and bytes_seen > hp.warmup_bytes:
            fraction = (1 - math.cos(math.pi * fraction)) / 2
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * fraction
            scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), hp.grad_clip).item()
        if math.isfinite(grad_norm):
            with autocast:  # for Muon's matrix products
                for optimizer in optimizers:
                    optimizer.step()
        elif scaler.get_scale() <= 1:  # if it is above 1, float16 overflowed: skip this step
            raise FloatingPointError(f"step {step}: the gradient is not finite")
        scaler.update()
        model.zero_grad()
        seconds.append(time.perf_counter() - started)

        if step % hp.log_interval == 0:  # shows the last micro-batch
            entropy = negative_log_pi(l[0, :, 1:], a[0, :, 1:]).mean()
            flops = executed_flops(model, a) / x.numel() + muon_flops(muon) / step_bytes
            terms |= {"rate": a[0].float().mean(), "entropy": entropy, "flops_per_byte": flops}
            terms = {name: mean_over_processes(z.detach()).item() for name, z in terms.items()}
            speed = step_bytes / np.mean(seconds)
            minutes_left = (hp.training_bytes - bytes_seen) / speed / 60
            if rank == 0:
                record = {"step": step, "bytes": bytes_seen, **terms, "grad_norm": grad_norm,
                          "bytes_per_second": speed}
                print(json.dumps(record), file=log)
                print(f"step {step} {bytes_seen / 1e6:.2f} MB | "
                      f"{terms['auto'] / math.log(2):.3f} bits/byte, rate {terms['rate']:.3f}, "
                      f"entropy {terms['entropy']:.3f} | norm {grad_norm:.2f} | "
                      f"{speed / 1e3:.1f} kB/s, {minutes_left:.1f} min left")
            seconds.clear()

    if rank == 0 and finished:
        print(f"done; generate text with: python sample.py --out_dir={checkpoint.parent}")
    elif rank == 0:
        print(f"stopped after step {step}; continue with --resume=True "
              f"--out_dir={checkpoint.parent}")
    if world > 1:
        dist.barrier()
        os._exit(0)  # a normal exit may abort: gloo's threads can outlive Python


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    try:
        main(sys.argv[1:])
    except FloatingPointError as error:
        fail(f"{error}; use a smaller learning_rate or muon_learning_rate, or a larger "
             "warmup_bytes. The last checkpoint, if any, is unchanged", code=1)
    except (inductor.InductorError, inductor.TritonMissing, inductor.GPUTooOldForTriton) as error:
        if stop_signals:  # Ctrl-C reaches the C++ compiler as well
            fail("stopped while compiling; the last checkpoint is intact", code=130)
        fail(f"torch.compile failed: {str(error).splitlines()[0]}; use --compile=False, or install "
             "a C++ compiler (on a GPU, Triton)")
