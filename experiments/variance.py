"""
How much of the policy's gradient is signal, for each way to estimate it, and how well each knows what a decision is worth.

    python experiments/variance.py out-held/ckpt.pt out/ckpt.pt --data=data/english --name=variance

The estimators of checkpoints with learned boundaries differ in what a return G_i is compared with: A_i = G_i less that. Each
predicts 16 rows a step:

    raw                        16 rows   nothing: R = log p
    raw + batch mean           16 rows   the mean return of the batch's rows at position i, eq. 17
    early exit                 16 rows   the early exit's return, eq. 15
    early exit + batch mean    16 rows   both: the paper's
    2 draws                    8 rows    the return of the row's other draw (RLOO: Kool, van Hoof & Welling 2019; Ahmadian
    4 draws                    4 rows    the mean return of its three others         et al., arXiv 2402.14740)

A row's draws share its early exit, which drops out of the last two.

Share of signal: |E g|^2 / E|g|^2 of the gradient g of a step's L_pi on the policy's weights, over batches of training rows; the
rest is noise. Its inverse is the steps after which, summed up, signal and noise are equal. Standard error: jackknife over batches.
All estimators see the same rows and draws. Rows longer than those of training have positions that are new to the model.

True advantage of a decision, in nats, by brute force: Q(1) - Q(0) = E[G_i | a_i = 1] - E[G_i | a_i = 0] in held-out rows, at the
checkpoint's gamma. The decisions before i are those of one draw of the row and stay fixed; what follows is drawn SAMPLES times.

Correlation with that of an estimator's single sample, (a_i - p_i) A_i / (p_i (1 - p_i)), over positions and draws: DRAWS further
ones of what follows, the decisions before i as above. The row's other draws and the other rows, which a_i does not touch, are drawn
from their start, as in training. a_i itself is not drawn: both values count, as often as p_i says. Standard error: jackknife over
positions.

Writes experiments/results/NAME/: table.md, results.jsonl, variance.png and variance.svg.
"""
import argparse
import itertools
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
import train
from experiments.compare import RESULTS, plt
from model import load_checkpoint

GAMMAS = 0.9, 0.97, 0.99, 1.0
BATCHES = {256: 150, 1024: 40}  # bytes in a row: batches of 16 of them
POSITIONS, SAMPLES, DRAWS = 24, 200, 64  # positions of each kind; draws of what follows, for the truth and for the correlations
SHOWN = 6  # positions of each kind in the table; results.jsonl has all
STYLES = {"raw": ("#000000", "o"), "raw + batch mean": ("#E69F00", "s"), "early exit": ("#56B4E9", "^"),
          "early exit + batch mean": ("#009E73", "D"), "2 draws": ("#0072B2", "P"), "4 draws": ("#D55E00", "X")}


