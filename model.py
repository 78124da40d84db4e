"""
A byte-level language model that learns where its tokens end.
"You Can Learn Tokenization End-to-End with Reinforcement Learning", arXiv 2602.13940.

Read it top to bottom; the data flows the same way. `# eq. n` is the paper's equation n, and the names are its own:

    x  bytes, x_0 = <bos>                       (B, N)       X   byte representations         (B, N, D)
    a  a_i = 1: a token ends at byte i          (B, N)       X'  those at the boundaries      (B, M, D)
    l  logit of that decision, p = sigmoid(l)   (B, N)       Y'  after the middle transformer (B, M, D)
                                                             Y   handed back to the bytes     (B, N, D)

B rows, N bytes in a row, M tokens in the row that has the most (rounded up to 8s), D = embedding_dim. Position i predicts y_i = x_{i+1}.
"""
import copy
import math
import zipfile
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

BOS = 256  # the one symbol that is not a byte
VOCAB_SIZE = 257
ATTENTION_SOFTCAP, LOGIT_SOFTCAP = 50.0, 30.0  # as in Gemma 2
ROPE_BASE = 10000.0
TOKEN_MULTIPLE = 8  # M is rounded up to a multiple of this, so that the middle sees few different shapes


@dataclass
class ModelConfig:
    seq_len: int = 4096  # bytes in a training row; longer ones can be read too; uniform boundaries are spaced by it
    embedding_dim: int = 768
    num_heads: int = 12
    n_down_layers: int = 4  # byte layers before the middle
    n_mid_layers: int = 12  # token layers
    n_up_layers: int = 4  # byte layers after the middle
    attention_window: int = 64  # bytes that a byte layer sees, its own included
    downsample_rate_target: float = 1 / 5  # tokens per byte
    policy_window: int = 8  # w: earlier decisions that a decision sees
    policy_scale: float = 16.0  # S, eq. 22
    policy_softcap: float = 5.0  # eq. 23; the paper does not give it. 5 keeps p within 0.7% .. 99.3%: it never stops exploring
    early_exit: bool = True  # a head that predicts from X alone, eq. 14
    boundaries: str = "learned"  # or a rule of experiments/systems.py, or the path of a checkpoint


# ---------------------------------------------------------------------------------------------------------------------
# The transformer block, as in Gemma 2: RMSNorm before and after attention and MLP, RoPE, GeGLU, soft-caps, no biases.


def softcap(z, c):
    return c * torch.tanh(z / c)


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), computed in float32, returned in x's dtype."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return (y * (1 + self.weight)).type_as(x)


def rope(N, head_dim, device=None):
    """cos and sin of the rotary angles at byte positions 0 .. N - 1: (2, N, 1, head_dim / 2), to broadcast over heads."""
    frequency = ROPE_BASE ** (-torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angle = torch.arange(N, device=device)[:, None, None] * frequency
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x, cos, sin):
    """Rotates the pairs (x_k, x_{k + head_dim/2}) of x (B, N, H, head_dim) by angles of which cos and sin are given."""
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


def attend(q, k, v, mask):
    """Soft-capped attention: q (..., Q, h), k and v (..., K, h), mask (..., Q, K) True where q may look at k."""
    scores = softcap((q @ k.mT).float() / math.sqrt(q.size(-1)), ATTENTION_SOFTCAP)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).type_as(v) @ v


def causal_attention(q, k, v):
    """Full causal attention over (B, H, M, h)."""
    M = q.size(-2)
    return attend(q, k, v, torch.ones(M, M, dtype=torch.bool, device=q.device).tril())


