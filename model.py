"""
A byte-level language model that learns where its tokens end.
"You Can Learn Tokenization End-to-End with Reinforcement Learning", arXiv 2602.13940.

The parts come first, top to bottom as the data flows; Model.forward puts them together.
`# eq. n` is the paper's equation n. The names are the paper's too:

    x  bytes, x_0 = <bos>                      (B, N)      X   byte representations       (B, N, D)
    a  a_i = 1: a token ends at byte i         (K, B, N)   X'  those at the boundaries       (T, D)
    l  logit of that decision, p = sigmoid(l)  (K, B, N)   Y'  after the middle              (T, D)
    y  the byte to predict, y_i = x_{i+1}      (B, N)      Y   handed back to the bytes   (B, N, D)

K draws of the boundaries of each row, B rows, N bytes in a row, D = embedding_dim; T tokens in all
rows of a pass, M in the row that has the most, both rounded up.
"""
import copy
import math
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

BOS = 256  # the one symbol that is not a byte
VOCAB_SIZE = 257
ATTENTION_SOFTCAP, LOGIT_SOFTCAP = 50.0, 30.0  # as in Gemma 2
ROPE_BASE = 10000.0
TOKEN_MULTIPLE = 16 if torch.cuda.is_available() else 8  # of M: few shapes; 16 aligns loads
T_MULTIPLE = 64  # of T, unless T is B * M: products of odd sizes are slow


@dataclass
class ModelConfig:
    seq_len: int = 4096  # bytes in a training row; longer ones can be read too
    embedding_dim: int = 768
    num_heads: int = 12
    n_down_layers: int = 4  # byte layers before the middle
    n_mid_layers: int = 12  # token layers
    n_up_layers: int = 4  # byte layers after the middle
    attention_window: int = 64  # bytes that a byte layer sees, its own included
    downsample_rate_target: float = 1 / 5  # tokens per byte
    policy_window: int = 8  # w: earlier decisions that a decision sees
    policy_scale: float = 16.0  # S, eq. 22
    policy_softcap: float = 5.0  # eq. 23, ours: keeps p within 0.7% and 99.3% while it trains
    redrawn: float = 1.0  # share of rows that have draws beyond the first
    early_exit: bool = True  # a head that predicts from X alone, eq. 14
    boundaries: str = "learned"  # a key of SYSTEMS, or a checkpoint whose boundaries are taken


# ---- The transformer block of Gemma 2: RMSNorms, RoPE, GeGLU, soft-caps, no biases.
def softcap(z, c):
    return c * torch.tanh(z / c)


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), computed in float32, returned in x's dtype."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return (y * (1 + self.weight)).type_as(x)


def rope(positions, head_dim):
    """cos and sin of the rotary angles at positions (...): (2, ..., 1, head_dim / 2)."""
    pair = torch.arange(0, head_dim, 2, device=positions.device)
    angle = positions[..., None, None] * ROPE_BASE ** (-pair.float() / head_dim)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x, cos, sin):
    """Turns the pairs (x_k, x_{k + head_dim/2}) of x (B, N, H, head_dim) by the angles."""
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


def softcapped_attention(q, k, v, mask):
    """Of q (..., Q, h) over k and v (..., M, h); mask (..., Q, M) is True where q may look."""
    scores = softcap((q @ k.mT).float() / math.sqrt(q.size(-1)), ATTENTION_SOFTCAP)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).type_as(v) @ v


def causal_attention(q, k, v):
    """Full causal attention over (B, H, M, h)."""
    M = q.size(-2)
    if torch.compiler.is_compiling():  # a GPU then loads several scores at once
        torch._check(M % TOKEN_MULTIPLE == 0)
    i = torch.arange(M, device=q.device)
    return softcapped_attention(q, k, v, i <= i[:, None])


