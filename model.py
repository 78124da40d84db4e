"""
A byte-level language model that learns where its tokens end.
"You Can Learn Tokenization End-to-End with Reinforcement Learning", arXiv 2602.13940.

The parts are in the order in which data flows through them. UNet puts them together for given
boundaries; Model, at the end, draws the boundaries. `# eq. n` is the paper's equation n. Most names
are the paper's too:

    x  bytes, x_0 = <bos>                      (B, N)      X   byte representations       (B, N, D)
    a  a_i = 1: a token ends at byte i         (B, N)      X'  those at the boundaries       (T, D)
    l  logit of that decision, p = sigmoid(l)  (B, N)      Y'  after the middle              (T, D)
    y  the byte to predict, y_i = x_{i+1}      (B, N)      Y   handed back to the bytes   (B, N, D)

B rows, N bytes in a row, D = embedding_dim; T tokens in the batch, M in its longest row, both
rounded up; w = policy_window; S = policy_scale, the D of eq. 22. hp holds train.py's
hyperparameters.
"""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

BOS = 256  # the one symbol that is not a byte
VOCAB_SIZE = 257
M_MULTIPLE = 16 if torch.cuda.is_available() else 8  # M is rounded up: aligned loads
T_MULTIPLE = 64  # T likewise, at most to B * M: products with odd sizes are slow


def hint_at_size(M):
    """Tells torch.compile about M what it does not infer. This changes no result."""
    if torch.compiler.is_compiling():
        torch._check(M % M_MULTIPLE == 0)  # so a GPU may load several scores at once
        if M <= 1024:  # short rows get a graph of their own, whose softmax stays in registers
            torch._check(M <= 1024)


def take(z, i):
    """z[i]: picks from the first dimension of z. Its gradient is faster than indexing's."""
    return F.embedding(i, z)


