"""
How much of the policy's gradient is signal, for several estimators.

    python -m experiments.variance out-early/ckpt.pt out/ckpt.pt --data=data/english --name=variance

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

The signal is |E g|^2 / E|g|^2, where g is the gradient of L_pi on the policy's matrices in a
training step. The rest is noise. E is the mean over batches of training rows. All estimators see
the same rows and draws, in float32. The standard error is a jackknife over batches.

Writes experiments/results/NAME/table.md.
"""
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from config.terminal import argument_parser, fail, one_line_errors
from experiments.compare import RESULTS, table
from model import inputs_and_targets, load_checkpoint
from prepare import open_shards, read_rows
from train import advantage, discounted_return, policy_loss

GAMMAS = 0.9, 0.97, 0.99, 1.0
BATCHES = {256: 150, 1024: 40}  # bytes in a row: batches of 16 rows


def advantages(G, early_G):
    """A (K, B / K, N) of every estimator, from the returns of 4 draws of B rows.

    G (4, B, N) are the returns of log p, early_G (B, N) those of the early exit's log p.
    """
    B = G.size(1)
    R = G[:1] - early_G  # the return of eq. 15's reward, because returns are linear
    return {
        "raw": G[:1],
        "raw + batch mean": advantage(G[:1]),
        "early exit": R,
        "early exit + batch mean": advantage(R),
        "2 draws": advantage(G[:2, : B // 2]),
        "4 draws": advantage(G[:, : B // 4])}


def signal(g):
    """|E g|^2 / E|g|^2 of samples g (n, d), and its standard error. It is 0 for noise."""
    n = len(g)
    total = g.sum(0)
    squares = g.square().sum(1)  # (n,)
    value = (total.square().sum() / squares.sum() - 1) / (n - 1)  # over pairs of different samples
    others = (total - g).square().sum(1) / (squares.sum() - squares)  # without each of the samples
    others = (others - 1) / (n - 2)
    return value.item(), math.sqrt((n - 1) * others.var(correction=0))


def policy_gradients(model, shards, batches):
    """The gradients of L_pi, {(estimator, gamma): (batches, d)}."""
    model.train().requires_grad_(False)  # in training the logits have eq. 23's soft-cap
    model.config.redrawn = 1 / 2  # 8 of 16 rows
    matrices = [p.requires_grad_() for p in model.policy.parameters() if p.dim() > 1]
    n = sum(map(len, shards))
    gradients = defaultdict(list)
    for k in tqdm(range(batches), disable=None):
        numbers = np.random.default_rng(k).integers(0, n, 16)
        x, y = inputs_and_targets(read_rows(shards, numbers))
        u = np.random.default_rng([0, 1, k]).random((4, *x.shape), np.float32)
        logp, early_logp, l, a = model(x, y, torch.from_numpy(u))
        for gamma in GAMMAS:
            G = discounted_return(logp, gamma)
            early_G = discounted_return(early_logp, gamma)
            for name, A in advantages(G, early_G).items():
                K, B, _ = A.shape
                L_pi = policy_loss(l[:K, :B], a[:K, :B], A)
                g = torch.autograd.grad(L_pi, matrices, retain_graph=True)
                gradients[name, gamma].append(torch.cat([part.flatten() for part in g]))
    return {key: torch.stack(g) for key, g in gradients.items()}


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoints", nargs="+", help="of train.py, with learned boundaries")
    parser.add_argument("--data", help="folder of prepare.py, instead of each checkpoint's own")
    parser.add_argument("--name", default="variance", help="folder of results (%(default)s)")
    options = parser.parse_args(argv)
    rows = []
    for path in options.checkpoints:
        with one_line_errors():
            model, saved = load_checkpoint(path)
            hp = saved["config"]
            shards = {N: open_shards(options.data or hp["data"], "train", N) for N in BATCHES}
        if hp["boundaries"] != "learned":
            fail(f"{path} has boundaries={hp['boundaries']}; use one with learned boundaries")
        label = Path(path).resolve().parent.name
        for N, batches in BATCHES.items():
            cells = defaultdict(list)
            gradients = policy_gradients(model, shards[N], batches)
            for (name, _), g in gradients.items():
                value, error = signal(g)
                cells[name].append(f"{value:.2%} ± {error:.2%}")
            rows += [[label, str(N), name, *values] for name, values in cells.items()]
    head = ["checkpoint", "bytes in a row", "estimator", *(f"gamma {gamma}" for gamma in GAMMAS)]
    text = table(head, rows)
    folder = RESULTS / options.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text("Signal, ± its standard error.\n\n" + text)
    print(text)


if __name__ == "__main__":
    main()
