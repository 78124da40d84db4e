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
from conftest import run


def make_files(folder, sizes, seed=0):
    """Writes files of random bytes; returns their contents in the order of their names."""
    rng = random.Random(seed)
    folder.mkdir()
    documents = [rng.randbytes(size) for size in sizes]
    for i, document in enumerate(documents):
        path = folder / f"{i // 5:02d}" / f"{i:03d}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(document)
    return documents


@pytest.fixture
def documents(tmp_path):
    return make_files(tmp_path / "in", [1030] * 20)


def small(tmp_path, *more):
    """Arguments for a set of many shards."""
    return ["--dataset=files", f"--input={tmp_path}/in", f"--out_dir={tmp_path}/out",
            "--seq_len=100", "--val_fraction=0.3", "--shard_bytes=799", *more]


def is_val(document, val_fraction):
    return int(hashlib.blake2b(document, digest_size=8).hexdigest(), 16) / 2**64 < val_fraction


def oracle(documents, seq_len=100, val_fraction=0.3, first_only=False):
    """What each split must hold, if neither is empty."""
    splits = {"train": bytearray(), "val": bytearray()}
    for document in documents:
        rows = len(document) // seq_len
        if first_only:
            rows = min(rows, 1)
        split = "val" if is_val(document, val_fraction) else "train"
        splits[split] += document[: rows * seq_len]
    assert all(splits.values())
    return splits


def held(out_dir):
    """What the shards of each split hold."""
    splits = {}
    for split in "train", "val":
        shards = sorted(out_dir.glob(f"{split}_*.bin"))
        splits[split] = b"".join(shard.read_bytes() for shard in shards)
    return splits


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


def interrupt(capsys, monkeypatch, arguments, notes=1):
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
        assert "same command" in error_of(capsys, *arguments, code=130)


@pytest.mark.parametrize("how", ["--split_documents", "--no-split_documents"])
def test_shards_hold_the_rows_of_the_documents_in_order(how, tmp_path):
    sizes = [0, 1, 99, 100, 101, 250, 1000, 12345, 30_077, *range(40, 400, 7)]
    documents = make_files(tmp_path / "in", sizes)
    out = tmp_path / "out"
    prepare.main(small(tmp_path, how))
    want = oracle(documents, first_only=how == "--no-split_documents")
    assert held(out) == want
    for split in "train", "val":
        rows = np.frombuffer(want[split], np.uint8).reshape(-1, 100)
        shards = prepare.open_shards(out, split, 100)
        assert {len(shard) for shard in shards[:-1]} == {7}
        assert 1 <= len(shards[-1]) <= 7
        numbers = np.array([len(rows) - 1, 7, 3, 6])
        assert np.array_equal(prepare.read_rows(shards, numbers), rows[numbers])
        halves = prepare.read_rows(prepare.open_shards(out, split, 50), [13, 14])
        assert halves.tobytes() == want[split][650:750]
    left_out = json.loads((out / "meta.json").read_text())["left_out_bytes"]
    assert left_out == sum(sizes) - sum(map(len, want.values()))
    with pytest.raises(ValueError, match="seq_len=30 does not divide the 100 bytes"):
        prepare.open_shards(out, "val", 30)


def test_the_default_is_the_standard_library(tmp_path):
    prepare.main([f"--out_dir={tmp_path}/out"])
    files = subprocess.run(
        f"find {sysconfig.get_path('stdlib')} -type f -name '*.py' "
        "-not -path '*/site-packages/*' -not -path '*/dist-packages/*'",
        shell=True, check=True, capture_output=True, text=True).stdout.splitlines()
    documents = [Path(file).read_bytes() for file in sorted(files)]
    assert held(tmp_path / "out") == oracle(documents, 4096, 0.02)


@pytest.mark.parametrize("rows, val_rows, seed", [(2, 1, 0), (9, 1, 0), (70, 7, 0), (70, 7, 1)])
def test_the_end_of_the_only_long_document_is_for_validation(rows, val_rows, seed, tmp_path):
    book = make_files(tmp_path / "in", [99, rows * 100 + 50, 0, 99], seed)[1]
    assert is_val(book, 0.1) == bool(seed)  # its hash may be on either side
    prepare.main(small(tmp_path, "--val_fraction=0.1"))
    start = (rows - val_rows) * 100
    want = {"train": book[:start], "val": book[start : rows * 100]}
    assert held(tmp_path / "out") == want


