"""
Cuts text into rows of bytes that train.py can read.

    python prepare.py                                            # Python's own standard library
    python prepare.py --dataset=files --input ~/books 'src/**/*.c'
    python prepare.py --dataset=fineweb --max_bytes=6e9
    python prepare.py --dataset=hf --hf_path=some/file.jsonl --text_column=content

A document is cut into whole rows of --seq_len bytes, and the remainder is left out. (Of a document
of fineweb, codeparrot or hf only the first row is kept, unless --split_documents is given.) All
rows of a document go to train, or all to val. They are stored end to end in
data/<name>/train_00000.bin, val_00000.bin and so on.

meta.json is written last, so a folder that has it is complete. Until then, progress.json records
the progress. If the program is stopped, the same command continues from there and ends with the
same files.
"""
import argparse
import glob
import hashlib
import json
import os
import sys
import sysconfig
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

from configurator import UserError, argument_parser
from contextlib import nullcontext as one_line_errors


def fail(message, code=2):
    raise UserError(message)


def whole_number(text):
    number = float(text)
    if number < 1 or number % 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive whole number")
    return int(number)


SPLITS = "train", "val"
HF_PRESETS = {
    "hf": {},
    "fineweb": {"hf_path": "HuggingFaceFW/fineweb", "hf_name": "sample-10BT"},
    "codeparrot": {"hf_path": "codeparrot/codeparrot-clean", "text_column": "content"},
}
locks = []  # a lock is released when nothing refers to it

# ---- Reading shards.
def open_shards(folder, split, seq_len):
    """Opens the shards of a split without reading them into memory.

    Returns a list of np.memmap (rows, seq_len) uint8. Raises ValueError if the folder is not
    complete or seq_len does not divide the length of its rows.
    """
    meta = Path(folder, "meta.json")
    if not meta.exists():
        raise UserError(f"no {meta}; make the data first: python prepare.py --help")
    state = json.loads(meta.read_text())
    if state["options"]["seq_len"] % seq_len:
        raise UserError(f"seq_len={seq_len} does not divide the {state['options']['seq_len']} "
                         f"bytes of a row in {folder}")
    return map_shards(folder, split, state, seq_len)


