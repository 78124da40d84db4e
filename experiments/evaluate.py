"""
Bits per byte of a trained model, with its standard error, on benchmarks and validation text.

    python -m experiments.evaluate out piqa hellaswag arc_easy lambada heldout=data/english
    python -m experiments.evaluate out lambada=lambada_test.jsonl

A benchmark is read from the Hugging Face hub, or from a .json, .jsonl, .csv, .tsv or .parquet file
with the same fields. Its items are a context and several answers, put together as in EleutherAI's
LM evaluation harness, without examples. heldout=FOLDER reads the validation rows of prepare.py.

Bits per byte are the bits of all right answers given their contexts, divided by the answers' bytes,
with the space before them. Accuracy is the harness's acc_norm: the fraction of items whose right
answer has the fewest bits per character, without that space. The rate is tokens per byte of all
that is read. A context is cut at the front so that it fits the model's row with the answer.

The draws depend on an item's number only, so results repeat.
"""
import math
import os
import re

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from common.commandline import UserError, argument_parser, run_program, say
from common.models import load_model
from common.records import find_records, read_records
from experiments.report import table
from model import BOS
from prepare import open_shards
from train import set_up_torch


# ---- The benchmarks: a dataset's row -> context, answers, number of the right answer.
def piqa(row):
    return f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"]


def hellaswag(row):
    def clean(text):
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return clean(context), [clean(ending) for ending in row["endings"]], row["label"]


def arc_easy(row):
    right = row["choices"]["label"].index(row["answerKey"])
    return f"Question: {row['question']}\nAnswer:", row["choices"]["text"], right


def lambada(row):
    context, _, word = row["text"].rpartition(" ")
    return context, [word], 0


BENCHMARKS = {  # name: how to read a row, and where it is: path, configuration and split
    "piqa": (piqa, "baber/piqa", None, "validation"),
    "hellaswag": (hellaswag, "Rowan/hellaswag", None, "validation"),
    "arc_easy": (arc_easy, "allenai/ai2_arc", "ARC-Easy", "test"),
    "lambada": (lambada, "EleutherAI/lambada_openai", "default", "test")}


def read_items(task, seq_len):
    """[(context, answers, their lengths, number of the right one)] of a task. Raises UserError.

    Context and answers are bytes; a length is in characters, without the space before an answer.
    """
    name, _, place = task.partition("=")
    place = os.path.expanduser(place)
    if name == "heldout":
        shards = open_shards(place, "val", seq_len)
        return [(b"", [row.tobytes()], [len(row)], 0) for shard in shards for row in shard]
    if name not in BENCHMARKS:
        raise UserError(f"unknown task '{task}'; use {', '.join(BENCHMARKS)} or heldout=FOLDER")
    import datasets  # here because it takes seconds
    import huggingface_hub

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs it also raises
    huggingface_hub.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    read, *source = BENCHMARKS[name]
    path, configuration, split = [place, None, "train"] if place else source
    items = []
    try:
        builder = find_records(path, configuration, split)
        for row, _ in read_records(builder, split, None):
            context, answers, right = read(row)
            if not 0 <= int(right) < len(answers):
                raise ValueError(f"label {right} of {len(answers)} answers")
            spaces = context[len(context.rstrip()) :] + " "  # like the harness, before the answers
            items.append((context.rstrip().encode(errors="fffd"),
                          [(spaces + answer).encode(errors="fffd") for answer in answers],
                          [*map(len, answers)], int(right)))
    except Exception as error:  # datasets raises dozens of kinds
        raise UserError(f"{name}: cannot read item {len(items) + 1} of {path} "
                        f"({type(error).__name__}: {error}); give a .json, .jsonl, .csv, .tsv or "
                        f".parquet file with labels: {name}=FILE") from error
    if not items:
        raise UserError(f"{name}: {path} holds no items")
    return items


# ---- Scores.
@torch.no_grad()
def score(model, context, answer, seed, autocast):
    """The answer's bits, and how many tokens and bytes were read."""
    device = model.embedding.weight.device
    length = max(model.hp.seq_len, len(answer))
    row = (context + answer)[-length:]
    y = torch.tensor([list(row)], device=device)
    x = F.pad(y[:, :-1], (1, 0), value=BOS)
    u = np.random.default_rng(seed).random((1, len(row)), np.float32)
    with autocast:
        out = model(x, torch.from_numpy(u).to(device))
        logp = model.head.logp(out.Z, y)
    nats = -logp[0, -len(answer) :].sum().item()
    return nats / math.log(2), out.a.sum().item(), len(row)


def ratio(bits, sizes):
    """sum(bits) / sum(sizes) over items, and its standard error, infinite for a single item."""
    value = bits.sum() / sizes.sum()
    if len(bits) == 1:
        return value, math.inf
    deviation = (bits - value * sizes).std(ddof=1)
    return value, math.sqrt(len(bits)) * deviation / sizes.sum()


def task_row(model, items, autocast):
    """The cells of a task's line in the table. There is no accuracy with a single answer."""
    results = []
    for i, (context, answers, lengths, right) in enumerate(tqdm(items, disable=None)):
        scores = [score(model, context, answer, i, autocast) for answer in answers]
        bits, tokens, read = np.array(scores).T  # of each answer
        sizes = np.array([len(answer) for answer in answers])
        hit = (bits / lengths).argmin() == right
        results.append((bits[right], sizes[right], hit, tokens.sum(), read.sum()))
    bits, sizes, hits, tokens, read = np.array(results).T  # of each item
    value, error = ratio(bits, sizes)
    accuracy = f"{hits.mean():.4f}" if len(items[0][1]) > 1 else ""
    rate = tokens.sum() / read.sum()
    return [f"{len(items)}", f"{sizes.sum():.0f}", f"{value:.4f}", f"{error:.4f}", accuracy,
            f"{rate:.4f}"]


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoint", help="train.py's out_dir, or the ckpt.pt in it")
    parser.add_argument("tasks", nargs="+", metavar="task", help="NAME, NAME=FILE, heldout=FOLDER")
    options = parser.parse_args(argv)
    model, saved = load_model(options.checkpoint)
    tasks = {task: read_items(task, model.hp.seq_len) for task in options.tasks}
    device, _, autocast = set_up_torch("auto", saved["config"]["dtype"])
    model.to(device)
    rows = [[task, *task_row(model, items, autocast)] for task, items in tasks.items()]
    head = ["task", "items", "bytes", "bits per byte", "standard error", "accuracy", "rate"]
    say(table(head, rows))


if __name__ == "__main__":
    run_program(main)
