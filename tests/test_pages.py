"""The pages and pictures that show boundaries."""
import html
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from common.commandline import UserError
from conftest import ROOT
from experiments import figures, machine_code, pictures

TEXT = 'a <b>é</b>\n\t"€"\n\n</script><!-- 😀 &amp; the end'
STEPS = [(byte, i % 3 == 0, i / 100, i / 10) for i, byte in enumerate(TEXT.encode())]


def cells(page):
    """The characters of each text of a page: (tag, p in percent, bits, text)."""
    cell = re.compile(r"<([ib]) data-p=(\d+)(?: data-b=([\d.]+))?>(.*?)</\1>", re.S)
    texts = []
    for part in page.split('<div class="text">')[1:]:
        found = cell.findall(part.partition("</div>")[0])
        texts.append([(tag, int(p), bits, html.unescape(text)) for tag, p, bits, text in found])
    return texts


def expected_cells(steps):
    """The same for TEXT, character by character."""
    expected = []
    first = 0
    for character in TEXT:
        own = steps[first : first + len(character.encode())]
        first += len(own)
        tag = "b" if any(a for _, a, _, _ in own) else "i"
        bits = sum(nats for *_, nats in own) / math.log(2)
        text = character.replace("\t", "␉").replace("\n", "⏎\n")
        expected.append((tag, round(100 * own[-1][2]), f"{bits:.1f}", text))
    return expected


def test_a_character_shows_its_p_its_bits_and_whether_a_token_ends():
    assert cells(pictures.boundaries_page({"x": STEPS, "y": STEPS[:1]})) == [
        expected_cells(STEPS), expected_cells(STEPS)[:1]]


def test_texts_and_names_are_no_markup_and_the_page_needs_no_other_file():
    made = pictures.boundaries_page({"</h2><script>alert(1)</script>": STEPS})
    assert {*re.findall("</?([^ >]*)", made)} == {
        "!doctype", "html", "meta", "title", "style", "h1", "h2", "p", "br", "b", "i", "div"}
    assert not any(word in made for word in ("http", "src=", "url(", "@import"))


def test_text_is_legible_on_every_colour_and_larger_p_is_brighter():
    def luminance(colour):  # WCAG 2.2
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
                  for c in (b / 255 for b in bytes.fromhex(colour[1:]))]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    last = 0
    for percent in range(101):
        background, text = map(luminance, pictures.cell_colours(percent / 100))
        low, high = sorted((background, text))
        assert (high + 0.05) / (low + 0.05) >= 4.5
        assert background > last
        last = background


@pytest.mark.parametrize("arguments, message", [
    (["--watch={tmp}/none"], "No such file"),
    (["--watch={tmp}"], "No such file or directory: '{tmp}/log.jsonl'"),
    (["--watch={tmp}/a.jsonl"], "holds no evaluations"),
    (["--watch={tmp}/b.jsonl"], "b.jsonl is not a log"),
    (["{trained}", "--text="], "the text is empty"),
    (["{tmp}", "--text=a"], "no checkpoint"),
    (["--name=none/such"], "there are no runs")])
def test_mistakes_are_explained(arguments, message, trained, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"step": 20}\n{"step": 2')
    (tmp_path / "b.jsonl").write_text("no log\n")
    with pytest.raises((UserError, OSError), match=message.format(tmp=tmp_path)):
        figures.main([argument.format(tmp=tmp_path, trained=trained) for argument in arguments])
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "b.jsonl"}


