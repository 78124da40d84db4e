"""The pages and pictures that show boundaries, in a real browser."""
import json
import math
import resource
import shutil
import subprocess
import threading
import time
import xml.etree.ElementTree as ElementTree

import pytest

import sample
from experiments import figures

KEYS = {"Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
TEXT = 'a <b>é</b>\n\t"€"\n\n</script><!-- 😀 &amp; the end'
SHOWN = TEXT.replace("\t", "␉")


class Browser:
    """Headless Chromium, driven over its own debugging pipe: JSON both ways, a zero byte after each message."""

    def __init__(self, program, profile):
        self.process = subprocess.Popen(
            ["sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1', "sh", program, "--headless=new", "--no-sandbox", "--disable-gpu",
             "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.watchdog = threading.Timer(120, self.process.kill)  # reading then ends with an error
        self.watchdog.start()
        self.sent, self.unread, self.events, self.session = 0, b"", [], {}
        target = next(info for info in self.call("Target.getTargets")["targetInfos"] if info["type"] == "page")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in "Page", "Runtime", "Network", "Log":
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=900, height=700, deviceScaleFactor=1, mobile=False)

    def receive(self):
        while b"\0" not in self.unread:
            new = self.process.stdout.read1(1 << 20)
            assert new, "the browser has ended"
            self.unread += new
        message, _, self.unread = self.unread.partition(b"\0")
        return json.loads(message)

    def call(self, method, **params):
        self.sent += 1
        self.process.stdin.write(json.dumps({"id": self.sent, "method": method, "params": params} | self.session).encode() + b"\0")
        self.process.stdin.flush()
        while (message := self.receive()).get("id") != self.sent:
            self.events.append(message)
        assert "error" not in message, message
        return message["result"]

    def open(self, path):
        self.events = []
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())

    def run(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, *keys):
        for key in keys:
            self.call("Input.dispatchKeyEvent", type="rawKeyDown", key=key, code=key, windowsVirtualKeyCode=KEYS[key])
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def point(self, element, *buttons):
        """Moves the mouse to the middle of what a script names, and with "left" clicks there."""
        x, y = self.run(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({element}.getBoundingClientRect())")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for button in buttons:
            for kind in "mousePressed", "mouseReleased":
                self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not program:
        pytest.skip("none of chromium, chromium-browser and google-chrome is installed")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.call("Browser.close")
    browser.process.wait()
    browser.watchdog.cancel()


@pytest.fixture
def browser(started):
    """A browser that must not have had anything to complain of, nor have asked for more than the page."""
    started.call("Emulation.setEmulatedMedia", features=[])
    yield started
    started.run("0")  # what came before has been told after this
    told = [event for event in started.events
            if event["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")]
    assert not told
    asked = [event["params"]["request"]["url"] for event in started.events if event["method"] == "Network.requestWillBeSent"
             and not event["params"]["request"]["url"].startswith("chrome:")]  # the tab that was there before
    assert len(asked) == 1 and asked[0].startswith("file:")


def evaluation(step, text, ends, p):
    line = {"text": text.decode("latin-1"), "ends": ends, "p": bytes(p).hex()}
    return {"step": step, "bytes": step * 10**6, "val_bpb": 8 / step, "val_rate": 0.2, "line": line}


@pytest.fixture
def log(tmp_path):
    """A log of four evaluations of TEXT, the k-th with p = 0 and a token's end at every k-th byte, else p = 1."""
    text = TEXT.encode()
    records = [evaluation(k, text, list(range(0, len(text), k)), [255 * (i % k > 0) for i in range(len(text))]) for k in (1, 2, 4, 5)]
    records = [{"step": 1, "auto": 2.0}, {"step": 1, "val_bpb": 9.0}, evaluation(1, b"another text", [], [0] * 12), *records]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 6, "li')
    return tmp_path / "log.jsonl"


def cells(k):
    """(character, whether a token ends, p) of the log's evaluation k."""
    first = 0
    for character in TEXT:
        own = range(first, first + len(character.encode()))
        first = own.stop
        yield character.replace("\t", "␉"), any(i % k == 0 for i in own), float((own.stop - 1) % k > 0)


def on_the_page(browser):
    """The same as the page shows it, p from its colours: blue 0, yellow 1."""
    return browser.run("""[...document.querySelectorAll(".text span")].map(span => [span.textContent,
        getComputedStyle(span).boxShadow != "none",
        {"rgb(0, 34, 78)": 0, "rgb(254, 232, 56)": 1}[getComputedStyle(span).backgroundColor]])""")


def test_text_and_boundaries_follow_the_slider_from_the_keyboard(browser, log):
    figures.main([f"--watch={log}"])
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])  # colours at once
    browser.open(log.with_name("watch.html"))
    browser.press("Tab", "Tab")
    assert browser.run("[document.activeElement.type, document.activeElement.labels[0].textContent]") == ["range", "training"]
    for k, key in (1, "ArrowLeft"), (2, "ArrowRight"), (4, "ArrowRight"), (5, "ArrowRight"), (5, "ArrowRight"), (4, "ArrowLeft"):
        browser.press(key)
        assert on_the_page(browser) == [list(cell) for cell in cells(k)]
        words = f"{k}.00 MB read, {8 / k:.3f} bits per byte, rate 0.200"
        assert browser.run("[words.textContent, slider.getAttribute('aria-valuetext')]") == [words, words]
        x, y = browser.run("""(([p, c]) => [(p.x + p.width / 2 - c.x) / c.width, (p.y + p.height / 2 - c.y) / c.height])(
            [point, curve].map(element => element.getBoundingClientRect()))""")
        assert [x, y] == pytest.approx([(k - 1) / 4, (8 - 8 / k) / (8 - 8 / 5)], abs=0.01)  # of the curve's width and height
    assert browser.run("document.querySelector('.text').textContent") == SHOWN


