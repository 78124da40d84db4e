"""
Generates text with a trained model and shows where its tokens end.

    python sample.py --start="def main" --num_samples=3 --temperature=0.8 --top_k=50
    python sample.py --score=FILE                  shows the boundaries of a file (- for stdin)
    python sample.py --text="def main(argv):"      shows the boundaries of this text

A │ marks the end of a token. On a terminal the colour is the policy's probability of a
boundary after that character: blue is low, yellow is high. tokens() and vectors() are for use in
Python.
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
from model import BOS, VOCAB_SIZE, draw, softcapped_attention, token_layout

GENERATED_ONLY = "num_samples", "max_new_bytes", "temperature", "top_k"


@dataclass
class Settings:
    out_dir: str = "out"  # folder where train.py left ckpt.pt
    start: bytes = b""  # the text to continue; FILE:PATH reads it from a file
    score: str = ""  # or a file whose boundaries to show; - for stdin
    text: bytes = b""  # or a text whose boundaries to show
    deterministic: bool = False  # True: a token ends where p > 1/2; False: boundaries are drawn
    seed: int = 1337  # of the draws
    device: str = "auto"  # "auto", "cpu", "cuda" or "mps"

    # of generated texts only
    num_samples: int = 1  # texts; they are generated as one batch
    max_new_bytes: int = 300  # length of each text
    temperature: float = 0.8  # below 1: likelier bytes; 0: always the likeliest
    top_k: int = 50  # draw from this many likeliest bytes


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
    """The keys and values of one layer, at the last `reach` positions."""

    def __init__(self, reach):
        self.reach = reach
        self.k = self.v = None
        self.mask = None  # (..., new positions, cached and new positions)

    def attend(self, q, k, v):
        """Attention of new positions (B, heads, n, head_dim), where the mask is True."""
        if self.k is not None:
            k = torch.cat((self.k, k), dim=2)
            v = torch.cat((self.v, v), dim=2)
        start = max(k.size(2) - self.reach, 0)
        self.k = k[:, :, start:]
        self.v = v[:, :, start:]
        return softcapped_attention(q, k, v, self.mask)


def band(n, total, window):
    """The mask of n new positions, the last ones of total, that see window positions."""
    mask = torch.ones(n, total, dtype=torch.bool)
    return mask.tril(total - n).triu(total - n - window + 1)


class Reader:
    """Reads B rows of bytes piece by piece: a part of the prompt, or one byte of each row.

    The outputs are those that Model.forward has for the same bytes and uniforms.
    """
    longest = 256  # bytes of a piece; the time and memory of a layer are their square

    def __init__(self, model, B):
        hp = model.hp
        self.model = model
        self.down = [Cache(hp.attention_window - 1) for _ in model.down]
        self.middle = [Cache(math.inf) for _ in model.middle]
        self.up = [Cache(hp.attention_window - 1) for _ in model.up]
        self.position = 0
        self.last = model.embedding.weight.new_zeros(B, 1, hp.embedding_dim)  # each row's last Y'
        self.used = self.last.new_zeros(B, 0).bool()  # where the middle's caches hold a token
        self.decisions = self.last.new_zeros(B, hp.policy_window)  # the last w a

    def read(self, x, u):
        """The next bytes x and their uniforms u (B, n) -> a, p (B, n), logits (B, n, 257)."""
        model, window, (B, n) = self.model, self.model.hp.attention_window, x.shape
        mask = band(n, n + min(self.position, window - 1), window).to(x.device)
        for cache in self.down + self.up:
            cache.mask = mask
        positions = torch.arange(self.position, self.position + n, device=x.device)
        X = model.transform(model.down, model.embedding(x), positions, caches=self.down)
        p = model.policy(X).sigmoid()  # (B, n, 2^w)
        if self.position == 0:
            p[:, 0] = 1.0
        self.position += n

        # the earlier decisions are drawn again, with p = 1 or 0: they are the new ones' history
        w = self.decisions.size(1)
        earlier = self.decisions[..., None].expand(-1, -1, p.size(2))
        a, history = draw(torch.cat((earlier, p), dim=1), F.pad(u, (w, 0)))
        self.decisions = a[:, n:].float()
        a = a[:, w:]
        p = p.gather(-1, history[:, w:])[..., 0]

        tokens = self.last
        count = a.sum(1, keepdim=True)
        M = int(count.max())
        if M > 0:
            # each row's boundaries, then other bytes in rows with fewer than M, which are no tokens
            ends = a.int().argsort(dim=1, descending=True, stable=True)[:, :M]
            used = torch.arange(M, device=x.device) < count
            self.used = torch.cat((self.used, used), dim=1)
            total = self.used.size(1)
            mask = self.used[:, None, None] & band(M, total, total).to(x.device)
            for cache in self.middle:
                cache.mask = mask
            selected = X.gather(1, ends[..., None].expand(-1, -1, X.size(2)))  # X' (B, M, D)
            new = model.transform(model.middle, selected, positions[ends], caches=self.middle)
            tokens = torch.cat((tokens, new), dim=1)  # Y' (B, 1 + M, D)
        first = torch.arange(B, device=x.device)[:, None] * tokens.size(1)
        reads = first + a.cumsum(1)
        tokens = tokens.flatten(0, 1)
        self.last = tokens[reads[:, -1:]]
        Y = model.upsample(X, tokens, reads)
        Z = model.transform(model.up, Y, positions, caches=self.up)
        return a, p, model.head.logits(Z)


class Rereader:
    """A Reader for the other systems. It reads a row anew for every piece."""
    longest = sys.maxsize

    def __init__(self, model):
        self.model = model
        self.pieces = []

    def read(self, x, u):
        self.pieces.append((x, u))
        Z, l, a = self.model.outputs(*(torch.cat(row, dim=1) for row in zip(*self.pieces)))
        n = x.size(1)
        return a[:, -n:], l[:, -n:].sigmoid(), self.model.head.logits(Z[:, -n:])


def next_byte(logits, v, temperature, top_k):
    """Draws one byte per row from logits (B, 257), with uniforms v (B,)."""
    logits, byte = logits[:, :BOS].topk(min(top_k, BOS))  # <bos> is no byte
    logits = (logits - logits[:, :1]) / max(temperature, 1e-30)  # so 0 takes the likeliest byte
    below = logits.softmax(-1).cumsum(-1)
    place = torch.searchsorted(below, v[:, None] * below[:, -1:], right=True)
    return byte.gather(1, place)[:, 0]


@torch.inference_mode()  # takes a fifth less time than no_grad
def generate(model, x, max_new_bytes, temperature, top_k, deterministic=False):
    """Continues the prompts x (B, N), x_0 = <bos>, with a model in evaluation mode.

    Yields for every byte after <bos>, starting with the prompt's: the byte, whether a token ends
    there, the policy's p, and the byte's negative log-likelihood in nats at temperature 1; all
    (B,). With deterministic=True a token ends where p > 1/2.
    """
    B, N = x.shape
    reader = Reader(model, B) if model.hp.system == "learned" else Rereader(model)
    logits = torch.zeros(B, 1, VOCAB_SIZE, device=x.device)  # for <bos>, which is not yielded
    done = 0
    while done < N + max_new_bytes:
        if done < N:
            piece = x[:, done : done + reader.longest]
            u = torch.rand(piece.shape)
        else:
            v, u = torch.rand(2, B)
            piece = next_byte(logits[:, -1], v.to(x.device), temperature, top_k)[:, None]
            u = u[:, None]
        if deterministic:
            u = torch.full_like(u, 0.5)
        a, p, after = reader.read(piece, u.to(x.device))
        logits = torch.cat((logits[:, -1:], after), dim=1)
        nats = F.cross_entropy(logits[:, :-1].mT, piece, reduction="none")
        steps = zip(*(z.unbind(1) for z in (piece, a, p, nats)))
        if done == 0:
            next(steps)  # <bos>
        yield from steps
        done += piece.size(1)


def prompt(start):
    """The text to continue, bytes or FILE:PATH, as a row x (1, N) for generate."""
    if start.startswith(b"FILE:"):
        start = Path(os.fsdecode(start[5:])).expanduser().read_bytes()
    return torch.tensor([[BOS, *start]])


# ---- Boundaries of a text.
@torch.inference_mode()
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
    model, _ = load_model(out_dir)
    return model


def tokens(model, text, deterministic=False):
    """Yields (token, p) for the tokens of a text, a str or bytes.

    A token is bytes. p is the policy's probability that it ends there, or None if it ends only
    because the text does.
    """
    text = text.encode() if isinstance(text, str) else text
    start = 0
    for end, (_, a, p, _) in enumerate(scored(model, text, deterministic), 1):
        if a or end == len(text):
            yield text[start:end], p if a else None
            start = end


@torch.no_grad()
def vectors(model, text):
    """The tokens' vectors after the middle: Y' (tokens, D), that of <bos> first.

    text, a str or bytes, has at most seq_len bytes. Tokens end where p > 1/2, as those of tokens
    with deterministic=True, but the end of the text ends none. Raises UserError if the text is
    longer, or the model is not a learned one.
    """
    text = text.encode() if isinstance(text, str) else text
    if model.hp.system != "learned" or len(text) > model.hp.seq_len:
        raise UserError(f"vectors needs a learned model, not {model.hp.system}, and at most "
                        f"seq_len={model.hp.seq_len} bytes of text, not {len(text)}")
    x = torch.tensor([[BOS, *text]], device=model.embedding.weight.device)
    _, _, _, a = model(x, x, torch.full(x.shape, 0.5, device=x.device))
    ends, _, positions, slots = token_layout(a)
    Y = model.transform(model.middle, model.encode(x)[0, ends], positions, slots)
    return Y[: a.sum()]


# ---- The program.
def row_of(steps, r):
    """Row r of the steps that generate yields, as numbers."""
    for step in steps:
        yield [z[r].item() for z in step]


def bits_per_byte(nats, seq_len):
    """The mean of nats in bits, with its standard error over rows of seq_len bytes, as a text."""
    bits = torch.tensor(nats) / math.log(2)
    rows = (bits - bits.mean()).split(seq_len)
    if len(rows) == 1:
        return f"{bits.mean():.3f} bits per byte"
    deviation = torch.stack([row.sum() for row in rows]).std()
    error = math.sqrt(len(rows)) * deviation / len(bits)
    return f"{bits.mean():.3f} ± {error:.3f} bits per byte"


def main(argv):
    """Runs the command line. Raises UserError."""
    chosen = read_command_line(argv, Settings)
    given = [key for key in ("start", "score", "text") if key in chosen]
    if len(given) > 1:
        raise UserError(f"--{' and --'.join(given)} exclude each other; give one of them")
    ignored = [key for key in GENERATED_ONLY if key in chosen]
    if ignored and given and given != ["start"]:
        raise UserError(f"--{given[0]} generates nothing; leave out --{' and --'.join(ignored)}")
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
        x = prompt(options.start).to(device).expand(options.num_samples, -1)
        steps = generate(model, x, options.max_new_bytes, options.temperature, options.top_k,
                         options.deterministic)
        streams = [row_of(copy, r) for r, copy in enumerate(tee(steps, options.num_samples))]
    started = time.perf_counter()
    ends = 0
    nats = []
    for stream in streams:
        shown, again = tee(stream)
        for piece in marked(shown):
            print(piece, end="", flush=True)
        print("\n" + "-" * 80)
        for _, a, _, cost in again:
            ends += a
            nats.append(cost)
        ends += not a  # the last token ends with the text
    seconds = time.perf_counter() - started
    n = len(nats)
    # a generated text is drawn at another temperature than its bits are computed for
    bits = f", {bits_per_byte(nats, model.hp.seq_len)}" if text else ""
    print(f"{n} bytes, {ends} tokens, {n / ends:.2f} bytes per token{bits}, "
          f"{n / seconds:.0f} bytes per second")


if __name__ == "__main__":
    run_program(main)
