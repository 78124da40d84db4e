"""prepare.py against oracles that share no code with it."""
import errno
import gzip
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path, PureWindowsPath

import numpy as np
import pytest

import prepare
from common import files
from common.commandline import UserError
from conftest import ROOT, run


def make_files(folder, sizes, seed=0):
    """Writes files of random letters; returns their contents in the order of their names."""
    rng = random.Random(seed)
    folder.mkdir()
    documents = [bytes(rng.choices(range(97, 123), k=size)) for size in sizes]
    for i, document in enumerate(documents):
        path = folder / f"{i // 5:03d}" / f"{i:04d}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(document)
    return documents


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(prepare, "SHARD_BYTES", 799)


@pytest.fixture
def documents(tmp_path):
    return make_files(tmp_path / "in", [1030] * 20)


def small(tmp_path, *more):
    """Arguments for a small set."""
    return ["--dataset=files", f"--input={tmp_path}/in", f"--out_dir={tmp_path}/out",
            "--seq_len=100", "--val_fraction=0.3", *more]


def hf(path, out_dir, *more):
    return ["--dataset=hf", f"--hf_path={path}", f"--out_dir={out_dir}", "--seq_len=10", *more]


def written(out_dir, split):
    """All that the shards of a split hold, also the bytes after the last row."""
    return b"".join(path.read_bytes() for path in sorted(out_dir.glob(f"{split}_*.bin")))


