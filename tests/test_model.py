import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import model as m
from common.models import make_model
from model import BOS, Block, Cache
from train import Hyperparameters


def small_model(**changes):
    """A model whose policy is no longer the constant that it starts as."""
    torch.manual_seed(0)
    values = {
        "seq_len": 64, "embedding_dim": 32, "num_heads": 2, "n_down_layers": 2, "n_mid_layers": 2,
        "n_up_layers": 2, "attention_window": 8, "policy_window": 3, "policy_scale": 2.0}
    model = make_model(Hyperparameters(**values | changes))
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    for p in model.policy.parameters():
        if p.dim() > 1:
            p.data.normal_(std=3 * p.size(1) ** -0.5)
    model.head.linear.weight.data.normal_()
    return model


def some_bytes(B, N):
    """x and y (B, N), position by position."""
    y = torch.randint(0, 256, (B, N), generator=torch.Generator().manual_seed(1))
    return torch.cat((torch.full((B, 1), BOS), y[:, :-1]), 1), y


def uniforms_for(a):
    """Uniforms (B, N) for which exactly the boundaries a are drawn."""
    return 1 - a.float()


@pytest.mark.paper
def test_a_block_computes_gemma_2s_arithmetic():
    """Against a loop over positions and heads in float64, with complex numbers for RoPE."""
    torch.manual_seed(0)
    D, heads, hidden, N, window = 12, 2, 20, 7, 3
    head_dim = D // heads
    block = Block(D, heads, hidden, window)
    for p in block.parameters():
        p.data.normal_(std=0.5)
    positions = torch.tensor([0, 1, 2, 5, 6, 9, 40])
    x = 0.01 * torch.randn(1, N, D)  # small, so that RMSNorm's epsilon matters
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = positions[:, None, None] * frequency
    result = block(x, angle.cos(), angle.sin())[0].double()
    weights = {name: value.double() for name, value in block.state_dict().items()}

    def norm(z, name):
        rms = (z.square().mean() + 1e-6).sqrt()
        return z / rms * (1 + weights[name + ".weight"])

    def rotated(z, position):  # pairs (k, k + head_dim / 2) as complex numbers
        half = head_dim // 2
        z = torch.complex(z[:half], z[half:])
        angle = [position / 10000 ** (2 * k / head_dim) for k in range(half)]
        angle = torch.tensor(angle, dtype=torch.double)
        z = z * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag))

    rows = list(x[0].double())
    qkv = [weights["attention.qkv.weight"] @ norm(z, "norm1") for z in rows]
    q = [z[:D].view(heads, head_dim) for z in qkv]
    k = [z[D : 2 * D].view(heads, head_dim) for z in qkv]
    v = [z[2 * D :].view(heads, head_dim) for z in qkv]
    at = positions.tolist()
    for i in range(N):
        outputs = []
        for head in range(heads):
            seen = range(max(0, i - window + 1), i + 1)
            query = rotated(q[i][head], at[i])
            scores = []
            for j in seen:
                score = query @ rotated(k[j][head], at[j]) / math.sqrt(head_dim)
                scores.append(50 * torch.tanh(score / 50))
            attention = torch.softmax(torch.stack(scores), 0)
            outputs.append(sum(weight * v[j][head] for weight, j in zip(attention, seen)))
        z = rows[i] + norm(weights["attention.out.weight"] @ torch.cat(outputs), "norm2")
        gate, value = (weights["mlp.up.weight"] @ norm(z, "norm3")).split(hidden)
        gelu = gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2
        z = z + norm(weights["mlp.down.weight"] @ (gelu * value), "norm4")
        torch.testing.assert_close(result[i], z, atol=1e-5, rtol=1e-4)


@pytest.mark.paper
def test_rmsnorm_is_computed_in_float32():
    x = torch.linspace(-3, 3, 4096).bfloat16()
    norm = m.RMSNorm(4096)
    norm.weight.data.fill_(0.003)  # 1 + 0.003 would be 1 in bfloat16
    exact = x.double() / x.double().square().mean().sqrt() * 1.003
    assert torch.equal(norm(x), exact.bfloat16())


@pytest.mark.paper
def test_the_heads_logits_are_softcapped_at_30_and_its_output_is_their_log_softmax():
    head = m.Head(8)
    head.norm = torch.nn.Softsign()  # any function
    x = 40 * torch.randn(2, 3, 8)
    y = torch.randint(0, 256, (2, 3))
    logits = 30 * torch.tanh(head.linear(x / (1 + x.abs())) / 30)
    torch.testing.assert_close(head.logits(x), logits)
    logp = logits.log_softmax(-1).gather(2, y[..., None])[..., 0]
    torch.testing.assert_close(head.logp(x, y), logp)
    with torch.autocast("cpu", torch.bfloat16):  # only the matmul is in 16 bits
        product = head.linear(x / (1 + x.abs())).float()
        torch.testing.assert_close(head.logits(x), 30 * torch.tanh(product / 30), atol=0, rtol=1e-6)


