"""prepare.py against oracles that share no code with it."""
import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path

import numpy as np
import pytest

import prepare
from common.commandline import UserError
from conftest import ROOT, run


def make_files(folder, sizes, seed=0):
    """Writes files of random bytes; returns their contents in the order of their names."""
    rng = random.Random(seed)
    folder.mkdir()
    documents = [rng.randbytes(size) for size in sizes]
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


def cut(data, seq_len):
    return [data[i : i + seq_len] for i in range(0, len(data) - seq_len + 1, seq_len)]


def held(out_dir):
    """What the shards of each split hold."""
    splits = {}
    for split in "train", "val":
        shards = sorted(out_dir.glob(f"{split}_*.bin"))
        splits[split] = b"".join(shard.read_bytes() for shard in shards)
    return splits


def shares(documents, out_dir, seq_len=100, first_only=False):
    """Checks that each document is in train, in val, or begins in train and ends in val.

    Returns the number of its rows in train and in val. The rows of a test all differ.
    """
    splits = {split: cut(data, seq_len) for split, data in held(out_dir).items()}
    val = set(splits["val"])
    train = []
    counts = []
    for document in documents:
        rows = cut(document, seq_len)[: 1 if first_only else None]
        begin = [row for row in rows if row not in val]
        assert rows[: len(begin)] == begin
        train += begin
        counts.append((len(begin), len(rows) - len(begin)))
    assert splits["train"] == train
    assert sum(n for _, n in counts) == len(splits["val"]) == len(val)
    return counts


def rows_of(out_dir, seq_len=100):
    """All rows, sorted."""
    return sorted(row for data in held(out_dir).values() for row in cut(data, seq_len))


def contents(out_dir):
    return {path.name: path.read_bytes() for path in out_dir.iterdir() if path.name != ".lock"}


def error_of(*arguments):
    """The message with which a run must fail."""
    with pytest.raises(UserError) as error:
        prepare.main([*arguments])
    return str(error.value)


def interrupt(monkeypatch, arguments, notes=1):
    """Presses Ctrl-C when progress.json is written for this many times."""
    written = []
    write_json = prepare.write_json

    def write_and_interrupt(path, state):
        write_json(path, state)
        written.append(path)
        if len(written) == notes:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_json", write_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare.main(arguments)


# ---- Rows and splits.
@pytest.mark.parametrize("how", ["--split_documents", "--no-split_documents"])
def test_shards_hold_the_rows_of_the_documents_in_order(how, tmp_path):
    sizes = [0, 1, 99, 100, 101, 250, 1000, 12345, 30_077, *range(40, 400, 7)]
    documents = make_files(tmp_path / "in", sizes)
    out = tmp_path / "out"
    prepare.main(small(tmp_path, how))
    counts = shares(documents, out, first_only=how == "--no-split_documents")
    for split, data in held(out).items():
        for seq_len in 100, 50:
            shards = prepare.open_shards(out, split, seq_len)
            assert np.concatenate(shards).tobytes() == data
            assert {shard.nbytes for shard in shards[:-1]} <= {700}
    left_out = json.loads((out / "meta.json").read_text())["left_out_bytes"]
    assert left_out == sum(sizes) - 100 * sum(map(sum, counts))
    with pytest.raises(UserError, match="seq_len=30 does not divide the 100 bytes"):
        prepare.open_shards(out, "val", 30)


