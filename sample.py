"""
Generates text with a trained model and shows where its tokens end.

    python sample.py --start="def main" --num_samples=3 --temperature=0.8 --top_k=50
    python sample.py --score=FILE                  shows the boundaries of a file (- for stdin)

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

from common.commandline import UserError, read_command_line, run_program
from common.device import device_and_dtype
from common.models import load_model
from common.text import marked
from model import BOS, Cache


@dataclass
class Settings:
    out_dir: str = "out"  # folder where train.py left ckpt.pt
    start: bytes = b""  # the text to continue; FILE:PATH reads it from a file
    score: str = ""  # or a file whose boundaries to show; - for stdin
    deterministic: bool = False  # True: tokens end where p > 1/2; False: boundaries are drawn
    seed: int = 1337  # of the draws
    device: str = "auto"  # "auto", "cpu", "cuda" or "mps"

    # of generated texts only
    num_samples: int = 1  # texts
    max_new_bytes: int = 200  # more than seq_len, start included, is longer than in training
    temperature: float = 0.8  # below 1: sharper; 0: always the likeliest byte
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
def uniforms(n, deterministic, device):
    """The uniforms of n draws (1, n). If they are all 1/2, tokens end where p > 1/2."""
    if deterministic:
        return torch.full((1, n), 0.5, device=device)
    return torch.rand(1, n, device=device)


def next_byte(logits, temperature, top_k):
    """Draws a byte (1, 1) from the logits (1, 256) of a row."""
    logits, byte = logits.topk(min(top_k, 256))
    logits = (logits - logits[:, :1]) / max(temperature, 1e-30)  # so 0 takes the likeliest byte
    return byte.gather(1, logits.softmax(-1).multinomial(1))


@torch.inference_mode()  # takes a fifth less time than no_grad
def generate(model, prompt, max_new_bytes, temperature, top_k, deterministic=False):
    """Continues a prompt, bytes, with a model in evaluation mode.

    Yields (byte, a, p) for each byte of the prompt, then for each new one: whether a token ends
    there, and the policy's p. With deterministic=True a token ends where p > 1/2.
    """
    device = model.embedding.weight.device
    x = torch.tensor([[BOS, *prompt]], device=device)  # the bytes to read next
    u = uniforms(x.size(1), deterministic, device)
    cache = Cache(model) if model.hp.system == "learned" else None
    for step in range(max_new_bytes + 1):
        out = model(x, u, cache) if cache else model(x, u)
        n = len(prompt) if step == 0 else 1  # bytes that were not yielded before; not <bos>
        yield from zip(*(z[0, x.size(1) - n :].tolist() for z in (x, out.a, out.l.sigmoid())))
        byte = next_byte(model.head.logits(out.Z[:, -1]), temperature, top_k)
        next_u = uniforms(1, deterministic, device)
        if cache:
            x, u = byte, next_u
        else:  # other systems read the whole row again
            x, u = torch.cat((x, byte), dim=1), torch.cat((u, next_u), dim=1)


# ---- Boundaries of a text.
@torch.inference_mode()
def scored(model, text, deterministic=False):
    """Yields (byte, a, p, nats) for the bytes of a text, read in rows of seq_len bytes.

    Boundaries are drawn, or with deterministic=True they are where p > 1/2. nats are the byte's
    negative log-likelihood.
    """
    device = model.embedding.weight.device
    for start in range(0, len(text), model.hp.seq_len):
        row = text[start : start + model.hp.seq_len]
        x = torch.tensor([[BOS, *row]], device=device)  # with the last byte, for its decision
        out = model(x, uniforms(x.size(1), deterministic, device))
        nats = -model.head.logp(out.Z[:, :-1], x[:, 1:])
        yield from zip(row, out.a[0, 1:].tolist(), out.l[0, 1:].sigmoid().tolist(),
                       nats[0].tolist())


def load(out_dir="out"):
    """The model that train.py saved in a folder, in evaluation mode, on the CPU.

    Raises UserError if there is none, or if it is damaged.
    """
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


@torch.no_grad()  # inference_mode's tensors are of no use for training
def vectors(model, text):
    """The tokens' vectors after the middle: Y' (tokens, D), that of <bos> first.

    The tokens are those of tokens(model, text, deterministic=True), without a last one that is cut
    off. Raises UserError if the text, a str or bytes, is longer than seq_len bytes, or if the
    model is not a learned one.
    """
    text = text.encode() if isinstance(text, str) else text
    if model.hp.system != "learned" or len(text) > model.hp.seq_len:
        raise UserError(f"vectors needs a learned model, not {model.hp.system}, and at most "
                        f"seq_len={model.hp.seq_len} bytes of text, not {len(text)}")
    x = torch.tensor([[BOS, *text]], device=model.embedding.weight.device)
    cache = Cache(model)
    model(x, uniforms(x.size(1), True, x.device), cache)
    return cache.tokens[0]


# ---- The program.
def show(steps):
    """Prints a text as its bytes come, with marks where its tokens end. Returns the steps."""
    shown, kept = tee(steps)
    for piece in marked(shown):
        print(piece, end="", flush=True)
    print("\n" + "-" * 80)
    return list(kept)


def main(argv):
    """Runs the command line. Raises UserError."""
    chosen = read_command_line(argv, Settings)
    if "start" in chosen and "score" in chosen:
        raise UserError("--start and --score exclude each other; give one of them")
    options = Settings(**chosen)
    check(options)
    model = load(options.out_dir)
    device, _ = device_and_dtype(options.device, "float32")
    model.to(device)
    torch.manual_seed(options.seed)
    scoring = "score" in chosen
    if scoring:
        if options.score == "-":
            text = sys.stdin.buffer.read()
        else:
            text = Path(options.score).read_bytes()
        if not text:
            raise UserError("the given text is empty")
        texts = [scored(model, text, options.deterministic)]
    else:
        prompt = options.start
        if prompt.startswith(b"FILE:"):
            prompt = Path(os.fsdecode(prompt[5:])).expanduser().read_bytes()
        texts = [generate(model, prompt, options.max_new_bytes, options.temperature,
                          options.top_k, options.deterministic)
                 for _ in range(options.num_samples)]

    started = time.perf_counter()
    n = ends = 0
    for text in texts:
        steps = show(text)
        n += len(steps)
        ends += sum(step[1] for step in steps)
        ends += not steps[-1][1]  # the last token ends with the text
    seconds = time.perf_counter() - started
    bits = ""
    if scoring:
        bits = f", {sum(step[3] for step in steps) / math.log(2) / n:.3f} bits per byte"
    print(f"{n} bytes, {ends} tokens, {n / ends:.2f} bytes per token{bits}, "
          f"{n / seconds:.0f} bytes per second")


if __name__ == "__main__":
    run_program(main)
