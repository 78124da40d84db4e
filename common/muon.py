"""Muon (Jordan et al., 2024), an optimizer for matrices: https://kellerjordan.github.io/posts/muon.

It is not part of the paper's method.
"""
from collections import defaultdict

import torch
import torch.nn.functional as F


# Each iteration maps a singular value s to a s + b s^3 + c s^5. These (a, b, c) bring all s from
# 0.01 to 1 within 0.27 of 1, each step minimizing the largest error that is left (Polar Express,
# arXiv 2505.16932). Muon's own coefficients need five iterations.
COEFFICIENTS = (
    (8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))


def orthogonalized(matrices, dtype):
    """Brings the singular values of each matrix in (n, rows, columns) near 1. Returns float32.

    It takes three Newton-Schulz iterations, whose matmuls are computed in dtype.
    """
    if matrices.size(1) > matrices.size(2):
        return orthogonalized(matrices.mT, dtype).mT  # so that the gram matrices are small
    z = F.normalize(matrices, dim=(1, 2), eps=1e-7).to(dtype)
    for a, b, c in COEFFICIENTS:
        gram = z @ z.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b gram + c gram^2
        z = torch.baddbmm(z, gram, z, beta=a)  # a z + gram z
    return z.float()


class MuonAdamW(torch.optim.AdamW):
    """Muon steps along the orthogonalized momentum of matrices. All else is torch's AdamW.

    Parameter groups with "muon": True are Muon's; a step removes their gradients. Their update is
    that of torch.optim.Muon with adjust_lr_fn="match_rms_adamw", except the coefficients. We do
    not use that class: it always computes in bfloat16, which is slow on a T4 and twenty times
    slower on CPUs without AVX512, and it updates one matrix at a time.
    """

    def __init__(self, groups, dtype):
        """groups as for torch's optimizers; dtype, that of Muon's matmuls."""
        super().__init__(groups, fused=True)  # torch's defaults are the paper's betas
        self.dtype = dtype
        # fused AdamW would itself look for overflows of float16, but Muon leaves that to GradScaler
        self._step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if group.get("muon"):
                self.muon_step(group)
        super().step()

    def muon_step(self, group):
        by_shape = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:  # it is None if p is frozen or was not used
                by_shape[p.shape].append(p)
        for (rows, columns), matrices in by_shape.items():
            for p in matrices:
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                    self.state[p]["step"] = torch.zeros(())  # AdamW loads no state without it
            grads = torch.stack([p.grad for p in matrices])
            momenta = [self.state[p]["momentum"] for p in matrices]
            # a GPU would take longer to start a kernel for each matrix than to run it
            torch._foreach_lerp_(momenta, grads.unbind(), 0.05)
            nesterov = grads.lerp(torch.stack(momenta), 0.95)
            update = orthogonalized(nesterov, self.dtype)
            size = 0.2 * max(rows, columns) ** 0.5
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(matrices, update.unbind(), alpha=group["lr"] * size)
            for p in matrices:
                p.grad = None  # AdamW skips it
