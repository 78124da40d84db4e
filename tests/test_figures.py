"""experiments/figures.py."""
import json
import os
import re
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath

from common.commandline import UserError
from conftest import ROOT
from experiments import figures

TEXT = 'a <b>é</b>\n\t"€"\n\n</script><!-- 😀 &amp; the end'
SHOWN = TEXT.replace("\t", "␉").replace("\n", "⏎")
BLUE, YELLOW = "#00224e", "#fee838"


def read_picture(path):
    """{heading: [(character, its background, whether a token ends)]} of a picture."""
    texts = {}
    elements = iter(ElementTree.parse(path).getroot())
    for element in elements:
        if element.get("class") == "words":
            text = texts[element.text] = []
        elif element.get("class") == "end":
            text[-1:] = [(*cell[:2], True) for cell in text[-1:]]
        elif element.tag.endswith("path"):
            background = element.get("fill")
        elif element.tag.endswith("text"):
            text.append((element.text, background, False))
    legend = [texts.pop(words) for words in ("a boundary is likely", "unlikely", "a token ends")]
    assert legend == [[], [], []]
    return texts


def test_text_is_legible_on_every_colour_and_larger_p_is_brighter():
    def luminance(colour):  # WCAG 2.2
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
                  for c in (b / 255 for b in bytes.fromhex(colour[1:]))]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    last = 0
    for percent in range(101):
        background, text = map(luminance, figures.cell_colours(percent / 100))
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
    text = "a" + os.fsdecode(b"caf\xe9") + "\0\x1b\ufffe\uffff\n<€&"
    shown = "acaf" + 5 * "\ufffd" + "\n<€&"
    figures.write(tmp_path / "a.svg", figures.picture({text: [(text, True, 0.0)]}, 10))
    assert read_picture(tmp_path / "a.svg") == {
        shown: [(shown.replace("\n", "⏎"), BLUE, True)]}
    made = figures.loss({text: [[{"paper's FLOPs": 1, "bits": 4}]]})
    figures.write(tmp_path / "b.svg", made)
    ElementTree.parse(tmp_path / "b.svg")


def test_the_pictures_of_results_show_means_over_seeds_by_rate_and_bits_along_words(monkeypatch):
    def run(text, system, target, rate, bits, **words):
        return {"text": text, "system": system, "flags": {"downsample_rate_target": target},
                "rate": rate, "bits": bits, **words}

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(
        {axes.get_title(): [[*map(list, line.get_data())] for line in axes.lines]
         for axes in figure.axes}))
    runs = [run("C", "learned", 0.5, 0.52, 1.0, repeated=[2, 1], new=[3, 2, 1]),
            run("C", "learned", 0.2, 0.21, 3.0), run("C", "learned", 0.2, 0.23, 2.0),
            run("C", "none", 0.2, 1.0, 0.5, repeated=[1, 1], new=[2]),
            run("English", "none", 0.2, 1.0, 4.0)]
    figures.rates(runs)
    figures.words(runs)
    assert drawn == [
        {"C": [[[0.22, 0.52], [2.5, 1.0]], [[1.0], [0.5]]], "English": [[[1.0], [4.0]]]},
        {"C: repeated words": [[[1, 2], [2, 1]], [[1, 2], [1, 1]]],
         "C: new words": [[[1, 2, 3], [3, 2, 1]], [[1], [2]]]}]


