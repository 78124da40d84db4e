"""The pages and pictures that show boundaries."""
import html
import json
import math
import re
import shutil
from xml.etree import ElementTree

import pytest
import torch

from experiments import diagram, figures, page
from model import load_checkpoint
from sample import scored

TEXT = 'a <b>é</b>\n\t"€"\n\n</script><!-- 😀 &amp; the end'


def characters():
    """Of each character of TEXT: how it is shown, and the numbers of its bytes."""
    first = 0
    for character in TEXT:
        own = range(first, first + len(character.encode()))
        first = own.stop
        yield character.replace("\t", "␉").replace("\n", "⏎\n"), own


def texts(page):
    """Of each text of a page: [(character, class, what it tells)]."""
    span = re.compile('<span class="([^"]*)" tabindex="0" data-told="([^"]*)">(.*?)</span>', re.S)
    return [[(html.unescape(shown), kind, told) for kind, told, shown in span.findall(text)]
            for text in page.split('<div class="text">')[1:]]


def test_every_character_tells_its_p_its_bytes_its_bits_and_whether_a_token_ends():
    data = TEXT.encode()
    steps = [(byte, i % 3 == 0, i / 100, i / 10) for i, byte in enumerate(data)]
    expected = []
    for shown, own in characters():
        last, bits = own.stop - 1, sum(i / 10 for i in own) / math.log(2)
        ends = any(i % 3 == 0 for i in own)
        told = f"p = {last / 100:.2f}, bytes {data[own.start : own.stop].hex(' ')}, {bits:.2f} bits"
        expected.append((shown, f"c{last}" + " end" * ends, told + ", a token ends" * ends))
    made = page.as_html([("x", steps), ("y", steps[:1])])
    assert texts(made) == [expected, expected[:1]]


def test_nothing_of_a_text_or_of_its_name_is_markup_and_the_page_needs_no_other_file():
    steps = [(byte, True, 0.5, 1.0) for byte in TEXT.encode()]
    made = page.as_html([("</h2><script>alert(1)</script>", steps)])
    assert {*re.findall("<([^ >]*)", made)} == {
        "!doctype", "html", "meta", "title", "style", "h1", "h2", "p", "span", "div",
        "/html", "/title", "/style", "/h1", "/h2", "/p", "/span", "/div"}
    assert not any(word in made for word in ("http", "src=", "url(", "@import"))


def test_text_is_legible_on_every_colour():
    def luminance(colour):  # WCAG 2.2
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
                  for c in (b / 255 for b in bytes.fromhex(colour[1:]))]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for percent in range(101):
        low, high = sorted(map(luminance, page.cell_colours(percent / 100)))
        assert (high + 0.05) / (low + 0.05) >= 4.5


def test_the_command_line_shows_what_the_checkpoint_says_of_a_text(trained, tmp_path):
    (tmp_path / "a").write_text(TEXT)
    page.main([f"--out_dir={trained}", f"--score={tmp_path}/a", f"--html={tmp_path}/a.html"])
    model, _ = load_checkpoint(trained / "ckpt.pt")
    torch.manual_seed(0)
    steps = list(scored(model, TEXT.encode(), "cpu"))
    assert texts((tmp_path / "a.html").read_text()) == texts(page.as_html([("", steps)]))


@pytest.mark.parametrize("script, arguments, message", [
    (page, ["--out_dir={trained}", "--score={tmp}/a", "--html={tmp}/x/../a"], "is the text"),
    (page, ["--out_dir={trained}", "--score={tmp}/none", "--html={tmp}/b"], "No such file"),
    (page, ["--out_dir={tmp}", "--score={tmp}/a", "--html={tmp}/b"], "no checkpoint"),
    (page, ["--out_dir={trained}", "--score={tmp}/a"], "--html"),
    (figures, ["--watch={tmp}/none"], "No such file"),
    (figures, ["--watch={tmp}/a"], "is not what train.py writes"),
    (figures, ["--watch={tmp}/empty"], "has no evaluation"),
    (figures, ["--name=none/such"], "no runs"),
    (diagram, ["{trained}/ckpt.pt", "{tmp}/b", "--text=x"], "two bytes"),
    (diagram, ["{trained}/ckpt.pt", "{tmp}/b", "--text=né"], "ascii"),
])
def test_a_mistake_is_one_line_and_no_file_changes(
        script, arguments, message, trained, tmp_path, capsys):
    (tmp_path / "x").mkdir()
    files = {"a": "4\n", "empty": '{"step": 20}\n{"step": 2'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit) as stopped:
        script.main([argument.format(tmp=tmp_path, trained=trained) for argument in arguments])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and message in error
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == files


MEGABYTES = 0, 1, 2, 4, 5