def window_attention(q, k, v, window):
    """Causal attention to the last `window` positions, over (B, H, N, h), in O(N * window).

    The row is cut into chunks of half a window, of 8 at least. A chunk's queries need the keys of
    their own chunk and of those that a window reaches back into: small dense products.
    """
    N, window = q.size(2), min(window, q.size(2))
    C = max(window // 2, 8)  # products smaller than 8 by 16 are slow
    n, back = math.ceil(N / C), math.ceil((window - 1) / C)  # chunks; how many before its own
    q = F.pad(q, (0, 0, 0, n * C - N)).unflatten(2, (n, C))  # (B, H, n, C, h)
    k, v = (F.pad(z, (0, 0, back * C, n * C - N)).unflatten(2, (back + n, C)) for z in (k, v))
    k, v = (torch.cat([z[:, :, i : i + n] for i in range(back + 1)], dim=3) for z in (k, v))
    i = torch.arange(C, device=q.device)[:, None] + back * C
    j = torch.arange((back + 1) * C, device=q.device)  # k and v are (B, H, n, (back + 1) C, h)
    start = torch.arange(n, device=q.device)[:, None, None] * C  # key j is byte start + j - back C
    mask = (j <= i) & (j > i - window) & (start + j >= back * C)  # (n, C, (back + 1) C)
    return softcapped_attention(q, k, v, mask).flatten(2, 3)[:, :, :N]


class Attention(nn.Module):
    """Causal attention, to `window` positions or all, of x (B, N, D) or tokens (T, D) at places."""

    def __init__(self, dim, num_heads, window=None):
        super().__init__()
        self.num_heads, self.window = num_heads, window
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def attend(self, q, k, v):  # sample.py puts one that keeps keys and values in its place
        if self.window is None:
            return causal_attention(q, k, v)
        return window_attention(q, k, v, self.window)

    def forward(self, x, cos, sin, places=None):
        x = self.qkv(x)
        x = x if places is None else in_rows(x, places, cos.shape[:2])  # (B, M, 3D)
        q, k, v = x.unflatten(-1, (3, self.num_heads, -1)).unbind(-3)  # (B, N, H, h)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # (B, H, N, h)
        y = y.transpose(1, 2).flatten(-2)
        return self.out(y if places is None else F.embedding(places, y.flatten(0, 1)))  # (T, D)


class GeGLU(nn.Module):
    """x (..., dim) -> (..., dim) through hidden_dim gated units."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate, approximate="tanh") * value)


class Block(nn.Module):
    """x -> x: attention, then MLP, each between two norms and added to x."""

    def __init__(self, dim, num_heads, hidden_dim, window=None):
        super().__init__()
        self.attention, self.mlp = Attention(dim, num_heads, window), GeGLU(dim, hidden_dim)
        self.norm1, self.norm2, self.norm3, self.norm4 = (RMSNorm(dim) for _ in range(4))

    def forward(self, x, cos, sin, places=None):
        x = x + self.norm2(self.attention(self.norm1(x), cos, sin, places))
        return x + self.norm4(self.mlp(self.norm3(x)))


# ---- The policy's draw, select and upsample.
def draw(p, u):
    """Draws boundaries a (..., N) bool of uniforms u (..., N) in parallel, exactly; eq. 19-21.

    p (..., N, 2^w) holds p_i for each history h of decisions; bit j-1 of h is a_{i-j}. Same as
    `for i in range(N): a[i] = u[i] < p[i, h]; h = (2 * h + a[i]) % 2**w`, from h = 0.

    Given u, each position maps the history before it to the one after it: a table. Neighbours'
    tables compose, exactly. A tree of pairs makes those of 2, 4, 8 ... positions; down the tree
    comes the history that enters each position: 2 log2(N) small steps.
    """
    N, H = p.shape[-2:]
    decision = u[..., None] < p  # (..., N, H)
    after = (2 * torch.arange(H, device=p.device) + decision) % H
    after = F.pad(after, (0, 0, 0, 2 ** math.ceil(math.log2(N)) - N))
    levels = []
    while after.size(-2) > 1:
        levels.append(after)
        after = after[..., 1::2, :].gather(-1, after[..., ::2, :])  # the second after the first
    history = after.new_zeros(after.shape[:-1])  # (..., 1): no boundaries before the row
    for table in reversed(levels):
        second = table[..., ::2, :].gather(-1, history[..., None])[..., 0]
        history = torch.stack((history, second), -1).flatten(-2)  # twice as many positions
    return decision.gather(-1, history[..., :N, None])[..., 0]


def token_layout(a):
    """Of boundaries a (B, N) bool, a[:, 0] True, where the T tokens of all rows lie; all int64.

    byte (T,): where each ends, counted through all rows. token (B, N): the one that each byte
    reads. positions (B, M): the tokens' bytes, row by row. places (T,): where each lies in the
    B * M. T is rounded up with fillers of byte 0. They lie after their row's own tokens, where
    causal attention hides them, and no byte reads them.
    """
    byte = a.flatten().nonzero()[:, 0]  # waits for the GPU
    token = a.flatten().cumsum(0).view_as(a) - 1  # the last at or before each byte
    count = a.sum(1, keepdim=True)
    M = math.ceil(int(count.max()) / TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    own = torch.arange(M, device=a.device) < count  # (B, M)
    T = min(math.ceil(len(byte) / T_MULTIPLE) * T_MULTIPLE, own.numel())
    places = (~own).flatten().int().argsort(stable=True)[:T]  # tokens' places, then fillers'
    byte = F.pad(byte, (0, T - len(byte)))
    return byte, token, in_rows(byte % a.size(1), places, own.shape), places


def in_rows(z, places, shape):
    """Tokens z (T, ...) at their places in rows of zeros: (B, M, ...), of `shape` (B, M)."""
    rows = z.new_zeros(shape[0] * shape[1], *z.shape[1:])
    return rows.index_copy(0, places, z).unflatten(0, shape)


# ---- The model.
def inputs_and_targets(rows):
    """Of rows (B, N) uint8: x = <bos> and all bytes but the last, y = all bytes; int64."""
    y = torch.from_numpy(rows).long()
    return F.pad(y[:, :-1], (1, 0), value=BOS), y


def next_byte_logits(x, norm, head):
    """Soft-capped logits (..., 257) in float32 of x (..., D); eq. 6, 14."""
    weight = F.pad(head.weight, (0, 0, 0, 7))  # 264 columns: products of 257, odd, are slow
    return softcap(F.linear(norm(x), weight)[..., :VOCAB_SIZE].float(), LOGIT_SOFTCAP)


def log_likelihood(x, y, norm, head):
    """log p(y) in nats (B, N), of x (B, N, D) and the next bytes y (B, N)."""
    logits = next_byte_logits(x, norm, head).flatten(0, 1)
    return -F.cross_entropy(logits, y.flatten(), reduction="none").view_as(y)


def next_byte(logits, temperature, top_k):
    """Draws (B,) bytes of logits (B, 257); temperature 0 takes the likeliest."""
    logits = logits.clone()
    logits[:, BOS] = -torch.inf  # not a byte
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None:
        logits[logits < logits.topk(min(top_k, BOS)).values[:, -1:]] = -torch.inf
    return torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]


class Model(nn.Module):
    """Byte encoder, policy, middle transformer and byte decoder; train.py has the losses."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        D, H, W = config.embedding_dim, config.num_heads, config.attention_window
        self.embedding = nn.Embedding(VOCAB_SIZE, D)
        self.down = nn.ModuleList(Block(D, H, D, W) for _ in range(config.n_down_layers))
        self.early_norm = RMSNorm(D)  # of the policy and the early head
        self.policy = nn.Linear(D, 1 + config.policy_window, bias=False)  # W_0 .. W_w, eq. 21
        self.middle = nn.ModuleList(Block(D, H, 4 * D) for _ in range(config.n_mid_layers))
        self.up = nn.ModuleList(Block(D, H, D, W) for _ in range(config.n_up_layers))
        self.norm = RMSNorm(D)
        self.head = nn.Linear(D, VOCAB_SIZE, bias=False)

        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.normal_(self.head.weight, std=0.02)
        if config.early_exit:
            self.early_head = copy.deepcopy(self.head)  # W_early, eq. 14
        nn.init.zeros_(self.policy.weight)  # p starts at the target everywhere, but for eq. 23

    def run(self, blocks, x, positions, places=None):
        """x (B, N, D) or tokens (T, D) through the blocks; positions (N,) or (B, N) in bytes."""
        cos, sin = rope(positions, self.config.embedding_dim // self.config.num_heads)
        for block in blocks:
            x = block(x, cos, sin, places)
        return x

    def encode(self, x):
        """Bytes x (B, N) -> X (B, N, D); eq. 1."""
        return self.run(self.down, self.embedding(x), torch.arange(x.size(1), device=x.device))

    def policy_terms(self, X):
        """From X (B, N, D) what makes up a decision's logit: z (B, N, 1 + w) float32; eq. 21-22.

        z_i0 is always in it, z_ij only if a_{i-j} = 1.
        """
        target = self.config.downsample_rate_target
        with torch.autocast(X.device.type, enabled=False):
            z = self.policy(self.early_norm(X).float()) / self.config.policy_scale
            z[..., 0] += math.log(target / (1 - target))
        return z

    def capped(self, l):
        """The logit of a decision, soft-capped in training; eq. 23."""
        return softcap(l, self.config.policy_softcap) if self.training else l

    def boundaries(self, z, u):
        """z (B, N, 1 + w) and uniforms u (K, B, N) -> a (K, B, N) bool; eq. 2, 19-23."""
        l = z[..., :1]
        for j in range(1, z.size(-1)):  # (B, N, 2^j): a_{i-j} = 0 or 1
            l = torch.cat((l, l + z[..., j, None]), dim=-1)
        p = self.capped(l).sigmoid()  # (B, N, 2^w), for every history
        p[:, 0] = 1.0  # <bos> is a token: every byte has one to read from
        return draw(p, u)

    def boundary_logits(self, z, a):
        """l (K, B, N) of the decisions a (K, B, N), given those before them; eq. 21-23."""
        l, N = z[..., 0].expand(a.shape), a.size(-1)
        for j in range(1, z.size(-1)):
            l = l + F.pad(a, (j, 0))[..., :N] * z[..., j]  # a_{i-j} W_j X_i
        return self.capped(l)

    def decode(self, Y):
        """Y (B, N, D) -> what the output head reads, (B, N, D); eq. 6."""
        return self.run(self.up, Y, torch.arange(Y.size(1), device=Y.device))

    def tokens_read(self, X, a):
        """X (B, N, D), boundaries a (B, N) bool -> the token that each byte reads; eq. 3-5, 7-8."""
        byte, token, positions, places = token_layout(a)
        tokens = F.embedding(byte, X.flatten(0, 1))  # X' (T, D)
        tokens = self.run(self.middle, tokens, positions, places)  # Y' (T, D)
        return F.embedding(token, tokens)

    def predict(self, X, a):
        """X (B, N, D), boundaries a (B, N) bool -> what the head reads, (B, N, D); eq. 3-9."""
        return self.decode(X + self.tokens_read(X, a))  # eq. 9 as written: Y', not Y' - X'

    log_likelihood = staticmethod(log_likelihood)  # train.py compiles it

    def forward(self, x, y, u):
        """x, y (B, N), uniforms u (K, B, N) -> logp (K, B, N), early_logp (B, N), l, a (K, B, N).

        x_0 = <bos>. logp is log p(y | x, a) in nats; early_logp is that of the early exit, or 0
        without one. a is bool. Nothing at i depends on later bytes or decisions, but log p on y_i.
        The first draw teaches all layers. The others only tell the policy how good they were. The
        rows that are not drawn again have the first draw K times, and an advantage of 0.
        """
        X, B = self.encode(x), math.ceil(self.config.redrawn * len(x))
        z = self.policy_terms(X)
        with torch.no_grad():
            a = self.boundaries(z, u)  # eq. 2
            a[1:, B:] = a[0, B:]
        l = self.boundary_logits(z, a)
        logp = [self.log_likelihood(self.predict(X, a[0]), y, self.norm, self.head)]
        with torch.no_grad():
            for other in a[1:]:
                Z = self.predict(X[:B], other[:B])
                again = self.log_likelihood(Z, y[:B], self.norm, self.head)
                logp.append(torch.cat((again, logp[0][B:])))
        early_logp = (self.log_likelihood(X, y, self.early_norm, self.early_head)  # eq. 14
                      if self.config.early_exit else torch.zeros_like(logp[0]))
        return torch.stack(logp), early_logp, l, a


# ---- Making and loading models.
SYSTEMS = {"learned": Model}  # experiments/systems.py adds those that it is compared with


def make_model(config):
    """A new model of a ModelConfig: one that learns its boundaries, or another system."""
    return SYSTEMS[".pt" if config.boundaries.endswith(".pt") else config.boundaries](config)


def load_checkpoint(path):
    """The model that train.py saved, in evaluation mode on the CPU, and all that was saved.

    Raises FileNotFoundError, PermissionError, or ValueError if the file is no whole checkpoint.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"no checkpoint {path}; train.py makes one")
    try:
        archive = zipfile.ZipFile(path)  # torch compares no checksum, and skips marked folders
        if archive.testzip() or any(entry.external_attr for entry in archive.infolist()):
            raise ValueError("damaged")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model = make_model(ModelConfig(**saved["model_config"]))
        model.load_state_dict(saved["model"])
        if asdict(model.config) != saved["model_config"]:
            raise ValueError("it lacks a field of ModelConfig")
        if not all(weights.isfinite().all() for weights in model.parameters()):
            raise ValueError("weights that are not finite")
    except (FileNotFoundError, PermissionError):  # its own, or of the one whose boundaries it takes
        raise
    except Exception as error:  # torch.load raises whatever the bytes made it stumble over
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ValueError(f"{path} is no checkpoint of this version of train.py ({why})") from None
    return model.eval(), saved
