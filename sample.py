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

import torch
import torch.nn.functional as F

from config.command_line import CHOICES, device_and_dtype
from config.terminal import argument_parser, fail, marked, one_line_errors, whole_number
from model import BOS, load_checkpoint, softcapped_attention


class Cache:
    """Replaces Attention.attend during generation: keeps the keys and values of one layer.

    Each call brings one new position for some rows. Before it, generate sets `rows` (R,), the
    numbers of these rows, and `position` (R,) or (1,), how many positions each has so far. With a
    window, the newest position overwrites the oldest one.
    """

    def __init__(self, size):
        self.size = size
        self.k = None

    def __call__(self, q, k, v):  # (R, heads, 1, head_dim)
        if self.k is None:
            self.k = k.new_zeros(len(k), k.size(1), self.size, k.size(3))
            self.v = torch.zeros_like(self.k)
        slot = self.position % self.size
        self.k[self.rows, :, slot] = k[:, :, 0]
        self.v[self.rows, :, slot] = v[:, :, 0]
        used = min(int(self.position.max()) + 1, self.size)
        mask = torch.arange(used, device=k.device) <= self.position[:, None]  # (R, used)
        k = self.k[self.rows, :, :used]
        v = self.v[self.rows, :, :used]
        return softcapped_attention(q, k, v, mask[:, None, None])


def next_byte(logits, temperature, top_k):
    """Draws one byte per row from logits (B, 257); temperature 0 takes the likeliest one."""
    logits = logits.clone()
    logits[:, BOS] = -torch.inf  # not a byte
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None:
        smallest = logits.topk(min(top_k, BOS)).values[:, -1:]
        logits[logits < smallest] = -torch.inf
    return torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]


@torch.no_grad()
def generate(model, x, max_new_bytes, temperature=1.0, top_k=None):
    """Continues the prompts x (B, N), x_0 = <bos>, with a model in evaluation mode.

    Yields for every byte after <bos>, starting with the prompt's: the byte, whether a token ends
    there, the policy's p, and the byte's negative log-likelihood in nats at temperature 1; all
    (B,). A byte costs one position of the byte layers, and one of the middle where a token ends; a
    prompt is read byte by byte too.
    """
    if model.config.boundaries != "learned":
        yield from generate_without_cache(model, x, max_new_bytes, temperature, top_k)
        return
    B, N = x.shape
    byte_layers = [block.attention for block in (*model.down, *model.up)]
    token_layers = [block.attention for block in model.middle]
    for attention in byte_layers + token_layers:
        attention.attend = Cache(attention.window or N + max_new_bytes)
    try:
        all_rows = torch.arange(B, device=x.device)
        history = torch.zeros_like(all_rows)  # bit j-1 is a_{i-j}, as in Policy
        count = torch.zeros_like(all_rows)  # tokens of each row so far
        selected = torch.zeros(B, model.config.embedding_dim, device=x.device)  # each row's last X'
        tokens = torch.zeros_like(selected)  # each row's last Y'
        for i in range(N + max_new_bytes):
            byte = x[:, i] if i < N else next_byte(logits, temperature, top_k)
            position = torch.tensor([i], device=x.device)
            for attention in byte_layers:
                attention.attend.rows = all_rows
                attention.attend.position = position
            X = model.run(model.down, model.embedding(byte[:, None]), position)  # (B, 1, D)
            l = model.policy(X)[:, 0]  # (B, 2^w)
            p = l.gather(1, history[:, None])[:, 0].sigmoid()
            a = torch.rand(B).to(p) < p
            if i == 0:
                a[:] = True
            history = (2 * history + a) % l.size(1)
            rows = a.nonzero()[:, 0]
            if len(rows) > 0:
                for attention in token_layers:
                    attention.attend.rows = rows
                    attention.attend.position = count[rows]
                selected[rows] = X[rows, 0]
                tokens[rows] = model.run(model.middle, X[rows], position)[:, 0]
                count[rows] += 1
            Y = model.upsample(X, selected, tokens, all_rows[:, None])
            Z = model.run(model.up, Y, position)[:, 0]
            if i > 0:
                yield byte, a, p, F.cross_entropy(logits, byte, reduction="none")
            logits = model.head.logits(Z)
    finally:
        for attention in byte_layers + token_layers:
            del attention.attend  # restores the class's method


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
    """Yields (byte, a, p, nats) for the bytes of a text, read in rows as long as in training.

    Boundaries are drawn, or with deterministic=True they are where p > 1/2.
    """
    device = model.embedding.weight.device
    for start in range(0, len(text), model.config.seq_len):
        row = text[start : start + model.config.seq_len]
        x = torch.tensor([[BOS, *row]], device=device)
        y = x.roll(-1)  # its last byte does not matter
        u = torch.rand(1, *x.shape).to(device)
        if deterministic:
            u.fill_(0.5)
        logp, _, l, a = model(x, y, u)
        nats = -logp[0, 0, :-1]
        yield from zip(row, a[0, 0, 1:].tolist(), l[0, 0, 1:].sigmoid().tolist(), nats.tolist())


