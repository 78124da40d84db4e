import math
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import sample
from conftest import ROOT, run
from model import BOS
from test_model import small_model


def shown(text, boundaries=()):
    """The pieces that a viewer sees of these bytes, with p = position / 100."""
    return list(sample.characters((byte, i in boundaries, i / 100) for i, byte in enumerate(text)))


def test_a_character_of_several_bytes_is_shown_once_with_its_last_bytes_p():
    assert shown("aé€".encode(), {1, 4}) == [("a", False, 0), ("é", True, 0.02), ("€", True, 0.05)]


def test_bytes_that_are_not_utf8_are_shown_as_such():
    assert shown(b"a\xc3b\xff\xe2\x82", {1, 5}) == [
        ("a", False, 0), ("\ufffd", True, 0.01), ("b", False, 0.02), ("\ufffd", False, 0.03), ("\ufffd", True, 0.05)]
    assert shown(b"\xe2\x82\xc3\xa9", {2}) == [("\ufffd", False, 0.01), ("é", True, 0.03)]


def test_control_characters_never_reach_the_terminal():
    assert "".join(text for text, *_ in shown(b"\x1b[2J\x7f\t\n")) == "␛[2J\ufffd␉\n"


def test_colour_goes_from_blue_to_yellow_with_p():
    steps = [(ord("a"), True, 0.0), (ord("b"), False, 1.0)]
    assert "".join(sample.as_terminal(steps, True)) == "\x1b[38;5;33ma\x1b[0m│\x1b[38;5;226mb\x1b[0m"
    assert "".join(sample.as_terminal(steps, False)) == "a│b"


def test_a_page_has_each_characters_bytes_p_and_bits_and_where_tokens_end():
    steps = [(ord("a"), True, 0.0, math.log(2)), *((byte, False, 0.5, math.log(2)) for byte in "é".encode()), (ord("<"), True, 1.0, 0.0)]
    assert '<div data-of="61,0,100,1 c3a9,50,200 3c,100,0,1">aé&lt;</div>' in sample.as_html([("x", steps)])


def test_the_model_gets_what_the_flags_say_and_the_last_line_sums_up_what_it_gave(monkeypatch, capsys):
    asked = []

    class Recorder:
        to = lambda self, device: self

        def generate(self, x, *options):
            asked.append((x.tolist(), *options, torch.initial_seed()))
            for i in range(6):
                yield torch.tensor([97]), torch.tensor([i % 3 == 0]), torch.tensor([0.5]), torch.tensor([3 * math.log(2)])

    monkeypatch.setattr(sample, "load_checkpoint", lambda path: (Recorder(), None))
    sample.main(["--start=é", "--num_samples=2", "--max_new_bytes=7", "--temperature=0.3", "--top_k=9", "--seed=11"])
    assert asked == [([[BOS, *"é".encode()]], 7, 0.3, 9, 11)] * 2
    out = capsys.readouterr().out
    assert out.startswith("a│aaa│aa\n---") and "\n12 bytes, 4 tokens, 3.00 bytes per token, 3.000 bits per byte, " in out


@torch.no_grad()
def test_a_scored_byte_has_the_p_that_reading_it_gives_and_the_nats_of_what_was_read_before():
    model, text = small_model(seq_len=16).eval(), bytes(range(70, 96))  # a row of 16 bytes and one of 10
    torch.manual_seed(5)
    scored = list(sample.scored(model, text, SimpleNamespace(device="cpu")))
    torch.manual_seed(5)
    expected = []
    for row in text[:16], text[16:]:
        u = torch.rand(1, 1 + len(row))
        for i, byte in enumerate(row):
            logits, _, l, a = model(torch.tensor([[BOS, *row[: i + 1]]]), u=u[:, : i + 2])  # nothing later
            expected.append((byte, a[0, -1], l[0, -1].sigmoid(), -logits[0, -2].log_softmax(0)[byte]))
    torch.testing.assert_close(torch.tensor(scored), torch.tensor(expected), atol=1e-4, rtol=1e-4)


def test_generated_text_is_marked_and_counted(trained, tmp_path):
    out, _ = run("sample.py", f"--out_dir={trained}", "--start=fox é", "--num_samples=2", "--max_new_bytes=40", f"--html={tmp_path}/a.html")
    assert out.replace(sample.MARK, "").startswith("fox é")
    last = out.splitlines()[-1]
    total, tokens = map(int, re.match(r"(\d+) bytes, (\d+) tokens, ", last).groups())
    assert total == 2 * (len("fox é".encode()) + 40) and out.count(sample.MARK) <= tokens
    assert "\x1b" not in out  # no terminal, no colours
    page = (tmp_path / "a.html").read_text()
    assert page.count('<div class="text"') == 2 and "http" not in page


def test_an_empty_prompt_starts_from_bos(trained, capsys):
    sample.main([f"--out_dir={trained}", "--start=", "--max_new_bytes=20"])
    assert "20 bytes, " in capsys.readouterr().out


def test_a_scored_file_is_shown_unchanged_but_for_the_marks(trained, tmp_path, capsys):
    text = "the quick <brown> fox & the lazy dog\n" * 3
    (tmp_path / "text").write_text(text)
    sample.main([f"--out_dir={trained}", f"--score={tmp_path}/text", f"--html={tmp_path}/a.html"])
    out = capsys.readouterr().out
    assert out.replace(sample.MARK, "").startswith(text) and f"{len(text)} bytes, " in out
    assert "&lt;" in (tmp_path / "a.html").read_text()


def test_a_page_is_written_whole_though_nobody_reads_the_terminal(trained, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox " * 3)
    command = "sample.py", f"--out_dir={trained}", f"--score={tmp_path}/text.txt", "--device=cpu", f"--html={tmp_path}/page.html"
    run(*command)
    read = (tmp_path / "page.html").read_text()
    (tmp_path / "page.html").unlink()
    with subprocess.Popen([sys.executable, ROOT / command[0], *command[1:]], stdout=subprocess.PIPE, cwd=ROOT) as process:
        process.stdout.close()
    assert process.returncode == 0 and (tmp_path / "page.html").read_text() == read


@pytest.mark.parametrize("arguments, message", [
    (["--out_dir=no/such"], "no checkpoint no/such/ckpt.pt"),
    (["--out_dir={tmp}"], "is no checkpoint of this version of train.py"),
    (["--out_dir={trained}", "--score=no/such"], "no/such"),
    (["--out_dir={trained}", "--score={tmp}/empty"], "is an empty file"),
    (["--out_dir={trained}", "--html=no/such/page.html"], "no/such/page.html"),
    (["--temperature=-1"], "-1"),
    (["--out_dir={trained}", "--device=nonsense"], "nonsense"),
    (["--out_dir={trained}", "--device=hpu"], "hpu"),
    (["--max_new_bytes=0"], "0"),
    (["--top_k=0"], "0"),
    (["--wrong=1"], "--wrong"),
])
def test_a_mistake_on_the_command_line_is_one_line(arguments, message, trained, tmp_path, capsys):
    (tmp_path / "ckpt.pt").write_bytes(b"not a checkpoint")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(SystemExit) as stopped:
        sample.main([argument.format(tmp=tmp_path, trained=trained) for argument in arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and message in error