@pytest.mark.parametrize("val_fraction, last", [(1e-9, "val"), (1 - 1e-9, "train")])
def test_the_last_document_goes_to_a_split_that_has_none(val_fraction, last, tmp_path):
    documents = make_files(tmp_path / "in", [830, 830, 1030, 99])
    prepare.main(small(tmp_path, f"--val_fraction={val_fraction}"))
    other = "train" if last == "val" else "val"
    want = {}
    want[other] = documents[0][:800] + documents[1][:800]
    want[last] = documents[2][:1000]
    assert held(tmp_path / "out") == want


def test_overlapping_inputs_give_each_file_once_and_never_our_own_shards(
        documents, tmp_path, capsys, monkeypatch):
    (tmp_path / "in/link").symlink_to("01/008")
    (tmp_path / "in/[x]").write_bytes(b"y" * 100)
    arguments = small(tmp_path / "in")  # its shards go to in/out
    arguments[1] = f"--input={tmp_path}/**/*0??*"
    arguments += ["--input", f"{tmp_path}/in/02", f"{tmp_path}/in/[x]", f"{tmp_path}/in/link"]
    interrupt(capsys, monkeypatch, arguments)
    prepare.main(arguments)
    assert held(tmp_path / "in/out") == oracle([*documents, b"y" * 100])


def test_max_bytes_is_exact_nothing_is_read_beyond_it_and_the_set_is_not_the_full_one(
        documents, tmp_path, monkeypatch, capsys):
    def spy(path, **options):
        read.append(Path(path).read_bytes())
        return memmap(path, **options)

    read = []
    memmap = np.memmap
    monkeypatch.setattr(np, "memmap", spy)
    prepare.main(small(tmp_path, "--max_bytes=1.555e4"))
    want = oracle(documents[:15])
    last = "val" if is_val(documents[15], 0.3) else "train"
    want[last] += documents[15][:500]
    assert held(tmp_path / "out") == want
    assert read == documents[:16]
    assert "was made with" in error_of(capsys, *small(tmp_path))


@pytest.mark.parametrize("val_fraction", [0.3, 1e-9])
def test_killed_at_any_line_the_same_command_ends_with_the_same_files(val_fraction, tmp_path):
    """A kill leaves what is on the disk, so the folder is copied before each line runs."""
    make_files(tmp_path / "in", [250, 2500, 80, 130, 700, 333, 999, 100, 400, 400], seed=7)
    arguments = small(tmp_path, "--shard_bytes=1000", f"--val_fraction={val_fraction}")
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
    assert len(moments) > 15
    assert {"train_00002.bin", "val_00000.bin", "meta.json"} < want.keys()
    for moment in moments.values():
        shutil.rmtree(out)
        out.mkdir()
        for name, content in moment.items():
            (out / name).write_bytes(content)
        prepare.main(arguments)
        assert contents(out) == want, moment.keys()


