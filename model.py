"""
A byte-level language model that learns where its tokens end.
"You Can Learn Tokenization End-to-End with Reinforcement Learning", arXiv 2602.13940.

The parts are in the order in which data flows through them; Model, below, puts them together.
`# eq. n` is the paper's equation n. The names are the paper's too:

    x  bytes, x_0 = <bos>                      (B, N)      X   byte representations       (B, N, D)
    a  a_i = 1: a token ends at byte i         (K, B, N)   X'  those at the boundaries       (T, D)
    l  logit of that decision, p = sigmoid(l)  (K, B, N)   Y'  after the middle              (T, D)
    y  the byte to predict, y_i = x_{i+1}      (B, N)      Y   handed back to the bytes   (B, N, D)

K draws of the boundaries of each row, B rows, N bytes in a row, D = embedding_dim; T tokens in all
rows together, M in the row that has the most, both rounded up; w = policy_window.
"""
import copy
import math
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

BOS = 256  # the one symbol that is not a byte
VOCAB_SIZE = 257
ATTENTION_SOFTCAP = 50.0  # as in Gemma 2
LOGIT_SOFTCAP = 30.0  # as in Gemma 2
ROPE_BASE = 10000.0
TOKEN_MULTIPLE = 16 if torch.cuda.is_available() else 8  # M is a multiple of it: aligned loads
T_MULTIPLE = 64  # T is a multiple of it, or B * M: products with odd sizes are slow


@dataclass
class ModelConfig:
    """The hyperparameters in train.py that the model needs; the defaults are the 147M model's.

    An old checkpoint that lacks a field takes its default.
    """

    seq_len: int = 4096  # bytes in a training row; the model also reads longer ones
    embedding_dim: int = 768  # D
    num_heads: int = 12
    n_down_layers: int = 4  # byte layers before the middle
    n_mid_layers: int = 12  # token layers
    n_up_layers: int = 4  # byte layers after the middle
    attention_window: int = 64  # a byte layer sees this many bytes, including the current one
    boundaries: str = "learned"  # or a system in experiments/systems.py
    downsample_rate_target: float = 1 / 5  # tokens per byte
    policy_window: int = 8  # w: each decision sees this many earlier decisions
    policy_scale: float = 16.0  # S, eq. 22
    policy_softcap: float = 5.0  # eq. 23; keeps p between 0.7% and 99.3% in training
    redrawn: float = 1.0  # fraction of rows that are drawn more than once
    early_exit: bool = True  # a second head predicts from X alone, eq. 14


# ---- The transformer block of Gemma 2: RMSNorm, RoPE, GeGLU, soft-caps, no biases.
def softcap(z, c):
    return c * torch.tanh(z / c)


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), computed in float32 and returned in x's dtype."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        y = F.rms_norm(x.float(), self.weight.shape, 1 + self.weight, eps=1e-6)
        return y.type_as(x)


def rope(positions, head_dim):
    """Cosine and sine of RoPE's angles at positions (...): (2, ..., 1, head_dim / 2)."""
    pair = torch.arange(0, head_dim, 2, device=positions.device)
    angle = positions[..., None, None] * ROPE_BASE ** (-pair.float() / head_dim)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x, cos, sin):
    """Rotates each pair (x_k, x_{k + head_dim/2}) of x (B, N, heads, head_dim) by its angle."""
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


def softcapped_attention(q, k, v, mask):
    """Attention of q (..., Q, head_dim) over k and v (..., M, head_dim).

    mask (..., Q, M) is True where q may attend.
    """
    scores = (q @ k.mT).float() / math.sqrt(q.size(-1))
    scores = softcap(scores, ATTENTION_SOFTCAP).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).type_as(v) @ v


