import contextlib
import json
import math
import re

import numpy as np
import pytest
import torch

import train
from configurator import UserError
from experiments import evaluate
from model import make_model
from model import BOS

ROWS = {
    "piqa": {"goal": "Boil an egg", "sol1": "Freeze it.", "sol2": "Use hot water.", "label": 1},
    "hellaswag": {"activity_label": "Baking", "ctx_b": "the Cook", "ctx": "unused", "label": "0",
                  "ctx_a": "How to bake [title] Mix. [step] Two  cups.",
                  "endings": ["stirs [substeps] it. ", "sleeps.", "[header] runs", "é"]},
    "arc_easy": {"question": "Which is hot?", "answerKey": "2",
                 "choices": {"text": ["ice", "fire", "snow"], "label": ["1", "2", "3"]}},
    "lambada": {"text": 'He said "no.\n\nI saw Ann'}}
PROMPTS = {  # what the harness makes of them
    "piqa": ("Question: Boil an egg\nAnswer:", [" Freeze it.", " Use hot water."], 1),
    "hellaswag": ("Baking: How to bake. Mix. Two cups. The cook",
                  [" stirs it.", " sleeps.", "  runs", " é"], 0),
    "arc_easy": ("Question: Which is hot?\nAnswer:", [" ice", " fire", " snow"], 1),
    "lambada": ('He said "no.\n\nI saw', [" Ann"], 0)}


@pytest.mark.parametrize("name, suffix", [*zip(ROWS, ["jsonl", "parquet"] * 2)])
def test_prompts_are_those_of_the_harness(name, suffix, tmp_path):
    import datasets
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([ROWS[name]] * 2)
    file = tmp_path / f"rows.{suffix}"
    rows.to_parquet(file) if suffix == "parquet" else rows.to_json(file)
    context, answers, right = PROMPTS[name]
    item = context.encode(), [answer.encode() for answer in answers], right
    assert evaluate.read_items(f"{name}={file}", 16) == [item, item]


@torch.no_grad()
def byte_by_byte(model, item, context, answer):
    """The answer's bits, and the tokens: one pass per byte."""
    text = context + answer
    u = torch.from_numpy(np.random.default_rng(item).random((1, len(text)), np.float32))
    bits = tokens = 0
    for i, byte in enumerate(text):
        x = torch.tensor([[BOS, *text[:i]]])
        y = torch.tensor([[*text[:i], byte]])
        logp, _, _, a = model(x, y, u[:, : i + 1])
        tokens += a[0, i].item()
        if i >= len(context):
            bits -= logp[0, i].item() / math.log(2)
    return bits, tokens


@pytest.mark.parametrize("context, read, answer", [
    (b"", b"", b"a"),
    (b"the quick brown fox jumps over ", b"ver ", b"the lazy dog"),  # the row holds 16 bytes
    (b"ab", b"", bytes(range(60, 101)))])
@pytest.mark.parametrize("system", ["learned", "uniform"])
def test_scores_are_those_of_reading_byte_by_byte(system, context, read, answer):
    torch.manual_seed(0)
    model = make_model(train.Hyperparameters(
        seq_len=16, embedding_dim=16, n_mid_layers=1, policy_window=2, policy_scale=1.0,
        system=system)).eval()
    torch.nn.init.normal_(model.head.linear.weight)
    if system == "learned":
        torch.nn.init.normal_(model.policy.linear.weight)
    bits, tokens, size = evaluate.score(model, context, answer, 7, contextlib.nullcontext())
    expected, expected_tokens = byte_by_byte(model, 7, read, answer)
    assert bits == pytest.approx(expected, rel=1e-5)
    assert (tokens, size) == (expected_tokens, len(read + answer))


def test_the_standard_error_is_that_of_a_bootstrap():
    random = np.random.default_rng(0)
    sizes = random.integers(1, 40, 400)
    bits = sizes * random.normal(2, 0.3, 400) + random.normal(0, 5, 400)
    draws = random.integers(0, 400, (4000, 400))
    bootstrap = (bits[draws].sum(1) / sizes[draws].sum(1)).std()
    assert evaluate.ratio(bits, sizes)[1] == pytest.approx(bootstrap, rel=0.05)
    assert evaluate.ratio(np.array([1.0, 3.0]), np.ones(2)) == pytest.approx((2, 1))  # 2^.5 / 2^.5


def test_accuracy_counts_bits_per_byte_and_only_right_answers_are_averaged(monkeypatch):
    items = [(b"", [bytes(2), bytes(10)], 1), (b"", [bytes(4), bytes(8)], 1),
             (b"", [bytes(3), bytes(2)], 0)]
    scores = iter([(6.0, 1, 4), (20.0, 1, 4), (4.0, 1, 4), (12.0, 1, 4), (3.0, 2, 8), (8.0, 3, 8)])
    monkeypatch.setattr(evaluate, "score", lambda *_: next(scores))
    line = evaluate.evaluate(None, items, None)  # per byte 3 and 2, 1 and 1.5, 1 and 4
    assert line[:3] == ["3", "21", "1.6667"] and line[4:] == ["0.6667", "0.2812"]


def test_validation_rows_are_all_of_the_split(trained, data, capsys):
    evaluate.main([f"{trained}/ckpt.pt", f"heldout={data}"])
    line = capsys.readouterr().out.splitlines()[2]
    size = sum(path.stat().st_size for path in data.glob("val_*.bin"))
    assert line.startswith(f"| heldout={data} | {size // 32} | {size} | ")


@pytest.mark.parametrize("arguments, message", [
    (["no/such.pt", "piqa"], "there is no checkpoint no/such.pt"),
    (["{trained}", "boolq"], "unknown task 'boolq'; use piqa, hellaswag, arc_easy, lambada or"),
    (["{trained}", "piqa=no/such.jsonl"], "piqa: cannot read no/such.jsonl"),
    (["{trained}", "piqa={tmp}/gap.jsonl"], "cannot read {tmp}/gap.jsonl (KeyError: 'sol1')"),
    (["{trained}", "piqa={tmp}/hidden.jsonl"], "(ValueError: the label is hidden)"),
    (["{trained}", "piqa"], "(ConnectionError: no network); give a .json, .jsonl or .parquet"),
    (["{trained}", "heldout={tmp}"], "no {tmp}/meta.json")])
def test_mistakes_are_explained(arguments, message, trained, tmp_path, monkeypatch):
    import datasets
    load = datasets.load_dataset

    def offline(path, **options):
        if path == "baber/piqa":
            raise ConnectionError("no network")
        return load(path, **options)

    monkeypatch.setattr(datasets, "load_dataset", offline)
    (tmp_path / "gap.jsonl").write_text(json.dumps({"goal": "a", "sol2": "b"}))
    (tmp_path / "hidden.jsonl").write_text(json.dumps(ROWS["piqa"] | {"label": -1}))
    names = {"tmp": tmp_path, "trained": trained / "ckpt.pt"}
    with pytest.raises(UserError, match=re.escape(message.format(**names))):
        evaluate.main([argument.format(**names) for argument in arguments])
