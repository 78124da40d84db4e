"""Wildcards, files that are written whole, and folders that belong to one process."""
import os
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from common.commandline import UserError


def matches(path):
    """The paths, a list, that an absolute path or glob stands for. ** does not follow links."""
    if path.exists():
        return [path]
    return [*Path(path.anchor).glob(str(path.relative_to(path.anchor)))]


def write_text(path, text):
    """Writes a text file, completely or not at all. Raises OSError."""
    path = Path(path).resolve()  # a link stays one
    part = Path(f"{path}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def locked(folder):
    """Locks a folder, or raises UserError if another run holds it.

    Makes the folder if it does not exist; if it is still empty at the end, removes it again.
    """
    new = not os.path.exists(folder)
    try:
        with FileLock(f"{folder}/.lock", timeout=0):
            try:
                yield
            finally:
                if new and os.path.exists(folder) and os.listdir(folder) == [".lock"]:
                    Path(folder, ".lock").unlink()
                    Path(folder).rmdir()
    except Timeout:
        raise UserError(f"another process is writing to {folder}; wait, or use another folder. If "
                        f"none is, a killed one left {folder}/.lock: remove it")
