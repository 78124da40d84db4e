"""
What a boundary is worth: flips decisions of a trained model, all else equal, and sums what its
log-likelihood gains, in nats, by having the boundary.

    python -m experiments.worth out

Prints a table by context: the character that ends at a byte, and whether a letter or digit stands
before it. A line has the number of decisions flipped after that byte, the policy's mean p, and the
mean gain over the next 4 bytes, the next 33 and the rest of the row, with standard errors. A good
policy is sure where a boundary is worth most.
"""
from collections import defaultdict

import numpy as np
import torch
from tqdm import tqdm

from common.commandline import UserError, argument_parser, run_program, say
from common.device import device_and_dtype
from common.models import load_model
from common.text import in_word
from experiments.report import table
from prepare import open_shards
from train import micro_batches

ROWS = 64  # in a forward pass; one decision of each is flipped


@torch.no_grad()
def flip(model, x, y, u, i):
    """Flips the decision at i of each row, while all others stay as they are drawn.

    Bytes x, next bytes y, uniforms u (B, N), positions i (B,), not 0. Returns (B, 5): the decision
    as drawn, the policy's p, and what log p(y) gains by a boundary at i, in nats, over the next 4
    bytes, the next 33 and the rest of the row.
    """
    out = model(x, u)
    rows = torch.arange(len(x), device=x.device)
    drawn = out.a[rows, i]
    a = out.a.clone()
    a[rows, i] = ~drawn
    flipped = model(x, 1 - a.float())  # draws exactly a, because p is between 0 and 1
    gain = model.head.logp(out.Z, y) - model.head.logp(flipped.Z, y)  # 0 before i
    gain = torch.where(drawn[:, None], gain, -gain)
    distance = torch.arange(x.size(1), device=x.device) - i[:, None]
    sums = [(gain * (distance < reach)).sum(1) for reach in (4, 33, x.size(1))]
    return torch.stack((drawn, out.l[rows, i].sigmoid(), *sums), dim=1)


def context(row, i):
    """The character that ends at byte i of a row, and whether the one before it is in a word.

    Instead of the character, the byte, if the character ends later or the row is not UTF-8 there.
    """
    nearby = bytes(row[max(i - 8, 1) : i + 1])  # without <bos>; a character has up to four bytes
    before = nearby[:-1].decode(errors="ignore")
    character = nearby.decode(errors="ignore")[len(before) :]
    return character or nearby[-1:], before != "" and in_word(before[-1])


def table_of_contexts(flips):
    """A Markdown table of {context: [what flip returned]}.

    Contexts with fewer than 12 flips are left out, because their means say little.
    """
    lines = []
    for (character, after_word), values in flips.items():
        if len(values) < 12:
            continue
        _, p, near, middle, rest = np.mean(values, 0)
        *_, middle_error, rest_error = np.std(values, 0, ddof=1) / len(values) ** 0.5
        lines.append((middle, [
            repr(character), "yes" if after_word else "no", f"{len(values)}", f"{p:.2f}",
            f"{near:+.3f}", f"{middle:+.3f}", f"{middle_error:.3f}", f"{rest:+.3f}",
            f"{rest_error:.3f}"]))
    head = ["character", "after a letter or digit", "flips", "p", "4 bytes", "33 bytes", "+-",
            "rest of the row", "+-"]
    return table(head, [line for _, line in sorted(lines, reverse=True)])


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoint", help="train.py's out_dir, or the ckpt.pt in it")
    parser.add_argument("--flips", type=int, default=2048, help="for the table (%(default)s)")
    options = parser.parse_args(argv)
    if options.flips <= 0:
        raise UserError(f"--flips={options.flips} must be above 0")
    model, _ = load_model(options.checkpoint)
    if model.hp.system != "learned":
        raise UserError(f"{options.checkpoint} is of system={model.hp.system}; give a learned one")
    device, _ = device_and_dtype("auto", "float32")
    model.to(device)
    hp = model.hp
    shards = open_shards(hp.data, "val", hp.seq_len)
    torch.manual_seed(0)
    flips = defaultdict(list)
    for first_row in tqdm(range(0, options.flips, ROWS), disable=None):
        [(x, y, u)] = micro_batches(shards, first_row, ROWS, ROWS, device=device)
        i = torch.randint(1, hp.seq_len, (ROWS,)).to(device)
        for row, k, values in zip(x.tolist(), i.tolist(), flip(model, x, y, u, i).tolist()):
            flips[context(row, k)].append(values)
    say(table_of_contexts(flips))


if __name__ == "__main__":
    run_program(main)
