import contextlib
import json
import math
import shutil
import statistics

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experiments import evaluate, words
from model import BOS, ModelConfig, load_checkpoint, make_model

ROWS = {
    "piqa": {"goal": "Boil an egg", "sol1": "Freeze it.", "sol2": "Use hot water.", "label": 1},
    "hellaswag": {"ind": 4, "activity_label": "Baking", "ctx_a": "How to bake [title] Mix. [step] Two  cups.",
                  "ctx_b": "the Cook", "ctx": "unused",
                  "endings": ["stirs [substeps] it. ", "sleeps.", "[header] runs", "é"], "label": "0"},
    "arc_easy": {"id": "x", "question": "Which is hot?", "choices": {"text": ["ice", "fire", "snow"], "label": ["1", "2", "3"]},
                 "answerKey": "2"},
    "lambada": {"text": 'He said "no.\n\nI saw Ann'},
}
READ = {
    "piqa": ("Question: Boil an egg\nAnswer:", [" Freeze it.", " Use hot water."], 1),
    "hellaswag": ("Baking: How to bake. Mix. Two cups. The cook", [" stirs it.", " sleeps.", "  runs", " é"], 0),
    "arc_easy": ("Question: Which is hot?\nAnswer:", [" ice", " fire", " snow"], 1),
    "lambada": ('He said "no.\n\nI saw', [" Ann"], 0),
}
CONTEXT, ANSWER, LONG = b"the quick brown fox jumps over ", b"the lazy dog", bytes(range(60, 101))
ITEMS = [(b"", [b"a"], 0), (CONTEXT, [ANSWER, b"!"], 0), (b"context", [LONG], 0), (b"ab", [b"cd", bytes(16)], 1)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tiny(boundaries="learned"):
    """A model of rows of 16 bytes whose boundaries depend on what it reads."""
    torch.manual_seed(0)
    model = make_model(ModelConfig(seq_len=16, embedding_dim=16, num_heads=2, n_down_layers=1, n_mid_layers=1, n_up_layers=1,
                                   attention_window=4, policy_window=2, policy_scale=1.0, boundaries=boundaries))
    torch.nn.init.normal_(model.policy.weight)
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


def score(model, items, batch_size):
    return evaluate.score(model, items, batch_size, contextlib.nullcontext())


@torch.no_grad()
def byte_by_byte(model, item, seen, answer):
    """Bits of the answer after the bytes seen: no batch, no padding, each byte from what was read before it and no more."""
    text, bits, a = seen + answer, 0.0, []
    u = np.random.default_rng(item).random(len(text), np.float32)
    parts = round(16 * model.config.downsample_rate_target)
    starts = {math.ceil(16 * part / parts) for part in range(parts)}
    for i, byte in enumerate(text):
        x = torch.tensor([[BOS, *text[:i]]])
        p = model(x, a=torch.tensor([[True, *a[1:], False][: i + 1]]))[2][0, i].sigmoid().item()
        a.append(i == 0 or (i in starts if model.config.boundaries == "uniform" else u[i] < p))
        if i >= len(seen):
            bits -= model(x, a=torch.tensor([a]))[0][0, i].log_softmax(0)[byte].item() / math.log(2)
    return bits, sum(a), len(a)


@pytest.mark.parametrize("boundaries", ["learned", "uniform"])
def test_a_score_is_what_reading_byte_by_byte_gives(boundaries):
    model = tiny(boundaries)
    bits, rate = score(model, ITEMS, 3)
    reads = [[[(0, b"", b"a")]],
             [[(1, CONTEXT[-4:], ANSWER)], [(1, CONTEXT[-15:], b"!")]],  # a long context keeps its last bytes
             [[(2, b"", LONG[:16]), (2, b"", LONG[16:32]), (2, LONG[25:32], LONG[32:])]],  # a long answer goes in pieces
             [[(3, b"ab", b"cd")], [(3, b"", bytes(16))]]]
    done = [[[byte_by_byte(model, *read) for read in choice] for choice in item] for item in reads]
    for got, item in zip(bits, done, strict=True):
        np.testing.assert_allclose(got, [sum(read[0] for read in choice) for choice in item], rtol=1e-5)
    all_reads = [read for item in done for choice in item for read in choice]
    assert rate == sum(read[1] for read in all_reads) / sum(read[2] for read in all_reads)


@pytest.mark.parametrize("boundaries", ["learned", "uniform"])
def test_batch_size_and_padding_change_nothing(boundaries):
    model = tiny(boundaries)
    alone, rate = score(model, ITEMS, 1)
    for batch_size in (2, 5, 100):
        together, same_rate = score(model, ITEMS, batch_size)
        np.testing.assert_allclose(np.concatenate(together), np.concatenate(alone), rtol=1e-5)
        assert same_rate == rate


def test_the_standard_error_is_the_mean_s_where_items_are_equally_long():
    bits = np.array([30.0, 41.0, 28.0, 55.0])
    value, error = evaluate.ratio(bits, np.full(4, 20))
    assert value == pytest.approx(statistics.mean(bits / 20))
    assert error == pytest.approx(statistics.stdev(bits / 20) / 2)


def test_the_standard_error_is_the_bootstrap_s_where_they_are_not():
    random = np.random.default_rng(0)
    sizes = random.integers(1, 40, 400)
    bits = sizes * random.normal(2, 0.3, 400) + random.normal(0, 5, 400)
    draws = random.integers(0, 400, (4000, 400))
    bootstrap = (bits[draws].sum(1) / sizes[draws].sum(1)).std()
    assert evaluate.ratio(bits, sizes)[1] == pytest.approx(bootstrap, rel=0.05)


@pytest.mark.parametrize("name", ROWS)
def test_a_benchmark_s_prompt_is_the_one_in_the_docstring(name, tmp_path):
    context, choices, right = READ[name]
    file = write(tmp_path / "rows.jsonl", [ROWS[name]] * 2)
    assert evaluate.read_items(f"{name}={file}") == [(context.encode(), [choice.encode() for choice in choices], right)] * 2


def test_a_parquet_file_reads_as_json_lines_do(tmp_path):
    import datasets
    datasets.disable_progress_bars()
    datasets.Dataset.from_list([ROWS["arc_easy"]] * 2).to_parquet(tmp_path / "rows.parquet")
    file = write(tmp_path / "rows.jsonl", [ROWS["arc_easy"]] * 2)
    assert evaluate.read_items(f"arc_easy={tmp_path}/rows.parquet") == evaluate.read_items(f"arc_easy={file}")


@pytest.mark.parametrize("name, source", [
    ("piqa", {"path": "ybisk/piqa", "revision": "refs/convert/parquet", "split": "validation"}),
    ("hellaswag", {"path": "Rowan/hellaswag", "split": "validation"}),
    ("arc_easy", {"path": "allenai/ai2_arc", "name": "ARC-Easy", "split": "test"}),
    ("lambada", {"path": "EleutherAI/lambada_openai", "name": "default", "split": "test"})])
def test_a_benchmark_without_a_file_comes_from_the_hub(name, source, monkeypatch):
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda **where: asked.append(where) or [ROWS[name]] * 2)
    assert evaluate.read_items(name)[0][2] == READ[name][2]
    assert asked == [source]