def test_what_utf8_or_xml_forbids_is_replaced_and_the_rest_is_written(tmp_path):
    """A file's name may hold any byte, and a text any character."""
    text = "a" + os.fsdecode(b"caf\xe9") + "\0\x1b\ufffe\uffff\n€"
    pictures.write(tmp_path / "a.svg", pictures.picture({text: [(text, True, 0.5)]}, 10))
    words = [e.text for e in ElementTree.parse(tmp_path / "a.svg").getroot() if e.text]
    assert words[-2] == "acaf" + 5 * "\ufffd" + "\n€"
    pictures.write(tmp_path / "a.html", pictures.boundaries_page({text: STEPS}))
    assert "acaf\ufffd" in (tmp_path / "a.html").read_text(encoding="utf-8")
    made = pictures.plot({text: [[{"paper's FLOPs": 1, "bits": 4}]]})
    pictures.write(tmp_path / "b.svg", made)
    ElementTree.parse(tmp_path / "b.svg")


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "a.part").mkdir()  # in the way
    with pytest.raises(OSError):
        pictures.write(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    with pytest.raises(UserError, match="/dev/null is not a file"):
        pictures.write(Path("/dev/null"), "new")


PROGRAMS = [path for path in sorted((ROOT / "experiments").glob("*.py"))
            if "run_program(main)" in path.read_text(encoding="utf-8")]


def test_only_plot_needs_matplotlib_and_it_needs_no_backend_of_a_notebook(tmp_path):
    """The same points also give the same file."""
    program = f"""
import sys
from pathlib import Path
from experiments import {", ".join(path.stem for path in PROGRAMS)}
from experiments.pictures import plot
assert "matplotlib" not in sys.modules
run = [{{"paper's FLOPs": 1, "bits": 4}}, {{"paper's FLOPs": 30, "bits": 2}}]
for name in "ab":
    Path(sys.argv[1], name + ".svg").write_text(plot({{"x": [run]}}))
"""
    backend = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    subprocess.run([sys.executable, "-c", program, tmp_path], cwd=ROOT, check=True,
                   env=os.environ | backend)
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert root.tag.endswith("svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


MEGABYTES = 0, 0.4, 0.9, 2, 5


@pytest.fixture
def watched(tmp_path):
    """A folder with a log of five evaluations, and what --watch makes of it.

    In evaluation k, from 1, a token ends at every k-th byte; p is 0 there and 1 elsewhere.
    """
    records = [{"step": 1, "auto": 2.0}]
    for k, megabytes in enumerate(MEGABYTES, 1):
        line = [(byte, int(i % k == 0), float(i % k > 0)) for i, byte in enumerate(TEXT.encode())]
        records.append({"bytes": megabytes * 1e6, "val_bpb": 8 / (1 + megabytes), "val_rate": 0.2,
                        "line": line})
    out = tmp_path / "<script>"
    out.mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (out / "log.jsonl").write_text(lines + '{"step": 6, "line": [')  # train.py is writing
    figures.main([f"--watch={out}"])
    return out


def expected_evaluation(k):
    steps = [(byte, i % k == 0, float(i % k > 0), 0) for i, byte in enumerate(TEXT.encode())]
    return [(tag, p, "", text) for tag, p, _, text in expected_cells(steps)]


def test_a_watched_run_opens_at_the_last_of_its_evaluations(watched):
    made = (watched / "watch.html").read_text()
    assert made.count("<script>") == made.count("</script>") == 1 and "<!--" not in made
    assert cells(made) == [expected_evaluation(k) for k in range(1, 6)]
    assert 'max="4" value="4"' in made
    assert re.findall(r"<p>(.*) bits per byte, rate 0.200</p>", made) == [
        f"{m:.2f} MB read, {8 / (1 + m):.3f}" for m in MEGABYTES]
    points = re.findall(r'<circle cx="(.*?)" cy="(.*?)"', made)
    assert re.findall(r'end">(.*)</text>', made) == ["2", "4", "6", "8"]
    assert re.findall(r'middle">(\d)</text>', made) == [*"012345"]
    for (x, y), m in zip(points, MEGABYTES, strict=True):
        fraction = (8 - 8 / (1 + m)) / (8 - 8 / 6)
        assert (float(x), float(y)) == pytest.approx((440 * m / 5, 150 * fraction), abs=0.1)


@pytest.mark.parametrize("bits", [[8, 0], [0], [3.5]])
def test_a_curve_may_reach_0_or_have_one_point(bits):
    records = [{"bytes": 1e6 * i, "val_bpb": value} for i, value in enumerate(bits)]
    curve = ElementTree.fromstring(figures.curve(records))
    points = [(float(e.get("cx")), float(e.get("cy"))) for e in curve if e.tag.endswith("circle")]
    assert points == ([(0, 0), (440, 150)] if len(bits) > 1 else [(0, 150)])


@pytest.mark.parametrize("low, high, expected", [
    (0, 4.0018, [0, 1, 2, 3, 4]), (1.78, 7.99, [2, 4, 6]), (1.93, 2.21, [2, 2.1, 2.2]),
    (0, 6000, [0, 2000, 4000, 6000])])
def test_ticks_are_round_numbers(low, high, expected):
    assert figures.round_numbers(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("file", ["log.jsonl", "ckpt.pt"])
def test_a_runs_log_or_checkpoint_will_do_instead_of_its_folder(watched, file):
    made = [(watched / name).read_text() for name in ("watch.html", "watch.svg")]
    (watched / "watch.html").unlink()
    (watched / "watch.svg").unlink()
    figures.main([f"--watch={watched}/{file}"])
    assert [(watched / name).read_text() for name in ("watch.html", "watch.svg")] == made


def test_the_picture_shows_evaluations_near_0_half_and_1_megabytes_and_the_last(watched):
    elements = list(ElementTree.parse(watched / "watch.svg").getroot())
    blue, yellow = "#00224e", "#fee838"
    fills = [e.get("fill") for e in elements if e.tag.endswith("path") and e.get("fill")]
    words = [e.text for e in elements if e.get("class") == "words"]
    shown = [e.text for e in elements if e.tag.endswith("text") and e.get("class") is None]
    assert words[:2] == ["a boundary is likely", "unlikely"]
    assert fills[:2] == [yellow, blue]
    assert [text.split(" MB")[0] for text in words[3:]] == ["0.00", "0.40", "0.90", "5.00"]
    expected = [cell for k in (1, 2, 3, 5) for cell in expected_evaluation(k)]
    assert shown == [text.strip("\n") for *_, text in expected]
    assert fills[2:] == [yellow if p == 100 else blue for _, p, _, _ in expected]
    ends = sum(e.get("class") == "end" for e in elements)
    assert ends == 1 + sum(tag == "b" for tag, *_ in expected)


def test_a_picture_has_a_background_and_room_for_its_legend_in_a_wide_font(watched):
    root = ElementTree.parse(watched / "watch.svg").getroot()
    style, background, *_ = root
    assert [background.get(key) for key in ("width", "height", "fill")] == ["100%", "100%", "#fff"]
    assert "prefers-color-scheme" not in style.text
    font = FontProperties(family="DejaVu Sans")  # matplotlib has it
    end = 0
    for element in root:
        sign = re.fullmatch(r"M(\d+) 4h.*", element.get("d", ""))
        if sign:
            assert int(sign[1]) >= end
        elif element.get("class") == "words" and element.get("y") == "19":
            box = TextPath((int(element.get("x")), 0), element.text, size=14, prop=font)
            end = box.get_extents().x1 + 5
    assert 0 < end <= 500


def test_runs_are_drawn_on_the_same_given_text_or_first_validation_row(
        trained, data, tmp_path, monkeypatch):
    for run in "learned-7", "learned-8":
        shutil.copytree(trained, tmp_path / "x/runs" / run)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.main(["--name=x"])
    made = (tmp_path / "x/boundaries.html").read_text(encoding="utf-8")
    assert re.findall("<h2>(.*?)</h2>", made) == ["learned-7", "learned-8"]
    row = (data / "val_00000.bin").read_bytes()[:32].decode()
    assert "".join(text for *_, text in cells(made)[1]) == row.replace("\n", "⏎\n")
    assert (tmp_path / "x/boundaries.svg").stat().st_size > 1000
    figures.main(["--name=x"])  # the same draws
    assert (tmp_path / "x/boundaries.html").read_text(encoding="utf-8") == made

    run = f"{tmp_path}/x/runs/learned-7"
    figures.main(["--name=y", run, f"{run}/ckpt.pt", "--text=hello there"])
    texts = cells((tmp_path / "y/boundaries.html").read_text(encoding="utf-8"))
    assert ["".join(text for *_, text in shown) for shown in texts] == ["hello there"]


def test_tokens_in_machine_code_are_counted_on_first_and_second_bytes_of_instructions(
        tmp_path, monkeypatch, capsys):
    """Two of three tokens end there, one at padding. Two of four instructions have one.

    The third ends on a second byte.
    """
    printed = ("\nx.text:     file format binary\n\n0000000000000000 <.data>:\n"
               "       0:\t48 89 c7             \tmov    %rax,%rdi\n"
               "       3:\t90                   \tnop\n"
               "       4:\teb 00                \tjmp    0x6\n"
               "       6:\tc3                   \tret\n")
    code = b"H\x89\xc7\x90\xeb\0\xc3"
    steps = [(byte, place in (1, 3, 6), 0.5, place) for place, byte in enumerate(code)]
    monkeypatch.setattr(machine_code.subprocess, "run",
                        lambda *_, **__: SimpleNamespace(stdout=printed))
    monkeypatch.setattr(machine_code, "load_model", lambda path: (None, None))
    monkeypatch.setattr(machine_code, "scored", lambda model, code: steps)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.text").write_bytes(code)
    machine_code.main([f"{tmp_path}/ckpt.pt", "x.text", "--start=1"])
    # 0 + 1 + ... + 6 nats
    assert "ckpt.pt | 4.328 | 67% | 33% | 50% | 50% |" in capsys.readouterr().out
    assert json.loads((tmp_path / "measured.json").read_text())["precision"] == 2 / 3
    elements = list(ElementTree.parse(tmp_path / "machine_code.svg").getroot())
    texts = [e.text for e in elements if e.tag.endswith("text")]
    assert texts[:3] == ["a boundary is likely", "unlikely", "a token ends"]
    assert texts[3:] == ["90", "nop", "eb", "00", "jmp    0x6", "c3", "ret"]
    ends = [e.get("d") for e in elements if e.get("class") == "end"]
    assert ends[1:] == ["M20 34h2v19h-2z", "M20 74h2v19h-2z"]

    steps[:] = [(byte, False, 0.5, 1) for byte in code]  # no token ends
    machine_code.main([str(tmp_path), "x.text"])
    assert "| 0% | 0% | 0% | 0% |" in capsys.readouterr().out
    (tmp_path / "x.text").write_bytes(b"")
    with pytest.raises(UserError, match="x.text is empty"):
        machine_code.main([str(tmp_path), "x.text"])