def window_attention(q, k, v, window):
    """Causal attention of each position to itself and the window - 1 before it, over (B, H, N, h), in O(N * window).

    The row is cut into chunks of half a window, of 8 at least; a chunk's queries need the keys of their own chunk and of those that a
    window reaches back into, two or one, so every product is a batch of small dense ones, a third to a half of it masked.
    """
    N, window = q.size(2), min(window, q.size(2))
    C = max(window // 2, 8)  # products smaller than 8 by 16 are slow
    n, back = math.ceil(N / C), math.ceil((window - 1) / C)  # chunks, and how many before its own one reads
    q = F.pad(q, (0, 0, 0, n * C - N)).unflatten(2, (n, C))  # (B, H, n, C, h)
    k, v = (F.pad(z, (0, 0, back * C, n * C - N)).unflatten(2, (back + n, C)) for z in (k, v))
    k, v = (torch.cat([z[:, :, i : i + n] for i in range(back + 1)], dim=3) for z in (k, v))  # (B, H, n, (back + 1) C, h)
    i = torch.arange(C, device=q.device)[:, None] + back * C
    j = torch.arange((back + 1) * C, device=q.device)
    start = torch.arange(n, device=q.device)[:, None, None] * C  # key j of a chunk is byte start + j - back * C
    mask = (j <= i) & (j > i - window) & (start + j >= back * C)  # (n, C, (back + 1) C)
    return attend(q, k, v, mask).flatten(2, 3)[:, :, :N]


class Attention(nn.Module):
    """Causal attention of x (B, N, D) over `window` positions or all; cos and sin from `rope`. Cache and step: see Model.run."""

    def __init__(self, dim, num_heads, window=None):
        super().__init__()
        self.num_heads, self.window = num_heads, window
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cos, sin, cache=None, step=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)  # (B, N, H, h)
        q, k, v = rotate(q, cos, sin).transpose(1, 2), rotate(k, cos, sin).transpose(1, 2), v.transpose(1, 2)
        if step is not None:  # one new position
            y = attend(q, *cache.append(k, v, *step))
        else:
            y = causal_attention(q, k, v) if self.window is None else window_attention(q, k, v, self.window)
            if cache is not None:
                cache.fill(k, v)
        return self.out(y.transpose(1, 2).flatten(-2))


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
    """x (B, N, D) -> (B, N, D): attention, then MLP, each between two norms and added to x."""

    def __init__(self, dim, num_heads, hidden_dim, window=None):
        super().__init__()
        self.attention, self.mlp = Attention(dim, num_heads, window), GeGLU(dim, hidden_dim)
        self.norm1, self.norm2, self.norm3, self.norm4 = (RMSNorm(dim) for _ in range(4))

    def forward(self, x, *args):
        x = x + self.norm2(self.attention(self.norm1(x), *args))
        return x + self.norm4(self.mlp(self.norm3(x)))


# ---------------------------------------------------------------------------------------------------------------------
# The policy's draw, select and upsample.


def draw(z, threshold):
    """The boundaries a_i = [z_i0 + sum_j a_{i-j} z_ij > threshold_i] (eq. 19-21), without a loop over positions.

    z (B, N, 1 + w), threshold (B, N) -> a (B, N) bool. Only the last w decisions matter to the next, so a position is
    a function from one history (w bits) to the next. Functions compose: pairs of neighbours are composed up a tree,
    and the history that enters each position comes down it. 2 log2(N) small steps whatever the policy does, and
    exactly the decisions that the left-to-right loop takes: each sum is added up in the loop's order.
    """
    B, N, w = z.size(0), z.size(1), z.size(2) - 1
    total = z[..., :1]
    for j in range(1, w + 1):  # (B, N, 2^j): bit j-1 of a history is a_{i-j}
        total = torch.cat((total, total + z[..., j, None]), dim=-1)
    decision = total > threshold[..., None]  # (B, N, 2^w), for every history
    history = torch.arange(2**w, device=z.device)
    step = (2 * history + decision) % 2**w  # the history that position i hands on
    step = F.pad(step, (0, 0, 0, 2 ** math.ceil(math.log2(N)) - N))
    levels = []
    while step.size(1) > 1:
        levels.append(step)
        step = step[:, 1::2].gather(2, step[:, ::2])  # second after first
    history = torch.zeros(B, 1, dtype=torch.long, device=z.device)  # no boundaries before the row
    for step in reversed(levels):
        second = step[:, ::2].gather(2, history[..., None]).squeeze(2)
        history = torch.stack((history, second), dim=2).flatten(1)
    return decision.gather(2, history[:, :N, None]).squeeze(2)


def token_positions(a):
    """Byte position of each token (B, M), and number of the token that each byte reads from (B, N), int64; a (B, N) bool, a[:, 0] True.

    Rows with fewer than M tokens are filled with byte 0: causal attention hides what comes after a row's own tokens.
    """
    token = a.long().cumsum(1) - 1  # (B, N): the last token at or before each byte
    M = math.ceil((int(token[:, -1].max()) + 1) / TOKEN_MULTIPLE) * TOKEN_MULTIPLE  # waits for the GPU
    positions = torch.zeros(a.size(0), M + 1, dtype=torch.long, device=a.device)
    byte = torch.arange(a.size(1), device=a.device).expand_as(token)
    positions = positions.scatter(1, torch.where(a, token, M), byte)[:, :M]  # column M takes what is no boundary
    return positions, token