def sides(documents, out_dir, seq_len=100, separator=b"\n\n"):
    """Checks that each document is in train, in val, or begins in train and ends in val, in order.

    Returns the number of its bytes in train and in val.
    """
    rest = {split: written(out_dir, split) for split in ("train", "val")}
    for split, data in rest.items():
        shards = prepare.open_shards(out_dir, split, seq_len)
        assert np.concatenate(shards).tobytes() == data[: len(data) // seq_len * seq_len]

    def take(split, part):
        found = rest[split].startswith(part + separator)
        if found:
            rest[split] = rest[split][len(part + separator) :]
        return found

    counts = []
    for document in documents:
        begin = os.path.commonprefix([document, rest["train"]])
        if take("train", document):
            begin = document
        elif take("val", document):
            begin = b""
        else:
            assert take("train", begin) and take("val", document[len(begin) :])
        counts.append((len(begin), len(document) - len(begin)))
    assert rest == {"train": b"", "val": b""}
    return counts


def contents(out_dir):
    return {path.name: path.read_bytes() for path in out_dir.iterdir() if path.name != ".lock"}


def error_of(*arguments):
    """The message with which a run must fail."""
    with pytest.raises(UserError) as error:
        prepare.main([*arguments])
    return str(error.value)


def interrupt(monkeypatch, arguments, notes=1):
    """Presses Ctrl-C when progress.json is written for this many times."""
    times = []

    def write_and_interrupt(path, text):
        files.write_text(path, text)
        times.append(path)
        if len(times) == notes:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_text", write_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare.main(arguments)


# ---- Rows and splits.
SIZES = [1, 99, 100, 101, 250, 1000, 12345, 30_077, *range(40, 400, 7)]


def test_documents_are_packed_end_to_end_and_only_the_last_part_of_a_row_is_left_out(
        tmp_path, capsys):
    documents = make_files(tmp_path / "in", SIZES)
    (tmp_path / "in/empty").touch()
    out = tmp_path / "out"
    prepare.main(small(tmp_path))
    sides(documents, out)
    state = json.loads((out / "meta.json").read_text())
    assert state["options"]["separator"] == "\n\n" and state["options"]["seq_len"] == 100
    left_out = sum(len(written(out, split)) % 100 for split in ("train", "val"))
    assert f", {left_out} left out (--seq_len=100, --pack=True)" in capsys.readouterr().out
    for split in "train", "val":
        shards = prepare.open_shards(out, split, 50)
        assert {shard.nbytes for shard in shards[:-1]} == {700}
        assert state[split]["bytes"] == sum(shard.nbytes for shard in shards)


def test_without_packing_only_the_first_row_of_a_document_is_used(tmp_path, capsys):
    documents = make_files(tmp_path / "in", SIZES)
    prepare.main(small(tmp_path, "--pack=False"))
    firsts = [document[:100] for document in documents if len(document) >= 100]
    assert all(0 in row for row in sides(firsts, tmp_path / "out", separator=b""))
    said = capsys.readouterr().out
    assert f" {sum(SIZES) - 100 * len(firsts):,} left out (--seq_len=100, --pack=False)" in said


@pytest.mark.parametrize("sizes, fraction, ends", [
    ([100_000] * 3, 0.02, [2000, 2000, 2000]),
    ([9000, 5000, 7000], 0.1, [900, 500, 700]),
    ([3000], 0.11, [400]),  # rounded up to rows
    ([150, 220, 8000], 0.05, [100, 0, 400]),  # the share is at least a row
    ([40, 30, 20, 20, 3000], 0.1, [40, 30, 20, 20, 200]),  # what is shorter goes whole
    ([100_000, 1000, 900, 60_000], 0.02, [2000, 100, 0, 1200]),
    ([100] * 8, 0.25, [100, 0, 0, 0, 100, 0, 0, 0])])
def test_val_gets_the_last_rows_of_documents(sizes, fraction, ends, tmp_path, capsys):
    documents = make_files(tmp_path / "in", sizes)
    prepare.main(small(tmp_path, f"--val_fraction={fraction}"))
    counts = sides(documents, tmp_path / "out")
    assert [end for _, end in counts] == ends
    train, val = (sum(n > 0 for n in side) for side in zip(*counts))
    said = capsys.readouterr().out
    assert f" of {train} documents for training" in said and f" of {val} for validation" in said


def test_after_each_document_val_has_its_share_and_less_than_a_row_more(tmp_path):
    rng = random.Random(1)
    sizes = [100 + int(rng.expovariate(1 / rng.choice([9, 200, 5000]))) for _ in range(300)]
    documents = make_files(tmp_path / "in", sizes)
    prepare.main(small(tmp_path, "--val_fraction=0.02"))
    total = held = 0
    for train, val in sides(documents, tmp_path / "out"):
        share = max(0.02 * (total + train + val), 100)
        assert held + val >= share
        assert held + val < share + 100 or val == 0
        total += train + val + 2 * (train > 0) + 2 * (val > 0)  # two newlines
        held += val + 2 * (val > 0)


def test_a_copied_record_is_used_once_even_if_a_run_stops_between_the_copies(
        tmp_path, monkeypatch, capsys):
    texts = [f"{i % 500:010d}" for i in range(2000)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    arguments = hf(tmp_path / "a.jsonl", tmp_path / "out", "--val_fraction=0.1")
    interrupt(monkeypatch, arguments, notes=5)
    prepare.main(arguments)
    sides([text.encode() for text in texts[:500]], tmp_path / "out", 10)
    assert "2000 records of type str, 1500 copies skipped" in capsys.readouterr().out


def test_max_bytes_is_not_exceeded_and_hardly_more_is_read(documents, tmp_path, monkeypatch):
    def spy(*arguments):
        for document, bookmark in read_files(*arguments):
            read.append(document)
            yield document, bookmark

    read = []
    read_files = prepare.read_files
    monkeypatch.setattr(prepare, "read_files", spy)
    prepare.main(small(tmp_path, "--max_bytes=15e3 + 550"))
    size = sum(len(written(tmp_path / "out", split)) for split in ("train", "val"))
    assert 15_546 <= size <= 15_550  # a separator or two are kept free
    assert read == documents[:17]
    assert "max_bytes was 15550 and is now 0;" in error_of(*small(tmp_path))


@pytest.mark.parametrize("flags, sizes", [
    ([], [250, 2500, 80, 130, 700, 333, 999, 100, 400, 400]), (["--pack=False"], [150] * 30)])
def test_killed_at_any_line_the_same_command_ends_with_the_same_files(
        flags, sizes, tmp_path, monkeypatch):
    """A kill leaves what is on the disk, so the folder is copied before each line runs."""
    monkeypatch.setattr(prepare, "LARGEST", 900)  # the longer files are read in pieces
    documents = make_files(tmp_path / "in", sizes, seed=7)
    (tmp_path / "in/zz").write_bytes(documents[2])  # a copy
    arguments = small(tmp_path, "--val_fraction=0.1", *flags)
    out = tmp_path / "out"
    moments = {}

    def trace(frame, event, _):
        if frame.f_code.co_filename in (prepare.__file__, files.__file__) and out.exists():
            moment = contents(out)
            moments[repr(sorted(moment.items()))] = moment
            return trace

    sys.settrace(trace)
    prepare.main(arguments)
    sys.settrace(None)
    want = contents(out)
    assert len(moments) > 10
    assert {"train_00002.bin", "val_00000.bin", "meta.json"} < want.keys()
    for moment in moments.values():
        shutil.rmtree(out)
        out.mkdir()
        for name, content in moment.items():
            (out / name).write_bytes(content)
        prepare.main(arguments)
        assert contents(out) == want, moment.keys()


def test_a_full_disk_is_one_line_with_the_path_and_leaves_the_last_progress_json(
        documents, tmp_path, monkeypatch):
    def fill(path, text, **_):
        path.write_bytes(text.encode()[:100])
        raise OSError(28, "No space left on device")

    interrupt(monkeypatch, small(tmp_path))
    before = contents(tmp_path / "out")["progress.json"]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fill)
        line = error_of(*small(tmp_path))
    assert f"{tmp_path}/out" in line and "No space left" in line
    after = contents(tmp_path / "out")
    assert after["progress.json"] == before and "progress.json.part" not in after
    prepare.main(small(tmp_path))
    sides(documents, tmp_path / "out")


# ---- Files.
def test_the_default_is_the_standard_library_wherever_it_is(tmp_path, monkeypatch):
    library = tmp_path / "my-packages/lib"
    shutil.copytree(Path(sysconfig.get_path("stdlib"), "json"), library / "json")
    shutil.copytree(library / "json", library / "site-packages/other")
    (library / "notes.txt").write_text("text " * 5000)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(library)}.get)
    monkeypatch.chdir(tmp_path)
    prepare.main(["--out_dir="])  # as with an unset variable of a shell
    found = subprocess.check_output(["find", library / "json", "-name", "*.py"], text=True)
    sides([Path(path).read_bytes() for path in sorted(found.split())],
          tmp_path / "data/stdlib", 4096)


