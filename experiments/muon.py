"""
The optimizer of the blocks' matrices: Muon, Jordan et al., 2024.

See https://kellerjordan.github.io/posts/muon. It is not part of the paper's method.
"""
from collections import defaultdict

import torch
import torch.nn.functional as F


def orthogonalized(G):
    """Brings the singular values of each matrix in G (n, rows, columns) near 1.

    It takes five Newton-Schulz iterations.
    """
    if G.size(1) > G.size(2):
        return orthogonalized(G.mT).mT  # so that X @ X.mT is the smaller product
    X = F.normalize(G, dim=(1, 2), eps=1e-7)
    for _ in range(5):
        A = X @ X.mT
        A = torch.baddbmm(A, A, A, beta=-4.775, alpha=2.0315)  # -4.775 A + 2.0315 A A
        X = torch.baddbmm(X, A, X, beta=3.4445)  # 3.4445 X + A X
    return X


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonalized momentum of matrices.

    The same as torch.optim.Muon with adjust_lr_fn="match_rms_adamw". We do not use that class: it
    always computes in bfloat16, which is slow on a T4 and twenty times slower on CPUs without
    AVX512, and updates one matrix at a time.
    """

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                by_shape[p.shape].append(p)
            for (rows, columns), matrices in by_shape.items():
                G = torch.stack([p.grad for p in matrices])
                state = self.state[matrices[0]]  # of all matrices of this shape
                momentum = state.setdefault("momentum", torch.zeros_like(G))
                momentum.lerp_(G, 0.05)
                update = orthogonalized(G.lerp(momentum, 0.95))  # Nesterov momentum
                size = 0.2 * max(rows, columns) ** 0.5
                for p, direction in zip(matrices, update):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(direction, alpha=group["lr"] * size)
