"""prepare.py against oracles that share no code with it. From the repo root: python -m pytest"""
import glob
import hashlib
import json
import random
import resource
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

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
    assert len(lines) == 1, lines
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
    interrupt(capsys, monkeypatch, 2, arguments)  # leaves shards in the folder that it reads
    prepare.main(arguments)
    assert held(tmp_path / "in/out") == oracle(documents, 100, 0.3, True)


def test_max_bytes_gives_the_first_rows_and_no_more(tmp_path):
    documents = make_files(tmp_path / "in", [1050] * 30)
    prepare.main(["--dataset=files", f"--input={tmp_path}/in", f"--out_dir={tmp_path}/out",
                  "--seq_len=100", "--val_fraction=0.3", "--max_bytes=1.5550e4"])
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
    for kind, mode in [("jsonl", "--no-split_documents"), ("parquet", "--split_documents")]:
        arguments = ["--dataset=hf", f"--hf_path={tmp_path}/a.{kind}", "--text_column=body", mode,
                     "--seq_len=64", "--val_fraction=0.3", "--shard_bytes=50000"]
        prepare.main([*arguments, f"--out_dir={tmp_path}/{kind}"])
        documents = [(text or "").encode() for text in texts]
        assert held(tmp_path / kind) == oracle(documents, 64, 0.3, kind == "parquet")
    arguments += [f"--out_dir={tmp_path}/halted"]
    interrupt(capsys, monkeypatch, 5, arguments)
    prepare.main(arguments)
    assert sha256_of_all(tmp_path / "halted") == sha256_of_all(tmp_path / "parquet")


def test_ctrl_c_names_the_command_that_goes_on_and_it_does(tmp_path, capsys, monkeypatch):
    documents = make_files(tmp_path / "in", [1000] * 20)
    arguments = ["--dataset=files", f"--input={tmp_path}/in", f"--out_dir={tmp_path}/out",
                 "--seq_len=100", "--val_fraction=0.3", "--shard_bytes=1000"]
    line = interrupt(capsys, monkeypatch, 3, arguments)
    assert line.endswith("python prepare.py " + " ".join(arguments))
    prepare.main(arguments)
    assert held(tmp_path / "out") == oracle(documents, 100, 0.3, True)


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
        assert sha256_of_all(tmp_path / "out") == before
    prepare.main(arguments)
    assert "already there" in capsys.readouterr().out
    assert sha256_of_all(tmp_path / "out") == before


def test_a_file_larger_than_memory_is_cut_all_the_same(tmp_path):
    make_files(tmp_path / "in", [4096] * 40)
    with open(tmp_path / "in/flat/007", "wb") as huge:
        huge.truncate(3 * 10**8)  # zeros, and no room on the disk
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
    assert "--val_fraction=2" in error_of(capsys, *files, "--val_fraction=2")
    assert "--hf_path" in error_of(capsys, "--hf_path=x")
    assert "needs --input" in error_of(capsys, "--dataset=files")
    assert [path.name for path in tmp_path.glob("out/*")] == [".lock"]  # nothing is left to be in the way of the next try
