#!/usr/bin/env bash
# datasets 5.2.0 with pyarrow 26.0.1 cannot read a valid Parquet file whose first row group is empty.
#
# Parquet allows row groups without rows, and writers that flush on a timer make them. pyarrow reads
# such a file. datasets takes the size of its batches from the first row group, and asks pyarrow for
# batches of 0 rows. A batch size of one's own avoids it: datasets.load_dataset(..., batch_size=1000).
# prepare.py therefore sets one.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp"
python3 -m venv venv
venv/bin/pip install --quiet datasets==5.2.0 pyarrow==26.0.1
cat > program.py <<'END'
import datasets
import pyarrow
import pyarrow.parquet

datasets.logging.set_verbosity(datasets.logging.CRITICAL)
schema = pyarrow.schema([("text", pyarrow.string())])
with pyarrow.parquet.ParquetWriter("x.parquet", schema) as writer:
    for rows in [], ["a", "b"]:
        writer.write_table(pyarrow.table({"text": pyarrow.array(rows, pyarrow.string())}))
print("pyarrow reads", pyarrow.parquet.read_table("x.parquet").num_rows, "rows")
for options in {}, {"batch_size": 1000}:
    source = {"path": "parquet", "data_files": "x.parquet", "split": "train", "streaming": True}
    try:
        print(options, len([*datasets.load_dataset(**source, **options)]), "rows")
    except Exception as error:
        print(options, type(error).__name__, error)
END
venv/bin/python program.py > output
cat output
diff output - <<'END'
pyarrow reads 2 rows
{} ArrowInvalid BatchSize must be greater than 0, got 0
{'batch_size': 1000} 2 rows
END
