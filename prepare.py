"""
Cuts text into rows of bytes that train.py can read.

    python prepare.py                                            # Python's own standard library
    python prepare.py --dataset=files --input ~/books 'src/**/*.c' notes.txt.gz
    unzip -p books.zip | python prepare.py --dataset=files --input /dev/stdin
    python prepare.py --dataset=fineweb --max_bytes=6e9
    python prepare.py --dataset=hf --hf_path=some/file.jsonl --text_column=content

    --dataset          stdlib, files, hf, fineweb or codeparrot (stdlib)
    --input            files, folders, globs and pipes of --dataset=files; each file is a document
    --hf_path          of --dataset=hf: a name on the hub, a folder, or a file of Parquet, CSV,
                       Arrow or JSON (one record per line, or one list); each record is a document
    --hf_name          configuration of a Hugging Face dataset, e.g. sample-100BT
    --split            split of a Hugging Face dataset (train)
    --text_column      column that holds the documents (text)
    --out_dir          folder of the shards (data/<dataset>)
    --seq_len          bytes per row (4096)
    --split_documents  use all rows of a document (default for stdlib and files) or only its first
    --val_fraction     share of the rows that go to val (0.02)
    --max_bytes        stop after this many bytes of rows, e.g. 6e9
    --shard_bytes      size of a shard (1e8)

A document is cut into whole rows of seq_len bytes, and the remainder is left out. The rows are
stored end to end in data/<name>/train_00000.bin, val_00000.bin and so on.

The documents are read in order, and each goes as a whole to val or to train. It goes to val by
chance, that is, if a hash of its rows is below val_fraction, or because val has less than half of
its share so far. But it goes to train if it would give val more than 1.5 times its share. If val
is still short when all is read, the last rows of train go to val: mostly, the end of a document
that was too long for val.

In folders, and where a glob has a wildcard, these are skipped: hidden files and folders, caches
such as __pycache__, installed packages, and what lies in a folder with shards or a checkpoint.
Exact copies of a file are skipped too. (The documents of a Hugging Face dataset are not compared,
but a hash sends copies to the same side.) Symbolic links are followed.

meta.json is written last, so a folder that has it is complete. Until then, progress.json records
the progress. If the program is stopped, the same command continues from there and ends with the
same files.
"""
import argparse
import glob
import gzip
import io
import json
import os
import re
import sys
import sysconfig
import zlib
from collections import Counter
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import fsspec
import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from configurator import UserError, argument_parser, run, say

FILES = {"seq_len": 4096, "shard_bytes": 10**8, "val_fraction": 0.02, "split_documents": True}
HF = FILES | {"split": "train", "text_column": "text", "split_documents": False}
PRESETS = {
    "stdlib": FILES,
    "files": FILES,
    "hf": HF,
    "fineweb": HF | {"hf_path": "HuggingFaceFW/fineweb", "hf_name": "sample-10BT"},
    "codeparrot": HF | {"hf_path": "codeparrot/codeparrot-clean", "text_column": "content"},
}