def test_only_curves_need_matplotlib_and_they_need_no_backend_of_a_notebook(tmp_path):
    """The same points also give the same file."""
    modules = [path.stem for path in (ROOT / "experiments").glob("*.py")]
    program = f"""
import sys
from pathlib import Path
from experiments import {", ".join(modules)}
from experiments.figures import loss
assert "matplotlib" not in sys.modules
run = [{{"paper's FLOPs": 1, "bits": 4}}, {{"paper's FLOPs": 30, "bits": 2}}]
for name in "ab":
    Path(sys.argv[1], name + ".svg").write_text(loss({{"x": [run]}}))
"""
    backend = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    subprocess.run([sys.executable, "-c", program, tmp_path], cwd=ROOT, check=True,
                   env=os.environ | backend)
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert root.tag.endswith("svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.fixture
def watched(tmp_path):
    """A folder with a log of five evaluations, and what --watch makes of it.

    In evaluation k, from 1, a token ends at every k-th byte; p is 0 there and 1 elsewhere.
    """
    records = [{"step": 1, "auto": 2.0}]
    for k, megabytes in enumerate([0, 0.4, 0.9, 2, 5], 1):
        line = [(byte, int(i % k == 0), float(i % k > 0)) for i, byte in enumerate(TEXT.encode())]
        records.append({"bytes": megabytes * 1e6, "val_bpb": 8 / (1 + megabytes), "val_rate": 0.2,
                        "line": line})
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "log.jsonl").write_text(lines + '{"step": 6, "line": [')  # train.py is writing
    figures.main([f"--watch={tmp_path}"])
    return tmp_path


def test_the_picture_shows_evaluations_near_0_half_and_1_megabytes_and_the_last(watched):
    """A token ends at a character if it ends at any of its bytes; p is that of the last one."""
    expected = {}
    for k, caption in [(1, "0.00 MB read, 8.000"), (2, "0.40 MB read, 5.714"),
                       (3, "0.90 MB read, 4.211"), (5, "5.00 MB read, 1.333")]:
        text = expected[f"{caption} bits per byte, rate 0.200"] = []
        first = 0
        for character, shown in zip(TEXT, SHOWN):
            end = first + len(character.encode())
            ends = [i % k == 0 for i in range(first, end)]
            text.append((shown, BLUE if ends[-1] else YELLOW, any(ends)))
            first = end
    assert read_picture(watched / "watch.svg") == expected


@pytest.mark.parametrize("file", ["log.jsonl", "ckpt.pt"])
def test_a_runs_log_or_checkpoint_will_do_instead_of_its_folder(watched, file):
    made = (watched / "watch.svg").read_text()
    (watched / "watch.svg").unlink()
    figures.main([f"--watch={watched}/{file}"])
    assert (watched / "watch.svg").read_text() == made


def test_a_picture_has_a_background_and_room_for_its_legend_in_a_wide_font():
    root = ElementTree.fromstring(figures.picture({}, 50))
    style, background, *_ = root
    assert [background.get(key) for key in ("width", "height", "fill")] == ["100%", "100%", "#fff"]
    assert "prefers-color-scheme" not in style.text
    colours = [e.get("fill") for e in root if e.tag.endswith("path") and e.get("fill")]
    assert colours == [YELLOW, BLUE]  # likely, unlikely
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


def test_the_cells_of_a_text_lie_in_lines_of_so_many_columns():
    root = ElementTree.fromstring(figures.picture({"x": [("a", False, 1)] * 7}, 3))
    boxes = [e.get("d") for e in root if e.tag.endswith("path")][3:]
    assert boxes == [f"M{x} {y}h10v19h-10" for y in (56, 76, 96) for x in (0, 10, 20)][:7]


def test_runs_are_drawn_on_the_same_given_text_or_first_validation_row(
        trained, data, tmp_path, monkeypatch):
    for run in "learned-7", "learned-8":
        shutil.copytree(trained, tmp_path / "x/runs" / run)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.main(["--name=x"])
    made = read_picture(tmp_path / "x/boundaries.svg")
    assert [*made] == ["learned-7", "learned-8"]
    row = (data / "val_00000.bin").read_bytes()[:32].decode()
    assert "".join(text for text, *_ in made["learned-8"]) == row.replace("\n", "⏎")
    assert made["learned-7"] == made["learned-8"]  # the same draws

    run = f"{tmp_path}/x/runs/learned-7"
    figures.main(["--name", "y", run, f"{run}/ckpt.pt", "--text", "hello there"])
    [text] = read_picture(tmp_path / "y/boundaries.svg").values()
    assert "".join(character for character, *_ in text) == "hello there"
