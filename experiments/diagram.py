"""
Draws the method as one picture: a sentence on its way through a trained model, its boundaries as the model drew them, and the way of
the reward back to the policy. Text is text, and the colours follow a light or a dark page.

    python experiments/diagram.py out/ckpt.pt assets/method.svg --text="return self.name + ' is closed'"
"""
import argparse
import html
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from model import BOS, load_checkpoint
from train import discounted_return, log_likelihood

LEFT, CELL, RIGHT = 118, 21, 190  # of the picture: labels, a byte, the reward
STYLE = """
svg { font: 13px ui-sans-serif, sans-serif; --ink: #1f2328; --faint: #6b7280; --paper: #ffffff; --layer: #dbe7f6; --token: #fbe3a5;
      --back: #b42318 }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6edf3; --faint: #9aa4b0; --paper: #0d1117; --layer: #1d3350; --token: #6b4f10; --back: #ff8a7a } }
text { fill: var(--ink) } .faint { fill: var(--faint) }
.mono { font-family: ui-monospace, monospace; text-anchor: middle } .mid { text-anchor: middle }
.back { fill: var(--back) } .layer { fill: var(--layer) } .token { fill: var(--token) } line, path { stroke: var(--faint); fill: none }
.draw { stroke: var(--ink); fill: none } .ends { stroke: var(--ink); fill: var(--ink) }
.reward { stroke: var(--back); stroke-width: 2 } .bar { fill: var(--faint) }
"""


@torch.no_grad()
def two_draws(model, text, gamma):
    """Of two draws a (2, N) bool, log p of each next byte (2, N) and the return G_1 (2,)."""
    y = torch.tensor([list(text)])
    x = torch.cat((torch.tensor([[BOS]]), y[:, :-1]), 1)
    logits, _, _, a = model.train()(x, u=torch.rand(2, *x.shape))  # drawn as in training, which keeps exploring
    logp = torch.stack([log_likelihood(z, y)[0] for z in logits])
    return a[:, 0].tolist(), logp.tolist(), discounted_return(logp, gamma)[:, 1].tolist()


