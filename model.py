"""
A byte-level language model that learns where its tokens end.
"You Can Learn Tokenization End-to-End with Reinforcement Learning", arXiv 2602.13940.

The parts are in the order in which data flows through them. UNet puts them together for given
boundaries; Model, at the end, draws the boundaries. `# eq. n` is the paper's equation n. Most names
are the paper's too:

    x  bytes, x_0 = <bos>                      (B, N)      X   byte representations       (B, N, D)
    a  a_i = 1: a token ends at byte i         (B, N)      X'  those at the boundaries    (B, M, D)
    l  logit of that decision, p = sigmoid(l)  (B, N)      Y'  after the middle           (B, M, D)
    y  the byte to predict, y_i = x_{i+1}      (B, N)      Y   handed back to the bytes   (B, N, D)
    u  uniforms of the draws                   (B, N)      Z   what the head reads        (B, N, D)

B rows, N bytes in a row, D = embedding_dim, w = policy_window, S = policy_scale (the D of eq. 22).
M is the number of tokens in the longest row; shorter rows are padded. hp holds train.py's
hyperparameters.
"""
import copy
import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

BOS = 256  # the one symbol that is not a byte; no head predicts it


# ---- The transformer block of Gemma 2 (arXiv 2408.00118): RMSNorm, RoPE, GeGLU, soft-caps.
def softcap(z, c):
    return c * torch.tanh(z / c)


def linear(inputs, outputs):
    """A linear layer without bias. At initialization it keeps the variance of its inputs."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), as in Gemma's code. Computed in float32, returned in x's dtype."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        y = F.rms_norm(x.float(), self.weight.shape, 1 + self.weight, 1e-6)
        return y.type_as(x)


def rotate(x, cos, sin):
    """RoPE: rotates each pair (x_k, x_{k + head_dim/2}) of x (B, N, heads, head_dim)."""
    x1, x2 = x.float().chunk(2, -1)
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    return torch.cat((y1, y2), dim=-1).type_as(x)


def softcapped_attention(q, k, v, mask):
    """Attention of q (..., Q, head_dim) over k and v (..., K, head_dim).

    mask (..., Q, K) is True where q may attend. torch's scaled_dot_product_attention has no
    soft-cap.
    """
    scores = (q @ k.mT).float() / math.sqrt(q.size(-1))
    scores = softcap(scores, 50.0)  # Gemma 2's constant
    scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).type_as(v) @ v


def window_attention(q, k, v, window):
    """Causal attention to the last `window` positions over (B, heads, N, head_dim).

    Time and memory are O(N * window): the row is cut into chunks of `window` positions, and the
    queries of a chunk see the keys of their own chunk and of the one before.
    """
    N = q.size(2)
    C = min(window, N)  # the size of a chunk
    q, k, v = [F.pad(z, (0, 0, 0, -N % C)).unflatten(2, (-1, C)) for z in (q, k, v)]
    # (B, heads, chunks, C, head_dim); only padding sees the padding at the end of the row

    # the chunk before each chunk; before the first one, zeros
    before_k, before_v = [F.pad(z, (0, 0, 0, 0, 1, 0))[:, :, :-1] for z in (k, v)]
    k = torch.cat((before_k, k), dim=3)  # (B, heads, chunks, 2 C, head_dim)
    v = torch.cat((before_v, v), dim=3)
    j = torch.arange(2 * C, device=q.device)  # key positions, from the start of the chunk before
    i = j[C:, None]  # query positions
    mask = (j <= i) & (j > i - window)  # (C, 2 C)
    chunk = torch.arange(q.size(2), device=q.device)[:, None, None]
    mask = mask & ((j >= C) | (chunk > 0))  # (chunks, C, 2 C), without those zeros
    y = softcapped_attention(q, k, v, mask)  # (B, heads, chunks, C, head_dim)
    return y.flatten(2, 3)[:, :, :N]  # (B, heads, N, head_dim)


class Attention(nn.Module):
    """Causal attention to the last `window` positions, or to all of them if it is None."""

    def __init__(self, dim, num_heads, window=None):
        super().__init__()
        self.num_heads = num_heads
        self.window = window
        self.qkv = linear(dim, 3 * dim)
        self.out = linear(dim, dim)

    def forward(self, x, cos, sin, cache=None):
        """x (B, N, D), cos and sin (N, 1, head_dim / 2) or (B, N, 1, head_dim / 2) -> (B, N, D)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        q = rotate(q, cos, sin).transpose(1, 2)  # (B, heads, N, head_dim)
        k = rotate(k, cos, sin).transpose(1, 2)
        v = v.transpose(1, 2)
        if cache:
            k, v = cache.extend(self, k, v)
        N, K = q.size(2), k.size(2)
        if self.window and N == K:  # no cached keys
            y = window_attention(q, k, v, self.window)
        else:
            j = torch.arange(K, device=q.device)  # key positions
            i = j[K - N :, None]  # query positions
            mask = j <= i
            if self.window:
                mask = mask & (j > i - self.window)
            y = softcapped_attention(q, k, v, mask)
        return self.out(y.transpose(1, 2).flatten(2))


