"""
What a boundary is worth: flips decisions of a trained model, all else equal, and sums what its
log-likelihood gains, in nats, by having the boundary.

    python -m experiments.worth out

Prints a table by context: the character that ends at a byte, and whether a letter or digit stands
before it. A line has the number of decisions flipped after that byte, the policy's mean p, and the
mean gain over the next 4 bytes, the next 33 and the rest of the row, with standard errors. A good
policy is sure where a boundary is worth most. Also writes worth.svg beside the checkpoint: the
gains over 33 bytes in the middle of a validation row, as bars above the characters.
"""
from collections import defaultdict

import numpy as np
import torch
from tqdm import tqdm

from common.checkpoint import checkpoint_path, device_and_dtype, load_model
from common.commandline import UserError, argument_parser, run_program, say
from common.text import characters, in_word
from experiments.pictures import LEGEND, cell_colours, svg, svg_cell, write
from experiments.tables import table
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
    logp, _, l, a = model(x, y, u)
    rows = torch.arange(len(x), device=x.device)
    drawn = a[rows, i]
    a[rows, i] = ~drawn
    flipped = model.head.logp(model.through_tokens(model.encode(x), a), y)
    gain = torch.where(drawn[:, None], logp - flipped, flipped - logp)  # 0 before i
    distance = torch.arange(x.size(1), device=x.device) - i[:, None]
    sums = [(gain * (distance < reach)).sum(1) for reach in (4, 33, x.size(1))]
    return torch.stack((drawn, l[rows, i].sigmoid(), *sums), dim=1)


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


def bars(decisions):
    """An SVG of [(byte, a, p, gain)]: gains as bars above the characters, coloured by p.

    A character of several bytes shows the gain at its last one.
    """
    shown = list(characters(decisions))
    gains = [gain for *_, gain in characters((byte, a, gain) for byte, a, _, gain in decisions)]
    lowest, highest = min(gains + [0]), max(gains + [0])
    scale = 120 / (highest - lowest or 1)  # pixels per nat
    zero = 60 + scale * highest
    body = LEGEND + f"""<text class="words" y="45">what a boundary gains over the next 33 bytes:
{lowest:+.2f} to {highest:+.2f} nats</text>
"""
    for k, ((text, a, p), gain) in enumerate(zip(shown, gains)):
        colour, _ = cell_colours(p)
        height = scale * gain
        body += (f'<path fill="{colour}" stroke="#222" stroke-width=".5" '
                 f'd="M{10 * k + 1} {zero:.1f}v{-height:.1f}h8v{height:.1f}z"/>')
        body += svg_cell(10 * k, 190, text, a, p)
    return svg(10 * len(shown), 215, body)


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
        [(x, y, u)] = micro_batches(shards, first_row, ROWS, ROWS, 0, 0, 1, device)
        i = torch.randint(1, hp.seq_len, (ROWS,)).to(device)
        for row, k, values in zip(x.tolist(), i.tolist(), flip(model, x, y, u, i).tolist()):
            flips[context(row, k)].append(values)
    say(table_of_contexts(flips))

    i = torch.arange(hp.seq_len // 2, hp.seq_len, device=device)[:ROWS]
    copies = [z[-1:].expand(len(i), -1) for z in (x, y, u)]  # of the last row, with a flip in each
    drawn, p, _, gain, _ = flip(model, *copies, i).T.tolist()
    decisions = list(zip(x[-1, i].tolist(), map(bool, drawn), p, gain))
    write(checkpoint_path(options.checkpoint).with_name("worth.svg"), bars(decisions))


if __name__ == "__main__":
    run_program(main)