@pytest.mark.parametrize("sizes, fraction, sides", [
    # large documents: their last rows, as many as val lacks, from each of them
    ([100_000] * 3, 0.02, [(980, 20)] * 3),
    ([9000, 5000, 7000], 0.1, [(81, 9), (45, 5), (63, 7)]),
    ([9000, 600], 0.1, [(81, 9), (6, 0)]),
    ([3000], 0.11, [(27, 3)]),
    ([1000] * 4, 0.05, [(9, 1), (10, 0), (10, 0), (9, 1)]),
    ([150, 220, 8000], 0.05, [(0, 1), (2, 0), (77, 3)]),  # the first row goes to val
])
def test_large_documents_all_give_their_last_rows_to_val(sizes, fraction, sides, tmp_path, capsys):
    documents = make_files(tmp_path / "in", sizes)
    prepare.main(small(tmp_path, f"--val_fraction={fraction}"))
    assert shares(documents, tmp_path / "out") == sides
    train, val = (100 * sum(side) for side in zip(*sides))
    numbers = [sum(n > 0 for n in side) for side in zip(*sides)]
    assert (f"out: {train:,} bytes of {numbers[0]} documents for training, {val:,} of {numbers[1]} "
            f"for validation ({val / (train + val):.1%}; --val_fraction={fraction})"
            ) in capsys.readouterr().out


@pytest.mark.parametrize("sizes, fraction", [
    ([1000] * 100, 0.05), ([10_000, *[120] * 200], 0.05), ([100] * 300, 0.02), ([300] * 30, 0.5)])
def test_val_has_its_share_and_small_documents_stay_whole(sizes, fraction, tmp_path):
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        documents = make_files(folder / "in", sizes, seed)
        prepare.main(small(folder, f"--val_fraction={fraction}"))
        counts = shares(documents, folder / "out")
        val = sum(n for _, n in counts)
        total = 0
        for train, part in counts:
            total += train + part
            assert not (train and part) or train + part > max(fraction * total, 1)
        assert 0.5 * fraction <= val / total <= 1.5 * fraction


def test_val_never_gets_much_more_than_its_share_by_chance(tmp_path):
    text = next(text for text in map("{:010d}".format, range(10_000))
                if zlib.crc32(text.encode()) < 0.02 * 2**32)
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{text}"}}\n' * 100)  # all are chosen
    prepare.main(hf(tmp_path / "a.jsonl", tmp_path / "out"))
    assert len(held(tmp_path / "out")["val"]) == 30


def test_copies_of_a_record_are_on_one_side(tmp_path):
    records = [json.dumps({"text": f"{i % 500:010d}"}) for i in range(2000)]
    (tmp_path / "a.jsonl").write_text("\n".join(records))
    prepare.main(hf(tmp_path / "a.jsonl", tmp_path / "out", "--val_fraction=0.1"))
    train, val = (set(cut(data, 10)) for data in held(tmp_path / "out").values())
    assert len(train & val) < 10  # at first, val has too little or too much for some
    assert len(train) + len(val) - len(train & val) == 500


@pytest.mark.parametrize("sizes, flags, said", [
    ([150] * 30, "--split_documents", "1,500 left out (--seq_len=100, --split_documents=True)"),
    ([990] * 9, "--no-split_documents",
     "8,010 left out (--seq_len=100, --split_documents=False)")])
def test_the_flags_that_decide_what_is_left_out_are_named(sizes, flags, said, tmp_path, capsys):
    make_files(tmp_path / "in", sizes)
    prepare.main(small(tmp_path, flags))
    assert said in capsys.readouterr().out


def test_val_is_a_fair_sample_of_many_documents(tmp_path):
    rng = random.Random(1)
    sizes = [100 + int(100 * rng.expovariate(0.2)) for _ in range(1500)]
    documents = make_files(tmp_path / "in", sizes)
    prepare.main(small(tmp_path, "--val_fraction=0.1"))
    counts = shares(documents, tmp_path / "out")
    chosen = [i for i, (train, val) in enumerate(counts) if val]
    mean = sum(sizes[i] for i in chosen) / len(chosen)
    assert 0.75 < mean / (sum(sizes) / 1500) < 1.25
    assert min(np.histogram(chosen, 5, (0, 1500))[0]) > 15