def select(z, index):
    """z (B, K, D) at index (B, L) -> (B, L, D)."""
    return z.gather(1, index[..., None].expand(-1, -1, z.size(-1)))


# ---------------------------------------------------------------------------------------------------------------------


def next_byte_logits(x, head):
    """Soft-capped logits (..., 257) in float32 of x (..., D)."""
    weight = F.pad(head.weight, (0, 0, 0, 7))  # 264 columns: products of 257, odd, are slow on CPUs and tensor cores
    return softcap(F.linear(x, weight)[..., :VOCAB_SIZE].float(), LOGIT_SOFTCAP)


class Model(nn.Module):
    """Byte encoder, policy, middle transformer over tokens and byte decoder, eq. 1-9, 14 and 19-23. train.py has the losses."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        D, H, W = config.embedding_dim, config.num_heads, config.attention_window
        self.head_dim = D // H
        # a table: torch.compile would compute every angle anew in each head and layer, forward and backward
        self.register_buffer("rotation", rope(config.seq_len, self.head_dim), persistent=False)
        self.embedding = nn.Embedding(VOCAB_SIZE, D)
        self.down = nn.ModuleList(Block(D, H, D, W) for _ in range(config.n_down_layers))
        self.early_norm = RMSNorm(D)  # before the policy and the early head, as before the output head
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
        nn.init.zeros_(self.policy.weight)  # p starts at the target everywhere

    def reserve(self, N):
        """Makes the rotary angles reach at least to position N - 1; training rows never need it."""
        if N > self.rotation.size(1):
            self.rotation = rope(2 * N, self.head_dim, self.rotation.device)

    def run(self, blocks, x, positions, caches=None, step=None):
        """x (B, N, D) through the blocks; positions (N,) or (B, N) in bytes. caches: one of each block, filled with x or, if step = rows, count
        (R,) each is given, with x (R, 1, D), one more position of these rows, of which they hold count."""
        cos, sin = self.rotation[:, positions]
        for i, block in enumerate(blocks):
            x = block(x, cos, sin, caches and caches[i], step)
        return x

    def encode(self, x, caches=None):
        """Bytes x (B, N) -> X (B, N, D); eq. 1."""
        self.reserve(x.size(1))
        return self.run(self.down, self.embedding(x), torch.arange(x.size(1), device=x.device), caches)

    def read(self, X):
        """From X (B, N, D): next-byte logits (B, N, 257), eq. 14, or None without an early exit, and the policy's terms
        z (B, N, 1 + w), both float32.

        z_ij is what a_{i-j} = 1 adds to the decision's logit at i, and z_i0 what is always there (eq. 21-22).
        """
        X = self.early_norm(X)
        early_logits = next_byte_logits(X, self.early_head) if self.config.early_exit else None  # eq. 14
        target = self.config.downsample_rate_target
        with torch.autocast(X.device.type, enabled=False):
            z = self.policy(X.float()) / self.config.policy_scale  # W_j X_i of eq. 21, scaled by eq. 22
            z[..., 0] += math.log(target / (1 - target))  # eq. 22
        return early_logits, z

    def boundaries(self, z, u):
        """The draw: a bool from z (B, N, 1 + w) and uniforms u, a and u (B, N) or (K, B, N): a_i = [u_i < p_i], eq. 19-23; a_0 = 1."""
        threshold = torch.logit(u)  # u < sigmoid(l) where logit(u) < l, which spares the draw the sigmoid ...
        if self.training:  # ... and here the soft-cap
            c = self.config.policy_softcap
            threshold = c * torch.atanh((threshold / c).clamp(-1, 1))
        threshold[..., 0] = -torch.inf  # <bos> is a token: every byte has one to read from
        z = z.expand(*u.shape, -1)
        a = draw(z.flatten(0, -3), threshold.flatten(0, -2)).view_as(u)
        a[..., 0] = True  # also where z is not a number: a run that diverged ends in train.py, not here
        return a

    def boundary_logits(self, z, a):
        """l of the decisions a, both (B, N) or (K, B, N), each given those before it, from z (B, N, 1 + w); eq. 21-23, all positions at once."""
        l, N = z[..., 0].expand(a.shape), a.size(-1)
        for j in range(1, z.size(-1)):
            l = l + F.pad(a, (j, 0))[..., :N] * z[..., j]  # a_{i-j} W_j X_i, eq. 21
        return softcap(l, self.config.policy_softcap) if self.training else l  # eq. 23

    def decode(self, Y, caches=None):
        """Y (B, N, D) -> next-byte logits (B, N, 257) in float32; eq. 6."""
        Y = self.run(self.up, Y, torch.arange(Y.size(1), device=Y.device), caches)
        return next_byte_logits(self.norm(Y), self.head)

    def predict(self, X, a):
        """X (B, N, D) and boundaries a (B, N) bool -> next-byte logits (B, N, 257) in float32; eq. 3-9."""
        positions, token = token_positions(a)
        tokens = select(X, positions)  # X' (B, M, D); eq. 3, 7-8
        tokens = self.run(self.middle, tokens, positions)  # Y' (B, M, D); eq. 4. RoPE turns a token by its byte's position
        Y = X + select(tokens, token)  # (B, N, D); eq. 5, 9 as written: Y', which has X' in it, and not Y' - X'
        return self.decode(Y)

    def forward(self, x, a=None, u=None):
        """Bytes x (B, N), x_0 = <bos> -> logits, early_logits (B, N, 257) (or None), l (B, N), all float32, and a (B, N) bool.

        Boundaries are drawn with the uniforms u (B, N) (fresh ones unless given), or are the a (B, N) bool that is
        given, with a[:, 0] True. No output at i depends on a byte or a decision after i.
        With u or a (K, B, N), K draws of each row: l and a are (K, B, N), and logits is a list of K. The first draw
        teaches all layers; the others have no gradient but that of l: they only tell the policy how good they were.
        """
        X = self.encode(x)
        early_logits, z = self.read(X)
        if a is None:
            with torch.no_grad():
                a = self.boundaries(z, torch.rand(x.shape, device=x.device) if u is None else u)  # eq. 2
        l = self.boundary_logits(z, a)
        if a.dim() == 2:
            return self.predict(X, a), early_logits, l, a
        logits = [self.predict(X, a[0])]
        with torch.no_grad():
            logits += [self.predict(X, other) for other in a[1:]]
        return logits, early_logits, l, a

    @torch.no_grad()
    def generate(self, x, max_new_bytes, temperature=1.0, top_k=None):
        """Continues the prompts x (B, T), x_0 = <bos>; call it in evaluation mode.

        Yields for every byte after <bos>, the prompt's first: the byte (B,), whether a token ends there (B,) bool, the
        policy's p (B,), and the byte's negative log-likelihood in nats at temperature 1 (B,). Temperature 0 takes the
        likeliest byte. Byte layers keep the last `attention_window` keys and values, the middle those of its tokens, so
        a byte costs the byte layers once, and the middle once where a token ends.
        """
        config, (B, T) = self.config, x.shape
        down, middle, up = ([Cache(block.attention.window) for block in blocks] for blocks in (self.down, self.middle, self.up))

        # the prompt in one parallel pass
        X = self.encode(x, down)
        z = self.read(X)[1]
        a = self.boundaries(z, torch.rand(B, T).to(x.device))
        p = self.boundary_logits(z, a).sigmoid()
        positions, token = token_positions(a)
        tokens = self.run(self.middle, select(X, positions), positions, middle)
        logits = self.decode(X + select(tokens, token), up)
        nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="none").view(B, T - 1)
        for i in range(1, T):
            yield x[:, i], a[:, i], p[:, i], nll[:, i - 1]

        # what a further byte needs of it: each row's last token, number of tokens and last w decisions
        logits, count = logits[:, -1], a.sum(1)
        current = select(tokens, count[:, None] - 1)  # (B, 1, D)
        history = F.pad(a, (config.policy_window, 0))[:, T:].flip(1).float()  # (B, w): a_{i-1} first
        for i in range(T, T + max_new_bytes):
            self.reserve(i + 1)
            logp = logits.log_softmax(-1)
            logits[:, BOS] = -torch.inf  # not a byte
            if top_k is not None:
                logits[logits < logits.topk(min(top_k, BOS)).values[:, -1:]] = -torch.inf
            if temperature == 0:
                byte = logits.argmax(-1)
            else:
                byte = torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0]
            position, rows = torch.tensor([i], device=x.device), torch.arange(B, device=x.device)
            step = rows, position.expand(B)
            X = self.run(self.down, self.embedding(byte[:, None]), position, down, step)  # (B, 1, D)
            z = self.read(X)[1][:, 0]
            p = (z[:, 0] + (history * z[:, 1:]).sum(1)).sigmoid()
            a = torch.rand(B).to(p) < p
            history = torch.cat((a[:, None], history), 1)[:, : config.policy_window]
            rows = a.nonzero()[:, 0]
            if len(rows) > 0:
                current[rows] = self.run(self.middle, X[rows], position, middle, (rows, count[rows]))
                count[rows] += 1
            Y = self.run(self.up, X + current, position, up, step)
            logits = next_byte_logits(self.norm(Y), self.head)[:, 0]
            yield byte, a, p, -logp.gather(1, byte[:, None])[:, 0]


class Cache:
    """Keys and values of one attention layer during generation: the last `window` positions, or all if that is None."""

    def __init__(self, window):
        self.window = window

    def fill(self, k, v):
        """The prompt's k and v (B, H, N, h)."""
        if self.window is None:
            self.k, self.v = k, v
        else:  # a ring: position i lies in slot i % window
            last = torch.arange(k.size(2), device=k.device)[-self.window :]
            self.k, self.v = (z.new_zeros(*z.shape[:2], self.window, z.size(3)) for z in (k, v))
            self.k[:, :, last % self.window], self.v[:, :, last % self.window] = k[:, :, last], v[:, :, last]

    def append(self, k, v, rows, count):
        """One more position k, v (R, H, 1, h) of the rows (R,), which held count (R,) of them. Returns all their
        k and v (R, H, L, h) and a mask (R, 1, 1, L), True where a position is held."""
        used = self.window or int(count.max()) + 1
        if used > self.k.size(2):
            self.k, self.v = (F.pad(z, (0, 0, 0, z.size(2))) for z in (self.k, self.v))
        slot = count % self.window if self.window else count
        self.k[rows, :, slot], self.v[rows, :, slot] = k[:, :, 0], v[:, :, 0]
        mask = torch.arange(used, device=k.device) <= count[:, None]
        k, v = (z[:, :, :used].index_select(0, rows) for z in (self.k, self.v))  # a third of the time of z[rows, :, :used]
        return k, v, mask[:, None, None]