def chunking(N, window):
    """The size of a chunk, the number of chunks, and how many earlier chunks a query can see."""
    window = min(window, N)
    C = max(window // 2, 8)  # products smaller than 8 by 16 are slow
    return C, math.ceil(N / C), math.ceil((window - 1) / C)


def window_attention(q, k, v, window):
    """Causal attention to the last `window` positions over (B, heads, N, head_dim).

    Time and memory are O(N * window). The row is cut into chunks of half a window, but at least 8
    positions. The queries of a chunk need the keys of their own chunk and of the few chunks before
    it that the window reaches, so all products are small and dense.
    """
    N = q.size(2)
    C, chunks, back = chunking(N, window)
    q = F.pad(q, (0, 0, 0, chunks * C - N)).unflatten(2, (chunks, C))

    def with_chunks_before(z):  # -> (B, heads, chunks, (back + 1) C, head_dim)
        z = F.pad(z, (0, 0, back * C, chunks * C - N)).unflatten(2, (back + chunks, C))
        return torch.cat([z[:, :, i : i + chunks] for i in range(back + 1)], dim=3)

    i = torch.arange(C, device=q.device)[:, None] + back * C
    j = torch.arange((back + 1) * C, device=q.device)  # key j is byte start + j - back C
    start = torch.arange(chunks, device=q.device)[:, None, None] * C
    mask = (j <= i) & (j > i - window) & (start + j >= back * C)  # (chunks, C, (back + 1) C)
    y = softcapped_attention(q, with_chunks_before(k), with_chunks_before(v), mask)
    return y.flatten(2, 3)[:, :, :N]


class Attention(nn.Module):
    """Causal attention to the last `window` positions, or to all of them if it is None."""

    def __init__(self, dim, num_heads, window=None):
        super().__init__()
        self.num_heads = num_heads
        self.window = window
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def attend(self, q, k, v):  # sample.py replaces this by a key-value cache
        if self.window:
            return window_attention(q, k, v, self.window)
        M = q.size(2)
        if torch.compiler.is_compiling():
            torch._check(M % TOKEN_MULTIPLE == 0)  # lets a GPU load several scores at once
            if M <= 1024:
                torch._check(M <= 1024)  # lets the softmax keep a row of scores in registers
        i = torch.arange(M, device=q.device)
        return softcapped_attention(q, k, v, i <= i[:, None])

    def forward(self, x, cos, sin, places=None):
        """x is (B, N, D) for bytes, or (T, D) for tokens, whose `places` are in rows (B, M)."""
        qkv = self.qkv(x)
        if places is not None:
            qkv = in_rows(qkv, places, cos.shape[:2])  # (B, M, 3 D)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(-3)  # (B, N, heads, head_dim)
        q = rotate(q, cos, sin).transpose(1, 2)  # (B, heads, N, head_dim)
        k = rotate(k, cos, sin).transpose(1, 2)
        y = self.attend(q, k, v.transpose(1, 2))
        y = y.transpose(1, 2).flatten(-2)  # (B, N, D)
        if places is not None:
            y = F.embedding(places, y.flatten(0, 1))  # (T, D)
        return self.out(y)


class GeGLU(nn.Module):
    """An MLP with hidden_dim gated units: (..., dim) -> (..., dim)."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.gelu(gate, approximate="tanh") * value)


class Block(nn.Module):
    """Attention, then an MLP, each normalized before and after and added to x."""

    def __init__(self, dim, num_heads, hidden_dim, window=None):
        super().__init__()
        self.norm1 = RMSNorm(dim)
        self.attention = Attention(dim, num_heads, window)
        self.norm2 = RMSNorm(dim)
        self.norm3 = RMSNorm(dim)
        self.mlp = GeGLU(dim, hidden_dim)
        self.norm4 = RMSNorm(dim)

    def forward(self, x, cos, sin, places=None):
        x = x + self.norm2(self.attention(self.norm1(x), cos, sin, places))
        return x + self.norm4(self.mlp(self.norm3(x)))


# ---- The policy and its draw.
class Policy(nn.Module):
    """The logit of "a token ends here" after every possible history of w decisions; eq. 21-23.

    The draw, the loss and generation use nothing but these logits. You may compute them
    differently, as long as those at i depend on X_i alone: sample.py passes one position at a time.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.embedding_dim)
        self.linear = nn.Linear(config.embedding_dim, 1 + config.policy_window, bias=False)

    def initialize(self):
        """Model calls this after it has initialized all matrices in the usual way."""
        nn.init.zeros_(self.linear.weight)  # p starts at the target

    def forward(self, X):
        """X (B, N, D) -> l (B, N, 2^w), float32. Bit j-1 of a history is the decision a_{i-j}."""
        c = self.config
        with torch.autocast(X.device.type, enabled=False):
            z = self.linear(self.norm(X).float()) / c.policy_scale  # W_0 X_i / S, ..., W_w X_i / S
        l = z[..., :1] + math.log(c.downsample_rate_target / (1 - c.downsample_rate_target))
        for j in range(1, 1 + c.policy_window):
            l = torch.cat((l, l + z[..., j : j + 1]), dim=-1)  # a_{i-j} = 0, then a_{i-j} = 1
        return softcap(l, c.policy_softcap) if self.training else l