def test_max_bytes_is_exact_nothing_is_read_beyond_it_and_the_set_is_not_the_full_one(
        documents, tmp_path, monkeypatch):
    def spy(options, state):
        documents = read_files(options, state)
        yield next(documents)
        for document, number in documents:
            read.append(document)
            yield document, number

    read = []
    read_files = prepare.read_files
    monkeypatch.setattr(prepare, "read_files", spy)
    prepare.main(small(tmp_path, "--max_bytes=1.555e4"))
    shares([*documents[:15], documents[15][:500]], tmp_path / "out")
    assert sum(map(len, held(tmp_path / "out").values())) == 15_500
    assert read == documents[:16]
    assert "was made with" in error_of(*small(tmp_path))


@pytest.mark.parametrize("sizes", [
    [250, 2500, 80, 130, 700, 333, 999, 100, 400, 400], [1500, 100, 150, 3000, 100]])
def test_killed_at_any_line_the_same_command_ends_with_the_same_files(sizes, tmp_path):
    """A kill leaves what is on the disk, so the folder is copied before each line runs."""
    make_files(tmp_path / "in", sizes, seed=7)
    arguments = small(tmp_path, "--val_fraction=0.1")
    out = tmp_path / "out"
    moments = {}

    def trace(frame, event, _):
        if frame.f_code.co_filename == prepare.__file__ and out.exists():
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
    def write_text(path, text):
        path.write_bytes(text.encode()[:100])
        raise OSError(28, "No space left on device")

    interrupt(monkeypatch, small(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        line = error_of(*small(tmp_path))
        assert f"{tmp_path}/out" in line and "No space left" in line
    prepare.main(small(tmp_path))
    shares(documents, tmp_path / "out")


# ---- Files.
def test_the_default_is_the_standard_library_wherever_it_is(tmp_path, monkeypatch, capsys):
    library = tmp_path / "my-packages/lib"
    shutil.copytree(Path(sysconfig.get_path("stdlib"), "json"), library / "json")
    shutil.copytree(library / "json", library / "site-packages/other")
    (library / "notes.txt").write_text("text " * 5000)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(library)}.get)
    monkeypatch.chdir(tmp_path)
    prepare.main(["--out_dir="])  # as with an unset variable of a shell
    files = subprocess.check_output(["find", library / "json", "-name", "*.py"], text=True)
    shares([Path(file).read_bytes() for file in sorted(files.split())],
           tmp_path / "data/stdlib", 4096)


@pytest.mark.parametrize("path", [
    ".hidden", ".git/objects/x", "a/__pycache__/x", "b/site-packages/x", "c/dist-packages/x",
    "a/b.pyc", "run/train_00000.bin", "run/val_00000.bin", "run/ckpt.pt"])
def test_a_leak_is_skipped_and_counted(path, documents, tmp_path, capsys):
    (tmp_path / "in" / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "in" / path).write_bytes(b"z" * 500)
    prepare.main(small(tmp_path))
    shares(documents, tmp_path / "out")
    assert capsys.readouterr().out.endswith("; 1 paths skipped (see --help)\n")


def test_unreadable_files_and_copies_are_skipped_and_counted(documents, tmp_path, capsys):
    (tmp_path / "in/gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "in/fifo")
    (tmp_path / "in/run").mkdir()
    for name in "log.txt", "ckpt.pt":
        (tmp_path / "in/run" / name).write_bytes(b"y" * 500)
    (tmp_path / "in/copy").write_bytes(documents[7])
    prepare.main(small(tmp_path))
    shares(documents, tmp_path / "out")
    assert "; 4 paths skipped (see --help), 1 copies skipped" in capsys.readouterr().out


def test_files_that_are_no_text_are_used_as_they_are_and_counted(tmp_path, capsys):
    text = b"text " * 500
    files = [gzip.compress(text), bz2.compress(text), lzma.compress(text), b"PK\x03\x04" + text,
             b"%PDF-1.7" + text, "text".encode("utf-16") + text, b"\xfe\xff" + text, text]
    (tmp_path / "in").mkdir()
    for i, content in enumerate(files):
        (tmp_path / f"in/{i}").write_bytes(content)
    prepare.main(small(tmp_path, "--seq_len=10"))
    assert rows_of(tmp_path / "out", 10) == sorted(row for file in files for row in cut(file, 10))
    assert "; 7 packed, PDF or UTF-16 files used raw\n" in capsys.readouterr().out


def test_a_file_that_comes_in_pieces_is_read_whole(tmp_path, monkeypatch):
    """A file of more than a gigabyte, and a read that returns less than it was asked for."""
    class Pieces(io.BytesIO):
        def read(self, size):
            asked.add(size)
            return super().read(1000)

    asked = set()
    (document,) = make_files(tmp_path / "in", [2550])
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "open", lambda path, mode: Pieces(document) if mode == "rb"
                      else open(path, mode), raising=False)
        prepare.main(small(tmp_path))
    shares([document[:1000], document[1000:2000], document[2000:]], tmp_path / "out")
    assert asked == {2**30}


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
    assert rows_of(tmp_path / "in/out") == sorted(
        row for document in [*documents, b"y" * 100] for row in cut(document, 100))


