#!/usr/bin/env bash
# torch 2.13.0: a compiled module is compiled a second time when it is called under no_grad.
#
# torch.compile guards on whether gradients are on. So the usual evaluation under torch.no_grad()
# compiles every layer again, for the same shapes and values, and a training run waits twice. train.py
# evaluates with gradients on, and keeps no graph.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
cd "$tmp"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
cat > program.py <<'END'
import torch
from torch._dynamo.testing import CompileCounter

counter = CompileCounter()
layer = torch.nn.Linear(3, 3)
compiled = torch.compile(layer, backend=counter)
x = torch.randn(2, 3)
y = compiled(x)
print("training:", counter.frame_count, "graph")
compiled(x)
print("again:", counter.frame_count, "graph")
with torch.no_grad():
    same = torch.equal(compiled(x), y)
print(f"under no_grad: {counter.frame_count} graphs, the same result: {same}")
END
venv/bin/python program.py > output
cat output
diff output - <<'END'
training: 1 graph
again: 1 graph
under no_grad: 2 graphs, the same result: True
END
