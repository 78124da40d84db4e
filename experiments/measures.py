"""What a run is measured by beside its bits: FLOPs of matrix products, and where tokens end."""
import math
from collections import Counter

import torch

from model import T_MULTIPLE, TOKEN_MULTIPLE


def matrices(model):
    """Parameters of trained matrices before, in and after the middle, without the embedding."""
    def count(*modules):
        parameters = (p for module in modules for p in module.parameters())
        return sum(p.numel() for p in parameters if p.dim() == 2)

    middle, after = count(model.middle), count(model.up, model.head)
    return count(model) - middle - after - count(model.embedding), middle, after


def executed_flops(model, a):
    """Of a training pass with boundaries a (K, B, N): a tensor; within 1% of FlopCounterMode.

    The first draw goes forward and backward, which costs twice as much again. The others go
    forward, from the middle on. Fillers count as model.token_layout adds them.
    """
    (K, B, N), c, tokens = a.shape, model.config, (a > 0.5).sum(-1)
    D, W, again = c.embedding_dim, min(c.attention_window, N), math.ceil(c.redrawn * B)
    C = max(W // 2, 8)  # window_attention's chunks, each with the keys of those it reaches into
    window = math.ceil(N / C) * C * (1 + math.ceil((W - 1) / C)) * C * D * 2  # two products
    before, middle, after = matrices(model)

    def predict(tokens):  # (..., B)
        B, M = tokens.size(-1), (tokens.amax(-1) / TOKEN_MULTIPLE).ceil() * TOKEN_MULTIPLE
        T = torch.minimum((tokens.sum(-1) / T_MULTIPLE).ceil() * T_MULTIPLE, B * M)
        attention = c.n_mid_layers * 2 * M**2 * D + window * c.n_up_layers
        return middle * T + B * (attention + after * N)

    encode = B * (before * N + window * c.n_down_layers)
    return 2 * (3 * (encode + predict(tokens[0])) + predict(tokens[1:, :again]).sum())


def paper_flops_per_byte(model, rate, draws):
    """The paper's count for its Figures 3 and 4, at a rate in tokens per byte.

    6 per matrix parameter, per byte or, in the middle, per token; attention's products and padding
    do not count. Further draws: 2 per parameter from the middle on, of the rows that have them.
    """
    before, middle, after = matrices(model)
    return 6 * before + (6 + 2 * (draws - 1) * model.config.redrawn) * (middle * rate + after)


def where_tokens_end(x, a):
    """Shares of tokens that end at a word's last letter, between words, at its first letter, or
    within a character of several bytes; the rest lies inside words, which are letters and digits.

    Of boundaries a (B, N) bool in bytes x (B, N) of UTF-8, but <bos>'s.
    """
    names, counts = ("ends_before", "ends_between", "ends_after", "ends_within"), Counter()
    for row, ends in zip(x[:, 1:].tolist(), a[:, 1:].tolist()):
        text, places = bytes(row).decode(errors="surrogateescape"), []
        word = [False, *(c.isalnum() for c in text), True]
        for c, before, here, after in zip(text, word, word[1:], word[2:]):
            place = ("ends_between" if not here else "ends_after" if not before else
                     "inside" if after else "ends_before")
            places += ["ends_within"] * (len(c.encode(errors="surrogateescape")) - 1) + [place]
        counts.update(place for place, end in zip(places, ends) if end)
    return {name: torch.tensor(counts[name] / max(counts.total(), 1)) for name in names}
