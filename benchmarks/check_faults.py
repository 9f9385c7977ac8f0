"""Plant faults in a user's own script, and see whether `advisor check` finds each of them.

    python benchmarks/check_faults.py                 # all, on the GPU if there is one
    python benchmarks/check_faults.py norms schedule  # some

Prints a line for each script: the exit code, the seconds, and the faults that were named. A clean
script must end with 0, a faulty one with 1. `norms` needs a GPU and torch 2.10 to 2.14: it is the
reproducer of https://github.com/pytorch/pytorch/issues/193061.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
has = set(sys.argv[1].split("+")).__contains__
torch.manual_seed(0)


class Less(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 0.9 * gradient


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(64, width), nn.Linear(width, width)
        self.last, self.rate = nn.Linear(width, 8), 0.2 if has("dropout") else 0.0

    def forward(self, x):
        hidden = functional.dropout(self.first(x).relu(), self.rate, self.training)
        return self.last(self.second(hidden).relu())


class Norms(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 8)
        self.table = nn.Parameter(torch.randn(1, 4, width) / width**0.5)

    def forward(self, x):
        shift, scale, moved, factor = self.table.chunk(4, dim=1)
        x = functional.layer_norm(self.first(x)[None], scale.shape[2:]) * (1 + scale) + shift
        return self.last(functional.layer_norm(x, scale.shape[2:]) * (1 + factor) + moved)[0]


class SkipsDecay(torch.optim.AdamW):
    def step(self, closure=None):
        decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0.0
        super().step(closure)
        for group, decay in zip(self.param_groups, decays):
            group["weight_decay"] = decay


def backend(graph, examples):
    stale = {}

    def run(*args):
        given = list(args)
        for at, one in enumerate(given):
            if isinstance(one, torch.Tensor) and one.dim() == 2 and one.shape[0] == one.shape[1]:
                old = stale.setdefault(at, one.detach().clone())
                if has("layer"):
                    given[at] = Less.apply(one)
                if has("stale"):
                    given[at] = one + (old - one).detach()
        return graph(*given)

    return run


width = 1024 if DEVICE == "cuda" else 64
net = (Norms if has("norms") else Net)(width).to(DEVICE)
model = net
if has("layer") or has("stale"):
    model = torch.compile(net, backend=backend)
elif has("compile") or has("norms"):
    model = torch.compile(net)
kind = SkipsDecay if has("decay") else torch.optim.AdamW
optimizer = kind(net.parameters(), lr=1e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scaler = torch.amp.GradScaler(DEVICE, enabled=has("fp16") and not has("unscaled"))
dtype = torch.float16 if has("fp16") else torch.bfloat16
rows = 2**15 if has("norms") and DEVICE == "cuda" else 256
for epoch in range(10**6):
    for x in torch.utils.data.DataLoader(torch.randn(8 * rows, 64), rows):
        x = x.to(DEVICE)
        with torch.autocast(DEVICE, dtype, enabled=has("bf16") or has("fp16")):
            output = model(x)
            loss = functional.cross_entropy(output, (x[:, :8] > 1).long().argmax(1))
            if has("half"):
                loss = output.abs().mean(dtype=output.dtype)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if not has("schedule"):
        schedule.step()
"""
CLEAN = ("plain", "bf16", "fp16", "dropout", "compile", "compile+bf16", "compile+bf16+dropout")
FAULTY = (
    *("layer", "layer+bf16", "stale", "stale+bf16", "decay", "fp16+unscaled", "bf16+half"),
    *("schedule", "compile+bf16+schedule", "norms"),
)


def main(chosen: list[str]) -> int:
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        for name in chosen or (*CLEAN, *FAULTY):
            words = [sys.executable, str(script), name]
            check = [sys.executable, "-m", "advisor", "check", "--quiet", "--json", "--cache"]
            began = time.perf_counter()
            done = subprocess.run([*check, folder, "--", *words], capture_output=True, text=True)
            found = json.loads(done.stdout) if done.stdout else {"faults": [done.stderr.strip()]}
            right = done.returncode == (name in FAULTY) and bool(done.stdout)
            missed += not right
            faults = found.get("faults", [done.stderr.strip()])
            said = "; ".join(faults) or found["numerics"]
            took_s = time.perf_counter() - began
            print(f"{'' if right else 'MISSED '}{name}: {done.returncode}, {took_s:.0f} s: {said}")
            print(f"    without its own settings: {found.get('without')}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
