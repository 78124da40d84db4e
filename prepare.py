"""
Cuts a corpus into byte shards for train.py.

    python prepare.py                                            # Python's own standard library
    python prepare.py --dataset=files --input ~/books 'src/**/*.c'
    python prepare.py --dataset=fineweb --max_bytes=6e9
    python prepare.py --dataset=hf --hf_path=some/file.jsonl --text_column=content

data/<name>/train_00000.bin, ..., val_00000.bin, ... hold rows of --seq_len bytes and nothing else.
meta.json comes last: where it is, the set is complete. An interrupted run, started again with the
same options, goes on from its last full shard and ends with the same files.
"""
import argparse
import errno
import glob
import hashlib
import json
import os
import sys
import sysconfig
from pathlib import Path

import numpy as np
from tqdm import tqdm

SPLITS = "train", "val"
COUNTERS = "documents", "short_documents", "left_out_bytes", "taken"  # bytes of the next
HF_DEFAULTS = {
    "fineweb": {"hf_path": "HuggingFaceFW/fineweb", "hf_name": "sample-10BT"},
    "codeparrot": {"hf_path": "codeparrot/codeparrot-clean", "text_column": "content"},
    "hf": {},
}


def printable(text):
    """Text that is safe to send to a terminal: control characters become their pictures."""
    text = text.translate({i: 0x2400 + i for i in range(32) if chr(i) != "\n"})
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def fail(message, code=2):
    """Ends any of the programs the way every mistake does: one line on stderr, exit code 2."""
    print(f"{Path(sys.argv[0]).name}:", *printable(str(message)).split(), file=sys.stderr)
    sys.exit(code)


# --------------------------------------------------------------------------------------------------
# The format: shards of a split's rows, all full but for the last, and a state that tells how many
# bytes each split has: meta.json when all is done, progress.json until then.


def open_shards(folder, split, seq_len):
    """The split's shards, read from disk as they are used; ValueError if they are damaged.

    A list of np.memmap (rows, seq_len) uint8; seq_len divides the length of the rows prepared.
    """
    state = read_state(Path(folder, "meta.json"))
    if state["seq_len"] % seq_len:
        raise ValueError(f"seq_len={seq_len} does not divide the {state['seq_len']} bytes of a row "
                         f"in {folder}")
    return [np.memmap(path, np.uint8, "r").reshape(-1, seq_len)
            for path in shard_paths(folder, split, state)]


def read_rows(shards, numbers):
    """The rows with these numbers, counted through all shards: (len(numbers), seq_len) uint8."""
    starts = np.cumsum([0, *map(len, shards)])
    which = np.searchsorted(starts, numbers, "right") - 1
    return np.stack([shards[i][number - starts[i]] for i, number in zip(which, numbers)])


def read_state(path, counters=()):
    """What meta.json or progress.json holds; ValueError unless prepare.py can have written it."""
    if not path.exists():
        raise ValueError(f"no {path}; make the data first: python prepare.py --help")
    try:
        state = json.loads(path.read_bytes())
        seq_len, shard_bytes = state["seq_len"], state["options"]["shard_bytes"]
        held = [state[split]["bytes"] for split in SPLITS]
        numbers = [seq_len, shard_bytes, *held, *(state[key] for key in counters)]
        if (all(type(number) is int and number >= 0 for number in numbers) and shard_bytes
                and not any(number % seq_len for number in [shard_bytes, *held])
                and all(type(state[split]["sha256"]) is dict for split in SPLITS)
                and (counters or all(held))):  # a complete set has rows in both splits
            return state
    except (OSError, ValueError, LookupError, TypeError, ZeroDivisionError, RecursionError):
        pass
    raise ValueError(f"{path} is not what prepare.py writes; remove {path.parent} and make it anew")


def shard_paths(folder, split, state, cut=False):
    """The paths of the split's shards; ValueError unless each is as long as the state tells."""
    held, shard_bytes = state[split]["bytes"], state["options"]["shard_bytes"]
    paths = []
    for start in range(0, held, shard_bytes):
        path = Path(folder, f"{split}_{start // shard_bytes:05d}.bin")
        told, size = min(shard_bytes, held - start), path.stat().st_size if path.exists() else 0
        if cut and size > told:  # a killed run wrote on after its last note
            os.truncate(path, told)
        elif size != told:
            raise ValueError(f"{path} {f'has {size}' if size else 'is missing, not'} of {told} "
                             f"bytes; remove {folder} and make it anew")
        paths.append(path)
    return paths


