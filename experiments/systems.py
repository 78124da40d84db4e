"""
The other ways to place boundaries that the paper compares with: train.py --system=NAME.

Every system is a U-Net like the learned one. They differ in what decides where tokens end and, for
gumbel and hnet, in how tokens are made and handed back. whitespace, bpe, bpe-late and none have
rates of their own; the others follow the target rate.

    uniform     round(N * target) evenly spaced tokens
    random      independent draws at the target rate
    whitespace  the first byte after a word (SpaceByte, arXiv 2404.14408)
    bpe         the first character after each of o200k_base's tokens, judged from the text up to
                there
    bpe-late    the paper's BPE: the first byte after each of the whole row's; looks ahead
    none        every byte is a token
    gumbel      Nawrot et al., arXiv 2211.09761
    hnet        Hwang et al., one stage, arXiv 2507.07955

To add a rule, write a class like Random and add its name to SYSTEMS.
"""
import itertools
import math
import re

import torch
import torch.nn as nn
import torch.nn.functional as F

from common.commandline import UserError
from model import Output, RMSNorm, UNet, pick, token_layout

TEMPERATURE = 0.5  # of gumbel's relaxed Bernoulli
RATIO_WEIGHT = 0.03  # of hnet's ratio loss


class System(UNet):
    """What the other systems share: no early exit, and a loss of their own.

    Each has a forward(x, u) like Model's: bytes x and uniforms u (B, N) -> Output.
    """

    def boundary_loss(self, l, a):
        """What the system adds to L_auto, a scalar, from the l and a (B, N) of its output."""
        return torch.zeros((), device=l.device)

    def losses(self, out, y, hp):
        """The total loss, and its terms for the log, like train.losses."""
        L_auto = -self.head.logp(out.Z, y).mean()
        boundary = self.boundary_loss(out.l, out.a)
        return L_auto + boundary, {"auto": L_auto, "boundary": boundary}


class Fixed(System):
    """Boundaries that a rule computes from the bytes, the positions or the uniforms."""

    def rule(self, x, u):
        """Bytes x and uniforms u (B, N) -> a (B, N) bool; a[:, 0] is overwritten."""

    def forward(self, x, u):
        a = self.rule(x, u)
        a[:, 0] = True
        l = torch.where(a, 20.0, -20.0)  # p is 1 or 0
        return Output(self.through_tokens(self.encode(x), a), None, l, a)


class Uniform(Fixed):
    def rule(self, x, u):
        N = self.hp.seq_len
        M = round(N * self.hp.downsample_rate_target)
        i = torch.arange(x.size(1), device=x.device)
        return (i * M % N < M).repeat(len(x), 1)


class Random(Fixed):
    def rule(self, x, u):
        return u < self.hp.downsample_rate_target


class Whitespace(Fixed):
    """SpaceByte's words: ASCII letters and digits, and bytes that continue a character."""

    def rule(self, x, u):
        word = (x >= 128) & (x < 192)
        for first, last in (b"09", b"AZ", b"az"):
            word = word | (x >= first) & (x <= last)
        return ~word & word.roll(1, 1)


class EveryByte(Fixed):
    def rule(self, x, u):
        return torch.ones_like(x, dtype=torch.bool)


