"""
Generates text with a trained model and shows where its tokens end.

    python sample.py --start="def main" --num_samples=3 --temperature=0.8 --top_k=50
    python sample.py --score=FILE                shows the boundaries of given text instead

A mark │ stands where a token ends. On a terminal the colour is the policy's probability of a
boundary after that character: blue low, yellow high.
"""
import argparse
import codecs
import math
import os
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import experiments.systems  # noqa: F401  the systems that a checkpoint may hold
from model import (BOS, load_checkpoint, log_likelihood, next_byte, next_byte_logits,
                   softcapped_attention)
from prepare import fail, printable

MARK = "│"
PALETTE = 33, 75, 110, 145, 186, 220, 226  # of a terminal's 256 colours, from blue to yellow


# ---- Generation --------------------------------------------------------------------------------
class Cache:
    """Stands in for Attention.attend: keeps a layer's keys and values, all or a window's.

    The first call is the prompt's. Each further one brings a new position of the rows `rows` (R,),
    of which `held` (R,) are kept so far. A window's position i lies in slot i % window.
    """

    def __init__(self, attention):
        self.attend, self.window, self.k = attention.attend, attention.window, None

    def __call__(self, q, k, v):
        if self.k is None:
            size = self.window or k.size(2)
            last = torch.arange(k.size(2), device=k.device)[-size:]
            self.k, self.v = (z.new_zeros(*z.shape[:2], size, z.size(3)) for z in (k, v))
            self.k[:, :, last % size], self.v[:, :, last % size] = k[:, :, last], v[:, :, last]
            return self.attend(q, k, v)
        used = self.window or int(self.held.max()) + 1
        if used > self.k.size(2):
            self.k, self.v = (F.pad(z, (0, 0, 0, z.size(2))) for z in (self.k, self.v))
        slot = self.held % self.window if self.window else self.held
        self.k[self.rows, :, slot], self.v[self.rows, :, slot] = k[:, :, 0], v[:, :, 0]
        k, v = (z[:, :, :used].index_select(0, self.rows) for z in (self.k, self.v))
        mask = torch.arange(used, device=k.device) <= self.held[:, None]  # (R, used)
        return softcapped_attention(q, k, v, mask[:, None, None])


@contextmanager
def caches(model):
    """Puts a cache into every layer; gives those of the byte layers and those of the middle."""
    layers = [block.attention for block in (*model.down, *model.up, *model.middle)]
    for attention in layers:
        attention.attend = Cache(attention)
    try:
        found = [attention.attend for attention in layers]
        yield found[: len(found) - len(model.middle)], found[len(found) - len(model.middle) :]
    finally:
        for attention in layers:
            del attention.attend  # the class's own is there again


@torch.no_grad()
def generate(model, x, max_new_bytes, temperature=1.0, top_k=None):
    """Continues the prompts x (B, N), x_0 = <bos>, with a model in evaluation mode.

    Yields for every byte after <bos>, the prompt's first: the byte, whether a token ends there,
    the policy's p, and the byte's negative log-likelihood in nats at temperature 1; all (B,).
    A byte costs the byte layers one position, and the middle one where a token ends.
    """
    if model.config.boundaries != "learned":
        yield from model.generate(x, max_new_bytes, temperature, top_k)
        return
    B, N, w = *x.shape, model.config.policy_window
    with caches(model) as (byte_caches, token_caches):
        # the prompt in one parallel pass
        X = model.encode(x)
        z = model.policy_terms(X)
        a = model.boundaries(z, torch.rand(1, B, N).to(x.device))
        p, a = model.boundary_logits(z, a)[0].sigmoid(), a[0]
        tokens = model.tokens_read(X, a)
        Z = model.decode(X + tokens)
        nats = -log_likelihood(Z[:, :-1], x[:, 1:], model.norm, model.head)
        for i in range(1, N):
            yield x[:, i], a[:, i], p[:, i], nats[:, i - 1]

        # what a further byte needs: each row's number of tokens, the last one, the last w decisions
        logits, count = next_byte_logits(Z[:, -1], model.norm, model.head), a.sum(1)
        current = tokens[:, -1:].clone()  # (B, 1, D)
        history = F.pad(a, (w, 0))[:, N:].flip(1).float()  # (B, w): a_{i-1} first
        for i in range(N, N + max_new_bytes):
            byte = next_byte(logits, temperature, top_k)
            nats = F.cross_entropy(logits, byte, reduction="none")
            position = torch.tensor([i], device=x.device)
            for cache in byte_caches:
                cache.rows, cache.held = torch.arange(B, device=x.device), position.expand(B)
            X = model.run(model.down, model.embedding(byte[:, None]), position)  # (B, 1, D)
            z = model.policy_terms(X)[:, 0]
            p = (z[:, 0] + (history * z[:, 1:]).sum(1)).sigmoid()
            a = torch.rand(B).to(p) < p
            history = torch.cat((a[:, None], history), 1)[:, :w]
            rows = a.nonzero()[:, 0]
            if len(rows) > 0:
                for cache in token_caches:
                    cache.rows, cache.held = rows, count[rows]
                current[rows] = model.run(model.middle, X[rows], position)
                count[rows] += 1
            Z = model.run(model.up, X + current, position)[:, 0]
            logits = next_byte_logits(Z, model.norm, model.head)
            yield byte, a, p, nats


