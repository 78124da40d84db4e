"""
The optimizer: AdamW, and Muon (Jordan et al., 2024) for the matrices of the blocks.

See https://kellerjordan.github.io/posts/muon. Muon is not part of the paper's method.
"""
from collections import defaultdict

import torch
import torch.nn.functional as F


def make_optimizer(model, hp):
    """An optimizer of all parameters, in four groups; some may be empty.

    A group's "peak" is its peak learning rate, from which training_step sets its "lr".
    """
    vectors, policy, blocks, others = [], [], [], []
    for name, p in model.named_parameters():
        if p.dim() < 2:
            vectors.append(p)
        elif name.startswith("policy."):
            policy.append(p)
        elif hp.muon_learning_rate and name.startswith(("down.", "middle.", "up.")):
            blocks.append(p)
        else:
            others.append(p)
    lr, decay = hp.learning_rate, hp.weight_decay
    groups = [
        {"params": vectors, "peak": lr, "weight_decay": 0, "muon": False},
        {"params": policy, "peak": hp.policy_learning_rate, "weight_decay": 0, "muon": False},
        {"params": blocks, "peak": hp.muon_learning_rate, "weight_decay": decay, "muon": True},
        {"params": others, "peak": lr, "weight_decay": decay, "muon": False}]
    return MuonAdamW(groups, fused=True)  # torch's defaults are the paper's betas


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


class MuonAdamW(torch.optim.AdamW):
    """Muon steps along the orthogonalized momentum of matrices. All else is torch's AdamW.

    A step removes the gradients of Muon's matrices. Their update is that of torch.optim.Muon with
    adjust_lr_fn="match_rms_adamw". We do not use that class: it always computes in bfloat16, which
    is slow on a T4 and twenty times slower on CPUs without AVX512, and it updates one matrix at a
    time.
    """

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if group["muon"]:
                self.muon_step(group)
        super().step()

    def muon_step(self, group):
        by_shape = defaultdict(list)
        for p in group["params"]:
            by_shape[p.shape].append(p)
        for (rows, columns), matrices in by_shape.items():
            G = torch.stack([p.grad for p in matrices])
            state = self.state[matrices[0]]  # of all matrices of this shape
            if not state:
                state["momentum"] = torch.zeros_like(G)
                state["step"] = torch.zeros(())  # unused, but AdamW cannot load a state without it
            momentum = state["momentum"].lerp_(G, 0.05)
            update = orthogonalized(G.lerp(momentum, 0.95)).float()  # Nesterov momentum
            size = 0.2 * max(rows, columns) ** 0.5
            # a GPU would take longer to start a kernel for each matrix than to run it
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(matrices, update.unbind(), alpha=group["lr"] * size)
            for p in matrices:
                p.grad = None  # AdamW skips it
