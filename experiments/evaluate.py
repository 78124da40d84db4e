"""
Bits per byte of a checkpoint of train.py, with its standard error, on benchmarks and on held-out text.

    python experiments/evaluate.py out/ckpt.pt piqa hellaswag arc_easy lambada heldout=data/english
    python experiments/evaluate.py out/ckpt.pt lambada=lambada_test.jsonl piqa=piqa.parquet --json=scores.json

A benchmark comes from the Hugging Face hub, or from a .json, .jsonl or .parquet file with the same fields. An item is a
context and an answer, put together as in EleutherAI's LM evaluation harness without examples:

    task       hub, split                              context                           answer
    piqa       ybisk/piqa, validation                  "Question: {goal}\\nAnswer:"       " {sol1}" or " {sol2}", by label
    hellaswag  Rowan/hellaswag, validation             "{activity_label}: {ctx_a} {B}"   " {endings[label]}"
    arc_easy   allenai/ai2_arc, ARC-Easy, test         "Question: {question}\\nAnswer:"   " {the choice labelled answerKey}"
    lambada    EleutherAI/lambada_openai, test         text before its last space        that space and what follows it
    heldout    val_*.bin in a folder of prepare.py     nothing                           a row

B is ctx_b with a capital first letter and the rest in lower case. HellaSwag's context and endings lose the white space
around them; " [title]" becomes ". ", other brackets go with what they hold, then two spaces become one.

Bits per byte: the bits that all right answers cost given their contexts, over their bytes in UTF-8, spaces in front included.
Its standard error is that of a ratio of two sums over items. Accuracy, where there are choices: how often the right one has
the fewest bits per byte (the harness divides by characters without the space in front). The rate is tokens over
positions, of all that is read: contexts, wrong choices and <bos> included.

A row of the model holds seq_len bytes. A context loses its first bytes until it and the answer fit. An answer longer than a row
is scored in pieces of a row: all of its bytes count, and a piece sees what comes before it as far as its row has room, so
only a last, shorter piece sees anything. Held-out rows longer than the model's are read like that, as train.py reads them.

Boundaries are drawn with uniforms that depend on the item's number only, the same for all its choices. Results repeat, and
other batch sizes or padding change them by rounding at most, which may turn a decision that is a near tie. BPE boundaries are
those of the bytes read so far, which are not quite those of training: see systems.py.
"""
import argparse
import json
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from model import load_checkpoint
from prepare import printable
from train import device_and_dtype, inputs_and_targets, log_likelihood


def fail(message):
    print("evaluate.py:", " ".join(printable(str(message)).split()), file=sys.stderr)
    sys.exit(2)


# ---------------------------------------------------------------------------------------------------------------------
# The benchmarks: from a row of the dataset to (context, choices, number of the right one).


def piqa(row):
    return f"Question: {row['goal']}\nAnswer:", [" " + row["sol1"], " " + row["sol2"]], int(row["label"])


def hellaswag(row):
    def clean(text):
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return context, [" " + clean(ending) for ending in row["endings"]], int(row["label"])


def arc_easy(row):
    labels, texts = row["choices"]["label"], row["choices"]["text"]
    return f"Question: {row['question']}\nAnswer:", [" " + text for text in texts], labels.index(row["answerKey"])


def lambada(row):
    context, _, word = row["text"].rpartition(" ")
    return context, [" " + word], 0


BENCHMARKS = {  # name: what reads a row, the fields that it needs and their types, where load_dataset finds them
    "piqa": (piqa, {"goal": str, "sol1": str, "sol2": str, "label": (int, str)},
             {"path": "ybisk/piqa", "revision": "refs/convert/parquet", "split": "validation"}),  # main is a script, datasets runs none
    "hellaswag": (hellaswag, {"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": list, "label": (int, str)},
                  {"path": "Rowan/hellaswag", "split": "validation"}),
    "arc_easy": (arc_easy, {"question": str, "choices": dict, "answerKey": str},
                 {"path": "allenai/ai2_arc", "name": "ARC-Easy", "split": "test"}),
    "lambada": (lambada, {"text": str}, {"path": "EleutherAI/lambada_openai", "name": "default", "split": "test"}),
}


