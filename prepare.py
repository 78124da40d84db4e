"""
Cuts text into rows of bytes that train.py can read.

    python prepare.py                                            # Python's own standard library
    python prepare.py --dataset=files --input ~/books 'src/**/*.c' notes.txt
    python prepare.py --dataset=hf --hf_path=some/file.jsonl --text_column=content
    python prepare.py --dataset=fineweb --max_bytes=6e9

    --dataset          stdlib, files, hf, fineweb or codeparrot (stdlib)
    --input            files, folders, globs, or - for stdin; each file is a document
    --hf_path          dataset of the hub, or a folder or file of JSON, CSV, Parquet or Arrow
    --hf_name          configuration of a dataset of the hub, e.g. sample-100BT
    --split            split of a dataset (train)
    --text_column      column of a dataset that holds the documents (text)
    --out_dir          folder of the shards (data/<dataset>)
    --seq_len          bytes per row (4096)
    --split_documents  use all rows of a document (default for local files) or only its first
    --val_fraction     share of the rows that go to val (0.02)
    --max_bytes        stop after this many bytes of rows, e.g. 6e9

A document is cut into rows, and the remainder is left out. If the program is stopped, the same
command continues. In folders and by wildcards, it skips hidden and unreadable files, copies,
caches, installed packages, and what lies in a folder with shards or a checkpoint.

A document that is larger than val's share of all rows so far gives its last rows to val, as many
as val lacks. Others stay whole: they go to val if a hash of their rows is below val_fraction or
val has less than half of its share, unless it would then have more than 1.5 times its share.
"""
import argparse
import glob
import json
import os
import re
import sys
import sysconfig
import zlib
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.dataset
from filelock import FileLock, Timeout
from tqdm import tqdm

from common.commandline import UserError, argument_parser, run_program, say

DEFAULTS = {"seq_len": 4096, "val_fraction": 0.02, "split": "train", "text_column": "text"}
SHARD_BYTES = 10**8  # rounded to whole rows
PRESETS = {
    "fineweb": {"hf_path": "HuggingFaceFW/fineweb", "hf_name": "sample-10BT"},
    "codeparrot": {"hf_path": "codeparrot/codeparrot-clean", "text_column": "content"}}
