import contextlib
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experiments import evaluate
from model import BOS, ModelConfig, load_checkpoint, make_model

ROWS = {
    "piqa": {"goal": "Boil an egg", "sol1": "Freeze it.", "sol2": "Use hot water.", "label": 1},
    "hellaswag": {"activity_label": "Baking", "ctx_b": "the Cook", "ctx": "unused", "label": "0",
                  "ctx_a": "How to bake [title] Mix. [step] Two  cups.",
                  "endings": ["stirs [substeps] it. ", "sleeps.", "[header] runs", "é"]},
    "arc_easy": {"question": "Which is hot?", "answerKey": "2",
                 "choices": {"text": ["ice", "fire", "snow"], "label": ["1", "2", "3"]}},
    "lambada": {"text": 'He said "no.\n\nI saw Ann'},
}
READ = {
    "piqa": ("Question: Boil an egg\nAnswer:", [" Freeze it.", " Use hot water."], 1),
    "hellaswag": ("Baking: How to bake. Mix. Two cups. The cook",
                  [" stirs it.", " sleeps.", "  runs", " é"], 0),
    "arc_easy": ("Question: Which is hot?\nAnswer:", [" ice", " fire", " snow"], 1),
    "lambada": ('He said "no.\n\nI saw', [" Ann"], 0),
}
CONTEXT, ANSWER, LONG = b"the quick brown fox jumps over ", b"the lazy dog", bytes(range(60, 101))
ITEMS = [(b"", [b"a"], 0), (CONTEXT, [ANSWER, b"!"], 0), (b"context", [LONG], 0),
         (b"ab", [b"cd", bytes(16)], 1)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny(boundaries):
    """A model of rows of 16 bytes whose boundaries depend on what it reads."""
    torch.manual_seed(0)
    config = ModelConfig(seq_len=16, embedding_dim=16, num_heads=2, n_down_layers=1, n_mid_layers=1,
                         n_up_layers=1, attention_window=4, policy_window=2, policy_scale=1.0,
                         boundaries=boundaries)
    model = make_model(config)
    torch.nn.init.normal_(model.policy.weight)
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


def score(model, items, batch_size):
    return evaluate.score(model, items, batch_size, contextlib.nullcontext())


@torch.no_grad()
def byte_by_byte(model, item, seen, answer):
    """Bits of the answer after the bytes seen: no batch, no padding, a pass a byte."""
    text, bits, tokens = seen + answer, 0.0, 0
    u = torch.from_numpy(np.random.default_rng(item).random(len(text), np.float32))
    for i, byte in enumerate(text):
        x, y = torch.tensor([[BOS, *text[:i]]]), torch.tensor([[*text[:i], byte]])
        logp, _, _, a = model(x, y, u[None, None, : i + 1])
        tokens += a[0, 0, i].item()
        if i >= len(seen):
            bits -= logp[0, 0, i].item() / math.log(2)
    return bits, tokens, len(text)


@pytest.mark.parametrize("boundaries", ["learned", "uniform"])
def test_a_score_is_what_reading_byte_by_byte_gives_whatever_the_batch(boundaries):
    model = tiny(boundaries)
    reads = [[[(0, b"", b"a")]],
             [[(1, CONTEXT[-4:], ANSWER)], [(1, CONTEXT[-15:], b"!")]],  # a context's last bytes
             [[(2, b"", LONG[:16]), (2, b"", LONG[16:32]), (2, LONG[25:32], LONG[32:])]],  # pieces
             [[(3, b"ab", b"cd")], [(3, b"", bytes(16))]]]
    done = [[[byte_by_byte(model, *read) for read in choice] for choice in item] for item in reads]
    all_reads = [read for item in done for choice in item for read in choice]
    for batch_size in 1, 3, 100:
        bits, rate = score(model, ITEMS, batch_size)
        for got, item in zip(bits, done, strict=True):
            expected = [sum(read[0] for read in choice) for choice in item]
            np.testing.assert_allclose(got, expected, rtol=1e-5)
        assert rate == sum(read[1] for read in all_reads) / sum(read[2] for read in all_reads)


def test_the_standard_error_is_the_bootstraps():
    random = np.random.default_rng(0)
    sizes = random.integers(1, 40, 400)
    bits = sizes * random.normal(2, 0.3, 400) + random.normal(0, 5, 400)
    draws = random.integers(0, 400, (4000, 400))
    bootstrap = (bits[draws].sum(1) / sizes[draws].sum(1)).std()
    assert evaluate.ratio(bits, sizes)[1] == pytest.approx(bootstrap, rel=0.05)
    assert evaluate.ratio(np.array([1.0, 3.0]), np.ones(2)) == pytest.approx((2, 1))  # 2^.5 / 2^.5


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_benchmarks_prompt_is_the_harnesses(name, suffix, tmp_path):
    context, choices, right = READ[name]
    file = write(tmp_path / "rows.jsonl", [ROWS[name]] * 2)
    if suffix == "parquet":
        import datasets
        datasets.disable_progress_bars()
        datasets.Dataset.from_list([ROWS[name]] * 2).to_parquet(tmp_path / "rows.parquet")
    items = evaluate.read_items(f"{name}={file.with_suffix('.' + suffix)}", 16)
    assert items == [(context.encode(), [choice.encode() for choice in choices], right)] * 2


def test_the_choice_of_fewest_bits_per_byte_counts_and_only_the_right_one_is_averaged(monkeypatch):
    items = [(b"", [bytes(2), bytes(10)], 1), (b"", [bytes(4), bytes(8)], 1),
             (b"", [bytes(3), bytes(2)], 0)]
    bits = [np.array([6.0, 20.0]), np.array([4.0, 12.0]), np.array([3.0, 8.0])]
    monkeypatch.setattr(evaluate, "score", lambda *_: (bits, 0.25))
    line = evaluate.evaluate(None, "piqa", items, 1, None)  # per byte 3 and 2, 1 and 1.5, 1 and 4
    assert line["accuracy"] == 2 / 3 and line["bits_per_byte"] == 35 / 21 and line["bytes"] == 21


def test_held_out_rows_cost_what_the_model_says(trained, data, tmp_path, capsys):
    lambada = write(tmp_path / "lambada.jsonl", [ROWS["lambada"], {"text": "a b"}])
    model, saved = load_checkpoint(trained / "ckpt.pt")
    for weights in model.head.weight, model.policy.weight:  # else all bytes are almost alike
        torch.nn.init.normal_(weights.data, generator=torch.Generator().manual_seed(0))
    torch.save(saved | {"model": model.state_dict()}, tmp_path / "ckpt.pt")
    evaluate.main([f"{tmp_path}/ckpt.pt", f"heldout={data}", f"lambada={lambada}"])
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert header == "| task | items | bytes | bits per byte | standard error | accuracy | rate |"
    held_out, last_words = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert last_words[1:3] == ["2", str(len(" Ann b"))] and last_words[5] == ""

    text, nats = b"".join(path.read_bytes() for path in sorted(data.glob("val_*.bin"))), 0
    for i in range(0, len(text), 32):
        y = torch.tensor([[*text[i : i + 32]]])
        u = torch.from_numpy(np.random.default_rng(i // 32).random((1, 1, 32), np.float32))
        with torch.no_grad():
            nats -= model(F.pad(y[:, :-1], (1, 0), value=BOS), y, u)[0].sum().item()
    assert held_out[1:3] == [str(len(text) // 32), str(len(text))]
    assert held_out[3] == f"{nats / math.log(2) / len(text):.4f}"


@pytest.mark.parametrize("arguments, message", [
    (["no/such.pt", "piqa"], "no checkpoint no/such.pt; train.py makes one"),
    (["{trained}", "boolq"], "unknown task 'boolq'; there are piqa, hellaswag, arc_easy, lambada"),
    (["{trained}", "piqa=no/such.jsonl"], "piqa: cannot read no/such.jsonl"),
    (["{trained}", "piqa={tmp}/broken.jsonl"], "piqa: cannot read {tmp}/broken.jsonl"),
    (["{trained}", "piqa={tmp}/gap.jsonl"], "row 2 of {tmp}/gap.jsonl is no row of piqa"),
    (["{trained}", "piqa={tmp}/hidden.jsonl"], "row 1 of {tmp}/hidden.jsonl is no row of piqa"),
    (["{trained}", "lambada={tmp}/one.jsonl"], "one.jsonl holds 1 items; a standard error takes"),
    (["{trained}", "piqa"], "(ConnectionError: no network); give a .json, .jsonl or .parquet file"),
    (["{trained}", "heldout={tmp}"], "no {tmp}/meta.json"),
    (["{trained}", "heldout={data}", "--batch_size=0"], "--batch_size=0 is not positive")])
def test_a_mistake_is_one_line(arguments, message, trained, data, tmp_path, monkeypatch, capsys):
    import datasets
    load = datasets.load_dataset

    def offline(path, **where):
        if path == "ybisk/piqa":
            raise ConnectionError("no\nnetwork")
        return load(path, **where)

    monkeypatch.setattr("datasets.load_dataset", offline)
    (tmp_path / "broken.jsonl").write_text('{"goal": \n')
    write(tmp_path / "gap.jsonl", [ROWS["piqa"], {"goal": "a", "sol2": "b"}])
    write(tmp_path / "hidden.jsonl", [ROWS["piqa"] | {"label": -1}])
    write(tmp_path / "one.jsonl", [ROWS["lambada"]])
    names = {"tmp": tmp_path, "trained": trained / "ckpt.pt", "data": data}
    with pytest.raises(SystemExit) as stopped:
        evaluate.main([argument.format(**names) for argument in arguments])
    out, error = capsys.readouterr()
    assert stopped.value.code == 2 and error.count("\n") == 1 and not out
    assert message.format(**names) in error
