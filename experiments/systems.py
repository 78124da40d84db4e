"""
The other ways to place boundaries that the paper compares with: train.py --boundaries=NAME.

Every system has the learned model's bytes, layers, middle and output head. Only what decides is
its own and, where a system says so, what pools and spreads the tokens.

    uniform     round(N * target) evenly spaced tokens
    random      independent draws at the target rate
    whitespace  a word's end: the first byte after a word (SpaceByte, arXiv 2404.14408)
    bpe         the first byte after each of o200k_base's tokens
    none        every byte a token
    gumbel      Nawrot et al., arXiv 2211.09761
    hnet        Hwang et al., one stage, arXiv 2507.07955
    PATH.pt     what a finished model of any system decides
"""
import hashlib
import math
import re
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import (SYSTEMS, Model, in_rows, load_checkpoint, log_likelihood, next_byte,
                   next_byte_logits, token_layout)

TEMPERATURE = 0.5  # of gumbel's relaxed Bernoulli
RATIO_WEIGHT = 0.03  # of hnet's ratio loss


class System(Model):
    """What the systems share: no policy, no reward, a loss of their own, a full pass per byte."""

    def __init__(self, config):
        super().__init__(config)
        for unused in self.policy, self.early_norm:  # DistributedDataParallel wants to know
            unused.requires_grad_(False)

    def outputs(self, x, u):
        """Bytes x, uniforms u (B, N) -> what the head reads (B, N, D), l and a (B, N)."""

    def forward(self, x, y, u):
        """As Model.forward, with one draw, and with rewards that nobody uses."""
        Z, l, a = self.outputs(x, u[0])
        logp = self.log_likelihood(Z, y, self.norm, self.head)
        return logp[None], torch.zeros_like(logp), l[None], a[None]

    def boundary_loss(self, l, a):
        """What the system adds to L_auto, from l and a (1, B, N) as forward returned them."""
        return 0.0

    @torch.no_grad()
    def generate(self, x, max_new_bytes, temperature=1.0, top_k=None):
        """As sample.generate, but each byte costs a pass over all that come before it."""
        B, N = x.shape
        u = torch.rand(B, N + max_new_bytes).to(x.device)
        Z, l, a = self.outputs(x, u[:, :N])
        nats = -log_likelihood(Z[:, :-1], x[:, 1:], self.norm, self.head)
        for i in range(1, N):
            yield x[:, i], a[:, i], l[:, i].sigmoid(), nats[:, i - 1]
        for i in range(N, N + max_new_bytes):
            logits = next_byte_logits(Z[:, -1], self.norm, self.head)
            byte = next_byte(logits, temperature, top_k)
            nats = F.cross_entropy(logits, byte, reduction="none")
            x = torch.cat((x, byte[:, None]), 1)
            Z, l, a = self.outputs(x, u[:, : i + 1])
            yield byte, a[:, -1], l[:, -1].sigmoid(), nats


class Fixed(System):
    """A rule gives the boundaries, from the bytes, the positions or the uniforms."""

    def rule(self, x, u):
        """Bytes x (B, N) and uniforms u (B, N) -> a (B, N) bool."""

    def outputs(self, x, u):
        a = self.rule(x, u)
        a[:, 0] = True
        return self.predict(self.encode(x), a), torch.where(a, 20.0, -20.0), a