@pytest.mark.paper
def test_a_new_model_guesses_nearly_uniformly_and_its_p_is_the_target():
    """An output head of standard deviation 1 / sqrt(D) would cost half a nat more."""
    shape = {"embedding_dim": 256, "n_mid_layers": 1, "downsample_rate_target": 0.3}
    model = make_model(Hyperparameters(**shape)).eval()
    (x, y), u = some_bytes(8, 64), torch.rand(8, 64)
    out = model(x, u)
    for guess in model.head.logp(out.Z, y), model.early_head.logp(out.X, y):
        assert -guess.mean().item() == pytest.approx(math.log(256), abs=0.15)
    torch.testing.assert_close(out.l.sigmoid(), torch.full((8, 64), 0.3))


@pytest.mark.parametrize("N, window", [(1, 4), (3, 8), (50, 8), (64, 8), (41, 7), (20, 1), (9, 99)])
def test_window_attention_is_dense_attention_under_a_band(N, window):
    torch.manual_seed(0)
    qkv = torch.randn(3, 2, 3, N, 4, requires_grad=True)
    band = torch.ones(N, N).tril().triu(1 - window).bool()
    dense = m.softcapped_attention(*qkv, band)
    windowed = m.window_attention(*qkv, window)
    torch.testing.assert_close(windowed, dense)
    weights = torch.randn_like(dense)
    of_dense, of_windowed = (torch.autograd.grad((y * weights).sum(), qkv)[0]
                             for y in (dense, windowed))
    torch.testing.assert_close(of_windowed, of_dense)


def test_window_attention_costs_time_and_memory_in_proportion_to_the_row():
    """A window above the row costs no more than one of the row."""
    def cost(N, window=64):
        sizes = []
        q, k, v = (torch.randn(1, 2, N, 8, requires_grad=True) for _ in range(3))
        with FlopCounterMode(display=False) as flops:
            with torch.autograd.graph.saved_tensors_hooks(lambda z: sizes.append(z.numel()) or z,
                                                          lambda z: z):
                m.window_attention(q, k, v, window).sum().backward()
        return torch.tensor([flops.get_total_flops(), sum(sizes)], dtype=torch.double)

    ratio = cost(4096) / cost(1024)
    torch.testing.assert_close(ratio, torch.full_like(ratio, 4.0), rtol=0.01, atol=0)
    keys = 64 + 64  # of each query: its own chunk and the one before
    products = 2 * 3  # scores and values; forward, and two gradients each
    assert cost(1024)[0] == products * 2 * (1024 * keys * 8) * 2
    assert torch.equal(cost(96, window=5000), cost(96, window=96))


@pytest.mark.parametrize("w", [0, 1, 8])
def test_the_draw_takes_the_left_to_right_loops_decisions(w):
    """Of random p, of p and u that are often equal, 0 or 1, and of a p near the last decision."""
    torch.manual_seed(0)
    N, H = 301, 2**w
    p, u = torch.rand(3, N, H), torch.rand(3, N)
    p[1], u[1] = torch.randint(0, 3, (N, H)) / 2, torch.randint(0, 2, (N,))
    p[2] = 0.05 + 0.9 * (torch.arange(H) % 2)
    start = torch.randint(0, H, (3, 1))
    a, histories = m.draw(p, u, start)
    for b in range(3):
        h = start[b, 0]
        for i in range(N):
            expected = bool(u[b, i] < p[b, i, h])
            assert histories[b, i] == h
            assert a[b, i] == expected
            h = (2 * h + expected) % H


