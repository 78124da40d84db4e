"""Settings of the whole process: torch's, and what ends a run."""
import signal
import threading
from contextlib import contextmanager

import torch

stop_signals = []  # Ctrl-C, schedulers and closed terminals add to it: the run saves and ends


def request_stop(number, _):
    stop_signals.append(number)
    signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C ends the program at once


def set_up_torch(device, dtype):
    """Sets torch up for training; returns the autocast context of the model's passes."""
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(device == "cpu")  # resumed runs repeat to the last bit
    torch.utils.deterministic.fill_uninitialized_memory = False
    return torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32")


@contextmanager
def restored():
    """Collects stop_signals. Afterwards, signals and torch's settings are as before.

    So a program or a notebook may call train.main.
    """
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    handlers = {}
    stop_signals.clear()
    if threading.current_thread() is threading.main_thread():  # others may not handle signals
        for name in {"SIGINT", "SIGTERM", "SIGHUP"} & {*dir(signal)}:  # Windows has no SIGHUP
            number = getattr(signal, name)
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                handlers[number] = signal.signal(number, request_stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill
