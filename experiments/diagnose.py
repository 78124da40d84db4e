"""
How good the policy's training signal is, and what its draws cost.

    python experiments/diagnose.py out/ckpt.pt

Signal: the share of the squared norm of L_pi's gradient on the policy's weights that is its mean over batches of training rows;
the rest is noise. Its inverse is the steps after which, summed up, signal and noise are equal. Then bits per byte on 256
validation rows with boundaries drawn from p, and with those where p is above a threshold.
"""
import math
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import train
from model import load_checkpoint

BATCHES = 150


def share(g):
    """|E g|^2 over E |g|^2 from samples g (n, d), the first estimated without bias: noise alone gives 0."""
    n, square = len(g), g.square().sum(1).mean()
    return ((g.mean(0).square().sum() * n - square) / (n - 1) / square).item()


def policy_gradients(model, shards, autocast):
    """L_pi's gradient on the policy's weights, of BATCHES batches of training rows (BATCHES, d)."""
    n, gradients = sum(map(len, shards[0])), []
    for k in range(BATCHES):
        x, y, _ = train.fetch(shards, np.random.default_rng(k).integers(0, n, train.batch_size))
        with autocast:
            outputs = model(x)
        L_pi = train.losses(*outputs, y, train.gamma, train.downsample_rate_target)[2]
        gradients.append(torch.autograd.grad(L_pi, model.policy.weight)[0].flatten())
    return torch.stack(gradients)


@torch.no_grad()
def bits_per_byte(model, shards, autocast, threshold):
    """With boundaries where p > threshold, or drawn if it is None; and the boundary rate."""
    rows, bits, rate = np.linspace(0, sum(map(len, shards[0])) - 1, 256).astype(int), [], []
    for some in np.split(rows, 16):
        x, y, _ = train.fetch(shards, some)
        u = torch.rand(x.shape) if threshold is None else torch.full(x.shape, threshold)
        with autocast:
            logits, _, _, a = model(x, u=u)
        bits.append(-train.log_likelihood(logits, y) / math.log(2))
        rate.append(a.float())
    return torch.cat(bits).mean().item(), torch.cat(rate).mean().item()


def main(argv):
    if len(argv) != 1:
        sys.exit("diagnose.py: no checkpoint; name one of train.py")
    try:
        model, saved = load_checkpoint(argv[0])
    except (OSError, ValueError) as error:
        sys.exit(f"diagnose.py: {error}")
    if model.config.boundaries != "learned":
        sys.exit(f"diagnose.py: {argv[0]} has boundaries={model.config.boundaries!r}; name a checkpoint with learned ones")
    vars(train).update(saved["config"])
    kind, precision = train.device_and_dtype("cpu", train.dtype)
    autocast = torch.autocast(kind, getattr(torch, precision), enabled=precision != "float32")
    torch.manual_seed(0)
    signal = share(policy_gradients(model.train(), train.open_rows("train"), autocast))
    print(f"signal {signal:.1%} of the squared gradient: {1 / signal:.0f} steps until it equals the noise")
    for threshold in None, 0.5, 0.25:
        bits, rate = bits_per_byte(model.eval(), train.open_rows("val"), autocast, threshold)
        print(f"{'drawn' if threshold is None else f'p > {threshold}':10} {bits:.4f} bits per byte, rate {rate:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
