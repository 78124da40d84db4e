"""
Shows where the tokens of a text end, on a self-contained HTML page (the paper's Figure 2).

    python -m experiments.page --out_dir=out --score=FILE --html=page.html
    python -m experiments.page --out_dir=out --text="def main(argv):" --html=page.html
    python -m experiments.page --out_dir=out --start="def main" --html=page.html

--score reads a file, and --start generates text. The colour of a character is the policy's
probability p of a boundary after it: dark blue is 0, yellow is 1. A red bar stands where a token
ends. Point at a character to see its p and the bits that it costs.
"""
import os
from pathlib import Path

import torch

from common.checkpoint import load_model
from common.commandline import UserError, argument_parser, run_program
from experiments.pictures import boundaries_page, write
from sample import generate, prompt, scored

NEW_BYTES = 1000  # that --start generates


def main(argv=None):
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--out_dir", default="out", help="folder where train.py left ckpt.pt (%(default)s)")
    add("--html", metavar="FILE", required=True, help="the page to write")
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--score", metavar="FILE", help="show this file")
    add("--text", help="show this text")
    add("--start", help="continue this text and show the result; FILE:PATH reads it from a file")
    options = parser.parse_args(argv)
    model, _ = load_model(options.out_dir)
    torch.manual_seed(0)
    if options.start is not None:
        heading = f"generated after {options.start}"
        x = prompt(os.fsencode(options.start))
        stream = generate(model, x, NEW_BYTES, temperature=0.8, top_k=50)
    elif options.text is not None:
        heading = "given text"
        stream = scored(model, os.fsencode(options.text))
    else:
        heading = options.score
        stream = scored(model, Path(options.score).expanduser().read_bytes())
    steps = [(int(byte), bool(a), float(p), float(nats)) for byte, a, p, nats in stream]
    if not steps:
        raise UserError("the text is empty")
    write(Path(options.html).expanduser(), boundaries_page({heading: steps}))


if __name__ == "__main__":
    run_program(main)
