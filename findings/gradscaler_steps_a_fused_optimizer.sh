#!/usr/bin/env bash
# torch 2.13.0: after an overflow, GradScaler.step skips an optimizer, but not one with fused=True.
#
# A fused optimizer gets the flag found_inf, calls its step all the same, and the fused kernel changes
# nothing. So whatever else a subclass does in step() happens with infinite gradients. Our Muon, which
# subclasses AdamW(fused=True), would have trained on them. The attribute _step_supports_amp_scaling
# decides; common/muon.py sets it to False.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
cat > program.py <<'END'
import torch


class Counting(torch.optim.AdamW):
    steps = 0

    def step(self):
        self.steps += 1
        super().step()


for fused in False, True:
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = Counting([p], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((p * torch.inf).sum()).backward()
    scaler.step(optimizer)
    print(f"fused={fused}: step was called {optimizer.steps} times, p is {p.tolist()}")
END
venv/bin/python program.py > output
cat output
diff output - <<'END'
fused=False: step was called 0 times, p is [1.0, 1.0]
fused=True: step was called 1 times, p is [1.0, 1.0]
END
