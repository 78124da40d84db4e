"""
Bits per byte of a checkpoint of train.py, with its standard error, on benchmarks and held-out text.

    python experiments/evaluate.py out/ckpt.pt piqa hellaswag arc_easy lambada heldout=data/english
    python experiments/evaluate.py out/ckpt.pt lambada=lambada_test.jsonl

A benchmark comes from the Hugging Face hub, or from a .json, .jsonl or .parquet file with the same
fields. An item is a context and an answer, put together as in EleutherAI's LM evaluation harness
without examples; of held-out text it is a row of the model and no context.

Bits per byte: the bits that all right answers cost given their contexts, over their bytes in UTF-8,
spaces in front included. Accuracy, where there are choices: how often the right one has the fewest
bits per byte (the harness divides by characters). The rate is tokens over positions of all that is
read. A context loses its first bytes until it and the answer fit a row of the model. An answer
longer than a row is scored in pieces; each sees what comes before it as far as there is room.

The draws depend on an item's number only, so results repeat. Other batch sizes or padding change
them by rounding, which may turn a near tie; bpe's marks look ahead into the padding.
"""
import math
import re
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments.compare import parser_of
from model import inputs_and_targets, load_checkpoint
from prepare import fail, open_shards
from train import device_and_dtype


# ---- The benchmarks: from a row of a dataset to context, choices, and number of the right one.


def piqa(row):
    choices = [" " + row["sol1"], " " + row["sol2"]]
    return f"Question: {row['goal']}\nAnswer:", choices, int(row["label"])


def hellaswag(row):
    def clean(text):
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return context, [" " + clean(ending) for ending in row["endings"]], int(row["label"])


def arc_easy(row):
    choices = [" " + text for text in row["choices"]["text"]]
    right = row["choices"]["label"].index(row["answerKey"])
    return f"Question: {row['question']}\nAnswer:", choices, right


def lambada(row):
    context, _, word = row["text"].rpartition(" ")
    return context, [" " + word], 0


BENCHMARKS = {  # name: what reads a row, and where load_dataset finds them
    "piqa": (piqa, {"path": "ybisk/piqa", "split": "validation",
                    "revision": "refs/convert/parquet"}),  # main is a script
    "hellaswag": (hellaswag, {"path": "Rowan/hellaswag", "split": "validation"}),
    "arc_easy": (arc_easy, {"path": "allenai/ai2_arc", "name": "ARC-Easy", "split": "test"}),
    "lambada": (lambada, {"path": "EleutherAI/lambada_openai", "name": "default", "split": "test"}),
}


def read_benchmark(name, file):
    """The benchmark's items, from the hub or, if a file is named, from there."""
    import datasets  # slow, as its hub is
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_error()  # it tells of each retry
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # and it of what is raised
    read, source = BENCHMARKS[name]
    if file:
        builder = "parquet" if file.endswith(".parquet") else "json"
        source = {"path": builder, "data_files": file, "split": "train", "streaming": True}
    try:
        rows = list(datasets.load_dataset(**source))
    except Exception as error:  # datasets, its file systems and its parsers have dozens
        fail(f"{name}: cannot read {file or source['path']} ({type(error).__name__}: {error}); "
             f"give a .json, .jsonl or .parquet file: {name}=FILE")
    items = []
    for number, row in enumerate(rows, 1):
        try:
            context, choices, right = read(row)
            right = range(len(choices)).index(right)  # a test split's is hidden: -1
            items.append((context.encode(), [choice.encode() for choice in choices], right))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            fail(f"{name}: row {number} of {file or source['path']} is no row of {name} with its "
                 f"label ({type(error).__name__}: {error})")
    return items


def read_items(task, seq_len):
    """[(context, choices, number of the right one)] of a task NAME or NAME=PLACE, in bytes."""
    name, _, place = task.partition("=")
    if name in BENCHMARKS:
        items = read_benchmark(name, place)
    elif name == "heldout":
        try:
            shards = open_shards(place, "val", seq_len)
        except ValueError as error:
            fail(f"{task}: {error}")
        items = [(b"", [row.tobytes()], 0) for shard in shards for row in shard]
    else:
        fail(f"unknown task {task!r}; there are {', '.join(BENCHMARKS)} and heldout=FOLDER")
    if len(items) < 2:
        fail(f"{task} holds {len(items)} items; a standard error takes two")
    return items


