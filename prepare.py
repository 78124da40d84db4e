"""Cuts a corpus into byte shards for train.py.

    python prepare.py                                            # Python's own standard library
    python prepare.py --dataset=files --input ~/books 'src/**/*.c'
    python prepare.py --dataset=fineweb --max_bytes=6e9
    python prepare.py --dataset=hf --hf_path=some/file.jsonl --text_column=content

writes data/<name>/train_00000.bin, ..., val_00000.bin, ...: rows of --seq_len bytes and nothing
else, so np.memmap(path, np.uint8).reshape(-1, seq_len) reads a shard. meta.json comes last: where
it is, the set is complete. An interrupted run, started again with the same options, goes on from
its last complete shard and ends with the same files. --verify checks a finished set against meta.json.

--bpe adds train_00000.bpe, ...: a bit for every byte of the shard (np.unpackbits reads them), 1 where train.py
--boundaries=bpe ends a token.
"""
import argparse
import errno
import functools
import glob
import hashlib
import io
import json
import math
import os
import re
import shlex
import sys
import sysconfig
import time
from pathlib import Path

from tqdm import tqdm

BLOCK = 1 << 20  # bytes read at once: a document need not fit in memory, but for --bpe
BYTES_IN = {"bin": 1, "bpe": 8}  # bytes of text in a byte of a shard
HF_DEFAULTS = {
    "fineweb": {"hf_path": "HuggingFaceFW/fineweb", "hf_name": "sample-10BT"},
    "codeparrot": {"hf_path": "codeparrot/codeparrot-clean", "text_column": "content"},
    "hf": {},
}


def printable(text):
    """Text that is safe to send to a terminal: control characters become their pictures."""
    return "".join(c if c.isprintable() or c == "\n" else chr(0x2400 + ord(c)) if ord(c) < 32 else "\ufffd" for c in text)


def die(message, code=2):
    """Ends the program the way every mistake does: one line on stderr, exit code 2."""
    print("prepare.py:", printable(" ".join(str(message).split())), file=sys.stderr)
    sys.exit(code)


# ---- sources: each document is a binary file object -----------------------------------------

def walk(folder):
    """os.walk, which follows no links to folders, and ends the program where a folder cannot be read."""
    return os.walk(folder, onerror=lambda error: die(f"{error}; make it readable, or leave it out of --input"))


def expand(pattern):
    """What a glob matches. Like glob.glob, ** goes to no hidden folders, but also through no links to folders, which may loop."""
    head, deep, tail = pattern.partition("**")
    if not deep:
        return glob.glob(pattern)
    folders = [folder for top in glob.glob(head or "./") for folder, _, _ in walk(top) if os.sep + "." not in folder[len(top) - 1 :]]
    return [match for folder in folders for match in expand(glob.escape(folder) + tail)]


def find_files(inputs, out_dir):
    """Sorted real paths of all files that the files, folders and globs name, each once.

    What lies in out_dir is left out, so that a corpus folder may hold its own shards.
    """
    own, found = os.path.realpath(out_dir) + os.sep, set()
    for name in inputs:
        matches = [name] if os.path.exists(name) else expand(name)
        if not matches:
            die(f"--input={name}: no such file or folder, and no glob that matches one")
        for match in matches:
            inside = (os.path.join(d, f) for d, _, names in walk(match) for f in names)
            found.update(map(os.path.realpath, inside if os.path.isdir(match) else [match]))
    return sorted(path for path in found if os.path.isfile(path) and not path.startswith(own))


def stdlib_files():
    """Sorted paths of the running Python's standard-library source."""
    root, others = Path(sysconfig.get_path("stdlib")), {"site-packages", "dist-packages"}
    return sorted(str(p) for p in root.rglob("*.py") if not p.is_symlink() and not others & {*p.relative_to(root).parts})


def describe(files):
    """One line that changes when a file comes, goes or changes its size."""
    sizes = [os.path.getsize(path) for path in files]
    listing = "".join(f"{size} {path}\n" for size, path in zip(sizes, files))
    digest = hashlib.blake2b(os.fsencode(listing), digest_size=8).hexdigest()
    return f"{len(files)} files, {sum(sizes)} bytes, listing {digest}"


