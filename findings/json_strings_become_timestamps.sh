#!/usr/bin/env bash
# datasets 5.2.0 with pyarrow 26.0.1 turns quoted JSON strings into timestamps.
#
# JSON has strings and no dates. If all strings of a column look like dates, datasets gives datetime
# objects, and the text as it stood is gone: "1900-01-02" becomes 1900-01-02 00:00:00. One other
# string in the column, and all of them stay strings. So a corpus of short texts loses its text
# depending on its neighbours. prepare.py reads local JSON with Python's json module instead.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp"
python3 -m venv venv
venv/bin/pip install --quiet datasets==5.2.0 pyarrow==26.0.1
cat > program.py <<'END'
import json

import datasets

datasets.logging.set_verbosity(datasets.logging.CRITICAL)
for texts in ["1900-01-02", "2001-05-06 07:08:09"], ["1900-01-02", "a day"]:
    with open("x.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    source = {"path": "json", "data_files": "x.jsonl", "split": "train", "streaming": True}
    print([record["text"] for record in datasets.load_dataset(**source)])
END
HF_HOME="$tmp/home" venv/bin/python program.py > output
cat output
diff output - <<'END'
[datetime.datetime(1900, 1, 2, 0, 0), datetime.datetime(2001, 5, 6, 7, 8, 9)]
['1900-01-02', 'a day']
END