class GeGLU(nn.Module):
    """An MLP with hidden_dim gated units: (..., dim) -> (..., dim)."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.up = linear(dim, 2 * hidden_dim)
        self.down = linear(hidden_dim, dim)

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

    def forward(self, x, cos, sin, cache=None):
        x = x + self.norm2(self.attention(self.norm1(x), cos, sin, cache))
        return x + self.norm4(self.mlp(self.norm3(x)))


# ---- The policy and its draw.
class Policy(nn.Module):
    """The logit of "a token ends here" after every possible history of w decisions.

    Replace it as you like. It must return (B, N, 2^w), and l at i must depend on X_i only, because
    generation passes a row in pieces.
    """

    def __init__(self, hp):
        super().__init__()
        self.hp = hp
        self.norm = RMSNorm(hp.embedding_dim)  # our choice, as is the initialization
        self.linear = nn.Linear(hp.embedding_dim, 1 + hp.policy_window, bias=False)
        nn.init.zeros_(self.linear.weight)  # p starts near the target (eq. 23: 0.206 for 0.2)

    def forward(self, X):
        """X (B, N, D) -> l (B, N, 2^w), float32. Bit j-1 of a history is the decision a_{i-j}."""
        with torch.autocast(X.device.type, enabled=False):
            z = self.linear(self.norm(X).float())  # (W_0 X_i, ..., W_w X_i)
        # eq. 21: raw (B, N, 2^j) has a column for each history of j decisions; here j = 0
        raw = z[..., :1]
        for j in range(1, 1 + self.hp.policy_window):
            # the histories so far with a_{i-j} = 0, then with a_{i-j} = 1
            raw = torch.cat((raw, raw + z[..., j : j + 1]), dim=-1)
        target = self.hp.downsample_rate_target
        l = raw / self.hp.policy_scale + math.log(target / (1 - target))  # eq. 22
        if self.training:
            l = softcap(l, self.hp.policy_softcap)  # eq. 23
        return l


def draw(p, u, history):
    """Draws boundaries a (B, N) bool from uniforms u (B, N), in parallel.

    p (B, N, 2^w) holds p_i for each history, the last w decisions as a number: its bit j-1 is
    a_{i-j}. The argument history is the one before position 0: 0 at the start of a row, or (B, 1).
    Also returns the history before each position, (B, N, 1). The result is exactly that of

        for i in range(N):
            a[i] = u[i] < p[i, history]
            history = (2 * history + a[i]) % 2**w

    Given u, each position maps the history before it to the one after it, with a table of 2^w
    entries. Looking up a table's entries in the next one composes the two. So each round doubles
    how many positions a table spans, as in a parallel prefix sum (Hillis & Steele, 1986).
    """
    B, N, H = p.shape
    decision = u[..., None] < p  # (B, N, H), eq. 19
    table = (2 * torch.arange(H, device=p.device) + decision) % H
    # table_i maps the history before position max(0, i - span + 1) to the one after i
    span = 1
    while span < N:
        # longer_i[h] = table_i[table_{i-span}[h]]
        longer = table[:, span:].gather(-1, table[:, :-span])
        table = torch.cat((table[:, :span], longer), dim=1)  # the first ones reach back to 0
        span *= 2
    first = table.new_zeros(B, 1) + history
    after = table.gather(-1, first[:, None].expand(B, N, 1))[..., 0]
    history = torch.cat((first, after[:, :-1]), dim=1)[..., None]
    return decision.gather(-1, history)[..., 0], history


# ---- Downsample: which bytes are tokens, and which token each byte reads.
def token_layout(a, multiple=8):
    """Where the tokens of boundaries a (B, N) bool are, int64:

        ends (B, M)   where each token ends, in order; then, as padding, positions where none ends
        reads (B, N)  the token that each byte reads: the last one that ends at or before it

    For two rows of six bytes, with multiple=1:

        a       1 0 1 0 0 0 | 1 0 0 1 0 1
        ends    0 2 1       | 0 3 5          the 1 is padding
        reads   0 0 1 1 1 1 | 0 0 0 1 1 2

    Padding comes last in its row, where causal attention hides it, and no byte reads it. M is
    rounded up to a multiple, because matmuls with odd sizes are slow.
    """
    M = int(a.sum(1).max())  # the CPU waits for the GPU
    M = math.ceil(M / multiple) * multiple
    ends = a.int().argsort(dim=1, descending=True, stable=True)[:, :M]  # eq. 8
    reads = a.cumsum(1) - 1  # the sum of eq. 9
    return ends, reads


def pick(z, i):
    """Gathers positions i (B, L) of each row of z (B, K, D): (B, L, D)."""
    return z.gather(1, i[..., None].expand(-1, -1, z.size(2)))


# ---- The model.
class Head(nn.Module):
    """Predicts the next byte from a vector per byte, normalized and soft-capped as in Gemma 2."""

    def __init__(self, dim):
        super().__init__()
        self.norm = RMSNorm(dim)
        self.linear = nn.Linear(dim, 256, bias=False)
        nn.init.normal_(self.linear.weight, std=0.02)

    def logits(self, Z):
        """Z (..., D) -> (..., 256), float32."""
        return softcap(self.linear(self.norm(Z)).float(), 30.0)  # Gemma 2's constant

    def logp(self, Z, y):
        """Z (B, N, D), next bytes y (B, N) -> log p(y) (B, N), in nats."""
        logits = self.logits(Z).flatten(0, 1)  # (B N, 256)
        return -F.cross_entropy(logits, y.flatten(), reduction="none").view_as(y)


class Cache:
    """What generation remembers of a row that it reads in pieces. For one row, B = 1."""

    def __init__(self, model):
        self.length = 0  # bytes read
        self.history = 0  # the last w decisions as a number; see draw
        self.tokens = model.embedding.weight.new_zeros(1, 0, model.hp.embedding_dim)  # Y'
        self.kv = {}  # the keys and values of each attention layer

    def extend(self, layer, k, v):
        """Appends keys and values (1, heads, n, head_dim); returns all that the layer may see."""
        if layer in self.kv:
            old_k, old_v = self.kv[layer]
            reach = layer.window or old_k.size(2)
            k = torch.cat((old_k[:, :, -reach:], k), dim=2)
            v = torch.cat((old_v[:, :, -reach:], v), dim=2)
        self.kv[layer] = k, v
        return k, v


class Output(NamedTuple):
    """What a forward pass returns."""
    Z: torch.Tensor  # (B, N, D), what the head reads
    X: torch.Tensor  # (B, N, D), what the early exit reads; None in experiments/systems.py
    l: torch.Tensor  # (B, N), the logit of a_i after the decisions before it
    a: torch.Tensor  # (B, N) bool


class UNet(nn.Module):
    """Byte encoder, middle transformer and byte decoder, for given boundaries; section 2.2.

    A cache is for a row that is read in pieces. Then x, X and a are the next piece.
    """

    def __init__(self, hp):
        super().__init__()
        self.hp = hp
        D, heads, window = hp.embedding_dim, hp.num_heads, hp.attention_window
        self.embedding = nn.Embedding(257, D)  # bytes and <bos>; standard deviation 1
        self.down = nn.ModuleList(  # the encoder's layers
            Block(D, heads, D, window) for _ in range(hp.n_down_layers))
        self.middle = nn.ModuleList(
            Block(D, heads, 4 * D) for _ in range(hp.n_mid_layers))
        self.up = nn.ModuleList(  # the decoder's
            Block(D, heads, D, window) for _ in range(hp.n_up_layers))
        self.head = Head(D)

    def transform(self, blocks, x, positions, cache=None):
        """Applies blocks to x (B, N, D) at byte positions (N,) or (B, N) of this piece."""
        if cache:
            positions = positions + cache.length
        if x.size(1) == 0:  # no token ends in this piece
            return x
        head_dim = self.hp.embedding_dim // self.hp.num_heads
        pair = torch.arange(0, head_dim, 2, device=x.device)
        frequency = 10000.0 ** (-pair.float() / head_dim)
        angle = positions[..., None, None] * frequency
        cos, sin = angle.cos(), angle.sin()  # (..., 1, head_dim / 2)
        for block in blocks:
            x = block(x, cos, sin, cache)
        return x

    def encode(self, x, cache=None):
        """Bytes x (B, N) -> X (B, N, D); eq. 1."""
        positions = torch.arange(x.size(1), device=x.device)
        return self.transform(self.down, self.embedding(x), positions, cache)

    def upsample(self, X, tokens, reads):
        """Hands the tokens back to the bytes: Y (B, N, D); eq. 5, 9.

        X (B, N, D), tokens Y' (B, M, D), reads (B, N): the token that each byte reads. Y_i may use
        X_i and that token, nothing else, because generation passes a row in pieces.
        """
        return X + pick(tokens, reads)  # eq. 9; the authors' code adds Y' - X' instead

    def decode(self, Y, cache=None):
        """Y (B, N, D) -> what the head reads, (B, N, D); eq. 6."""
        positions = torch.arange(Y.size(1), device=Y.device)
        return self.transform(self.up, Y, positions, cache)

    def through_tokens(self, X, a, cache=None):
        """X (B, N, D) and boundaries a (B, N) bool -> what the head reads, (B, N, D); eq. 3-9."""
        ends, reads = token_layout(a, multiple=1 if cache else 8)  # no padding in a cache
        tokens = pick(X, ends)  # X' (B, M, D), eq. 3, eq. 7
        tokens = self.transform(self.middle, tokens, ends, cache)  # Y' (B, M, D), eq. 4
        if cache:
            # count from the first cached token; -1, no token in this piece yet, becomes the last
            reads = reads + cache.tokens.size(1)
            tokens = torch.cat((cache.tokens, tokens), dim=1)
            cache.tokens = tokens
        return self.decode(self.upsample(X, tokens, reads), cache)  # eq. 5


class Model(UNet):
    """The paper's model: a policy draws the boundaries; section 2.5. Its losses are in train.py."""

    def __init__(self, hp):
        super().__init__(hp)
        self.policy = Policy(hp)
        self.early_head = copy.deepcopy(self.head)  # W_early, eq. 14

    def forward(self, x, u, cache=None):
        """Bytes x and uniforms u (B, N) -> Output. Nothing at i depends on what comes after i.

        With a cache, x is a row's next piece. The output is what a pass over the whole row would
        give at these positions.
        """
        X = self.encode(x, cache)  # eq. 1
        all_l = self.policy(X)  # (B, N, 2^w): l after each possible history
        p = all_l.detach().sigmoid()  # eq. 20
        # <bos> is a token, so that every byte has one to read from
        p = p.masked_fill((x == BOS)[..., None], 1.0)
        a, history = draw(p, u, cache.history if cache else 0)  # eq. 2
        l = all_l.gather(-1, history)[..., 0]
        Z = self.through_tokens(X, a, cache)
        if cache:
            cache.length += x.size(1)
            cache.history = (2 * history[:, -1] + a[:, -1:]) % p.size(-1)
        return Output(Z, X, l, a)