def read_benchmark(name, file):
    """The benchmark's items, from the hub or, if a file is named, from there."""
    import datasets  # slow, as its hub is
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()  # it tells of each retry
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # and it of what is raised
    read, fields, source = BENCHMARKS[name]
    if file:
        builder = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}.get(Path(file).suffix)
        if not builder or not Path(file).is_file():
            fail(f"{name}={file} is no .json, .jsonl or .parquet file; name one, or write {name} alone to take it from the hub")
        source = {"path": builder, "data_files": file, "split": "train", "streaming": True}  # streaming leaves no copy behind
    try:
        rows = list(datasets.load_dataset(**source))
    except Exception as error:  # datasets, its file systems and its parsers have dozens
        remedy = "mend the file" if file else f"without a network give a file: {name}=FILE"
        fail(f"{name}: cannot read {file or source['path']} ({type(error).__name__}: {error}); {remedy}")
    items = []
    for number, row in enumerate(rows, 1):
        missing = [field for field, kind in fields.items() if not isinstance(row.get(field), kind)]
        if missing:
            fail(f"{name}: row {number} of {file or source['path']} has no {', '.join(missing)}, or of another type than {name}'s rows; "
                 f"needed: {', '.join(fields)}")
        try:
            context, choices, right = read(row)
            items.append((context.encode(), [choice.encode() for choice in choices], range(len(choices)).index(right)))
        except (AttributeError, KeyError, TypeError, ValueError):  # fields of other types; the hidden labels of a test split
            fail(f"{name}: row {number} of {file or source['path']} is no row of {name} with its label")
    return items


def read_held_out(folder):
    """The validation rows of a folder of prepare.py, as items without context."""
    path = Path(folder, "meta.json")
    if not path.exists():
        fail(f"heldout={folder}: no {path}; name a folder that prepare.py made")
    try:
        meta = json.loads(path.read_text())
        names = sorted(name for name in meta["val"]["sha256"] if name.endswith(".bin"))
        shards = [np.memmap(Path(folder, name), np.uint8, "r").reshape(-1, meta["seq_len"]) for name in names]
        if sum(shard.size for shard in shards) != meta["val"]["bytes"]:
            raise ValueError("shards of another size")
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        fail(f"heldout={folder}: {path} and the shards that it names are not what prepare.py writes ({error}); make the data anew")
    return [(b"", [row.tobytes()], 0) for shard in shards for row in shard]


def read_items(task):
    """The items of `task`, written NAME or NAME=PLACE: a list of (context, choices, number of the right one), in bytes."""
    name, _, place = task.partition("=")
    if name != "heldout" and name not in BENCHMARKS:
        fail(f"unknown task {task!r}; there are {', '.join(BENCHMARKS)} and heldout")
    items = read_held_out(place) if name == "heldout" else read_benchmark(name, place)
    if len(items) < 2:
        fail(f"{task} holds {len(items)} items; a standard error takes two")
    return items


# ---------------------------------------------------------------------------------------------------------------------
# Scoring.


def cut(context, answer, seq_len):
    """Yields rows of at most seq_len bytes, and how many bytes at a row's end it scores: each of the answer's once."""
    text = context + answer
    for start in range(len(context), len(text), seq_len):
        end = min(start + seq_len, len(text))
        yield text[max(end - seq_len, 0) : end], end - start


