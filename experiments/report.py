"""
Keeps the results of runs, and writes the tables of them into the READMEs.

    python -m experiments.report                                   writes the tables again
    python -m experiments.report --table=flops --text=C --machine="two EPYC cores" out out-2
                                                                   adds these runs first

results/runs.jsonl, beside this file, has a line for each finished run of train.py: what --table,
--text and --machine say; its system, seed and flags; bits per byte and tokens per byte on the
validation rows, and the share of tokens that end on a space or punctuation (outside); MB and FLOPs
of training, minutes, parameters; commit, torch and dtype; a hash of the validation rows (held_out).
A run that is added again replaces its line.

In a README, the lines from <!-- TABLE QUANTITY QUANTITY --> to the next empty line are such a
table: a row for each system or label, and columns for each text and quantity. A cell is the mean
over seeds +- its standard error, and (the number of seeds). The quantity lead is the row's bits
minus those of learned tokens: how much learned tokens lead.
"""
import json
import re
from pathlib import Path

from common.commandline import UserError, argument_parser, run_program
from experiments.pictures import write
from experiments.tables import pivot, read_run

HERE = Path(__file__).parent
RUNS = HERE / "results/runs.jsonl"
READMES = HERE.parent / "README.md", HERE / "README.md"


def with_tables(text, runs):
    """The text of a README with its tables as these runs make them."""
    def made(match):
        name, *quantities = match[1].split()
        return f"<!-- {match[1]} -->\n" + pivot(
            [run for run in runs if run["table"] == name], quantities)

    return re.sub(r"<!-- (.*?) -->\n(?:.+\n)*", made, text)


def main(argv=None):
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("folders", nargs="*", type=Path, help="out_dirs of finished runs")
    add("--table")
    add("--text")
    add("--label", help="of these runs' row, instead of their system")
    add("--machine")
    options = parser.parse_args(argv)
    about = {name: getattr(options, name) for name in ("table", "text", "label", "machine")}
    if options.folders and not (options.table and options.text and options.machine):
        raise UserError("to add runs, give --table, --text and --machine")
    runs = [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()]
    for folder in options.folders:
        found, evaluations = read_run(folder)
        if not found.pop("finished"):
            raise UserError(f"{folder} is not finished; go on with train.py --resume=True")
        new = about | found | evaluations[-1]
        same = [run for run in runs if all(
            run[key] == new[key] for key in ("table", "text", "system", "seed", "flags"))]
        runs = [run for run in runs if run not in same] + [new]
    write(RUNS, "".join(json.dumps(run) + "\n" for run in runs))
    for path in READMES:
        write(path, with_tables(path.read_text(encoding="utf-8"), runs))


if __name__ == "__main__":
    run_program(main)
