"""
Cuts text into rows of bytes that train.py can read.

    python prepare.py                                              Python's own standard library
    python prepare.py --dataset=files --input ~/books 'src/**/*.c' notes.txt
    python prepare.py --dataset=hf --hf_path=some/file.jsonl --text_column=content
    python prepare.py --dataset=fineweb --max_bytes=6e9

Documents are packed end to end, with two newlines after each. Only the last bytes of train and of
val, less than a row each, are left out. With --pack=False, the paper's rule, a row is the beginning
of a document, and shorter documents are left out. Of copies, the first is used.

Whenever val has less than val_fraction of all bytes so far, or less than a row, it gets the last
rows of the next document, as many as it lacks.

In folders and by wildcards, it skips hidden and unreadable files, caches, installed packages, and
what lies in a folder with shards or a checkpoint. If it is stopped, the same command continues. It
needs memory for a document, or a gigabyte of it, or a JSON array, and about 130 bytes for each
document.
"""
import argparse
import hashlib
import inspect
import json
import math
import os
import re
import sys
import sysconfig
import zlib
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.commandline import UserError, argument_parser, parse, run_program, say
from common.files import locked, matches, write_text
from common.records import find_records, read_records

SHARD_BYTES = 10**8  # rounded to whole rows
LARGEST = 2**30  # bytes; of a larger file, each such piece is a document
PRESETS = {
    "stdlib": {}, "files": {}, "hf": {},
    "fineweb": {"hf_path": "HuggingFaceFW/fineweb", "hf_name": "sample-10BT", "pack": False},
    "codeparrot": {"hf_path": "codeparrot/codeparrot-clean", "text_column": "content",
                   "pack": False}}
SKIPPED = re.compile(r"/\.|(__pycache__|(site|dist)-packages)(/|$)|\.pyc$")
OURS = "train_00000.bin", "val_00000.bin", "ckpt.pt"


@dataclass
class Options:
    dataset: str = "stdlib"  # stdlib, files, hf, fineweb or codeparrot
    input: list = None  # files, folders, globs, or - for stdin; each file is a document
    hf_path: str = ""  # of the hub, a folder, or a glob of JSON, CSV, TSV, Parquet or Arrow files
    hf_name: str = ""  # configuration of a dataset of the hub, e.g. sample-100BT
    split: str = "train"  # split of a dataset; no slice of it, such as train[:10%]
    text_column: str = "text"  # column of a dataset that holds the documents
    out_dir: str = ""  # folder of the shards; if empty, data/<dataset>
    seq_len: int = 4096  # bytes per row
    pack: bool = True  # pack documents end to end; False for fineweb and codeparrot
    binary: bool = False  # also use files with a NUL among their first 8192 bytes
    val_fraction: float = 0.02  # val's share, at most 1/2
    max_bytes: int = 0  # stop after this many bytes of rows, e.g. 6e9; 0: use all


