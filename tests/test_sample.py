import re

import pytest

import sample
from conftest import run


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


def test_generated_text_is_marked_and_counted(trained, tmp_path):
    out, _ = run("sample.py", f"--out_dir={trained}", "--start=fox é", "--num_samples=2", "--max_new_bytes=40", f"--html={tmp_path}/a.html")
    assert out.replace(sample.MARK, "").startswith("fox é")
    last = out.splitlines()[-1]
    total, tokens = map(int, re.match(r"(\d+) bytes, (\d+) tokens, ", last).groups())
    assert total == 2 * (len("fox é".encode()) + 40) and out.count(sample.MARK) <= tokens
    assert "\x1b" not in out  # no terminal, no colours
    page = (tmp_path / "a.html").read_text()
    assert page.count("<pre>") == 2 and "http" not in page


def test_an_empty_prompt_starts_from_bos(trained):
    out, _ = run("sample.py", f"--out_dir={trained}", "--start=", "--max_new_bytes=20")
    assert "20 bytes, " in out


def test_a_scored_file_is_shown_unchanged_but_for_the_marks(trained, tmp_path):
    text = "the quick <brown> fox & the lazy dog\n" * 3
    (tmp_path / "text").write_text(text)
    out, _ = run("sample.py", f"--out_dir={trained}", f"--score={tmp_path}/text", f"--html={tmp_path}/a.html")
    assert out.replace(sample.MARK, "").startswith(text) and f"{len(text)} bytes, " in out
    assert "&lt;" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize("arguments, message", [
    (["--out_dir=no/such"], "no checkpoint no/such/ckpt.pt"),
    (["--out_dir={tmp}"], "is no checkpoint of train.py"),
    (["--out_dir={trained}", "--score=no/such"], "no/such"),
    (["--out_dir={trained}", "--score={tmp}/empty"], "is an empty file"),
    (["--out_dir={trained}", "--html=no/such/page.html"], "no/such/page.html"),
    (["--temperature=-1"], "-1"),
    (["--out_dir={trained}", "--device=nonsense"], "nonsense"),
    (["--max_new_bytes=0"], "0"),
    (["--wrong=1"], "--wrong"),
])
def test_a_mistake_on_the_command_line_is_one_line(arguments, message, trained, tmp_path, capsys):
    (tmp_path / "ckpt.pt").write_bytes(b"not a checkpoint")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(SystemExit) as stopped:
        sample.main([argument.format(tmp=tmp_path, trained=trained) for argument in arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and message in error
