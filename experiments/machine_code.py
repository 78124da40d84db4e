"""
Compares a model's tokens with the instructions of x86-64 machine code, as objdump finds them.

    objcopy -O binary --only-section=.text /usr/bin/strace strace.text
    python -m experiments.machine_code out strace.text --start=65536

For each checkpoint, prints the following, and writes it to measured.json beside the checkpoint,
where report.py finds it. The boundaries are drawn.

    file_bits    bits per byte of the file
    precision    the share of its tokens that end on an instruction's first byte
    second       the share that end on a second byte, often the opcode after a prefix
    recall       the share of the first bytes on which a token ends
    padding      the share of padding, which is easy to find, among the first bytes found

Also writes machine_code.svg: 24 instructions from byte --start on, as the last checkpoint sees
them.
"""
import html
import json
import math
import re
import subprocess
from pathlib import Path

import torch

from common.checkpoint import checkpoint_path, load_model
from common.commandline import UserError, argument_parser, run_program, say
from experiments.pictures import LEGEND, svg, svg_cell, write
from experiments.tables import FORMATS, table
from sample import scored

# what compilers put between functions and before loops
PADDING = re.compile(r"((cs|data16) )*nop|xchg +%ax,%ax|int3")


def disassemble(path):
    """{first byte: text} of all instructions in a file of machine code."""
    command = ["objdump", "-D", "-w", "-b", "binary", "-m", "i386:x86-64", path]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {int(place, 16): text
            for place, text in re.findall(r"^ *([0-9a-f]+):\t[^\t]*\t(.*)$", lines, re.MULTILINE)}


def listing(instructions, steps, start, lines=24):
    """An SVG with a line for each instruction: its bytes, coloured by p, and its text.

    instructions as disassemble returns them; steps, (byte, a, p, nats) for each byte of the file.
    """
    starts = [place for place in sorted(instructions) if place >= start]
    body = LEGEND
    for row, (first, end) in enumerate(zip(starts[:lines], [*starts[1:], len(steps)])):
        y = 34 + 20 * row
        for column, (byte, a, p, _) in enumerate(steps[first:end]):
            body += svg_cell(22 * column, y, f"{byte:02x}", a, p, width=22)
        text = html.escape(instructions[first])
        body += f'<text class="words" x="340" y="{y + 14}">{text}</text>\n'
    return svg(700, 34 + 20 * lines, body)


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoints", nargs="+", metavar="checkpoint")
    parser.add_argument("file")
    parser.add_argument("--start", type=int, default=0)
    options = parser.parse_args(argv)
    code = Path(options.file).read_bytes()
    if not code:
        raise UserError(f"{options.file} is empty")
    instructions = disassemble(options.file)
    padding = {place for place, text in instructions.items() if PADDING.match(text)}
    second = {place + 1 for place in instructions} - instructions.keys()
    rows = []
    for path in options.checkpoints:
        model, _ = load_model(path)
        torch.manual_seed(0)
        steps = list(scored(model, code))
        ends = {place for place, (_, a, _, _) in enumerate(steps) if a}
        hits = ends & instructions.keys()
        measured = {
            "file_bits": sum(nats for *_, nats in steps) / math.log(2) / len(code),
            "precision": len(hits) / max(len(ends), 1),
            "second": len(ends & second) / max(len(ends), 1),
            "recall": len(hits) / len(instructions),
            "padding": len(hits & padding) / max(len(hits), 1)}
        write(checkpoint_path(path).parent / "measured.json", json.dumps(measured))
        rows.append([path, *(FORMATS[name].format(value) for name, value in measured.items())])
    say(table(["checkpoint", *measured], rows))
    write(Path("machine_code.svg"), listing(instructions, steps, options.start))


if __name__ == "__main__":
    run_program(main)
