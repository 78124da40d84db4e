import contextlib
import json
import math
import re
import shutil
import unicodedata
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from common.checkpoint import read_checkpoint
from common.commandline import UserError
from common.models import make_model
from experiments import evaluate, worth
from model import BOS
from test_model import small_model, some_bytes

ROWS = {
    "piqa": {"goal": "Boil an egg", "sol1": "Freeze it.", "sol2": "Use hot water.", "label": 1},
    "hellaswag": {"activity_label": "Baking", "ctx_b": "the Cook", "ctx": "unused", "label": "0",
                  "ctx_a": "How to bake [title] Mix. [step] Two  cups.",
                  "endings": ["stirs [substeps] it. ", "sleeps.", "[header] runs", "é"]},
    "hellaswag ": {"activity_label": "Rowing", "ctx_a": "He sits. [step]", "ctx_b": "", "label": 1,
                   "endings": [" rows", "is [title] wet"]},
    "arc_easy": {"question": "Which is hot?", "answerKey": "2",
                 "choices": {"text": ["ice", "fire", "snow"], "label": ["1", "2", "3"]}},
    "arc_easy ": {"question": "Which year?", "answerKey": "B",
                  "choices": {"text": ["1900-01-02", "2000-01-02"], "label": ["A", "B"]}},
    "lambada": {"text": 'He said "no.\n\nI saw Ann'}}
PROMPTS = {  # what lm-evaluation-harness 0.4.13 makes of them, and by what acc_norm divides
    "piqa": ("Question: Boil an egg\nAnswer:", [" Freeze it.", " Use hot water."], [10, 14], 1),
    "hellaswag": ("Baking: How to bake. Mix. Two cups. The cook",
                  [" stirs it.", " sleeps.", "  runs", " é"], [9, 7, 5, 1], 0),
    "hellaswag ": ("Rowing: He sits.", ["  rows", "  is. wet"], [4, 7], 1),
    "arc_easy": ("Question: Which is hot?\nAnswer:", [" ice", " fire", " snow"], [3, 4, 4], 1),
    "arc_easy ": ("Question: Which year?\nAnswer:", [" 1900-01-02", " 2000-01-02"], [10, 10], 1),
    "lambada": ('He said "no.\n\nI saw', [" Ann"], [3], 0)}


@pytest.mark.parametrize("name, suffix", [
    *zip(ROWS, ["jsonl", "parquet", "jsonl", "jsonl", "jsonl", "PARQUET"])])
def test_prompts_are_those_of_the_harness(name, suffix, tmp_path):
    import datasets
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_list([ROWS[name]] * 2)
    file = tmp_path / f"rows.{suffix}"
    rows.to_parquet(file) if suffix.lower() == "parquet" else rows.to_json(file)
    context, answers, lengths, right = PROMPTS[name]
    item = context.encode(), [answer.encode() for answer in answers], lengths, right
    assert evaluate.read_items(f"{name.strip()}={file}", 16) == [item, item]


def test_made_up_items_have_the_prompts_and_the_accuracy_of_the_harness(tmp_path, monkeypatch):
    """Needs `pip install lm-eval==0.4.13`, which is large, and so not among the requirements."""
    model = pytest.importorskip("lm_eval.api.model")
    tasks = pytest.importorskip("lm_eval.tasks")
    evaluator = pytest.importorskip("lm_eval.evaluator")
    random = np.random.default_rng(0)
    pieces = [*"ab e.", " ", "  ", "[step]", " [title]", "[header] ", "B", "ill", ","]

    def text():
        middle = "".join(random.choice(pieces, random.integers(1, 9)))
        return "a" + middle + random.choice(["", " "])

    def nats(context, answer):
        return len(answer) * (2 + zlib.crc32(context + b"|" + answer) % 1000 / 1000)

    class Made(model.TemplateLM):
        """Made-up likelihoods; the harness moves spaces from the contexts to the answers."""

        eot_token_id, generate_until, loglikelihood_rolling = 0, None, None

        def tok_encode(self, string, **options):
            return list(string.encode())

        def _loglikelihood_tokens(self, requests, **options):
            self.read = [(bytes(context), bytes(answer)) for _, context, answer in requests]
            return [(-nats(*read), False) for read in self.read]

    def score(model, context, answer, seed, autocast):
        return nats(context, answer), 1, 1

    monkeypatch.setattr(evaluate, "score", score)
    for name in evaluate.BENCHMARKS:
        n = 99
        label = random.integers(2, size=n).tolist()
        rows = [
            {"goal": text(), "sol1": text(), "sol2": text(), "label": label[i],
             "activity_label": text(), "ctx_a": text(), "ctx_b": text(),
             "ctx": text(), "endings": [text(), text()],
             "question": text(), "answerKey": "AB"[label[i]],
             "choices": {"text": [text(), text()], "label": ["A", "B"]},
             "text": f"{text()} {text()}b"} for i in range(n)]
        file = tmp_path / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        file_name = "lambada_openai" if name == "lambada" else name
        published, = Path(tasks.__file__).parent.glob(f"*/{file_name}.yaml")
        task = tmp_path / f"{name}.yaml"
        task.write_text(f"include: {published}\ndataset_path: json\ndataset_name: null\n"
                        "training_split: null\nvalidation_split: null\ntest_split: test\n"
                        f"dataset_kwargs: {{data_files: {{test: {file}}}}}\n")
        made = Made()
        results = evaluator.simple_evaluate(made, tasks=[str(task)], bootstrap_iters=0)
        items = evaluate.read_items(f"{name}={file}", 16)
        assert made.read == [
            (context, answer) for context, answers, _, _ in items for answer in answers]
        if name != "lambada":
            measured, = results["results"].values()
            assert evaluate.task_row(None, items, None)[4] == f"{measured['acc_norm,none']:.4f}"


