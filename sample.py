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
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from configurator import UserError, argument_parser, device_and_dtype, marked, run
from experiments.systems import load_checkpoint
from model import BOS, softcapped_attention


class Cache:
    """Replaces Attention.attend during generation: keeps the keys and values of one layer.

    Each call brings one new position for some rows. Before it, generate sets now.rows (R,), the
    numbers of these rows, and now.position (R,) or (1,), how many positions each has so far. With a
    window, the newest position overwrites the oldest one.
    """

    def __init__(self, size, now):
        self.size = size
        self.now = now
        self.k = None

    def __call__(self, q, k, v):  # (R, heads, 1, head_dim)
        rows, position = self.now.rows, self.now.position
        if self.k is None:
            self.k = k.new_zeros(len(k), k.size(1), self.size, k.size(3))
            self.v = torch.zeros_like(self.k)
        slot = position % self.size
        self.k[rows, :, slot] = k[:, :, 0]
        self.v[rows, :, slot] = v[:, :, 0]
        used = min(int(position.max()) + 1, self.size)
        mask = torch.arange(used, device=k.device) <= position[:, None]  # (R, used)
        k = self.k[rows, :, :used]
        v = self.v[rows, :, :used]
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
    if model.config.system != "learned":
        yield from generate_without_cache(model, x, max_new_bytes, temperature, top_k)
        return
    B, N = x.shape
    bytes_now, tokens_now = SimpleNamespace(), SimpleNamespace()
    blocks = [*model.down, *model.middle, *model.up]
    for block in blocks:
        window = block.attention.window  # the token layers have none
        now = bytes_now if window else tokens_now
        block.attention.attend = Cache(window or N + max_new_bytes, now)
    try:
        all_rows = torch.arange(B, device=x.device)
        history = torch.zeros_like(all_rows)  # bit j-1 is a_{i-j}, as in Policy
        count = torch.zeros_like(all_rows)  # tokens of each row so far
        tokens = torch.zeros(B, model.config.embedding_dim, device=x.device)  # each row's last Y'
        for i in range(N + max_new_bytes):
            byte = x[:, i] if i < N else next_byte(logits, temperature, top_k)
            position = torch.tensor([i], device=x.device)
            bytes_now.rows, bytes_now.position = all_rows, position
            X = model.run(model.down, model.embedding(byte[:, None]), position)  # (B, 1, D)
            l = model.policy(X)[:, 0]  # (B, 2^w)
            p = l.gather(1, history[:, None])[:, 0].sigmoid()
            a = torch.rand(B).to(p) < p
            if i == 0:
                a[:] = True
            history = (2 * history + a) % l.size(1)
            rows = a.nonzero()[:, 0]
            if len(rows) > 0:
                tokens_now.rows, tokens_now.position = rows, count[rows]
                tokens[rows] = model.run(model.middle, X[rows], position)[:, 0]
                count[rows] += 1
            Y = model.upsample(X, tokens, all_rows[:, None])
            Z = model.run(model.up, Y, position)[:, 0]
            if i > 0:
                yield byte, a, p, F.cross_entropy(logits, byte, reduction="none")
            logits = model.head.logits(Z)
    finally:
        for block in blocks:
            del block.attention.attend  # restores the class's method


@torch.no_grad()
def generate_without_cache(model, x, max_new_bytes, temperature, top_k):
    """The same for the other systems. Each byte costs a pass over all bytes before it."""
    B, N = x.shape
    u = torch.rand(B, N + max_new_bytes).to(x.device)
    shown = 1  # positions already yielded; <bos> never is
    for _ in range(max_new_bytes + 1):
        Z, l, a = model.outputs(x, u[:, : x.size(1)])
        nats = -model.head(Z[:, :-1], x[:, 1:])
        for i in range(shown, x.size(1)):
            yield x[:, i], a[:, i], l[:, i].sigmoid(), nats[:, i - 1]
        shown = x.size(1)
        byte = next_byte(model.head.logits(Z[:, -1]), temperature, top_k)
        x = torch.cat((x, byte[:, None]), dim=1)


@torch.no_grad()
def scored(model, text, deterministic=False):
    """Yields (byte, a, p, nats) for the bytes of a text, read in rows of seq_len bytes.

    Boundaries are drawn, or with deterministic=True they are where p > 1/2.
    """
    device = model.embedding.weight.device
    for start in range(0, len(text), model.config.seq_len):
        row = text[start : start + model.config.seq_len]
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
    model, _ = load_checkpoint(Path(out_dir).expanduser() / "ckpt.pt")
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


def main(argv=None):
    """Runs the command line. Raises UserError."""
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--out_dir", default="out", help="folder where train.py left ckpt.pt (%(default)s)")
    given = parser.add_mutually_exclusive_group().add_argument
    given("--start", default="", help="the text to continue")
    given("--score", metavar="FILE", help="show the boundaries of this file, or of stdin: -")
    given("--text", help="show the boundaries of this text")
    add("--deterministic", action="store_true",
        help="draw nothing: a token of the given text ends where p > 1/2")
    add("--num_samples", type=int, default=1, help="texts to generate (%(default)s)")
    add("--max_new_bytes", type=int, default=300, help="length of each text (%(default)s)")
    add("--temperature", type=float, default=0.8,
        help="below 1: likelier bytes; 0: always the likeliest (%(default)s)")
    add("--top_k", type=int, default=50, help="draw from this many likeliest bytes (%(default)s)")
    add("--seed", type=int, default=1337)
    add("--device", default="auto", help="cpu, cuda or mps (%(default)s)")
    options = parser.parse_args(argv)
    for key in "num_samples", "max_new_bytes", "top_k":
        if vars(options)[key] < 1:
            raise UserError(f"--{key}={vars(options)[key]} must be at least 1")
    if not 0 <= options.temperature < math.inf:
        raise UserError(f"--temperature={options.temperature} must be at least 0")
    device, _ = device_and_dtype(options.device, "float32")
    model = load(options.out_dir).to(device)
    text = None
    if options.score == "-":
        text = sys.stdin.buffer.read()
    elif options.score:
        text = Path(options.score).expanduser().read_bytes()
    elif options.text is not None:
        text = os.fsencode(options.text)
    if text == b"":
        raise UserError("the given text is empty")

    torch.manual_seed(options.seed)
    prompt = torch.tensor([[BOS, *os.fsencode(options.start)]], device=device)
    started = time.perf_counter()
    steps = []

    def kept(stream):
        for byte, a, p, nats in stream:
            steps.append((bool(a), float(nats)))
            yield int(byte), bool(a), float(p)

    for _ in range(1 if text else options.num_samples):
        if text:
            stream = scored(model, text, options.deterministic)
        else:
            stream = generate(
                model, prompt, options.max_new_bytes, options.temperature, options.top_k)
        for piece in marked(kept(stream)):
            print(piece, end="", flush=True)
        print("\n" + "-" * 80)
    seconds = time.perf_counter() - started
    n = len(steps)
    ends = sum(a for a, _ in steps)
    bits = sum(nats for _, nats in steps) / math.log(2)
    print(f"{n} bytes, {ends} tokens, {n / max(ends, 1):.2f} bytes per token, "
          f"{bits / n:.3f} bits per byte, {n / seconds:.0f} bytes per second")


if __name__ == "__main__":
    run(main)
