"""
Where a model loses its bits: early and late in a row, in repeated words and in new ones.

    python -m experiments.context results/kernel/runs/*

Reads 512 validation rows. Prints the bits per byte of a row's first 64 bytes (first) and of those
after its first 256 (later), and the bits of the first to ninth byte of words of five bytes and
more. Writes them to measured.json beside the log, where report.py finds them.

A word ends as whitespace's tokens do, for every system. It is repeated if it stood in the same row
before, after the same word.
"""
import json
import math
from collections import defaultdict
from pathlib import Path

import torch

from common.commandline import argument_parser, run_program, say
from common.files import write_text
from experiments.systems import SYSTEMS
from prepare import open_shards
from sample import load
from train import micro_batches

LEAST, MOST = 5, 9  # bytes of the words that count, and bytes that are measured
ROWS = 512


@torch.no_grad()
def measure(model, shards):
    """The mean bits of bytes: {"first": bits, "later": bits, "repeated": [...], "new": [...]}."""
    rule = SYSTEMS["whitespace"](model.hp).rule
    found = defaultdict(list)  # bits of bytes; for words, by kind and place in the word
    for x, y, u in micro_batches(shards, 0, ROWS, 8):
        bits = -model.head.logp(model(x, u).Z, y) / math.log(2)  # (B, N), of the byte after each
        found["first"] += bits[:, :64].flatten().tolist()
        found["later"] += bits[:, 256:].flatten().tolist()
        for row, a, cost in zip(y.tolist(), rule(x, u), bits.tolist()):
            starts = [0, *a[1:].nonzero()[:, 0].add(1).tolist()]  # row[start - 1] ends a word
            words = [bytes(row[start:end]) for start, end in zip(starts, starts[1:])]
            seen = set()
            for start, before, word in zip(starts[1:], words, words[1:]):
                kind = "repeated" if (before, word) in seen else "new"
                seen.add((before, word))
                if len(word) >= LEAST:
                    for k in range(min(len(word), MOST)):
                        found[kind, k].append(cost[start + k])
    means = {key: sum(all_bits) / len(all_bits) for key, all_bits in found.items()}
    words = {kind: [means[kind, k] for k in range(MOST) if (kind, k) in means]
             for kind in ("repeated", "new")}
    return {"first": means["first"], "later": means["later"], **words}


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="out_dirs of train.py")
    for folder in parser.parse_args(argv).folders:
        model = load(folder)
        found = measure(model, open_shards(model.hp.data, "val", model.hp.seq_len))
        write_text(folder / "measured.json", json.dumps(found))
        say(f"{folder}: first {found['first']:.3f}, later {found['later']:.3f}")
        for kind in "repeated", "new":
            say(f"    {kind} words:", *(f"{z:.2f}" for z in found[kind]))


if __name__ == "__main__":
    run_program(main)
