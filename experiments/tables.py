"""Runs as train.py's logs describe them, and Markdown tables of results."""
import json
import statistics
from pathlib import Path
from types import SimpleNamespace

from common.checkpoint import make_model
from common.commandline import UserError
from experiments.flops import flops_per_byte, paper_flops_per_byte

RESULTS = Path(__file__).parents[1] / "results"  # what compare.py trains; git ignores it


def table(head, rows):
    """A Markdown table of strings."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def jsonl(records):
    """The text of a JSONL file."""
    return "".join(json.dumps(record) + "\n" for record in records)


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
    """The evaluations of the run in a folder, a list of dictionaries, without that of step 0.

    Adds what the last header says about the run, the FLOPs of training that led to each
    evaluation, and the seconds, at the run's median speed. Raises UserError without a header.
    """
    records = read_log(folder / "log.jsonl")
    headers = [record for record in records if "hyperparameters" in record]
    if not headers:
        raise UserError(f"{folder}/log.jsonl has no header; another version of train.py wrote it")
    hp = SimpleNamespace(**headers[-1]["hyperparameters"])
    model = make_model(hp)
    about = {
        "system": hp.system, "seed": hp.seed, "commit": headers[-1]["commit"],
        "training_bytes": hp.training_bytes,
        "parameters": sum(p.numel() for p in model.parameters())}
    steps = [record for record in records if "auto" in record]
    if not steps:  # stopped before the first log line
        return []
    speed = statistics.median(step["bytes_per_second"] for step in steps)
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
        if "val_bpb" in record and record["bytes"]:
            del record["line"]  # the printed text
            costs = {"flops": flops, "paper_flops": paper_flops,
                     "seconds": record["bytes"] / speed}
            evaluations.append(about | costs | record)
    return evaluations
