"""
Keeps the results of runs, and writes the tables of them into the READMEs.

    python -m experiments.report                                   writes the tables again
    python -m experiments.report --table=flops --text=C --machine="two EPYC cores" out out-2
                                                                   adds these runs first

results/runs.jsonl, beside this file, has a line for each run: what the flags say; its system, seed
and flags that are not the default's; parameters, commit, torch, dtype and a hash of the validation
rows (held_out); and the quantities below. A run that is added again replaces its line.

In a README, the lines from <!-- TABLE QUANTITY QUANTITY --> to the next empty line are such a
table: a row for each system or label, and columns for each text and quantity. A cell is a mean over
seeds. A seed that ran in two number formats counts with their mean. The quantities:

    bits       bits per byte of the validation rows, +- the standard error (number of seeds)
    lead       the row's bits minus those of learned tokens, +- the standard error if both have one
    rate       tokens per byte of the validation rows
    outside    the share of tokens that end on a space or punctuation
    undecided  the mean over the first tenth of training
    MB, FLOPs, minutes    of training
    first, later    bits per byte of a row's first 64 bytes, and of those after its first 256
    file_bits, precision, second, recall, padding    what machine_code.py measured
"""
import json
import re
from pathlib import Path

from common.commandline import UserError, argument_parser, run_program
from experiments.pictures import write
from experiments.tables import FORMATS, pivot, read_run

HERE = Path(__file__).parent
RUNS = HERE / "results/runs.jsonl"
READMES = HERE.parent / "README.md", HERE / "README.md"


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
        runs[identity(run)] = run
    readmes = [with_tables(path.read_text(encoding="utf-8"), runs.values()) for path in READMES]
    write(RUNS, "".join(json.dumps(run) + "\n" for run in runs.values()))
    for path, text in zip(READMES, readmes):
        write(path, text)


if __name__ == "__main__":
    run_program(main)
