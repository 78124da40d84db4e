"""prepare.py against oracles that share no code with it."""
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

import prepare


def make_files(folder, sizes, seed=0):
    """Files of random bytes, hence not UTF-8; returns their contents in the order of the names."""
    rng = random.Random(seed)
    (folder / "deeper/still").mkdir(parents=True)
    (folder / "flat").mkdir()
    documents = [rng.randbytes(size) for size in sizes]
    for i, document in enumerate(documents):
        (folder / ("deeper/still" if i < 5 else "flat") / f"{i:03d}").write_bytes(document)
    return documents


@pytest.fixture
def documents(tmp_path):
    return make_files(tmp_path / "in", [1030] * 20)


def small(tmp_path, *more):
    """Arguments for a set of many shards."""
    return ["--dataset=files", f"--input={tmp_path}/in", f"--out_dir={tmp_path}/out",
            "--seq_len=100", "--val_fraction=0.3", "--shard_bytes=700", *more]


def is_val(document, val_fraction):
    return int(hashlib.blake2b(document, digest_size=8).hexdigest(), 16) / 2**64 < val_fraction


def oracle(documents, seq_len=100, val_fraction=0.3, split_documents=True):
    """What each split must hold, as one string of bytes."""
    splits = {"train": bytearray(), "val": bytearray()}
    for document in documents:
        rows = len(document) // seq_len if split_documents else min(len(document) // seq_len, 1)
        splits["val" if is_val(document, val_fraction) else "train"] += document[: rows * seq_len]
    return splits


def held(out_dir):
    """What the shards of a set hold, as one string of bytes for each split."""
    return {split: b"".join(shard.read_bytes() for shard in sorted(out_dir.glob(f"{split}_*.bin")))
            for split in ("train", "val")}


def contents(out_dir):
    return {path.name: path.read_bytes() for path in out_dir.iterdir() if path.name != ".lock"}