def test_leaks_unreadable_files_and_copies_are_skipped_and_counted(
        documents, tmp_path, monkeypatch, capsys):
    for i, path in enumerate([
            ".hidden", ".git/objects/x", "a/__pycache__/x", "b/site-packages/x",
            "c/dist-packages/x", "a/b.pyc", "d/train_00000.bin", "e/val_00000.bin", "f/ckpt.pt"]):
        (tmp_path / "in" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / path).write_bytes(b"%d" % i * 500)
    (tmp_path / "in/f/log.txt").write_bytes(b"y" * 500)  # beside a checkpoint
    (tmp_path / "in/gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "in/fifo")
    monkeypatch.chdir(tmp_path / "in")  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    (tmp_path / "in/copy").write_bytes(documents[7])
    prepare.main(small(tmp_path))
    sides(documents, tmp_path / "out")
    said = capsys.readouterr().out
    assert said.endswith("; 13 paths skipped (see --help), 1 copies skipped\n")


@pytest.mark.parametrize("path, skipped", [
    (r"C:\code\.git\x", True), (r"C:\code\a\site-packages\x", True), (r"C:\code\a\x", False)])
def test_names_are_skipped_on_windows_too(path, skipped):
    assert prepare.has_skipped_name(PureWindowsPath(path), PureWindowsPath(r"C:\code")) == skipped


@pytest.mark.parametrize("flags, wanted, message", [
    ([], 4, "; 3 files with NUL bytes skipped (--binary=True uses them)\n"),
    (["--binary=True"], 7, "; all used\n")])
def test_files_with_nul_bytes_are_skipped_and_counted_unless_a_flag_asks_for_them(
        flags, wanted, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "LARGEST", 10_000)
    texts = make_files(tmp_path / "in", [500, 9000])
    late = texts[1] + (b"\0" + b"a" * 1400) * 2  # after 8192 bytes, and in both pieces
    binary = [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"SQLite format 3\0" + b"x" * 9000,
              "ünicode".encode("utf-16")]
    for i, content in enumerate([late, *binary]):
        (tmp_path / f"in/z{i}").write_bytes(content)
    prepare.main(small(tmp_path, *flags))
    found = [*texts, late[:10_000], late[10_000:], *binary]
    sides(found[:wanted], tmp_path / "out")
    assert capsys.readouterr().out.endswith(message)


def test_overlapping_inputs_give_each_file_once_and_never_our_own_shards(
        documents, tmp_path, monkeypatch, capsys):
    (tmp_path / "in/link").symlink_to("001/0008")
    (tmp_path / "in/[x]").write_bytes(b"y" * 100)
    (tmp_path / "in/out").mkdir()
    (tmp_path / "in/out/val_00000.bin").write_bytes(b"z" * 100)  # of a run killed at its start
    arguments = small(tmp_path / "in")  # its shards go to in/out
    arguments[1] = f"--input={tmp_path}/**/*0??*"
    arguments += ["--input", f"{tmp_path}/in/002", f"{tmp_path}/in/[x]", f"{tmp_path}/in/link"]
    interrupt(monkeypatch, arguments)
    prepare.main(arguments)
    assert "copies" not in capsys.readouterr().out
    sides([*documents, b"y" * 100], tmp_path / "in/out")


def test_a_glob_skips_below_its_wildcard_only(documents, tmp_path, capsys):
    package = tmp_path / "lib/site-packages/pack"
    shutil.copytree(tmp_path / "in", package / "deep.d")
    arguments = small(tmp_path)
    arguments[1] = f"--input={tmp_path}/**/0*"
    prepare.main(arguments)
    assert "; 24 paths skipped" in capsys.readouterr().out
    sides(documents, tmp_path / "out")
    for i, pattern in enumerate(["**/0*", "deep*", "deep.d"]):
        arguments[1:3] = [f"--input={package}/{pattern}", f"--out_dir={tmp_path}/inside{i}"]
        prepare.main(arguments)
        sides(documents, tmp_path / f"inside{i}")


def test_folders_behind_links_are_read_once_even_in_a_circle(documents, tmp_path, capsys):
    shutil.move(tmp_path / "in/000", tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "in")
    (tmp_path / "in/000").symlink_to("../elsewhere")
    (tmp_path / "in/twice").symlink_to("../elsewhere")
    (tmp_path / "in/.latest").symlink_to("002")  # hides nothing but itself
    prepare.main(small(tmp_path))
    sides([*documents[5:], *documents[:5]], tmp_path / "out")
    assert "; 1 paths skipped" in capsys.readouterr().out


def test_a_glob_of_a_folder_with_links_to_itself_ends_and_finds_each_file_once(
        documents, tmp_path):
    """Each further level would double the paths, until one is too long."""
    for i in range(3):
        (tmp_path / f"in/001/up{i}").symlink_to("..")
    prepare.main(["--dataset=files", f"--out_dir={tmp_path}/out", "--seq_len=100",
                  f"--input={tmp_path}/in/**/0???"])
    sides(documents, tmp_path / "out")


def test_a_folder_that_may_be_listed_but_not_entered_is_skipped_and_counted(documents):
    """Root may do all, so it becomes another user for this."""
    folder = Path(tempfile.mkdtemp())  # pytest's folders are for one user only
    try:
        for name in "a", "closed":
            (folder / name).mkdir()
            (folder / name / "x.txt").write_bytes(documents[0])
        (folder / "closed").chmod(0o744)
        folder.chmod(0o755)
        users = os.getresuid()
        if users[0] == 0:
            os.setresuid(65534, 65534, 0)
        else:
            (folder / "closed").chmod(0o444)
        for place in folder, folder / "*", folder / "**/*.txt":
            counts = Counter()
            files, _ = prepare.find_files(prepare.Options("files", [str(place)]), counts)
            assert files == [folder / "a/x.txt"]
            assert "**" in str(place) or counts == {"paths skipped (see --help)": 1}
    finally:
        os.setresuid(*users)
        (folder / "closed").chmod(0o755)
        shutil.rmtree(folder)


def test_pipes_are_read_and_a_reader_that_is_gone_is_ignored(tmp_path):
    for i in range(2):
        (tmp_path / f"{i}").write_bytes(b"%d" % i * 900)
    command = """cat 0 | $RUN --dataset=files --input - <(head -c 700 1) --out_dir=out \\
        --seq_len=100 | true; echo ${PIPESTATUS[1]}
        $RUN --help | true; echo ${PIPESTATUS[0]}"""
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True,
                          env={**os.environ, "PYTHONUNBUFFERED": "",
                               "RUN": f"{sys.executable} {ROOT}/prepare.py"})
    assert (done.stdout, done.stderr) == (b"0\n0\n", b"")
    sides([b"1" * 700, b"0" * 900], tmp_path / "out")