def draw(p, u):
    """Draws boundaries a (..., N) bool from uniforms u (..., N), in parallel; eq. 19-21.

    p (..., N, 2^w) holds p_i for each history of decisions; bit j-1 of a history is a_{i-j}. Also
    returns each position's history (..., N, 1). The result is exactly that of

        history = 0
        for i in range(N):
            a[i] = u[i] < p[i, history]
            history = (2 * history + a[i]) % 2**w

    Given u, each position is a table that maps the history before it to the history after it. Two
    neighbouring tables compose into one. Pairs of tables are composed up a binary tree; going down
    the tree again gives the history that enters each position. That takes 2 log2(N) small steps.
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
    history = history[..., :N, None]
    return decision.gather(-1, history)[..., 0], history


# ---- Select: where the tokens of all rows lie.
def token_layout(a):
    """Index tensors that pack the tokens of all rows end to end, for boundaries a (B, N) bool.

    a[:, 0] must be True. All are int64:

        byte (T,)         the byte where each token ends, counted through all rows
        token (B, N)      the token that each byte reads: the last one that ends at or before it
        positions (B, M)  the positions of a row's tokens, which are those of their bytes
        places (T,)       the place of each token among the B * M places of positions

    T is rounded up with filler tokens of byte 0. They lie after their row's own tokens, where
    causal attention hides them, and no byte reads them.
    """
    byte = a.flatten().nonzero()[:, 0]  # the CPU waits for the GPU
    token = a.flatten().cumsum(0).view_as(a) - 1
    count = a.sum(1, keepdim=True)
    M = math.ceil(int(count.max()) / TOKEN_MULTIPLE) * TOKEN_MULTIPLE  # the CPU waits for the GPU
    own = torch.arange(M, device=a.device) < count  # (B, M)
    T = min(math.ceil(len(byte) / T_MULTIPLE) * T_MULTIPLE, own.numel())
    places = (~own).flatten().int().argsort(stable=True)[:T]  # the tokens' places, then fillers'
    byte = F.pad(byte, (0, T - len(byte)))
    positions = in_rows(byte % a.size(1), places, own.shape)
    return byte, token, positions, places


def in_rows(z, places, shape):
    """Rows of zeros (B, M, ...) with tokens z (T, ...) at their places; `shape` is (B, M)."""
    rows = z.new_zeros(*shape, *z.shape[1:])
    return rows.flatten(0, 1).index_copy(0, places, z).view_as(rows)


# ---- The model.
class Head(nn.Module):
    """Predicts the next byte from one vector per byte; eq. 6, 14."""

    def __init__(self, dim):
        super().__init__()
        self.norm = RMSNorm(dim)
        self.linear = nn.Linear(dim, VOCAB_SIZE, bias=False)

    def logits(self, Z):
        """Z (..., D) -> (..., 257), float32."""
        weight = F.pad(self.linear.weight, (0, 0, 0, 7))  # 264 rows; products with 257 are slow
        logits = F.linear(self.norm(Z), weight)[..., :VOCAB_SIZE]
        return softcap(logits.float(), LOGIT_SOFTCAP)

    def forward(self, Z, y):
        """Z (B, N, D), next bytes y (B, N) -> log p(y) (B, N), in nats."""
        logits = self.logits(Z).flatten(0, 1)
        return -F.cross_entropy(logits, y.flatten(), reduction="none").view_as(y)


class Model(nn.Module):
    """Byte encoder, policy, middle transformer and byte decoder. The losses are in train.py."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        learned = config.boundaries == "learned"
        D, heads, window = config.embedding_dim, config.num_heads, config.attention_window
        self.embedding = nn.Embedding(VOCAB_SIZE, D)
        self.down = nn.ModuleList(Block(D, heads, D, window) for _ in range(config.n_down_layers))
        if learned:
            self.policy = Policy(config)
        self.middle = nn.ModuleList(Block(D, heads, 4 * D) for _ in range(config.n_mid_layers))
        self.up = nn.ModuleList(Block(D, heads, D, window) for _ in range(config.n_up_layers))
        self.head = Head(D)

        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.normal_(self.head.linear.weight, std=0.02)
        if learned:
            self.policy.initialize()
            if config.early_exit:
                self.early_head = copy.deepcopy(self.head)  # W_early, eq. 14

    def run(self, blocks, x, positions=None, places=None):
        """Applies blocks to bytes x (B, N, D) at positions (N,), or tokens (T, D) at (B, M).

        Without positions, bytes are numbered from 0.
        """
        if positions is None:
            positions = torch.arange(x.size(1), device=x.device)
        cos, sin = rope(positions, self.config.embedding_dim // self.config.num_heads)
        for block in blocks:
            x = block(x, cos, sin, places)
        return x

    def encode(self, x):
        """Bytes x (B, N) -> X (B, N, D); eq. 1."""
        return self.run(self.down, self.embedding(x))

    def upsample(self, X, selected, tokens, token):
        """Hands the tokens back to the bytes: Y (B, N, D); eq. 5, 9.

        X (B, N, D), selected X' and tokens Y' (T, D); token (B, N): the one that each byte reads.
        """
        return X + F.embedding(token, tokens)  # eq. 9 as written: Y', not Y' - X'

    def decode(self, Y):
        """Y (B, N, D) -> what the head reads, (B, N, D); eq. 6."""
        return self.run(self.up, Y)

    def predict(self, X, a):
        """X (B, N, D) and one draw a (B, N) bool -> what the head reads, (B, N, D); eq. 3-9."""
        byte, token, positions, places = token_layout(a)
        selected = F.embedding(byte, X.flatten(0, 1))  # X' (T, D), eq. 3, 7-8
        tokens = self.run(self.middle, selected, positions, places)  # Y' (T, D), eq. 4
        Y = self.upsample(X, selected, tokens, token)
        return self.decode(Y)

    def forward(self, x, y, u):
        """x, y (B, N), uniforms u (K, B, N) -> logp (K, B, N), early_logp (B, N), l, a (K, B, N).

        x_0 is <bos>, a is bool. logp_i is log p(y_i | x_0..x_i, a_0..a_i) in nats; early_logp is
        the early exit's, or 0 without one. l_i and a_i depend on no later byte or decision either.

        Only the first draw's logp has a gradient: further draws are there for their rewards, and
        run only from the middle on. l has a gradient for all draws. A fraction `redrawn` of the
        rows, the first ones, is drawn again. The others repeat their first draw, so that their
        advantage is 0.
        """
        X = self.encode(x)  # eq. 1
        l = self.policy(X)  # (B, N, 2^w), eq. 21-23
        p = l.detach().sigmoid()  # eq. 20
        p[:, 0] = 1.0  # <bos> is a token, so that every byte has one to read from
        a, history = draw(p, u)  # (K, B, N), eq. 2, 19
        again = math.ceil(self.config.redrawn * len(x))  # rows that are drawn again
        a[1:, again:] = a[0, again:]
        history[1:, again:] = history[0, again:]
        l = l[None].take_along_dim(history, -1)[..., 0]
        logp = [self.head(self.predict(X, a[0]), y)]
        with torch.no_grad():
            for other in a[1:]:
                other_logp = self.head(self.predict(X[:again], other[:again]), y[:again])
                logp.append(torch.cat((other_logp, logp[0][again:])))
        early_logp = torch.zeros_like(logp[0])
        if self.config.early_exit:
            early_logp = self.early_head(X, y)  # eq. 14
        return torch.stack(logp), early_logp, l, a


def inputs_and_targets(rows, device="cpu"):
    """Rows (B, N) uint8 -> x, y (B, N) int64: y is the rows; x is <bos>, then y's start."""
    y = torch.from_numpy(rows).to(device).long()
    return F.pad(y[:, :-1], (1, 0), value=BOS), y


# ---- Making and loading models.
def make_model(hyperparameters):
    """A new model, learned or of another system. ValueError if there is no such system.

    hyperparameters is a dictionary. Other keys than ModelConfig's are ignored.
    """
    known = {field.name for field in fields(ModelConfig)}
    if missing := sorted(known - hyperparameters.keys()):
        print(f"ModelConfig's defaults are used for {', '.join(missing)}", file=sys.stderr)
    config = ModelConfig(**{key: hyperparameters[key] for key in known & hyperparameters.keys()})
    if config.boundaries == "learned":
        return Model(config)
    from experiments.systems import make_system  # not above: that file imports this one
    return make_system(config)


def read_checkpoint(path):
    """What train.py saved, on the CPU. OSError if it is not there, ValueError if it is damaged."""
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no checkpoint {path}; train.py writes one")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # damaged bytes can raise nearly anything
        raise ValueError(f"{path} is damaged, or not a checkpoint: {error}") from error
    if "config" not in saved:
        raise ValueError(f"{path} is not a checkpoint of train.py")
    return saved


def load_checkpoint(path):
    """The saved model, in evaluation mode on the CPU, and the checkpoint it came from.

    Raises as read_checkpoint and load_weights do.
    """
    saved = read_checkpoint(path)
    model = make_model(saved["config"])
    load_weights(model, saved, path)
    return model.eval(), saved


def load_weights(model, saved, path):
    """Loads the weights that train.py saved. ValueError if they are not this model's."""
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model: {error}") from error
