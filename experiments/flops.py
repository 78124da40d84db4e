"""FLOPs of training: of all matrix products, and as the paper counts them."""
from functools import lru_cache

import train
from model import chunking


def count_matrix_parameters(model):
    """Parameters in matrices before, in and after the middle, without the embedding."""

    def count(module):
        return sum(p.numel() for p in module.parameters() if p.dim() == 2)

    middle = count(model.middle)
    after = count(model.up) + count(model.head)
    before = count(model) - count(model.embedding) - middle - after
    return before, middle, after


def row_flops(model, rate):
    """FLOPs of a forward and backward pass over a row, three times the forward FLOPs.

    The rate is in tokens per byte. Within 2% of torch's FlopCounterMode, which counts fillers too.
    """
    hp = model.hp
    N, D = hp.seq_len, hp.embedding_dim
    M = rate * N
    before, middle, after = count_matrix_parameters(model)
    C, chunks, back = chunking(N, hp.attention_window)
    keys = (1 + back) * C  # of each of the chunks * C queries
    attention = hp.n_mid_layers * 2 * M**2 * D  # multiply-adds of a layer's two products
    attention += (hp.n_down_layers + hp.n_up_layers) * 2 * chunks * C * keys * D
    return 3 * 2 * ((before + after) * N + middle * M + attention)  # a multiply-add is two FLOPs


@lru_cache(1)
def muon_flops(model):
    """FLOPs of a step of Muon: three matrix products per Newton-Schulz iteration."""
    flops = 0
    for group in train.make_optimizer(model, model.hp, "float32").param_groups:
        if group.get("muon"):
            for p in group["params"]:
                small, large = sorted(p.shape)
                flops += 5 * (4 * small**2 * large + 2 * small**3)
    return flops


def flops_per_byte(model, rate):
    """FLOPs of training per byte, at a rate in tokens per byte."""
    muon = muon_flops(model) / model.hp.effective_batch_size  # for a row
    return (row_flops(model, rate) + muon) / model.hp.seq_len


def paper_flops_per_byte(model, rate):
    """Training FLOPs per byte as in the paper's Figures 3 and 4, at a rate in tokens per byte.

    6 per matrix parameter and byte (in the middle, per token), without attention's products.
    """
    before, middle, after = count_matrix_parameters(model)
    return 6 * (before + middle * rate + after)