def test_a_leading_tilde_is_the_home_folder_and_a_folder_may_have_any_name(
        documents, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"\xe9")  # not UTF-8
    prepare.main(["--dataset=files", "--input", "~/in/00*", f"--out_dir=~/{name}", "--seq_len=100"])
    sides(documents, tmp_path / name)
    assert f"of {tmp_path}/none.csv: Unable" in error_of("--dataset=hf", "--hf_path=~/none.csv")
    assert not Path("~").exists()


# ---- Sets that exist.
def test_a_set_is_not_mixed_with_other_options_or_another_input_and_the_change_is_named(
        documents, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    path = tmp_path / "in/001/0007"
    old = path.stat()
    interrupt(monkeypatch, small(tmp_path))
    for _ in "interrupted", "complete":
        before = contents(out)
        changed = f"{out} was made otherwise: the input files changed; use another --out_dir"
        path.rename(tmp_path / "in/zzz")
        assert error_of(*small(tmp_path)) == changed
        (tmp_path / "in/zzz").rename(path)
        path.write_bytes(documents[7][::-1])  # the same size
        assert error_of(*small(tmp_path)) == changed
        path.write_bytes(documents[7])
        os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
        line = error_of(*small(tmp_path, "--val_fraction=1/5"))
        assert " was made otherwise: val_fraction was 0.3 and is now 0.2; use another" in line
        assert contents(out) == before
        prepare.main(small(tmp_path))
    assert "already complete" in capsys.readouterr().out
    sides(documents, out)


def test_a_set_of_an_older_version_is_read_but_not_continued(documents, tmp_path):
    prepare.main(small(tmp_path))
    path = tmp_path / "out/meta.json"
    state = json.loads(path.read_text())
    state["options"] = {name: state["options"][name] for name in ("seq_len", "shard_bytes")}
    path.write_text(json.dumps(state))
    sides(documents, tmp_path / "out")
    assert "out was made by another version of prepare.py" in error_of(*small(tmp_path))


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, 99)])
def test_missing_or_short_shards_are_an_error(damage, documents, tmp_path, monkeypatch):
    out = tmp_path / "out"
    interrupt(monkeypatch, small(tmp_path), notes=4)
    content = contents(out)["train_00001.bin"]
    damage(out / "train_00001.bin")
    damaged = f"{out}/train_00001.bin is missing or damaged; remove {out} and start again"
    assert error_of(*small(tmp_path)) == damaged
    (out / "train_00001.bin").write_bytes(content)
    prepare.main(small(tmp_path))
    damage(out / "train_00001.bin")
    with pytest.raises(UserError, match=damaged):
        prepare.open_shards(out, "train", 100)