def test_a_glob_skips_below_its_wildcard_only(documents, tmp_path, capsys):
    package = tmp_path / "lib/site-packages/pack"
    shutil.copytree(tmp_path / "in", package / "deep")
    arguments = small(tmp_path)
    arguments[1] = f"--input={tmp_path}/**/0*"
    prepare.main(arguments)
    assert "; 24 paths skipped" in capsys.readouterr().out
    want = sorted(row for document in documents for row in cut(document, 100))
    assert rows_of(tmp_path / "out") == want
    for i, pattern in enumerate(["**/0*", "deep"]):
        arguments[1:3] = [f"--input={package}/{pattern}", f"--out_dir={tmp_path}/inside{i}"]
        prepare.main(arguments)
        assert rows_of(tmp_path / f"inside{i}") == want


def test_a_hidden_link_does_not_hide_the_folder_behind_it(documents, tmp_path, capsys):
    (tmp_path / "in/zzz").mkdir()
    (tmp_path / "in/zzz/.latest").symlink_to(tmp_path / "in/000")
    prepare.main(small(tmp_path))
    shares(documents, tmp_path / "out")
    assert "; 1 paths skipped" in capsys.readouterr().out


def test_the_current_folder_is_read_without_what_is_hidden_in_it(tmp_path, monkeypatch):
    [text] = make_files(tmp_path / "in", [400])
    make_files(tmp_path / "in/.git", [500], seed=1)
    monkeypatch.chdir(tmp_path / "in")
    prepare.main(["--dataset=files", "--input=.", "--seq_len=100", f"--out_dir={tmp_path}/out"])
    assert rows_of(tmp_path / "out") == sorted(cut(text, 100))


def test_folders_behind_links_are_read_once_even_in_a_circle(documents, tmp_path, capsys):
    shutil.move(tmp_path / "in/000", tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "in")
    (tmp_path / "in/000").symlink_to("../elsewhere")
    (tmp_path / "in/twice").symlink_to("../elsewhere")
    prepare.main(small(tmp_path))
    want = sorted(row for document in documents for row in cut(document, 100))
    assert rows_of(tmp_path / "out") == want
    assert "skipped" not in capsys.readouterr().out


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
    assert rows_of(tmp_path / "out") == [b"0" * 100] * 9 + [b"1" * 100] * 7