SKIPPED = re.compile(r"(^|/)\.|(__pycache__|(site|dist)-packages)(/|$)|\.pyc$")
NO_TEXT = re.compile(rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|PK\x03\x04|%PDF|\xff\xfe|\xfe\xff")
OURS = "train_00000.bin", "val_00000.bin", "ckpt.pt"


def open_shards(folder, split, seq_len, notes="meta.json"):
    """Maps a split's shards: a list of arrays (rows, seq_len) uint8, all but the last of them full.

    UserError if the folder is not complete, or if seq_len does not divide the length of its rows.
    """
    path = Path(folder, notes)
    if not path.exists():
        raise UserError(f"no {path}; make the data first: python prepare.py --help")
    try:
        state = json.loads(path.read_text())
        size = state["options"]["seq_len"]
        shard_bytes = state["options"]["shard_bytes"]
        total = state[split]["bytes"]
        shards = []
        for start in range(0, total, shard_bytes):
            rows = min(shard_bytes, total - start) // seq_len
            # np.memmap would keep a file open for each of maybe thousands of shards
            with pyarrow.memory_map(f"{folder}/{split}_{start // shard_bytes:05d}.bin") as file:
                data = np.frombuffer(file.read_buffer(rows * seq_len), np.uint8)
            shards.append(data.reshape(rows, seq_len))
    except (ValueError, TypeError, LookupError, FileNotFoundError) as error:
        raise UserError(f"{path} or a shard is damaged ({error}); remove {folder} and start again")
    if size % seq_len:
        raise UserError(f"seq_len={seq_len} does not divide the {size} bytes of a row in {folder}")
    return shards


def read_files(options, state):
    """Yields a version of the input, then documents and bookmarks: where to go on after them."""
    counts = Counter()
    paths = {}
    wanted = "*" if "input" in options else "*.py"
    for root in options.get("input", [sysconfig.get_path("stdlib")]):
        root = "/dev/stdin" if root == "-" else os.path.abspath(root)
        found = [root] if os.path.exists(root) else glob.glob(root, recursive=True)
        if not found:
            raise UserError(f"--input={root} matches no file")
        while found:
            path = Path(found.pop())
            real = os.path.realpath(path)
            below = str(path)[len(os.path.commonprefix([str(path), root])) :]  # found, not written
            ours = any(Path(path.parent, name).exists() for name in OURS)
            unreadable = not os.access(path, os.R_OK) or path.is_fifo()
            if below and (SKIPPED.search(below) or ours or unreadable):
                counts["paths skipped (see --help)"] += 1
            elif real not in paths:  # a link may lead back
                paths[real] = path
                if path.is_dir():
                    found += sorted(path.iterdir())
    files = sorted(path for path in paths.values() if path.match(wanted) and not path.is_dir())
    yield zlib.crc32(repr([(path, path.stat().st_mtime) for path in files]).encode())
    state["counts"] = counts
    seen = set()
    for path in files:
        with open(path, "rb") as file:
            while document := file.read(2**30):  # of a larger file, each gigabyte is a document
                counts["packed, PDF or UTF-16 files used raw"] += bool(NO_TEXT.match(document))
                if hash(document) in seen:
                    counts["copies skipped"] += 1
                elif len(seen) >= state["bookmark"]:
                    yield document, len(seen) + 1
                seen.add(hash(document))


def read_hf(options, state):
    """Yields what read_files yields, of a Hugging Face dataset."""
    import datasets  # here because it takes seconds
    path, split, column = options["hf_path"], options["split"], options["text_column"]
    kind = not os.path.isdir(path) and re.search(r"\.(json|csv|parquet|arrow)[^/]*$", path)
    try:
        builder = datasets.load_dataset_builder(
            kind[1] if kind else path, options.get("hf_name"),
            data_files=glob.escape(path) if kind else None)
        yield f"{builder.config_id} {builder.hash}"
        state["counts"] = counts = Counter(state["counts"])
        config = builder.config
        config.batch_size = 1000  # of Parquet; the default fails if the first row group is empty
        # without this, pyarrow keeps in memory all that it has read of a Parquet file
        config.fragment_scan_options = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False)
        records = builder.as_streaming_dataset(split)
        files = len(config.data_files[split])
        found = sum(file.is_file() for file in Path(path).rglob("*")) or files
        say(f"reading {files} of {found} files of {path}")
        if state["bookmark"]:
            records.load_state_dict(state["bookmark"])
        for record in records:
            if column not in record:
                raise ValueError(f"the columns are {[*record]}")
            if "__index_level_0__" in record and builder.name == "csv":
                raise ValueError("the first line has more commas than the header")
            kind = type(record[column]).__name__
            counts[f"records of type {kind}"] += 1
            if kind == "str":
                yield record[column].encode(), records.state_dict()
        if "records of type str" not in counts:
            raise ValueError(f"there is no text, only {dict(counts)}")
    except Exception as error:  # datasets and the libraries below it raise dozens of types
        if getattr(error, "errno", None):
            raise  # the operating system's: the data may be right
        in_data = os.path.exists(path) or isinstance(error, (ValueError, FileNotFoundError))
        kind = UserError if in_data else OSError  # OSError: mostly the network
        raise kind(f"cannot read --text_column={column} --split={split} of {path}: "
                   f"{str(error) or 'no records'}{' (slices are not supported)' * ('[' in split)}")


@contextmanager
def locked(folder):
    """Makes and locks a folder. UserError: another run has it. A new one that stays empty goes."""
    new = not os.path.exists(folder)
    try:
        with FileLock(f"{folder}/.lock", timeout=0):
            try:
                yield
            finally:
                if new and os.path.exists(folder) and os.listdir(folder) == [".lock"]:
                    Path(folder, ".lock").unlink()
                    Path(folder).rmdir()
    except Timeout:
        raise UserError(f"another process is writing to {folder}; wait, or use another --out_dir")


def write_json(path, state):
    """Writes the state to a file, completely or not at all."""
    part = Path(f"{path}.part")
    part.write_text(json.dumps(state))
    part.replace(path)


def append(folder, split, state, rows):
    """Writes a document's rows, a memoryview, at the end of a split."""
    shard_bytes = state["options"]["shard_bytes"]
    state[split]["documents"] += len(rows) > 0
    while rows:
        index, held = divmod(state[split]["bytes"], shard_bytes)
        with open(f"{folder}/{split}_{index:05d}.bin", "ab") as file:
            file.truncate(held)  # a killed run may have written more
            written = file.write(rows[: shard_bytes - held])
        state[split]["bytes"] += written
        rows = rows[written:]