@pytest.mark.parametrize("text", ["", "{}", "[]", "7", '{"options": {"seq_len": 100}}', "\0"])
def test_a_damaged_meta_json_is_one_line(text, documents, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/meta.json").write_text(text)
    assert "meta.json is damaged" in error_of(*small(tmp_path))


def test_what_is_no_damage_is_not_called_so(documents, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    prepare.main(small(tmp_path))
    for seq_len in 30, 0, -100, 200:
        with pytest.raises(UserError, match=f"^seq_len={seq_len} does not divide the 100 bytes"):
            prepare.open_shards(tmp_path / "out", "val", seq_len)
    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(PermissionError):
        prepare.open_shards(tmp_path / "out", "train", 100)


# ---- Hugging Face datasets.
@pytest.mark.parametrize("kind", ["jsonl", "json", "tsv.gz", "parquet", "csv"])
def test_hugging_face_files_continue_after_ctrl_c_unless_they_changed(
        kind, tmp_path, monkeypatch, capsys):
    import pyarrow.parquet
    rng = random.Random(1)
    texts = [f"{i:06d}" + "é" * rng.randrange(200) if i % 30 else None for i in range(1500)]
    path = hf_path = tmp_path / f"[a] 1.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    elif kind == "json":
        path.write_text(json.dumps([{"body": text} for text in texts]))
    elif kind != "parquet":  # with a short row where there is no text
        cut = "," if kind == "csv" else "\t"
        rows = [f'{i}{cut}"{text}"' if text else f"{i}" for i, text in enumerate(texts)]
        content = "\r\n".join([f"n{cut}body", *rows]).encode()
        path.write_bytes(content if kind == "csv" else gzip.compress(content))
    else:  # row groups that no shard ends with, in two files
        table = pyarrow.table({"body": texts, "n": [*map(str, range(1499)), "no number"]})
        hf_path = tmp_path / "in"
        hf_path.mkdir()
        path = hf_path / "b.parquet"
        pyarrow.parquet.write_table(table[:400], hf_path / "a.parquet", row_group_size=170)
        pyarrow.parquet.write_table(table[400:], path, row_group_size=170)
    arguments = ["--dataset=hf", f"--hf_path={hf_path}", "--text_column=body", "--seq_len=64",
                 "--val_fraction=0.3"]
    for notes in 1, 45:
        out = tmp_path / str(notes)
        interrupt(monkeypatch, [*arguments, f"--out_dir={out}"], notes)
        assert capsys.readouterr().out.endswith("stopped; the same command continues\n")
        prepare.main([*arguments, f"--out_dir={out}"])
        sides([text.encode() for text in texts if text], out, 64)
        assert "; 50 records of type NoneType, 1450 records of type str" in capsys.readouterr().out
    assert contents(tmp_path / "1") == contents(tmp_path / "45")

    os.utime(path, (1, 1))
    assert "the input files changed" in error_of(*arguments, f"--out_dir={out}")


RECORDS = b'{"text": "first one, "}\n{"text": "\xe2\x98\xba second"}\n'
TEXTS = ["first one, ", "☺ second"]


@pytest.mark.parametrize("name, content, texts, counts", [
    ("a.jsonl.gz",
     gzip.compress(b"\xef\xbb\xbf" + RECORDS + b'{"text": null}\n{}\n{"text": ["a"]}'), TEXTS,
     "2 records of type str, 2 records of type NoneType, 1 records of type list"),
    ("a.json", json.dumps([{"text": "first one,"}, {"body": 7}, {"text": "second one"}], indent=2),
     ["first one,", "second one"], "2 records of type str, 1 records of type NoneType"),
    ("a.json", json.dumps({"text": "pretty\nand alone"}, indent=2), ["pretty\nand alone"],
     "1 records"),
    ("a.csv", 'n,text\n1,"quoted, so"\n\n2\n3,second one\n', ["quoted, so", "second one"],
     "2 records of type str, 1 records of type NoneType"),
    ("a.ndjson", RECORDS, TEXTS, "2 records of type str"),
    ("a.txt.Json", RECORDS, TEXTS, "2 records of type str"),
    ("a.JSONL.GZ", gzip.compress(RECORDS), TEXTS, "2 records"),
    ("a.Tsv", 'n\ttext\n1\tone, two\n2\tsecond one\n', ["one, two", "second one"], "2 records"),
    # not the types, dates and missing values that a reader might guess
    ("a.jsonl", b"".join(b'{"text": "%d-%02d-28T00:00", "n": %s}\n' % (i, i % 12 + 1, n)
                         for i, n in enumerate([b"7", b'"x"', b"null", b"[1.5]"], 2001)),
     ["2001-10-28T00:00", "2002-11-28T00:00", "2003-12-28T00:00", "2004-01-28T00:00"], "4 records"),
    ("a.csv", "text\nN/A n/a\nnan\n-1.#IND\n00017.50\nTrue\n#N/A N/A\n",
     ["N/A n/a", "nan", "-1.#IND", "00017.50", "True", "#N/A N/A"], "6 records of type str"),
    ("a.jsonl", r'{"text": "low \udc4f"}' '\n' r'{"text": "two \ud83d\ud83d, one \ud83d\ude00"}',
     ["low \ufffd", "two \ufffd\ufffd, one 😀"], "2 records"),
    ("a.tsv.gz", gzip.compress(f'\ufeff"text"\tn\n{"long" * 50_000}\t1\n"a\n ""b"""\n'.encode()),
     ["long" * 50_000, 'a\n "b"'], "2 records"),
])
def test_records_are_read_whatever_the_suffix_and_those_without_text_are_counted(
        name, content, texts, counts, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    prepare.main(hf(name, "out", "--seq_len=5"))
    sides([text.encode() for text in texts], Path("out"), 5)
    assert f"; {counts}" in capsys.readouterr().out


def test_a_folder_of_arrow_files_is_read(tmp_path):
    import datasets
    records = [{"n": i, "text": f"{i:010d}"} for i in range(20)]
    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "in", num_shards=2)
    prepare.main(hf(tmp_path / "in", tmp_path / "out"))
    sides([record["text"].encode() for record in records], tmp_path / "out", 10)


def test_spark_folders_and_all_columns_are_read(tmp_path, capsys):
    import pyarrow.parquet
    folder = tmp_path / "in.parquet"
    folder.mkdir()
    for i, texts in enumerate([[], ["0123456789"], ["abcdefghij"]]):
        table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string()),
                               "n": pyarrow.array([i] * len(texts), pyarrow.int64())})
        pyarrow.parquet.write_table(table, folder / f"part-{i}.parquet")
    (folder / "_SUCCESS").touch()
    prepare.main(hf(folder, tmp_path / "out"))
    sides([b"0123456789", b"abcdefghij"], tmp_path / "out", 10)
    assert capsys.readouterr().out.startswith(f"reading 3 of 4 files of {folder}\n")


