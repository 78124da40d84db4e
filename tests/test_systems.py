import hashlib
import json
import math
import os
import shutil
from contextlib import nullcontext
from dataclasses import asdict
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import model as m
import prepare
import train
from conftest import TINY
from experiments.systems import SYSTEMS, Taught
from model import BOS, ModelConfig


def small(name, **changes):
    torch.manual_seed(0)
    config = dict(seq_len=40, embedding_dim=16, num_heads=2, n_down_layers=1, n_mid_layers=1, n_up_layers=1, attention_window=8,
                  boundaries=name, downsample_rate_target=0.3, early_exit=False)
    model = m.make_model(ModelConfig(**config | changes))
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return model


def some_bytes(B, N):
    x = torch.randint(0, 256, (B, N), generator=torch.Generator().manual_seed(1))
    x[:, 0] = BOS
    return x


@pytest.fixture
def toy_bpe(monkeypatch):
    """A tokenizer of few merges in place of o200k_base, which needs a network."""
    merges = [bytes([i]) for i in range(256)] + [b"he", b"ll", b"hell", b"hello", b"_t", b"ok", b"_tok", b"en", b"_token", b"iz",
                                                 b"at", b"izat", b"on", b"ion", b"ization"]
    merges.insert(-1, b"izati")
    encoding = tiktoken.Encoding("toy", pat_str=r".+|\n", mergeable_ranks={m: i for i, m in enumerate(merges)}, special_tokens={})
    monkeypatch.setattr(prepare, "o200k_base", lambda: encoding)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("training", [True, False])
def test_no_output_depends_on_a_later_byte_or_draw(name, training, toy_bpe):
    model, u = small(name).train(training), torch.rand(2, 40)
    x = torch.tensor([[BOS, *b"hello_tokenization, hello_token. hellohe"[:39]], [BOS, *b"he tokenization_token_hello! x hell he y"[:39]]])
    before = model(x, u=u)
    assert before[3][:, 0].all() and (name == "none" or not before[3].bool().all())
    for i in 1, 17, 39:
        later_x, later_u = x.clone(), u.clone()
        later_x[:, i:], later_u[:, i:] = later_x[:, i:].clamp(max=255) ^ 64, 1 - later_u[:, i:]  # letters become other characters
        after = model(later_x, u=later_u)
        for z in 0, 2, 3:  # logits, l, a
            torch.testing.assert_close(before[z][:, :i], after[z][:, :i], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SYSTEMS)
