"""sample.py, and common/text.py."""
import io
import math
import re
import shutil
import sys

import pytest
import torch

import sample
from common.commandline import UserError
from common.text import characters, marked, trimmed
from conftest import ROOT, run
from model import BOS
from test_model import small_model


@torch.no_grad()
@pytest.mark.parametrize("prompt", [b"", b"the quick brown fox jumps over the lazy dog"])
def test_generation_continues_a_text_byte_for_byte_as_one_pass_over_the_whole_row_predicts(prompt):
    model = small_model().eval()
    torch.manual_seed(7)
    steps = list(sample.generate(model, prompt, 60, temperature=0, top_k=50, deterministic=True))
    text = bytes(byte for byte, _, _ in steps)
    assert text.startswith(prompt) and len(text) == len(prompt) + 60
    x = torch.tensor([[BOS, *text]])
    out = model(x, torch.full(x.shape, 0.5))
    likeliest = model.head.logits(out.Z)[0, :, :BOS].argmax(-1)
    assert likeliest[len(prompt) : -1].tolist() == [*text[len(prompt) :]]
    assert [a for _, a, _ in steps] == out.a[0, 1:].tolist()
    p = torch.tensor([p for *_, p in steps])
    torch.testing.assert_close(p, out.l[0, 1:].sigmoid(), atol=1e-4, rtol=1e-4)


def test_generation_ends_a_token_where_a_uniform_number_is_below_p(monkeypatch):
    model, rand, uniforms = small_model().eval(), torch.rand, []
    monkeypatch.setattr(
        torch, "rand", lambda *size, **on: uniforms.append(rand(*size, **on)) or uniforms[-1])
    steps = list(sample.generate(model, b"a few bytes", 600, 1.0, 256))
    u = torch.cat(uniforms, 1)[0, 1:]  # without that of <bos>
    ended = [a for _, a, _ in steps]
    assert ended == [number < p for number, (_, _, p) in zip(u.tolist(), steps)]
    assert 20 < sum(ended) < 580
    for _, a, p in sample.generate(model, b"", 20, 1.0, 256, deterministic=True):
        assert a == (p > 0.5)


def test_the_next_byte_is_one_of_the_likeliest():
    torch.manual_seed(0)
    logits = torch.zeros(4000, 256)
    logits[:, 65], logits[:, 66] = 2, 1
    for temperature in 0, 1e-320, 1e-38, 1e-3:
        assert set(sample.next_byte(logits, temperature, 50).flatten().tolist()) == {65}
    drawn = set(sample.next_byte(logits, 1.0, 300).flatten().tolist())  # more than there are
    assert len(drawn) > 200
    drawn = sample.next_byte(logits, 0.5, 2)  # p is proportional to e^(2 / 0.5) and e^(1 / 0.5)
    assert set(drawn.flatten().tolist()) == {65, 66}
    assert (drawn == 65).float().mean().item() == pytest.approx(1 / (1 + math.exp(-2)), abs=0.02)


def shown(text, boundaries=()):
    """The characters of these bytes, with p = position / 100."""
    return list(characters((b, i in boundaries, i / 100) for i, b in enumerate(text)))


def test_bytes_that_are_not_utf8_are_shown_as_such():
    assert shown(b"a\xc3b\xff\xe2\x82", {1, 5}) == [
        ("a", False, 0), ("\ufffd", True, 0.01), ("b", False, 0.02), ("\ufffd", False, 0.03),
        ("\ufffd", True, 0.05)]
    assert shown(b"\xe2\x82\xc3\xa9", {2}) == [("\ufffd", False, 0.01), ("é", True, 0.03)]
    assert shown("é".encode() + b"\x80", {1}) == [("é", True, 0.01), ("\ufffd", False, 0.02)]
    assert shown(b"\xed\xa0a\xc3", {0, 3}) == [
        ("\ufffd", True, 0.01), ("a", False, 0.02), ("\ufffd", True, 0.03)]


def test_characters_that_the_ends_of_a_row_cut_are_trimmed_but_not_invalid_bytes():
    for text in "Жизнь", "日本語", "a👩b", "é":
        steps = [(byte, False, 0.5) for byte in text.encode()]
        for i in range(len(steps) + 1):
            for j in range(i, len(steps) + 1):
                shown = bytes(byte for byte, *_ in trimmed(steps[i:j]))
                whole = bytes(byte for byte, *_ in steps[i:j]).decode(errors="ignore")
                assert shown == whole.encode()
    assert trimmed([(128, 0, 0)] * 5) == [(128, 0, 0)] * 2  # no character has so many


def test_stray_continuation_bytes_are_shown_one_by_one():
    """So a long run of them, such as silence in 8-bit sound, keeps all of its boundaries."""
    assert shown(b"\x80" * 100, {5, 6}) == [
        ("\ufffd", i in (5, 6), i / 100) for i in range(100)]