# ---- Scoring.


def cut(context, answer, seq_len):
    """Yields rows of at most seq_len bytes, and how many at a row's end are the answer's."""
    text = context + answer
    for start in range(len(context), len(text), seq_len):
        end = min(start + seq_len, len(text))
        yield text[max(end - seq_len, 0) : end], end - start


@torch.no_grad()
def score(model, items, batch_size, autocast, name="items"):
    """Bits of each choice of each item, a list of arrays (choices,), and tokens per position."""
    rows = [(row, scored, i, c) for i, (context, choices, _) in enumerate(items)
            for c, choice in enumerate(choices)
            for row, scored in cut(context, choice, model.config.seq_len)]
    rows.sort(key=lambda row: -len(row[0]))  # little padding
    device = model.embedding.weight.device
    bits, tokens = [np.zeros(len(choices)) for _, choices, _ in items], 0
    for start in tqdm(range(0, len(rows), batch_size), desc=name, disable=None):
        batch = rows[start : start + batch_size]
        # padding comes last, so nothing that is scored depends on it; its uniforms are 1: no token
        text = pad_sequence([torch.tensor(list(row), dtype=torch.uint8) for row, *_ in batch], True)
        u = pad_sequence([torch.from_numpy(np.random.default_rng(i).random(len(row), np.float32))
                          for row, _, i, _ in batch], True, 1.0)  # (B, N)
        x, y = inputs_and_targets(text.numpy())
        with autocast:
            logp, _, _, a = model(x.to(device), y.to(device), u[None].to(device))
        for (row, scored, i, c), its in zip(batch, logp[0].cpu()):
            bits[i][c] -= its[len(row) - scored : len(row)].sum().item() / math.log(2)
        tokens += (a[0].cpu() & (u < 1)).sum().item()  # uniform boundaries fall on padding as well
    return bits, tokens / sum(len(row) for row, *_ in rows)


def ratio(bits, sizes):
    """sum(bits) / sum(sizes) over items, and the standard error of a ratio of a sample's sums."""
    value, n = bits.sum() / sizes.sum(), len(bits)
    return value, math.sqrt(n / (n - 1) * np.square(bits - value * sizes).sum()) / sizes.sum()


def evaluate(model, task, items, batch_size, autocast):
    """The task's line of the table; no accuracy where there are no choices."""
    bits, rate = score(model, items, batch_size, autocast, task)
    right = np.array([its[r] for its, (_, _, r) in zip(bits, items)])
    sizes = np.array([len(choices[r]) for _, choices, r in items])
    value, error = ratio(right, sizes)
    hits = [(its / [*map(len, choices)]).argmin() == r for its, (_, choices, r) in zip(bits, items)]
    return {"task": task, "items": len(items), "bytes": int(sizes.sum()),
            "bits_per_byte": float(value), "standard_error": error,
            "accuracy": float(np.mean(hits)) if len(items[0][1]) > 1 else None,
            "boundary_rate": rate}


def main(argv):
    parser = parser_of(__doc__)
    parser.add_argument("checkpoint", help="ckpt.pt of train.py")
    parser.add_argument("tasks", nargs="+", metavar="task", help="NAME, NAME=FILE, heldout=FOLDER")
    parser.add_argument("--batch_size", type=int, default=16, help="rows read at once")
    options = parser.parse_args(argv)
    if options.batch_size < 1:
        fail(f"--batch_size={options.batch_size} is not positive")
    try:
        model, saved = load_checkpoint(options.checkpoint)
    except (OSError, ValueError) as error:
        fail(error)
    device, precision = device_and_dtype("auto", saved["config"]["dtype"])
    autocast = torch.autocast(device, getattr(torch, precision), enabled=precision != "float32")
    items = {task: read_items(task, model.config.seq_len) for task in options.tasks}

    print("| task | items | bytes | bits per byte | standard error | accuracy | rate |")
    print("|---|---|---|---|---|---|---|")
    for task in items:
        line = evaluate(model.to(device), task, items[task], options.batch_size, autocast)
        cells = ["" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
                 for value in line.values()]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
