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
from itertools import tee
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from configurator import UserError, check, device_and_dtype, marked, read_command_line, run
from experiments.systems import load_checkpoint
from model import BOS, softcapped_attention

# ---- Settings, which --key=value overrides. A flag is parsed as the type of its default; where
# that is bytes, its text is taken as it is.
DEFAULTS = dict(
    out_dir="out",  # folder where train.py left ckpt.pt
    start=b"",  # the text to continue; FILE:PATH reads it from a file
    score="",  # or a file whose boundaries to show; - for stdin
    text=b"",  # or a text whose boundaries to show
    deterministic=False,  # True: draw nothing; a token of the given text ends where p > 1/2
    num_samples=1,  # texts to generate
    max_new_bytes=300,  # length of each text
    temperature=0.8,  # below 1: likelier bytes; 0: always the likeliest
    top_k=50,  # draw from this many likeliest bytes
    seed=1337,  # of the draws
    device="auto",  # "auto", "cpu", "cuda" or "mps"
)

# ---- What must hold for them.
RULES = """\
num_samples > 0
max_new_bytes > 0
temperature >= 0
top_k > 0
0 <= seed < 2**63"""


# ---- Generation.
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


# ---- Boundaries of a text.
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


# ---- The program.
def main(argv):
    """Runs the command line. Raises UserError."""
    chosen = read_command_line(argv, DEFAULTS)
    given = [key for key in ("start", "score", "text") if key in chosen]
    if len(given) > 1:
        raise UserError(f"--{' and --'.join(given)} exclude each other; give one of them")
    options = SimpleNamespace(**DEFAULTS | chosen)
    check(options, rules=RULES)
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
        start = options.start
        if start.startswith(b"FILE:"):
            start = Path(os.fsdecode(start[5:])).expanduser().read_bytes()
        prompt = torch.tensor([[BOS, *start]], device=device)
        streams = [
            generate(model, prompt, options.max_new_bytes, options.temperature, options.top_k)
            for _ in range(options.num_samples)]
    started = time.perf_counter()
    steps = []
    for stream in streams:
        shown, again = tee(stream)
        for piece in marked(shown):
            print(piece, end="", flush=True)
        print("\n" + "-" * 80)
        steps += again
    seconds = time.perf_counter() - started
    n = len(steps)
    _, ends, _, nats = (float(sum(column)) for column in zip(*steps))
    print(f"{n} bytes, {ends:.0f} tokens, {n / max(ends, 1):.2f} bytes per token, "
          f"{nats / n / math.log(2):.3f} bits per byte, {n / seconds:.0f} bytes per second")


if __name__ == "__main__":
    run(main)