def read_files(files, state):
    """Yields the documents from number state["consumed"] on, without reading those before."""
    for path in files[state["consumed"]:]:
        with open(path, "rb") as file:
            yield file


def load_hf(options):
    """Opens a Hugging Face dataset, on the hub or in a local file or folder, as a stream."""
    path, column = options["hf_path"], options["text_column"]
    builder = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(Path(path).suffix)
    where = {"path": builder, "data_files": path} if builder else {"path": path}
    try:
        import datasets
        import huggingface_hub
        datasets.disable_progress_bars()
        huggingface_hub.logging.set_verbosity_error()  # it tells of each retry
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # and it of what is raised
        dataset = datasets.load_dataset(**where, name=options.get("hf_name"), split=options["split"], streaming=True)
        first = next(iter(dataset), None)  # reach the data before anything is written
    except Exception as error:  # datasets, its file systems and its parsers have dozens
        die(f"cannot open --hf_path={path} --split={options['split']}: {error}")
    if first is None:
        die(f"--hf_path={path} has no documents in --split={options['split']}")
    if column not in first:
        die(f"--text_column={column} is not in {path}; it has {', '.join(first)}")
    if not isinstance(first[column], (str, type(None))):
        die(f"--text_column={column} of {path} holds {type(first[column]).__name__}, not text")
    return dataset


def read_hf(dataset, options, state):
    """Yields the documents from where state["stream"], the dataset's own bookmark, says."""
    if state["stream"]:
        dataset.load_state_dict(state["stream"])
    try:
        for example in dataset:
            yield io.BytesIO((example[options["text_column"]] or "").encode())
            state["stream"] = dataset.state_dict()
    except Exception as error:
        die(f"{options['hf_path']}: {error}; run the same command again to go on")


# ---- writing ---------------------------------------------------------------------------------

