"""
Draws the method as one picture: a text on its way through a trained model, two draws of its
boundaries, and the reward's way back to the policy.

    python -m experiments.diagram out/ckpt.pt assets/method.svg --text="for name in names:"
"""
import html

import numpy as np
import torch

from config.terminal import argument_parser, fail, one_line_errors
from experiments.page import write
from model import inputs_and_targets, load_checkpoint
from train import discounted_return

LEFT = 118  # pixels for the labels
CELL = 21  # pixels for a byte
STYLE = """
svg { font: 13px ui-sans-serif, sans-serif; --ink: #1f2328; --faint: #6b7280; --paper: #ffffff;
  --layer: #dbe7f6; --token: #fbe3a5; --reward: #b42318 }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --faint: #9aa4b0; --paper: #0d1117;
  --layer: #1d3350; --token: #6b4f10; --reward: #ff8a7a } }
.paper { fill: var(--paper) } .layer { fill: var(--layer) } .token { fill: var(--token) }
text, .end { fill: var(--ink) } .faint, .bar { fill: var(--faint) } .reward { fill: var(--reward) }
.small { font-size: 11px } .mid, .byte, .bos { text-anchor: middle }
.byte, .bos { font-family: monospace } .bos { font-size: 10px; fill: var(--faint) }
.way { stroke: var(--faint); fill: none } .inside { stroke: var(--ink); fill: none }
.back { stroke: var(--reward); stroke-width: 2; fill: none }
"""
LABELS = """
<text x="8" y="30">bytes</text><text x="8" y="45" class="small faint">x</text>
<text x="8" y="66">encoder</text><text x="8" y="81" class="small faint">X, eq. 1</text>
<text x="8" y="104">policy</text><text x="8" y="119" class="small faint">p, a, eq. 2, 19-23</text>
<text x="8" y="139">second draw</text><text x="8" y="154" class="small faint">forward only</text>
<text x="8" y="180">select</text><text x="8" y="195" class="small faint">X', eq. 3, 7-8</text>
<text x="8" y="222">middle</text><text x="8" y="237" class="small faint">large; Y', eq. 4</text>
<text x="8" y="266">upsample</text>
<text x="8" y="281" class="small faint">Y = X + Y', eq. 5, 9</text>
<text x="8" y="308">decoder</text><text x="8" y="323" class="small faint">eq. 6</text>
<text x="8" y="350">next byte</text><text x="8" y="365" class="small faint">R = log p, eq. 15</text>
"""


@torch.no_grad()
def two_draws(model, text, gamma):
    """Two draws a (2, N) bool of a text, log p of each next byte (2, N), and G_1 (2,) in nats."""
    x, y = inputs_and_targets(np.array([list(text.encode("ascii"))], np.uint8))
    torch.manual_seed(1337)
    model.train()  # as in training, the soft-cap keeps p from 0 and 1
    logp, _, _, a = model(x, y, torch.rand(2, *x.shape))
    return a[:, 0], logp[:, 0], discounted_return(logp[:, 0], gamma)[:, 1]


def letter(x, y, byte, kind="byte"):
    shown = {" ": "␣", "\n": "⏎"}.get(byte, html.escape(byte))
    return f'<text x="{x}" y="{y}" class="{kind}">{shown}</text>'


def picture(text, a, logp, G):
    """The SVG. Position i has read the bytes before text[i], <bos> first, and predicts text[i]."""
    N = len(text)
    width = CELL * N
    right = LEFT + width
    center = LEFT + width / 2
    A = (G[0] - G[1]).item()
    likelier = "likelier" if A > 0 else "less likely"
    svg = f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + 190} 440"
role="img" aria-label="The method, from bytes to the reward"><style>{STYLE}</style>
<rect width="100%" height="100%" class="paper"/>{LABELS}
<rect class="layer" x="{LEFT}" y="52" width="{width}" height="30" rx="6"/>
<text x="{center}" y="72" class="mid">byte layers that see a few bytes back</text>
<rect class="layer" x="{LEFT}" y="202" width="{width}" height="44" rx="6"/>
<rect class="layer" x="{LEFT}" y="294" width="{width}" height="30" rx="6"/>
<text x="{center}" y="314" class="mid">byte layers</text>
<text x="{center}" y="412" class="mid small faint">bars: the cost of a byte, -log p</text>
<text x="{center}" y="430" class="mid small reward">no gradient passes through the draw;
the reward weighs its log-probability instead</text>
<g transform="translate({right})">
<text x="24" y="190">return G, eq. 16, in nats</text>
<text x="24" y="206">draw 1: {G[0]:.1f}</text>
<text x="24" y="222">draw 2: {G[1]:.1f}</text>
<text x="24" y="238" class="reward">A = G1 - G2 = {A:+.1f}</text>
<text x="24" y="254" class="reward">make draw 1 {likelier}:</text>
<text x="24" y="270" class="reward">-log pi(a) A, eq. 18</text>
<path class="back" d="M6 372q64 0 64 -94m0 -104q0 -68 -54 -68"/>
<path class="reward" d="M6 106l12 -5v10z"/></g>
"""
    svg += letter(LEFT + CELL / 2, 36, "bos", "bos")
    for i in range(N):
        x = LEFT + CELL * (i + 0.5)
        if i > 0:
            svg += letter(x, 36, text[i - 1])
        svg += letter(x, 346, text[i])
        height = min(max(-7 * logp[0, i], 1), 40)
        svg += f'<rect class="bar" x="{x - 7}" y="354" width="14" height="{height:.1f}"/>\n'
        for k, y, opacity in (0, 106, 1), (1, 140, 0.5):
            kind = 'class="end" r="6.5"' if a[k, i] else 'class="inside" r="2.5"'
            svg += f'<circle cx="{x}" cy="{y}" opacity="{opacity}" {kind}/>'

    ends = a[0].nonzero()[:, 0].tolist()
    for k, (i, after) in enumerate(zip(ends, [*ends[1:], N])):  # bytes i to after read token k
        x = LEFT + CELL * (i + 0.5)
        at = round(LEFT + width * (k + 0.5) / len(ends))
        svg += f"""<path class="way" d="M{x} 114C{x} 165 {at} 155 {at} 208"/>
<rect class="token" x="{at - 13}" y="210" width="26" height="28" rx="5"/>
<path class="token" opacity=".55" d="M{at - 9} 246L{LEFT + CELL * i + 2} 292
H{LEFT + CELL * after - 2}L{at + 9} 246"/>
"""
    return svg + "</svg>\n"


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoint", help="of train.py, with learned boundaries")
    parser.add_argument("picture", help="the .svg to write")
    parser.add_argument("--text", default="raise ValueError(name + ' is')")
    options = parser.parse_args(argv)
    with one_line_errors():
        model, saved = load_checkpoint(options.checkpoint)
        if saved["config"]["boundaries"] != "learned" or len(options.text) < 2:
            fail("use a checkpoint with learned boundaries and a text of two bytes or more")
        draws = two_draws(model, options.text, saved["config"]["gamma"])
        write(options.picture, picture(options.text, *draws))


if __name__ == "__main__":
    main()
