"""What is measured besides bits per byte: FLOPs of matrix products, and where tokens end."""
import math
from collections import Counter
from itertools import compress

from model import T_MULTIPLE, TOKEN_MULTIPLE, chunking


def count_matrix_parameters(model):
    """Parameters in matrices before, in and after the middle, without the embedding."""

    def count(module):
        return sum(p.numel() for p in module.parameters() if p.dim() == 2)

    middle = count(model.middle)
    after = count(model.up) + count(model.head)
    before = count(model) - count(model.embedding) - middle - after
    return before, middle, after


def executed_flops(model, a):
    """FLOPs of a forward and backward pass with boundaries a (K, B, N); a scalar.

    Within 1% of torch's FlopCounterMode. The first draw runs forward and backward, three times the
    forward FLOPs; further draws run forward, from the middle on. Filler tokens are included.
    """
    config = model.config
    D = config.embedding_dim
    _, B, N = a.shape
    before, middle, after = count_matrix_parameters(model)
    C, chunks, back = chunking(N, config.attention_window)
    queries = chunks * C
    keys = (1 + back) * C  # of each query
    byte_attention = 2 * queries * keys * D  # multiply-adds in a layer's two products, for a row

    def predict(counts):
        """Multiply-adds from the middle on, for rows with counts (..., rows) tokens."""
        rows = counts.size(-1)
        M = (counts.amax(-1) / TOKEN_MULTIPLE).ceil() * TOKEN_MULTIPLE
        T = (counts.sum(-1) / T_MULTIPLE).ceil() * T_MULTIPLE
        T = T.minimum(rows * M)
        token_attention = 2 * M**2 * D
        attention = config.n_mid_layers * token_attention + config.n_up_layers * byte_attention
        return middle * T + rows * (after * N + attention)

    counts = (a > 0.5).sum(-1)  # (K, B)
    encode = B * (before * N + config.n_down_layers * byte_attention)
    first = encode + predict(counts[0])
    further = predict(counts[1:, : math.ceil(config.redrawn * B)])
    return 2 * (3 * first + further.sum())  # a multiply-add is two FLOPs


def muon_flops(muon):
    """FLOPs of a step of train.Muon: three matrix products per Newton-Schulz iteration."""
    flops = 0
    for p in muon.param_groups[0]["params"]:
        small, large = sorted(p.shape)
        flops += 5 * (4 * small**2 * large + 2 * small**3)
    return flops


def paper_flops_per_byte(model, rate, draws):
    """Training FLOPs per byte as in the paper's Figures 3 and 4, at a rate in tokens per byte.

    6 per matrix parameter and byte (in the middle, per token), without attention products and
    fillers. A further draw adds 2 per parameter from the middle on, in the rows that have one.
    """
    before, middle, after = count_matrix_parameters(model)
    further = 2 * (draws - 1) * model.config.redrawn
    return 6 * before + (6 + further) * (middle * rate + after)


def where_tokens_end(x, a):
    """Fractions of tokens by where they end, for x (B, N) and boundaries a (B, N) bool.

        ends_before   on the last letter of a word
        ends_between  between words
        ends_after    on the first letter of a word
        ends_within   within a character of several bytes

    The rest end inside words. A word is a run of letters and digits. <bos> does not count.
    """
    counts = Counter()
    for row, ends in zip(x[:, 1:].tolist(), a[:, 1:].tolist()):
        text = bytes(row).decode(errors="surrogateescape")
        in_word = [False, *(c.isalnum() for c in text), True]  # as if the last word went on
        places = []
        for c, before, here, after in zip(text, in_word, in_word[1:], in_word[2:]):
            if not here:
                place = "ends_between"
            elif not before:
                place = "ends_after"
            elif not after:
                place = "ends_before"
            else:
                place = "inside"
            size = len(c.encode(errors="surrogateescape"))
            places += ["ends_within"] * (size - 1) + [place]
        counts.update(compress(places, ends))
    total = max(counts.total(), 1)
    names = "ends_before", "ends_between", "ends_after", "ends_within"
    return {name: counts[name] / total for name in names}