@torch.no_grad()
def score(model, items, batch_size, autocast, name="items"):
    """Bits of each choice of each item given its context, a list of arrays (choices,), and tokens per position read."""
    rows = [(row, scored, i, c) for i, (context, choices, _) in enumerate(items) for c, choice in enumerate(choices)
            for row, scored in cut(context, choice, model.config.seq_len)]
    rows.sort(key=lambda row: -len(row[0]))  # little padding, and memory that does not suffice shows at once
    where = model.embedding.weight.device
    bits, tokens = [np.zeros(len(choices)) for _, choices, _ in items], 0
    with tqdm(total=len(rows), desc=name, unit="row", disable=None) as bar:
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            # padding comes last, so nothing that is scored depends on it; its uniforms are 1: no token ends there
            text = pad_sequence([torch.tensor(list(row), dtype=torch.uint8) for row, *_ in batch], True)  # (B, N)
            u = [torch.from_numpy(np.random.default_rng(i).random(len(row), np.float32)) for row, _, i, _ in batch]
            u = pad_sequence(u, True, 1.0)  # (B, N)
            answer = pad_sequence([torch.arange(len(row)) >= len(row) - scored for row, scored, *_ in batch], True)  # (B, N)
            x, y = inputs_and_targets(text.to(where))
            with autocast:
                logits, _, _, a = model(x, u=u.to(where))
            costs = -(log_likelihood(logits, y) * answer.to(where)).sum(1) / math.log(2)  # (B,)
            for (_, _, i, c), cost in zip(batch, costs.tolist()):
                bits[i][c] += cost
            tokens += (a.cpu() & (u < 1)).sum().item()  # uniform boundaries fall on padding as well
            bar.update(len(batch))
    return bits, tokens / sum(len(row) for row, *_ in rows)


def ratio(bits, sizes):
    """sum(bits) / sum(sizes) over items, and its standard error: the first-order spread of a ratio whose items are a sample."""
    value, n = bits.sum() / sizes.sum(), len(bits)
    return value, math.sqrt(n / (n - 1) * np.square(bits - value * sizes).sum()) / sizes.sum()


def evaluate(model, task, items, batch_size, autocast):
    """The task's line of the table as a dictionary; accuracy is None where there are no choices."""
    bits, rate = score(model, items, batch_size, autocast, task)
    sizes = [np.array([len(choice) for choice in choices]) for _, choices, _ in items]
    right = [item[2] for item in items]
    right_sizes = np.array([size[r] for size, r in zip(sizes, right)])
    value, error = ratio(np.array([b[r] for b, r in zip(bits, right)]), right_sizes)
    hits = [int((b / size).argmin()) == r for b, size, r in zip(bits, sizes, right)]
    return {"task": task, "items": len(items), "bytes": int(right_sizes.sum()), "bits_per_byte": float(value),
            "standard_error": error, "accuracy": float(np.mean(hits)) if len(sizes[0]) > 1 else None, "boundary_rate": rate}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    parser.add_argument("checkpoint", help="ckpt.pt of train.py")
    parser.add_argument("tasks", nargs="+", metavar="task",
                        help=f"{', '.join(BENCHMARKS)}, alone or with =FILE, heldout=FOLDER")
    parser.add_argument("--batch_size", type=int, default=16, help="rows read at once (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the table there as well")
    options = parser.parse_args(argv)
    if options.batch_size < 1:
        fail(f"--batch_size={options.batch_size} is not positive")
    try:
        model, saved = load_checkpoint(options.checkpoint)
        kind, precision = device_and_dtype("auto", saved["config"]["dtype"])  # "auto" is this machine's
        autocast = torch.autocast(kind, getattr(torch, precision), enabled=precision != "float32")
        if options.json:
            open(options.json, "a").close()  # before the work, not after it
    except (OSError, ValueError) as error:
        fail(error)
    except (AttributeError, LookupError, TypeError):
        fail(f"{options.checkpoint} names no dtype of this version of train.py; train anew")
    items = {task: read_items(task) for task in options.tasks}  # all mistakes before any work

    model = model.to(kind).eval()
    print("| task | items | bytes | bits per byte | standard error | accuracy | rate |\n|---|---|---|---|---|---|---|")
    results = []
    for task in items:
        results.append(evaluate(model, task, items[task], options.batch_size, autocast))
        cells = ["" if z is None else f"{z:.4f}" if isinstance(z, float) else str(z) for z in results[-1].values()]
        print(f"| {' | '.join(cells)} |", flush=True)
    if options.json:
        part = Path(f"{options.json}.part")
        try:
            part.write_text(json.dumps(results, indent=1) + "\n")
            os.replace(part, options.json)
        except OSError as error:
            part.unlink(missing_ok=True)
            fail(f"cannot write {options.json} ({error}); what was there before is whole, and the table above complete")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # the vocabulary of BPE boundaries
        fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