def test_a_bad_file_in_a_folder_is_named(tmp_path):
    (tmp_path / "in").mkdir()
    for name in "abc":
        line = "no JSON" if name == "b" else '{"text": "0123456789"}'
        (tmp_path / f"in/{name}.jsonl").write_text(line)
    line = error_of(*hf(tmp_path / "in", tmp_path / "out"))
    assert line.startswith("cannot read ") and f"{tmp_path}/in/b.jsonl, line 1: Expect" in line


def test_a_stopped_run_goes_on_at_its_byte(tmp_path, monkeypatch):
    """What was read is made unreadable."""
    path = tmp_path / "a.ndjson"
    lines = [json.dumps({"text": f"{i:09d}é"}) + "\n" for i in range(500)]
    path.write_text("".join(lines))
    time = path.stat().st_mtime_ns
    interrupt(monkeypatch, hf(path, tmp_path / "out"), notes=3)
    read = json.loads((tmp_path / "out/progress.json").read_text())["counts"]["records of type str"]
    path.write_text("".join("?" * (len(line) - 1) + "\n" for line in lines[: read - 1])
                    + "".join(lines[read - 1 :]))
    os.utime(path, ns=(time, time))
    prepare.main(hf(path, tmp_path / "out"))
    sides([f"{i:09d}é".encode() for i in range(500)], tmp_path / "out", 10)