def sha256_of(paths):
    """{name: checksum} of files that are not empty."""
    return {path.name: hashlib.sha256(np.memmap(path, mode="r")).hexdigest() for path in paths}


# --------------------------------------------------------------------------------------------------
# Sources. Each document is a buffer of bytes.


def find_files(inputs, out_dir):
    """Sorted real paths of the files that files, folders and globs name, each once."""
    found = set()
    for name in inputs:
        matches = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
        if not matches:
            fail(f"--input={name}: no such file or folder, and no glob that matches one")
        for folder in [match for match in matches if os.path.isdir(match)]:
            for place, _, files in os.walk(folder, onerror=fail):
                matches.extend(os.path.join(place, file) for file in files)
        found.update(map(os.path.realpath, matches))
    own = os.path.realpath(out_dir) + os.sep  # a corpus folder may hold its own shards
    return sorted(path for path in found if os.path.isfile(path) and not path.startswith(own))


def stdlib_files():
    """Sorted paths of the running Python's standard-library source."""
    root, others = Path(sysconfig.get_path("stdlib")), {"site-packages", "dist-packages"}
    return sorted(str(path) for path in root.rglob("*.py")
                  if not path.is_symlink() and not others & {*path.relative_to(root).parts})


def describe(files, sizes):
    """One line that changes when a file comes, goes or changes its size."""
    listing = "".join(f"{size} {path}\n" for size, path in zip(sizes, files))
    number = hashlib.blake2b(os.fsencode(listing), digest_size=8).hexdigest()
    return f"{len(files)} files, {sum(sizes)} bytes, listing {number}"


def open_hf(options):
    """Opens a Hugging Face dataset, on the hub or in a local file or folder, as a stream."""
    path, column = options["hf_path"], options["text_column"]
    builder = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(Path(path).suffix)
    source = {"path": builder, "data_files": path} if builder else {"path": path}
    try:
        import datasets  # not above: it takes seconds
        import huggingface_hub
        datasets.disable_progress_bars()
        huggingface_hub.logging.set_verbosity_error()  # it tells of each retry
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # and it of what is raised
        dataset = datasets.load_dataset(
            **source, name=options.get("hf_name"), split=options["split"], streaming=True)
        first = next(iter(dataset), {})  # reach the data before anything is written
    except Exception as error:  # datasets, its file systems and its parsers have dozens
        fail(f"cannot open --hf_path={path} --split={options['split']}: {error}")
    texts = [name for name, value in first.items() if value is None or isinstance(value, str)]
    if column not in texts:
        fail(f"--text_column={column} is no text in {path}, which has {', '.join(texts) or 'none'}")
    return dataset


def read_hf(dataset, state):
    """Yields the documents from where state["stream"], the dataset's own bookmark, says."""
    options = state["options"]
    try:
        if state["stream"]:
            dataset.load_state_dict(state["stream"])
        for example in dataset:
            yield (example[options["text_column"]] or "").encode()
            state["stream"] = dataset.state_dict()
    except Exception as error:
        fail(f"{options['hf_path']}: {error}; run the same command again to go on")


# --------------------------------------------------------------------------------------------------
# Writing.


def lock(folder):
    """Keeps the folder from other processes until this one ends; False if another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)  # stays open
    try:
        if os.name == "nt":
            import msvcrt
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # these three: it is held; another: this file system has no locks
        return error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK)
    return True


def write_json(path, state):
    """Writes the state, whole or not at all."""
    part = Path(f"{path}.part")
    part.write_text(json.dumps(state, indent=1) + "\n")
    os.replace(part, path)


def write_shards(documents, out_dir, state, alone=False):
    """Cuts the documents into rows and the rows into shards, from where the state stands.

    A document goes to val if its 64-bit hash, as a fraction of 2**64, is below val_fraction. If
    only one has rows, it is `alone`, and the share val_fraction at its end goes to val.
    """
    options = state["options"]
    seq_len, shard_bytes = options["seq_len"], options["shard_bytes"]
    limit = options.get("max_bytes", sys.maxsize) // seq_len * seq_len
    most_rows = sys.maxsize if options["split_documents"] else 1
    total = sum(state[split]["bytes"] for split in SPLITS)
    with tqdm(total=limit if "max_bytes" in options else None, initial=total, unit="B",
              unit_scale=True, disable=None) as bar:  # None: not when stderr is no terminal
        for document in documents:
            number = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big")
            rows = min(len(document) // seq_len, most_rows)
            end = min(rows * seq_len, state["taken"] + limit - total)
            val_start = 0 if number < options["val_fraction"] * 2**64 else end  # train before it
            if alone:
                val_start = end - max(int(end // seq_len * options["val_fraction"]), 1) * seq_len
            while state["taken"] < end:
                start = state["taken"]
                split, stop = ("train", val_start) if start < val_start else ("val", end)
                index, held = divmod(state[split]["bytes"], shard_bytes)
                block = document[start : min(stop, start + shard_bytes - held)]
                with open(out_dir / f"{split}_{index:05d}.bin", "ab" if held else "wb") as file:
                    file.write(block)
                total += len(block)
                state["taken"] += len(block)
                state[split]["bytes"] += len(block)
                bar.update(len(block))
                if held + len(block) == shard_bytes:
                    write_json(out_dir / "progress.json", state)
            state["documents"] += 1
            state["short_documents"] += rows == 0
            state["left_out_bytes"] += len(document) - state["taken"]
            state["taken"] = 0
            if total >= limit:
                break


# --------------------------------------------------------------------------------------------------
# The program.


def byte_count(text):
    """A positive whole number, which may be written 6e9."""
    if not 1 <= float(text) < sys.maxsize or float(text) % 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(float(text))


def parse(argv):
    """Returns (out_dir, the options that decide what is written)."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    add, user = parser.add_argument, os.path.expanduser
    add("--dataset", default="stdlib", choices=["stdlib", "files", *HF_DEFAULTS])
    add("--input", type=user, nargs="+", action="extend", help="files, folders (recursive), globs")
    add("--hf_path", type=user, help="hub name, or local .jsonl, .json, .parquet or folder, for hf")
    add("--hf_name", help="configuration, e.g. sample-100BT for fineweb")
    add("--split", help="split of a Hugging Face dataset (train)")
    add("--text_column", help="column that holds the document (text)")
    add("--name", help="name of the set (the dataset's)")
    add("--out_dir", type=user, help="where the shards go (data/<name>)")
    add("--seq_len", type=byte_count, default=4096, help="bytes in a row (%(default)s)")
    add("--split_documents", action=argparse.BooleanOptionalAction,
        help="cut a long document into rows (stdlib, files) or keep its first row only (others)")
    add("--val_fraction", type=float, default=0.02, help="share of the documents (%(default)s)")
    add("--max_bytes", type=byte_count, help="stop after so many bytes of rows, e.g. 6e9")
    add("--shard_bytes", type=byte_count, default=10**8, help="size of a shard (%(default)s)")
    add("--verify", action="store_true", help="only compare a finished set with its checksums")
    options = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}

    dataset, hf = options["dataset"], ["hf_path", "hf_name", "split", "text_column"]
    own = {"stdlib": [], "files": ["input"]}.get(dataset, hf)
    for option in ["input", *hf]:
        if option in options and option not in own:
            fail(f"--{option} has no meaning for --dataset={dataset}; leave it out or give another")
    if own == hf:
        options = {"split": "train", "text_column": "text", **HF_DEFAULTS[dataset], **options}
    if own and own[0] not in options:
        fail(f"--dataset={dataset} needs --{own[0]}")
    if not 0 < options["val_fraction"] < 1:
        fail(f"--val_fraction={options['val_fraction']} must lie between 0 and 1")
    seq_len = options["seq_len"]
    options["shard_bytes"] = max(options["shard_bytes"] // seq_len, 1) * seq_len
    options.setdefault("split_documents", own != hf)
    name = options.pop("name", Path(options["hf_path"]).name if dataset == "hf" else dataset)
    return Path(options.pop("out_dir", Path("data", name))), options


def check_same(old, new, out_dir):
    """Ends the program if options or source are not those of the set that out_dir holds."""
    others = [f"{key}={old.get(key)} (now {new.get(key)})"
              for key in {**old, **new} if old.get(key) != new.get(key)]
    if others:
        fail(f"{out_dir} holds a set made with {', '.join(others)}; remove it or give prepare.py "
             "another --out_dir")


def finish(out_dir, state):
    """Writes meta.json; ends the program if a split has no rows."""
    progress, seq_len = out_dir / "progress.json", state["seq_len"]
    shards = {split: shard_paths(out_dir, split, state) for split in SPLITS}
    if not all(shards.values()):
        for path in [progress, *shards["train"], *shards["val"]]:  # in the way of the next try
            path.unlink()
        empty = " and ".join(split for split in SPLITS if not shards[split])
        fail(f"no rows for {empty}: {state['documents']} documents, {state['short_documents']} of "
             f"them shorter than --seq_len={seq_len}; give more documents (or --max_bytes), a "
             "smaller --seq_len or another --val_fraction")
    for split in SPLITS:
        held = state[split]["bytes"]
        state[split] |= {"rows": held // seq_len, "sha256": sha256_of(shards[split])}
        print(printable(f"{out_dir}: {split} {held // seq_len:,} rows, {held / 1e6:,.1f} MB"))
    print(f"left out, {state['left_out_bytes']:,} bytes: {state['short_documents']:,} of "
          f"{state['documents']:,} documents, too short for a row, and the ends of the others")
    del state["taken"], state["stream"]
    write_json(out_dir / "meta.json", state)
    progress.unlink(missing_ok=True)


def prepare(out_dir, options):
    """Makes the set in out_dir, or what is missing of it."""
    meta, progress = out_dir / "meta.json", out_dir / "progress.json"
    if meta.exists():
        check_same(read_state(meta)["options"], options, out_dir)
        progress.unlink(missing_ok=True)  # killed between the two
        print(printable(f"{out_dir} is already there, with these options"))
        return
    if not lock(out_dir):
        fail(f"another prepare.py is at work in {out_dir}; wait for it, or give another --out_dir")
    dataset = None
    if options["dataset"] in HF_DEFAULTS:
        dataset, place = open_hf(options), options["hf_path"]
        files = find_files([place], out_dir) if os.path.exists(place) else []
    else:
        files = find_files(options["input"], out_dir) if "input" in options else stdlib_files()
    sizes = [os.path.getsize(path) for path in files]
    source = describe(files, sizes)

    if progress.exists():
        state = read_state(progress, COUNTERS)
        old = {**state["options"], "source": state.get("source")}
        check_same(old, {**options, "source": source}, out_dir)
        for split in SPLITS:
            shard_paths(out_dir, split, state, cut=True)
    elif [*out_dir.glob("train_*.bin"), *out_dir.glob("val_*.bin")]:
        fail(f"{out_dir} holds shards without meta.json; remove them or give prepare.py another "
             "--out_dir")
    else:
        state = {"seq_len": options["seq_len"], "source": source, "options": options,
                 **{split: {"bytes": 0, "sha256": {}} for split in SPLITS},
                 **dict.fromkeys(COUNTERS, 0), "stream": None}
        write_json(progress, state)
    if dataset:
        write_shards(read_hf(dataset, state), out_dir, state)
    else:  # mapped: a file need not fit in memory
        mapped = (np.memmap(path, mode="r") if size else b""
                  for path, size in [*zip(files, sizes)][state["documents"]:])
        long = sum(size >= options["seq_len"] for size in sizes)
        write_shards(mapped, out_dir, state, alone=long == 1)
    finish(out_dir, state)


def verify(out_dir):
    """Compares the sha256 of every shard with meta.json; exit code 1 where one differs."""
    state = read_state(out_dir / "meta.json")
    told = {**state["train"]["sha256"], **state["val"]["sha256"]}
    paths = [path for split in SPLITS for path in shard_paths(out_dir, split, state)]
    wrong = [name for name, sha256 in sha256_of(paths).items() if told.get(name) != sha256]
    if wrong:
        fail(f"{', '.join(wrong)} in {out_dir}: not as they were made; make the set anew", code=1)
    print(printable(f"{out_dir}: all {len(paths)} shards agree with meta.json"))


def main(argv=None):
    """Runs the command line; a mistake ends it with one line and exit code 2, Ctrl-C with 130."""
    try:
        out_dir, options = parse(sys.argv[1:] if argv is None else argv)
        verify(out_dir) if options.pop("verify") else prepare(out_dir, options)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on", code=130)
    except ValueError as error:
        fail(error)
    except OSError as error:
        fail(f"{error}; mend this and run the same command again to go on")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    main()