def test_playing_goes_to_the_end_and_is_not_read_out_before(browser, log):
    figures.main([f"--watch={log}"])
    browser.open(log.with_name("watch.html"))
    time.sleep(0.5)
    assert browser.run("[slider.value, play.textContent, words.ariaLive]") == ["0", "Play", "off"]
    browser.run("""live = []; new MutationObserver(() => live.push([slider.value, words.ariaLive])).observe(words, {childList: true})""")
    browser.point("play", "left")
    assert browser.run("play.textContent") == "Pause"
    end = time.time() + 5
    while browser.run("play.textContent") == "Pause":
        assert time.time() < end
        time.sleep(0.05)
    assert browser.run("live") == [["0", "off"], ["1", "off"], ["2", "off"], ["3", "polite"]]
    browser.point("play", "left")  # once more, from the start
    browser.point("play", "left")
    assert browser.run("[slider.value, play.textContent, words.ariaLive]") == ["0", "Play", "polite"]


def test_motion_and_colours_are_those_that_the_reader_prefers(browser, log):
    figures.main([f"--watch={log}"])
    for motion, seconds in ("reduce", "0s"), ("no-preference", "0.2s, 0.2s"):
        for scheme, text in ("light", "rgb(0, 0, 0)"), ("dark", "rgb(255, 255, 255)"):
            browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": motion},
                                                                 {"name": "prefers-color-scheme", "value": scheme}])
            browser.open(log.with_name("watch.html"))
            assert browser.run("[text.firstChild, words].map(e => getComputedStyle(e)).map(s => [s.transitionDuration, s.color])") == [
                [seconds, "rgb(255, 255, 255)"], ["0s", text]]


def test_stills_show_the_first_characters_of_four_evaluations(log):
    figures.main([f"--watch={log}"])
    picture = ElementTree.parse(log.with_name("watch.svg")).getroot()
    name = "{http://www.w3.org/2000/svg}"
    labels = [element.text for element in picture.iter(f"{name}text") if element.text]
    assert [label.split(" MB")[0] for label in labels] == ["1.00", "2.00", "4.00", "5.00"]
    assert ["".join(e.itertext()) for e in picture.iter(f"{name}text") if not e.text] == [SHOWN.replace("\n", "⏎")] * 4
    fills = [path.get("fill") for path in picture.iter(f"{name}path") if path.get("fill")]
    assert fills == ["#fee838" if p else "#00224e" for k in (1, 2, 4, 5) for *_, p in cells(k)]
    ends = [path.get("d").count("M") for path in picture.iter(f"{name}path") if path.get("stroke") == "#e00"]
    assert ends == [sum(a for _, a, _ in cells(k)) for k in (1, 2, 4, 5)]


def test_a_run_of_train_py_can_be_watched(browser, trained, tmp_path):
    shutil.copy(trained / "log.jsonl", tmp_path)
    figures.main([f"--watch={tmp_path}/log.jsonl"])
    browser.open(tmp_path / "watch.html")
    assert browser.run("[document.querySelector('.text').textContent, +slider.max]")[1] == 2  # 12 steps, one evaluation in 4
    assert browser.run("text.textContent") in "".join(f"{i} the quick brown fox jumps over the lazy dog\n" * 6 for i in range(40))