def test_generation_has_the_full_passs_likelihoods(name, toy_bpe):
    model, x = small(name).eval(), some_bytes(2, 12)
    torch.manual_seed(3)
    byte, a, p, nll = (torch.stack(z, 1) for z in zip(*model.generate(x, 20)))
    torch.manual_seed(3)
    u = torch.rand(2, 32)
    whole = torch.cat((x[:, :1], byte), 1)
    logits, _, l, expected_a = model(whole, u=u)
    assert torch.equal(byte[:, :11], x[:, 1:]) and torch.equal(a, expected_a[:, 1:].bool())
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), byte.flatten(), reduction="none").view_as(nll)
    torch.testing.assert_close(nll, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(p, l[:, 1:].sigmoid(), atol=1e-5, rtol=1e-4)
    assert name == "gumbel" or torch.equal(l > 0, expected_a.bool())  # without a draw p tells the decision


@pytest.mark.parametrize("name", ["learned", "random"])
@pytest.mark.parametrize("temperature, top_k", [(0.5, None), (2.0, 5), (0.0, 7)])
def test_a_generated_byte_is_drawn_at_the_temperature_from_the_top_k(name, temperature, top_k):
    model, B = small(name).eval(), 20000
    likeliest = model(torch.tensor([[BOS]]))[0][0, 0].argmax()
    model.head.weight.data[BOS] = 2 * model.head.weight.data[likeliest]  # were it allowed, <bos> would be drawn
    byte, _, _, nll = next(model.generate(torch.full((B, 1), BOS), 1, temperature, top_k))
    logits = model(torch.tensor([[BOS]]))[0][0, 0]
    torch.testing.assert_close(nll, -logits.log_softmax(0)[byte])  # at temperature 1, whatever was chosen from
    best = logits[:BOS].topk(top_k or BOS).indices
    weight = (logits[best] / temperature).exp() if temperature else torch.eye(len(best))[0]
    p = torch.zeros(BOS).index_copy(0, best, weight / weight.sum())
    assert ((byte.bincount(minlength=BOS) / B - p).abs() <= 4.5 * (p * (1 - p) / B).sqrt()).all()


@pytest.mark.parametrize("name", ["uniform", "random", "whitespace", "bpe", "none"])
def test_a_rules_boundaries_and_those_it_is_given_are_all_that_is_not_the_learned_model(name, toy_bpe):
    model, learned, x = small(name), small("learned"), some_bytes(2, 40)
    given = torch.rand(2, 40) < 0.5
    given[:, 0] = True
    for logits, _, _, a in model(x), model(x, given):
        torch.testing.assert_close(logits, learned(x, a)[0])
    assert torch.equal(a, given)


def test_uniform_is_evenly_spaced_and_random_keeps_the_rate():
    x = some_bytes(64, 40)
    uniform, random = (small(name).rule(x, torch.rand(x.shape, generator=torch.Generator().manual_seed(0))) for name in ("uniform", "random"))
    assert uniform.sum(1).tolist() == [12] * 64 and set(uniform[0].nonzero()[:, 0].diff().tolist()) == {3, 4}
    assert random.float().mean() == pytest.approx(0.3, abs=0.03)


def test_whitespace_marks_the_first_byte_after_a_word():
    text = "Hello, wörld 42\n\n  x=1".encode()  # SpaceByte's rule splits before the ö, whose first byte is no letter to it
    a = small("whitespace").rule(torch.tensor([[BOS, *text]]), None)[0, 1:].tolist()
    assert [i for i, here in enumerate(a) if here] == [text.index(z) for z in (b", ", "ö".encode(), b" 42", b"\n", b"=")]
    word = [byte < 128 and chr(byte).isalnum() or 128 <= byte < 192 for byte in range(256)]
    a = small("whitespace").rule(torch.tensor([[BOS, *(z for byte in range(256) for z in b"a%c" % byte)]]), None)[0, 1:]
    assert a[1::2].tolist() == [not here for here in word] and a[2::2].sum() == 0  # each byte after a letter; a letter after each


def test_bpe_marks_are_the_papers_example_and_survive_bytes_that_are_no_text(toy_bpe):
    assert "".join("|" * k + c for c, k in zip("hello_tokenization", prepare.bpe_marks(b"hello_tokenization"))) == "hello|_token|ization"
    assert prepare.bpe_marks(b"he\xffhe\xe2\x82").tolist() == [0, 0, 1, 1, 0, 1, 1]


def test_prepare_stores_the_whole_documents_marks_though_interrupted(toy_bpe, tmp_path, monkeypatch):
    """40 documents of merges and noise, in shards of 64 bytes; the first try dies at its fifth rename."""
    random, source, documents = Random(0), tmp_path / "source", []
    source.mkdir()
    for i in range(40):
        words = [random.choice(["hello", "_token", "ization", "he", "x", "\n", "ä"]) for _ in range(random.randrange(40))]
        documents.append("".join(words).encode())
        (source / f"{i:02d}").write_bytes(documents[-1])
    arguments = ["--dataset=files", f"--input={source}", "--seq_len=16", "--shard_bytes=64", "--bpe", "--val_fraction=0.3",
                 f"--out_dir={tmp_path}/set"]
    renames = iter(range(5))

    def replace(*paths, replace=os.replace):
        next(renames)
        replace(*paths)

    with monkeypatch.context() as patched, pytest.raises(StopIteration):
        patched.setattr(os, "replace", replace)
        prepare.main(arguments)
    prepare.main(arguments)
    expected = {}  # each row's bytes -> marks, from the whole documents
    for document in documents:
        for start in range(0, len(document) - 15, 16):
            expected.setdefault(document[start : start + 16], []).append(prepare.bpe_marks(document)[start : start + 16].tolist())
    seen = 0
    for shard in (tmp_path / "set").glob("*.bin"):
        rows = np.fromfile(shard, np.uint8).reshape(-1, 16)
        marks = np.unpackbits(np.fromfile(shard.with_suffix(".bpe"), np.uint8)).reshape(-1, 16)
        assert all(mark.tolist() in expected[row.tobytes()] for row, mark in zip(rows, marks))
        seen += len(rows)
    assert seen == sum(len(document) // 16 for document in documents)
    meta = json.loads((tmp_path / "set/meta.json").read_text())
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "set").glob("*.b*")}
    assert digests == meta["train"]["sha256"] | meta["val"]["sha256"]


