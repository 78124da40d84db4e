"""
What learning the boundaries costs while they are not learned yet: trains a new model on the boundaries that a trained one
draws, from the first byte on.

    python experiments/teacher.py out/ckpt.pt --out_dir=out-taught          any flag of train.py after the checkpoint

The boundaries are drawn by the trained model's policy as it stands; the new model's own decides nothing. Its bits per byte
against the trained model's is what the run lost before its boundaries were good.
"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import train
from model import load_checkpoint


def main(argv):
    if not argv or argv[0].startswith("--"):
        sys.exit("teacher.py: no teacher; name a checkpoint of train.py first")
    try:
        teacher, _ = load_checkpoint(argv[0])
    except (OSError, ValueError) as error:
        sys.exit(f"teacher.py: {error}")
    if teacher.config.boundaries != "learned":
        sys.exit(f"teacher.py: {argv[0]} has boundaries={teacher.config.boundaries!r}; name a checkpoint with learned ones")
    fetch = train.fetch

    @torch.no_grad()
    def fetch_with_boundaries(shards, rows):
        x, y, _ = fetch(shards, rows)
        return x, y, teacher.boundaries(teacher.read(teacher.encode(x))[1], torch.rand(x.shape))

    train.fetch = fetch_with_boundaries
    train.main([*argv[1:], "--boundaries=random"])  # which takes boundaries that are given


if __name__ == "__main__":
    main(sys.argv[1:])