def draw(text, a, logp, G):
    """The picture, an SVG. Position i has read the bytes before text[i], <bos> first, and predicts text[i]."""
    N, shapes = len(text), []
    x = [LEFT + CELL * (i + 0.5) for i in range(N)]
    right = LEFT + CELL * N
    tokens = [i for i in range(N) if a[0][i]]
    token_x = [LEFT + (right - LEFT) * (k + 0.5) / len(tokens) for k in range(len(tokens))]

    def add(tag, content=None, **attributes):
        listed = "".join(f' {key.rstrip("_").replace("_", "-")}="{round(v, 1) if isinstance(v, float) else v}"' for key, v in attributes.items())
        shapes.append(f"<{tag}{listed}/>" if content is None else f"<{tag}{listed}>{html.escape(content)}</{tag}>")

    def label(y, name, symbol):
        add("text", name, x=8, y=y)
        add("text", symbol, x=8, y=y + 15, class_="faint", font_size=11)

    def layer(y, height, words):
        add("rect", x=LEFT, y=y, width=right - LEFT, height=height, rx=6, class_="layer")
        add("text", words, x=(LEFT + right) / 2, y=y + height / 2 + 5, class_="mid")

    label(30, "bytes", "x")
    add("text", "bos", x=x[0], y=36, class_="mono faint", font_size=10)
    for i in range(1, N):
        add("text", {" ": "␣", "\n": "⏎"}.get(text[i - 1], text[i - 1]), x=x[i], y=36, class_="mono")
    layer(52, 30, "encoder: byte layers that see a few bytes back")
    label(66, "encoder", "X, eq. 1")
    label(106, "policy", "p, a, eq. 2, 19-23")
    label(138, "second draw", "forward only")
    for k, y in (0, 108), (1, 138):
        for i in range(N):
            add("circle", cx=x[i], cy=y, r=6.5 if a[k][i] else 2.5, class_="ends" if a[k][i] else "draw", opacity=1.0 if k == 0 else 0.5)
    label(186, "select", "X', eq. 3, 7-8")
    for i, there in zip(tokens, token_x):
        add("path", d=f"M{x[i]:.1f} 116 C{x[i]:.1f} 165 {there:.1f} 155 {there:.1f} 200")
    layer(200, 44, "")
    label(216, "middle", "big, and sees")
    add("text", "all tokens; Y', eq. 4", x=8, y=246, class_="faint", font_size=11)
    ends = [*tokens[1:], N]
    for k, (i, end, there) in enumerate(zip(tokens, ends, token_x)):
        add("rect", x=there - 13, y=208, width=26, height=28, rx=5, class_="token")
        low, high = LEFT + CELL * i, LEFT + CELL * end
        add("path", d=f"M{there - 9:.1f} 244 L{low + 2:.1f} 292 L{high - 2:.1f} 292 L{there + 9:.1f} 244", class_="token", opacity=0.55)
    label(276, "upsample", "Y = X + Y', eq. 5, 9")
    layer(294, 30, "decoder: byte layers")
    label(308, "decoder", "eq. 6")
    label(352, "next byte", "R = log p, eq. 15")
    for i in range(N):
        add("text", {" ": "␣", "\n": "⏎"}.get(text[i], text[i]), x=x[i], y=346, class_="mono")
        add("rect", x=x[i] - 7, y=354, width=14, height=max(1.0, min(40.0, -7 * logp[0][i])), class_="bar")
    add("text", "bars: what a byte cost, -log p", x=(LEFT + right) / 2, y=410, class_="mid faint", font_size=11)
    add("path", d=f"M{right + 6} 372 C{right + 70} 372 {right + 70} 300 {right + 70} 262", class_="reward")
    add("path", d=f"M{right + 70} 176 C{right + 70} 120 {right + 50} 108 {right + 8} 108", class_="reward", marker_end="url(#head)")
    for row, words in enumerate((f"draw 1: G = {G[0]:.1f} nats", f"draw 2: G = {G[1]:.1f} nats", f"A = {G[0] - G[1]:+.1f}, eq. 16",
                                 "make draw 1 " + ("likelier" if G[0] > G[1] else "less likely"), "-log pi(a) A, eq. 18")):
        add("text", words, x=right + 24, y=192 + 16 * row, class_="back" if row > 1 else "")
    add("text", "no gradient passes the draw; the reward weighs its log-probability instead",
        x=right - 4, y=426, class_="back", text_anchor="end", font_size=11)
    width = right + RIGHT
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 436" role="img" aria-label="The method, from bytes to the reward">'
            f"<style>{STYLE}</style><defs><marker id=\"head\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"5\" markerHeight=\"5\" "
            f'orient="auto"><path d="M0 0 L8 4 L0 8 Z" style="fill:var(--back);stroke:none"/></marker></defs>'
            f'<rect width="{width}" height="436" style="fill:var(--paper)"/>' + "\n".join(shapes) + "</svg>\n")


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: sys.exit(f"diagram.py: {message}")
    parser.add_argument("checkpoint")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--text", default="return self.name + ' is closed'")
    parser.add_argument("--seed", type=int, default=1337, help="of the draws")
    options = parser.parse_args(argv)
    try:
        model, saved = load_checkpoint(options.checkpoint)
        if model.config.boundaries != "learned" or len(options.text) < 2:
            raise ValueError(f"{options.checkpoint} has to hold a model of learned boundaries, and --text={options.text!r} two characters")
        torch.manual_seed(options.seed % 2**64)
        a, logp, G = two_draws(model, options.text.encode("ascii"), saved["config"]["gamma"])
        options.picture.write_text(draw(options.text, a, logp, G), encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"diagram.py: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