def map_shards(folder, split, state, seq_len):
    """Maps as many bytes of a split as the state counts; ValueError if the shards hold fewer.

    All shards but the last are full, that is, they have shard_bytes bytes.
    """
    shard_bytes = state["options"]["shard_bytes"]
    total = state[split]["bytes"]
    shards = []
    for start in range(0, total, shard_bytes):
        path = Path(folder, f"{split}_{start // shard_bytes:05d}.bin")
        size = min(shard_bytes, total - start)
        if not path.exists() or path.stat().st_size < size:
            raise UserError(f"{path} is missing or shorter than {size} bytes; remove {folder} and "
                             "make the data again")
        shards.append(np.memmap(path, np.uint8, "r", shape=(size // seq_len, seq_len)))
    return shards


def read_rows(shards, numbers):
    """Returns the rows with these numbers, counted across shards: (len(numbers), seq_len) uint8."""
    full = len(shards[0])
    return np.stack([shards[number // full][number % full] for number in numbers])


# ---- Sources of documents.
def find_files(options, out_dir):
    """Returns the sorted paths of the files of --dataset=stdlib or files, without empty ones."""
    if options["dataset"] == "stdlib":
        found = {str(path) for path in Path(sysconfig.get_path("stdlib")).rglob("*.py")
                 if not path.is_symlink() and "-packages" not in str(path)}  # no site-packages
    else:
        found = set()
        for name in options["input"]:
            matches = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
            if not matches:
                fail(f"--input={name} matches no file or folder")
            for match in matches:
                found.update(map(os.path.realpath, [match, *Path(match).rglob("*")]))
    own = os.path.realpath(out_dir) + os.sep  # our shards may lie inside an input folder
    return sorted(path for path in found
                  if os.path.isfile(path) and os.path.getsize(path) and not path.startswith(own))


def open_hf(options):
    """Opens a Hugging Face dataset, on the hub or on disk, as a stream.

    Returns it and a description of its version: the hub's commit, or a hash of the paths and
    modification times of local files.
    """
    import datasets  # here because it takes seconds
    from pyarrow.dataset import ParquetFragmentScanOptions

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are reported below
    datasets.logging.get_logger("datasets.utils.file_utils").setLevel("WARNING")  # logs retries
    path = options["hf_path"]
    kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(Path(path).suffix)
    try:
        builder = datasets.load_dataset_builder(
            kind or path, options.get("hf_name"), data_files=path if kind else None)
        # otherwise pyarrow keeps in memory all that it has read of a Parquet file
        builder.config.fragment_scan_options = ParquetFragmentScanOptions(pre_buffer=False)
        dataset = builder.as_streaming_dataset(options["split"])
        if os.path.exists(path):
            # read one row group at a time; pyarrow would read a fast disk up to 1 GB ahead of us
            dataset = dataset.reshard()
    except Exception as error:  # datasets and the libraries below it raise dozens of types
        fail(f"cannot open --hf_path={path} --split={options['split']}: {error}")
    return dataset, f"{builder.config_id} {builder.hash}"


def read_hf(dataset, state):
    """Yields (document, bookmark) from the state's bookmark on; reading can resume at each."""
    column = state["options"]["text_column"]
    bookmark = state["bookmark"]
    try:
        if bookmark:
            dataset.load_state_dict(bookmark)
        for example in dataset:
            if column not in example:
                fail(f"--text_column={column} does not exist; the columns are {[*example]}")
            yield (example[column] or "").encode(), bookmark
            bookmark = dataset.state_dict()
    except Exception as error:
        fail(f"cannot read column {column}: {error}; run the same command again to continue")


# ---- Writing shards.
def lock(folder):
    """Locks a folder until this process ends. Exits with a message if another one holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    file_lock = FileLock(folder / ".lock", is_singleton=True)
    try:
        file_lock.acquire(timeout=0)
    except Timeout:
        fail(f"another process is writing to {folder}; wait for it, or use another --out_dir")
    locks.append(file_lock)


def write_json(path, state):
    """Writes the state to a file, completely or not at all."""
    part = Path(f"{path}.part")
    part.write_text(json.dumps(state, indent=1))
    part.replace(path)


def append(folder, split, state, rows):
    """Writes rows, a buffer of bytes, at the end of a split."""
    shard_bytes = state["options"]["shard_bytes"]
    while len(rows):
        index, held = divmod(state[split]["bytes"], shard_bytes)
        block = rows[: shard_bytes - held]
        with open(folder / f"{split}_{index:05d}.bin", "ab" if held else "wb") as file:
            file.write(block)
        state[split]["bytes"] += len(block)
        rows = rows[len(block) :]


def write_documents(documents, folder, state):
    """Writes the rows of the documents, up to max_bytes, and the state about once per shard.

    A document goes to val if its 64-bit hash, divided by 2**64, is below val_fraction. But if a
    split is empty at the end, the last document with rows goes there. If that is the only one, its
    last rows go to val: the fraction val_fraction, but at least one.
    """
    options = state["options"]
    seq_len = options["seq_len"]
    limit = options.get("max_bytes", sys.maxsize)
    most = limit if options["split_documents"] else seq_len
    total = saved = state["train"]["bytes"] + state["val"]["bytes"]
    split = "train"
    rows = b""  # of the latest document; written when another one follows
    with tqdm(total=options.get("max_bytes"), initial=total, unit="B", unit_scale=True,
              disable=None) as bar:  # None: no bar if stderr is not a terminal
        for document, bookmark in documents:
            size = min(len(document), most, limit - total) // seq_len * seq_len
            if size:
                append(folder, split, state, rows)
                if total - saved >= options["shard_bytes"]:
                    saved = total
                    state["bookmark"] = bookmark
                    write_json(folder / "progress.json", state)
                number = int(hashlib.blake2b(document, digest_size=8).hexdigest(), 16)
                split = "val" if number < options["val_fraction"] * 2**64 else "train"
                rows = document[:size]
            total += size
            bar.update(size)
            state["left_out_bytes"] += len(document) - size
            if limit - total < seq_len:
                break

    empty = [name for name in SPLITS if not state[name]["bytes"]]
    if len(empty) == 2:
        val_rows = max(int(len(rows) // seq_len * options["val_fraction"]), 1)
        start = len(rows) - val_rows * seq_len
        append(folder, "train", state, rows[:start])
        append(folder, "val", state, rows[start:])
    else:
        if empty:
            split = empty[0]
        append(folder, split, state, rows)


# ---- The program.
def parse(argv):
    """Returns out_dir and a dict of the options that decide what is written."""
    parser = argument_parser(__doc__)
    parser.argument_default = argparse.SUPPRESS  # an option not given is absent
    add = parser.add_argument
    add("--dataset", default="stdlib", choices=["stdlib", "files", *HF_PRESETS])
    add("--input", nargs="+", action="extend", help="files, folders and globs")
    add("--hf_path", help="name on the hub, or local .jsonl, .json, .parquet or folder")
    add("--hf_name", help="configuration of a Hugging Face dataset, e.g. sample-100BT")
    add("--split", help="split of a Hugging Face dataset (train)")
    add("--text_column", help="column that holds the documents (text)")
    add("--out_dir", help="folder of the shards (data/<dataset>)")
    add("--seq_len", type=whole_number, default=4096, help="bytes per row (%(default)s)")
    add("--split_documents", action=argparse.BooleanOptionalAction,
        help="use all rows of a document (default for stdlib and files) or only its first")
    add("--val_fraction", type=float, default=0.02,
        help="share of the documents that go to val (%(default)s)")
    add("--max_bytes", type=whole_number, help="stop after this many bytes of rows, e.g. 6e9")
    add("--shard_bytes", type=whole_number, default=10**8, help="size of a shard (%(default)s)")
    options = vars(parser.parse_args(argv))

    dataset = options["dataset"]
    seq_len = options["seq_len"]
    for option, needed in ("input", "files"), ("hf_path", "hf"):
        if (option in options) != (dataset == needed):
            fail(f"--{option} and --dataset={needed} need each other")
    if not 0 < options["val_fraction"] < 1:
        fail(f"--val_fraction={options['val_fraction']} must lie between 0 and 1")
    if dataset in HF_PRESETS:
        options = {"split": "train", "text_column": "text", **HF_PRESETS[dataset], **options}
    options.setdefault("split_documents", dataset not in HF_PRESETS)
    options["shard_bytes"] = max(options["shard_bytes"] // seq_len, 1) * seq_len
    return Path(options.pop("out_dir", f"data/{dataset}")), options


def prepare(out_dir, options):
    """Makes the set in out_dir, or continues where an earlier run stopped."""
    lock(out_dir)
    meta = out_dir / "meta.json"
    progress = out_dir / "progress.json"
    state = {"options": options, "train": {"bytes": 0}, "val": {"bytes": 0}, "left_out_bytes": 0,
             "bookmark": 0}
    for path in progress, meta:
        if path.exists():
            state = json.loads(path.read_text())
    if state["options"] != options:
        fail(f"{out_dir} was made with {state['options']}; remove it or use another --out_dir")
    if meta.exists():
        progress.unlink(missing_ok=True)  # left by a run that was killed on its last line
        print(f"{out_dir} is already complete")
        return

    if options["dataset"] in HF_PRESETS:
        dataset, source = open_hf(options)
        documents = read_hf(dataset, state)
    else:
        files = find_files(options, out_dir)
        source = f"{len(files)} files, {sum(map(os.path.getsize, files))} bytes"
        # mapped, because a file may be larger than memory
        documents = ((np.memmap(files[i], mode="r"), i)
                     for i in range(state["bookmark"], len(files)))
    if state.setdefault("source", source) != source:
        fail(f"{out_dir} was begun with {state['source']}, but now the input is {source}; "
             "remove the folder to start again")
    with one_line_errors():
        for split in SPLITS:
            for shard in map_shards(out_dir, split, state, 1)[-1:]:
                os.truncate(shard.filename, len(shard))  # drop bytes after progress.json
    write_documents(documents, out_dir, state)
    if not state["train"]["bytes"]:
        fail(f"fewer than two rows of --seq_len={options['seq_len']} bytes; give more text, a "
             "smaller --seq_len or a larger --max_bytes")
    del state["bookmark"]
    write_json(meta, state)
    progress.unlink(missing_ok=True)
    print(f"{out_dir}: {state['train']['bytes']:,} bytes for training, "
          f"{state['val']['bytes']:,} for validation, {state['left_out_bytes']:,} left out")


def main(argv=None):
    """Runs the command line. Exits with code 2 after a mistake and with 130 after Ctrl-C."""
    try:
        prepare(*parse(argv))
    except KeyboardInterrupt:
        fail("interrupted; run the same command again to continue", code=130)
    except OSError as error:
        fail(f"{error}; fix this and run the same command again to continue")


if __name__ == "__main__":
    try:
        main()
        code = 0
    except SystemExit as error:
        code = error.code
    # pyarrow's threads can abort or block a normal exit
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