@torch.no_grad()
def byte_by_byte(model, item, context, answer):
    """The answer's bits, and the tokens: one pass per byte."""
    text = context + answer
    u = torch.from_numpy(np.random.default_rng(item).random((1, len(text)), np.float32))
    bits = tokens = 0
    for i, byte in enumerate(text):
        out = model(torch.tensor([[BOS, *text[:i]]]), u[:, : i + 1])
        tokens += out.a[0, i].item()
        if i >= len(context):
            logp = model.head.logits(out.Z[0, i]).log_softmax(-1)[byte]
            bits -= logp.item() / math.log(2)
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
    assert evaluate.ratio(np.array([3.0]), np.ones(1)) == (3, math.inf)
    assert evaluate.ratio(np.array([1.0, 3.0]), np.ones(2)) == pytest.approx((2, 1))  # 2^.5 / 2^.5


def test_accuracy_counts_bits_per_character_and_only_right_answers_are_averaged(monkeypatch):
    items = [(b"", [bytes(3), bytes(11)], [2, 10], 1), (b"", [bytes(5), bytes(9)], [4, 8], 1),
             (b"", [bytes(4), bytes(5)], [3, 2], 0)]
    scores = iter([(4.2, 1, 4), (20.0, 1, 4), (4.0, 1, 4), (12.0, 1, 4), (3.0, 2, 8), (8.0, 3, 8)])
    monkeypatch.setattr(evaluate, "score", lambda *_: next(scores))
    line = evaluate.task_row(None, items, None)  # per character 2.1 and 2, 1 and 1.5, 1 and 4
    assert line[:3] == ["3", "24", "1.4583"] and line[4:] == ["0.6667", "0.2812"]


def test_validation_rows_are_all_of_the_split(trained, data, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(data.parent))
    evaluate.main([str(trained), f"heldout=~/{data.name}"])
    line = capsys.readouterr().out.splitlines()[2]
    size = json.loads((data / "meta.json").read_text())["val"]["bytes"]
    assert line.startswith(f"| heldout=~/{data.name} | {size // 32} | {size} | ")


@pytest.mark.parametrize("arguments, message", [
    (["no/such.pt", "piqa"], "there is no checkpoint no/such.pt"),
    (["{trained}", "boolq"], "unknown task 'boolq'; use piqa, hellaswag, arc_easy, lambada or"),
    (["{trained}", "piqa=no/such.jsonl"], "piqa: cannot read item 1 of no/such.jsonl"),
    (["{trained}", "piqa={tmp}/gap.jsonl"], "read item 1 of {tmp}/gap.jsonl (KeyError: 'sol1')"),
    (["{trained}", "piqa={tmp}/label-1.jsonl"], "item 3 of {tmp}/label-1.jsonl (ValueError: label"),
    (["{trained}", "piqa={tmp}/label3.jsonl"], "(ValueError: label 3 of 2 answers); give a .json"),
    (["{trained}", "piqa"], "(ConnectionError: no network); give a .json, .jsonl"),
    (["{trained}", "heldout={tmp}"], "no {tmp}/meta.json")])
