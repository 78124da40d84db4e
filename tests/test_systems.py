"""experiments/systems.py: the other systems."""
import json
import math

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F

import sample
import train
from common.commandline import UserError
from common.models import load_model, make_model
from conftest import TINY
from experiments.systems import SYSTEMS
from model import BOS
from prepare import open_shards
from test_model import some_bytes, uniforms_for

RULES = "uniform", "random", "whitespace", "bpe", "bpe-late", "none"


def small(name, **changes):
    torch.manual_seed(0)
    values = {
        "seq_len": 40, "embedding_dim": 16, "num_heads": 2, "n_down_layers": 1, "n_mid_layers": 1,
        "n_up_layers": 1, "attention_window": 8, "system": name, "policy_window": 2,
        "downsample_rate_target": 0.3}
    model = make_model(train.Hyperparameters(**values | changes))
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return model.eval()


@pytest.fixture
def toy_bpe(monkeypatch):
    """A tokenizer with few merges in place of o200k_base, which needs a network."""
    merges = [bytes([i]) for i in range(256)]
    merges += b"he ll hell hello _t ok _tok en _token iz at izat on ion izati ization".split()
    merges.append(b"\n/")  # within a piece, which newlines may continue after punctuation
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    toy = tiktoken.Encoding("toy", pat_str=r"\s?\w+|[^\s\w]+[\n/]*|\s+", mergeable_ranks=ranks,
                            special_tokens={"<|endoftext|>": 1000})
    monkeypatch.setattr(tiktoken, "get_encoding", {"o200k_base": toy}.get)


def rule(name, text):
    """Where the rule ends tokens in the bytes of a text."""
    x = torch.tensor([[BOS, *text]])
    return small(name).rule(x, torch.zeros(x.shape))[0, 1:].tolist()


def looks_ahead(name, training):
    """Whether a later byte or uniform changes an earlier boundary or output of the system."""
    text = "hello_tokenization,\n42 Hello\ttoken. é {x}".encode()[:39]
    x = torch.tensor([[BOS, *text]]).repeat(39, 1)  # in row k, position k + 1 and later ones change
    u = torch.rand(1, 40).repeat(39, 1)
    later = torch.arange(40) > torch.arange(39)[:, None]
    later_x = torch.where(later, x.clamp(max=255) ^ 64, x)  # letters become other characters
    later_u = torch.where(later, 1 - u, u)
    model = small(name).train(training)
    before, after = model(x, u), model(later_x, later_u)
    pairs = [(before.Z, after.Z), (before.l, after.l), (before.a, after.a)]
    return not all(
        torch.allclose(one[~later].float(), other[~later].float(), atol=1e-5, rtol=1e-5)
        for one, other in pairs)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_later_byte_changes_no_earlier_boundary_or_output_but_those_of_bpe_late(
        name, training, toy_bpe):
    assert looks_ahead(name, training) == (name == "bpe-late")


@torch.no_grad()
@pytest.mark.parametrize("name", ["random", "bpe", "bpe-late", "gumbel"])
def test_a_generated_byte_is_the_likeliest_after_a_pass_over_the_bytes_before_it(
        name, toy_bpe, monkeypatch):
    model, rand, uniforms = small(name), torch.rand, []
    monkeypatch.setattr(
        torch, "rand", lambda *size, **on: uniforms.append(rand(*size, **on)) or uniforms[-1])
    byte, a, p = zip(*sample.generate(model, b"hello_token", 20, temperature=0, top_k=50))
    x, u = torch.tensor([[BOS, *byte]]), torch.cat(uniforms, 1)
    for N in range(12, 32):  # the prompt is read at once
        out = model(x[:, :N], u[:, :N])
        assert model.head.logits(out.Z[0, -1])[:BOS].argmax() == x[0, N]
        out = model(x[:, : N + 1], u[:, : N + 1])
        assert a[N - 1] == out.a[0, N]
        assert p[N - 1] == pytest.approx(out.l[0, N].sigmoid().item(), rel=1e-4)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_differs_from_the_learned_model_in_its_boundaries_only(name, toy_bpe):
    x, y = some_bytes(2, 40)
    model, learned = small(name), small("learned")
    learned.load_state_dict(model.state_dict(), strict=False)
    Z, _, l, a = out = model(x, torch.rand(2, 40))
    torch.testing.assert_close(Z, learned(x, uniforms_for(a)).Z)
    L, terms = model.losses(out, y, model.hp)
    assert terms == {"auto": -model.head.logp(Z, y).mean(), "boundary": 0} and L == terms["auto"]
    assert torch.equal(l.sigmoid().round(), a.float())
    assert l.sigmoid().frac().max() < 1e-6  # the rule is sure
    assert a[:, 0].all()


