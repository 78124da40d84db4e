"""
Where in a word the bits go: bits per byte of held-out text by how many letters of a word a byte comes after.

    python experiments/words.py experiments/results/english/runs/none-1341/ckpt.pt experiments/results/english/runs/whitespace-1341/ckpt.pt

Prints a table with a row for each checkpoint, all of models of the same text: train.py's 512 held-out rows, all bytes and those after 0, 1,
2, 3, 4-5 and more letters or digits in a row (after 0: a word's first letter, or a byte between words). Above it, those bytes' share of the
text.
"""
import argparse
import math
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import train
from experiments import compare
from model import load_checkpoint

CLASSES = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3": (3, 3), "4-5": (4, 5), "6 and more": (6, math.inf)}


def letters_so_far(x):
    """How many letters or digits without a break end at each byte of x (B, N), its own included: (B, N) int64."""
    letter = train.LETTERS[x]
    position = torch.arange(1, x.size(1) + 1).expand_as(x)
    return position - torch.where(letter, 0, position).cummax(1).values


@torch.no_grad()
def bits_and_letters(model, config):
    """Bits (B, N) of the bytes that follow, and the letters so far (B, N), of the held-out rows that train.py evaluates."""
    shards = train.open_rows(config["data"], "val", config["seq_len"], config["boundaries"] == "bpe")
    n, size = sum(map(len, shards[0])), config["batch_size"]
    rows = np.linspace(0, n - 1, min(config["eval_rows"], n)).astype(int)
    kind, precision = train.device_and_dtype("cpu", config["dtype"])
    generator, bits, letters = torch.Generator().manual_seed(0), [], []
    with torch.autocast(kind, getattr(torch, precision), enabled=precision != "float32"):
        for some in np.split(rows, range(size, len(rows), size)):
            x, y, a = train.fetch(shards, some)
            logits = model(x, a, torch.rand(x.shape, generator=generator))[0]
            bits.append(-train.log_likelihood(logits, y) / math.log(2))
            letters.append(letters_so_far(x))
    return torch.cat(bits), torch.cat(letters)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("checkpoints", nargs="+", help="of train.py")
    parser.error = compare.fail
    lines = []
    for path in parser.parse_args(argv).checkpoints:
        try:
            model, saved = load_checkpoint(path)
        except (OSError, ValueError) as error:
            parser.error(error)
        bits, letters = bits_and_letters(model, saved["config"])
        masks = [(low <= letters) & (letters <= high) for low, high in CLASSES.values()]
        if not lines:
            lines += [["after so many letters", "all", *CLASSES], ["---"] * (len(CLASSES) + 2)]
            lines += [["share of the bytes", "", *(f"{mask.float().mean():.0%}" for mask in masks)]]
        lines += [["/".join(Path(path).resolve().parts[-4:-1]), f"{bits.mean():.3f}", *(f"{bits[mask].mean():.3f}" for mask in masks)]]
    print("".join(f"| {' | '.join(line)} |\n" for line in lines), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
