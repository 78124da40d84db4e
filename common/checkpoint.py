"""Devices, train.py's checkpoints, and the models in them."""
import os
import platform
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import torch

from common.commandline import UserError, say
from model import Model


def cpu_has_bfloat16():
    """Whether this CPU has instructions for bfloat16, and torch's oneDNN may use them."""
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    may = any(name in isa for name in ("ALL", "DEFAULT", "BF16", "FP16", "AMX"))
    return may and bool(torch.cpu.get_capabilities().get("avx512_bf16"))  # no Mac has it


def device_and_dtype(device, dtype):
    """The device type and the dtype that "auto" stands for. UserError if torch lacks the device."""
    available = [kind for kind in ("cuda", "mps", "cpu") if getattr(torch, kind).is_available()]
    if device == "auto":
        device = available[0]
    if device not in available:
        raise UserError(f"device={device!r} must be auto or one that torch finds: {available}")
    if dtype == "auto":
        dtype = "float32"
        if device == "cuda":
            dtype = "float16"  # T4 and V100 lack bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False):
                dtype = "bfloat16"
        elif cpu_has_bfloat16():
            dtype = "bfloat16"
    slow = dtype == "float16" or dtype == "bfloat16" and not cpu_has_bfloat16()
    if slow and device == "cpu" and platform.machine() in ("x86_64", "AMD64"):
        say(f"{dtype} is many times slower than float32 on this CPU; use --dtype=float32")
    return device, dtype


def save_checkpoint(path, saved):
    """Writes a checkpoint. A crash or a full disk leaves the one before it as it was."""
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
        saved["config"]["system"], saved["model"].keys()
    except Exception as error:  # damaged bytes can raise nearly anything
        raise UserError(f"{path} is damaged, or is no checkpoint of train.py") from error
    return saved


def versions(device, dtype):
    """What log.jsonl records about the code and the machine; the commit is "" outside of git."""
    command = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty", "--exclude=*"]
    git = subprocess.run(command, capture_output=True, text=True) if shutil.which("git") else None
    return {"commit": git.stdout.strip() if git else "", "torch": torch.__version__,
            "device": device, "dtype": dtype}


def make_model(hp):
    """A new model of hp.system; hp has an attribute for each hyperparameter. Or UserError."""
    if hp.system == "learned":
        return Model(hp)
    try:
        from experiments.systems import make_system  # here, so that experiments/ may be deleted
    except ModuleNotFoundError as error:
        raise UserError(f"system={hp.system!r} needs the folder experiments/: {error}") from error
    return make_system(hp)


def load_weights(model, saved, path):
    """Loads the weights that train.py saved in path. UserError if they are not this model's."""
    for key in (
            "system", "embedding_dim", "n_down_layers", "n_mid_layers", "n_up_layers",
            "policy_window", "num_heads", "seq_len"):  # the last two change no weight's shape
        old, new = saved["config"].get(key), getattr(model.hp, key)
        if new != old:
            raise UserError(f"{key} cannot change; it was {old!r} in {path}, now it is {new!r}")
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError as error:  # it lists all parameters
        raise UserError(f"{path} does not fit the model, whose code has changed") from error


def load_model(path):
    """The saved model, in evaluation mode on the CPU, and the checkpoint. Raises UserError."""
    saved = read_checkpoint(path)
    try:
        model = make_model(SimpleNamespace(**saved["config"]))
    except AttributeError as error:  # a hyperparameter that did not exist
        raise UserError(f"another version of train.py wrote {path}: {error}") from error
    load_weights(model, saved, path)
    return model.eval(), saved