@pytest.mark.parametrize("name", ["learned", "gumbel", "hnet"])
def test_boundaries_are_computed_in_float32_where_the_rest_is_not(name):
    model, (x, _), u = small(name), some_bytes(2, 40), torch.rand(2, 40)
    X = model.encode(x)
    model.encode = lambda *_: X
    exact = model(x, u).l
    assert exact.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x, u).l, exact)


def test_uniform_is_evenly_spaced_and_random_keeps_the_rate():
    (x, _), u = some_bytes(64, 40), torch.rand(64, 40, generator=torch.Generator().manual_seed(0))
    uniform = small("uniform", downsample_rate_target=0.29).rule(x, u)  # 11.6 tokens
    for row in uniform:
        assert row.nonzero()[:, 0].tolist() == [math.ceil(m * 40 / 12) for m in range(12)]
    random = small("random").rule(x, u)
    assert random.float().mean() == pytest.approx(0.3, abs=0.03)


def test_whitespace_marks_the_first_byte_after_a_word():
    text = "Hello, wörld 42\n\n  x=1".encode()  # ö's first byte is no letter to SpaceByte
    ends = [text.index(z) for z in (b", ", "ö".encode(), b" 42", b"\n", b"=")]
    assert [i for i, a in enumerate(rule("whitespace", text)) if a] == ends
    word = [byte < 128 and chr(byte).isalnum() or 128 <= byte < 192 for byte in range(256)]
    a = rule("whitespace", b"".join(b"a%c" % byte for byte in range(256)))
    assert a[1::2] == [not in_word for in_word in word]
    assert not any(a[2::2])


def test_bpe_ends_a_token_at_a_character_that_is_one_in_the_text_up_to_it(toy_bpe):
    """Whatever white space comes before. A byte that is not UTF-8 is no character."""
    tokenizer = small("bpe").tokenizer
    text = " hello  hell;\n//\n//hello\nhe _token\tization é€x hel hello_tokeniz  ok"
    expected = []
    for k, character in enumerate(text):
        last = tokenizer.encode_ordinary(text[: k + 1])[-1]
        own = len(tokenizer.decode_single_token_bytes(last)) <= len(character.encode())
        expected += [False] * (len(character.encode()) - 1) + [own]
    assert 20 < sum(expected) < 45
    assert rule("bpe", text.encode()) == expected
    cut = "ö".encode()[1:] + b"hehe" + "€".encode()[:2]  # characters cut at the ends of a row
    assert rule("bpe", cut) == [0, 1, 0, 1, 0, 0, 0]


def test_bpe_late_marks_the_first_byte_after_each_token_and_a_byte_that_is_not_utf8(toy_bpe):
    text, a = b"hello_tokenization", rule("bpe-late", b"hello_tokenization")
    marked = "".join("|" * mark + chr(byte) for byte, mark in zip(text, a))
    assert marked == "hello|_token|ization"  # the paper's example
    cut = "ö".encode()[1:] + b"hehe" + "€".encode()[:2]  # characters cut at the ends of a row
    assert rule("bpe-late", cut) == [0, 1, 0, 1, 0, 1, 1]
    assert sum(rule("bpe-late", b"<|endoftext|>he")) > 5  # it is not one token
    assert rule("bpe-late", b"hell")[2] == 0  # it looks ahead
    assert rule("bpe-late", b"hel")[2] == 1


def test_without_the_tokenizer_a_run_says_where_to_get_it(monkeypatch, data, tmp_path):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: 1 / 0)
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        train.main([*TINY, f"--data={data}", "--system=bpe", f"--out_dir={tmp_path}/out"])