@pytest.fixture
def watched(tmp_path):
    """A folder with log.jsonl and what --watch makes of it.

    It has evaluations of TEXT; in the k-th, from 1, p is 0 and a token ends at every k-th byte;
    elsewhere p is 1.
    """
    def evaluation(megabytes, text, k):
        line = [(byte, int(i % k == 0), float(i % k > 0)) for i, byte in enumerate(text)]
        return {"bytes": megabytes * 10**6, "val_bpb": 8 / (1 + megabytes), "val_rate": 0.2,
                "line": line}

    records = [evaluation(1, b"other data", 2), {"step": 1, "auto": 2.0}]
    records += [evaluation(m, TEXT.encode(), k) for k, m in enumerate(MEGABYTES, 1)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    out = tmp_path / "<script>"
    out.mkdir()
    (out / "log.jsonl").write_text(lines + '{"step": 6, "li')  # train.py is at work
    figures.main([f"--watch={out}/log.jsonl"])
    return out


def expected(k):
    """(character, whether a token ends, p) of the k-th evaluation."""
    return [(shown, any(i % k == 0 for i in own), float((own.stop - 1) % k > 0))
            for shown, own in characters()]


def test_a_watched_run_shows_every_evaluation_of_its_text_from_step_0_on_a_curve(watched):
    made = (watched / "watch.html").read_text()
    assert made.count("<script>") == made.count("</script>") == 1 and "<!--" not in made
    assert texts(made) == [
        [(shown, f"c{100 * p:.0f}" + " end" * ends, f"p = {p:.2f}" + ", a token ends" * ends)
         for shown, ends, p in expected(k)] for k in range(1, 6)]
    assert re.findall(r"<p>(.*) bits per byte, rate 0.200</p>", made) == [
        f"{m}.00 MB read, {8 / (1 + m):.3f}" for m in MEGABYTES]
    points = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="(.*?)" cy="(.*?)"', made)]
    (x0, y0), (x5, y5) = points[0], points[-1]
    assert 0 == x0 < x5 == 440 and 0 <= y0 < y5 <= 150
    assert [((x - x0) / (x5 - x0), (y - y0) / (y5 - y0)) for x, y in points] == [
        pytest.approx((m / 5, math.log(1 + m) / math.log(6)), abs=0.01) for m in MEGABYTES]


def test_the_picture_shows_the_first_evaluation_the_last_and_two_between(watched):
    picture = ElementTree.parse(watched / "watch.svg").getroot()
    texts = [(e.get("class"), e.text) for e in picture.iter("{http://www.w3.org/2000/svg}text")]
    paths = [e.attrib for e in picture.iter("{http://www.w3.org/2000/svg}path")]
    stills = [(k, MEGABYTES[k - 1]) for k in (1, 2, 4, 5)]  # of five
    assert [text.split(" MB")[0] for kind, text in texts if kind] == [f"{m}.00" for _, m in stills]
    cells = [(shown.strip("\n"), "#fee838" if p else "#00224e")
             for k, _ in stills for shown, _, p in expected(k)]
    backgrounds = {path["d"]: path["fill"] for path in paths if "fill" in path}  # by place
    assert list(zip((text for kind, text in texts if not kind), backgrounds.values())) == cells
    assert sum("class" in path for path in paths) == sum(
        ends for k, _ in stills for _, ends, _ in expected(k))


def test_of_every_system_the_first_run_is_drawn_on_the_first_held_out_row(
        trained, data, tmp_path, monkeypatch):
    for run in "learned-7", "learned-8":
        shutil.copytree(trained, tmp_path / "x/runs" / run)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.main(["--name=x"])
    made = (tmp_path / "x/boundaries.html").read_text()
    assert re.findall("<h2>(.*?)</h2>", made) == ["learned-7, target 1/5"]
    row = (data / "val_00000.bin").read_bytes()[:32].decode()
    assert "".join(shown for shown, *_ in texts(made)[0]) == row.replace("\n", "⏎\n")
    for name in "boundaries.png", "entropy.png", "entropy.svg":
        assert (tmp_path / "x" / name).stat().st_size > 1000


def test_the_diagram_shows_both_draws_and_the_advantage_of_the_first(trained):
    a = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 0]]).bool()
    logp, G = -torch.ones(2, 4), torch.tensor([-3.0, -4.5])
    picture = diagram.picture("a<c ", a, logp, G)
    ElementTree.fromstring(picture)
    assert picture.count('class="end"') == 5 and picture.count('class="inside"') == 3
    assert picture.count('class="way"') == 2 and "= +1.5<" in picture and "1 likelier" in picture
    assert "1 less likely" in diagram.picture("a<c ", a, logp, G.flip(0))
    a, logp, G = diagram.two_draws(load_checkpoint(trained / "ckpt.pt")[0], "a<c ", 0.5)
    assert G.tolist() == pytest.approx((logp[:, 1] + logp[:, 2] / 2 + logp[:, 3] / 4).tolist())