@pytest.mark.parametrize("content, message", [
    ('{"step": 4, "val_bpb": 2.0}\n', "has no evaluation with a line of text, which older runs did not log; train anew"),
    ("", "has no evaluation with a line of text"),
    ("step 4 validation\n", "is not what train.py writes"),
    ("4\n", "is not what train.py writes"),
    (None, "No such file"),
])
def test_a_log_that_cannot_be_watched_is_one_line(content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "log.jsonl").write_text(content)
    with pytest.raises(SystemExit) as stopped:
        figures.main([f"--watch={tmp_path}/log.jsonl"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and message in error and f"{tmp_path}/log.jsonl" in error
    assert not list(tmp_path.glob("watch*"))


def steps():
    return [(byte, i % 3 == 0, i / 100, i / 10) for i, byte in enumerate(TEXT.encode())]


def told(first, character):
    """What a page tells of a character whose bytes begin with this one."""
    data = character.encode()
    own = range(first, first + len(data))
    bits = sum(i / 10 for i in own) / math.log(2)
    shown = {"\t": "␉", "\n": "⏎"}.get(character, character)
    end = ", a token ends" if any(i % 3 == 0 for i in own) else ""
    return f"{shown} \u2002 p = {(own.stop - 1) / 100:.2f}, bytes {data.hex(' ')}, {bits:.2f} bits{end}"


@pytest.mark.parametrize("chunk", [4, 2000])
def test_every_character_tells_its_p_bytes_and_bits_where_the_arrow_keys_go(browser, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(sample, "CHUNK", chunk)
    sample.write(tmp_path / "page.html", sample.as_html([("<i>", steps()), ("another", [(ord("x"), True, 1.0, 0.0)])]))
    browser.open(tmp_path / "page.html")
    assert browser.run("[...document.querySelectorAll('h2, .text')].map(e => e.textContent)") == ["<i>", SHOWN, "another", "x"]
    browser.press("Tab")
    starts = [len(TEXT[:i].encode()) for i in range(len(TEXT))]
    there = list(zip(["ArrowRight"] * len(TEXT), starts, TEXT))
    back = list(zip(["ArrowLeft"] * len(TEXT), starts[-2::-1] + [0], TEXT[-2::-1] + TEXT[0]))  # the last key would leave the text
    for key, first, character in there + [there[-1]] + back:
        browser.press(key)
        assert browser.run("[document.querySelector('[role=status]').textContent, document.activeElement.textContent]") == [
            told(first, character), character.replace("\t", "␉")]
    browser.press("Tab", "ArrowRight")
    assert browser.run("document.querySelector('[role=status]').textContent") == "x \u2002 p = 1.00, bytes 78, 0.00 bits, a token ends"


def test_arrow_keys_go_up_and_down_a_column_and_the_mouse_asks_too(browser, tmp_path):
    sample.write(tmp_path / "page.html", sample.as_html([("text", [(byte, True, 0.5, 1.0) for byte in b"abcd\nef\n\nghij\nkl"])]))
    browser.open(tmp_path / "page.html")
    browser.press("Tab", *["ArrowRight"] * 4)
    seen = ""
    for key in ["ArrowDown"] * 5 + ["ArrowUp"] * 5:
        browser.press(key)
        seen += browser.run("document.activeElement.textContent")
    assert seen == "\n\ngkkg\n" + "eaa"
    browser.point("document.querySelectorAll('.text span')[1]")
    assert browser.run("document.querySelector('[role=status]').textContent").startswith("b \u2002 p = 0.50, bytes 62, ")
    browser.point("document.querySelectorAll('.text span')[10]", "left")
    browser.press("ArrowRight")
    assert browser.run("document.activeElement.textContent") == "i"


def test_of_a_long_text_only_what_is_near_has_spans(browser, tmp_path):
    text = b"".join(b"%d of many lines of text, each of some thirty\n" % i for i in range(4000))
    sample.write(tmp_path / "page.html", sample.as_html([("long", [(byte, True, 0.5, 1.0) for byte in text])]))
    browser.open(tmp_path / "page.html")
    count = "new Promise(done => setTimeout(() => done(document.querySelectorAll('.text span').length), 300))"
    assert 1000 < browser.run(count) < 20000
    assert browser.run("document.querySelector('.text').textContent") == text.decode()
    browser.run("scrollTo(0, document.body.scrollHeight)")
    browser.run(count)
    assert browser.run("document.querySelector('.text > div:last-child').childElementCount") > 0
    assert browser.run("document.querySelector('.text').textContent") == text.decode()


def test_text_is_legible_on_every_colour():
    def luminance(colour):  # WCAG 2.2
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (b / 255 for b in bytes.fromhex(colour[1:]))]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for percent in range(101):
        low, high = sorted(map(luminance, sample.cell_colours(percent)))
        assert (high + 0.05) / (low + 0.05) >= 4.5


def test_a_page_for_which_there_is_no_room_leaves_the_old_one(tmp_path):
    sample.write(tmp_path / "page.html", "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError):
            sample.write(tmp_path / "page.html", "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "page.html").read_text() == "old"