class BPE(Fixed):
    """GPT-4o's tokens, as the text so far shows them.

    A token ends on the last byte of a character if the encoding of the text up to there has a token
    that lies within the character. That shows that the token before it has ended.
    """

    def __init__(self, hp):
        super().__init__(hp)
        import tiktoken  # here, so that the other systems do without it
        try:
            self.tokenizer = tiktoken.get_encoding("o200k_base")
        except Exception as error:  # requests' errors, or a broken cache
            raise UserError(
                f"tiktoken cannot load o200k_base ({error}); connect to the network, or set "
                "TIKTOKEN_CACHE_DIR to a folder that holds it") from error

    def rule(self, x, u):
        a = torch.zeros(x.shape, dtype=torch.bool)
        for row, marks in zip(x[:, 1:].tolist(), a):
            marks[[1 + i for i in self.ends(bytes(row))]] = True
        return a.to(x.device)

    def ends(self, row):
        """The bytes of a row at which a token ends.

        Encodes the text from the last run of white space on that begins with no newline. The
        tokenizer always begins a piece there, so earlier text does not matter. A byte that is not
        UTF-8 ends no token, because whether it is one can depend on later bytes.
        """
        ends = []
        i = -1
        start = 0
        text = row.decode(errors="surrogateescape")
        for k, character in enumerate(text):
            size = len(character.encode(errors="surrogateescape"))
            i += size
            if character.isspace() and character not in "\r\n" and not text[k - 1 : k].isspace():
                start = k
            last = self.tokenizer.encode_ordinary(text[start : k + 1])[-1]
            valid = not "\udc80" <= character <= "\udcff"
            if valid and len(self.tokenizer.decode_single_token_bytes(last)) <= size:
                ends.append(i)
        return ends


class BPELate(BPE):
    """The paper's rule: GPT-4o's tokens of the whole row, whose boundaries are one byte late.

    They look ahead, because they can depend on bytes even further on: "the unbel|ievers" but "the
    unbelievable". So they carry information about later bytes, and the bits per byte are not a code
    length. In generated text they depend on the bytes so far.
    """

    def ends(self, row):
        """A byte that is not UTF-8, as in a cut character, is a token."""
        lengths = []
        for part in re.split("([\udc80-\udcff])", row.decode(errors="surrogateescape")):
            if re.fullmatch("[\udc80-\udcff]", part):
                lengths.append(1)
            else:
                tokens = self.tokenizer.encode_ordinary(part)
                lengths += [len(token) for token in self.tokenizer.decode_tokens_bytes(tokens)]
        return [i for i in itertools.accumulate(lengths) if i < len(row)]


def mean_pool(X, a, M):
    """Mean of X (B, N, D) over each token's bytes -> (B, M, D); a (B, N), 1 where a token ends.

    A position's weight in token s is 1 - s + (the number of boundaries before it). That is 1 in
    value, but has a gradient on a, as in the authors' code. The mean divides by the weights' sum.
    """
    before = a.cumsum(1) - a
    weight = 1 + before - before.detach()  # (B, N)
    token = before.detach().round().long().clamp(max=M)  # column M takes bytes after the last token
    total = X.new_zeros(X.size(0), M + 1, X.size(2), dtype=torch.float32)
    total = total.scatter_add(1, token[..., None].expand_as(X), weight[..., None] * X.float())
    count = total.new_zeros(total.shape[:2]).scatter_add(1, token, weight)
    mean = total / count.clamp(min=1e-9)[..., None]
    return mean[:, :M].type_as(X)


class Gumbel(System):
    """An MLP gives logits, a relaxed Bernoulli draws, and a token is the mean of its bytes.

    A learned null token replaces <bos>'s token. In training a has the relaxed draw's gradient.
    """

    def __init__(self, hp):
        super().__init__(hp)
        D = hp.embedding_dim
        self.boundary_norm = RMSNorm(D)
        self.boundary_mlp = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, 1))
        nn.init.zeros_(self.boundary_mlp[2].weight)  # p starts at the target, as the policy's does
        nn.init.zeros_(self.boundary_mlp[2].bias)
        self.null = nn.Parameter(torch.randn(D))

    def forward(self, x, u):
        X = self.encode(x)
        with torch.autocast(X.device.type, enabled=False):
            l = self.boundary_mlp(self.boundary_norm(X).float())[..., 0]  # (B, N)
            target = self.hp.downsample_rate_target
            l = l + math.log(target / (1 - target))
        soft = torch.sigmoid((l - torch.logit(u, eps=1e-6)) / TEMPERATURE)
        hard = soft > 0.5
        hard[:, 0] = True
        a = hard
        if self.training:
            a = hard + soft - soft.detach()  # straight-through
        ends, reads = token_layout(hard)
        pooled = mean_pool(X, a.float(), ends.size(1))  # (B, M, D)
        null = self.null.to(X.dtype).expand(len(x), 1, -1)
        tokens = torch.cat((null, pooled[:, 1:]), dim=1)
        tokens = self.transform(self.middle, tokens, ends)
        return Output(self.decode(self.upsample(X, tokens, reads)), None, l, a)

    def boundary_loss(self, l, a):
        """The prior: -log Binomial(N - 1, target) at the number of boundaries, divided by N."""
        N = a.size(1)
        boundaries = a[:, 1:].float().sum(1)
        target = torch.tensor(self.hp.downsample_rate_target, device=a.device)
        prior = torch.distributions.Binomial(N - 1, target, validate_args=False)
        return -prior.log_prob(boundaries).mean() / N