# ---- Reading shards.
def open_shards(folder, split, seq_len, notes="meta.json"):
    """Opens the shards of a split without reading them into memory.

    Returns a list of np.memmap (rows, seq_len) uint8. All shards but the last are full, that is,
    they have shard_bytes bytes. Raises UserError if the folder is not complete or seq_len does not
    divide the length of its rows.
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
            shard = f"{folder}/{split}_{start // shard_bytes:05d}.bin"
            rows = min(shard_bytes, total - start) // seq_len
            shards.append(np.memmap(shard, np.uint8, "r", shape=(rows, seq_len)))
    except Exception as error:
        raise UserError(f"{path} or a shard is damaged ({error}); remove {folder} and start again")
    if size % seq_len:
        raise UserError(f"seq_len={seq_len} does not divide the {size} bytes of a row in {folder}")
    return shards


# ---- Sources of documents.
def why_skip(path, below):
    """Why a path found in a folder, or by a glob, is left out; None if it is not.

    below is the part of the path that the user did not write.
    """
    if re.search(r"(^|/)\.", below):
        return "hidden"
    if re.search(r"(__pycache__|(site|dist)-packages)(/|$)|\.pyc$", below):
        return "caches and installed packages"
    if any(path.with_name(name).exists()
           for name in ("train_00000.bin", "val_00000.bin", "ckpt.pt")):
        return "with shards or a checkpoint"
    if not os.access(path, os.R_OK) or path.is_fifo():
        return f"unreadable in {path.parent}"


def find_files(options, skipped):
    """Yields the paths of the files of --dataset=stdlib or files, and counts what is skipped.

    Symbolic links are followed, but nothing is found twice.
    """
    seen = set()
    for root in options.get("input", [sysconfig.get_path("stdlib")]):
        root = os.path.normpath(root)
        paths = [root] if os.path.exists(root) else glob.glob(root, recursive=True)
        if not paths:
            raise UserError(f"--input={root} matches no file")
        while paths:
            path = Path(paths.pop())
            real = os.path.realpath(path)
            below = str(path)[len(os.path.commonprefix([str(path), root])) :]
            if below and (reason := why_skip(path, below)):
                skipped[reason] += 1
            elif real not in seen:
                seen.add(real)
                if path.is_dir():
                    paths += sorted(path.iterdir())
                elif "input" in options or path.suffix == ".py":
                    yield path


def read_files(options, state):
    """Yields a hash of the paths and modification times, and then documents as read_hf does.

    A bookmark is the number of a document. A file of more than a gigabyte is several documents.
    """
    state["skipped"] = skipped = Counter()
    paths = sorted(find_files(options, skipped))
    yield zlib.crc32(repr([(path, path.stat().st_mtime) for path in paths]).encode())
    seen = set()
    for path in paths:
        try:
            with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
                while document := file.read(2**30):
                    if hash(document) in seen:
                        skipped["copies"] += 1
                    elif len(seen) >= state["bookmark"]:
                        yield document, len(seen)
                    seen.add(hash(document))
        except Exception as error:  # gzip raises several types
            raise UserError(f"cannot read {path}: {error}")


def read_json(path):
    """Yields the records of a file that has one per line or is one list; None for a bad line.

    (One bad line is enough for datasets to refuse a file.)
    """
    with fsspec.open(path, compression="infer") as file:
        lines = io.BufferedReader(file)
        if b"[" in lines.peek(1)[:4]:  # maybe after a byte order mark
            yield from json.load(lines)
        for line in lines:
            try:
                yield json.loads(line.decode("utf-8-sig"))
            except ValueError:
                yield None


def read_hf(options, state):
    """Yields a dataset's version, and then (document, bookmark) from the state's bookmark on.

    The version is the hub's commit, or a hash of the paths and modification times of local files.
    A bookmark is the number of a file and of a record in it. Counts the records that have no valid
    text.
    """
    import datasets  # here because it takes seconds
    from pyarrow.dataset import ParquetFragmentScanOptions

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(50)  # critical; errors are reported below
    path = place = options["hf_path"]
    local = os.path.exists(path)
    column = options["text_column"]
    state["skipped"] = skipped = Counter(state["skipped"])
    kind = re.search(r"\.(json|csv|parquet|arrow)[^/]*$", path)
    try:
        builder = datasets.load_dataset_builder(
            kind[1] if kind else path, options.get("hf_name"),
            data_files=kind and glob.escape(path))
        yield f"{builder.config_id} {builder.hash}"
        config = builder.config
        kind = type(config).__name__
        if kind != "ArrowConfig":  # which has no such settings
            config.columns = config.usecols = [column]
            config.features = datasets.Features({column: datasets.Value("string")})
            config.batch_size = 1000  # the default fails if the first row group is empty
            # otherwise pyarrow keeps in memory all that it has read of a Parquet file
            config.fragment_scan_options = ParquetFragmentScanOptions(pre_buffer=False)
        first_file, first = state["bookmark"] or (0, 0)
        files = config.data_files[options["split"]]
        # in a folder of several formats, datasets reads only the most frequent one; so say which
        say(f"reading {len(files)} files of {path} with datasets' {kind}")
        for number, place in enumerate(files[first_file:], first_file):
            if place.endswith(".zst"):
                import zstandard  # noqa: F401; without it, fsspec reads the packed bytes
            if kind == "JsonConfig":
                records = read_json(place)
            else:  # one file at a time, so that an error can name it
                config.data_files = {"train": [place]}
                builder.info.features = config.features
                records = builder.as_streaming_dataset("train")
                if local:
                    # one row group at a time; pyarrow would read a fast disk up to 1 GB ahead of us
                    records = records.reshard()
            for index, record in enumerate(islice(records, first, None), first):
                try:
                    if number == index == 0 and column not in record:
                        raise LookupError(f"the columns are {[*record]}")
                    yield record[column].encode(), (number, index)
                except (ValueError, TypeError, KeyError, AttributeError):
                    skipped["records without text"] += 1
            first = 0
    except Exception as error:  # datasets and the libraries below it raise dozens of types
        in_data = isinstance(error, (ValueError, LookupError, RuntimeError, FileNotFoundError))
        kind = UserError if local or in_data else OSError  # OSError: mostly the network
        raise kind(
            f"cannot read --text_column={column} --split={options['split']} of {place}: {error}")


# ---- Writing shards.
@contextmanager
def locked(folder):
    """Makes a folder and locks it meanwhile. UserError if another process holds it."""
    try:
        with FileLock(f"{folder}/.lock", timeout=0):
            yield
    except Timeout:
        raise UserError(f"another process is writing to {folder}; wait, or use another --out_dir")


def write_json(path, state):
    """Writes the state to a file, completely or not at all."""
    part = Path(f"{path}.part")
    part.write_text(json.dumps(state))
    part.replace(path)


def append(folder, split, state, rows):
    """Writes rows, a buffer of bytes, at the end of a split."""
    shard_bytes = state["options"]["shard_bytes"]
    while rows:
        index, held = divmod(state[split]["bytes"], shard_bytes)
        with open(f"{folder}/{split}_{index:05d}.bin", "ab") as file:
            file.truncate(held)  # a killed run may have written more
            written = file.write(rows[: shard_bytes - held])
        state[split]["bytes"] += written
        rows = rows[written:]


def write_documents(documents, folder, state):
    """Writes the rows of the documents, up to max_bytes, and the state about once per shard.

    While val is short, the last rows of train are held back: as many as val lacks.
    """
    options = state["options"]
    seq_len = options["seq_len"]
    fraction = options["val_fraction"]
    limit = options.get("max_bytes", sys.maxsize)
    most = limit if options["split_documents"] else seq_len
    val = state["val"]
    saved = total = state["train"]["bytes"] + val["bytes"]
    share = 0
    held = b""
    with tqdm(total=options.get("max_bytes"), initial=total, unit="B", unit_scale=True,
              disable=None) as bar:  # None: no bar if stderr is not a terminal
        for document, bookmark in documents:
            if total - saved >= options["shard_bytes"] and not held:
                saved = total
                state["bookmark"] = bookmark
                write_json(folder / "progress.json", state)
            size = min(len(document), most, limit - total) // seq_len * seq_len
            rows = document[:size]
            total += size
            bar.update(size)
            state["left_out_bytes"] += len(document) - size
            share = max(fraction * total, seq_len)  # of val
            short = val["bytes"] < share / 2
            fits = val["bytes"] + size <= 1.5 * share
            if fits and (short or zlib.crc32(rows) < fraction * 2**32):
                append(folder, "val", state, rows)
            else:
                held += rows
                lack = short * (int(share) // seq_len * seq_len - val["bytes"])
                end = max(len(held) - lack, 0)
                append(folder, "train", state, held[:end])
                held = held[end:]
            if limit - total < seq_len:
                break
    append(folder, "val" if val["bytes"] < share / 2 else "train", state, held)


# ---- The program.
def positive_integer(text):
    """Parses a positive whole number, which may be written as 6e9."""
    number = float(text)
    if number < 1 or number % 1:
        raise ValueError
    return int(number)


def parse(argv):
    """Returns out_dir and a dict of the options that decide what is written."""
    parser = argument_parser(__doc__)
    parser.argument_default = argparse.SUPPRESS  # an option not given is absent
    add = parser.add_argument
    add("--dataset", default="stdlib", choices=PRESETS)
    add("--input", nargs="+", action="extend", type=os.path.expanduser)
    for name in "hf_path", "hf_name", "split", "text_column", "out_dir":
        add(f"--{name}", type=os.path.expanduser)
    for name in "seq_len", "max_bytes", "shard_bytes":
        add(f"--{name}", type=positive_integer)
    add("--val_fraction", type=float)
    add("--split_documents", action=argparse.BooleanOptionalAction)
    given = vars(parser.parse_args(argv))
    dataset = given["dataset"]
    for option, needed in ("input", "files"), ("hf_path", "hf"):
        if (option in given) != (dataset == needed):
            raise UserError(f"--{option} and --dataset={needed} need each other")

    options = PRESETS[dataset] | given
    if not 0 < options["val_fraction"] <= 0.5:
        raise UserError(f"--val_fraction={options['val_fraction']} must be above 0 and at most 0.5")
    seq_len = options["seq_len"]
    options["shard_bytes"] = max(options["shard_bytes"] // seq_len, 1) * seq_len
    return Path(options.pop("out_dir", "") or f"data/{dataset}"), options


def prepare(out_dir, options):
    """Makes the set in out_dir, or continues where an earlier run stopped."""
    meta = out_dir / "meta.json"
    progress = out_dir / "progress.json"
    state = {"options": options, "train": {"bytes": 0}, "val": {"bytes": 0}, "left_out_bytes": 0,
             "skipped": {}, "bookmark": 0}
    for path in progress, meta:
        if path.exists():
            for split in "train", "val":
                open_shards(out_dir, split, 1, path.name)  # UserError if they are damaged
            state |= json.loads(path.read_text())
    if state["options"] != options:
        raise UserError(f"{out_dir} was made with {state['options']}; use another --out_dir")

    complete = meta.exists()
    read = read_hf if "hf_path" in options else read_files
    documents = read(options, state)
    # a finished set needs no hub
    if not complete or os.path.exists(options.get("hf_path", ".")):
        source = next(documents)
        if state.setdefault("source", source) != source:
            raise UserError(f"the input has changed since {out_dir} was begun; use another "
                            "--out_dir")
    if complete:
        progress.unlink(missing_ok=True)  # left by a run that was killed on its last line
        say(f"{out_dir} is already complete")
        return

    write_documents(documents, out_dir, state)
    if state["skipped"]:
        say(f"skipped: {dict(state['skipped'])}")
    train = state["train"]["bytes"]
    val = state["val"]["bytes"]
    if not train:  # a first row goes to val
        raise UserError(f"fewer than two rows of --seq_len={options['seq_len']} bytes; give more "
                        "text, a smaller --seq_len or a larger --max_bytes")
    write_json(meta, state)
    progress.unlink(missing_ok=True)
    say(f"{out_dir}: {train:,} bytes for training, {val:,} for validation "
        f"({val / (train + val):.1%}; --val_fraction={options['val_fraction']}), "
        f"{state['left_out_bytes']:,} left out")


def main(argv=None):
    """Runs the command line. A mistake, or a failing disk, is a UserError."""
    out_dir, options = parse(argv)
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
        run(main)
    except SystemExit as end:
        say(end="")  # what --help printed
        if not hasattr(sys, "ps1"):  # a notebook has it, and goes on
            os._exit(end.code)  # because pyarrow's threads can abort or block a normal exit
        raise