@pytest.mark.parametrize("name", ["uniform", "gumbel", "hnet"])
def test_a_training_step_takes_the_gradient_of_the_systems_own_loss(name, data, tmp_path):
    """And of nothing else: a large lambda_pi changes nothing."""
    train.main([*TINY, f"--data={data}", f"--system={name}", f"--out_dir={tmp_path}/out",
                "--downsample_rate_target=0.3", "--lambda_pi=100", "--training_bytes=128"])
    log = [json.loads(line) for line in open(tmp_path / "out/log.jsonl")]
    step, = (record for record in log if "grad_norm" in record)

    trained, _ = load_model(tmp_path / "out/ckpt.pt")
    torch.manual_seed(trained.hp.seed)
    model = make_model(trained.hp).train()
    shards = open_shards(data, "train", 32)
    rows = train.row_order(trained.hp.seed, 0, sum(map(len, shards)))[:4]
    y = torch.from_numpy(np.concatenate(shards)[rows].astype(int))
    x = F.pad(y[:, :-1], (1, 0), value=BOS)
    u = np.random.default_rng([trained.hp.seed, 0, 1]).random((4, 32), np.float32)
    Z, _, l, a = model(x, torch.from_numpy(u))
    auto = F.cross_entropy(model.head.logits(Z).flatten(0, 1), y.flatten())
    boundary = model.boundary_loss(l, a)
    (auto + boundary).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    expected = {"auto": auto.item(), "boundary": boundary.item(),
                "grad_norm": torch.nn.utils.get_total_norm(grads).item()}
    assert {key: step[key] for key in expected} == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["bpe", "gumbel", "hnet"])
def test_a_system_trains_resumes_and_writes(name, toy_bpe, data, tmp_path):
    flags = [*TINY, f"--data={data}", f"--system={name}", f"--out_dir={tmp_path}/out"]
    train.main([*flags, f"--training_bytes={4 * 4 * 32}"])
    train.main([*flags, f"--training_bytes={8 * 4 * 32}", "--resume=True"])
    log = [json.loads(line) for line in open(tmp_path / "out/log.jsonl")]
    assert [record["step"] for record in log if "auto" in record] == list(range(1, 9))
    model, _ = load_model(tmp_path / "out/ckpt.pt")
    assert type(model) is SYSTEMS[name]
    assert len([*sample.generate(model, b"AB", 5, 1.0, 50)]) == 7


@pytest.mark.paper
def test_gumbel_starts_at_the_target_and_hnet_at_what_neighbouring_bytes_have_in_common():
    gumbel, hnet = [make_model(train.Hyperparameters(
        embedding_dim=16, downsample_rate_target=0.3, system=name)) for name in ("gumbel", "hnet")]
    (x, _), u = some_bytes(2, 40), torch.rand(2, 40)
    torch.testing.assert_close(gumbel(x, u).l.sigmoid(), torch.full((2, 40), 0.3))
    X = hnet.encode(x)
    p = (1 - F.cosine_similarity(X[:, 1:], X[:, :-1], dim=-1)) / 2
    torch.testing.assert_close(hnet(x, u).l[:, 1:].sigmoid(), p, atol=2e-6, rtol=1e-4)
    assert not hnet.residual.weight.any()


def assert_same_gradients(Z, expected, parameters):
    torch.testing.assert_close(Z, expected, atol=1e-5, rtol=1e-4)
    weights = torch.randn_like(Z)
    grads = torch.autograd.grad((Z * weights).sum(), parameters)
    expected_grads = torch.autograd.grad((expected * weights).sum(), parameters)
    for one, other in zip(grads, expected_grads):
        assert one.abs().max() > 1e-6
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


