import contextlib
import json
import math

import numpy as np
import pytest
import torch

from experiments import evaluate
from model import BOS, make_model

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
    """The answer's bits, and the tokens: one pass per byte, without batches and padding."""
    text = context + answer
    u = torch.from_numpy(np.random.default_rng(item).random(len(text), np.float32))
    bits = tokens = 0
    for i, byte in enumerate(text):
        x = torch.tensor([[BOS, *text[:i]]])
        y = torch.tensor([[*text[:i], byte]])
        logp, _, _, a = model(x, y, u[None, None, : i + 1])
        tokens += a[0, 0, i].item()
        if i >= len(context):
            bits -= logp[0, 0, i].item() / math.log(2)
    return bits, tokens


@pytest.mark.parametrize("boundaries", ["learned", "uniform"])
def test_scores_are_those_of_reading_byte_by_byte(boundaries, monkeypatch):
    monkeypatch.setattr(evaluate, "BATCH_SIZE", 3)
    torch.manual_seed(0)
    model = make_model({
        "seq_len": 16, "embedding_dim": 16, "num_heads": 2, "n_down_layers": 1, "n_mid_layers": 1,
        "n_up_layers": 1, "attention_window": 4, "policy_window": 2, "policy_scale": 1.0,
        "boundaries": boundaries}).eval()
    torch.nn.init.normal_(model.head.linear.weight)
    if boundaries == "learned":
        torch.nn.init.normal_(model.policy.linear.weight)
    context, long = b"the quick brown fox jumps over ", bytes(range(60, 101))
    items = [(b"", [b"a"], 0), (context, [b"the lazy dog", b"!"], 0), (b"ab", [long, b"cd"], 1)]
    reads = [[(0, b"", b"a")],
             [(1, context[-4:], b"the lazy dog"), (1, context[-15:], b"!")],  # 16 bytes
             [(2, b"", long), (2, b"ab", b"cd")]]
    bits, rate = evaluate.score(model, items, contextlib.nullcontext())
    all_bytes = all_tokens = 0
    for item, item_bits in zip(reads, bits, strict=True):
        for read, got in zip(item, item_bits, strict=True):
            expected, tokens = byte_by_byte(model, *read)
            assert got == pytest.approx(expected, rel=1e-5)
            all_tokens += tokens
            all_bytes += len(read[1] + read[2])
    assert rate == all_tokens / all_bytes


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
    bits = [np.array([6.0, 20.0]), np.array([4.0, 12.0]), np.array([3.0, 8.0])]
    monkeypatch.setattr(evaluate, "score", lambda *_: (bits, 0.25))
    line = evaluate.evaluate(None, items, None)  # per byte 3 and 2, 1 and 1.5, 1 and 4
    assert line[:3] == ["3", "21", "1.6667"] and line[4:] == ["0.6667", "0.2500"]


def test_validation_rows_are_all_of_the_split(trained, data, capsys):
    evaluate.main([f"{trained}/ckpt.pt", f"heldout={data}"])
    _, _, line = capsys.readouterr().out.splitlines()
    size = sum(path.stat().st_size for path in data.glob("val_*.bin"))
    assert line.startswith(f"| heldout={data} | {size // 32} | {size} | ")


@pytest.mark.parametrize("arguments, message", [
    (["no/such.pt", "piqa"], "there is no checkpoint no/such.pt"),
    (["{trained}", "boolq"], "unknown task 'boolq'; use piqa, hellaswag, arc_easy, lambada or"),
    (["{trained}", "piqa=no/such.jsonl"], "piqa: cannot read no/such.jsonl"),
    (["{trained}", "piqa={tmp}/gap.jsonl"], "cannot read {tmp}/gap.jsonl (KeyError: 'sol1')"),
    (["{trained}", "piqa={tmp}/hidden.jsonl"], "(ValueError: the label is hidden)"),
    (["{trained}", "piqa"], "(ConnectionError: no network); give a .json, .jsonl or .parquet file"),
    (["{trained}", "heldout={tmp}"], "no {tmp}/meta.json")])
def test_mistakes_give_one_line(arguments, message, trained, tmp_path, monkeypatch, capsys):
    import datasets
    load = datasets.load_dataset

    def offline(path, **options):
        if path == "baber/piqa":
            raise ConnectionError("no\nnetwork")
        return load(path, **options)

    monkeypatch.setattr(datasets, "load_dataset", offline)
    (tmp_path / "gap.jsonl").write_text(json.dumps({"goal": "a", "sol2": "b"}))
    (tmp_path / "hidden.jsonl").write_text(json.dumps(ROWS["piqa"] | {"label": -1}))
    names = {"tmp": tmp_path, "trained": trained / "ckpt.pt"}
    with pytest.raises(SystemExit) as stopped:
        evaluate.main([argument.format(**names) for argument in arguments])
    out, error = capsys.readouterr()
    assert stopped.value.code == 2 and error.count("\n") == 1 and not out
    assert message.format(**names) in error