def test_a_glob_of_records_is_read_like_one_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = ["sets/a/1.jsonl", "sets/a/b/[2].jsonl", "sets/a/test.csv"]
    for path in [*wanted, "sets/a/.old.jsonl", "sets/a/notes.md"]:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(f"text\n{path:>20}" if "csv" in path else '{"text": "%20s"}' % path)
    Path("sets/a/again").symlink_to("../a")
    prepare.main(hf("sets/**/*[lv]", "out"))
    sides([f"{path:>20}".encode() for path in wanted], Path("out"), 10)


@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", '{"body": "x", "n": 1}', r"--text_column=text .*'records of type NoneType': 1}; "
     r"the last one's columns are \['body', 'n'\]"),
    ("a.jsonl", '{"text": 7}\n{"text": 8}\n', r"no text, but {'records of type int': 2}"),
    ("a.jsonl", "version https://git-lfs.github.com/spec/v1\nsize 1", "line 1: Expecting value"),
    ("a.jsonl", "", "no records"),
    ("a.json", '[{"text": "x"},\n{"text": "y"},', "a.json, line 2: "),
    ("a.ndjson", b'{"text": null}\n\n{"text": "\xff"}', "a.ndjson, line 3: .* byte 0xff"),
    ("a.jsonl", '\ufeff\n"no object"', "a.jsonl, line 2: this is no JSON object"),
    ("a.csv", 'n,text\n"x\ny"\n1,"y\nz\n', "a.csv, line 4: unexpected end of data"),
    ("a.tsv", 'n\ttext\n1\n"2" y\tx\n3\tz\n', "a.tsv, line 3: '\t' expected after"),
    ("a.csv", "id,text\n2,Yes, well, no\n1,ok\n", "line 2: 4 fields, but the header has 2"),
    ("notes.Doc", "text", "notes.Doc is no .json, .* --dataset=files"),
    ("a.parquet", None, "Unable to find"),
    ("a.jsonl.gz", gzip.compress(bytes(9999))[:30], "ended before"),
])
def test_what_is_wrong_with_a_file_is_said_without_advice_to_try_again(
        name, content, message, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as error:
        prepare.main(hf(path, tmp_path / "out"))
    assert "again" not in str(error.value) and "more text" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("failure, blamed", [
    (ConnectionError("Server Disconnected"), True),
    (RuntimeError("Server Disconnected"), True),  # an HTTP client's own errors are no OSError
    (OSError(5, "Input/output error"), False)])
def test_after_an_error_of_the_network_or_the_operating_system_the_same_command_continues(
        failure, blamed, tmp_path, monkeypatch):
    import datasets
    import fsspec
    texts = [f"{i:010d}" for i in range(500)]
    memory = fsspec.filesystem("memory")  # not on this disk, like the hub
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    memory.pipe("/set/a.jsonl", lines.encode())
    iterate = datasets.IterableDataset.__iter__

    def fail(self):
        yield from itertools.islice(iterate(self), 300)
        raise failure

    arguments = hf("memory://set/a.jsonl", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(datasets.IterableDataset, "__iter__", fail)
        line = error_of(*arguments)
    assert f"{failure}; fix this and run the same command again" in line
    assert ("of memory://set/a.jsonl: " in line) == blamed
    assert json.loads((tmp_path / "out/progress.json").read_text())["bookmark"]
    prepare.main(arguments)
    sides([text.encode() for text in texts], tmp_path / "out", 10)


def test_presets_read_the_right_configuration_and_column_and_do_not_pack(tmp_path, monkeypatch):
    assert prepare.PRESETS["fineweb"]["hf_path"] == "HuggingFaceFW/fineweb"
    assert prepare.PRESETS["codeparrot"]["hf_path"] == "codeparrot/codeparrot-clean"
    for name in "ab":
        records = [{"text": f"{name}{i}" * 9, "content": f"{i}_{name}" * 9} for i in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: a.jsonl\n"
        "- config_name: sample-10BT\n  data_files: b.jsonl\n---\n")
    firsts = {"fineweb": [b"b0" * 5, b"b1" * 5], "codeparrot": [b"0_a0_a0_a0", b"1_a1_a1_a1"]}
    for preset, documents in firsts.items():
        monkeypatch.setitem(prepare.PRESETS[preset], "hf_path", str(tmp_path))
        out = tmp_path / preset
        prepare.main([f"--dataset={preset}", f"--out_dir={out}", "--seq_len=10"])
        sides(documents, out, 10, b"")


# ---- The program.
def test_a_folder_belongs_to_one_process_until_that_ends(tmp_path):
    program = f"from common import files\nwith files.locked('{tmp_path}'): print('locked'); input()"
    command = [sys.executable, "-uc", program]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert first.stdout.readline() == b"locked\n"
    assert "another process is writing to" in error_of(f"--out_dir={tmp_path}")
    first.kill()
    first.communicate()
    with files.locked(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()  # nothing was written


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_lock_that_a_killed_process_left_where_there_is_no_flock_is_named(
        documents, tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.lock").write_text("1\nanother-host\n")
    line = error_of(*small(tmp_path))
    assert line.endswith(f"a killed one left {tmp_path}/out/.lock: remove it")
    (tmp_path / "out/.lock").unlink()
    prepare.main(small(tmp_path))


@pytest.mark.parametrize("arguments, message", [
    ("--input=books", "--input and --dataset=files need each other"),
    ("--dataset=hf --hf_path=", "--hf_path and --dataset=hf need each other"),
    ("--dataset=file", "--dataset=file is none of stdlib, files, hf, fineweb, codeparrot"),
    ("--dataset=files --input={tmp}/new", "new is also an --input; use another folder"),
    ("--dataset=files --input=no/such", "/no/such matches no file"),
    ("--dataset=hf --hf_path=no.jsonl", "Unable to find"),
    ("--dataset=hf --hf_path={tmp}/a.jsonl --split=test",
     "--split=test of {tmp}/a.jsonl: the splits are train"),
    ("{files} --seq_len=301 --pack=False", "(--pack=False; all used)"),
    ("{files} --seq_len=100 --max_bytes=199", "larger --max_bytes"),
    ("{files} --max_bytes=-1", "--max_bytes=-1 must be at least 0"),
    ("{files} --seq_len=0", "--seq_len=0 must be at least 1"),
    ("{files} --val_fraction=0.6", "--val_fraction=0.6 must be above 0 and at most"),
    ("{files} --val_fraction=nan", "val_fraction cannot be 'nan'"),
])
def test_a_mistake_is_one_line_and_does_not_block_the_folder(arguments, message, tmp_path):
    make_files(tmp_path / "in", [300] * 3)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    arguments = arguments.format(tmp=tmp_path, files=f"--dataset=files --input={tmp_path}/in")
    out = f"--out_dir={tmp_path}/new"
    assert message.replace("{tmp}", str(tmp_path)) in error_of(*arguments.split(), out)
    assert not (tmp_path / "new").exists()
    prepare.main(small(tmp_path))


def test_too_little_text_removes_our_shards_and_no_others(tmp_path):
    make_files(tmp_path / "in", [300] * 3)
    other = tmp_path / "out/fineweb_train_000001.bin"
    other.parent.mkdir()
    other.write_bytes(b"theirs")
    line = error_of(*small(tmp_path), "--seq_len=451")
    assert "too little text for a row of --seq_len=451 bytes in train and in val" in line
    assert [*other.parent.glob("*.bin")] == [other]


def test_the_program_ends_with_the_right_code_and_all_its_output(tmp_path, monkeypatch):
    import pyarrow.parquet
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("LC_ALL", "C")
    table = pyarrow.table({"text": ["x" * 5000] * 5000})
    pyarrow.parquet.write_table(table, tmp_path / "é.parquet")
    output, errors = run("prepare.py", *hf(tmp_path / "é.parquet", tmp_path / "ü"))
    assert "ü: " in output and " for training" in output and errors == ""
    _, errors = run("prepare.py", "--dataset=a\tö", code=2)
    assert errors.startswith("prepare.py: --dataset=a ö is none of stdlib, ")


@pytest.mark.parametrize("set_up, column, end", [
    ("sys.ps1 = 'In [1]: '", "text", "ended with 0\n"),  # a notebook goes on
    ("threading.Thread(target=time.sleep, args=[300]).start()", "none", "")])  # like pyarrow's
def test_the_program_ends_though_threads_run_unless_it_runs_in_a_notebook(
        set_up, column, end, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "0123456789"}\n{"text": "abcdefghij"}\n')
    program = f"""
import runpy, sys, threading, time
{set_up}
sys.argv = ["prepare.py", *{hf(tmp_path / "a.jsonl", tmp_path / "out")}, "--text_column={column}"]
try:
    runpy.run_path("prepare.py", run_name="__main__")
except SystemExit as end:
    print("ended with", end.code)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True,
                          text=True, timeout=120)
    assert done.stdout.endswith(end) and done.returncode == (0 if end else 2)