def load(out_dir="out"):
    """The model that train.py saved in a folder, in evaluation mode on the CPU."""
    model, _ = load_checkpoint(Path(out_dir).expanduser() / "ckpt.pt")
    return model


def tokens(model, text, deterministic=False):
    """Yields the tokens of a text, a str or bytes, with the probability p that they end there.

    Bytes that are not UTF-8 by themselves, such as half a character, appear as escapes: \\xc3.
    """
    text = text if isinstance(text, bytes) else text.encode()
    start = 0
    for i, (_, a, p, _) in enumerate(scored(model, text, deterministic), 1):
        if a or i == len(text):
            yield text[start:i].decode(errors="backslashreplace"), p
            start = i


def main(argv=None):
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--out_dir", default="out", help="folder where train.py left ckpt.pt (%(default)s)")
    given = parser.add_mutually_exclusive_group().add_argument
    given("--start", default="", help="the text to continue")
    given("--score", metavar="FILE", help="show the boundaries of this file, or of stdin: -")
    given("--text", help="show the boundaries of this text")
    add("--deterministic", action="store_true",
        help="draw nothing: a token of the given text ends where p > 1/2")
    add("--num_samples", type=whole_number, default=1, help="texts to generate (%(default)s)")
    add("--max_new_bytes", type=whole_number, default=300,
        help="length of each text (%(default)s)")
    add("--temperature", type=float, default=0.8,
        help="below 1: likelier bytes; 0: always the likeliest (%(default)s)")
    add("--top_k", type=whole_number, default=50,
        help="draw from this many likeliest bytes (%(default)s)")
    add("--seed", type=int, default=1337)
    add("--device", default="auto", choices=CHOICES["device"])
    options = parser.parse_args(argv)
    if not 0 <= options.temperature < math.inf:
        fail(f"--temperature={options.temperature} must be at least 0")
    device, _ = device_and_dtype(options.device, "float32")
    text = None
    with one_line_errors():
        model = load(options.out_dir)
        if options.score == "-":
            text = sys.stdin.buffer.read()
        elif options.score:
            text = Path(options.score).expanduser().read_bytes()
        elif options.text is not None:
            text = os.fsencode(options.text)
    if text == b"":
        fail("the given text is empty")

    torch.manual_seed(options.seed)
    model.to(device)
    prompt = torch.tensor([[BOS, *os.fsencode(options.start)]], device=device)
    started = time.perf_counter()
    n = ends = nats = 0

    def counted(stream):
        nonlocal n, ends, nats
        for byte, a, p, byte_nats in stream:
            n += 1
            ends += bool(a)
            nats += float(byte_nats)
            yield int(byte), bool(a), float(p)

    for _ in range(1 if text else options.num_samples):
        if text:
            stream = scored(model, text, options.deterministic)
        else:
            stream = generate(
                model, prompt, options.max_new_bytes, options.temperature, options.top_k)
        for piece in marked(counted(stream)):
            print(piece, end="", flush=True)
        print("\n" + "-" * 80)
    seconds = time.perf_counter() - started
    print(f"{n} bytes, {ends} tokens, {n / max(ends, 1):.2f} bytes per token, "
          f"{nats / math.log(2) / n:.3f} bits per byte, {n / seconds:.0f} bytes per second")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader, for example `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