def test_a_leading_tilde_is_the_home_folder(documents, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    prepare.main([*small(tmp_path)[:1], "--input", "~/in/00*", "--out_dir=~/deep/out",
                  "--seq_len=100"])
    shares(documents, tmp_path / "deep/out")
    assert f"of {tmp_path}/none.csv: Unable" in error_of("--dataset=hf", "--hf_path=~/none.csv")
    assert not Path("~").exists()


def test_a_set_is_not_mixed_with_other_options_or_another_input(
        documents, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    path = tmp_path / "in/001/0007"
    old = path.stat()
    interrupt(monkeypatch, small(tmp_path))
    for _ in "interrupted", "complete":
        before = contents(out)
        path.rename(tmp_path / "in/zzz")
        assert "its input has changed" in error_of(*small(tmp_path))
        (tmp_path / "in/zzz").rename(path)
        path.write_bytes(documents[7][::-1])  # the same size
        assert "its input has changed" in error_of(*small(tmp_path))
        path.write_bytes(documents[7])
        os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
        line = error_of(*small(tmp_path, "--seq_len=50"))
        assert f"{out} was made with" in line and "'seq_len': 100" in line
        assert contents(out) == before
        prepare.main(small(tmp_path))
    assert "already complete" in capsys.readouterr().out
    shares(documents, out)


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, 99)])
def test_missing_or_short_shards_are_an_error(damage, documents, tmp_path, monkeypatch):
    out = tmp_path / "out"
    interrupt(monkeypatch, small(tmp_path), notes=4)
    shutil.copytree(out, tmp_path / "copy")
    damage(out / "train_00001.bin")
    line = error_of(*small(tmp_path))
    assert "progress.json or a shard is damaged" in line and f"remove {out} and start" in line
    shutil.rmtree(out)
    shutil.move(tmp_path / "copy", out)
    prepare.main(small(tmp_path))
    damage(out / "train_00001.bin")
    with pytest.raises(UserError, match=f"remove {out} and start"):
        prepare.open_shards(out, "train", 100)


