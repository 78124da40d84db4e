"""The device and the dtype that a program runs on."""
import os
import platform

import torch

from common.commandline import UserError, say


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
