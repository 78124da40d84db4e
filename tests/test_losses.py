import itertools

import pytest
import torch
import torch.nn.functional as F

import train
from test_model import small_model, some_bytes


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


@pytest.mark.parametrize("start, direction", [(0.4, -1), (0.05, 1)])
def test_the_target_loss_pushes_the_rate_to_the_target(start, direction):
    l = torch.full((2, 8), start).logit().requires_grad_()
    train.target_loss(l, 0.2, l.detach().sigmoid().mean()).backward()
    assert torch.equal((-l.grad).sign(), torch.full((2, 8), float(direction)))
    torch.testing.assert_close(l.grad, l.grad[0, 0].expand(2, 8))  # even pressure on all logits


def test_the_advantage_is_the_return_less_the_batchs_mean_at_each_position():
    torch.manual_seed(0)
    logits, early_logits, l = torch.randn(3, 6, 257), torch.randn(3, 6, 257), torch.randn(3, 6)
    a, y = torch.rand(3, 6) < 0.5, torch.randint(0, 256, (3, 6))
    L_auto, L_early, L_pi, L_tgt = train.losses(logits, early_logits, l, a, y, 0.9, 0.2)
    logp = lambda z, b, i: z[b, i, y[b, i]] - z[b, i].logsumexp(0)
    G = torch.tensor([[sum(0.9 ** (k - i) * (logp(logits, b, k) - logp(early_logits, b, k)) for k in range(i, 6)) for i in range(6)]
                      for b in range(3)])
    log_pi = torch.where(a, l.sigmoid(), 1 - l.sigmoid()).log()
    expected = sum(-log_pi[b, i] * (G[b, i] - G[:, i].mean()) for b in range(3) for i in range(1, 6)) / 18
    torch.testing.assert_close(L_pi, expected)
    torch.testing.assert_close(L_auto, -sum(logp(logits, b, i) for b in range(3) for i in range(6)) / 18)
    torch.testing.assert_close(L_early, -sum(logp(early_logits, b, i) for b in range(3) for i in range(6)) / 18)
    torch.testing.assert_close(L_tgt, l.mean() * (l.sigmoid().mean() - 0.2))


# ---------------------------------------------------------------------------------------------------------------------
# The gradient. A row of 5 bytes has 2^4 boundary sequences (the first is forced), so the expected loss, and the mean of
# the estimator, are sums of 16 terms (or 16^2, for a batch of two rows): exact, with no Monte Carlo error to allow for.

N = 5
SEQUENCES = torch.tensor([(1, *rest) for rest in itertools.product((0, 1), repeat=N - 1)], dtype=torch.bool)


def everything(model):
    """log p, early log p, l and pi(a) of all 16 boundary sequences of one row."""
    row = some_bytes(1, N + 1)
    x, y = row[:, :-1].expand(16, -1), row[:, 1:].expand(16, -1)
    logits, early_logits, l, a = model(x, SEQUENCES)
    log_pi = torch.where(SEQUENCES, F.logsigmoid(l), F.logsigmoid(-l))[:, 1:].sum(1)
    return logits, early_logits, l, a, y, log_pi


def gradient(model, value):
    grads = torch.autograd.grad(value, list(model.parameters()), retain_graph=True, allow_unused=True)
    return torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in zip(grads, model.parameters())])


@pytest.mark.parametrize("baseline", ["none", "early exit", "early exit and batch mean"])
def test_the_estimators_mean_is_the_gradient_of_the_expected_loss(baseline):
    model = small_model().train()
    logits, early_logits, l, a, y, log_pi = everything(model)
    logp, early_logp = train.log_likelihood(logits, y), train.log_likelihood(early_logits, y)
    pi = log_pi.exp()
    assert pi.sum().item() == pytest.approx(1, abs=1e-5)
    exact = gradient(model, (pi * -logp.mean(1)).sum())
    through_bytes = gradient(model, (pi.detach() * -logp.mean(1)).sum())  # the expectation of L_auto's own gradient
    policy_part = exact - through_bytes
    assert policy_part.norm() > 1e-3  # there is something to estimate

    estimate = 0
    if baseline == "early exit and batch mean":  # the batch mean holds the row itself, which costs it 1/B
        for i, j in itertools.product(range(16), repeat=2):
            two = [i, j]
            L_pi = train.losses(logits[two], early_logits[two], l[two], a[two], y[two], gamma=1.0, target=0.2)[2]
            estimate = estimate + (pi[i] * pi[j]).detach() * L_pi
        policy_part = policy_part * (2 - 1) / 2
    else:
        R = logp - early_logp if baseline == "early exit" else logp
        for i in range(16):
            G = train.discounted_return(R[i : i + 1].detach(), 1.0)
            estimate = estimate + pi[i].detach() * train.policy_loss(l[i : i + 1], a[i : i + 1], G)
    torch.testing.assert_close(gradient(model, estimate), policy_part, atol=2e-6, rtol=1e-3)


@pytest.mark.parametrize("K", [2, 3])
def test_with_k_draws_of_a_row_the_estimators_mean_is_the_whole_gradient(K):
    """Over all 16^K draws; one row is enough, and no factor (B - 1) / B is left."""
    model = small_model(early_exit=False).train()
    logits, early_logits, l, a, y, log_pi = everything(model)
    assert early_logits is None
    pi, loss = log_pi.exp(), -train.log_likelihood(logits, y).mean(1)
    policy_part = gradient(model, (pi * loss.detach()).sum())
    estimate = 0
    for draws in itertools.product(range(16), repeat=K):
        some = list(draws)
        L_auto, _, L_pi, _ = train.losses(logits[some, None], None, l[some, None], a[some, None], y[:1], gamma=1.0, target=0.2)
        torch.testing.assert_close(L_auto, loss[some[0]])  # the first draw teaches the language model
        estimate = estimate + pi[some].detach().prod() * L_pi
    assert policy_part.norm() > 1e-3
    torch.testing.assert_close(gradient(model, estimate), policy_part, atol=2e-6, rtol=1e-3)


def test_sequences_are_drawn_as_often_as_their_probability_says():
    model = small_model().train()
    pi = everything(model)[-1].exp()
    x = some_bytes(1, N + 1)[:, :-1].expand(20000, -1)
    with torch.no_grad():
        a = model(x, u=torch.rand(20000, N, generator=torch.Generator().manual_seed(0)))[3]
    drawn = (a.long() * 2 ** torch.arange(N)).sum(1).bincount(minlength=2**N)
    which = (SEQUENCES.long() * 2 ** torch.arange(N)).sum(1)
    error = (pi * (1 - pi) / 20000).sqrt()
    assert ((drawn[which] / 20000 - pi).abs() < 4 * error).all()
