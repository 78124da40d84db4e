import itertools

import pytest
import torch
import torch.nn.functional as F

import train
from model import draw
from test_model import small_model, some_bytes, uniforms_for


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.99, 1.0])
def test_the_discounted_return_is_the_double_sum(gamma):
    R = torch.randn(2, 37, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    G = [[sum(gamma**k * R[b, i + k] for k in range(37 - i)) for i in range(37)] for b in range(2)]
    torch.testing.assert_close(train.discounted_return(R, gamma), torch.tensor(G))


@pytest.mark.parametrize("gamma", [0.0, 1e-30, 0.5, 0.999, 1.0])
def test_the_discounted_return_of_a_long_row_stays_finite(gamma):
    G = train.discounted_return(torch.full((1, 4096), 5.0), gamma)
    expected = 5 * 4096 if gamma == 1 else 5 * (1 - gamma**4096) / (1 - gamma)
    assert G[0, 0].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("p, direction", [(0.4, -1), (0.05, 1)])
def test_the_target_loss_pushes_all_logits_alike_to_the_target(p, direction):
    l = torch.full((2, 3, 8), p).logit().requires_grad_()
    train.target_loss(l, 0.2).backward()
    torch.testing.assert_close(-l.grad, torch.full((2, 3, 8), direction * abs(p - 0.2) / l.numel()))


def test_with_one_draw_the_advantage_is_the_return_less_the_rows_mean_at_each_position():
    G = torch.randn(1, 3, 6)
    means = [sum(G[0, b, i] for b in range(3)) / 3 for i in range(6)]
    torch.testing.assert_close(train.advantage(G), G - torch.stack(means))


def test_the_policy_loss_is_the_mean_of_log_pi_times_advantage_without_position_0():
    l, A = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    a = torch.rand(2, 3, 6) < 0.5
    total = 0
    for k, b, i in itertools.product(range(2), range(3), range(1, 6)):
        p = l[k, b, i].sigmoid()
        total = total - (p if a[k, b, i] else 1 - p).log() * A[k, b, i]
    torch.testing.assert_close(train.policy_loss(l, a, A), total / 36)


# ---- The gradient. A row of 5 bytes has 2^4 boundary sequences: the first decision is forced. So
# the expected loss and the estimator's mean are sums of 16 terms, or 16^2, exact, without noise.

N = 5
SEQUENCES = torch.tensor([(1, *rest) for rest in itertools.product((0, 1), repeat=N - 1)]).bool()


def everything(model):
    """log p, early log p, l and log pi(a) of all 16 boundary sequences of one row."""
    x, y = (z.expand(16, -1) for z in some_bytes(1, N))
    logp, early_logp, l, a = model(x, y, uniforms_for(SEQUENCES[None]))
    assert torch.equal(a[0], SEQUENCES)
    log_pi = torch.where(SEQUENCES, F.logsigmoid(l[0]), F.logsigmoid(-l[0]))[:, 1:].sum(1)
    return logp[0], early_logp, l[0], log_pi


def gradient(model, value):
    parameters = list(model.parameters())
    grads = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters)]
    return torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize("baseline", ["none", "early exit", "early exit and batch mean"])
def test_the_estimators_mean_is_the_gradient_of_the_expected_loss(baseline):
    model = small_model().train()
    logp, early_logp, l, log_pi = everything(model)
    pi = log_pi.exp()
    assert pi.sum().item() == pytest.approx(1, abs=1e-5)
    exact = gradient(model, (pi * -logp.mean(1)).sum())
    through_bytes = gradient(model, (pi.detach() * -logp.mean(1)).sum())  # L_auto's own gradient
    policy_part = exact - through_bytes
    assert policy_part.norm() > 1e-3  # there is something to estimate

    R = (logp - (0 if baseline == "none" else early_logp)).detach()
    G, estimate = train.discounted_return(R, 1.0), 0
    if baseline == "early exit and batch mean":  # the mean holds the row itself: a factor 1 - 1/B
        for i, j in itertools.product(range(16), repeat=2):
            A = train.advantage(G[None, [i, j]])
            L_pi = train.policy_loss(l[None, [i, j]], SEQUENCES[None, [i, j]], A)
            estimate = estimate + (pi[i] * pi[j]).detach() * L_pi
        policy_part = policy_part / 2
    else:
        for i in range(16):
            L_pi = train.policy_loss(l[None, [i]], SEQUENCES[None, [i]], G[None, [i]])
            estimate = estimate + pi[i].detach() * L_pi
    assert (gradient(model, estimate) - policy_part).norm() < 1e-4 * policy_part.norm()


@pytest.mark.parametrize("K", [2, 3])
def test_with_k_draws_of_a_row_the_estimators_mean_is_the_whole_gradient(K):
    """Over all 16^K draws; one row is enough, and no factor 1 - 1/B is left."""
    model = small_model(early_exit=False).train()
    logp, early_logp, l, log_pi = everything(model)
    assert not early_logp.any()
    pi, G, estimate = log_pi.exp(), train.discounted_return(logp.detach(), 1.0), 0
    policy_part = gradient(model, (pi * -logp.detach().mean(1)).sum())
    for draws in map(list, itertools.product(range(16), repeat=K)):
        A = train.advantage(G[draws, None])  # (K, 1, N)
        L_pi = train.policy_loss(l[draws, None], SEQUENCES[draws, None], A)
        estimate = estimate + pi[draws].detach().prod() * L_pi
    assert policy_part.norm() > 1e-3
    assert (gradient(model, estimate) - policy_part).norm() < 1e-4 * policy_part.norm()


def test_sequences_are_drawn_as_often_as_their_probability_says():
    model = small_model().train()
    pi = everything(model)[-1].exp()
    x, _ = some_bytes(1, N)
    p = model.policy(model.encode(x)).detach().sigmoid()
    p[:, 0] = 1.0
    u = torch.rand(20000, 1, N, generator=torch.Generator().manual_seed(0))
    a = draw(p, u)[0][:, 0]
    drawn = (a.long() * 2 ** torch.arange(N)).sum(1).bincount(minlength=2**N)
    which = (SEQUENCES.long() * 2 ** torch.arange(N)).sum(1)
    error = (pi * (1 - pi) / 20000).sqrt()
    assert ((drawn[which] / 20000 - pi).abs() < 4 * error).all()