def test_valid_characters_are_shown_as_they_are_and_control_characters_as_pictures():
    text = "a\u00a0b\u3000می\u200cخ 👩\u200d💻 soft\u00adhyphen \ufeff \n"
    assert "".join(c for c, _, _ in shown(text.encode())) == text
    controls = b"\t\x1b\x7f" + "\x85\x9b".encode()
    assert "".join(c for c, _, _ in shown(controls)) == "␉␛␡␛E␛["


@pytest.mark.parametrize("encoding, shown", [("utf-8", "x¦│ | y"), ("cp1252", "x│| ¦ y")])
def test_only_a_mark_looks_like_a_mark(encoding, shown, monkeypatch):
    text = "x│ | y".encode()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    assert "".join(marked((byte, i == 3, 0.5) for i, byte in enumerate(text))) == shown


def test_colour_goes_from_blue_to_yellow_with_p_on_a_terminal(monkeypatch):
    steps = [(ord("a"), True, 0.0), (ord("b"), False, 0.95)]
    assert "".join(marked(steps)) == "a│b"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "".join(marked(steps)) == "\x1b[38;5;33ma\x1b[0m│\x1b[38;5;226mb\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert "".join(marked(steps)) == "a│b"


def test_the_flags_reach_generation_and_the_last_line_sums_up(
        trained, tmp_path, monkeypatch, capsys):
    asked = []

    def generate(model, *options):
        asked.append((*options, torch.rand(()).item()))
        for i in range(6):
            yield 97 + i, i % 3 == 0, 0.5

    monkeypatch.setattr(sample, "generate", generate)
    sample.main(["--start=~/é\udcff ", "--num_samples=2", "--max_new_bytes=7", "--temperature=0.3",
                 "--top_k=9", "--seed=11", "--deterministic=True", f"--out_dir={trained}"])
    torch.manual_seed(11)
    prompt = b"~/" + "é".encode() + b"\xff "  # neither expanded nor decoded
    assert asked == [(prompt, 7, 0.3, 9, True, torch.rand(()).item()) for _ in range(2)]
    out = capsys.readouterr().out
    assert out.startswith(2 * f"a│bcd│ef\n{80 * '-'}\n")
    assert "\n12 bytes, 6 tokens, 2.00 bytes per token, " in out  # the last ones end unmarked
    (tmp_path / "prompt").write_bytes(b"a\xff")
    sample.main([f"--start=FILE:{tmp_path}/prompt", f"--out_dir={trained}"])
    assert asked[-1][0] == b"a\xff"