def test_the_choice_of_fewest_bits_per_byte_counts_and_only_the_right_one_is_averaged(monkeypatch):
    items = [(b"", [bytes(2), bytes(10)], 1), (b"", [bytes(4), bytes(8)], 1), (b"", [bytes(3), bytes(2)], 0)]
    bits = [np.array([6.0, 20.0]), np.array([4.0, 12.0]), np.array([3.0, 8.0])]  # 3 and 2, 1 and 1.5, 1 and 4 per byte
    monkeypatch.setattr(evaluate, "score", lambda *_: (bits, 0.25))
    line = evaluate.evaluate(None, "piqa", items, 1, None)
    assert line["accuracy"] == 2 / 3 and line["bits_per_byte"] == 35 / 21 and line["bytes"] == 21


def test_held_out_rows_cost_what_the_model_says_and_the_json_has_the_table(trained, data, tmp_path, capsys):
    lambada = write(tmp_path / "lambada.jsonl", [ROWS["lambada"], {"text": "a b"}])
    model, saved = load_checkpoint(trained / "ckpt.pt")
    for weights in model.head.weight, model.policy.weight:  # so few steps left bytes and boundaries almost alike
        torch.nn.init.normal_(weights.data, generator=torch.Generator().manual_seed(0))
    torch.save(saved | {"model": model.state_dict()}, tmp_path / "ckpt.pt")
    evaluate.main([f"{tmp_path}/ckpt.pt", f"heldout={data}", f"lambada={lambada}", f"--json={tmp_path}/a.json"])
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert header == "| task | items | bytes | bits per byte | standard error | accuracy | rate |"
    results = json.loads((tmp_path / "a.json").read_text())
    for line, result in zip(lines, results, strict=True):
        cells = [f"{z:.4f}" if isinstance(z, float) else "" if z is None else str(z) for z in result.values()]
        assert line == f"| {' | '.join(cells)} |"
    assert results[1]["items"] == 2 and results[1]["bytes"] == len(" Ann b") and results[1]["accuracy"] is None

    raw = b"".join(path.read_bytes() for path in sorted(data.glob("val_*.bin")))
    nats = 0
    for i in range(0, len(raw), 32):  # the model reads 32 bytes at a time, a row has 64
        u = torch.from_numpy(np.random.default_rng(i // 64).random(32, np.float32))
        with torch.no_grad():
            logits = model(torch.tensor([[BOS, *raw[i : i + 31]]]), u=u[None])[0][0]
        nats += F.cross_entropy(logits, torch.tensor(list(raw[i : i + 32])), reduction="sum").item()
    assert results[0]["items"] == len(raw) // 64 and results[0]["bytes"] == len(raw)
    assert results[0]["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(raw), rel=1e-5)


@pytest.mark.parametrize("arguments, message", [
    (["no/such.pt", "piqa"], "no checkpoint no/such.pt; train.py makes one"),
    (["{tmp}/bad.pt", "piqa"], "bad.pt is no checkpoint of this version of train.py"),
    (["{tmp}/foreign.pt", "piqa"], "foreign.pt names no dtype of this version of train.py; train anew"),
    (["{trained}/ckpt.pt"], "task"),
    (["{trained}/ckpt.pt", "boolq"], "unknown task 'boolq'; there are piqa, hellaswag, arc_easy, lambada and heldout"),
    (["{trained}/ckpt.pt", "piqa=no/such.jsonl"], "piqa=no/such.jsonl is no .json, .jsonl or .parquet file"),
    (["{trained}/ckpt.pt", "piqa={tmp}/bad.pt"], "bad.pt is no .json, .jsonl or .parquet file"),
    (["{trained}/ckpt.pt", "piqa={tmp}/broken.jsonl"], "piqa: cannot read {tmp}/broken.jsonl"),
    (["{trained}/ckpt.pt", "piqa={tmp}/empty.jsonl"], "empty.jsonl"),
    (["{trained}/ckpt.pt", "piqa={tmp}/latin1.jsonl"], "piqa: cannot read {tmp}/latin1.jsonl"),
    (["{trained}/ckpt.pt", "piqa={tmp}/numbers.json"], "numbers.json"),
    (["{trained}/ckpt.pt", "piqa={tmp}/gap.jsonl"], "row 2 of {tmp}/gap.jsonl has no sol1, label, or of another type"),
    (["{trained}/ckpt.pt", "piqa={tmp}/hidden.jsonl"], "piqa: row 1 of {tmp}/hidden.jsonl is no row of piqa with its label"),
    (["{trained}/ckpt.pt", "hellaswag={tmp}/types.jsonl"], "hellaswag: row 1 of {tmp}/types.jsonl is no row of hellaswag"),
    (["{trained}/ckpt.pt", "hellaswag={tmp}/text.jsonl"], "hellaswag: row 1 of {tmp}/text.jsonl has no endings, or of another type"),
    (["{trained}/ckpt.pt", "lambada={tmp}/one.jsonl"], "one.jsonl holds 1 items; a standard error takes two"),
    (["{trained}/ckpt.pt", "piqa"], "ybisk/piqa (ConnectionError: no network); without a network give a file: piqa=FILE"),
    (["{trained}/ckpt.pt", "heldout"], "name a folder that prepare.py made"),
    (["{trained}/ckpt.pt", "heldout={tmp}"], "heldout={tmp}: no {tmp}/meta.json; name a folder that prepare.py made"),
    (["{trained}/ckpt.pt", "heldout={data}", "--batch_size=0"], "--batch_size=0 is not positive"),
    (["{trained}/ckpt.pt", "heldout={data}", "--json=no/such/a.json"], "no/such/a.json"),
    (["{trained}/ckpt.pt", "heldout={data}", "--wrong=1"], "--wrong=1"),
])
def test_a_mistake_on_the_command_line_is_one_line(arguments, message, trained, data, tmp_path, monkeypatch, capsys):
    import datasets
    load = datasets.load_dataset

    def offline(path, **where):
        if path == "ybisk/piqa":
            raise ConnectionError("no\nnetwork")
        return load(path, **where)

    monkeypatch.setattr("datasets.load_dataset", offline)
    (tmp_path / "bad.pt").write_text("not a checkpoint")
    torch.save(torch.load(trained / "ckpt.pt") | {"config": {}}, tmp_path / "foreign.pt")
    (tmp_path / "broken.jsonl").write_text('{"goal": \n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "latin1.jsonl").write_bytes(json.dumps(ROWS["piqa"] | {"goal": "é"}, ensure_ascii=False).encode("latin-1"))
    (tmp_path / "numbers.json").write_text("[1, 2]")
    write(tmp_path / "gap.jsonl", [ROWS["piqa"], {"goal": "a", "sol2": "b"}])
    write(tmp_path / "hidden.jsonl", [ROWS["piqa"] | {"label": -1}])
    write(tmp_path / "types.jsonl", [ROWS["hellaswag"] | {"endings": [1, 2]}])
    write(tmp_path / "text.jsonl", [ROWS["hellaswag"] | {"endings": "four"}])
    write(tmp_path / "one.jsonl", [ROWS["lambada"]])
    names = {"tmp": tmp_path, "trained": trained, "data": data}
    with pytest.raises(SystemExit) as stopped:
        evaluate.main([argument.format(**names) for argument in arguments])
    out, error = capsys.readouterr()
    assert stopped.value.code == 2 and error.count("\n") == 1 and not out
    assert error.startswith("evaluate.py: ") and message.format(**names) in error


def test_held_out_rows_that_are_not_what_meta_json_says_are_one_line(data, tmp_path, capsys):
    folder = shutil.copytree(data, tmp_path / "set")
    path, shard = folder / "meta.json", folder / "val_00000.bin"
    text, rows = path.read_text(), shard.read_bytes()
    meta = json.loads(text)
    changes = [{"seq_len": 0}, {"seq_len": "64"}, {"seq_len": len(rows) - 1}, {"val": None}, {"val": meta["val"] | {"bytes": 64}},
               {"val": meta["val"] | {"sha256": {"val_00009.bin": ""}}}, {"val": meta["val"] | {"sha256": [1]}}]
    cases = [(broken, rows) for broken in ("", "{", "[1]", "[" * 100_000, "{}", *(json.dumps(meta | change) for change in changes))]
    for broken, there in [*cases, (text, b""), (text, rows[:64]), (text, rows[:-1]), (text, rows + bytes(64))]:
        path.write_text(broken)
        shard.write_bytes(there)
        with pytest.raises(SystemExit) as stopped:
            evaluate.read_items(f"heldout={folder}")
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and error.count("\n") == 1 and str(path) in error and "make the data anew" in error
    path.write_text(text)
    shard.write_bytes(rows)
    assert b"".join(choices[0] for _, choices, _ in evaluate.read_items(f"heldout={folder}")) == rows


def test_a_full_disk_leaves_the_old_results_whole(trained, data, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.json").write_text("old")
    monkeypatch.setattr(evaluate, "evaluate", lambda *_: {"task": "x" * 5000})
    resource = pytest.importorskip("resource")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(SystemExit) as stopped:
            evaluate.main([f"{trained}/ckpt.pt", f"heldout={data}", f"--json={tmp_path}/a.json"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and f"cannot write {tmp_path}/a.json" in error
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"] and (tmp_path / "a.json").read_text() == "old"


def test_bits_by_letters_are_those_of_the_held_out_rows_each_after_the_letters_before_it(trained, capsys, monkeypatch):
    model, saved = load_checkpoint(trained / "ckpt.pt")
    bits, letters = words.bits_and_letters(model, saved["config"])
    last = json.loads((trained / "log.jsonl").read_text().splitlines()[-1])
    assert bits.mean().item() == pytest.approx(last["val_bpb"], rel=1e-5)
    text = b"a bc- d3\xc3\xa9f"
    counts, so_far = [], 0
    for byte in text:
        so_far = so_far + 1 if chr(byte).isalnum() or byte > 127 else 0
        counts.append(so_far)
    assert words.letters_so_far(torch.tensor([[BOS, *text]])).tolist() == [[0, *counts]]
    letters = torch.arange(10).expand(4, 10)
    monkeypatch.setattr(words, "bits_and_letters", lambda model, config: (letters.square().float(), letters))
    words.main([str(trained / "ckpt.pt")])
    share, row = ([cell.strip() for cell in line.strip("|").split("|")][1:] for line in capsys.readouterr().out.splitlines()[2:])
    assert share == ["", "10%", "10%", "10%", "10%", "20%", "40%"]
    assert row == ["28.500", "0.000", "1.000", "4.000", "9.000", "20.500", "57.500"]