def test_a_thousand_shards_need_no_open_files_and_other_errors_are_no_damage(
        documents, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "SHARD_BYTES", 100)
    prepare.main(small(tmp_path))
    out = tmp_path / "out"
    files = len(os.listdir("/dev/fd"))
    shards = prepare.open_shards(out, "train", 100)
    assert len(shards) > 100 and len(os.listdir("/dev/fd")) == files
    assert np.concatenate(shards).tobytes() == held(out)["train"]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            prepare.open_shards(out, "train", 100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_an_unreadable_shard_is_not_called_damaged(documents, tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    prepare.main(small(tmp_path))
    monkeypatch.setattr(prepare.pyarrow, "memory_map", refuse)
    with pytest.raises(PermissionError):
        prepare.open_shards(tmp_path / "out", "train", 100)
    line = error_of(*small(tmp_path))
    assert "Permission denied" in line and "damaged" not in line and "remove" not in line


@pytest.mark.parametrize("text", ["", "{}", "[]", "7", '{"options": {"seq_len": 100}}', "\0"])
def test_a_damaged_meta_json_is_one_line(text, documents, tmp_path):
    prepare.main(small(tmp_path))
    (tmp_path / "out/meta.json").write_text(text)
    with pytest.raises(UserError, match="meta.json or a shard is damaged"):
        prepare.open_shards(tmp_path / "out", "val", 100)
    assert "is damaged" in error_of(*small(tmp_path))


# ---- Hugging Face datasets.
def hf(path, out_dir, *more):
    return ["--dataset=hf", f"--hf_path={path}", f"--out_dir={out_dir}", "--seq_len=10", *more]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_hugging_face_files_continue_after_ctrl_c_unless_they_changed(
        kind, tmp_path, monkeypatch, capsys):
    import pyarrow.csv
    import pyarrow.parquet
    rng = random.Random(1)
    texts = [f"{i:06d}" + "é" * rng.randrange(200) if i % 30 else None for i in range(3000)]
    path = hf_path = tmp_path / f"[a] 1.{kind}"
    table = pyarrow.table({"body": texts, "n": [*map(str, range(2999)), "no number"]})
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    elif kind == "csv":
        pyarrow.csv.write_csv(table, path)
    else:  # row groups that no shard ends with, in two files
        hf_path = tmp_path / "in"
        hf_path.mkdir()
        path = hf_path / "b.parquet"
        pyarrow.parquet.write_table(table[:1100], hf_path / "a.parquet", row_group_size=170)
        pyarrow.parquet.write_table(table[1100:], path, row_group_size=170)
    arguments = ["--dataset=hf", f"--hf_path={hf_path}", "--text_column=body", "--seq_len=64",
                 "--val_fraction=0.3", "--no-split_documents"]
    for notes in 1, 90:
        out = tmp_path / str(notes)
        interrupt(monkeypatch, [*arguments, f"--out_dir={out}"], notes)
        assert capsys.readouterr().out.endswith("stopped; the same command continues\n")
        prepare.main([*arguments, f"--out_dir={out}"])
        shares([text.encode() for text in texts if text], out, 64, first_only=True)
        assert "; 100 records of type NoneType, 2900 records of type str" in capsys.readouterr().out
    assert contents(tmp_path / "1") == contents(tmp_path / "90")

    os.utime(path, (1, 1))
    assert "its input has changed" in error_of(*arguments, f"--out_dir={out}")


@pytest.mark.parametrize("name, content, rows, counts", [
    ("a.jsonl.gz", gzip.compress(
        b'\xef\xbb\xbf{"text": "first one, "}\n{"text": null}\n{}\n{"text": ["a"]}\n'
        b'{"text": "\xe2\x98\xba second", "n": {"k": 1}}\n'),
     [b"first one,", "☺ second".encode()],
     "2 records of type str, 2 records of type NoneType, 1 records of type list"),
    ("a.json", json.dumps([{"text": "first one,"}, {"body": 7}, {"text": "second one"}], indent=2),
     [b"first one,", b"second one"], "2 records of type str, 1 records of type NoneType"),
    ("a.json", json.dumps({"text": "pretty one"}, indent=2) * 2, [b"pretty one"] * 2, "2 records"),
    ("a.jsonl", '{"text": "concaten. "}{"text": "second one"}', [b"concaten. ", b"second one"],
     "2 records"),
    ("a.csv", 'n,text\n1,"quoted, so"\n2,\n3,second one\n', [b"quoted, so", b"second one"],
     "2 records of type str, 1 records of type NoneType"),
])
def test_records_are_read_and_those_without_text_are_counted(
        name, content, rows, counts, tmp_path, capsys):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    prepare.main(hf(tmp_path / name, tmp_path / "out"))
    assert rows_of(tmp_path / "out", 10) == sorted(rows)
    assert f"; {counts}" in capsys.readouterr().out


def test_a_folder_of_arrow_files_is_read(tmp_path):
    import datasets
    records = [{"n": i, "text": f"{i:010d}"} for i in range(20)]
    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "in", num_shards=2)
    prepare.main(hf(tmp_path / "in", tmp_path / "out"))
    assert rows_of(tmp_path / "out", 10) == [record["text"].encode() for record in records]


def test_spark_folders_and_all_columns_are_read(tmp_path, capsys):
    import pyarrow
    import pyarrow.parquet
    folder = tmp_path / "in.parquet"
    folder.mkdir()
    strings, numbers = pyarrow.array([], pyarrow.string()), pyarrow.array([], pyarrow.int64())
    columns = [{"text": strings, "n": numbers},
               {"text": ["0123456789"], "n": [1]}, {"text": ["abcdefghij"], "n": [2]}]
    for i, column in enumerate(columns):
        pyarrow.parquet.write_table(pyarrow.table(column), folder / f"part-{i}.parquet")
    (folder / "_SUCCESS").touch()
    prepare.main(hf(folder, tmp_path / "out"))
    assert rows_of(tmp_path / "out", 10) == [b"0123456789", b"abcdefghij"]
    assert capsys.readouterr().out.startswith(f"reading 3 of 4 files of {folder}\n")


def test_a_bad_file_in_a_folder_is_named(tmp_path):
    (tmp_path / "in").mkdir()
    for name in "abc":
        line = "no JSON" if name == "b" else '{"text": "0123456789"}'
        (tmp_path / f"in/{name}.jsonl").write_text(line)
    _, errors = run("prepare.py", *hf(tmp_path / "in", tmp_path / "out"), code=2)
    log, line = errors.splitlines()
    assert f"'{tmp_path}/in/b.jsonl'" in log
    assert line.startswith("prepare.py: cannot read ") and "JSON parse error" in line


@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", '{"body": "x", "n": 1}', r"--text_column=text .* the columns are \['body', 'n'\]"),
    ("a.jsonl", '{"text": 7}\n{"text": 8}\n', r"no text, only {'records of type int': 2}"),
    ("a.jsonl", '{"text": "abc"}'.encode("utf-16"), "JSON parse error"),
    ("a.jsonl", "version https://git-lfs.github.com/spec/v1\nsize 1", "JSON parse error"),
    ("a.csv", "version https://git-lfs.github.com/spec/v1\nsize 1", "columns are .'version https"),
    ("a.jsonl", "", "no records"),
    ("a.json", '[{"body": "x"}]', r"the columns are \['body'\]"),
    ("a.json", '[{"text": "x"},', "a.json: "),
    ("a.arrow", "no Arrow", "a.arrow: "),
    ("a.csv", "a,b\n1,2\n", r"the columns are \['a', 'b'\]"),
    ("a.csv", 'text\nx\n"y\n', "starting at row 2"),
    ("a.csv", b"text\n\xff\n", "0xff"),
    ("a.csv", "id,text\n1,ok\n2,Yes, well, no\n", "Expected 2 fields in line 3, saw 4"),
    ("a.csv", "id,text\n2,Yes, well, no\n1,ok\n", "the first line has more commas"),
    ("a.csv", "text\nYes, well\nno\n", "the first line has more commas"),
    ("a.parquet", "", "size is 0 bytes"),
    ("a.parquet", None, "Unable to find"),
    ("a.json.zst", "", "zst"),
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


class ProtocolError(Exception):
    """An HTTP client's own error, which is no OSError."""


@pytest.mark.parametrize("failure", [ConnectionError, ProtocolError])
def test_after_a_network_error_the_same_command_continues(failure, tmp_path, monkeypatch):
    import datasets
    import fsspec
    texts = [f"{i:010d}" for i in range(500)]
    memory = fsspec.filesystem("memory")  # not on this disk, like the hub
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    memory.pipe("/set/a.jsonl", lines.encode())
    iterate = datasets.IterableDataset.__iter__

    def disconnect(self):
        yield from itertools.islice(iterate(self), 300)
        raise failure("Server Disconnected")

    arguments = hf("memory://set/a.jsonl", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(datasets.IterableDataset, "__iter__", disconnect)
        line = error_of(*arguments)
    assert "Server Disconnected; fix this and run the same command again" in line
    assert "set/a.jsonl" in line
    assert json.loads((tmp_path / "out/progress.json").read_text())["bookmark"]
    prepare.main(arguments)
    shares([text.encode() for text in texts], tmp_path / "out", 10)


def test_an_error_of_the_operating_system_does_not_blame_the_data(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "0123456789"}\n' * 2)
    done = subprocess.run(
        [sys.executable, ROOT / "prepare.py", *hf(tmp_path / "a.jsonl", tmp_path / "new")],
        capture_output=True, text=True, env={**os.environ, "HF_HOME": "/dev/null/home"})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "Not a directory: '/dev/null/home" in line and "a.jsonl" not in line
    assert not (tmp_path / "new").exists()


def test_presets_read_the_right_configuration_and_column(tmp_path, monkeypatch):
    assert prepare.PRESETS["fineweb"]["hf_path"] == "HuggingFaceFW/fineweb"
    assert prepare.PRESETS["codeparrot"]["hf_path"] == "codeparrot/codeparrot-clean"
    for name in "ab":
        record = json.dumps({"text": name * 10, "content": f"{name}_" * 5}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(record * 2)
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: a.jsonl\n"
        "- config_name: sample-10BT\n  data_files: b.jsonl\n---\n")
    for preset, row in ("fineweb", b"bbbbbbbbbb"), ("codeparrot", b"a_a_a_a_a_"):
        monkeypatch.setitem(prepare.PRESETS[preset], "hf_path", str(tmp_path))
        out = tmp_path / preset
        prepare.main([f"--dataset={preset}", f"--out_dir={out}", "--seq_len=10"])
        assert rows_of(out, 10) == [row, row]


def test_reading_parquet_takes_little_memory(tmp_path):
    import pyarrow
    import pyarrow.parquet
    texts = [random.Random(i).randbytes(20_000).hex() for i in range(1000)]
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    program = f"""
import prepare, pyarrow
prepare.main(["--dataset=hf", "--hf_path={tmp_path}/a.parquet", "--out_dir={tmp_path}/out"])
print(pyarrow.default_memory_pool().max_memory())
"""
    output = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT)
    most = int(output.split()[-1])
    assert most < os.path.getsize(tmp_path / "a.parquet") / 3


# ---- The program.
def test_a_folder_belongs_to_one_process_until_that_ends(tmp_path):
    program = f"import prepare\nwith prepare.locked('{tmp_path}'): print('locked'); input()"
    command = [sys.executable, "-uc", program]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert first.stdout.readline() == b"locked\n"
    assert "another process is writing to" in error_of(f"--out_dir={tmp_path}")
    first.kill()
    first.communicate()
    with prepare.locked(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()  # nothing was written


@pytest.mark.parametrize("arguments, message", [
    ("--dataset=files", "--input and --dataset=files need each other"),
    ("--input=books", "--input and --dataset=files need each other"),
    ("--hf_path=x", "--hf_path and --dataset=hf need each other"),
    ("--dataset=files --input=no/such", "/no/such matches no file"),
    ("--dataset=files --input=no/*/such", "/no/*/such matches no file"),
    ("--dataset=hf --hf_path=no.jsonl", "Unable to find"),
    ("--dataset=hf --hf_path={tmp}/a.jsonl --split=test",
     "--split=test of {tmp}/a.jsonl: Bad split: test. Available splits: ['train']"),
    ("--dataset=hf --hf_path={tmp}/a.jsonl --split=train[:10%]",
     "['train'] (slices are not supported)"),
    ("{files} --seq_len=301", "fewer than two rows of --seq_len=301 bytes"),
    ("{files} --seq_len=100 --max_bytes=199", "larger --max_bytes"),
    ("{files} --max_bytes=many", "'many'"),
    ("{files} --max_bytes=inf", "--max_bytes=inf must be a whole number above 0"),
    ("{files} --seq_len=1.5", "--seq_len=1.5 must be a whole number above 0"),
    ("{files} --seq_len=0", "--seq_len=0.0 must be a whole number above 0"),
    ("{files} --val_fraction=0.6", "--val_fraction=0.6 must be above 0 and at most"),
    ("{files} --val_fraction=nan", "--val_fraction=nan must be above 0 and at most"),
])
def test_a_mistake_is_one_line_and_does_not_block_the_folder(arguments, message, tmp_path):
    make_files(tmp_path / "in", [300] * 3)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    arguments = arguments.format(tmp=tmp_path, files=f"--dataset=files --input={tmp_path}/in")
    out = f"--out_dir={tmp_path}/new"
    assert message.replace("{tmp}", str(tmp_path)) in error_of(*arguments.split(), out)
    assert not (tmp_path / "new").exists()
    prepare.main(small(tmp_path))


def test_the_program_ends_with_the_right_code_and_all_its_output(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("LC_ALL", "C")
    table = pyarrow.table({"text": ["x" * 5000] * 5000})
    pyarrow.parquet.write_table(table, tmp_path / "é.parquet")
    output, errors = run("prepare.py", *hf(tmp_path / "é.parquet", tmp_path / "ü"))
    assert "ü: " in output and " for training" in output and errors == ""
    _, errors = run("prepare.py", "--seq_len=a\tö", code=2)
    assert errors == "prepare.py: argument --seq_len: invalid float value: 'a\\tö'\n"


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
