"""Which hyperparameters of train.py can be used."""
import numpy as np

from common.commandline import UserError


def check(hp, processes=1):
    """Raises UserError, which names the fix, if these hyperparameters cannot be used."""
    def need(condition, message):
        if not condition:
            raise UserError(message)

    for name in (
            "seq_len", "embedding_dim", "num_heads", "attention_window", "policy_scale",
            "policy_softcap", "training_bytes", "effective_batch_size", "batch_size", "grad_clip",
            "log_interval", "eval_interval", "eval_rows"):
        need(getattr(hp, name) > 0, f"{name}={getattr(hp, name)} must be above 0")
    for name, value in vars(hp).items():
        need(isinstance(value, str) or value >= 0, f"{name}={value} must not be negative")
    need(hp.embedding_dim % (2 * hp.num_heads) == 0,
         f"embedding_dim={hp.embedding_dim} must be a multiple of 2 * num_heads, "
         f"{2 * hp.num_heads}, because RoPE rotates pairs")
    rate = np.float32(hp.downsample_rate_target)  # as the model sees it: 0.99999999 becomes 1
    need(0.5 / hp.seq_len < rate < 1,
         f"downsample_rate_target={hp.downsample_rate_target} is tokens per byte, for example 1/5; "
         f"it must be above 0.5 / seq_len, {0.5 / hp.seq_len:.2g}, and below 1")
    need(hp.policy_window <= 12, f"policy_window={hp.policy_window} must be at most 12, because a "
         "draw needs 2^policy_window numbers per byte")
    need(hp.gamma <= 1, f"gamma={hp.gamma} must be from 0 to 1")
    need(hp.effective_batch_size % processes == 0,
         f"effective_batch_size={hp.effective_batch_size} must be a multiple of the number of "
         f"processes, {processes}; change one of them")
    need(hp.effective_batch_size % (hp.batch_size * processes) == 0,
         f"effective_batch_size={hp.effective_batch_size} must be a multiple of batch_size="
         f"{hp.batch_size} times the number of processes, {processes}; change batch_size")
    if hp.system == "learned":
        need(hp.batch_size * processes > 1,
             "batch_size=1 leaves eq. 17 no other rows to compare with; use 2 or more")
        need(hp.lambda_early > 0,
             "lambda_early=0.0 would not train the baseline of eq. 15; use e.g. 0.1")
    need(hp.seed < 2**63, f"seed={hp.seed} must be below 2**63")
    need(hp.dtype in ("auto", "float32", "bfloat16", "float16"),
         f"dtype={hp.dtype!r} must be auto, float32, bfloat16 or float16")
