"""
Where in a word a model loses its bits, in repeated words and in new ones.

    python -m experiments.repeats results/kernel/runs/*

A word ends as whitespace's tokens do, for every system. It is repeated if it stood in the same row
before, after the same word. Prints the bits of the first to ninth byte of words of five bytes and
more, in 96 validation rows, and adds them to measured.json, where report.py finds them.
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
ROWS = 96


@torch.no_grad()
def bits_along_words(model, shards):
    """The mean bits of each of the first bytes of words: {"repeated": [...], "new": [...]}."""
    rule = SYSTEMS["whitespace"](model.hp).rule
    costs = {kind: defaultdict(list) for kind in ("repeated", "new")}  # by the place in a word
    for x, y, u in micro_batches(shards, 0, ROWS, 8):
        bits = -model.head.logp(model(x, u).Z, y) / math.log(2)  # (B, N), of the byte after each
        for row, a, cost in zip(y.tolist(), rule(x, u), bits.tolist()):
            starts = [0, *a[1:].nonzero()[:, 0].add(1).tolist()]  # row[start - 1] ends a word
            words = [bytes(row[start:end]) for start, end in zip(starts, starts[1:])]
            seen = set()
            for start, before, word in zip(starts[1:], words, words[1:]):
                kind = "repeated" if (before, word) in seen else "new"
                seen.add((before, word))
                if len(word) >= LEAST:
                    for k in range(min(len(word), MOST)):
                        costs[kind][k].append(cost[start + k])
    return {kind: [sum(z) / len(z) for z in costs[kind].values()] for kind in costs}


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="out_dirs of train.py")
    for folder in parser.parse_args(argv).folders:
        model = load(folder)
        found = bits_along_words(model, open_shards(model.hp.data, "val", model.hp.seq_len))
        path = folder / "measured.json"
        measured = json.loads(path.read_text()) if path.exists() else {}
        write_text(path, json.dumps(measured | found))
        for kind, bits in found.items():
            say(f"{folder} {kind}:", *(f"{z:.2f}" for z in bits))


if __name__ == "__main__":
    run_program(main)