# ---- What is shown -----------------------------------------------------------------------------
@torch.no_grad()
def scored(model, text, device):
    """Yields (byte, a, p, nats) of a text's bytes, read in rows as long as the training rows."""
    for start in range(0, len(text), model.config.seq_len):
        y = torch.tensor([[*text[start : start + model.config.seq_len], BOS]])  # <bos>: no byte
        x = F.pad(y[:, :-1], (1, 0), value=BOS)
        u = torch.rand(1, *x.shape)
        logp, _, l, a = model(x.to(device), y.to(device), u.to(device))
        yield from zip(x[0, 1:].tolist(), a[0, 0, 1:].tolist(), l[0, 0, 1:].sigmoid().tolist(),
                       (-logp[0, 0, :-1]).tolist())


def characters(stream):
    """Turns (byte, a, p) into (text, a, p), a character each.

    a says if any of its bytes ends a token, p is its last byte's. What is no UTF-8 becomes U+FFFD.
    """
    decoder, ends, p = codecs.getincrementaldecoder("utf-8")("replace"), False, 0.0
    for byte, a, next_p in stream:
        text = decoder.decode(bytes([byte]))
        own = "" if decoder.getstate()[0] else text[-1]  # what this byte ends, if it does
        if before := text[: len(text) - len(own)]:  # those before it were no character
            yield printable(before), ends, p
            ends = False
        ends, p = ends or a, next_p
        if own:
            yield printable(own), ends, p
            ends = False
    if text := decoder.decode(b"", final=True):
        yield printable(text), ends, p


def as_terminal(stream, colour):
    """Yields text with a mark where each token ends, coloured by p, as the stream comes."""
    for text, ends, p in characters(stream):
        if colour:
            text = f"\x1b[38;5;{PALETTE[round(p * (len(PALETTE) - 1))]}m{text}\x1b[0m"
        yield text + MARK * ends


# ---- Command line ------------------------------------------------------------------------------
def number(kind, low, text):
    value = kind(text)
    if not (value == 0 and kind is float or low <= value < math.inf):
        raise argparse.ArgumentTypeError(f"{text} is not at least {low}")
    return value


def main(argv=None):
    kinds = {"cuda": torch.cuda, "mps": torch.backends.mps}
    device = next((kind for kind in kinds if kinds[kind].is_available()), "cpu")
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    add, count = parser.add_argument, partial(number, int, 1)
    add("--out_dir", default="out", help="where train.py left ckpt.pt (%(default)s)")
    add("--start", default="", help="the text to continue")
    add("--score", metavar="FILE", help="show the boundaries of this text instead")
    add("--num_samples", type=count, default=1, help="texts to generate (%(default)s)")
    add("--max_new_bytes", type=count, default=300, help="length of each (%(default)s)")
    add("--temperature", type=partial(number, float, 0.001), default=0.8,
        help="below 1: likelier bytes; 0: the likeliest (%(default)s)")
    add("--top_k", type=count, default=50, help="choose among so many bytes (%(default)s)")
    add("--seed", type=int, default=1337)
    add("--device", default=device, help="cpu, cuda or mps (%(default)s)")
    options = parser.parse_args(argv)

    try:
        path = Path(options.out_dir).expanduser() / "ckpt.pt"
        model = load_checkpoint(path)[0].to(options.device)
        text = Path(options.score).expanduser().read_bytes() if options.score else None
    except (OSError, ValueError, RuntimeError, AssertionError, ImportError) as error:
        fail(str(error).splitlines()[0])  # the last three: no such device
    if text == b"":
        fail(f"--score={options.score} is an empty file")
    torch.manual_seed(options.seed % 2**64)
    prompt = torch.tensor([[BOS, *os.fsencode(options.start)]], device=options.device)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    steps, started = [], time.perf_counter()

    def noted(stream):
        for byte, a, p, nats in stream:
            steps.append((int(a), float(nats)))
            yield int(byte), bool(a), float(p)

    for _ in range(1 if options.score else options.num_samples):
        stream = scored(model, text, options.device) if options.score else generate(
            model, prompt, options.max_new_bytes, options.temperature, options.top_k)
        for piece in as_terminal(noted(stream), colour):
            print(piece, end="", flush=True)
        print("\n" + "-" * 80)
    seconds, (tokens, nats) = time.perf_counter() - started, map(sum, zip(*steps))
    n = len(steps)
    print(f"{n} bytes, {tokens} tokens, {n / max(tokens, 1):.2f} bytes per token, "
          f"{nats / math.log(2) / n:.3f} bits per byte, {n / seconds:.0f} bytes per second")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
