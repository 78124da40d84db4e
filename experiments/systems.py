"""
The other ways to place boundaries that the paper compares with: train.py --boundaries=NAME.

Every system keeps the learned model's bytes, layers, middle, output head and signature, forward(x, a, u) -> logits, None (no reward,
so no early head), l, a. Only what decides (and, where a system defines it, what pools and spreads the tokens) is its own. A position i
has read x_0 .. x_i, and a_i = 1 gives it the token that ends there.

    uniform     round(N * target) evenly spaced tokens
    random      independent draws at the target rate
    whitespace  a word's end: the first byte after a word, letters and digits, that is none of these (SpaceByte, arXiv 2404.14408)
    bpe         after o200k_base's tokens, shifted right by one
    none        every byte a token
    gumbel      Nawrot et al., arXiv 2211.09761
    hnet        Hwang et al., one stage, arXiv 2507.07955
    PATH.pt     those that a finished model of any system draws, from the first byte on: what is left of the distance between two
                systems is not where their boundaries are; against the model itself, what it lost before they were good
"""
import codecs
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import prepare
from model import BOS, Model, load_checkpoint, select, token_positions

TEMPERATURE = 0.5  # of gumbel's relaxed Bernoulli
RATIO_WEIGHT = 0.03  # of hnet's ratio loss


class System(Model):
    """What they share: no policy, a loss of their own, and generation by the full pass, one byte after the other."""

    def __init__(self, config):
        super().__init__(config)
        self.policy.requires_grad_(False)  # unused, and the norm before it; DistributedDataParallel wants to know
        self.early_norm.requires_grad_(False)

    def boundary_loss(self, l, a):
        """What the system adds to L_auto, from the logits l and the boundaries a (B, N) that forward returned."""
        return 0.0

    @torch.no_grad()
    def generate(self, x, max_new_bytes, temperature=1.0, top_k=None):
        """As Model.generate, without caches: decisions before a byte do not depend on it, so a full pass repeats them."""
        (B, T), u = x.shape, torch.rand(len(x), x.size(1) + max_new_bytes)
        for i in range(T - 1, T + max_new_bytes):
            logits, _, l, a = self(x, u=u[:, : x.size(1)].to(x.device))
            a, p = a.bool(), l.sigmoid()
            nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="none").view(B, -1)
            for j in range(1, T) if i == T - 1 else [i]:
                yield x[:, j], a[:, j], p[:, j], nll[:, j - 1]
            last = logits[:, -1] / max(temperature, 1e-5)
            last[:, BOS] = -torch.inf  # not a byte
            if top_k is not None:
                last[last < last.topk(min(top_k, BOS)).values[:, -1:]] = -torch.inf
            x = torch.cat((x, torch.multinomial(last.softmax(-1), 1)), 1)


class Fixed(System):
    """Boundaries that are not learned: a rule gives them from the bytes, the positions or the uniforms."""

    def rule(self, x, u):
        """a (B, N) bool of bytes x (B, N) and uniforms u (B, N); a_i may depend on x_0 .. x_i."""
        raise NotImplementedError

    def place(self, x, u=None):
        """The rule's boundaries and <bos>'s, (B, N) bool."""
        u = torch.rand(x.shape, device=x.device) if u is None else u
        return self.rule(x, u) | (torch.arange(x.size(1), device=x.device) == 0)

    def forward(self, x, a=None, u=None):
        a = self.place(x, u) if a is None else a
        return self.predict(self.encode(x), a), None, torch.where(a, 20.0, -20.0), a