def prepare(out_dir, options):
    """Makes the set in out_dir, or continues where an earlier run stopped."""
    meta, progress = out_dir / "meta.json", out_dir / "progress.json"
    state = {"options": options, "left_out_bytes": 0, "counts": {}, "bookmark": 0,
             "train": {"bytes": 0, "documents": 0}, "val": {"bytes": 0, "documents": 0}}
    documents = (read_hf if "hf_path" in options else read_files)(options, state)
    options["source"] = next(documents)
    for path in progress, meta:
        if path.exists():
            for split in "train", "val":
                open_shards(out_dir, split, 1, path.name)  # UserError if they are damaged
            state |= json.loads(path.read_text())
    if state["options"] != options:
        raise UserError(f"{out_dir} was made with other options, or its input has changed; use "
                        f"another --out_dir. It was {state['options']}, now it is {options}")
    if meta.exists():
        progress.unlink(missing_ok=True)  # left by a run that was killed on its last line
        say(f"{out_dir} is already complete")
        return
    seq_len, shard_bytes = options["seq_len"], options["shard_bytes"]
    train, val = state["train"], state["val"]
    total = train["bytes"] + val["bytes"]
    limit = options.get("max_bytes", 2**63)
    with tqdm(total=options.get("max_bytes"), initial=total, unit="B", unit_scale=True,
              disable=None) as bar:  # None: no bar if stderr is not a terminal
        for document, state["bookmark"] in documents:
            most = len(document) if options["split_documents"] else seq_len
            size = min(len(document), most, limit - total) // seq_len * seq_len
            rows = memoryview(document)[:size]
            total += size
            bar.update(size)
            state["left_out_bytes"] += len(document) - size
            share = max(options["val_fraction"] * total, seq_len)  # of val
            chosen = zlib.crc32(rows) < options["val_fraction"] * 2**32
            train_size = size
            if size > share:
                train_size -= max(int(share - val["bytes"]) // seq_len * seq_len, 0)
            elif (chosen or val["bytes"] < share / 2) and val["bytes"] + size <= 1.5 * share:
                train_size = 0
            append(out_dir, "train", state, rows[:train_size])
            append(out_dir, "val", state, rows[train_size:])
            if limit - total < seq_len:
                break
            if total // shard_bytes > (total - size) // shard_bytes:
                write_json(progress, state)

    counts = ", ".join(f"{n} {what}" for what, n in state["counts"].items() if n) or "all used"
    if not train["bytes"]:  # a first row goes to val
        (out_dir / "val_00000.bin").unlink(missing_ok=True)
        raise UserError(f"fewer than two rows of --seq_len={seq_len} bytes ({counts}); give more "
                        "text, a smaller --seq_len or a larger --max_bytes")
    write_json(meta, state | {"bookmark": None})
    progress.unlink(missing_ok=True)
    say(f"{out_dir}: {train['bytes']:,} bytes of {train['documents']:,} documents for training, "
        f"{val['bytes']:,} of {val['documents']:,} for validation ({val['bytes'] / total:.1%}; "
        f"--val_fraction={options['val_fraction']}), {state['left_out_bytes']:,} left out "
        f"(--seq_len={seq_len}, --split_documents={options['split_documents']}); {counts}")


def main(argv=None):
    """Runs the command line. A mistake, or a failing disk, is a UserError."""
    parser = argument_parser(__doc__)
    parser.argument_default = argparse.SUPPRESS  # an option not given is absent
    parser.add_argument("--dataset", default="stdlib", choices=["stdlib", "files", "hf", *PRESETS])
    parser.add_argument("--input", nargs="+", action="extend", type=os.path.expanduser)
    for name in "hf_path", "hf_name", "split", "text_column", "out_dir":
        parser.add_argument(f"--{name}", type=os.path.expanduser)
    for name in "seq_len", "max_bytes", "val_fraction":
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--split_documents", action=argparse.BooleanOptionalAction)
    given = vars(parser.parse_args(argv))
    for option, needed in ("input", "files"), ("hf_path", "hf"):
        if (option in given) != (given["dataset"] == needed):
            raise UserError(f"--{option} and --dataset={needed} need each other")
    options = DEFAULTS | PRESETS.get(given["dataset"], {}) | given
    options.setdefault("split_documents", os.path.exists(options.get("hf_path", ".")))
    if not 0 < options["val_fraction"] <= 0.5:
        raise UserError(f"--val_fraction={options['val_fraction']} must be above 0 and at most 0.5")
    for name in {"seq_len", "max_bytes"} & given.keys():
        if given[name] < 1 or given[name] % 1:
            raise UserError(f"--{name}={given[name]} must be a whole number above 0")
        options[name] = int(given[name])
    options["shard_bytes"] = max(SHARD_BYTES // options["seq_len"], 1) * options["seq_len"]
    out_dir = Path(options.pop("out_dir", "") or f"data/{given['dataset']}")
    try:
        with locked(out_dir):
            prepare(out_dir, options)
    except KeyboardInterrupt:
        say("stopped; the same command continues")
        raise
    except OSError as error:
        raise UserError(f"{out_dir}: {error}; fix this and run the same command again to continue")


if __name__ == "__main__":
    try:
        run_program(main)
    except SystemExit as end:
        say(end="")  # what --help printed
        if hasattr(sys, "ps1"):  # in a notebook, which goes on
            raise
        os._exit(end.code)  # because pyarrow's threads can abort or block a normal exit
