"""
Bits per byte of a trained model, with its standard error, on benchmarks and validation text.

    python -m experiments.evaluate out/ckpt.pt piqa hellaswag arc_easy lambada heldout=data/english
    python -m experiments.evaluate out/ckpt.pt lambada=lambada_test.jsonl

A benchmark is read from the Hugging Face hub, or from a .json, .jsonl or .parquet file with the
same fields. Its items are a context and several answers, put together as in EleutherAI's LM
evaluation harness, without examples. heldout=FOLDER reads the validation rows of prepare.py.

Bits per byte are the bits of all right answers given their contexts, divided by the answers' bytes.
Accuracy is the fraction of items whose right answer has the fewest bits per byte of all answers
(the harness divides by characters). The rate is tokens per byte of all that is read. A context is
cut at the front so that it fits the model's row with the answer.

The draws depend on an item's number only, so results repeat. Rows of a pass are padded to the same
length. Padding affects only rounding and bpe's boundaries, which look ahead.
"""
import math
import re

import numpy as np
import torch
from tqdm import tqdm

from config.command_line import device_and_dtype
from config.terminal import argument_parser, fail, one_line_errors
from model import inputs_and_targets, load_checkpoint
from prepare import open_shards

BATCH_SIZE = 16  # rows per pass


# ---- The benchmarks: a dataset's row -> context, answers, number of the right answer.
def piqa(row):
    answers = [" " + row["sol1"], " " + row["sol2"]]
    return f"Question: {row['goal']}\nAnswer:", answers, int(row["label"])


def hellaswag(row):
    def clean(text):
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    answers = [" " + clean(ending) for ending in row["endings"]]
    return clean(context), answers, int(row["label"])


def arc_easy(row):
    answers = [" " + text for text in row["choices"]["text"]]
    right = row["choices"]["label"].index(row["answerKey"])
    return f"Question: {row['question']}\nAnswer:", answers, right


def lambada(row):
    context, _, word = row["text"].rpartition(" ")
    return context, [" " + word], 0


BENCHMARKS = {  # name: how to read a row, and where datasets.load_dataset finds the rows
    "piqa": (piqa, {"path": "baber/piqa", "split": "validation"}),
    "hellaswag": (hellaswag, {"path": "Rowan/hellaswag", "split": "validation"}),
    "arc_easy": (arc_easy, {"path": "allenai/ai2_arc", "name": "ARC-Easy", "split": "test"}),
    "lambada": (lambada, {"path": "EleutherAI/lambada_openai", "name": "default", "split": "test"})}


def read_items(task, seq_len):
    """[(context, answers, number of the right one)] of a task, in bytes."""
    name, _, place = task.partition("=")
    if name == "heldout":
        shards = open_shards(place, "val", seq_len)
        return [(b"", [row.tobytes()], 0) for shard in shards for row in shard]
    if name not in BENCHMARKS:
        fail(f"unknown task '{task}'; use {', '.join(BENCHMARKS)} or heldout=FOLDER")
    import datasets  # slow
    import huggingface_hub

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs it also raises
    huggingface_hub.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    read, source = BENCHMARKS[name]
    if place:
        builder = "parquet" if place.endswith(".parquet") else "json"
        source = {"path": builder, "data_files": place, "split": "train"}
    items = []
    try:
        for row in datasets.load_dataset(**source, streaming=True):  # downloads this split only
            context, answers, right = read(row)
            if right < 0:
                raise ValueError("the label is hidden")
            items.append((context.encode(), [answer.encode() for answer in answers], right))
    except Exception as error:  # datasets raises dozens of kinds
        fail(f"{name}: cannot read {place or source['path']} ({type(error).__name__}: {error}); "
             f"give a .json, .jsonl or .parquet file with labels: {name}=FILE")
    return items


# ---- Scores.
@torch.no_grad()
def score(model, items, autocast):
    """The bits of each answer of each item, a list of arrays, and the rate."""
    device = model.embedding.weight.device
    rows = []
    for i, (context, answers, _) in enumerate(items):
        for j, answer in enumerate(answers):
            length = max(model.config.seq_len, len(answer))
            rows.append(((context + answer)[-length:], len(answer), i, j))
    rows.sort(key=lambda row: -len(row[0]))  # rows of a batch need little padding
    bits = [np.zeros(len(answers)) for _, answers, _ in items]
    tokens = 0
    for start in tqdm(range(0, len(rows), BATCH_SIZE), disable=None):
        batch = rows[start : start + BATCH_SIZE]
        N = len(batch[0][0])
        text = [list(row.ljust(N)) for row, _, _, _ in batch]
        u = [np.random.default_rng(i).random(N, np.float32) for _, _, i, _ in batch]
        x, y = inputs_and_targets(np.array(text, np.uint8), device)
        u = torch.from_numpy(np.stack(u))[None]
        with autocast:
            logp, _, _, a = model(x, y, u.to(device))
        for (row, size, i, j), row_logp, row_a in zip(batch, logp[0].cpu(), a[0].cpu()):
            nats = -row_logp[len(row) - size : len(row)].sum().item()
            bits[i][j] = nats / math.log(2)
            tokens += row_a[: len(row)].sum().item()
    return bits, tokens / sum(len(row) for row, _, _, _ in rows)


def ratio(bits, sizes):
    """sum(bits) / sum(sizes) over items, and its standard error."""
    value = bits.sum() / sizes.sum()
    deviation = (bits - value * sizes).std(ddof=1)
    return value, math.sqrt(len(bits)) * deviation / sizes.sum()


def evaluate(model, items, autocast):
    """The cells of a task's line in the table. There is no accuracy with a single answer."""
    bits, rate = score(model, items, autocast)
    results = []
    for item_bits, (_, answers, right) in zip(bits, items):
        sizes = np.array([len(answer) for answer in answers])
        hit = (item_bits / sizes).argmin() == right
        results.append((item_bits[right], sizes[right], hit))
    right_bits, right_sizes, hits = np.array(results).T
    value, error = ratio(right_bits, right_sizes)
    accuracy = f"{hits.mean():.4f}" if len(items[0][1]) > 1 else ""
    return [f"{len(items)}", f"{right_sizes.sum():.0f}", f"{value:.4f}", f"{error:.4f}", accuracy,
            f"{rate:.4f}"]


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoint", help="ckpt.pt of train.py")
    parser.add_argument("tasks", nargs="+", metavar="task", help="NAME, NAME=FILE, heldout=FOLDER")
    options = parser.parse_args(argv)
    with one_line_errors():
        model, saved = load_checkpoint(options.checkpoint)
        tasks = {task: read_items(task, model.config.seq_len) for task in options.tasks}
    device, dtype = device_and_dtype("auto", saved["config"]["dtype"])
    autocast = torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32")
    model.to(device)

    print("| task | items | bytes | bits per byte | standard error | accuracy | rate |")
    print("|---|---|---|---|---|---|---|")
    for task, items in tasks.items():
        cells = evaluate(model, items, autocast)
        print(f"| {' | '.join([task, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