class Uniform(Fixed):
    def rule(self, x, u):
        i, N = torch.arange(x.size(1), device=x.device), self.config.seq_len
        M = round(N * self.config.downsample_rate_target)
        return ((i * M) // N > ((i - 1) * M) // N).repeat(len(x), 1)


class Random(Fixed):
    def rule(self, x, u):
        return u < self.config.downsample_rate_target


class Whitespace(Fixed):
    """SpaceByte's words: ASCII letters and digits, and bytes that continue a character."""

    def rule(self, x, u):
        word = (x >= 128) & (x < 192)
        for first, last in (b"09", b"AZ", b"az"):
            word = word | (x >= first) & (x <= last)
        return ~word & F.pad(word, (1, 0))[:, :-1]


class EveryByte(Fixed):
    def rule(self, x, u):
        return torch.ones_like(x, dtype=torch.bool)


class BPE(Fixed):
    """A row's tokens, each mark shifted right by one, so that it never lies on an unread byte.

    The marks look ahead all the same: where a token ends depends on the bytes after it, "the
    unbel|ievers" but "the unbelievable". So a mark tells of bytes to come, and the bits per byte
    are no code length. Generated text is marked by the bytes so far.
    """

    def __init__(self, config):
        super().__init__(config)
        import tiktoken  # not above: train.py imports this file, and few need a tokenizer
        try:
            self.tokenizer = tiktoken.get_encoding("o200k_base")
        except Exception:  # of requests, or of a broken cache
            raise FileNotFoundError("tiktoken cannot fetch o200k_base; let it reach the network, "
                                    "or set TIKTOKEN_CACHE_DIR to where it is") from None

    def rule(self, x, u):
        a = torch.zeros(len(x), x.size(1) + 1, dtype=torch.bool)
        for row, marks in zip(x[:, 1:].tolist(), a):
            lengths = torch.tensor(self.token_lengths(bytes(row)), dtype=torch.long)
            marks[1 + lengths.cumsum(0)] = True
        return a[:, :-1].to(x.device)

    def token_lengths(self, row):
        """Bytes of each token; a byte that is no UTF-8, as of a cut character, is one."""
        lengths, parts = [], re.split("([\udc80-\udcff])", row.decode(errors="surrogateescape"))
        for text, other_byte in zip(parts[::2], [*parts[1::2], ""]):
            tokens = self.tokenizer.encode_ordinary(text)
            lengths += map(len, self.tokenizer.decode_tokens_bytes(tokens))
            lengths += [1] * len(other_byte)
        return lengths


class Taught(Fixed):
    """A model on a teacher's boundaries: it tells what their places are worth, without the use."""

    def __init__(self, config):
        super().__init__(config)
        teacher = config.boundaries
        self.teacher = (load_checkpoint(teacher)[0],)  # a tuple: its weights are not this model's
        self.teacher_sha256 = hashlib.sha256(Path(teacher).read_bytes()).hexdigest()

    def get_extra_state(self):  # what state_dict has beside the weights
        return self.teacher_sha256

    def set_extra_state(self, sha256):
        if sha256 != self.teacher_sha256:
            raise ValueError(f"its teacher {self.config.boundaries} is another now; put it back")

    @torch.no_grad()
    def rule(self, x, u):
        return self.teacher[0].to(x.device)(x, torch.zeros_like(x), u[None])[3][0]


def mean_pool(X, a, M):
    """Mean of X (B, N, D) over each token's bytes -> (B, M, D); a (B, N), 1 where a token ends.

    A position's weight in token s is 1 - s + (the number of boundaries before it), over the sum
    of the token's weights: 1 in value, but with a gradient on a, as in the authors' code.
    """
    before = a.cumsum(1) - a
    weight = 1 + before - before.detach()  # (B, N)
    token = before.detach().round().long().clamp(max=M)  # column M takes what ends no token
    total = X.new_zeros(X.size(0), M + 1, X.size(2), dtype=torch.float32)
    total = total.scatter_add(1, token[..., None].expand_as(X), weight[..., None] * X.float())
    count = total.new_zeros(total.shape[:2]).scatter_add(1, token, weight)
    return (total / count.clamp(min=1e-9)[..., None])[:, :M].type_as(X)


class Gumbel(System):
    """An MLP gives logits, a relaxed Bernoulli draws, tokens are means of their bytes.

    A learned null token takes the place of <bos>'s. In training a has the relaxed draw's gradient.
    """

    def __init__(self, config):
        super().__init__(config)
        D, target = config.embedding_dim, config.downsample_rate_target
        self.boundary_mlp = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, 1))
        nn.init.zeros_(self.boundary_mlp[2].weight)  # p starts at the target, as the policy's
        nn.init.constant_(self.boundary_mlp[2].bias, math.log(target / (1 - target)))
        self.early_norm.requires_grad_(True)
        self.null = nn.Parameter(torch.randn(D))

    def outputs(self, x, u):
        X = self.encode(x)
        with torch.autocast(X.device.type, enabled=False):
            l = self.boundary_mlp(self.early_norm(X).float())[..., 0]  # (B, N)
        soft = torch.sigmoid((l - torch.logit(u, eps=1e-6)) / TEMPERATURE)
        hard = soft > 0.5
        hard[:, 0] = True
        a = hard + soft - soft.detach() if self.training else hard  # straight-through
        _, token, positions, places = token_layout(hard)
        tokens = mean_pool(X, a.float(), positions.size(1))  # (B, M, D)
        null = self.null.to(X.dtype).expand(len(x), 1, -1)
        tokens = torch.cat((null, tokens[:, 1:]), 1).flatten(0, 1)[places]  # (T, D)
        tokens = self.run(self.middle, tokens, positions, places)
        return self.decode(X + F.embedding(token, tokens)), l, a

    def boundary_loss(self, l, a):
        """The prior: -log Binomial(N - 1, target) at the number of boundaries, over N."""
        N, target = a.size(-1), a.new_tensor(self.config.downsample_rate_target)
        prior = torch.distributions.Binomial(N - 1, target, validate_args=False)
        return -prior.log_prob(a[..., 1:].sum(-1)).mean() / N


