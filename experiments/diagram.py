"""
Draws the method as one picture: a text on its way through a trained model, the boundaries as the
model drew them, and the reward's way back to the policy.

    python experiments/diagram.py out/ckpt.pt assets/method.svg --text="for name in names:"
"""
import html
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments.compare import parser_of
from experiments.page import write
from model import load_checkpoint
from prepare import fail
from train import discounted_return, inputs_and_targets

LEFT, CELL, RIGHT, HEIGHT = 118, 21, 190, 440  # pixels: labels, a byte, the reward; the picture
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
LABELS = ((30, "bytes", "x"), (66, "encoder", "X, eq. 1"), (104, "policy", "p, a, eq. 2, 19-23"),
          (139, "second draw", "forward only"), (180, "select", "X', eq. 3, 7-8"),
          (222, "middle", "large; Y', eq. 4"), (266, "upsample", "Y = X + Y', eq. 5, 9"),
          (308, "decoder", "eq. 6"), (350, "next byte", "R = log p, eq. 15"))


@torch.no_grad()
def two_draws(model, text, gamma):
    """Two draws a (2, N) bool of a text, log p of each next byte (2, N), and G_1 (2,) in nats."""
    x, y = inputs_and_targets(np.array([list(text.encode("ascii"))], np.uint8))
    torch.manual_seed(1337)
    model.train()  # draws as in training: the soft-cap keeps exploring
    logp, _, _, a = model(x, y, torch.rand(2, *x.shape))
    return a[:, 0], logp[:, 0], discounted_return(logp[:, 0], gamma)[:, 1]


def words(x, y, content, kind):
    content = html.escape({" ": "␣", "\n": "⏎"}.get(content, content))
    return f'<text x="{x:g}" y="{y}" class="{kind}">{content}</text>'


def picture(text, a, logp, G):
    """The SVG; position i has read the bytes before text[i], <bos> first, and predicts text[i]."""
    N, right = len(text), LEFT + CELL * len(text)
    middle, x = (LEFT + right) / 2, [LEFT + CELL * (i + 0.5) for i in range(N)]
    drawn = [words(8, y, name, "") + words(8, y + 15, symbol, "small faint")
             for y, name, symbol in LABELS]
    for y, height, content in ((52, 30, "byte layers that see a few bytes back"), (202, 44, ""),
                               (294, 30, "byte layers")):
        drawn += [f'<rect class="layer" x="{LEFT}" y="{y}" width="{right - LEFT}" '
                  f'height="{height}" rx="6"/>', words(middle, y + 20, content, "mid")]
    for i in range(N):
        drawn += [words(x[i], 36, text[i - 1] if i else "bos", "byte" if i else "bos"),
                  words(x[i], 346, text[i], "byte"),
                  f'<rect x="{x[i] - 7}" y="354" width="14" class="bar" '
                  f'height="{min(40, max(1, -7 * logp[0, i])):.1f}"/>']
        for draw, y, opacity in (a[0], 106, 1), (a[1], 140, 0.5):
            kind = 'class="end" r="6.5"' if draw[i] else 'class="inside" r="2.5"'
            drawn += [f'<circle cx="{x[i]}" cy="{y}" opacity="{opacity}" {kind}/>']

    ends = a[0].nonzero()[:, 0].tolist()
    for k, (i, after) in enumerate(zip(ends, [*ends[1:], N])):  # a token is read from i to after
        at = round(LEFT + (right - LEFT) * (k + 0.5) / len(ends))
        drawn += [f'<path class="way" d="M{x[i]} 114C{x[i]} 165 {at} 155 {at} 208"/>',
                  f'<rect class="token" x="{at - 13}" y="210" width="26" height="28" rx="5"/>',
                  f'<path class="token" opacity=".55" d="M{at - 9} 246L{LEFT + CELL * i + 2} 292'
                  f'H{LEFT + CELL * after - 2}L{at + 9} 246"/>']

    A = (G[0] - G[1]).item()
    for y, content, kind in (
            (190, "return G, eq. 16, in nats", ""), (206, f"draw 1: {G[0]:.1f}", ""),
            (222, f"draw 2: {G[1]:.1f}", ""), (238, f"A = G1 - G2 = {A:+.1f}", "reward"),
            (254, f"make draw 1 {'likelier' if A > 0 else 'less likely'}:", "reward"),
            (270, "-log pi(a) A, eq. 18", "reward")):
        drawn += [words(right + 24, y, content, kind)]
    drawn += [f'<path class="back" d="M{right + 6} 372q64 0 64 -94m0 -104q0 -68 -54 -68"/>',
              f'<path class="reward" d="M{right + 6} 106l12 -5v10z"/>',
              words(middle, 412, "bars: what a byte cost, -log p", "mid small faint"),
              words(middle, 430, "no gradient passes the draw; "
                    "the reward weighs its log-probability instead", "mid small reward")]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + RIGHT} {HEIGHT}" '
            'role="img" aria-label="The method, from bytes to the reward">'
            f'<style>{STYLE}</style><rect width="100%" height="100%" class="paper"/>\n'
            + "\n".join(drawn) + "</svg>\n")


def main(argv):
    parser = parser_of(__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("picture")
    parser.add_argument("--text", default="raise ValueError(name + ' is')")
    options = parser.parse_args(argv)
    try:
        model, saved = load_checkpoint(options.checkpoint)
        if saved["config"]["boundaries"] != "learned" or len(options.text) < 2:
            raise ValueError("the checkpoint has to have learned boundaries, the text two bytes")
        draws = two_draws(model, options.text, saved["config"]["gamma"])
        write(options.picture, picture(options.text, *draws))
    except (OSError, ValueError) as error:
        fail(error)


if __name__ == "__main__":
    main(sys.argv[1:])