def advantages(G, early_G):
    """A (K, B / K, ...) of every estimator, from the returns of 4 draws of B rows: of log p alone G (4, B, ...), and of early
    log p (B, ...). All predict B rows: 2 draws are of half of them, 4 of a quarter."""
    B, R = G.size(1), G[:1] - early_G  # a return is linear in the rewards, eq. 15
    return {"raw": G[:1], "raw + batch mean": train.advantage(G[:1]),
            "early exit": R, "early exit + batch mean": train.advantage(R),
            "2 draws": train.advantage(G[:2, : B // 2]), "4 draws": train.advantage(G[:, : B // 4])}


def likelihoods(model, x, y, u):
    """log p (K, B, N) of the draws that the uniforms u (K, B, N) make of the rows x, y (B, N), or all of one row (1, N); early
    log p (B, N), 0 without an early exit; l (K, B, N), with a gradient on the policy's weights alone; and a (K, B, N)."""
    with torch.no_grad():
        X = model.encode(x).expand(u.size(1), -1, -1)
    early_logits, z = model.read(X)
    a, y = model.boundaries(z.detach(), u), y.expand(u.size(1), -1)
    with torch.no_grad():
        logp = torch.stack([train.log_likelihood(model.predict(X, draw), y) for draw in a])
        early_logp = torch.zeros_like(logp[0]) if early_logits is None else train.log_likelihood(early_logits, y)
    return logp, early_logp, model.boundary_logits(z, a), a


# ---------------------------------------------------------------------------------------------------------------------
# Share of signal.


def share(g):
    """|E g|^2 / E|g|^2 from samples g (n, d), the first estimated without bias: noise alone gives 0. And its standard error."""
    n, total, square = len(g), g.sum(0), g.square().sum()
    value = (total.square().sum() / square - 1) / (n - 1)
    total, square = total - g, square - g.square().sum(1)  # (n, d), (n,): without each of them
    without = (total.square().sum(1) / square - 1) / (n - 2)
    return value.item(), ((n - 1) * without.var(correction=0)).sqrt().item()  # jackknife


def policy_gradients(model, shards, autocast, batches):
    """L_pi's gradients on the policy's weights: {(estimator, gamma): (batches, d)}."""
    n, gradients = sum(map(len, shards[0])), defaultdict(list)
    for k in tqdm(range(batches), desc=f"gradients, rows of {shards[0][0].shape[1]} bytes", disable=None):
        x, y, _ = train.fetch(shards, np.random.default_rng(k).integers(0, n, 16))
        with autocast:
            logp, early_logp, l, a = likelihoods(model, x, y, train.uniforms(0, k, (4, *x.shape)))
        for gamma in GAMMAS:
            G = train.discounted_return(logp, gamma)
            for name, A in advantages(G, train.discounted_return(early_logp, gamma)).items():
                L_pi = train.policy_loss(l[: len(A), : A.size(1)], a[: len(A), : A.size(1)], A)
                gradients[name, gamma] += torch.autograd.grad(L_pi, model.policy.weight, retain_graph=True)
    return {key: torch.stack(g).flatten(1) for key, g in gradients.items()}


# ---------------------------------------------------------------------------------------------------------------------
# True advantage.


def forced_returns(model, x, y, past, i, n, gamma):
    """G_i (2, n) of log p alone in the row x, y (1, N) with a_i = 0 and a_i = 1. The decisions before i are those of the uniforms
    past (N,); what follows is drawn n times, with the same uniforms for both, which takes noise out of their difference."""
    u = torch.rand(n, len(past)).repeat(2, 1, 1)  # (2, n, N)
    u[..., :i] = past[:i]
    u[0, :, i], u[1, :, i] = 1, 0  # a_i = [u_i < p_i]
    logp = torch.cat([likelihoods(model, x, y, some[None])[0][0] for some in u.flatten(0, 1).split(50)])
    return train.discounted_return(logp, gamma)[:, i].view(2, n)


def choose_positions(x):
    """POSITIONS (row, position, kind) of each kind among the rows x (B, N), by the byte that has just been read."""
    letter = train.LETTERS[x]
    previous = F.pad(letter, (1, 0))[:, :-1]
    kinds = {"between words": ~letter, "first letter": letter & ~previous, "inside a word": letter & previous}
    for kind, where in kinds.items():
        where = where[:, 1 : 3 * x.size(1) // 4].nonzero() + torch.tensor([0, 1])  # <bos> is forced; leave bytes to predict
        for row, i in where[torch.randperm(len(where))[:POSITIONS]].tolist():
            yield row, i, kind


def context(y, i):
    """The row's text around position i, the byte read there before the mark."""
    before, after = (bytes(z.tolist()).decode(errors="replace") for z in (y[max(i - 20, 0) : i], y[i : i + 12]))
    text = f"{before}‖{after}".replace("\n", "⏎").replace("|", "¦").replace("`", "'")  # what would break a table
    return "".join(c if c.isprintable() else "·" for c in text)


@torch.no_grad()
def true_advantages(model, shards, autocast, gamma):
    """A record for each position, and every estimator's A there, with a_i = 0 and a_i = 1: {estimator: (positions, 2, DRAWS)}."""
    n, rng, records, A = sum(map(len, shards[0])), np.random.default_rng(0), [], defaultdict(list)
    batches = []  # returns of the 15 other rows of each draw's batch: of log p, and of early log p
    for _ in range(DRAWS):
        x, y, _ = train.fetch(shards, rng.integers(0, n, 15))
        with autocast:
            logp, early_logp, _, _ = likelihoods(model, x, y, torch.rand(1, *x.shape))
        batches.append([train.discounted_return(z, gamma) for z in (logp[0], early_logp)])
    other_rows, early_rows = (torch.stack(G, 1) for G in zip(*batches))  # (15, DRAWS, N)
    x, y, _ = train.fetch(shards, rng.integers(0, n, 64))
    for row, i, kind in tqdm(list(choose_positions(x)), desc="true advantages", disable=None):
        one, past = (x[row : row + 1], y[row : row + 1]), torch.rand(x.size(1))
        with autocast:
            _, early_logp, l, _ = likelihoods(model, *one, past[None, None])
            forced = forced_returns(model, *one, past, i, SAMPLES + DRAWS, gamma)
            other_draws = torch.stack([likelihoods(model, *one, torch.rand(1, DRAWS, len(past)))[0][0] for _ in range(3)])
        difference = (forced[1] - forced[0])[:SAMPLES]
        records.append({"row": row, "position": i, "kind": kind, "context": context(y[row], i), "gamma": gamma,
                        "p": l[0, 0, i].sigmoid().item(), "advantage": difference.mean().item(),
                        "stderr": (difference.std() / SAMPLES**0.5).item()})
        G, early_G = torch.zeros(4, 16, 2, DRAWS), torch.zeros(16, 1, DRAWS)  # 4 draws of 16 rows, as far as an A[0, 0] needs them
        G[0, 0], early_G[0] = forced[:, SAMPLES:], train.discounted_return(early_logp, gamma)[0, i]
        G[0, 1:], early_G[1:] = other_rows[:, None, :, i], early_rows[:, None, :, i]
        G[1:, 0] = train.discounted_return(other_draws, gamma)[:, None, :, i]
        for name, value in advantages(G, early_G).items():
            A[name].append(value[0, 0])
    return records, {name: torch.stack(values) for name, values in A.items()}


def correlation(A, p, truth):
    """Of the single samples that A (P, 2, n), with a_i = 0 and a_i = 1, make with truth (P,), and its standard error; p (P,)."""
    pi = torch.stack((1 - p, p), 1)[..., None].expand_as(A)
    sample = A * torch.tensor([[-1], [1]]) / pi  # (a_i - p_i) / (p_i (1 - p_i)) is 1 / p_i or -1 / (1 - p_i)
    z = torch.stack((sample, truth[:, None, None].expand_as(A)))

    def of(chosen):
        c = torch.cov(z[:, chosen].flatten(1), aweights=pi[chosen].flatten())
        return c[0, 1] / (c[0, 0] * c[1, 1]).sqrt()

    everyone = torch.arange(len(p))
    without = torch.stack([of(everyone != j) for j in everyone])
    return of(everyone).item(), ((len(p) - 1) * without.var(correction=0)).sqrt().item()  # jackknife


# ---------------------------------------------------------------------------------------------------------------------


def draw_shares(shares, path):
    """Share of signal against gamma: a panel a checkpoint and row length, a line an estimator."""
    panels = list(dict.fromkeys((r["checkpoint"], r["row_bytes"]) for r in shares))
    height = -(-len(panels) // len(BATCHES))
    figure, axes = plt.subplots(height, len(BATCHES), figsize=(8, 3 * height + 0.8), layout="constrained", squeeze=False)
    for ax, (checkpoint, N) in zip(axes.flat, panels):
        for name, (colour, marker) in STYLES.items():
            line = [r for r in shares if (r["checkpoint"], r["row_bytes"], r["estimator"]) == (checkpoint, N, name)]
            ax.errorbar([str(r["gamma"]) for r in line], [100 * r["share"] for r in line], [100 * r["stderr"] for r in line],
                        color=colour, marker=marker, markersize=5, linewidth=1, capsize=2, label=name)
        ax.set_title(f"{checkpoint}, rows of {N} bytes", fontsize=9)
        ax.set(xlabel="gamma", ylabel="share of signal, %")
        ax.grid(alpha=0.2)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=150)
    plt.close(figure)


def table(head, rows):
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def write(shares, correlations, truths, folder):
    """The records, as results.jsonl, as three tables and as a figure."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in shares + correlations + truths))
    cells, places = defaultdict(list), defaultdict(list)  # a record a gamma; a record a position
    for r in shares:
        cells[r["checkpoint"], str(r["row_bytes"]), r["estimator"]].append(f"{r['share']:.2%} ± {r['stderr']:.2%}")
    for r in truths:
        places[r["checkpoint"], str(r["gamma"]), r["kind"]].append(r)
    means = {key: torch.tensor([r["advantage"] for r in records]) for key, records in places.items()}
    (folder / "table.md").write_text("\n".join((
        "Share of signal, ± its standard error.\n",
        table(["checkpoint", "bytes in a row", "estimator", *(f"gamma {gamma}" for gamma in GAMMAS)],
              [[*key, *values] for key, values in cells.items()]),
        "Correlation of an estimator's single sample with the true advantage.\n",
        table(["checkpoint", "estimator", "correlation"],
              [[r["checkpoint"], r["estimator"], f"{r['correlation']:.3f} ± {r['stderr']:.3f}"] for r in correlations]),
        "True advantage of a token that ends there, nats: mean over positions, ± its standard error.\n",
        table(["checkpoint", "gamma", "the byte just read", "positions", "Q(1) - Q(0)"],
              [[*key, str(len(z)), f"{z.mean():+.3f} ± {z.std() / len(z)**0.5:.3f}"] for key, z in means.items()]),
        f"The same at ‖, the first {SHOWN} positions of each kind.\n",
        table(["checkpoint", "gamma", "the byte before ‖", "", "p", "Q(1) - Q(0)"],
              [[r["checkpoint"], str(r["gamma"]), r["kind"], f"`{r['context']}`", f"{r['p']:.3f}",
                f"{r['advantage']:+.3f} ± {r['stderr']:.3f}"] for records in places.values() for r in records[:SHOWN]]))))
    draw_shares(shares, folder / "variance")


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("checkpoints", nargs="+", help="of train.py, with learned boundaries")
    parser.add_argument("--data", help="folder of prepare.py; without it, the one that a checkpoint was trained on")
    parser.add_argument("--name", default="variance", help="of the folder of results")
    parser.error = lambda message: sys.exit(f"variance.py: {message}")
    options = parser.parse_args(argv)
    opened = {}  # all mistakes before any work
    for path in options.checkpoints:
        try:
            model, saved = load_checkpoint(path)
        except (OSError, ValueError) as error:
            parser.error(error)
        if model.config.boundaries != "learned":
            parser.error(f"{path} has boundaries={model.config.boundaries!r}; name a checkpoint with learned ones")
        config = saved["config"] | ({"data": options.data} if options.data else {})
        label = f"{Path(path).resolve().parent.name}, {saved['rows_seen'] * config['seq_len'] / 1e6:.3g} MB"
        if label in opened:
            parser.error(f"{path} is {label} as another checkpoint is; put it into a folder of another name")
        val_shards = train.open_rows(config["data"], "val", config["seq_len"])
        train_shards = {N: train.open_rows(config["data"], "train", N) for N in BATCHES}
        opened[label] = model.train(), config, train_shards, val_shards  # training mode: with the soft-cap of eq. 23
    shares, correlations, truths = [], [], []
    for label, (model, config, train_shards, val_shards) in opened.items():
        print(label)
        torch.manual_seed(0)
        kind, precision = train.device_and_dtype("cpu", config["dtype"])
        autocast = torch.autocast(kind, getattr(torch, precision), enabled=precision != "float32")
        estimators = [name for name in STYLES if model.config.early_exit or "early" not in name]
        for N, shards in train_shards.items():
            gradients = policy_gradients(model, shards, autocast, BATCHES[N])
            for name, gamma in itertools.product(estimators, GAMMAS):
                value, error = share(gradients[name, gamma])
                shares.append({"checkpoint": label, "row_bytes": N, "batches": BATCHES[N], "estimator": name, "gamma": gamma,
                               "share": value, "stderr": error})
        records, A = true_advantages(model, val_shards, autocast, config["gamma"])
        truths += [{"checkpoint": label} | record for record in records]
        p, truth = (torch.tensor([record[key] for record in records]) for key in ("p", "advantage"))
        for name in estimators:
            value, error = correlation(A[name], p, truth)
            correlations.append({"checkpoint": label, "estimator": name, "gamma": config["gamma"],
                                 "correlation": value, "stderr": error})
    write(shares, correlations, truths, RESULTS / options.name)
    print((RESULTS / options.name / "table.md").read_text())


if __name__ == "__main__":
    main(sys.argv[1:])