def test_a_full_disk_leaves_the_last_progress_json(documents, tmp_path, capsys, monkeypatch):
    def write_text(path, text):
        path.write_bytes(text.encode()[:100])
        raise OSError(28, "No space left on device", str(path))

    interrupt(capsys, monkeypatch, small(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        assert "No space left" in error_of(capsys, *small(tmp_path))
    prepare.main(small(tmp_path))
    assert held(tmp_path / "out") == oracle(documents)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_hugging_face_files_continue_after_ctrl_c_unless_they_changed(
        kind, tmp_path, capsys, monkeypatch):
    import pyarrow
    import pyarrow.parquet
    rng = random.Random(1)
    texts = ["é" * rng.randrange(200) + str(i) for i in range(3000)] + [None]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    else:  # row groups that no shard ends with
        table = pyarrow.table({"body": texts})
        pyarrow.parquet.write_table(table, path, row_group_size=170)
    arguments = ["--dataset=hf", f"--hf_path={path}", "--text_column=body", "--seq_len=64",
                 "--val_fraction=0.3", "--shard_bytes=20000"]
    want = oracle([(text or "").encode() for text in texts], 64, first_only=True)
    for notes in 1, 4:
        out = tmp_path / str(notes)
        interrupt(capsys, monkeypatch, [*arguments, f"--out_dir={out}"], notes)
        prepare.main([*arguments, f"--out_dir={out}"])
        assert held(out) == want
    assert contents(tmp_path / "1") == contents(tmp_path / "4")

    arguments.append(f"--out_dir={tmp_path}/changed")
    interrupt(capsys, monkeypatch, arguments)
    os.utime(path, (1, 1))
    assert "was begun with" in error_of(capsys, *arguments)


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
    output = subprocess.check_output([sys.executable, "-c", program])
    most = int(output.split()[-1])
    assert most < os.path.getsize(tmp_path / "a.parquet") / 4


def test_a_set_is_not_mixed_with_other_options_or_files(documents, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    path = tmp_path / "in/01/007"
    interrupt(capsys, monkeypatch, small(tmp_path))
    before = contents(out)
    os.truncate(path, 1029)
    line = error_of(capsys, *small(tmp_path))
    assert "20 files, 20600 bytes, but now the input is 20 files, 20599 bytes" in line
    path.unlink()
    assert "now the input is 19 files" in error_of(capsys, *small(tmp_path))
    path.write_bytes(documents[7])
    for _ in "interrupted", "complete":
        assert contents(out) == before
        line = error_of(capsys, *small(tmp_path, "--seq_len=50"))
        assert f"{out} was made with" in line and "'seq_len': 100" in line
        prepare.main(small(tmp_path))
        before = contents(out)
    assert "already complete" in capsys.readouterr().out
    assert held(out) == oracle(documents)


def test_a_folder_belongs_to_one_process_until_that_ends(tmp_path, capsys):
    program = f"""
from pathlib import Path
from prepare import lock
lock(Path('{tmp_path}'))
print('locked')
input()
"""
    command = [sys.executable, "-uc", program]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout.readline() == b"locked\n"
    assert "another process is writing to" in error_of(capsys, f"--out_dir={tmp_path}")
    first.communicate(b"\n")
    prepare.lock(tmp_path)
    prepare.lock(tmp_path)  # a second time in the same process
    second = subprocess.run(command, input=b"\n", stdout=subprocess.PIPE)
    assert (second.returncode, second.stdout) == (2, b"")


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, 99)])
def test_missing_or_short_shards_are_an_error(damage, documents, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    interrupt(capsys, monkeypatch, small(tmp_path), notes=4)
    shutil.copytree(out, tmp_path / "copy")
    damage(out / "train_00001.bin")
    message = "train_00001.bin is missing or shorter than 700 bytes; remove"
    assert message in error_of(capsys, *small(tmp_path))
    shutil.rmtree(out)
    shutil.move(tmp_path / "copy", out)
    prepare.main(small(tmp_path))
    damage(out / "train_00001.bin")
    with pytest.raises(ValueError, match=message):
        prepare.open_shards(out, "train", 100)


@pytest.mark.parametrize("arguments, message", [
    ("--dataset=files", "--input and --dataset=files need each other"),
    ("--input=books", "--input and --dataset=files need each other"),
    ("--hf_path=x", "--hf_path and --dataset=hf need each other"),
    ("--dataset=files --input=no/such", "--input=no/such matches no file"),
    ("--dataset=files --input=\x1b[31m\u202e", "--input=\u241b[31m\ufffd"),
    ("--dataset=hf --hf_path=no.jsonl", "cannot open --hf_path=no.jsonl"),
    ("--dataset=hf --hf_path={tmp}/a.jsonl", "--text_column=text does not exist"),
    ("--dataset=hf --hf_path={tmp}/a.jsonl --text_column=n", "cannot read column n"),
    ("--dataset=hf --hf_path={tmp}/a.jsonl --split=test", "--split=test"),
    ("{files} --seq_len=301", "fewer than two rows of --seq_len=301 bytes"),
    ("{files} --seq_len=100 --max_bytes=199", "larger --max_bytes"),
    ("{files} --max_bytes=many", "'many'"),
    ("{files} --shard_bytes=inf", "'inf'"),
    ("{files} --seq_len=1.5", "'1.5'"),
    ("{files} --seq_len=0", "'0'"),
    ("{files} --val_fraction=2", "--val_fraction=2.0 must lie between"),
])
def test_a_mistake_is_one_line_and_does_not_block_the_folder(
        arguments, message, tmp_path, capsys):
    make_files(tmp_path / "in", [300] * 3)
    (tmp_path / "a.jsonl").write_text('{"body": "text", "n": 1}\n')
    arguments = arguments.format(tmp=tmp_path, files=f"--dataset=files --input={tmp_path}/in")
    assert message in error_of(capsys, *arguments.split(), f"--out_dir={tmp_path}/out")
    prepare.main(small(tmp_path))


def test_the_program_ends_with_the_right_code_and_all_its_output(
        documents, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    output, _ = run("prepare.py", *small(tmp_path))
    assert "bytes for training" in output
    _, errors = run("prepare.py", "--seq_len=a\tb", code=2)
    assert errors == "prepare.py: argument --seq_len: invalid whole_number value: 'a\\tb'\n"