class Uniform(Fixed):
    def rule(self, x, u):
        i, N = torch.arange(x.size(1), device=x.device), self.config.seq_len
        M = round(N * self.config.downsample_rate_target)
        return ((i * M) // N > ((i - 1) * M) // N).repeat(len(x), 1)


class Random(Fixed):
    def rule(self, x, u):
        return u < self.config.downsample_rate_target


class Whitespace(Fixed):
    def rule(self, x, u):
        """SpaceByte's: a byte that is no ASCII letter or digit and continues no UTF-8 character, after one that is or does."""
        word = (x >= 128) & (x < 192)
        for first, last in (b"09", b"AZ", b"az"):
            word = word | (x >= first) & (x <= last)
        return ~word & F.pad(word, (1, 0))[:, :-1]


class BPE(Fixed):
    """Training and its evaluation take the marks that prepare.py --bpe made from whole documents. Those are shifted by one, but
    they look ahead: "the unbelievable" has no mark in the word and "the unbel|ievers" one at that i, so a mark tells more than
    the bytes before it, and the val_bpb of train.py is no code length that a decoder could reach.

    Where there are no marks, in generation, sample.py --score and evaluate.py, a_i is what the bytes up to i tell: 1 where the
    tokens of the last 256 of them have one that starts at i, 0 while i's character is unfinished. That is causal, and not what
    the model was trained on: 5% of the marks differ in English, 6% in Python, more where characters have several bytes.
    """

    def rule(self, x, u):
        a = torch.zeros(x.shape, dtype=torch.bool)
        for row, chosen in zip(x.tolist(), a):
            for i in range(2, x.size(1)):
                read, decoder = bytes(row[max(1, i - 255) : i + 1]), codecs.getincrementaldecoder("utf-8")("replace")
                decoder.decode(read)
                chosen[i] = not decoder.getstate()[0] and bool(prepare.bpe_marks(read)[-1])
        return a.to(x.device)


class Nothing(Fixed):
    def rule(self, x, u):
        return torch.ones_like(x, dtype=torch.bool)


class Taught(Fixed):
    def __init__(self, config):
        super().__init__(config)
        self.teacher = (load_checkpoint(config.boundaries)[0],)  # in a tuple: its weights are not this model's

    @torch.no_grad()
    def rule(self, x, u):
        return self.teacher[0].to(x.device)(x, u=u)[3] > 0.5


def mean_pool(X, a, M):
    """Mean of X over the bytes of each token, which ends where a is 1. X (B, N, D), a (B, N) 0 or 1 -> (B, M, D).

    The weight of a position is 1 in value; in its gradient a boundary moves the positions after it to the next token, as in
    the authors' code: 1 - s + (the number of boundaries before it), over the sum of the token's weights.
    """
    before = a.cumsum(1) - a
    weight = 1 + before - before.detach()  # (B, N)
    token = before.detach().round().long().clamp(max=M)  # the one after the last boundary: padding, or column M
    total = X.new_zeros(X.size(0), M + 1, X.size(2), dtype=torch.float32)
    total = total.scatter_add(1, token[..., None].expand_as(X), weight[..., None] * X.float())
    count = total.new_zeros(total.shape[:2]).scatter_add(1, token, weight)
    return (total / count.clamp(min=1e-9)[..., None])[:, :M].type_as(X)


class Gumbel(System):
    """An MLP on X gives logits; a relaxed Bernoulli, hardened at 1/2 and straight-through, draws; the bytes of a token are mean-pooled;
    a binomial prior keeps the rate. A learned null token takes the place of <bos>'s."""

    def __init__(self, config):
        super().__init__(config)
        D, target = config.embedding_dim, config.downsample_rate_target
        self.boundary_mlp = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, 1))
        nn.init.zeros_(self.boundary_mlp[2].weight)
        nn.init.constant_(self.boundary_mlp[2].bias, math.log(target / (1 - target)))  # p starts at the target, as the policy's
        self.early_norm.requires_grad_(True)
        self.null = nn.Parameter(torch.randn(D))

    def forward(self, x, a=None, u=None):
        X = self.encode(x)
        with torch.autocast(X.device.type, enabled=False):
            l = self.boundary_mlp(self.early_norm(X).float())[..., 0]  # (B, N)
        if a is None:
            u = torch.rand(x.shape, device=x.device) if u is None else u
            soft = torch.sigmoid((l - torch.logit(u, eps=1e-6)) / TEMPERATURE)
            a = (soft > 0.5) | (torch.arange(x.size(1), device=x.device) == 0)
            if self.training:
                a = a + soft - soft.detach()  # straight-through
        positions, token = token_positions(a.detach() > 0.5)
        tokens = mean_pool(X, a.float(), positions.size(1))  # (B, M, D)
        tokens = torch.cat((self.null.to(X.dtype).expand(len(x), 1, -1), tokens[:, 1:]), 1)
        tokens = self.run(self.middle, tokens, positions)
        return self.decode(X + select(tokens, token)), None, l, a

    def boundary_loss(self, l, a):
        """- log Binomial(N - 1, target) at the number of boundaries drawn, over N; mean over rows."""
        n = a.size(1) - 1
        prior = torch.distributions.Binomial(n, probs=a.new_tensor(self.config.downsample_rate_target), validate_args=False)
        return -prior.log_prob(a[:, 1:].sum(1)).mean() / a.size(1)


def smooth(y, P, N):
    """z_t = P_t y_t + (1 - P_t) z_{t-1}, P_0 = 1; of a row of N bytes; y (B, M, D), P (B, M). Doubles the stretch that is summed
    log2(N) times; log2(M) would do, but M varies, and each number of doublings would be compiled anew."""
    keep, z, reach = (1 - P)[..., None], P[..., None] * y, 1
    while reach < N:
        z = z + keep * F.pad(z, (0, 0, reach, 0))[:, : y.size(1)]
        keep = keep * F.pad(keep, (0, 0, reach, 0))[:, : y.size(1)]
        reach *= 2
    return z


class HNet(System):
    """Dynamic chunking: a boundary where neighbouring bytes' projections point apart."""

    def __init__(self, config):
        super().__init__(config)
        D = config.embedding_dim
        self.q, self.k, self.residual = (nn.Linear(D, D, bias=False) for _ in range(3))
        nn.init.eye_(self.q.weight)
        nn.init.eye_(self.k.weight)
        nn.init.zeros_(self.residual.weight)

    def forward(self, x, a=None, u=None):
        X = self.encode(x)
        with torch.autocast(X.device.type, enabled=False):
            q, k = self.q(X.float())[:, 1:], self.k(X.float())[:, :-1]
            p = F.pad((1 - F.cosine_similarity(q, k, dim=-1)) / 2, (1, 0), value=1.0)  # (B, N)
        a = p >= 0.5 if a is None else a
        positions, token = token_positions(a)
        tokens = self.run(self.middle, select(X, positions), positions)  # (B, M, D)
        tokens = smooth(tokens.float(), p.gather(1, positions), x.size(1))
        confidence = torch.where(a, p, 1 - p)
        confidence = confidence + (1 - confidence).detach()  # straight-through: 1
        Y = confidence[..., None] * select(tokens, token) + self.residual(X)
        return self.decode(Y.type_as(X)), None, torch.logit(p, eps=1e-6), a

    def boundary_loss(self, l, a):
        """The ratio loss: N / (N - 1) ((N - 1) F G + (1 - F) (1 - G)), F the rate, G the mean p, N = 1 / target."""
        N, f, g = 1 / self.config.downsample_rate_target, a.float().mean(), l.sigmoid().mean()
        return RATIO_WEIGHT * N / (N - 1) * ((N - 1) * f * g + (1 - f) * (1 - g))


SYSTEMS = {"uniform": Uniform, "random": Random, "whitespace": Whitespace, "bpe": BPE, "none": Nothing, "gumbel": Gumbel, "hnet": HNet}
