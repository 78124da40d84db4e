"""
Generates text with a trained model and shows where its tokens end.

    python sample.py --start="def main" --num_samples=3 --temperature=0.8 --top_k=50
    python sample.py --score=FILE                  shows the boundaries of a file (- for stdin)
    python sample.py --text="def main(argv):"      shows the boundaries of this text

A │ marks the end of a token. On a terminal the colour is the policy's probability of a
boundary after that character: blue is low, yellow is high. README shows how to get the tokens
in Python.
"""
import math
import os
import sys
import time
from dataclasses import dataclass
from itertools import tee
from pathlib import Path

import torch
import torch.nn.functional as F

from common.checkpoint import device_and_dtype, load_model
from common.commandline import UserError, read_command_line, run_program
from common.text import marked
from model import BOS, softcapped_attention


@dataclass
class Settings:
    out_dir: str = "out"  # folder where train.py left ckpt.pt
    start: bytes = b""  # the text to continue; FILE:PATH reads it from a file
    score: str = ""  # or a file whose boundaries to show; - for stdin
    text: bytes = b""  # or a text whose boundaries to show
    deterministic: bool = False  # True: draw nothing; a token of the text ends where p > 1/2
    num_samples: int = 1  # texts to generate
    max_new_bytes: int = 300  # length of each text
    temperature: float = 0.8  # below 1: likelier bytes; 0: always the likeliest
    top_k: int = 50  # draw from this many likeliest bytes
    seed: int = 1337  # of the draws
    device: str = "auto"  # "auto", "cpu", "cuda" or "mps"


def check(options):
    """Raises UserError if these settings cannot be used."""
    for name in "num_samples", "max_new_bytes", "top_k":
        if getattr(options, name) <= 0:
            raise UserError(f"{name}={getattr(options, name)} must be above 0")
    if options.temperature < 0:
        raise UserError(f"temperature={options.temperature} must not be negative")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"seed={options.seed} must be from 0 to 2**63 - 1")


# ---- Generation.
class Cache:
    """The keys and values of one layer's earlier positions, for `size` positions of B rows.

    Once it is full, the newest position overwrites the oldest one.
    """

    def __init__(self, B, size, device):
        self.size = size
        self.count = torch.zeros(B, dtype=torch.int64, device=device)  # positions so far
        self.rows = torch.arange(B, device=device)  # that the next call is for
        self.k = self.v = None

    def attend(self, q, k, v):
        """Attention of one new position of each of self.rows (R,), (R, heads, 1, head_dim)."""
        if self.k is None:
            shape = len(self.count), k.size(1), self.size, k.size(3)
            self.k, self.v = k.new_zeros(shape), v.new_zeros(shape)
        rows = self.rows
        slot = self.count[rows] % self.size
        self.k[rows, :, slot] = k[:, :, 0]
        self.v[rows, :, slot] = v[:, :, 0]
        self.count[rows] += 1
        used = self.count[rows].clamp(max=self.size)
        most = int(used.max())
        mask = torch.arange(most, device=k.device) < used[:, None]  # (R, most)
        k = self.k[rows, :, :most]
        v = self.v[rows, :, :most]
        return softcapped_attention(q, k, v, mask[:, None, None])


def next_byte(logits, temperature, top_k):
    """Draws one byte per row from logits (B, 257); temperature 0 takes the likeliest one."""
    logits = logits[:, :BOS]  # <bos> is no byte
    if temperature == 0:
        return logits.argmax(-1)
    smallest = logits.topk(min(top_k, logits.size(1))).values[:, -1:]
    logits = logits.masked_fill(logits < smallest, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]


@torch.no_grad()
def generate(model, x, max_new_bytes, temperature, top_k):
    """Continues the prompts x (B, N), x_0 = <bos>, with a model in evaluation mode.

    Yields for every byte after <bos>, starting with the prompt's: the byte, whether a token ends
    there, the policy's p, and the byte's negative log-likelihood in nats at temperature 1; all
    (B,). A byte costs one position of the byte layers, and one of the middle where a token ends; a
    prompt is read byte by byte too.
    """
    if model.hp.system != "learned":
        yield from generate_without_cache(model, x, max_new_bytes, temperature, top_k)
        return
    B, N = x.shape
    window = model.hp.attention_window
    down = [Cache(B, window, x.device) for _ in model.down]
    middle = [Cache(B, N + max_new_bytes, x.device) for _ in model.middle]
    up = [Cache(B, window, x.device) for _ in model.up]
    all_rows = torch.arange(B, device=x.device)
    history = torch.zeros_like(all_rows)  # bit j-1 is a_{i-j}, as in Policy
    last = torch.zeros(B, model.hp.embedding_dim, device=x.device)  # each row's last Y'
    for i in range(N + max_new_bytes):
        byte = x[:, i] if i < N else next_byte(logits, temperature, top_k)
        position = torch.tensor([i], device=x.device)
        X = model.transform(model.down, model.embedding(byte[:, None]), position, caches=down)
        l = model.policy(X)[:, 0]  # (B, 2^w)
        p = l.gather(1, history[:, None])[:, 0].sigmoid()
        a = torch.rand(B).to(p) < p
        if i == 0:
            a[:] = True
        history = (2 * history + a) % l.size(1)
        rows = a.nonzero()[:, 0]
        if len(rows) > 0:
            for cache in middle:
                cache.rows = rows
            last[rows] = model.transform(model.middle, X[rows], position, caches=middle)[:, 0]
        Y = model.upsample(X, last, all_rows[:, None])  # (B, 1, D)
        Z = model.transform(model.up, Y, position, caches=up)[:, 0]
        if i > 0:
            yield byte, a, p, F.cross_entropy(logits, byte, reduction="none")
        logits = model.head.logits(Z)


