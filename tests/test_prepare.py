"""prepare.py against oracles that share no code with it. From the repo root: python -m pytest"""
import glob
import hashlib
import json
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

import prepare

# runs prepare with the given arguments and dies by SIGKILL before or after its k-th rename
KILLED = """
import os, signal, sys, prepare
calls, k, when, replace = 0, int(sys.argv[1]), sys.argv[2], os.replace
def deadly(*paths):
    global calls
    calls += 1
    if calls == k and when == "before": os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)
    if calls == k: os.kill(os.getpid(), signal.SIGKILL)
os.replace = deadly
prepare.main(sys.argv[3:])
"""


def make_files(folder, sizes, seed=0):
    """Files of random bytes, hence not UTF-8; returns their contents in the order of the names."""
    rng, folder = random.Random(seed), Path(folder)
    documents = [rng.randbytes(size) for size in sizes]
    (folder / "deeper/still").mkdir(parents=True)
    (folder / "flat").mkdir()
    for i, document in enumerate(documents):
        (folder / ("deeper/still" if i < 5 else "flat") / f"{i:03d}").write_bytes(document)
    return documents


def oracle(documents, seq_len, val_fraction, split_documents):
    """What each split must hold, as one string of bytes."""
    held = {"train": bytearray(), "val": bytearray()}
    for document in documents:
        number = int(hashlib.blake2b(document, digest_size=8).hexdigest(), 16)
        split = "val" if number / 2**64 < val_fraction else "train"
        rows = len(document) // seq_len
        held[split] += document[:seq_len * (rows if split_documents else min(rows, 1))]
    return held


def held(out_dir):
    """What the shards of a set hold, as one string of bytes for each split."""
    return {split: b"".join(Path(shard).read_bytes()
                            for shard in sorted(glob.glob(f"{out_dir}/{split}_*.bin")))
            for split in ("train", "val")}


def sha256_of_all(out_dir):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in Path(out_dir).iterdir() if p.name != ".lock"}


def run_killed(k, when, arguments):
    """True if the run was killed, False if it ended well before its k-th rename."""
    code = subprocess.run([sys.executable, "-c", KILLED, str(k), when, *arguments],
                          stdout=subprocess.DEVNULL).returncode
    assert code in (0, -signal.SIGKILL)
    return code != 0


def error_of(capsys, *arguments, code=2):
    """The one line on stderr with which a run must fail."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        prepare.main([str(a) for a in arguments])
    assert exit.value.code == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].isprintable(), lines
    return lines[0]


def interrupt(capsys, monkeypatch, shards, arguments):
    """Presses Ctrl-C when so many shards are written; returns the one line on stderr."""
    def close_part(*args):
        if sum(path.suffix == ".bin" for path in Path(args[0].name).parent.iterdir()) == shards:
            signal.raise_signal(signal.SIGINT)
        original(*args)
    original = prepare.close_part
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "close_part", close_part)
        return error_of(capsys, *arguments, code=130)


SIZES = [0, 1, 99, 100, 101, 250, 1000, 12345, 3_000_077] + list(range(40, 400, 7))


@pytest.mark.parametrize("split_documents", [True, False])
def test_the_rows_are_the_bytes_of_the_documents_in_order(tmp_path, split_documents):
    documents = make_files(tmp_path / "in", SIZES)
    prepare.main(["--dataset=files", f"--input={tmp_path}/in", f"--out_dir={tmp_path}/out",
                  "--seq_len=100", "--val_fraction=0.3", "--shard_bytes=200050",
                  "--split_documents" if split_documents else "--no-split_documents"])
    want = oracle(documents, 100, 0.3, split_documents)
    assert held(tmp_path / "out") == want and all(want.values())

    meta = json.loads((tmp_path / "out/meta.json").read_text())
    for split in ("train", "val"):
        assert meta[split]["rows"] * 100 == meta[split]["bytes"] == len(want[split])
        sizes = [s.stat().st_size for s in sorted((tmp_path / "out").glob(f"{split}_*.bin"))]
        assert all(size == 200_000 for size in sizes[:-1]) and 0 < sizes[-1] <= 200_000
    sha256 = sha256_of_all(tmp_path / "out")
    del sha256["meta.json"]
    assert sha256 == {**meta["train"]["sha256"], **meta["val"]["sha256"]}
    short = [d for d in documents if len(d) < 100]
    dropped = {"short_documents": len(short), "short_bytes": sum(map(len, short))}
    dropped["tail_bytes"] = (sum(map(len, documents)) - dropped["short_bytes"]
                             - meta["train"]["bytes"] - meta["val"]["bytes"])
    assert meta["dropped"] == dropped
    assert meta["train"]["documents"] + meta["val"]["documents"] == len(documents) - len(short)


def test_without_options_it_cuts_the_standard_library(tmp_path):
    prepare.main([f"--out_dir={tmp_path}/out"])
    files = subprocess.run(
        f"find {sysconfig.get_path('stdlib')} -type f -name '*.py' "
        "-not -path '*/site-packages/*' -not -path '*/dist-packages/*'",
        shell=True, check=True, capture_output=True, text=True).stdout.splitlines()
    for split, want in oracle([Path(f).read_bytes() for f in files], 4096, 0.02, True).items():
        have = held(tmp_path / "out")[split]  # find has an order of its own
        rows = [sorted(b[i:i + 4096] for i in range(0, len(b), 4096)) for b in (have, want)]
        assert rows[0] == rows[1]


def test_a_document_keeps_its_split_in_any_order_and_shard_size_and_with_its_double(tmp_path):
    documents = make_files(tmp_path / "in", [100] * 60)
    twice = documents[::-1] + documents
    (tmp_path / "other").mkdir()
    for i, document in enumerate(twice):
        (tmp_path / f"other/{i:03d}").write_bytes(document)
    splits = []
    for name, shard_bytes in [("in", "1e6"), ("other", "300")]:
        prepare.main(["--dataset=files", f"--input={tmp_path}/{name}", "--seq_len=100",
                      f"--out_dir={tmp_path}/{name}.out", "--val_fraction=0.3",
                      f"--shard_bytes={shard_bytes}"])
        both = held(f"{tmp_path}/{name}.out")
        splits.append([{b[i:i + 100] for i in range(0, len(b), 100)} for b in both.values()])
    assert splits[0] == splits[1]
    assert splits[0][0].isdisjoint(splits[0][1]) and set.union(*splits[0]) == set(documents)


def test_globs_and_folders_that_overlap_give_each_file_once_and_no_shards(
        tmp_path, capsys, monkeypatch):
    documents = make_files(tmp_path / "in", [100] * 40)
    arguments = ["--dataset=files", "--seq_len=100", "--val_fraction=0.3", "--shard_bytes=1000",
                 f"--out_dir={tmp_path}/in/out", "--input", f"{tmp_path}/in/**/0*",
                 f"{tmp_path}/in", f"{tmp_path}/in/flat/007"]
    (tmp_path / "in/link").symlink_to("flat/008")
    interrupt(capsys, monkeypatch, 2, arguments)  # leaves shards in the folder that it reads
    prepare.main(arguments)
    assert held(tmp_path / "in/out") == oracle(documents, 100, 0.3, True)


def test_max_bytes_gives_the_first_rows_and_no_more_though_interrupted(tmp_path, capsys, monkeypatch):
    documents = make_files(tmp_path / "in", [1050] * 30)
    arguments = ["--dataset=files", f"--input={tmp_path}/in", f"--out_dir={tmp_path}/out",
                 "--seq_len=100", "--val_fraction=0.3", "--max_bytes=1.5550e4", "--shard_bytes=1000"]
    interrupt(capsys, monkeypatch, 3, arguments)
    prepare.main(arguments)
    number = int(hashlib.blake2b(documents[15], digest_size=8).hexdigest(), 16)
    want = oracle(documents[:15], 100, 0.3, True)  # and half of the 16th, which goes by its whole
    want["val" if number / 2**64 < 0.3 else "train"] += documents[15][:500]
    assert held(tmp_path / "out") == want


def test_killed_around_any_rename_and_started_again_it_ends_with_the_same_files(tmp_path):
    make_files(tmp_path / "in", [250, 2500, 80, 130, 700, 333, 999, 100, 400, 400], seed=7)
    arguments = ["--dataset=files", f"--input={tmp_path}/in", "--seq_len=100",
                 "--val_fraction=0.4", "--shard_bytes=1000"]
    prepare.main([*arguments, f"--out_dir={tmp_path}/whole"])
    want = sha256_of_all(tmp_path / "whole")
    assert len(want) == 7  # three shards in each split, the last of val a full one, and meta.json
    for when in ("before", "after"):
        k = 1
        while run_killed(k, when, [*arguments, f"--out_dir={tmp_path}/{when}{k}"]):
            prepare.main([*arguments, f"--out_dir={tmp_path}/{when}{k}"])
            assert sha256_of_all(tmp_path / f"{when}{k}") == want, (when, k)
            k += 1
        assert k > 12  # six shards, the note of each full one, the first note and meta.json


def test_jsonl_and_parquet_come_through_datasets_and_survive_ctrl_c(tmp_path, capsys, monkeypatch):
    import pyarrow
    import pyarrow.parquet
    rng = random.Random(1)
    texts = ["é" * rng.randrange(200) + str(i) for i in range(3000)] + [None]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "a.parquet",
                                row_group_size=170)  # so that it resumes between two and within one
    for kind, mode in [("jsonl", []), ("parquet", ["--split_documents"])]:
        arguments = ["--dataset=hf", f"--hf_path={tmp_path}/a.{kind}", "--text_column=body", *mode,
                     "--seq_len=64", "--val_fraction=0.3", "--shard_bytes=50000"]
        prepare.main([*arguments, f"--out_dir={tmp_path}/{kind}"])
        documents = [(text or "").encode() for text in texts]
        assert held(tmp_path / kind) == oracle(documents, 64, 0.3, kind == "parquet")
        short = json.loads((tmp_path / kind / "meta.json").read_text())["dropped"]["short_bytes"]
        assert short == sum(len(document) for document in documents if len(document) < 64)
    arguments += [f"--out_dir={tmp_path}/halted"]
    interrupt(capsys, monkeypatch, 5, arguments)
    prepare.main(arguments)
    assert sha256_of_all(tmp_path / "halted") == sha256_of_all(tmp_path / "parquet")


def test_ctrl_c_names_the_command_that_goes_on_and_it_does(tmp_path, capsys, monkeypatch):
    documents = make_files(tmp_path / "in", [1000] * 20)
    arguments = ["--dataset=files", f"--input={tmp_path}/in", f"--out_dir={tmp_path}/out\x1b",
                 "--seq_len=100", "--val_fraction=0.3", "--shard_bytes=1000"]
    line = interrupt(capsys, monkeypatch, 3, arguments)
    assert line.endswith("python prepare.py " + shlex.join(arguments).replace("\x1b", "\u241b"))
    prepare.main(arguments)
    assert held(tmp_path / "out\x1b") == oracle(documents, 100, 0.3, True)


def test_a_set_is_not_mixed_with_other_options_or_another_source(tmp_path, capsys):
    make_files(tmp_path / "in", [1000] * 20)
    arguments = ["--dataset=files", f"--input={tmp_path}/in", f"--out_dir={tmp_path}/out",
                 "--seq_len=100", "--val_fraction=0.3", "--shard_bytes=1000"]
    for complete in (False, True):
        if complete:
            prepare.main(arguments)
        else:
            assert run_killed(5, "after", arguments)
        before = sha256_of_all(tmp_path / "out")
        line = error_of(capsys, *arguments, "--seq_len=50", "--max_bytes=1e6")
        assert "seq_len=100 (now 50)" in line and "max_bytes" in line and "--out_dir" in line
        if not complete:
            (tmp_path / "in/new").write_bytes(b"new")
            assert "21 files" in error_of(capsys, *arguments)
            (tmp_path / "in/new").unlink()
            (tmp_path / "in/flat/007").rename(tmp_path / "in/flat/7")
            assert "start again" in error_of(capsys, *arguments)
            (tmp_path / "in/flat/7").rename(tmp_path / "in/flat/007")
        assert sha256_of_all(tmp_path / "out") == before
    prepare.main(arguments)
    assert "already there" in capsys.readouterr().out
    assert sha256_of_all(tmp_path / "out") == before
    (tmp_path / "out/meta.json").unlink()
    assert "without meta.json" in error_of(capsys, *arguments)


def test_a_second_process_in_the_folder_ends_in_one_line(tmp_path, capsys):
    holds = "import pathlib, sys, prepare; lock = prepare.lock(pathlib.Path(sys.argv[1])); print(flush=True); input()"
    first = subprocess.Popen([sys.executable, "-c", holds, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    first.stdout.readline()
    assert "another prepare.py" in error_of(capsys, f"--out_dir={tmp_path}")
    first.communicate(b"\n")


SMALL = ["--dataset=files", "--seq_len=80", "--val_fraction=0.3", "--shard_bytes=800"]


def test_marks_of_bpe_tokens_go_on_with_their_bytes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prepare, "bpe_marks", lambda document: np.frombuffer(document, np.uint8) >> 7)
    make_files(tmp_path / "in", [250, 2500, 90, 130, 700] * 5)
    for shards in (2, 5, 7):
        arguments = [*SMALL, "--bpe", f"--input={tmp_path}/in", f"--out_dir={tmp_path}/out{shards}"]
        interrupt(capsys, monkeypatch, shards, arguments)
        prepare.main(arguments)
        for shard in (tmp_path / f"out{shards}").glob("*.bin"):
            marks = np.unpackbits(np.fromfile(shard.with_suffix(".bpe"), np.uint8))
            assert np.array_equal(marks, np.fromfile(shard, np.uint8) >> 7)


def test_verify_names_each_shard_that_is_changed_lost_or_not_in_meta_json(tmp_path, capsys):
    make_files(tmp_path / "in", [1000] * 20)
    out, check = tmp_path / "out", [f"--out_dir={tmp_path}/out", "--verify"]
    prepare.main([*SMALL, f"--input={tmp_path}/in", f"--out_dir={out}"])
    meta = json.loads((out / "meta.json").read_text())
    capsys.readouterr()
    prepare.main(check)
    assert "agree" in capsys.readouterr().out
    shard = bytearray((out / "train_00002.bin").read_bytes())
    shard[700] ^= 1
    (out / "train_00002.bin").write_bytes(shard)
    (out / "train_00001.bin").unlink()
    (out / "val_77777.bin").write_bytes(b"")
    line = error_of(capsys, *check, code=1)
    for name in ["train_00001.bin", "train_00002.bin"]:
        assert f"{name} has" in line and meta["train"]["sha256"][name] in line
    assert "val_77777.bin has" in line and line.count(" has ") == 3


def test_it_does_not_go_on_from_a_shard_that_was_lost_or_cut(tmp_path, capsys, monkeypatch):
    make_files(tmp_path / "in", [1000] * 20)
    out, arguments = tmp_path / "out", [*SMALL, f"--input={tmp_path}/in", f"--out_dir={tmp_path}/out"]
    interrupt(capsys, monkeypatch, 5, arguments)
    parts = [path.name for path in out.glob("*.part")]
    whole = {name: (out / name).read_bytes() for name in ["train_00000.bin", *parts]}
    for damage in [lambda name: os.truncate(out / name, 7), lambda name: (out / name).unlink()]:
        for names in [["train_00000.bin"], parts]:
            [damage(name) for name in names]
            line = error_of(capsys, *arguments)
            assert any(name in line for name in names) and f"remove {out}" in line and not (out / "meta.json").exists()
            [(out / name).write_bytes(whole[name]) for name in names]
    prepare.main(arguments)
    (out / "train_00000.bin").unlink()
    assert "train_00000.bin is missing" in error_of(capsys, *arguments)


def test_a_damaged_progress_json_or_meta_json_is_noticed_at_any_byte(tmp_path, capsys, monkeypatch):
    make_files(tmp_path / "in", [1000] * 20)
    out, arguments = tmp_path / "out", [*SMALL, f"--input={tmp_path}/in", f"--out_dir={tmp_path}/out"]
    interrupt(capsys, monkeypatch, 5, arguments)
    for name in ["progress.json", "meta.json"]:
        text = (out / name).read_bytes()
        damaged = [b"", b"[]", b"{}", b"7", b'"text"', b"\xff", b"[" * 99999, text[:-9]]
        damaged += [text[:i] + bytes([text[i] ^ 1]) + text[i + 1 :] for i in range(0, text.rindex(b'"sha256"'), 23)]
        for damage in damaged:
            (out / name).write_bytes(damage)
            before = sha256_of_all(out)
            assert f"{out / name} is damaged" in error_of(capsys, *arguments)
            assert sha256_of_all(out) == before
        (out / name).write_bytes(text)
        prepare.main(arguments)


def test_a_full_disk_costs_no_note(tmp_path, capsys, monkeypatch):
    documents = make_files(tmp_path / "in", [1000] * 20)
    arguments = [*SMALL, f"--input={tmp_path}/in", f"--out_dir={tmp_path}/out"]
    interrupt(capsys, monkeypatch, 5, arguments)

    def write_text(path, text):
        path.write_bytes(text.encode()[:100])
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_text)
        assert "No space left" in error_of(capsys, *arguments)
    prepare.main(arguments)
    assert held(tmp_path / "out") == oracle(documents, 80, 0.3, True)


def test_a_document_that_shrinks_while_it_is_read_ends_the_run(tmp_path, capsys, monkeypatch):
    make_files(tmp_path / "in", [1000] * 20)
    digest = prepare.digest
    monkeypatch.setattr(prepare, "digest", lambda file, hasher: (digest(file, hasher), os.truncate(file.name, 100))[0])
    assert "000 shrank" in error_of(capsys, *SMALL, f"--input={tmp_path}/in", f"--out_dir={tmp_path}/out")


def test_double_stars_find_what_globs_find_and_follow_no_links(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    for name in ["a.c", "x/a.c", "x/y/b.c", ".hidden/c.c", "x/.hidden/d.c", "[x]/e.c", "z/x/y/x/f.c", "../outside/x/y/g.c"]:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    patterns = ["**/*.c", "x/**/*.c", "**/x/**/*.c", "*/**/y/*.c", f"{tmp_path}/in/**/x/*.c", "x/**/.hidden/*"]
    found = [{str(Path(path).resolve()) for path in glob.glob(pattern, recursive=True)} for pattern in patterns]
    Path("x/outside").symlink_to(tmp_path / "outside")
    Path("loop").symlink_to(".")
    for pattern, want in zip(patterns, found):
        assert prepare.find_files([pattern], "out") == sorted(want) and want


def test_a_folder_that_cannot_be_read_is_no_silent_gap(tmp_path, capsys, monkeypatch):
    make_files(tmp_path / "in", [1000] * 20)

    def scandir(path, scandir=os.scandir):  # chmod does not stop root
        if str(path).endswith("still"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for name in ["in", "in/**/*", "i*"]:
        assert "deeper/still" in error_of(capsys, *SMALL, f"--input={tmp_path}/{name}", f"--out_dir={tmp_path}/out")


def test_an_out_dir_of_any_characters_is_printed_to_a_terminal_of_ascii(tmp_path):
    make_files(tmp_path / "in", [1000] * 20)
    done = subprocess.run([sys.executable, prepare.__file__, *SMALL, f"--input={tmp_path}/in", f"--out_dir={tmp_path}/\xe4\x1b\u202e"],
                          env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True)
    assert "train" in done.stdout.decode("ascii") and b"\x1b" not in done.stdout and not done.stderr


def test_a_file_larger_than_memory_is_cut_all_the_same(tmp_path):
    make_files(tmp_path / "in", [4096] * 40)
    with open(tmp_path / "in/flat/007", "wb") as huge:
        huge.truncate(2 * 10**8)  # zeros, and no room on the disk
    little = lambda: resource.setrlimit(resource.RLIMIT_AS, (2**27, 2**27))
    subprocess.run([sys.executable, "-m", "prepare", "--dataset=files", f"--input={tmp_path}/in",
                    f"--out_dir={tmp_path}/out", "--val_fraction=0.3", "--no-split_documents"],
                   check=True, preexec_fn=little)
    assert sum(map(len, held(tmp_path / "out").values())) == 40 * 4096


def test_each_mistake_gives_one_line_and_exit_code_2(tmp_path, capsys):
    make_files(tmp_path / "in", [300] * 3)
    files = ["--dataset=files", f"--input={tmp_path}/in", f"--out_dir={tmp_path}/out"]
    hf = ["--dataset=hf", f"--out_dir={tmp_path}/out", f"--hf_path={tmp_path}/a.jsonl"]
    assert "no/such" in error_of(capsys, "--dataset=files", "--input=no/such")
    assert "a.jsonl" in error_of(capsys, *hf)
    (tmp_path / "a.jsonl").write_text('{"body": "text", "n": 1}\n')
    assert "text" in error_of(capsys, *hf)
    assert "holds int" in error_of(capsys, *hf, "--text_column=n")
    assert "test" in error_of(capsys, *hf, "--text_column=body", "--split=test")
    assert "smaller --seq_len" in error_of(capsys, *files, "--seq_len=301")
    assert "val" in error_of(capsys, *files, "--seq_len=100", "--val_fraction=1e-9")
    assert "train" in error_of(capsys, *files, "--seq_len=100", "--val_fraction=0.999999999")
    assert "'many'" in error_of(capsys, *files, "--max_bytes=many")
    assert "inf" in error_of(capsys, *files, "--shard_bytes=inf")
    assert "1.5" in error_of(capsys, *files, "--seq_len=1.5")
    assert "\u241b[31m\ufffd" in error_of(capsys, "--dataset=files", "--input=\x1b[31m\u202e", f"--out_dir={tmp_path}/out")
    assert "--val_fraction=2" in error_of(capsys, *files, "--val_fraction=2")
    assert "--hf_path" in error_of(capsys, "--hf_path=x")
    assert "needs --input" in error_of(capsys, "--dataset=files")
    foreign = [tmp_path / "out/train_set.bin.bz2", tmp_path / "out/val_book.bib"]
    for path in foreign:
        path.write_text("mine")
    assert "smaller --seq_len" in error_of(capsys, *files, "--seq_len=301")
    assert all(path.read_text() == "mine" and not path.unlink() for path in foreign)
    assert [path.name for path in tmp_path.glob("out/*")] == [".lock"]  # nothing is left to be in the way of the next try