@torch.no_grad()
def test_a_scored_byte_has_the_p_and_nats_of_what_was_read_so_far():
    model, text = small_model(seq_len=16).eval(), bytes(range(70, 96))  # rows of 16 and 10 bytes
    torch.manual_seed(5)
    scored = list(sample.scored(model, text))
    torch.manual_seed(5)
    expected = []
    for row in text[:16], text[16:]:
        u = torch.rand(1, 1 + len(row))
        for i, byte in enumerate(row):  # nothing later is given
            x = torch.tensor([[BOS, *row[: i + 1]]])
            out = model(x, u[:, : i + 2])
            nats = -model.head.logits(out.Z[0, -2]).log_softmax(-1)[byte]
            expected.append((byte, out.a[0, -1], out.l[0, -1].sigmoid(), nats))
    torch.testing.assert_close(torch.tensor(scored), torch.tensor(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("flag", ["--score={tmp}/text", "--score=-"])
def test_a_text_from_a_file_or_stdin_is_shown_unchanged_but_for_the_marks(
        flag, trained, tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text("naïve fox", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", open(tmp_path / "text"))
    sample.main([f"--out_dir={trained}", flag.format(tmp=tmp_path)])
    out = capsys.readouterr().out
    assert "│" in out
    assert out.replace("│", "").startswith("naïve fox\n---")
    assert "\n10 bytes, " in out


def test_the_tokens_that_are_counted_are_those_that_are_listed(trained, tmp_path, capsys):
    """The last token of a text ends with it, also if the model would go on."""
    for text in "日本語", "the quick brown fox":
        (tmp_path / "text").write_text(text, encoding="utf-8")
        sample.main([f"--out_dir={trained}", f"--score={tmp_path}/text", "--deterministic=True"])
        n = len([*sample.tokens(sample.load(trained), text, deterministic=True)])
        assert f" bytes, {n} tokens, " in capsys.readouterr().out


def test_the_tokens_of_a_text_are_its_bytes_cut_at_the_boundaries():
    text = b"def main(argv):\n" * 4 + "né € x".encode() + b"a\xff\xc3"
    model = small_model(seq_len=16).eval()
    torch.manual_seed(3)
    steps = list(sample.scored(model, text))
    torch.manual_seed(3)
    pieces, p = zip(*sample.tokens(model, text))
    assert b"".join(pieces) == text
    assert 5 < len(pieces) < 70
    expected = [step[2] for step in steps if step[1]]
    assert list(p) == expected + [None] * (not steps[-1][1])  # None: the text ends there
    for byte, a, p, _ in sample.scored(model, text, deterministic=True):
        assert a == (p > 0.5)
    model.policy.forward = lambda X: torch.full((*X.shape[:2], 8), 9.0)  # ends tokens everywhere
    assert [piece for piece, p in sample.tokens(model, "né", True) if p] == [b"n", b"\xc3", b"\xa9"]
    model.policy.forward = lambda X: torch.full((*X.shape[:2], 8), -9.0)
    assert list(sample.tokens(model, "né", True)) == [("né".encode(), None)]


def test_bytes_are_scored_as_they_are(trained, tmp_path, capsys):
    """Line ends of Windows and invalid bytes are not translated."""
    (tmp_path / "text").write_bytes(b"a\r\n\xff")
    sample.main([f"--out_dir={trained}", f"--score={tmp_path}/text", "--deterministic=True"])
    out = capsys.readouterr().out.replace("│", "")
    assert out.startswith("a␍\n\ufffd\n---")
    assert "\n4 bytes, " in out


def test_vectors_are_what_the_decoder_adds_to_the_bytes_up_to_the_next_token(trained):
    model = sample.load(trained)
    torch.manual_seed(1)
    model.policy.linear.weight.data.normal_(std=50)  # make it sure
    x = torch.tensor([[BOS, *b"def main(argv):"]])
    with torch.no_grad():
        out = model(x, torch.full(x.shape, 0.5))
        Y = sample.vectors(model, "def main(argv):")
        last = [[int(out.a[0, : i + 1].sum()) - 1 for i in range(16)]]  # what byte i reads
        Z = model.decode(model.upsample(out.X, Y[None], torch.tensor(last)))
    assert 3 < len(Y) < 14
    torch.testing.assert_close(Z, out.Z)
    with pytest.raises(UserError, match="seq_len=32 bytes of text, not 33"):
        sample.vectors(model, "a" * 33)


def test_readmes_python_examples_run_as_written(trained, monkeypatch):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = re.findall("```python\n(.*?)```", readme, re.DOTALL)
    example = "".join(code for code in examples if "from sample import" in code)
    monkeypatch.chdir(trained.parent)
    names = {}
    exec(example.replace('"out"', f'"{trained}"'), names)
    pieces, p = zip(*names["pairs"])
    assert b"".join(pieces) == b"def main(argv):"
    p = [number for number in p if number is not None]  # only the text ends the last token
    assert all(0 < number < 1 for number in p)
    assert names["V"].shape == (1 + len(p), 16)


@pytest.mark.parametrize("arguments, message", [
    (["--out_dir=no/such"], "there is no checkpoint no/such/ckpt.pt"),
    (["--out_dir={trained}", "--score={tmp}/empty"], "the given text is empty"),
    (["--temperature=-1"], "temperature=-1.0 must not be negative"),
    (["--temperature=nan"], "temperature cannot be 'nan' (type float, "),
    (["--score=a", "--start=b"], "--start and --score exclude each other; give one of them"),
    (["--out_dir={trained}", "--device=nonsense"], "nonsense"),
    (["--out_dir={trained}", "--device=mps"], "device='mps' must be auto or one that torch finds"),
    (["--max_new_bytes=0"], "max_new_bytes=0 must be above 0"),
    (["--seed=2**63"], "seed=9223372036854775808 must be from 0 to 2**63 - 1"),
    (["--top_k=0"], "top_k=0 must be above 0"),
    (["--max_new_bytes=1.5"], "max_new_bytes cannot be '1.5' (type int, default 200)"),
    (["def main"], "cannot read the configuration file 'def main'"),
    (["--num_samples=x"], "num_samples cannot be 'x' (type int, default 1)"),
])
def test_a_mistake_on_the_command_line_is_explained(arguments, message, trained, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(UserError) as caught:
        sample.main([argument.format(tmp=tmp_path, trained=trained) for argument in arguments])
    assert message in str(caught.value)


def test_a_tilde_is_the_home_folder_and_a_missing_file_is_named_on_one_line(
        trained, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(trained, tmp_path / "out")
    out, _ = run("sample.py", "--out_dir=~/out", "--max_new_bytes=5")
    assert "\n5 bytes, " in out
    _, error = run("sample.py", "--out_dir=~/out", "--score=~/none", code=2)
    assert error == f"sample.py: [Errno 2] No such file or directory: '{tmp_path}/none'\n"