def smooth(y, P):
    """z_t = P_t y_t + (1 - P_t) z_{t-1} with P_0 = 1, for tokens y (B, M, D) and P (B, M)."""
    z = P[..., None] * y
    keep = (1 - P)[..., None]
    reach = 1
    while reach < y.size(1):  # each turn doubles how many tokens are summed
        z = z + keep * F.pad(z, (0, 0, reach, 0))[:, : y.size(1)]
        keep = keep * F.pad(keep, (0, 0, reach, 0))[:, : y.size(1)]
        reach *= 2
    return z


class HNet(System):
    """Dynamic chunking: a boundary where the projections of neighbouring bytes point apart."""

    def __init__(self, hp):
        super().__init__(hp)
        D = hp.embedding_dim
        self.q = nn.Linear(D, D, bias=False)
        self.k = nn.Linear(D, D, bias=False)
        self.residual = nn.Linear(D, D, bias=False)
        nn.init.eye_(self.q.weight)
        nn.init.eye_(self.k.weight)
        nn.init.zeros_(self.residual.weight)

    def forward(self, x, u):
        X = self.encode(x)
        with torch.autocast(X.device.type, enabled=False):
            q = self.q(X.float())[:, 1:]
            k = self.k(X.float())[:, :-1]
            p = (1 - F.cosine_similarity(q, k, dim=-1)) / 2
            p = F.pad(p, (1, 0), value=1.0)  # (B, N)
        a = p >= 0.5
        ends, reads = token_layout(a)
        tokens = self.transform(self.middle, pick(X, ends), ends).float()  # (B, M, D)
        smoothed = smooth(tokens, p.gather(1, ends))
        confidence = torch.where(a, p, 1 - p)
        confidence = confidence + (1 - confidence).detach()  # straight-through: its value is 1
        Y = confidence[..., None] * pick(smoothed, reads) + self.residual(X)
        return Output(self.decode(Y.type_as(X)), None, torch.logit(p, eps=1e-6), a)

    def boundary_loss(self, l, a):
        """The ratio loss, n / (n - 1) ((n - 1) F G + (1 - F) (1 - G)), with n = 1 / target."""
        n = 1 / self.hp.downsample_rate_target
        fraction = a.float().mean()  # F
        mean_p = l.sigmoid().mean()  # G
        ratio = (n - 1) * fraction * mean_p + (1 - fraction) * (1 - mean_p)
        return RATIO_WEIGHT * n / (n - 1) * ratio


SYSTEMS = {
    "uniform": Uniform, "random": Random, "whitespace": Whitespace, "bpe": BPE,
    "bpe-late": BPELate, "none": EveryByte, "gumbel": Gumbel, "hnet": HNet}


def make_system(hp):
    """A new model of a system other than learned. UserError: there is no such system."""
    if hp.system not in SYSTEMS:
        raise UserError(f"system={hp.system!r} must be one of learned, {', '.join(SYSTEMS)}")
    return SYSTEMS[hp.system](hp)
