"""FLOPs of training: of all matrix products, and as the paper counts them."""
import math

from experiments.optimizer import make_optimizer
from model import Model, chunking


def count_matrix_parameters(model):
    """Parameters in matrices before, in and after the middle, without the embedding."""

    def count(module):
        return sum(p.numel() for p in module.parameters() if p.dim() == 2)

    middle = count(model.middle)
    after = count(model.up) + count(model.head)
    before = count(model) - count(model.embedding) - middle - after
    return before, middle, after


def redrawn(model):
    """The fraction of rows that the model draws twice."""
    return model.config.redrawn if isinstance(model, Model) else 0


def executed_flops(model, B, T, M):
    """FLOPs of a forward and backward pass over B rows: three times the forward FLOPs.

    T and M are train.py's: the tokens of all draws and the longest row, with fillers. Second draws
    only run forward, from the middle on. Each draw is taken to have equally many tokens. Within 1%
    of torch's FlopCounterMode, with second draws 3%.
    """
    config = model.config
    N, D = config.seq_len, config.embedding_dim
    R = math.ceil(redrawn(model) * B)
    before, middle, after = count_matrix_parameters(model)
    C, chunks, back = chunking(N, config.attention_window)
    queries = chunks * C
    keys = (1 + back) * C  # of each query
    byte_attention = 2 * queries * keys * D  # multiply-adds in a layer's two products, for a row
    token_attention = 2 * M**2 * D
    attention = config.n_mid_layers * token_attention + config.n_up_layers * byte_attention
    from_middle = middle * T / (B + R) + after * N + attention
    encoder = before * N + config.n_down_layers * byte_attention
    return 2 * (3 * B * encoder + (3 * B + R) * from_middle)  # a multiply-add is two FLOPs


def muon_flops(optimizer):
    """FLOPs of a step of Muon: three matrix products per Newton-Schulz iteration."""
    flops = 0
    for group in optimizer.param_groups:
        if group["muon"]:
            for p in group["params"]:
                small, large = sorted(p.shape)
                flops += 5 * (4 * small**2 * large + 2 * small**3)
    return flops


def flops_per_byte(model, hp, T, M):
    """FLOPs of training per byte, if T and M are those of every micro-batch."""
    passes = executed_flops(model, hp.batch_size, T, M) / hp.batch_size  # of a row
    products = muon_flops(make_optimizer(model, hp))
    return (passes + products / hp.effective_batch_size) / hp.seq_len


def paper_flops_per_byte(model, rate):
    """Training FLOPs per byte as in the paper's Figures 3 and 4, at a rate in tokens per byte.

    6 per matrix parameter and byte (in the middle, per token), without attention products and
    fillers. A second draw adds 2 per parameter from the middle on, in the rows that have one.
    """
    before, middle, after = count_matrix_parameters(model)
    return 6 * before + (6 + 2 * redrawn(model)) * (middle * rate + after)
