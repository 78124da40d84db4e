"""Runs as train.py's logs describe them, and Markdown tables of results."""
import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace

from common.checkpoint import make_model
from common.commandline import UserError
from experiments.flops import flops_per_byte, paper_flops_per_byte
from experiments.systems import SYSTEMS
from train import Hyperparameters

RESULTS = Path(__file__).parents[1] / "results"  # what compare.py trains; git ignores it
# hyperparameters that are no flags in a run's line
OWN = {"system", "seed", "data", "out_dir", "resume", "device", "dtype", "training_bytes"}
FORMATS = {"bits": "{:.3f}", "lead": "{:+.3f}", "rate": "{:.2f}", "outside": "{:.0%}",
           "undecided": "{:.0%}", "MB": "{:.1f}", "FLOPs": "{:.3g}", "minutes": "{:.1f}",
           "first": "{:.3f}", "later": "{:.3f}", "file_bits": "{:.3f}", "precision": "{:.0%}",
           "second": "{:.0%}", "recall": "{:.0%}", "padding": "{:.0%}"}


def table(head, rows):
    """A Markdown table of strings."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read_log(path):
    """The records of a log.jsonl: headers, training steps and evaluations.

    train.py may still be writing the last line. Raises UserError if it is another file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as error:
        raise UserError(f"{path} is not a log of train.py: {error}") from error


def read_run(folder):
    """What a run's log says about the run, and about its evaluations, without that of step 0.

    The first is a dictionary; all of it but "finished" goes into a line of runs.jsonl, as do the
    quantities of the last evaluation. The second is a list of dictionaries of quantities; report.py
    explains them. Minutes are at the run's median speed. Raises UserError if the log has no header.
    """
    records = read_log(folder / "log.jsonl")
    headers = [record for record in records if "hyperparameters" in record]
    if not headers:
        raise UserError(f"{folder}/log.jsonl has no header; another version of train.py wrote it")
    header = headers[-1]
    hp = SimpleNamespace(**header["hyperparameters"])
    model = make_model(hp)
    flags = {key: value for key, value in vars(hp).items()
             if key not in OWN and value != getattr(Hyperparameters, key, None)}
    about = {
        "system": hp.system, "seed": hp.seed, "flags": flags,
        "parameters": sum(p.numel() for p in model.parameters()),
        "commit": header["commit"], "torch": header["torch"], "dtype": header["dtype"],
        "held_out": header.get("held_out"),
        "finished": any("val_bpb" in record and record["bytes"] >= hp.training_bytes
                        for record in records)}
    steps = [record for record in records if "auto" in record]
    if not steps:  # stopped before the first log line
        return about, []
    speed = statistics.median(step["bytes_per_second"] for step in steps)
    first = [step["undecided"] for step in steps if step["bytes"] <= hp.training_bytes / 10]
    about["undecided"] = statistics.mean(first or [steps[0]["undecided"]])
    evaluations = []
    step = steps[0]  # the latest one: its rate holds for the bytes since the last record
    last_bytes = flops = paper_flops = 0
    for record in records:
        if "bytes" not in record:  # a header
            continue
        if "auto" in record:
            step = record
        new_bytes = record["bytes"] - last_bytes
        last_bytes = record["bytes"]
        flops += new_bytes * flops_per_byte(model, step["rate"])
        paper_flops += new_bytes * paper_flops_per_byte(model, step["rate"])
        if "val_bpb" in record and last_bytes:
            evaluations.append({
                "bits": record["val_bpb"], "rate": record["val_rate"],
                "outside": record.get("outside"), "MB": last_bytes / 1e6, "FLOPs": flops,
                "paper's FLOPs": paper_flops, "minutes": last_bytes / speed / 60})
    return about, evaluations


def seed_means(runs, quantity):
    """The mean of a quantity over the runs of each seed; a list. Runs that lack it do not count."""
    by_seed = {}
    for run in runs:
        if run.get(quantity) is not None:
            by_seed.setdefault(run["seed"], []).append(run[quantity])
    return [statistics.mean(values) for values in by_seed.values()]


def mean_and_error(values):
    """The mean of numbers, and its standard error, or NaN if there is only one."""
    error = math.nan
    if len(values) > 1:
        error = statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), error


def cell(runs, quantity, learned):
    """A cell of a table: the mean of a quantity over the runs' seeds, or "" if they lack it.

    learned: the runs of learned tokens on the same text, for the lead.
    """
    key = "bits" if quantity == "lead" else quantity
    values = seed_means(runs, key)
    if not values or quantity == "lead" and (not learned or runs == learned):
        return ""
    mean, error = mean_and_error(values)
    if quantity == "lead":
        other, other_error = mean_and_error(seed_means(learned, key))
        mean, error = mean - other, math.hypot(error, other_error)
    shown = FORMATS[quantity].format(mean)
    if quantity in ("bits", "file_bits", "lead") and not math.isnan(error):
        shown += f" ± {error:.3f}"
    return f"{shown} ({len(values)})" if quantity in ("bits", "file_bits") else shown


def pivot(runs, quantities):
    """A Markdown table of runs, lines of runs.jsonl: systems or labels by texts and quantities.

    Runs without any of the quantities are left out.
    """
    keys = ["bits" if quantity == "lead" else quantity for quantity in quantities]
    runs = [run for run in runs if any(run.get(key) is not None for key in keys)]

    def of(label, text):
        return [run for run in runs
                if run["text"] == text and (run.get("label") or run["system"]) == label]

    texts = list(dict.fromkeys(run["text"] for run in runs))
    labels = [run.get("label") or run["system"] for run in runs]
    labels = dict.fromkeys(name for name in ["learned", *SYSTEMS, *labels] if name in labels)
    head = ["tokens"]
    for text in texts:
        first, *others = [quantity.replace("_", " ") for quantity in quantities]
        if text:
            first = f"{text}: {first}" if others else text
        head += [first, *others]
    rows = []
    for label in labels:
        row = [label]
        for text in texts:
            own, learned = of(label, text), of("learned", text)
            row += [cell(own, quantity, learned) for quantity in quantities]
        if any(row[1:]):  # learned tokens have no lead over themselves
            rows.append(row)
    return table(head, rows)