def smooth(y, P):
    """z_t = P_t y_t + (1 - P_t) z_{t-1}, P_0 = 1, of tokens y (B, M, D) and P (B, M)."""
    keep, z, reach = (1 - P)[..., None], P[..., None] * y, 1
    while reach < y.size(1):  # doubles the stretch that is summed
        z = z + keep * F.pad(z, (0, 0, reach, 0))[:, : y.size(1)]
        keep = keep * F.pad(keep, (0, 0, reach, 0))[:, : y.size(1)]
        reach *= 2
    return z


class HNet(System):
    """Dynamic chunking: a boundary where the projections of neighbouring bytes point apart."""

    def __init__(self, config):
        super().__init__(config)
        D = config.embedding_dim
        self.q, self.k, self.residual = (nn.Linear(D, D, bias=False) for _ in range(3))
        nn.init.eye_(self.q.weight)
        nn.init.eye_(self.k.weight)
        nn.init.zeros_(self.residual.weight)

    def outputs(self, x, u):
        X = self.encode(x)
        with torch.autocast(X.device.type, enabled=False):
            q, k = self.q(X.float())[:, 1:], self.k(X.float())[:, :-1]
            p = F.pad((1 - F.cosine_similarity(q, k, dim=-1)) / 2, (1, 0), value=1.0)  # (B, N)
        a = p >= 0.5
        byte, token, positions, places = token_layout(a)
        tokens = F.embedding(byte, X.flatten(0, 1))  # (T, D)
        tokens = self.run(self.middle, tokens, positions, places)
        tokens = in_rows(tokens.float(), places, positions.shape)  # (B, M, D)
        tokens = smooth(tokens, p.gather(1, positions)).flatten(0, 1)
        confidence = torch.where(a, p, 1 - p)
        confidence = confidence + (1 - confidence).detach()  # straight-through: 1
        Y = confidence[..., None] * F.embedding(places[token], tokens) + self.residual(X)
        return self.decode(Y.type_as(X)), torch.logit(p, eps=1e-6), a

    def boundary_loss(self, l, a):
        """The ratio loss, N / (N - 1) ((N - 1) F G + (1 - F) (1 - G)), with N = 1 / target."""
        N, f, g = 1 / self.config.downsample_rate_target, a.float().mean(), l.sigmoid().mean()
        return RATIO_WEIGHT * N / (N - 1) * ((N - 1) * f * g + (1 - f) * (1 - g))


SYSTEMS.update({"uniform": Uniform, "random": Random, "whitespace": Whitespace, "bpe": BPE,
                "none": EveryByte, "gumbel": Gumbel, "hnet": HNet, ".pt": Taught})
