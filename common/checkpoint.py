"""Reads and writes train.py's checkpoints."""
from pathlib import Path

import torch

from common.commandline import UserError


def write_checkpoint(path, saved):
    """Writes a checkpoint. A crash or a full disk leaves the one before it as it was."""
    path = path.resolve()  # a link stays one
    part = path.with_suffix(".part")
    try:
        with open(part, "wb") as file:
            torch.save(saved, file)
        part.replace(path)
    except (OSError, RuntimeError) as error:  # torch's own error hides the OSError
        part.unlink(missing_ok=True)
        raise UserError(
            f"cannot write {path} (is the disk full?): {error.__context__ or error}") from error


def checkpoint_path(path):
    """The path of a checkpoint; of a folder, that of the checkpoint in it."""
    path = Path(path).expanduser()
    return path / "ckpt.pt" if path.is_dir() or path.suffix != ".pt" else path


def read_checkpoint(path):
    """What train.py saved, on the CPU. UserError if it is missing or damaged.

    path is the file or its folder.
    """
    path = checkpoint_path(path)
    if not path.exists():
        raise UserError(f"there is no checkpoint {path}; train.py writes one")
    try:
        with open(path, "rb") as file:  # torch cannot open a path that is not UTF-8
            saved = torch.load(file, map_location="cpu", weights_only=True)
        saved["config"]["system"], saved["model"].keys()  # other files lack them
    except (OSError, MemoryError):
        raise
    except Exception as error:  # damaged bytes can raise nearly anything
        if "allocate memory" in str(error):
            raise
        raise UserError(f"{path} is damaged, or is no checkpoint of train.py") from error
    return saved
