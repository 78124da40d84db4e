"""Muon (Jordan et al., 2024), an optimizer for matrices: https://kellerjordan.github.io/posts/muon.

It is not part of the paper's method.
"""
from collections import defaultdict

import torch
import torch.nn.functional as F


def orthogonalized(matrices, dtype):
    """Brings the singular values of each matrix in (n, rows, columns) near 1. Returns float32.

    It takes five Newton-Schulz iterations, whose matmuls are computed in dtype. Three with Polar
    Express's coefficients (arXiv 2505.16932) lift small singular values less, and were 0.04 bits
    worse (uniform tokens, C, 3.2M parameters).
    """
    if matrices.size(1) > matrices.size(2):
        return orthogonalized(matrices.mT, dtype).mT  # so that the gram matrices are small
    z = F.normalize(matrices, dim=(1, 2), eps=1e-7).to(dtype)
    for _ in range(5):  # a singular value s becomes 3.4445 s - 4.775 s^3 + 2.0315 s^5
        gram = z @ z.mT
        gram = torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
        z = torch.baddbmm(z, gram, z, beta=3.4445)  # 3.4445 z + gram z
    return z.float()


class MuonAdamW(torch.optim.AdamW):
    """Muon steps along the orthogonalized momentum of matrices. All else is torch's AdamW.

    Parameter groups with "muon": True are Muon's; a step removes their gradients. Their update is
    that of torch.optim.Muon with adjust_lr_fn="match_rms_adamw". We do not use that class: it
    always computes in bfloat16, which is slow on a T4 and twenty times slower on CPUs without
    AVX512, and it updates one matrix at a time.
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