def make_model(config):
    """A new model of a ModelConfig: one that learns its boundaries, or one that they are compared with. Raises what load_checkpoint does
    where boundaries is a path."""
    if config.boundaries == "learned":
        return Model(config)
    from experiments.systems import SYSTEMS, Taught
    return SYSTEMS.get(config.boundaries, Taught)(config)


def load_checkpoint(path):
    """The model that train.py saved at `path`, on the CPU in evaluation mode, and all that was saved with it.

    Raises FileNotFoundError, PermissionError, or ValueError if the file is no such checkpoint, was damaged or holds weights that are not finite.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"no checkpoint {path}; train.py makes one")
    try:
        archive = zipfile.ZipFile(path)  # torch writes checksums and does not compare them, and reads nothing of what is marked a folder
        if (damaged := archive.testzip()) or any(file.external_attr for file in archive.infolist()):
            raise ValueError(damaged or "a file of it is marked a folder")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        lacking = {"model", "model_config", "config", "optimizer", "scaler", "step", "rows_seen"} - saved.keys()
        lacking |= {field.name for field in fields(ModelConfig)} - saved.get("model_config", {}).keys()
        if lacking:
            raise KeyError(", ".join(sorted(lacking)))
        model = make_model(ModelConfig(**saved["model_config"]))
        model.load_state_dict(saved["model"])
    except (FileNotFoundError, PermissionError):  # that of the model whose boundaries this one takes, too
        raise
    except Exception as error:  # torch.load raises whatever the bytes made it stumble over
        what = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ValueError(f"{path} is no checkpoint of this version of train.py, or was damaged ({what})") from None
    if not all(weights.isfinite().all() for weights in model.parameters()):
        raise ValueError(f"{path} holds weights that are not finite; its run diverged")
    return model.eval(), saved