# ---- The transformer block of Gemma 2: RMSNorm, RoPE, GeGLU, soft-caps, no biases.
def softcap(z, c):
    return c * torch.tanh(z / c)


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), computed in float32 and returned in x's dtype."""

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

    mask (..., Q, K) is True where q may attend.
    """
    scores = (q @ k.mT).float() / math.sqrt(q.size(-1))
    scores = softcap(scores, 50.0)
    scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).type_as(v) @ v


def chunking(N, window):
    """The size of a chunk, the number of chunks, and how many earlier chunks a query can see."""
    C = max(window // 2, 8)  # C queries by (back + 1) C keys; below 8 by 16 is slow
    return C, math.ceil(N / C), math.ceil((window - 1) / C)


def window_attention(q, k, v, window):
    """Causal attention to the last `window` positions over (B, heads, N, head_dim).

    Time and memory are O(N * window). The row is cut into chunks of half a window, but at least 8
    positions. The queries of a chunk need the keys of their own chunk and of the few chunks before
    it that the window reaches, so all products are small and dense.
    """
    N = q.size(2)
    C, chunks, back = chunking(N, window)
    padding = chunks * C - N
    q = F.pad(q, (0, 0, 0, padding))  # (B, heads, chunks C, head_dim)
    q = q.unflatten(2, (chunks, C))  # (B, heads, chunks, C, head_dim)
    kv = F.pad(torch.stack((k, v)), (0, 0, back * C, padding))
    kv = kv.unflatten(3, (back + chunks, C))  # (2, B, heads, back + chunks, C, head_dim)
    kv = torch.cat([kv[:, :, :, n : n + chunks] for n in range(back + 1)], dim=4)
    k, v = kv.unbind()  # (B, heads, chunks, (back + 1) C, head_dim)
    position = torch.arange(-back * C, chunks * C, device=q.device)  # below 0: padding
    i = position[back * C :].view(chunks, C, 1)  # of the queries
    j = position.unfold(0, (back + 1) * C, C)[:, None]  # of the keys: (chunks, 1, (back + 1) C)
    # (chunks, C, (back + 1) C). Padding after the row needs no mask: only padding can see it.
    mask = (j <= i) & (j > i - window) & (j >= 0)
    y = softcapped_attention(q, k, v, mask)  # (B, heads, chunks, C, head_dim)
    return y.flatten(2, 3)[:, :, :N]  # (B, heads, N, head_dim)


class Attention(nn.Module):
    """Causal attention to the last `window` positions, or to all of them if it is None."""

    def __init__(self, dim, num_heads, window=None):
        super().__init__()
        self.num_heads = num_heads
        self.window = window
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def attend(self, q, k, v):
        """Attention over whole rows (B, heads, N or M, head_dim)."""
        if self.window:
            return window_attention(q, k, v, self.window)
        M = q.size(2)
        hint_at_size(M)
        j = torch.arange(M, device=q.device)  # of the keys
        i = j[:, None]  # of the queries
        return softcapped_attention(q, k, v, j <= i)

    def forward(self, x, cos, sin, slots=None, cache=None):
        """x is (B, N, D) for bytes, or (T, D) for tokens, with slots from token_layout.

        cos and sin are (N, 1, head_dim / 2), or (B, M, 1, head_dim / 2). Only sample.py passes a
        cache.
        """
        qkv = self.qkv(x)
        if slots is not None:  # put the tokens into rows (B, M), with zeros in empty slots
            B, M = cos.shape[:2]
            rows = qkv.new_zeros(B * M, qkv.size(-1))
            qkv = rows.index_copy(0, slots, qkv).view(B, M, -1)
        qkv = qkv.unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.unbind(-3)  # (B, N or M, heads, head_dim)
        q = rotate(q, cos, sin).transpose(1, 2)  # (B, heads, N or M, head_dim)
        k = rotate(k, cos, sin).transpose(1, 2)
        attend = cache.attend if cache else self.attend
        y = attend(q, k, v.transpose(1, 2))
        y = y.transpose(1, 2).flatten(-2)  # (B, N or M, D)
        if slots is not None:
            y = take(y.flatten(0, 1), slots)  # (T, D)
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

    def forward(self, x, cos, sin, slots=None, cache=None):
        x = x + self.norm2(self.attention(self.norm1(x), cos, sin, slots, cache))
        return x + self.norm4(self.mlp(self.norm3(x)))


# ---- The policy and its draw.
class Policy(nn.Module):
    """The logit of "a token ends here" after every possible history of w decisions.

    Replace it as you like. It must return (B, N, 2^w), and l at i may use X_i alone, because
    sample.py passes a row in pieces.
    """

    def __init__(self, hp):
        super().__init__()
        self.hp = hp
        self.norm = RMSNorm(hp.embedding_dim)  # our choice, as is the initialization
        self.linear = nn.Linear(hp.embedding_dim, 1 + hp.policy_window, bias=False)
        nn.init.zeros_(self.linear.weight)  # p starts at the target, but for the soft-cap

    def forward(self, X):
        """X (B, N, D) -> l (B, N, 2^w), float32. Bit j-1 of a history is the decision a_{i-j}."""
        with torch.autocast(X.device.type, enabled=False):
            z = self.linear(self.norm(X).float())  # (W_0 X_i, ..., W_w X_i)
        raw = z[..., :1]  # eq. 21 for the empty history; each turn below doubles the histories
        for j in range(1, 1 + self.hp.policy_window):
            raw = torch.cat((raw, raw + z[..., j : j + 1]), dim=-1)  # a_{i-j} = 0, a_{i-j} = 1
        target = self.hp.downsample_rate_target
        l = raw / self.hp.policy_scale + math.log(target / (1 - target))  # eq. 22
        if self.training:
            l = softcap(l, self.hp.policy_softcap)  # eq. 23
        return l


def draw(p, u):
    """Draws boundaries a (B, N) bool from uniforms u (B, N), in parallel.

    p (B, N, 2^w) holds p_i for each history of decisions; bit j-1 of a history is a_{i-j}. Also
    returns each position's history (B, N, 1). The result is exactly that of

        history = 0
        for i in range(N):
            a[i] = u[i] < p[i, history]
            history = (2 * history + a[i]) % 2**w

    Given u, each position is a table that maps the history before it to the history after it. Two
    neighbouring tables compose into one. Pairs of tables are composed up a binary tree; going down
    the tree again gives the history that enters each position. That takes 2 log2(N) small steps.
    """
    N, H = p.shape[-2:]
    decision = u[..., None] < p  # (B, N, H), eq. 19
    table = (2 * torch.arange(H, device=p.device) + decision) % H
    # pad N to a power of two; the padding comes last, so no history depends on it
    table = F.pad(table, (0, 0, 0, 2 ** math.ceil(math.log2(N)) - N))
    levels = []
    while table.size(-2) > 1:
        levels.append(table)
        first = table[..., ::2, :]
        second = table[..., 1::2, :]
        table = second.gather(-1, first)  # first, then second
    history = table.new_zeros(table.shape[:-1])  # (B, 1): no boundaries before the row
    for table in reversed(levels):
        first = table[..., ::2, :]
        between = first.gather(-1, history[..., None])[..., 0]  # the history after the first
        history = torch.stack((history, between), -1).flatten(-2)  # twice as many positions
    history = history[..., :N, None]  # without the padding
    return decision.gather(-1, history)[..., 0], history


# ---- Downsample: where the tokens of all rows lie.
def token_layout(a):
    """Index tensors that pack the tokens of all rows end to end, for boundaries a (B, N) bool.

    a[:, 0] must be True, so that every byte has a token of its own row to read. All are int64:

        ends (T,)         the byte where each token ends, an index into the B * N bytes
        reads (B, N)      the token that each byte reads: the last one that ends at or before it
        positions (B, M)  each token's position for RoPE: that of its last byte in the row
        slots (T,)        where each token lies among the B * M slots of positions

    For two rows of six bytes with five tokens, if M were 3 and T were 6:

        a       1 0 1 0 0 0 | 1 0 0 1 0 1      ends       0  2 | 6  9 11 | 0
        reads   0 0 1 1 1 1 | 2 2 2 3 3 4      positions  0  2  0 | 0  3  5
                                               slots      0  1 | 3  4  5 | 2

    M is rounded up, and so is T, with copies of byte 0 of the batch. They take empty slots of any
    row, after the row's own tokens, where causal attention hides them, and no byte reads them.
    Filling all B * M slots instead would be simpler. It takes 9% more time in a step of the quick
    run, 3% with uniform tokens and none in rows of 4,096 bytes (one CPU core, medians of 16 pairs).
    """
    flat = a.flatten()
    ends = flat.nonzero()[:, 0]  # eq. 8; nonzero() and int() make the CPU wait for the GPU
    reads = flat.cumsum(0).view_as(a) - 1  # the sum of eq. 9
    count = a.sum(1, keepdim=True)
    M = math.ceil(int(count.max()) / M_MULTIPLE) * M_MULTIPLE
    used = torch.arange(M, device=a.device) < count  # (B, M)
    used = used.flatten()  # which slots hold a token
    T = math.ceil(len(ends) / T_MULTIPLE) * T_MULTIPLE
    T = min(T, len(used))
    slots = torch.cat((used.nonzero(), (~used).nonzero()))  # row by row like ends, then fillers
    slots = slots[:T, 0]
    ends = F.pad(ends, (0, T - len(ends)))
    positions = ends.new_zeros(len(used))
    positions[slots] = ends % a.size(1)
    return ends, reads, positions.view(-1, M), slots


# ---- The model.
class Head(nn.Module):
    """Predicts the next byte from a vector per byte. Norm and soft-cap are Gemma's.

    The early exit's head (eq. 14) has them as well, which is our choice.
    """

    def __init__(self, dim):
        super().__init__()
        self.norm = RMSNorm(dim)
        self.linear = nn.Linear(dim, VOCAB_SIZE, bias=False)
        nn.init.normal_(self.linear.weight, std=0.02)

    def logits(self, Z):
        """Z (..., D) -> (..., 257), float32."""
        weight = F.pad(self.linear.weight, (0, 0, 0, 7))  # 264 rows; products with 257 are slow
        logits = F.linear(self.norm(Z), weight)[..., :VOCAB_SIZE]
        return softcap(logits.float(), 30.0)

    def logp(self, Z, y):
        """Z (B, N, D), next bytes y (B, N) -> log p(y) (B, N), in nats."""
        logits = self.logits(Z).flatten(0, 1)  # (B N, 257)
        return -F.cross_entropy(logits, y.flatten(), reduction="none").view_as(y)


class UNet(nn.Module):
    """Byte encoder, middle transformer and byte decoder, for given boundaries; section 2.2."""

    def __init__(self, hp):
        super().__init__()
        self.hp = hp
        D, heads, window = hp.embedding_dim, hp.num_heads, hp.attention_window
        self.embedding = nn.Embedding(VOCAB_SIZE, D)
        self.down = nn.ModuleList(
            Block(D, heads, D, window) for _ in range(hp.n_down_layers))
        self.middle = nn.ModuleList(
            Block(D, heads, 4 * D) for _ in range(hp.n_mid_layers))
        self.up = nn.ModuleList(
            Block(D, heads, D, window) for _ in range(hp.n_up_layers))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        self.head = Head(D)  # after the loop, because it has its own initialization

    def transform(self, blocks, x, positions, slots=None, caches=None):
        """Applies blocks to byte vectors x (B, N, D) at positions (N,), or tokens (T, D) at (B, M).

        sample.py passes a piece of a row, (B, n, D) at positions (n,), and a cache for each block.
        """
        head_dim = self.hp.embedding_dim // self.hp.num_heads
        pair = torch.arange(0, head_dim, 2, device=x.device)
        frequency = 10000.0 ** (-pair.float() / head_dim)
        angle = positions[..., None, None] * frequency
        cos, sin = angle.cos(), angle.sin()  # (..., 1, head_dim / 2)
        for block, cache in zip(blocks, caches or [None] * len(blocks)):
            x = block(x, cos, sin, slots, cache)
        return x

    def encode(self, x):
        """Bytes x (B, N) -> X (B, N, D); eq. 1."""
        positions = torch.arange(x.size(1), device=x.device)
        return self.transform(self.down, self.embedding(x), positions)

    def upsample(self, X, tokens, reads):
        """Hands the tokens back to the bytes: Y (B, N, D); eq. 5, 9.

        X (B, N, D), tokens Y' (T, D), reads (B, N): the token that each byte reads. Y_i may use X_i
        and that token, nothing else, because sample.py passes a row in pieces.
        """
        return X + take(tokens, reads)  # eq. 9; the authors' code adds Y' - X' instead

    def decode(self, Y):
        """Y (B, N, D) -> what the head reads, (B, N, D); eq. 6."""
        return self.transform(self.up, Y, torch.arange(Y.size(1), device=Y.device))

    def through_tokens(self, X, a):
        """X (B, N, D) and boundaries a (B, N) bool -> what the head reads, (B, N, D); eq. 3-9."""
        ends, reads, positions, slots = token_layout(a)
        selected = take(X.flatten(0, 1), ends)  # X' (T, D), eq. 3, eq. 7
        tokens = self.transform(self.middle, selected, positions, slots)  # Y' (T, D), eq. 4
        return self.decode(self.upsample(X, tokens, reads))  # eq. 5


class Model(UNet):
    """The paper's model: a policy draws the boundaries; sections 2.3 to 2.5. Losses: train.py."""

    def __init__(self, hp):
        super().__init__(hp)
        self.policy = Policy(hp)
        self.early_head = copy.deepcopy(self.head)  # W_early, eq. 14

    def forward(self, x, y, u):
        """Bytes x, next bytes y, uniforms u (B, N) -> logp, early_logp, l, a; all (B, N).

        logp_i is log p(y_i | x_0..x_i, a_0..a_i) in nats. Apart from y_i, nothing at i depends on a
        later byte or decision. a is bool; l_i is the logit of a_i after the decisions before it.
        """
        X = self.encode(x)  # eq. 1
        early_logp = self.early_head.logp(X, y)  # eq. 14
        all_l = self.policy(X)  # (B, N, 2^w): l after each possible history
        p = all_l.detach().sigmoid()  # eq. 20
        p[:, 0] = 1.0  # <bos> is a token, so that every byte has one to read from
        a, history = draw(p, u)  # eq. 2
        l = all_l.gather(-1, history)[..., 0]
        logp = self.head.logp(self.through_tokens(X, a), y)  # eq. 6
        return logp, early_logp, l, a