@pytest.mark.paper
def test_gumbel_computes_its_equations_position_by_position_forward_and_gradient():
    """Straight-through draws as u < p; tokens are weighted means, a null token comes first.

    A segment's weights are the authors': 1 - s + c_i for a position i of segment s, c_i the
    boundaries before it. A token reaches the positions from its last byte on.
    """
    model, (x, _), u, N = small("gumbel").train(), some_bytes(1, 30), torch.rand(1, 30), 30
    Z, _, l, a = model(x, u)
    X = model.encode(x)
    logit = model.boundary_mlp(model.boundary_norm(X))[0, :, 0] + math.log(0.3 / 0.7)
    soft = ((logit - (u[0] / (1 - u[0])).log()) / 0.5).sigmoid()
    hard = [True] + [bool(u[0, i] < logit[i].sigmoid()) for i in range(1, N)]
    assert hard == (a[0] > 0.5).tolist()
    assert 3 < sum(hard) < 27
    torch.testing.assert_close(l[0], logit)
    drawn = [float(hard[i]) + soft[i] - soft[i].detach() for i in range(N)]
    ends, tokens = [i for i in range(N) if hard[i]], [model.null]
    for s, end in enumerate(ends[1:], 1):
        members = range(ends[s - 1] + 1, end + 1)
        weights = [1 - s + sum(drawn[:i]) for i in members]
        tokens.append(sum(w * X[0, i] for w, i in zip(weights, members)) / sum(weights))
    tokens = model.transform(model.middle, torch.stack(tokens)[None], torch.tensor([ends]))[0]
    Y = torch.stack([X[0, i] + tokens[sum(hard[: i + 1]) - 1] for i in range(N)])
    assert_same_gradients(Z, model.decode(Y[None]), [
        model.boundary_mlp[0].weight, model.boundary_mlp[2].bias, model.boundary_norm.weight,
        model.null, model.embedding.weight])


@pytest.mark.paper
def test_gumbels_prior_is_the_binomials_logarithm_forward_and_gradient():
    model, a = small("gumbel"), (torch.rand(3, 40) < 0.4).float().requires_grad_()
    loss, expected = model.boundary_loss(None, a), 0
    for k in a[:, 1:].sum(1).int().tolist():
        expected -= math.log(math.comb(39, k) * 0.3**k * 0.7 ** (39 - k)) / 40 / 3
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    difference = model.boundary_loss(None, a + 1e-2 / 39) - loss
    slope = torch.autograd.grad(loss, a)[0][:, 1:].sum().item() / 39 * 1e-2
    assert slope == pytest.approx(difference.item(), rel=0.05, abs=1e-6)


@pytest.mark.paper
def test_hnet_computes_its_equations_position_by_position_forward_and_gradient():
    model, (x, _) = small("hnet"), some_bytes(1, 30)
    Z, _, l, a = model(x, None)
    X, p = model.encode(x), [torch.ones(())]
    for i in range(1, 30):
        q, k = model.q.weight @ X[0, i], model.k.weight @ X[0, i - 1]
        p.append((1 - q @ k / q.norm() / k.norm()) / 2)
    ends = [i for i in range(30) if p[i] >= 0.5]
    assert ends == a[0].nonzero()[:, 0].tolist()
    assert 3 < len(ends) < 28
    torch.testing.assert_close(l[0].sigmoid(), torch.stack(p), atol=1e-5, rtol=0)
    y = model.transform(model.middle, X[:, ends], torch.tensor([ends]))[0]
    Y, z, t = [], None, -1
    for i in range(30):
        if i in ends:
            t += 1
            z = y[t] if z is None else p[i] * y[t] + (1 - p[i]) * z
        confidence = p[i] if i in ends else 1 - p[i]
        confidence = confidence + (1 - confidence).detach()
        Y.append(confidence * z + model.residual.weight @ X[0, i])
    assert_same_gradients(Z, model.decode(torch.stack(Y)[None]), [
        model.q.weight, model.k.weight, model.residual.weight, model.embedding.weight])


@pytest.mark.paper
def test_hnets_ratio_loss_is_least_where_the_rate_is_the_target():
    model, losses = small("hnet", downsample_rate_target=0.25), []
    for rate in 0.15, 0.25, 0.35:
        a = (torch.arange(1000) < 1000 * rate)[None]
        p = torch.full((1, 1000), rate, requires_grad=True)
        losses.append(model.boundary_loss(torch.logit(p), a))
        slope = torch.autograd.grad(losses[-1], p)[0].mean().sign().item()
        assert slope == (rate > 0.25) - (rate < 0.25)
    assert losses[1] == min(losses)
    assert losses[1].item() == pytest.approx(0.03)