def test_mistakes_are_explained(arguments, message, trained, tmp_path, monkeypatch):
    import datasets
    load = datasets.load_dataset_builder

    def offline(path, **options):
        if path == "baber/piqa":
            raise ConnectionError("no network")
        return load(path, **options)

    monkeypatch.setattr(datasets, "load_dataset_builder", offline)
    (tmp_path / "gap.jsonl").write_text(json.dumps({"goal": "a", "sol2": "b"}))
    monkeypatch.delattr(evaluate, "score")  # no item is scored
    for label in -1, 3:
        rows = [ROWS["piqa"], ROWS["piqa"], ROWS["piqa"] | {"label": label}]
        (tmp_path / f"label{label}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = {"tmp": tmp_path, "trained": trained / "ckpt.pt"}
    with pytest.raises(UserError, match=re.escape(message.format(**names))):
        evaluate.main([argument.format(**names) for argument in arguments])


# ---- What a boundary is worth.
@torch.no_grad()
def test_a_flip_gains_what_whole_passes_with_and_without_the_boundary_differ_by():
    model = small_model().eval()
    x, y = some_bytes(6, 64)
    u = torch.rand(x.shape, generator=torch.Generator().manual_seed(2))
    i = torch.tensor([14, 1, 21, 42, 57, 63])
    _, _, l, a = model(x, u)
    assert {*a[range(6), i].tolist()} == {False, True}
    expected = []
    for row, k in enumerate(i):
        logp = []
        for boundary in True, False:
            b = a[row : row + 1].clone()
            b[0, k] = boundary
            Z = model.through_tokens(model.encode(x[row : row + 1]), b)
            logp.append(model.head.logp(Z, y[row : row + 1])[0])
        gain = (logp[0] - logp[1]).tolist()
        expected.append([a[row, k].float(), l[row, k].sigmoid(), sum(gain[k : k + 4]),
                         sum(gain[k : k + 33]), sum(gain)])
    expected = torch.tensor(expected)
    assert expected[:, 2:].abs().max() > 1
    torch.testing.assert_close(worth.flip(model, x, y, u, i), expected, atol=1e-3, rtol=1e-4)


def test_contexts_are_sorted_by_worth_and_rare_ones_are_left_out():
    flips = {
        ("\n", False): [[1, 0.5, 1, 1 + sign, 2 + 3 * sign] for sign in (1, -1) * 6],
        ("a", True): [[0, 0.25, 0, 2, -3]] * 12,
        ("b", True): [[0, 0.25, 0, 9, 9]] * 11}
    lines = worth.table_of_contexts(flips).splitlines()[2:]
    assert [line.strip("| ").split(" | ") for line in lines] == [  # 11^-1/2 = 0.302
        ["'a'", "yes", "12", "0.25", "+0.000", "+2.000", "0.000", "-3.000", "0.000"],
        [r"'\n'", "no", "12", "0.50", "+1.000", "+1.000", "0.302", "+2.000", "0.905"]]


@pytest.mark.parametrize("word", ["слово9", "हिन्दी", "ภาษาไทยที่", "nghiệp", "שָׁלוֹם"])
def test_a_letter_of_any_alphabet_and_its_marks_are_in_a_word(word):
    """The decision after each byte: the character that ends there, and what stands before it."""
    row = [BOS, *f"«{unicodedata.normalize('NFD', word)}» ".encode()]
    found = [worth.context(row, i) for i in range(1, len(row))]
    ended = [(character, after) for character, after in found if isinstance(character, str)]
    text = unicodedata.normalize("NFD", word)
    assert ended[:2] == [("«", False), (text[0], False)]
    assert ended[2:] == [*((character, True) for character in text[1:] + "»"), (" ", False)]
    assert found[0] == (b"\xc2", False)


def test_worth_is_shown_by_a_byte_and_the_one_before_it(trained, tmp_path, monkeypatch, capsys):
    """The gain over 33 bytes is 1 after letters and digits, and that over 4 bytes the byte's."""
    def flip(model, x, y, u, i):
        rows = range(len(x))
        after = [float(bytes([z]).isalnum()) if z < 256 else 0.0 for z in x[rows, i - 1].tolist()]
        columns = torch.ones(len(x)), u[rows, i], x[rows, i], torch.tensor(after), i
        return torch.stack(columns, 1)

    monkeypatch.setattr(worth, "flip", flip)
    shutil.copy(trained / "ckpt.pt", tmp_path)
    worth.main([str(tmp_path), "--flips=2048"])
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:-1]]
    shown = {(eval(byte), after) for byte, after, *_ in lines}
    assert {("o", "yes"), (" ", "yes"), ("\n", "yes"), ("q", "no"), ("t", "no")} <= shown
    for byte, after, count, p, near, middle, *_ in lines:
        assert float(near) == ord(eval(byte))
        assert float(middle) == (after == "yes")
    assert 1800 < sum(int(line[2]) for line in lines) <= 2048


def test_only_a_policy_has_decisions_to_flip(trained, tmp_path):
    saved = read_checkpoint(trained / "ckpt.pt")
    saved["config"]["system"] = "uniform"
    saved["model"] = make_model(SimpleNamespace(**saved["config"])).state_dict()
    torch.save(saved, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match="ckpt.pt is of system=uniform; give a learned one"):
        worth.main([f"{tmp_path}/ckpt.pt"])
    with pytest.raises(UserError, match="--flips=0 must be above 0"):
        worth.main([f"{tmp_path}/ckpt.pt", "--flips=0"])