def test_no_vocabulary_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: 1 / 0)
    (tmp_path / "text").write_text("hello " * 100)
    with pytest.raises(SystemExit) as stopped:
        prepare.main(["--dataset=files", f"--input={tmp_path}/text", "--seq_len=16", "--bpe", f"--out_dir={tmp_path}/set"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and "TIKTOKEN_CACHE_DIR" in error


def gradients(name, rows, wrap):
    """What two times train.py's backward leaves of these of four rows; wrap makes of the model what train.py calls."""
    model, a = small(name).train(), torch.rand(4, 40, generator=torch.Generator().manual_seed(2)) < 0.3
    a[:, 0] = True
    x, y, u = some_bytes(4, 41)[:, :-1], some_bytes(4, 41)[:, 1:], torch.rand(4, 40, generator=torch.Generator().manual_seed(3))
    passes = [(x[rows], y[rows], a[rows] if name == "bpe" else None, u[rows])]
    h = SimpleNamespace(**train.DEFAULTS | {"boundaries": name})
    net = wrap(model)
    for _ in range(2):  # DistributedDataParallel tells of a parameter without a gradient when the next step begins
        train.backward(net, model, passes, False, h, nullcontext(), torch.amp.GradScaler("cpu", enabled=False))
    return [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("name", ["gumbel", "hnet"])
def test_training_adds_a_systems_own_loss(name):
    model, x, y = small(name).train(), some_bytes(4, 41)[:, :-1], some_bytes(4, 41)[:, 1:]
    logits, _, l, a = model(x, u=torch.rand(4, 40, generator=torch.Generator().manual_seed(3)))
    (2 * (F.cross_entropy(logits.flatten(0, 1), y.flatten()) + model.boundary_loss(l, a))).backward()
    expected = [p.grad for p in model.parameters() if p.requires_grad]
    torch.testing.assert_close(gradients(name, slice(4), lambda model: model), expected, atol=1e-6, rtol=1e-4)


def one_of_two(rank, store, results):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    grads = {name: gradients(name, slice(2 * rank, 2 * rank + 2), DistributedDataParallel) for name in SYSTEMS}
    if rank == 0:
        torch.save(grads, results)
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_give_every_system_the_mean_of_their_gradients(tmp_path):
    mp.spawn(one_of_two, args=(tmp_path / "store", tmp_path / "results"), nprocs=2)
    for name, grads in torch.load(tmp_path / "results").items():
        halves = [gradients(name, slice(2 * rank, 2 * rank + 2), lambda model: model) for rank in (0, 1)]
        for got, one, other in zip(grads, *halves):
            torch.testing.assert_close(got, (one + other) / 2, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("name", ["random", "gumbel", "hnet"])
def test_a_compiled_step_of_a_system_is_compiled_once_though_the_number_of_tokens_varies(name):
    from torch._dynamo.testing import CompileCounterWithBackend
    torch._dynamo.reset()  # of what other tests compiled
    net, counter, compiled = small(name).train(), CompileCounterWithBackend("eager"), []
    train.compile_blocks(net, backend=counter)
    for rate in 0.3, 0.1, 0.9, 0.5, 1.0, 0.0:
        a = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) < rate
        a[:, 0] = True
        net(some_bytes(2, 40), a)[0].sum().backward()
        compiled.append(counter.frame_count)
    assert compiled[0] == compiled[-1] == 2  # byte layers and token layers


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_trains_resumes_and_writes(name, toy_bpe, tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(32, 127)) * 100)
    (tmp_path / "more").write_bytes(b"hello_tokenization " * 300)
    inputs = [f"{tmp_path}/text", f"{tmp_path}/more"]
    prepare.main(["--dataset=files", "--input", *inputs, "--seq_len=32", "--bpe", "--val_fraction=0.5", f"--out_dir={tmp_path}/set"])
    flags = [*TINY, f"--data={tmp_path}/set", f"--boundaries={name}", f"--out_dir={tmp_path}/out"]
    train.main([*flags, f"--training_bytes={4 * 4 * 32}"])
    train.main([*flags, f"--training_bytes={8 * 4 * 32}", "--resume=True"])
    log = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in log if "auto" in r] == list(range(1, 9)) and 0 < log[-1]["val_bpb"] < 9
    model, saved = m.load_checkpoint(tmp_path / "out/ckpt.pt")
    assert type(model) is SYSTEMS[name] and len(list(model.generate(some_bytes(1, 3), 5))) == 7


@pytest.mark.parametrize("name", ["learned", "gumbel", "hnet"])
def test_a_taught_model_reads_what_its_teacher_draws_and_is_no_larger(name, tmp_path):
    teacher, path, x, u = small(name, policy_softcap=0.5), tmp_path / "ckpt.pt", some_bytes(2, 40), torch.rand(2, 40)
    others = dict.fromkeys(("config", "optimizer", "scaler", "step", "rows_seen"))  # what a checkpoint has beside these
    torch.save(others | {"model": teacher.state_dict(), "model_config": asdict(teacher.config)}, path)
    taught = small(str(path)).train()
    drawn = teacher.eval()(x, u=u)[3]
    assert torch.equal(taught(x, u=u)[3], drawn) and 2 < drawn.sum() < 78
    assert sum(p.numel() for p in taught.parameters()) == sum(p.numel() for p in small("uniform").parameters())


def test_a_taught_model_trains_and_says_where_its_teacher_went(data, trained, tmp_path):
    teacher = shutil.copy(trained / "ckpt.pt", tmp_path / "teacher.pt")
    train.main([*TINY, f"--data={data}", f"--boundaries={teacher}", f"--out_dir={tmp_path}", "--training_bytes=512"])
    assert type(m.load_checkpoint(tmp_path / "ckpt.pt")[0]) is Taught
    os.remove(teacher)
    with pytest.raises(FileNotFoundError, match="no checkpoint .*teacher.pt"):
        m.load_checkpoint(tmp_path / "ckpt.pt")


def test_a_stored_mark_lies_on_the_byte_it_marks():
    text = b"hello_tokenization______"
    row, bits = (np.frombuffer(text, np.uint8)[None], np.packbits([c in b"_i" for c in text])[None])
    x, y, a = train.fetch(([row], [bits]), [0])
    assert bytes(y[0].tolist()) == text and a[0, 0]
    assert a[0, 1:].tolist() == [byte in b"_i" for byte in x[0, 1:].tolist()]


def test_a_model_with_bpe_boundaries_marks_what_the_bytes_read_so_far_tell(toy_bpe):
    text = "hello_tokön".encode()
    a = small("bpe").rule(torch.tensor([[BOS, *text]]), None)[0, 1:].tolist()
    expected = [bool(prepare.bpe_marks(text[: i + 1])[-1]) for i in range(len(text))]
    assert expected[9] and expected[0] is False  # the first half of an ö is no character: a token of its own ...
    assert a == expected[:9] + [False] + expected[10:]  # ... that the next byte takes back


def test_gumbel_starts_at_the_target_and_hnet_at_what_neighbouring_bytes_have_in_common():
    x, config = some_bytes(2, 40), dict(seq_len=40, embedding_dim=16, num_heads=2, downsample_rate_target=0.3)
    gumbel, hnet = (m.make_model(ModelConfig(**config, boundaries=name)) for name in ("gumbel", "hnet"))
    torch.testing.assert_close(gumbel(x)[2].sigmoid(), torch.full((2, 40), 0.3))
    X = hnet.encode(x)
    p = (1 - F.cosine_similarity(X[:, 1:], X[:, :-1], dim=-1)) / 2
    torch.testing.assert_close(hnet(x)[2][:, 1:].sigmoid(), p, atol=2e-6, rtol=1e-4)
    assert not hnet.residual.weight.any()


def test_gumbel_computes_its_equations_position_by_position_forward_and_gradient():
    """Straight-through draws as u < p; the mean over a segment with the authors' weights, 1 - s + c_i for a position i of
    segment s, c_i the boundaries before it; a null token first; a token reaches the positions from its last byte on."""
    model, x, u, N = small("gumbel"), some_bytes(1, 30), torch.rand(1, 30), 30
    logits, _, l, a = model(x, u=u)
    X = model.encode(x)
    logit = model.boundary_mlp(model.early_norm(X))[0, :, 0]
    soft = ((logit - (u[0] / (1 - u[0])).log()) / 0.5).sigmoid()
    hard = [True] + [bool(u[0, i] < logit[i].sigmoid()) for i in range(1, N)]
    assert hard == (a[0] > 0.5).tolist() and 3 < sum(hard) < 27
    torch.testing.assert_close(l[0], logit)
    drawn = [float(hard[i]) + soft[i] - soft[i].detach() for i in range(N)]
    ends, tokens = [i for i in range(N) if hard[i]], [model.null]
    for s, end in enumerate(ends[1:], 1):
        members = range(ends[s - 1] + 1, end + 1)
        weights = [1 - s + sum(drawn[:i]) for i in members]
        tokens.append(sum(w * X[0, i] for w, i in zip(weights, members)) / sum(weights))
    y = model.run(model.middle, torch.stack(tokens)[None], torch.tensor([ends]))[0]
    Y = torch.stack([X[0, i] + y[sum(hard[: i + 1]) - 1] for i in range(N)])
    expected = model.decode(Y[None])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    weights = torch.randn_like(logits)
    parameters = [model.boundary_mlp[0].weight, model.boundary_mlp[2].bias, model.null, model.embedding.weight]
    for one, other in zip(*(torch.autograd.grad((o * weights).sum(), parameters) for o in (logits, expected))):
        assert one.abs().max() > 1e-6
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_gumbels_prior_is_the_binomials_logarithm_forward_and_gradient():
    model, a = small("gumbel"), (torch.rand(3, 40) < 0.4).float().requires_grad_()
    loss = model.boundary_loss(None, a)
    expected = 0
    for k in a[:, 1:].sum(1).tolist():
        k = round(k)
        expected -= math.log(math.comb(39, k) * 0.3**k * 0.7 ** (39 - k)) / 40 / 3
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    more = model.boundary_loss(None, torch.cat((a[:, :1], a[:, 1:] + 1e-2 / 39), 1)) - loss  # its slope, by finite difference
    assert torch.autograd.grad(loss, a)[0][:, 1:].sum().item() / 39 * 1e-2 == pytest.approx(more.item(), rel=0.05, abs=1e-6)


def test_hnet_computes_its_equations_position_by_position_forward_and_gradient():
    model, x = small("hnet"), some_bytes(1, 30)
    logits, _, l, a = model(x)
    X = model.encode(x)
    p = [torch.ones(())]
    for i in range(1, 30):
        q, k = model.q.weight @ X[0, i], model.k.weight @ X[0, i - 1]
        p.append((1 - q @ k / q.norm() / k.norm()) / 2)
    at = [i for i in range(30) if p[i] >= 0.5]
    assert at == a[0].nonzero()[:, 0].tolist() and 3 < len(at) < 28
    torch.testing.assert_close(l[0].sigmoid(), torch.stack(p), atol=1e-5, rtol=0)
    y = model.run(model.middle, X[:, at], torch.tensor([at]))[0]
    Y, z, t = [], None, -1
    for i in range(30):
        if i in at:
            t += 1
            z = y[t] if z is None else p[i] * y[t] + (1 - p[i]) * z
        confidence = p[i] if i in at else 1 - p[i]
        Y.append((confidence + (1 - confidence).detach()) * z + model.residual.weight @ X[0, i])
    expected = model.decode(torch.stack(Y)[None])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    weights = torch.randn_like(logits)
    parameters = [model.q.weight, model.k.weight, model.residual.weight, model.embedding.weight]
    for one, other in zip(*(torch.autograd.grad((o * weights).sum(), parameters) for o in (logits, expected))):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_hnets_ratio_loss_is_least_where_the_rate_is_the_target():
    model = small("hnet", downsample_rate_target=0.25)
    losses = []
    for rate in 0.15, 0.25, 0.35:
        a = (torch.arange(1000) < 1000 * rate)[None]
        p = torch.full((1, 1000), rate, requires_grad=True)
        loss = model.boundary_loss(torch.logit(p), a)
        losses.append(loss.item())
        assert torch.autograd.grad(loss, p)[0].mean().sign().item() == (rate > 0.25) - (rate < 0.25)
    assert losses[1] == min(losses) == pytest.approx(0.03)
