"""
How much of the policy's gradient is signal, for each way to estimate it.

    python experiments/variance.py out-held/ckpt.pt out/ckpt.pt --data=data/english --name=variance

The estimators differ in what a return G_i is compared with: A_i = G_i less that. Each predicts 16
rows a step:

    raw                        16 rows   nothing: R = log p
    raw + batch mean           16 rows   the mean return of the batch's rows at position i, eq. 17
    early exit                 16 rows   the early exit's return, eq. 15
    early exit + batch mean    16 rows   both: the paper's
    2 draws                    8 rows    the return of the row's other draw
    4 draws                    4 rows    the mean return of its three others

The last two are RLOO (Kool, van Hoof & Welling 2019; Ahmadian et al., arXiv 2402.14740). A row's
draws share its early exit, which drops out of them.

The share of signal is |E g|^2 / E|g|^2 of the gradient g of a step's L_pi on the policy's weights,
over batches of training rows; the rest is noise. All estimators see the same rows and draws. The
standard error is a jackknife's over batches.

Writes experiments/results/NAME/: table.md and results.jsonl.
"""
import json
import math
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
import train
from experiments.compare import RESULTS, parser_of, table
from model import inputs_and_targets, load_checkpoint
from prepare import fail, open_shards, read_rows
from train import advantage, discounted_return

GAMMAS = 0.9, 0.97, 0.99, 1.0
BATCHES = {256: 150, 1024: 40}  # bytes in a row: batches of 16 of them


def advantages(G, early_G):
    """A (K, B / K, N) of every estimator, from the returns of 4 draws of B rows.

    G (4, B, N) are those of log p alone, early_G (B, N) those of early log p.
    """
    B, R = G.size(1), G[:1] - early_G  # a return is linear in the rewards, eq. 15
    return {"raw": G[:1], "raw + batch mean": advantage(G[:1]),
            "early exit": R, "early exit + batch mean": advantage(R),
            "2 draws": advantage(G[:2, : B // 2]), "4 draws": advantage(G[:, : B // 4])}


def share(g):
    """|E g|^2 / E|g|^2 of samples g (n, d), 0 if they are only noise; and its standard error."""
    n, total, square = len(g), g.sum(0), g.square().sum()
    value = (total.square().sum() / square - 1) / (n - 1)  # over pairs of different samples
    total, square = total - g, square - g.square().sum(1)  # (n, d), (n,): without each of them
    without = (total.square().sum(1) / square - 1) / (n - 2)
    return value.item(), math.sqrt((n - 1) * without.var(correction=0))  # jackknife


def policy_gradients(model, shards, autocast, batches):
    """L_pi's gradients on the policy's weights: {(estimator, gamma): (batches, d)}."""
    n_rows, gradients, weight = sum(map(len, shards)), defaultdict(list), model.policy.weight
    for k in tqdm(range(batches), disable=None):
        numbers = np.random.default_rng(k).integers(0, n_rows, 16)
        x, y = inputs_and_targets(read_rows(shards, numbers))
        u = np.random.default_rng([0, 1, k]).random((4, *x.shape), np.float32)
        with autocast:
            logp, early_logp, l, a = model(x, y, torch.from_numpy(u))
        for gamma in GAMMAS:
            G, early_G = (discounted_return(z.detach(), gamma) for z in (logp, early_logp))
            for name, A in advantages(G, early_G).items():
                K, B, _ = A.shape
                L_pi = train.policy_loss(l[:K, :B], a[:K, :B], A)
                gradients[name, gamma] += torch.autograd.grad(L_pi, weight, retain_graph=True)
    return {key: torch.stack(g).flatten(1) for key, g in gradients.items()}


def main(argv):
    parser = parser_of(__doc__)
    parser.add_argument("checkpoints", nargs="+", help="of train.py, with learned boundaries")
    parser.add_argument("--data", help="folder of prepare.py; without it, that of each checkpoint")
    parser.add_argument("--name", default="variance", help="of the folder of results")
    options, opened = parser.parse_args(argv), {}  # all mistakes before any work
    for path in options.checkpoints:
        try:
            model, saved = load_checkpoint(path)
            h = saved["config"]
            shards = {N: open_shards(options.data or h["data"], "train", N) for N in BATCHES}
        except (OSError, ValueError) as error:
            fail(error)
        if h["boundaries"] != "learned":
            fail(f"{path} has boundaries={h['boundaries']!r}; name a checkpoint with learned ones")
        megabytes = saved["rows_seen"] * h["seq_len"] / 1e6
        label = f"{Path(path).resolve().parent.name}, {megabytes:.3g} MB"
        if label in opened:
            fail(f"{path} is {label} as another checkpoint is; put it into another folder")
        opened[label] = model, h, shards
    shares, cells = [], defaultdict(list)
    for label, (model, h, all_shards) in opened.items():
        model.train().requires_grad_(False).policy.requires_grad_(True)  # soft-capped, eq. 23
        device, precision = train.device_and_dtype("cpu", h["dtype"])
        autocast = torch.autocast(device, getattr(torch, precision), precision != "float32")
        for N, shards in all_shards.items():
            gradients = policy_gradients(model, shards, autocast, BATCHES[N])
            for (name, gamma), g in gradients.items():
                if "early" in name and not model.config.early_exit:
                    continue
                value, error = share(g)
                shares.append({"checkpoint": label, "row_bytes": N, "batches": BATCHES[N],
                               "estimator": name, "gamma": gamma, "share": value, "stderr": error})
                cells[label, str(N), name].append(f"{value:.2%} ± {error:.2%}")
    folder = RESULTS / options.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in shares))
    head = ["checkpoint", "bytes in a row", "estimator", *(f"gamma {gamma}" for gamma in GAMMAS)]
    lines = table(head, [[*key, *values] for key, values in cells.items()])
    (folder / "table.md").write_text("Share of signal, ± its standard error.\n\n" + lines)
    print(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