def error_of(capsys, *arguments, code=2):
    """The one line on stderr with which a run must fail."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        prepare.main([*arguments])
    assert exit.value.code == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].isprintable(), lines
    return lines[0]


def interrupt(capsys, monkeypatch, notes, arguments):
    """Presses Ctrl-C when so many notes of progress.json are written."""
    def write_json(path, state):
        original(path, state)
        written.append(path)
        if len(written) == notes:
            signal.raise_signal(signal.SIGINT)

    original, written = prepare.write_json, []
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_json", write_json)
        assert "same command goes on" in error_of(capsys, *arguments, code=130)


@pytest.mark.parametrize("how", ["--split_documents", "--no-split_documents"])
def test_the_rows_of_all_shards_are_the_bytes_of_the_documents_in_order(how, tmp_path):
    sizes = [0, 1, 99, 100, 101, 250, 1000, 12345, 30_077, *range(40, 400, 7)]
    documents, out = make_files(tmp_path / "in", sizes), tmp_path / "out"
    prepare.main(small(tmp_path, how))
    meta = json.loads((out / "meta.json").read_text())
    for split, want in oracle(documents, split_documents=how[2] == "s").items():
        rows = [np.frombuffer(want[i : i + 100], np.uint8) for i in range(0, len(want), 100)]
        shards = prepare.open_shards(out, split, 100)
        assert [*map(len, shards)] == [7] * (len(rows) // 7) + [len(rows) % 7] * (len(rows) % 7 > 0)
        assert np.array_equal(prepare.read_rows(shards, range(len(rows))), rows)
        few = [len(rows) - 1, 7, 3, 6]
        assert np.array_equal(prepare.read_rows(shards, few), [rows[i] for i in few])
        half_rows = prepare.read_rows(prepare.open_shards(out, split, 50), [13, 14])
        assert half_rows.tobytes() == want[650:750]
        assert held(out)[split] == want and meta[split]["bytes"] == len(want)
        assert meta[split]["sha256"] == {path.name: hashlib.sha256(path.read_bytes()).hexdigest()
                                         for path in out.glob(f"{split}_*.bin")}
    assert meta["documents"] == len(documents)
    assert meta["short_documents"] == sum(len(document) < 100 for document in documents)
    kept = meta["train"]["bytes"] + meta["val"]["bytes"]
    assert meta["left_out_bytes"] == sum(map(len, documents)) - kept
    for key in "documents", "short_documents", "left_out_bytes":  # as of revision 9342767
        del meta[key]
    meta["options"]["bpe"], meta["dropped"], meta["sha256"] = True, {"tail_bytes": 0}, "0" * 64
    (out / "meta.json").write_text(json.dumps(meta))
    assert sum(map(len, prepare.open_shards(out, "train", 50))) == meta["train"]["bytes"] // 50


def test_without_options_it_cuts_the_standard_library(tmp_path):
    prepare.main([f"--out_dir={tmp_path}/out"])
    files = subprocess.run(
        f"find {sysconfig.get_path('stdlib')} -type f -name '*.py' "
        "-not -path '*/site-packages/*' -not -path '*/dist-packages/*'",
        shell=True, check=True, capture_output=True, text=True).stdout.splitlines()
    want = oracle([Path(file).read_bytes() for file in sorted(files)], 4096, 0.02)
    assert held(tmp_path / "out") == want and all(want.values())


@pytest.mark.parametrize("rows, val_rows", [(2, 1), (9, 1), (70, 7)])
@pytest.mark.parametrize("seed", range(4))  # whatever its hash
def test_of_the_only_long_document_the_end_is_for_validation(
        seed, rows, val_rows, tmp_path, capsys, monkeypatch):
    book = make_files(tmp_path / "in", [rows * 100 + 50, 99, 0], seed)[0]
    start = (rows - val_rows) * 100
    want = {"train": book[:start], "val": book[start : rows * 100]}
    arguments = small(tmp_path, "--val_fraction=0.1")
    prepare.main(arguments)
    assert held(tmp_path / "out") == want
    arguments += [f"--out_dir={tmp_path}/halted", "--shard_bytes=100"]
    interrupt(capsys, monkeypatch, rows, arguments)  # before the last row
    prepare.main(arguments)
    assert held(tmp_path / "halted") == want


def test_globs_and_folders_that_overlap_give_each_file_once_and_no_shards(
        documents, tmp_path, capsys, monkeypatch):
    out = f"--out_dir={tmp_path}/in/out"
    (tmp_path / "in/link").symlink_to("flat/008")
    (tmp_path / "in/[x]").write_bytes(b"y" * 100)
    arguments = small(tmp_path, out, f"--input={tmp_path}/in/[x]", f"--input={tmp_path}/in/**/0*")
    interrupt(capsys, monkeypatch, 3, arguments)  # leaves shards in the folder that it reads
    prepare.main(arguments)
    assert held(tmp_path / "in/out") == oracle([b"y" * 100, *documents])
    prepare.main([*small(tmp_path / "in", out)[2:], "--dataset=files",
                  f"--out_dir={tmp_path}/glob", "--input", f"{tmp_path}/i*/**/0*"])
    assert held(tmp_path / "glob") == oracle(documents)


def test_a_tilde_that_the_shell_left_is_the_home_folder(documents, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    prepare.main(small("~"))
    assert held(tmp_path / "out") == oracle(documents)


def test_max_bytes_is_exact_and_ends_the_reading_though_resumed_inside_the_last_document(
        documents, tmp_path, capsys, monkeypatch):
    arguments = small(tmp_path, "--max_bytes=1.555e4", "--shard_bytes=100")
    interrupt(capsys, monkeypatch, 1 + 153, arguments)
    progress = json.loads((tmp_path / "out/progress.json").read_text())
    assert progress["documents"] == 15 and progress["taken"] == 300

    def write_shards(documents, *args, **options):
        write((read.append(bytes(d)) or d for d in documents), *args, **options)

    read, write = [], prepare.write_shards
    monkeypatch.setattr(prepare, "write_shards", write_shards)
    prepare.main(arguments)
    want = oracle(documents[:15])  # and half of the 16th, whose whole says where it goes
    want["val" if is_val(documents[15], 0.3) else "train"] += documents[15][:500]
    assert held(tmp_path / "out") == want and read == [documents[15]]


def test_killed_at_any_line_and_started_again_it_ends_with_the_same_files(tmp_path):
    """A kill leaves what is on the disk: before each line that is run, as it is then."""
    make_files(tmp_path / "in", [250, 2500, 80, 130, 700, 333, 999, 100, 400, 400], seed=7)
    arguments, out, moments = small(tmp_path, "--shard_bytes=1000"), tmp_path / "out", {}

    def trace(frame, event, _):
        if frame.f_code.co_filename == prepare.__file__ and out.exists():
            moment = contents(out)
            moments[repr(sorted(moment.items()))] = moment
            return trace

    sys.settrace(trace)
    prepare.main(arguments)
    sys.settrace(None)
    want = contents(out)
    assert len(moments) > 30 and {"train_00002.bin", "val_00001.bin"} < want.keys()
    for moment in moments.values():
        shutil.rmtree(out)
        out.mkdir()
        for name, content in moment.items():
            (out / name).write_bytes(content)
        prepare.main(arguments)
        assert contents(out) == want, moment.keys()


def test_a_full_disk_costs_no_note(documents, tmp_path, capsys, monkeypatch):
    def write_text(path, text):
        path.write_bytes(text.encode()[:100])
        raise OSError(28, "No space left on device", str(path))

    interrupt(capsys, monkeypatch, 5, small(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        assert "No space left" in error_of(capsys, *small(tmp_path))
    prepare.main(small(tmp_path))
    assert held(tmp_path / "out") == oracle(documents)


def test_jsonl_and_parquet_come_through_datasets_and_survive_ctrl_c(tmp_path, capsys, monkeypatch):
    import pyarrow
    import pyarrow.parquet
    rng = random.Random(1)
    texts = ["é" * rng.randrange(200) + str(i) for i in range(3000)] + [None]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "a.parquet",
                                row_group_size=170)  # so that it resumes between two and within one
    for kind, more in ("jsonl", []), ("parquet", ["--split_documents"]):
        arguments = ["--dataset=hf", f"--hf_path={tmp_path}/a.{kind}", "--text_column=body", *more,
                     "--seq_len=64", "--val_fraction=0.3", "--shard_bytes=50000"]
        prepare.main([*arguments, f"--out_dir={tmp_path}/{kind}"])
        want = oracle([(text or "").encode() for text in texts], 64, 0.3, kind == "parquet")
        assert held(tmp_path / kind) == want
    for notes in 3, 6:
        interrupt(capsys, monkeypatch, notes, [*arguments, f"--out_dir={tmp_path}/{notes}"])
        prepare.main([*arguments, f"--out_dir={tmp_path}/{notes}"])
        assert contents(tmp_path / f"{notes}") == contents(tmp_path / "parquet")


def test_a_set_is_not_mixed_with_other_options_or_files(documents, tmp_path, capsys, monkeypatch):
    def refused(*more):
        before = contents(out)
        line = error_of(capsys, *small(tmp_path, *more))
        assert contents(out) == before and f"{out} holds a set made with" in line
        return line

    out, flat = tmp_path / "out", tmp_path / "in/flat"
    interrupt(capsys, monkeypatch, 3, small(tmp_path))
    (flat / "007").rename(flat / "7")
    assert "source=20 files" in refused()
    (flat / "7").rename(flat / "007")
    for sizes in (1029, 1031), (1030, 1031):  # the first: all files together as long as before
        os.truncate(flat / "007", sizes[0])
        os.truncate(flat / "008", sizes[1])
        assert "source=20 files" in refused()
    for number in 7, 8:
        (flat / f"00{number}").write_bytes(documents[number])
    for _ in "interrupted", "complete":
        line = refused("--seq_len=50", "--max_bytes=1e6")
        assert "seq_len=100 (now 50)" in line and "max_bytes=None (now 1000000)" in line
        prepare.main(small(tmp_path))
    assert "already there" in capsys.readouterr().out and held(out) == oracle(documents)
    (out / "meta.json").unlink()
    assert "without meta.json" in error_of(capsys, *small(tmp_path))


def test_a_second_process_in_the_folder_ends_in_one_line(tmp_path, capsys):
    holds = f"import pathlib, prepare; prepare.lock(pathlib.Path('{tmp_path}')); print(); input()"
    first = subprocess.Popen([sys.executable, "-uc", holds], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
    first.stdout.readline()
    assert "another prepare.py" in error_of(capsys, f"--out_dir={tmp_path}")
    first.communicate(b"\n")
    assert prepare.lock(tmp_path)


def test_verify_names_each_shard_that_is_not_as_it_was_made(documents, tmp_path, capsys):
    check = [f"--out_dir={tmp_path}/out", "--verify"]
    prepare.main(small(tmp_path))
    prepare.main(check)
    assert "agree" in capsys.readouterr().out
    for path in tmp_path / "out/train_00002.bin", tmp_path / "out/val_00001.bin":
        path.write_bytes(b"?" + path.read_bytes()[1:])
    assert ": train_00002.bin, val_00001.bin in" in error_of(capsys, *check, code=1)


def test_shards_that_are_lost_or_cut_are_not_read_and_not_gone_on_from(
        documents, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    interrupt(capsys, monkeypatch, 8, small(tmp_path))
    state = json.loads((out / "progress.json").read_text())
    lengths = [(split, *divmod(state[split]["bytes"], 700)) for split in ("train", "val")]
    last = next(f"{split}_{number:05d}.bin" for split, number, length in lengths if length)
    for name in "train_00000.bin", last:
        whole = (out / name).read_bytes()
        for damage, message in (lambda path: os.truncate(path, 7), "has 7"), (os.unlink, "missing"):
            damage(out / name)
            line = error_of(capsys, *small(tmp_path))
            assert f"{name} " in line and message in line and f"remove {out}" in line
        (out / name).write_bytes(whole)
    prepare.main(small(tmp_path))
    for damage, message in (lambda path: os.truncate(path, 600), "has 600"), (os.unlink, "missing"):
        damage(out / "train_00001.bin")
        with pytest.raises(ValueError, match=f"train_00001.bin .*{message}"):
            prepare.open_shards(out, "train", 100)


def test_a_damaged_or_foreign_meta_json_or_progress_json_ends_in_one_line(
        documents, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    interrupt(capsys, monkeypatch, 5, small(tmp_path))
    for name, counters in ("progress.json", prepare.COUNTERS), ("meta.json", []):
        text = (out / name).read_bytes()
        state = json.loads(text)
        changes = [("seq_len", value) for value in (0, "100", 300, -100, 100.0)]
        changes += [("options", value) for value in ({}, [], None, {"shard_bytes": 0})]
        changes += [("val", value) for value in ({}, [], state["val"] | {"bytes": 150},
                                                 state["val"] | {"bytes": -100})]
        changes += [(key, value) for key in counters for value in (None, -1, "1")]
        changes += [("val", state["val"] | value) for value in ({"bytes": 0}, {"sha256": []})
                    if name == "meta.json"]
        damaged = [b"", b"[]", b"{}", b"7", b'"text"', b"\xff", b"[" * 99999, text[:-9]]
        for damage in damaged + [json.dumps(state | {k: v}).encode() for k, v in changes]:
            (out / name).write_bytes(damage)
            assert f"{out / name} is not what" in error_of(capsys, *small(tmp_path)), damage
            assert (out / name).read_bytes() == damage
            if name == "meta.json":
                with pytest.raises(ValueError, match="meta.json is not what prepare.py writes"):
                    prepare.open_shards(out, "val", 100)
        (out / name).write_bytes(text)
        prepare.main(small(tmp_path))
    with pytest.raises(ValueError, match="seq_len=30 does not divide the 100 bytes"):
        prepare.open_shards(out, "val", 30)


@pytest.mark.parametrize("arguments, message", [
    ("--dataset=files", "needs --input"),
    ("--dataset=files --input=no/such", "--input=no/such: no such file"),
    ("--dataset=files --input=\x1b[31m\u202e", "--input=\u241b[31m\ufffd"),
    ("--hf_path=x", "--hf_path has no meaning for --dataset=stdlib"),
    ("--dataset=hf --hf_path=no.jsonl", "cannot open --hf_path=no.jsonl"),
    ("--dataset=hf --hf_path={tmp}/a.jsonl", "--text_column=text is no text in"),
    ("--dataset=hf --hf_path={tmp}/a.jsonl --text_column=n", "which has body"),
    ("--dataset=hf --hf_path={tmp}/a.jsonl --text_column=body --split=test", "--split=test"),
    ("{files} --seq_len=301", "3 documents, 3 of them shorter than --seq_len=301; give more"),
    ("{files} --seq_len=100 --val_fraction=1e-9", "no rows for val"),
    ("{files} --seq_len=100 --val_fraction=0.999999999", "no rows for train"),
    ("{files} --seq_len=100 --max_bytes=99", "(or --max_bytes)"),
    ("{files} --max_bytes=many", "'many'"),
    ("{files} --shard_bytes=inf", "inf"),
    ("{files} --seq_len=1.5", "1.5 is not a positive whole number"),
    ("{files} --val_fraction=2", "--val_fraction=2.0 must lie between"),
])
def test_a_mistake_gives_one_line_and_leaves_the_folder_free(arguments, message, tmp_path, capsys):
    make_files(tmp_path / "in", [300] * 3)
    (tmp_path / "a.jsonl").write_text('{"body": "text", "n": 1}\n')
    (tmp_path / "out").mkdir()
    (tmp_path / "out/train_set.bin.bz2").write_text("another's")
    arguments = arguments.format(tmp=tmp_path, files=f"--dataset=files --input={tmp_path}/in")
    assert message in error_of(capsys, *arguments.split(), f"--out_dir={tmp_path}/out")
    assert {*os.listdir(tmp_path / "out")} <= {".lock", "train_set.bin.bz2"}