@torch.no_grad()
def generate_without_cache(model, x, max_new_bytes, temperature, top_k):
    """The same for the other systems. Each byte costs a pass over all bytes before it."""
    B, N = x.shape
    u = torch.rand(B, N + max_new_bytes).to(x.device)
    shown = 1  # positions already yielded; <bos> never is
    for _ in range(max_new_bytes + 1):
        Z, l, a = model.outputs(x, u[:, : x.size(1)])
        nats = -model.head.logp(Z[:, :-1], x[:, 1:])
        for i in range(shown, x.size(1)):
            yield x[:, i], a[:, i], l[:, i].sigmoid(), nats[:, i - 1]
        shown = x.size(1)
        byte = next_byte(model.head.logits(Z[:, -1]), temperature, top_k)
        x = torch.cat((x, byte[:, None]), dim=1)


def prompt(start):
    """The text to continue, bytes or FILE:PATH, as a row x (1, N) for generate."""
    if start.startswith(b"FILE:"):
        start = Path(os.fsdecode(start[5:])).expanduser().read_bytes()
    return torch.tensor([[BOS, *start]])


# ---- Boundaries of a text.
@torch.no_grad()
def scored(model, text, deterministic=False):
    """Yields (byte, a, p, nats) for the bytes of a text, read in rows of seq_len bytes.

    Boundaries are drawn, or with deterministic=True they are where p > 1/2.
    """
    device = model.embedding.weight.device
    for start in range(0, len(text), model.hp.seq_len):
        row = text[start : start + model.hp.seq_len]
        x = torch.tensor([[BOS, *row]], device=device)
        y = x.roll(-1)  # the last target is unused
        u = torch.rand(x.shape).to(device)
        if deterministic:
            u.fill_(0.5)
        logp, _, l, a = model(x, y, u)
        nats = -logp[0, :-1]
        yield from zip(row, a[0, 1:].tolist(), l[0, 1:].sigmoid().tolist(), nats.tolist())


def load(out_dir="out"):
    """The model that train.py saved in a folder, in evaluation mode on the CPU. Or UserError."""
    model, _ = load_model(Path(out_dir).expanduser() / "ckpt.pt")
    return model


def tokens(model, text, deterministic=False):
    """Yields (start, end, p) for the tokens of a text, a str or bytes.

    A token is the text's bytes from start to end, without end. p is the policy's probability that
    it ends there.
    """
    text = text if isinstance(text, bytes) else text.encode()
    start = 0
    for end, (_, a, p, _) in enumerate(scored(model, text, deterministic), 1):
        if a or end == len(text):
            yield start, end, p
            start = end


# ---- The program.
def main(argv):
    """Runs the command line. Raises UserError."""
    chosen = read_command_line(argv, Settings)
    given = [key for key in ("start", "score", "text") if key in chosen]
    if len(given) > 1:
        raise UserError(f"--{' and --'.join(given)} exclude each other; give one of them")
    options = Settings(**chosen)
    check(options)
    device, _ = device_and_dtype(options.device, "float32")
    model = load(options.out_dir).to(device)
    text = options.text
    if options.score == "-":
        text = sys.stdin.buffer.read()
    elif options.score:
        text = Path(options.score).read_bytes()

    torch.manual_seed(options.seed)
    if text:
        streams = [scored(model, text, options.deterministic)]
    elif "text" in chosen or "score" in chosen:
        raise UserError("the given text is empty")
    else:
        x = prompt(options.start).to(device)
        streams = [
            generate(model, x, options.max_new_bytes, options.temperature, options.top_k)
            for _ in range(options.num_samples)]
    started = time.perf_counter()
    n = ends = nats = 0
    for stream in streams:
        shown, again = tee(stream)
        for piece in marked(shown):
            print(piece, end="", flush=True)
        print("\n" + "-" * 80)
        for _, a, _, cost in again:
            n += 1
            ends += int(a)
            nats += float(cost)
        ends += not a  # the last token ends with the text
    seconds = time.perf_counter() - started
    # a generated text is drawn at another temperature than its bits are computed for
    bits = f", {nats / n / math.log(2):.3f} bits per byte" if text else ""
    print(f"{n} bytes, {ends} tokens, {n / ends:.2f} bytes per token{bits}, "
          f"{n / seconds:.0f} bytes per second")


if __name__ == "__main__":
    run_program(main)
