"""
How much of the policy's gradient is signal, for several estimators.

    python -m experiments.variance out-early/ckpt.pt out/ckpt.pt --name=variance

The estimators differ in the baseline: A_i is the return G_i minus that. Each makes 16 predictions
(rows times draws) per training step:

    raw                        16 rows   no baseline: R = log p
    raw + batch mean           16 rows   the mean return of the batch's rows at position i, eq. 17
    early exit                 16 rows   the return of the early exit, eq. 15
    early exit + batch mean    16 rows   both, as in the paper
    2 draws                    8 rows    the return of the row's other draw
    4 draws                    4 rows    the mean return of the row's three other draws

Without an early exit, its two lines repeat the two above. The last two are RLOO (Kool, van Hoof &
Welling 2019; Ahmadian et al., arXiv 2402.14740). The draws of a row share its early exit, so it
cancels out.

The table shows the signal |E g|^2 / E|g|^2, where g is the gradient of L_pi on the policy's
matrices in a training step; the rest is noise. E is the mean over batches of training rows. All
estimators see the same rows and draws, in float32. The number after ± is the standard error, a
jackknife over batches.

Writes experiments/results/NAME/table.md.
"""
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
from tqdm import tqdm

from configurator import UserError, argument_parser, run
from experiments.compare import RESULTS, write_table
from experiments.systems import load_checkpoint
from prepare import open_shards
from train import discounted_return, micro_batches, policy_loss

GAMMAS = 0.9, 0.97, 0.99, 1.0
BATCHES = 150


def advantages(G, early_G):
    """A (K, B / K, N) of every estimator, from the returns of 4 draws of B rows.

    G (4, B, N) are the returns of log p, early_G (B, N) those of the early exit's log p.
    """
    B = G.size(1)
    raw = G[:1]
    R = raw - early_G  # the return of eq. 15's reward, because returns are linear
    two = G[:2, : B // 2]
    four = G[:, : B // 4]
    return {
        "raw": raw,
        "raw + batch mean": raw - raw.mean(1),
        "early exit": R,
        "early exit + batch mean": R - R.mean(1),
        "2 draws": 2 * (two - two.mean(0)),  # = G_k minus the other draw's
        "4 draws": 4 / 3 * (four - four.mean(0))}  # = G_k minus the mean of the others


def signal(g):
    """|E g|^2 / E|g|^2 of samples g (n, d), and its standard error. It is 0 for noise."""
    n = len(g)
    total = g.sum(0)
    squares = g.square().sum(1)  # (n,)
    value = (total.square().sum() / squares.sum() - 1) / (n - 1)  # over pairs of different samples
    others = (total - g).square().sum(1) / (squares.sum() - squares)  # without each of the samples
    others = (others - 1) / (n - 2)
    return value.item(), math.sqrt((n - 1) * others.var(correction=0))


def policy_gradients(model, saved):
    """The gradients of L_pi, {(estimator, gamma): (BATCHES, d)}."""
    model.train().requires_grad_(False)  # in training the logits have eq. 23's soft-cap
    matrices = [p.requires_grad_() for p in model.policy.parameters() if p.dim() > 1]
    changes = {"effective_batch_size": 64, "batch_size": 64, "redrawn": 0, "seed": 0}
    hp = SimpleNamespace(**saved["config"] | changes)
    shards = open_shards(hp.data, "train", hp.seq_len)
    gradients = defaultdict(list)
    for k in tqdm(range(BATCHES), disable=None):
        [(x, y, u)] = micro_batches(shards, 64 * k, hp, 0, 1, "cpu")
        # four draws of 16 rows
        logp, early_logp, l, a = model(x[:16].repeat(4, 1), y[:16].repeat(4, 1), u)
        if early_logp is None:
            early_logp = 0 * logp
        logp, l, a = (z.unflatten(0, (4, 16)) for z in (logp, l, a))
        for gamma in GAMMAS:
            G = discounted_return(logp, gamma)
            early_G = discounted_return(early_logp[:16], gamma)
            for name, A in advantages(G, early_G).items():
                B = A.size(1)
                L_pi = sum(map(policy_loss, l[:, :B], a[:, :B], A)) / len(A)  # mean over draws
                g = torch.autograd.grad(L_pi, matrices, retain_graph=True)
                gradients[name, gamma].append(torch.cat([part.flatten() for part in g]))
    return {key: torch.stack(g) for key, g in gradients.items()}


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoints", nargs="+", help="of train.py, with learned boundaries")
    parser.add_argument("--name", default="variance", help="folder of results (%(default)s)")
    options = parser.parse_args(argv)
    rows = []
    for path in options.checkpoints:
        model, saved = load_checkpoint(path)
        if model.config.system != "learned":
            raise UserError(f"{path} has system={model.config.system}; use one with learned "
                            "boundaries")
        label = Path(path).resolve().parent.name
        cells = defaultdict(list)
        for (name, _), g in policy_gradients(model, saved).items():
            value, error = signal(g)
            cells[name].append(f"{value:.2%} ± {error:.2%}")
        rows += [[label, name, *values] for name, values in cells.items()]
    head = ["checkpoint", "estimator", *(f"gamma {gamma}" for gamma in GAMMAS)]
    write_table(RESULTS / options.name, head, rows)


if __name__ == "__main__":
    run(main)