def open_shards(folder, split, seq_len, notes="meta.json"):
    """Maps a split's shards: a list of arrays (rows, seq_len) uint8, all but the last of them full.

    UserError if the folder is not complete, or if seq_len does not divide the length of its rows.
    """
    path = Path(folder, notes)
    if not path.exists():
        raise UserError(f"no {path}; make the data first: python prepare.py --help")
    try:
        state = json.loads(path.read_text())
        size, shard_bytes = state["options"]["seq_len"], state["options"]["shard_bytes"]
        total = state[split]["bytes"]
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(f"{path} is damaged ({error}); remove {folder} and start again")
    if seq_len < 1 or size % seq_len:
        raise UserError(f"seq_len={seq_len} does not divide the {size} bytes of a row in {folder}")
    shards = []
    for start in range(0, total, shard_bytes):
        shard = f"{folder}/{split}_{start // shard_bytes:05d}.bin"
        wanted = min(shard_bytes, total - start)
        if not os.path.exists(shard) or os.path.getsize(shard) < wanted:
            raise UserError(f"{shard} is missing or damaged; remove {folder} and start again")
        shards.append(np.memmap(shard, np.uint8, "r", shape=(wanted // seq_len, seq_len)))
    return shards


# ---- The input. Each kind has a function that finds it, and one that reads its documents.
def has_skipped_name(path, root):
    """Whether a part of the path that was found below root, not written by the user, is SKIPPED."""
    path, root = path.as_posix(), root.as_posix()
    # from the last common character on: .txt is no hidden file where a* finds a.txt
    below = len(os.path.commonprefix([path, root])) - 1
    return SKIPPED.search(path[below:]) is not None


def find_files(options, counts):
    """The files of the input, sorted, and a number that changes if they do. Raises UserError."""
    roots, pattern = options.input, "*"
    if options.dataset == "stdlib":
        roots, pattern = [sysconfig.get_path("stdlib")], "*.py"
    paths = {}
    for root in roots:
        root = Path("/dev/stdin" if root == "-" else os.path.abspath(root))
        found = matches(root)
        if not found:
            raise UserError(f"--input={root} matches no file")
        while found:
            path = found.pop()
            real = os.path.realpath(path)
            ours = any(os.path.exists(Path(path.parent, name)) for name in OURS)
            unreadable = not os.access(path, os.R_OK) or not (path.is_file() or path.is_dir())
            if path != root and (has_skipped_name(path, root) or ours or unreadable):
                counts["paths skipped (see --help)"] += 1
            elif real not in paths:  # a link may lead back
                paths[real] = path
                if path.is_dir():
                    found += sorted(path.iterdir())
    files = sorted(path for path in paths.values() if path.match(pattern) and not path.is_dir())
    return files, zlib.crc32(repr([(path, path.stat().st_mtime) for path in files]).encode())


def read_files(files, options, state):
    """Yields documents, bytes, each with a bookmark: where to go on after it."""
    first, offset = state["bookmark"] or (0, 0)
    for index in range(first, len(files)):
        with open(files[index], "rb") as file:
            if offset:  # else it may be a pipe, which cannot seek
                file.seek(offset)
            while document := file.read(LARGEST):
                if not offset and not options.binary and b"\0" in document[:8192]:
                    state["counts"]["files with NUL bytes skipped (--binary=True uses them)"] += 1
                    break
                offset += len(document)
                yield document, (index, offset)
        offset = 0


@contextmanager
def one_line(options):
    """Turns what `datasets` and the libraries below it raise into an error of one line.

    UserError if the data may be wrong; else OSError, so that the user tries again.
    """
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None):
            raise  # the operating system's, not about the data
        line = (f"cannot read --text_column={options.text_column} --split={options.split} of "
                f"{options.hf_path}: {str(error) or 'no records'}")
        if os.path.exists(options.hf_path) or isinstance(error, (ValueError, FileNotFoundError)):
            raise UserError(line)
        raise OSError(line)  # mostly it is the network


def find_dataset(options, counts):
    """A Hugging Face dataset's builder, and a text that changes if its files do. See one_line."""
    with one_line(options):
        builder = find_records(options.hf_path, options.hf_name or None, options.split)
    return builder, f"{builder.config_id} {builder.hash}"


def read_dataset(builder, options, state):
    """Yields what read_files yields, of a Hugging Face dataset. See one_line for its errors."""
    path, column, counts = options.hf_path, options.text_column, state["counts"]
    files = len(builder.config.data_files[options.split])
    found = sum(file.is_file() for file in Path(path).rglob("*")) or files
    say(f"reading {files} of {found} files of {path}")
    record = {}
    with one_line(options):
        for record, bookmark in read_records(builder, options.split, state["bookmark"]):
            if column not in record and isinstance(bookmark, dict):  # from `datasets`: all lack it
                raise ValueError(f"the columns are {[*record]}")
            kind = type(record.get(column)).__name__
            counts[f"records of type {kind}"] += 1
            if kind == "str":
                yield record[column].encode(errors="fffd"), bookmark
        if "records of type str" not in counts:
            raise ValueError(f"no text, but {dict(counts) or 'no records'}; the last one's columns "
                             f"are {[*record]}")


# ---- The output.
def append(folder, split, state, data):
    """Writes a document's bytes, a memoryview, and the separator at the end of a split."""
    shard_bytes = state["options"]["shard_bytes"]
    state[split]["documents"] += 1
    for part in data, memoryview(state["options"]["separator"].encode()):
        while part:
            index, held = divmod(state[split]["bytes"], shard_bytes)
            with open(f"{folder}/{split}_{index:05d}.bin", "ab") as file:
                file.truncate(held)  # a killed run may have written more
                written = file.write(part[: shard_bytes - held])
            state[split]["bytes"] += written
            part = part[written:]


def begin_or_continue(out_dir, recorded, counts):
    """The state from which to go on. UserError if the folder is damaged or was made otherwise."""
    state = {"options": recorded, "counts": counts, "left_out_bytes": 0, "bookmark": None,
             "seen": [], "train": {"bytes": 0, "documents": 0}, "val": {"bytes": 0, "documents": 0}}
    for name in "progress.json", "meta.json":
        if (out_dir / name).exists():
            for split in "train", "val":
                open_shards(out_dir, split, 1, name)  # UserError if they are damaged
            state |= json.loads((out_dir / name).read_text())
    old = state["options"]
    if old.keys() != recorded.keys():
        raise UserError(
            f"{out_dir} was made by another version of prepare.py; use another --out_dir")
    changes = ["the input files changed" if key == "source" else
               f"{key} was {old[key]} and is now {recorded[key]}"
               for key in recorded if old[key] != recorded[key]]
    if changes:
        raise UserError(
            f"{out_dir} was made otherwise: {', '.join(changes)}; use another --out_dir")
    return state


def prepare(out_dir, options):
    """Makes the set in out_dir, or continues where a run stopped. Raises UserError or OSError."""
    meta, progress = out_dir / "meta.json", out_dir / "progress.json"
    seq_len, counts = options.seq_len, Counter()
    find, read = (find_dataset, read_dataset) if options.hf_path else (find_files, read_files)
    found, source = find(options, counts)
    recorded = asdict(options) | {
        "shard_bytes": max(SHARD_BYTES // seq_len, 1) * seq_len,
        "separator": "\n\n" if options.pack else "", "source": source}
    del recorded["out_dir"]
    state = begin_or_continue(out_dir, recorded, counts)
    if meta.exists():
        progress.unlink(missing_ok=True)  # left by a run that was killed on its last line
        say(f"{out_dir} is already complete")
        return
    counts = state["counts"] = Counter(state["counts"])
    train, val = state["train"], state["val"]
    seen = set(state["seen"])  # hashes of the documents used
    least, most = (1, sys.maxsize) if options.pack else (seq_len, seq_len)
    # a document in both splits takes two separators
    limit = (options.max_bytes or sys.maxsize) - 2 * len(recorded["separator"])
    total = saved = train["bytes"] + val["bytes"]
    with tqdm(total=options.max_bytes or None, initial=total, unit="B", unit_scale=True,
              disable=None) as bar:  # None: no bar if stderr is not a terminal
        for document, bookmark in read(found, options, state):
            if limit - total < least:
                break
            state["bookmark"] = bookmark
            used = memoryview(document)[: min(most, limit - total)]
            digest = hashlib.blake2b(used, digest_size=8).hexdigest()
            if len(used) < least:
                state["left_out_bytes"] += len(document)
            elif digest in seen:
                counts["copies skipped"] += 1
            else:
                seen.add(digest)
                state["left_out_bytes"] += len(document) - len(used)
                share = max(options.val_fraction * (total + len(used)), seq_len)
                lacks = math.ceil((share - val["bytes"]) / seq_len) * seq_len  # whole rows
                cut = len(used) - min(max(lacks, 0), len(used))
                for split, part in ("train", used[:cut]), ("val", used[cut:]):
                    if part:
                        append(out_dir, split, state, part)
                total = train["bytes"] + val["bytes"]
                bar.update(total - bar.n)
            if total - saved >= recorded["shard_bytes"]:
                write_text(progress, json.dumps(state | {"seen": [*seen]}))
                saved = total

    for split in train, val:  # the shards keep the remainder, but nobody reads it
        state["left_out_bytes"] += split["bytes"] % seq_len
        split["bytes"] -= split["bytes"] % seq_len
    said = ", ".join(f"{n} {what}" for what, n in counts.items() if n) or "all used"
    if not train["bytes"] or not val["bytes"]:
        for path in [*out_dir.glob("train_0*.bin"), *out_dir.glob("val_0*.bin"), progress]:
            path.unlink(missing_ok=True)
        raise UserError(f"too little text for a row of --seq_len={seq_len} bytes in train and in "
                        f"val (--pack={options.pack}; {said}); give more text, a smaller --seq_len "
                        "or a larger --max_bytes")
    write_text(meta, json.dumps(state | {"bookmark": None, "seen": []}))
    progress.unlink(missing_ok=True)
    say(f"{out_dir}: {train['bytes']:,} bytes of {train['documents']:,} documents for training, "
        f"{val['bytes']:,} of {val['documents']:,} for validation "
        f"({val['bytes'] / (train['bytes'] + val['bytes']):.1%}; "
        f"--val_fraction={options.val_fraction}), {state['left_out_bytes']:,} left out "
        f"(--seq_len={seq_len}, --pack={options.pack}); {said}")


def main(argv=None):
    """Runs the command line. Raises UserError, also if the disk or the network fails."""
    parser = argument_parser(f"{__doc__}\n{inspect.getsource(Options)}")
    parser.argument_default = argparse.SUPPRESS  # an option not given is absent
    for field in fields(Options):
        if field.name == "input":
            parser.add_argument("--input", nargs="+", action="extend", type=os.path.expanduser)
        else:
            parser.add_argument(f"--{field.name}", type=partial(parse, field))
    given = vars(parser.parse_args(argv))
    dataset = given.get("dataset", Options.dataset)
    if dataset not in PRESETS:
        raise UserError(f"--dataset={dataset} is none of {', '.join(PRESETS)}")
    for option, needed in ("input", "files"), ("hf_path", "hf"):
        if bool(given.get(option)) != (dataset == needed):
            raise UserError(f"--{option} and --dataset={needed} need each other")
    options = Options(**PRESETS[dataset] | given)
    if not 0 < options.val_fraction <= 0.5:
        raise UserError(f"--val_fraction={options.val_fraction} must be above 0 and at most 0.5")
    for name, least in ("seq_len", 1), ("max_bytes", 0):
        if given.get(name, least) < least:
            raise UserError(f"--{name}={given[name]} must be at least {least}")
    out_dir = Path(options.out_dir or f"data/{dataset}")
    if out_dir.resolve() in [Path(path).resolve() for path in options.input or []]:
        raise UserError(f"--out_dir={out_dir} is also an --input; use another folder")
    try:
        with locked(out_dir):
            prepare(out_dir, options)
    except (KeyboardInterrupt, SystemExit):  # a signal
        say("stopped; the same command continues")
        raise
    except OSError as error:
        raise UserError(f"{out_dir}: {error}; fix this and run the same command again to continue")


if __name__ == "__main__":
    try:
        run_program(main)
    except SystemExit as end:
        if hasattr(sys, "ps1"):  # in a notebook, which goes on
            raise
        os._exit(end.code)  # because pyarrow's threads can abort or block a normal exit
