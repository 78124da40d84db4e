"""
Records of a dataset: of the Hugging Face hub, or of local files.

`datasets` finds the files, and reads Parquet, Arrow and what is on the hub. It would guess the
types and the missing values of JSON and CSV, so local ones are read here, as they stand.
"""
import codecs
import csv
import glob
import gzip
import json
import os
import re
import zlib
from itertools import takewhile
from pathlib import Path

from common.files import matches

SUFFIX = re.compile(r"\.(jsonl?|ndjson|csv|tsv|parquet|arrow)(\.gz)?$")
NOT_READ = ("is no .json, .jsonl, .ndjson, .csv or .tsv, with or without .gz, .parquet or .arrow; "
            "prepare.py reads other text with --dataset=files")
codecs.register_error(  # a lone surrogate is U+FFFD; UTF-8 asks for bytes
    "fffd", lambda error: ("\ufffd".encode() * (error.end - error.start), error.end))
LARGEST = 2**30  # characters of a field of CSV; all that follows an open quote is one field


def json_records(line, file, whole):
    """The records of a line of JSON; with whole, also of a value that goes on behind the line."""
    if line.isspace():
        return []
    try:
        value = json.loads(line)
    except ValueError:
        if not whole:
            raise
        value = json.loads(line + file.read())
    records = value if isinstance(value, list) else [value]
    if not all(isinstance(record, dict) for record in records):
        raise ValueError("this is no JSON object")
    return records


def csv_records(row, header):
    """The record of a row of CSV, if it is not empty. A short row lacks the last columns."""
    if len(row) > len(header):
        raise ValueError(f"{len(row)} fields, but the header has {len(header)}")
    return [dict(zip(header, row))] if row else []


def find_records(path, configuration, split):
    """The builder of `datasets` for a dataset of the hub, a folder, or a glob of files.

    Raises ValueError or what `datasets` raises, which may be anything.
    """
    import datasets  # here because it takes seconds
    import pyarrow.dataset

    how = {"path": path}
    if not os.path.isdir(path):
        found = matches(Path(os.path.abspath(path)))
        files = sorted(str(path) for path in found if not path.name.startswith("."))
        suffix = SUFFIX.search((files or [path])[0].lower())
        if suffix:
            kind = suffix[1] if suffix[1] in ("csv", "parquet", "arrow") else "json"
            how = {"path": kind, "data_files": [*map(glob.escape, files)] or path}
        elif files:
            raise ValueError(f"{files[0]} {NOT_READ}")
    builder = datasets.load_dataset_builder(**how, name=configuration)
    config = builder.config
    if split not in config.data_files:
        raise ValueError(f"the splits are {', '.join(map(str, config.data_files))}")
    config.batch_size = 1000  # of Parquet; the default fails if the first row group is empty
    # without this, all that was read of a Parquet file stays in memory (of one of 160 MB: 115 MB)
    config.fragment_scan_options = pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False)
    return builder


def read_records(builder, split, bookmark):
    """Yields the records, dictionaries, each with a bookmark for going on after it, at first None.

    Raises OSError, ValueError with the number of a bad line, or what `datasets` raises.
    """
    files = builder.config.data_files[split]
    if builder.name in ("json", "csv") and all(map(os.path.isfile, files)):
        yield from read_text_records(files, bookmark or (0, 0, 0))
        return
    dataset = builder.as_streaming_dataset(split)
    if bookmark:
        dataset.load_state_dict(bookmark)
    for record in dataset:
        yield record, dataset.state_dict()


def read_text_records(paths, bookmark):
    """Yields what read_records yields, of JSON, CSV and TSV files. A .json may also be an array.

    A bookmark is the number of a file, an offset in its bytes, unpacked, and how many records to
    skip there.
    """
    csv.field_size_limit(LARGEST)
    first, start, skip = bookmark
    for index in range(first, len(paths)):
        path = paths[index]
        suffix = SUFFIX.search(path.lower())
        if not suffix:
            raise ValueError(f"{path} {NOT_READ}")
        kind, packed = suffix.groups()
        with (gzip.open if packed else open)(path, "rb") as file:
            try:
                if file.read(3) != codecs.BOM_UTF8:
                    file.seek(0)
                rows, header = file, None
                if kind in ("csv", "tsv"):
                    rows = csv.reader(map(bytes.decode, file), strict=True,
                                      delimiter="," if kind == "csv" else "\t")
                    header = next(rows, [])
                start = max(start, file.tell())
                file.seek(start)
                for row in rows:
                    if header is None:
                        first_line = start <= 3  # perhaps after the three bytes of a BOM
                        records = json_records(row, file, kind == "json" and first_line)
                    else:
                        records = csv_records(row, header)
                    for record in records[skip:]:
                        skip += 1
                        yield record, (index, start, skip)
                    start, skip = file.tell(), 0
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{path}: {error}")
            except (ValueError, csv.Error) as error:
                file.seek(0)
                before = sum(1 for _ in takewhile(lambda _: file.tell() <= start, file))
                line = before + getattr(error, "lineno", 1)  # a JSON value may have several
                raise ValueError(f"{path}, line {line}: {getattr(error, 'msg', error)}")
        start = 0
