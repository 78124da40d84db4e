"""FLOPs of training: those of all matmuls, as torch counts them, and the paper's count."""
import copy
import math
from contextlib import nullcontext

import torch
from torch.utils.flop_counter import FlopCounterMode

import train
from common.device import device_and_dtype

BYTES = 2**14  # so many are counted, because the number of tokens varies from row to row


def flops_per_byte(model, shards):
    """FLOPs of training a model on rows like those of the shards, per byte.

    Counts whole training steps of a copy: both passes and the optimizer's step. The rows, and the
    uniforms of the draws, are the same for all models. The model must not be compiled, because
    torch does not see the matmuls of compiled code.
    """
    device, _ = device_and_dtype("auto", "float32")
    model = copy.deepcopy(model).to(device).train()
    hp = model.hp
    optimizer = train.make_optimizer(model, hp, "float32")
    scaler = torch.amp.GradScaler(device, enabled=False)
    # code that is not compiled takes much memory
    batch_size = min(hp.batch_size, math.ceil(BYTES / hp.seq_len))
    first_rows = range(0, math.ceil(BYTES / hp.seq_len), hp.effective_batch_size)
    with FlopCounterMode(display=False) as counter:
        for first_row in first_rows:
            batches = train.micro_batches(
                shards, first_row, hp.effective_batch_size, batch_size, device=device)
            # at a learning rate of 0 the number of tokens stays
            train.training_step(model, batches, optimizer, 0.0, scaler, nullcontext(), hp)
    return counter.get_total_flops() / (len(first_rows) * hp.effective_batch_size * hp.seq_len)


def paper_flops_per_byte(model, rate):
    """Training FLOPs per byte as in the paper's Figures 3 and 4, at a rate in tokens per byte.

    6 per matrix parameter and byte (in the middle, per token), without the embedding.
    """
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.dim() == 2}
    middle = sum(size for name, size in sizes.items() if name.startswith("middle."))
    return 6 * (sum(sizes.values()) - sizes["embedding.weight"] - middle + rate * middle)