def lock(folder):
    """Keeps the folder from other processes for as long as what it returns is open, at most until this process ends, however that
    happens. Returns None if another has it. A file system without locks keeps nobody out."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / ".lock", "a")
    try:
        if os.name == "nt":
            import msvcrt
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):  # what Linux, macOS and Windows say of a lock that is held
            return None
    return file


def sealed(state):
    """The state with its own sha256: with a damaged one, the same command would make another set, unnoticed."""
    state = {key: value for key, value in state.items() if key != "sha256"}
    return {**state, "sha256": hashlib.sha256(json.dumps(state).encode()).hexdigest()}


def write_json(path, state):
    """Writes the state, sealed, whole or not at all."""
    aside = Path(f"{path}.part")
    aside.write_text(json.dumps(sealed(state), indent=1) + "\n")
    os.replace(aside, path)


def read_state(path):
    """Returns what meta.json or progress.json holds, and the sha256 of each shard that it names; refuses what is damaged."""
    try:
        state = json.loads(path.read_bytes())
        shards = {**state["train"]["sha256"], **state["val"]["sha256"]}
        if state == sealed(state):
            return state, shards
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    die(f"{path} is damaged or of another version of prepare.py; remove {path.parent} and start again, or give another --out_dir")


def digest(file, hasher):
    """Hashes a file object to its end; returns the hasher."""
    while block := file.read(BLOCK):
        hasher.update(block)
    return hasher


def sha256_of(path):
    with open(path, "rb") as file:
        return digest(file, hashlib.sha256()).hexdigest()


@functools.lru_cache
def o200k_base():
    """The tokenizer, from the network or the folder TIKTOKEN_CACHE_DIR; OSError without either."""
    import tiktoken
    try:
        return tiktoken.get_encoding("o200k_base")
    except Exception as error:  # of requests, or of a broken cache
        raise OSError(f"tiktoken cannot fetch o200k_base ({type(error).__name__}); let it reach the network once, or set "
                      f"TIKTOKEN_CACHE_DIR={os.environ.get('TIKTOKEN_CACHE_DIR', '')} to a folder that holds it") from None


def bpe_marks(document):
    """(len(document),) uint8: 1 on the last byte of each of o200k_base's tokens, shifted right by one: on the first byte of
    each token but the first. A byte that is not UTF-8 is a token of its own."""
    import numpy as np  # not above: it takes memory that cutting bytes does not need
    lengths = []
    for i, text in enumerate(re.split("([\udc80-\udcff])", document.decode("utf-8", "surrogateescape"))):
        lengths += [1] if i % 2 else map(len, o200k_base().decode_tokens_bytes(o200k_base().encode_ordinary(text)))
    marks = np.zeros(len(document) + 1, np.uint8)
    marks[np.cumsum(lengths, dtype=int)] = 1
    return marks[:-1]


def shards_in(out_dir):
    """The shards in a folder, finished or not, and nothing else that lies there."""
    return [path for path in out_dir.iterdir() if re.fullmatch(r"(train|val)_\d{5,}\.(bin|bpe)(\.part)?", path.name)]


def open_part(out_dir, split, kind, state):
    """Opens the shard the split is to go on with, cut back to what progress.json vouches for."""
    index, offset = divmod(state[split]["bytes"], state["options"]["shard_bytes"])
    offset //= BYTES_IN[kind]
    shard = out_dir / f"{split}_{index:05d}.{kind}"
    part = Path(f"{shard}.part")
    if shard.exists():  # killed after the shard's rename and before progress.json knew of it
        os.replace(shard, part)
    file = open(part, "ab")
    if file.tell() < offset:
        die(f"{part} is shorter than when it was written; remove {out_dir} and start again")
    file.truncate(offset)
    return file


def close_part(file, split, state):
    """Gives a finished shard its name; an empty one goes."""
    file.close()
    part = Path(file.name)
    if not part.stat().st_size:
        return part.unlink()
    state[split]["sha256"][part.stem] = sha256_of(part)
    os.replace(part, part.with_suffix(""))


def write_shards(documents, out_dir, state):
    """Cuts the documents into rows and the rows into shards, from where state stands.

    A document goes to val when its 64-bit hash, as a fraction of 2**64, is below val_fraction. Returns its speed in MB/s. Ends the
    program if a split has no rows.
    """
    options, dropped = state["options"], state["dropped"]
    seq_len, shard_bytes = options["seq_len"], options["shard_bytes"]
    limit = options["max_bytes"] // seq_len * seq_len if "max_bytes" in options else math.inf
    total = before = state["train"]["bytes"] + state["val"]["bytes"]
    started = time.perf_counter()
    kinds = ("bin",)
    if options.get("bpe"):
        import numpy as np
        kinds = ("bin", "bpe")
    parts = {split: {kind: open_part(out_dir, split, kind, state) for kind in kinds} for split in ("train", "val")}
    with tqdm(total=limit if limit < math.inf else None, initial=total, unit="B",
              unit_scale=True, disable=None) as bar:  # None: not when stderr is no terminal
        for document in documents:
            hasher = digest(document, hashlib.blake2b(digest_size=8))
            size = document.tell()
            is_val = int.from_bytes(hasher.digest(), "big") < options["val_fraction"] * 2**64
            split = "val" if is_val else "train"
            rows = size // seq_len if options["split_documents"] else min(size // seq_len, 1)
            end = min(rows * seq_len, state["done"] + limit - total)
            if "bpe" in kinds and rows:
                document.seek(0)
                marks = bpe_marks(document.read())
            document.seek(state["done"])
            while state["done"] < end:
                room = shard_bytes - state[split]["bytes"] % shard_bytes
                block = document.read(min(BLOCK, room, end - state["done"]))
                if not block:
                    die(f"{document.name} shrank while read; remove {out_dir} and start again")
                parts[split]["bin"].write(block)
                if "bpe" in kinds:
                    parts[split]["bpe"].write(np.packbits(marks[state["done"] : state["done"] + len(block)]).tobytes())
                total += len(block)
                state["done"] += len(block)
                state[split]["bytes"] += len(block)
                bar.set_postfix_str(f"{total // seq_len:,} rows", refresh=False)
                bar.update(len(block))
                if len(block) == room:
                    for part in [*parts["train"].values(), *parts["val"].values()]:
                        part.flush()
                    for kind in kinds:
                        close_part(parts[split][kind], split, state)
                    write_json(out_dir / "progress.json", state)
                    parts[split] = {kind: open_part(out_dir, split, kind, state) for kind in kinds}
            if rows:
                state[split]["documents"] += 1
                dropped["tail_bytes"] += size - state["done"]
            else:
                dropped["short_documents"] += 1
                dropped["short_bytes"] += size
            state["consumed"] += 1
            state["done"] = 0
            if total == limit:
                break
    empty = [split for split in parts if not state[split]["bytes"]]
    if empty:  # of no use, and in the way of the next try with other options
        (out_dir / "progress.json").unlink()
        for path in shards_in(out_dir):
            path.unlink()
        kept = state["consumed"] - dropped["short_documents"]
        why = (f"{kept} documents all fell on one side of --val_fraction={options['val_fraction']}"
               if kept else f"{state['consumed']} documents, all shorter than --seq_len={seq_len}")
        die(f"no rows for {' and '.join(empty)}: {why}; give a smaller --seq_len, more documents "
            "(or --max_bytes) or another --val_fraction")
    for split in parts:
        for part in parts[split].values():
            close_part(part, split, state)
    return (total - before) / 1e6 / (time.perf_counter() - started)


# ---- command line ----------------------------------------------------------------------------

def byte_count(text):
    if not 1 <= float(text) < math.inf or float(text) % 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(float(text))


def parse(argv):
    """Returns (out_dir, the options that decide what is written)."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = die
    add = parser.add_argument
    add("--dataset", default="stdlib", choices=["stdlib", "files", *HF_DEFAULTS])
    add("--input", nargs="+", action="extend", help="files, folders (recursive), globs")
    add("--hf_path", help="hub name, or local .jsonl, .json, .parquet or folder, for hf")
    add("--hf_name", help="configuration, e.g. sample-100BT for fineweb")
    add("--split", help="split of a Hugging Face dataset (train)")
    add("--text_column", help="column that holds the document (text)")
    add("--name", help="name of the set (the dataset's)")
    add("--out_dir", help="where the shards go (data/<name>)")
    add("--seq_len", type=byte_count, default=4096, help="bytes in a row (%(default)s)")
    add("--split_documents", action=argparse.BooleanOptionalAction,
        help="cut a long document into rows (stdlib, files) or keep its first row only (others)")
    add("--val_fraction", type=float, default=0.02, help="share of the documents (%(default)s)")
    add("--max_bytes", type=byte_count, help="stop after so many bytes of rows, e.g. 6e9")
    add("--shard_bytes", type=byte_count, default=10**8, help="size of a shard (%(default)s)")
    add("--bpe", action="store_true", default=None, help="mark the ends of o200k_base's tokens too (needs tiktoken)")
    add("--verify", action="store_true", help="only check a finished set against the sha256 in its meta.json")
    options = vars(parser.parse_args(argv))

    name, out_dir, dataset = options.pop("name"), options.pop("out_dir"), options["dataset"]
    seq_len, local = options["seq_len"], dataset not in HF_DEFAULTS
    hf_own = ["hf_path", "hf_name", "split", "text_column"]
    own = {"stdlib": [], "files": ["input"]}.get(dataset, hf_own)
    for option in ["input", *hf_own]:
        if options[option] is not None and option not in own:
            die(f"--{option} has no meaning for --dataset={dataset}; leave it out or give another")
    if not local:
        defaults = {"split": "train", "text_column": "text", **HF_DEFAULTS[dataset]}
        options.update({k: v for k, v in defaults.items() if options[k] is None})
    if own and options[own[0]] is None:
        die(f"--dataset={dataset} needs --{own[0]}")
    if not 0 < options["val_fraction"] < 1:
        die(f"--val_fraction={options['val_fraction']} must lie between 0 and 1")
    if options["max_bytes"] and options["max_bytes"] < seq_len:
        die(f"--max_bytes={options['max_bytes']} must be at least --seq_len={seq_len}")
    if options["bpe"] and seq_len % 8:
        die(f"--bpe needs a --seq_len that 8 divides, not {seq_len}")
    if options["split_documents"] is None:
        options["split_documents"] = local
    options["shard_bytes"] = max(options["shard_bytes"] // seq_len, 1) * seq_len
    name = name or (Path(options["hf_path"]).name if dataset == "hf" else dataset)
    options = {k: v for k, v in options.items() if v is not None}
    return Path(out_dir or Path("data", name)), options


def load_state(out_dir, options):
    """Returns what meta.json or progress.json holds, None without them; refuses other options and shards of a wrong length."""
    for path in [out_dir / "meta.json", out_dir / "progress.json"]:
        if not path.exists():
            continue
        state, shards = read_state(path)
        old = state["options"]
        others = [f"{k}={old.get(k)} (now {options.get(k)})" for k in {**old, **options} if old.get(k) != options.get(k)]
        if others:
            die(f"{out_dir} holds a set made with {', '.join(others)}; remove it or give another --out_dir")
        for shard in (out_dir / name for name in shards):
            if not shard.exists() or path.name != "meta.json" and shard.stat().st_size * BYTES_IN[shard.suffix[1:]] != old["shard_bytes"]:
                die(f"{shard} is missing or not as long as {path.name} says; remove {out_dir} and start again")
        return state
    if any(out_dir.glob("train_*.bin")) or any(out_dir.glob("val_*.bin")):
        die(f"{out_dir} holds shards without meta.json; remove them or give another --out_dir")


def verify(out_dir):
    """Compares the sha256 of every shard with meta.json; exit code 1 where one differs."""
    told, paths = read_state(out_dir / "meta.json")[1], shards_in(out_dir)
    there = {path.name: sha256_of(path) for path in tqdm(paths, unit=" shards", disable=None)}
    wrong = [f"{name} has sha256 {there.get(name, 'none')}, meta.json tells of {told.get(name, 'none')}"
             for name in sorted({*told, *there}) if told.get(name) != there.get(name)]
    if wrong:
        die(f"{'; '.join(wrong)}; remove {out_dir} and make it again", code=1)
    print(printable(f"{out_dir}: all {len(told)} shards agree with meta.json"))


def prepare(out_dir, options):
    """Makes the set in out_dir, or what is missing of it."""
    held_lock = lock(out_dir)
    if not held_lock:
        die(f"another prepare.py is at work in {out_dir}; wait for it, or give another --out_dir")
    state = load_state(out_dir, options)
    if (out_dir / "meta.json").exists():
        (out_dir / "progress.json").unlink(missing_ok=True)
        print(printable(f"{out_dir} is already there, with these options"))
        return
    dataset, files = None, []
    if options["dataset"] in HF_DEFAULTS:
        dataset = load_hf(options)
        if os.path.exists(options["hf_path"]):
            files = find_files([options["hf_path"]], out_dir)
    else:
        inputs = options.get("input")
        files = find_files(inputs, out_dir) if inputs else stdlib_files()
        if not files:
            die(f"there are no files in {' '.join(inputs or ['the standard library'])}")
    source = describe(files) if files else options["hf_path"]
    if state is None:
        splits = {split: {"documents": 0, "bytes": 0, "sha256": {}} for split in ("train", "val")}
        state = {"source": source, "options": options, **splits,
                 "dropped": {"short_documents": 0, "short_bytes": 0, "tail_bytes": 0},
                 "consumed": 0, "done": 0, "stream": None}
        write_json(out_dir / "progress.json", state)
    elif state["source"] != source:
        die(f"the source of {out_dir} was {state['source']} and is now {source}; remove {out_dir} and start again")
    documents = read_hf(dataset, options, state) if dataset else read_files(files, state)
    speed = write_shards(documents, out_dir, state)

    for split in ("train", "val"):
        held = state[split]
        held["rows"] = held["bytes"] // options["seq_len"]
        print(printable(f"{out_dir}: {split} {held['rows']:,} rows, {held['bytes'] / 1e6:,.1f} MB, from {held['documents']:,} documents"))
    dropped = state["dropped"]
    print(f"{speed:,.0f} MB/s; dropped {dropped['short_documents']:,} documents shorter than a row "
          f"({dropped['short_bytes']:,} bytes) and {dropped['tail_bytes']:,} bytes of others")
    meta = {k: state[k] for k in ["source", "options", "train", "val", "dropped"]}
    write_json(out_dir / "meta.json", {"seq_len": options["seq_len"], **meta})
    (out_dir / "progress.json").unlink()


def main(argv=None):
    """Runs the command line; a mistake ends it with one line and exit code 2, Ctrl-C with 130."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        out_dir, options = parse(argv)
        verify(out_dir) if options.pop("verify") else prepare(out_dir, options)
    except KeyboardInterrupt:
        print("interrupted; to go on: python prepare.py", printable(shlex.join(argv)), file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        die(f"{error}; mend this and run the same command again to go on")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")
    main()
