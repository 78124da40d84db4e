"""
Compares a model's tokens with units that nothing separates: instructions in x86-64 machine code, as
objdump finds them, or words in a text of which the model reads only the letters.

    objcopy -O binary --only-section=.text /usr/bin/strace strace.text
    python -m experiments.machine_code out/ckpt.pt strace.text --start=65536
    python -m experiments.machine_code out/ckpt.pt text.txt --words

For each checkpoint, prints the file's bits per byte, how many of the tokens end on a unit's first
byte (precision), and on how many of the first bytes a token ends (recall). The boundaries are
drawn. Without --words, also writes machine_code.svg: 24 instructions from byte --start on, as the
last checkpoint sees them.
"""
import html
import math
import re
import subprocess
from pathlib import Path

import torch

from configurator import argument_parser, load_checkpoint, run, say
from experiments.compare import table
from experiments.figures import PICTURE_STYLE
from experiments.page import cell_colours, write
from sample import scored


def disassemble(path):
    """{first byte: text} of all instructions in a file of machine code."""
    command = ["objdump", "-D", "-w", "-b", "binary", "-m", "i386:x86-64", path]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {int(place, 16): text
            for place, text in re.findall(r"^ *([0-9a-f]+):\t[^\t]*\t(.*)$", lines, re.MULTILINE)}


def find_words(path):
    """The letters of a text, in lower case, and {first byte: word}."""
    letters = bytearray()
    words = {}
    for word in re.findall(rb"[A-Za-z]+", Path(path).read_bytes()):
        words[len(letters)] = word
        letters += word.lower()
    return letters, words


def listing(instructions, steps, start, lines=24):
    """An SVG with a line for each instruction: its bytes, coloured by p, and its text."""
    starts = [place for place in sorted(instructions) if place >= start][: lines + 1]
    svg = ""
    for row, (first, end) in enumerate(zip(starts, starts[1:])):
        y = 20 * row
        for column, (byte, a, p, _) in enumerate(steps[first:end]):
            x = 22 * column
            background, colour = cell_colours(p)
            svg += (f'<path fill="{background}" d="M{x} {y}h22v19h-22"/>'
                    f'<text x="{x + 10}" y="{y + 14}" fill="{colour}">{byte:02x}</text>')
            if a:
                svg += f'<path class="end" d="M{x + 20} {y}h2v19h-2z"/>'
        text = html.escape(instructions[first])
        svg += f'<text class="words" x="240" y="{y + 14}">{text}</text>\n'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="600" height="{20 * lines}">
<style>{PICTURE_STYLE}</style>
{svg}</svg>
"""


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoints", nargs="+", metavar="checkpoint")
    parser.add_argument("file")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--words", action="store_true")
    options = parser.parse_args(argv)
    if options.words:
        code, units = find_words(options.file)
    else:
        code, units = Path(options.file).read_bytes(), disassemble(options.file)
    rows = []
    for path in options.checkpoints:
        model, _ = load_checkpoint(path)
        torch.manual_seed(0)
        steps = list(scored(model, code))
        ends = {place for place, (_, a, _, _) in enumerate(steps) if a}
        bits = sum(nats for *_, nats in steps) / math.log(2)
        hits = len(ends & units.keys())
        precision = hits / len(ends)
        recall = hits / len(units)
        rows.append([
            path, f"{bits / len(code):.3f}", f"{len(ends) / len(code):.2f}", f"{precision:.0%}",
            f"{recall:.0%}", f"{2 * precision * recall / (precision + recall):.2f}"])
    say(table(["checkpoint", "the file's bits", "rate", "precision", "recall", "F1"], rows))
    if not options.words:
        write(Path("machine_code.svg"), listing(units, steps, options.start))


if __name__ == "__main__":
    run(main)
