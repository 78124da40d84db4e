"""
Reads runs' logs, keeps the results of runs, and writes the tables of them into the READMEs.

    python -m experiments.report                                   writes the tables again
    python -m experiments.report --table=flops --text=C --machine="two EPYC cores" out out-2
                                                                   adds these runs first

results/runs.jsonl, beside this file, has a line for each run: what the flags say; its system, seed
and flags that are not the default's; parameters, commit, torch, dtype and a hash of the validation
rows (held_out); and the quantities below. A run that is added again replaces its line.

In a README, the lines from <!-- TABLE QUANTITY QUANTITY --> to the next empty line are such a
table: a row for each system or label, and columns for each text and quantity. A cell is a mean over
seeds, so its runs must be alike. A seed that ran in two precisions counts with their mean:

    bits       bits per byte of the validation rows, +- the standard error (number of seeds)
    lead       the row's bits minus those of learned tokens, +- the standard error if both have one
    rate       tokens per byte of the validation rows
    outside    the share of tokens that end on a space or punctuation
    MB, minutes    of training, at the run's median speed
    FLOPs      of training, as flops.py counts them for the last checkpoint's model
    first, later    from measured.json beside the log: bits per byte of a row's first 64 bytes,
               and of those after its first 256
"""
import json
import math
import re
import statistics
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

from common.commandline import UserError, argument_parser, run_program, say
from common.files import write_text
from common.models import load_model, make_model
from experiments.flops import flops_per_byte, paper_flops_per_byte
from experiments.systems import SYSTEMS
from prepare import open_shards
from train import Hyperparameters

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"  # what compare.py trains; git ignores it
RUNS = HERE / "results/runs.jsonl"
READMES = HERE.parent / "README.md", HERE / "README.md"
# hyperparameters that are no flags in a run's line
OWN = {"system", "seed", "data", "out_dir", "resume", "device", "dtype", "training_bytes"}
FORMATS = {"bits": "{:.3f}", "lead": "{:+.3f}", "rate": "{:.2f}", "outside": "{:.0%}",
           "MB": "{:.1f}", "FLOPs": "{:.3g}", "minutes": "{:.1f}", "first": "{:.3f}",
           "later": "{:.3f}"}


# ---- Runs.
def read_log(path):
    """The records of a log.jsonl: headers, training steps and evaluations.

    train.py may still be writing the last line. Raises UserError if it is another file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as error:
        raise UserError(f"{path} is not a log of train.py: {error}") from error


@lru_cache(None)
def run_flops_per_byte(folder, records):
    """FLOPs of training per byte, of the model in a run's folder. Raises UserError.

    records: how many the log has; with more, the model may be another one.
    """
    model, _ = load_model(folder)
    shards = open_shards(model.hp.data, "train", model.hp.seq_len)
    return flops_per_byte(model, shards)


def read_run(folder):
    """What a run's log says about the run, and about its evaluations, without that of step 0.

    The first is a dictionary; all of it but "finished" goes into a line of runs.jsonl, as do the
    quantities of the last evaluation. The second is a list of dictionaries of quantities. Raises
    UserError if the log has no header, or if the checkpoint or the training rows are missing.
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
    flops = run_flops_per_byte(folder, len(records))
    paper_flops = paper_flops_per_byte(model, statistics.mean(step["rate"] for step in steps))
    evaluations = []
    for record in records:
        if "val_bpb" in record and record["bytes"]:
            size = record["bytes"]
            evaluations.append({
                "bits": record["val_bpb"], "rate": record["val_rate"],
                "outside": record.get("outside"), "MB": size / 1e6, "FLOPs": size * flops,
                "paper's FLOPs": size * paper_flops, "minutes": size / speed / 60})
    return about, evaluations


# ---- Tables.
def table(head, rows):
    """A Markdown table of strings."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


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
    if quantity in ("bits", "lead") and not math.isnan(error):
        shown += f" ± {error:.3f}"
    return f"{shown} ({len(values)})" if quantity == "bits" else shown


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
        first, *others = quantities
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


def with_tables(text, runs):
    """The text of a README with its tables as these runs make them."""
    def made(match):
        name, *quantities = match[1].split()
        chosen = [run for run in runs if run["table"] == name]
        if not chosen:
            raise UserError(f"<!-- {match[1]} -->: there are no runs of the table {name}")
        return f"<!-- {match[1]} -->\n" + pivot(chosen, quantities)

    quantity = "|".join(FORMATS)
    return re.sub(rf"<!-- (\w+(?: (?:{quantity}))+) -->\n?(?:.+\n?)*", made, text)


def identity(run):
    """What tells runs apart. A run with the same replaces an older one."""
    keys = "table", "text", "label", "system", "seed", "flags", "dtype", "MB"
    return json.dumps([run[key] for key in keys])


def check_alike(run, others):
    """Raises UserError if a run shares a cell with one that differs not only in seed and precision.

    Runs of equal FLOPs read as many bytes within a twentieth.
    """
    def place(run):
        return run["table"], run["text"], run["label"] or run["system"]

    for other in others:
        if place(other) != place(run):
            continue
        for key in "system", "flags", "held_out", "MB":
            old, new = other[key], run[key]
            alike = old == new or None in (old, new)
            if key == "MB":
                alike = max(old, new) <= 1.05 * min(old, new)
            if not alike:
                raise UserError(f"in the table {run['table']}, {run['text']} has a run of "
                                f"{key}={old} and seed {other['seed']}, and this one has "
                                f"{key}={new}; give another --label or --text")


def main(argv=None):
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("folders", nargs="*", type=Path, help="out_dirs of finished runs to add")
    add("--table", help="the table that they are for")
    add("--text", help="the column that they are for")
    add("--label", help="the row that they are for, if it is not their system's")
    add("--machine", help="where they ran")
    options = parser.parse_args(argv)
    about = {name: getattr(options, name) for name in ("table", "text", "label", "machine")}
    if options.folders and not (options.table and options.text and options.machine):
        raise UserError("to add runs, give --table, --text and --machine")
    lines = RUNS.read_text(encoding="utf-8").splitlines()
    runs = {identity(run): run for run in map(json.loads, lines)}
    for folder in options.folders:
        found, evaluations = read_run(folder)
        if not found.pop("finished"):
            raise UserError(f"{folder} is not finished; go on with train.py --resume=True")
        run = about | found | evaluations[-1]
        measured = folder / "measured.json"
        if measured.exists():
            run |= json.loads(measured.read_text())
        check_alike(run, runs.values())
        runs[identity(run)] = run
    readmes = [with_tables(path.read_text(encoding="utf-8"), runs.values()) for path in READMES]
    lines = [json.dumps(run) + "\n" for run in runs.values()]
    for path, text in zip([RUNS, *READMES], ["".join(lines), *readmes]):
        write_text(path, text)
        say(f"wrote {path}")


if __name__ == "__main__":
    run_program(main)
