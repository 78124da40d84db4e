import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import model as m
from model import BOS, Block, Model, ModelConfig


def small_model(**changes):
    """A model whose policy is no longer the constant that it starts as."""
    torch.manual_seed(0)
    config = dict(seq_len=64, embedding_dim=32, num_heads=2, n_down_layers=2, n_mid_layers=2, n_up_layers=2,
                  attention_window=8, policy_window=3, policy_scale=2.0)
    model = Model(ModelConfig(**config | changes))
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    model.policy.weight.data.normal_()
    model.head.weight.data.normal_()
    return model


def some_bytes(B, N):
    x = torch.randint(0, 256, (B, N), generator=torch.Generator().manual_seed(1))
    x[:, 0] = BOS
    return x


def test_a_block_computes_gemma_2s_arithmetic():
    """Against a derivation that goes position by position, head by head, in float64."""
    torch.manual_seed(0)
    D, H, hidden, N, window = 12, 2, 20, 7, 3
    h = D // H
    block = Block(D, H, hidden, window)
    for p in block.parameters():
        p.data.normal_(std=0.5)
    positions = torch.tensor([0, 1, 2, 5, 6, 9, 40])
    x = 0.01 * torch.randn(1, N, D)  # small, so that RMSNorm's epsilon counts
    got = block(x, *m.rope(41, h)[:, positions])[0].double()
    w = {k: v.double() for k, v in block.state_dict().items()}

    def norm(z, name):
        return z / (z.square().mean() + 1e-6).sqrt() * (1 + w[name + ".weight"])

    def turned(z, position):  # pairs (k, k + h/2) as complex numbers
        z = torch.complex(z[: h // 2], z[h // 2 :])
        angle = torch.tensor([position / 10000 ** (2 * k / h) for k in range(h // 2)], dtype=torch.double)
        z = z * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag))

    rows = list(x[0].double())
    qkv = [w["attention.qkv.weight"] @ norm(z, "norm1") for z in rows]
    q, k, v = ([z[i * D : (i + 1) * D].view(H, h) for z in qkv] for i in range(3))
    for i in range(N):
        heads = []
        for head in range(H):
            seen = range(max(0, i - window + 1), i + 1)
            scores = [turned(q[i][head], positions[i].item()) @ turned(k[j][head], positions[j].item()) / math.sqrt(h) for j in seen]
            weights = torch.softmax(torch.stack([50 * torch.tanh(s / 50) for s in scores]), 0)
            heads.append(sum(weight * v[j][head] for weight, j in zip(weights, seen)))
        z = rows[i] + norm(w["attention.out.weight"] @ torch.cat(heads), "norm2")
        gate, value = (w["mlp.up.weight"] @ norm(z, "norm3")).split(hidden)
        gelu = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        z = z + norm(w["mlp.down.weight"] @ (gelu * value), "norm4")
        torch.testing.assert_close(got[i], z, atol=1e-5, rtol=1e-4)


def test_next_byte_logits_are_the_heads_softcapped_at_30():
    head, x = torch.nn.Linear(8, 257, bias=False), 40 * torch.randn(2, 3, 8)
    torch.testing.assert_close(m.next_byte_logits(x, head), 30 * torch.tanh(head(x) / 30))


@pytest.mark.parametrize("N, window", [(1, 4), (3, 8), (50, 8), (64, 8), (41, 7), (20, 1), (20, 10**12)])
def test_window_attention_is_dense_attention_under_a_band(N, window):
    torch.manual_seed(0)
    qkv = torch.randn(3, 2, 3, N, 4, requires_grad=True)
    band = torch.ones(N, N).tril().triu(1 - window).bool()
    dense, windowed = m.attend(*qkv, band), m.window_attention(*qkv, window)
    torch.testing.assert_close(windowed, dense)
    weights = torch.randn_like(dense)
    torch.testing.assert_close(*(torch.autograd.grad((y * weights).sum(), qkv)[0] for y in (windowed, dense)))


def test_window_attention_costs_time_and_memory_in_proportion_to_the_row():
    def cost(N):
        saved = 0

        def pack(tensor):
            nonlocal saved
            saved += tensor.numel()
            return tensor

        q, k, v = (torch.randn(1, 2, N, 8, requires_grad=True) for _ in range(3))
        with FlopCounterMode(display=False) as flops, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            m.window_attention(q, k, v, 64).sum().backward()
        return torch.tensor([flops.get_total_flops(), saved], dtype=torch.double)

    torch.testing.assert_close(cost(4096) / cost(1024), torch.tensor([4.0, 4.0], dtype=torch.double), rtol=0.01, atol=0)


def left_to_right(z, threshold):
    """The draw as a plain loop: eq. 19-21 at one position after the other."""
    B, N, width = z.shape
    a = torch.zeros(B, N, dtype=torch.bool)
    for i in range(N):
        total = z[:, i, 0]
        for j in range(1, min(width, i + 1)):
            total = total + a[:, i - j] * z[:, i, j]
        a[:, i] = total > threshold[:, i]
    return a


@pytest.mark.parametrize("w", [0, 1, 8])
@pytest.mark.parametrize("policy", ["random", "every second byte", "never within w of the last", "repeat the last", "always", "ties"])
def test_the_draw_takes_the_left_to_right_loops_decisions(w, policy):
    torch.manual_seed(0)
    B, N = 3, 301
    z, threshold = torch.randn(B, N, 1 + w), torch.logit(torch.rand(B, N))
    if policy == "every second byte":
        z = torch.tensor([20.0, -40, *[0] * 8])[: 1 + w].expand(B, N, 1 + w)
    if policy == "never within w of the last":
        z = torch.tensor([20.0, *[-40] * 8])[: 1 + w].expand(B, N, 1 + w)
    if policy == "repeat the last":
        z = torch.tensor([-2.0, 5, *[1e-3] * 7])[: 1 + w].expand(B, N, 1 + w)
    if policy == "always":
        z = torch.full((B, N, 1 + w), 30.0)
    if policy == "ties":  # sums that lie on the threshold
        z, threshold = torch.randint(-2, 3, (B, N, 1 + w)).float(), torch.randint(-2, 3, (B, N)).float()
    assert torch.equal(m.draw(z, threshold), left_to_right(z, threshold))


@pytest.mark.parametrize("training", [True, False])
def test_boundaries_are_u_below_p_with_the_softcap_in_training_only(training):
    """Equations 19-23 as they stand, in float64."""
    model = small_model().train(training)
    model.policy.weight.data *= 20  # well into the soft-cap
    x, u = some_bytes(4, 60), torch.rand(4, 60)
    X = model.early_norm(model.encode(x)).double()
    z = X @ model.policy.weight.double().T / 2
    a = torch.zeros(4, 60)
    a[:, 0] = 1
    p = torch.zeros(4, 60, dtype=torch.double)
    for i in range(60):
        scaled = z[:, i, 0] + math.log(0.2 / 0.8) + sum(a[:, i - j] * z[:, i, j] for j in range(1, min(i, 3) + 1))
        p[:, i] = torch.sigmoid(5 * torch.tanh(scaled / 5) if training else scaled)
        if i > 0:
            a[:, i] = u[:, i] < p[:, i]
    _, _, l, drawn = model(x, u=u)
    assert 30 < drawn.sum() < 210
    assert torch.equal(drawn.float(), a)
    torch.testing.assert_close(l.sigmoid().double(), p, atol=1e-5, rtol=1e-4)


def test_p_starts_at_the_target():
    model = Model(ModelConfig(embedding_dim=32, num_heads=2, downsample_rate_target=0.3))
    l = model(some_bytes(2, 20))[2]
    torch.testing.assert_close(l.sigmoid(), torch.full((2, 20), 0.3), atol=0.01, rtol=0)  # the soft-cap moves it a little


def test_the_early_head_starts_as_the_output_head():
    model = Model(ModelConfig(embedding_dim=32, num_heads=2))
    assert torch.equal(model.early_head.weight, model.head.weight)
    assert model.early_head.weight is not model.head.weight


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_select_and_upsample_agree_with_loops(rate):
    torch.manual_seed(0)
    B, N, D = 3, 37, 4
    X, a = torch.randn(B, N, D), torch.rand(B, N) < rate
    a[:, 0] = True
    positions, token = m.token_positions(a)
    Y = m.select(X, positions)
    assert Y.size(1) % m.TOKEN_MULTIPLE == 0 and Y.size(1) - a.sum(1).max() < m.TOKEN_MULTIPLE
    back = m.select(Y, token)
    for b in range(B):
        tokens = [i for i in range(N) if a[b, i]]
        assert positions[b, : len(tokens)].tolist() == tokens
        for i in range(N):
            assert torch.equal(back[b, i], X[b, max(t for t in tokens if t <= i)])


def test_no_output_depends_on_a_later_byte_or_decision():
    model, N, at = small_model(), 48, 29
    x, u = some_bytes(1, N), torch.rand(1, N)
    a = torch.rand(1, N) < 0.3
    a[:, 0] = True
    other_x, other_a = x.clone(), a.clone()
    other_x[:, at] = (other_x[:, at] + 1) % 256
    other_a[:, at] ^= True
    drawn, drawn_other = model(x, u=u), model(other_x, u=u)
    given, given_other = model(x, a), model(x, other_a)
    for one, two in (drawn, drawn_other), (given, given_other):
        for output, changed in zip(one, two):
            torch.testing.assert_close(output[:, :at], changed[:, :at], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(drawn[0][:, at], drawn_other[0][:, at])  # and they do depend on the present one
    assert not torch.allclose(given[0][:, at], given_other[0][:, at])


@pytest.mark.parametrize("training", [True, False])
def test_k_draws_of_a_row_are_k_passes_of_which_the_first_has_the_gradient(training):
    model, x, u = small_model().train(training), some_bytes(2, 40), torch.rand(3, 2, 40)
    logits, early_logits, l, a = model(x, u=u)
    for k in range(3):
        for together, alone in zip((logits[k], early_logits, l[k], a[k]), model(x, u=u[k])):
            torch.testing.assert_close(together, alone)
    assert not torch.equal(a[0], a[1]) and [z.requires_grad for z in (*logits, l)] == [True, False, False, True]


@pytest.mark.parametrize("w, prompt", [(3, 1), (0, 30), (1, 5), (3, 11)])
def test_cached_generation_is_the_full_pass(w, prompt):
    model = small_model(policy_window=w).eval()
    steps = list(model.generate(some_bytes(3, prompt), 60, temperature=1.5))
    x, a, p, nll = (torch.stack(column, 1) for column in zip(*steps))
    assert x.shape == (3, prompt - 1 + 60) and x.max() < BOS
    x = F.pad(x, (1, 0), value=BOS)
    logits, _, l, _ = model(x, F.pad(a, (1, 0), value=True))
    torch.testing.assert_close(p, l.sigmoid()[:, 1:], atol=1e-4, rtol=1e-4)
    full = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="none").view_as(nll)
    torch.testing.assert_close(nll, full, atol=1e-4, rtol=1e-4)