@pytest.mark.paper
@pytest.mark.parametrize("training", [True, False])
def test_boundaries_are_u_below_p_with_the_softcap_in_training_only(training):
    """Equations 19-23 as they are written, in float64."""
    N, w = 60, 3
    model = small_model(downsample_rate_target=0.4).train(training)
    model.policy.linear.weight.data *= 20  # well into the soft-cap
    (x, _), u = some_bytes(4, N), torch.rand(4, N)
    X = model.policy.norm(model.encode(x)).double()
    W = model.policy.linear.weight.double()
    a = torch.zeros(4, N)
    p = torch.zeros(4, N, dtype=torch.double)
    a[:, 0] = 1
    for i in range(N):
        raw = X[:, i] @ W[0]
        for j in range(1, min(i, w) + 1):
            raw = raw + a[:, i - j] * (X[:, i] @ W[j])
        scaled = raw / 2 + math.log(0.4 / 0.6)
        p[:, i] = torch.sigmoid(5 * torch.tanh(scaled / 5) if training else scaled)
        if i > 0:
            a[:, i] = u[:, i] < p[:, i]
    out = model(x, u)
    assert 30 < out.a.sum() < 210
    assert torch.equal(out.a.float(), a)
    torch.testing.assert_close(out.l.sigmoid().double(), p, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("output", ["X", "l"])
def test_the_policy_and_the_early_head_teach_the_encoder(output):
    model, (x, _) = small_model(), some_bytes(2, 20)
    getattr(model(x, torch.rand(2, 20)), output).sum().backward()
    assert model.down[0].mlp.up.weight.grad.norm() > 1e-3


@pytest.mark.parametrize("rates, M", [([0.05, 0.2, 0.3, 0.9], 40), ([0.0] * 2, 8), ([1.0] * 2, 40)])
def test_the_middle_sees_a_rows_own_tokens_at_their_bytes_positions(rates, M):
    """Each row alone, without padding, its rotary angles from the bytes' numbers; and gradients."""
    model, u = small_model().eval(), torch.rand(4, 40, generator=torch.Generator().manual_seed(3))
    a = u[: len(rates)] < torch.tensor(rates)[:, None]
    a[:, 0] = True
    assert m.token_layout(a)[0].size(1) == M
    X = torch.randn(*a.shape, 32, requires_grad=True)
    Z, rows = model.through_tokens(X, a), []
    for b in range(len(a)):
        at = a[b].nonzero()[:, 0]
        tokens = model.transform(model.middle, X[b : b + 1, at], at)
        reads = torch.tensor([[sum(at <= i) - 1 for i in range(40)]])
        rows.append(model.upsample(X[b : b + 1], tokens, reads)[0])
    expected, parameters = model.decode(torch.stack(rows)), [X, *model.middle.parameters()]
    torch.testing.assert_close(Z, expected, atol=1e-4, rtol=1e-4)
    for one, two in zip(*(torch.autograd.grad(z.sin().sum(), parameters) for z in (Z, expected))):
        torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)


def test_the_docstrings_example_of_the_layout_is_right():
    a = torch.tensor([[1, 0, 1, 0, 0, 0], [1, 0, 0, 1, 0, 1]]).bool()
    ends, reads = m.token_layout(a, multiple=1)
    shown = dict(line.split(maxsplit=1) for line in m.token_layout.__doc__.splitlines()
                 if line.startswith("        ") and "|" in line)
    for name, tensor in ("a", a.int()), ("ends", ends), ("reads", reads):
        first, second = shown[name].split("|")
        assert tensor[0].tolist() == [*map(int, first.split())]
        assert tensor[1].tolist() == [*map(int, second.split()[: tensor.size(1)])]


class Doubled(torch.nn.Module):
    """Another policy, with a hidden layer and four decisions of history."""

    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(32, 8), torch.nn.GELU(), torch.nn.Linear(8, 16))

    def forward(self, X):
        return self.mlp(X)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[50], [1] * 50, [1, 20, 1, 1, 27], [20, 1, 29]])
@pytest.mark.parametrize("w, change", [(3, "none"), (0, "none"), (4, "policy"), (1, "upsample")])
def test_a_row_read_in_pieces_with_a_cache_is_the_full_pass(sizes, w, change):
    """Whatever the policy and upsample."""
    model, (x, _), u = small_model(policy_window=w).eval(), some_bytes(1, 50), torch.rand(1, 50)
    if change == "policy":
        model.policy = Doubled()
    if change == "upsample":
        model.upsample = lambda X, tokens, reads: X.tanh() + 2 * m.pick(tokens, reads)
    cache = Cache(model)
    pieces = [model(*piece, cache) for piece in zip(x.split(sizes, 1), u.split(sizes, 1))]
    whole = model(x, u)
    assert 5 < whole.a.sum() < 45
    for name in "ZXla":
        read = torch.cat([getattr(piece, name) for piece in pieces], dim=1)
        torch.testing.assert_close(read, getattr(whole, name), atol=1e-4, rtol=1e-4)
    assert cache.tokens.size(1) == whole.a.sum()


def test_no_output_depends_on_a_later_byte_or_decision():
    model, N, at = small_model().eval(), 48, 29
    (x, _), u = some_bytes(1, N), torch.rand(1, N)
    a = torch.rand(1, N) < 0.3
    a[..., 0] = True
    other_x, other_a = x.clone(), a.clone()
    other_x[:, at] = (other_x[:, at] + 1) % 256
    other_a[..., at] ^= True
    drawn, drawn_other = model(x, u), model(other_x, u)
    given, given_other = model(x, uniforms_for(a)), model(x, uniforms_for(other_a))
    for one, two in (drawn, drawn_other), (given, given_other):
        for output, changed in zip(one, two):
            torch.testing.assert_close(output[:, :at], changed[:, :at], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(one.Z[:, at], two.Z[:, at])  # but on the present one


@pytest.mark.paper
def test_eq_9_adds_the_last_token_up_to_a_byte():
    X, tokens = torch.randn(2, 5, 32), torch.randn(2, 3, 32)
    reads = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 2]])
    expected = X + torch.stack([tokens[0, reads[0]], tokens[1, reads[1]]])
    torch.testing.assert_close(small_model().upsample(X, tokens, reads), expected)
