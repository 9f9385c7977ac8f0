"""FLOPs, MFU and joules of `advisor tune` against a count by hand and nvidia-smi.

    python benchmarks/cost.py [WIDTH] [SECONDS]

The model is a stack of linear layers, so that nearly all time goes into matrix products. The same
loop then runs without advisor for as long: its samples/s give the MFU by hand, and nvidia-smi's
power, sampled meanwhile, the joules. Run it alone on the GPU. Without a GPU only FLOPs compare.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

LAYERS, BATCH = 6, 4096
SCRIPT = """
import sys, time, torch
from torch import nn
width, batch, layers, seconds = map(int, sys.argv[1:])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high")
model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(device)
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
x, began, steps = torch.randn(batch, width, device=device), 0.0, -10
while steps < 1 or time.perf_counter() - began < seconds:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    steps += 1
    if device == "cuda" and steps % 10 == 0:
        torch.cuda.synchronize()
    began = time.perf_counter() if steps == 0 else began
if device == "cuda":
    torch.cuda.synchronize()
ended = time.perf_counter()
print(steps * batch / (ended - began), began, ended)
"""


def main() -> None:
    width, seconds = (int(word) for word in (sys.argv[1:] + ["8192", "20"][len(sys.argv) - 1 :]))
    batch = BATCH if width >= 1024 else 64
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        run = [sys.executable, str(script), *map(str, (width, batch, LAYERS))]
        words = ["--budget", f"{seconds}s", "--no-compile", "--json", "--cache", f"dir:{folder}"]
        tune = [sys.executable, "-m", "advisor", "tune", *words, "--", *run, "100000"]
        found = subprocess.run(tune, stdout=subprocess.PIPE, check=True).stdout
        loop = subprocess.Popen([*run, str(seconds)], stdout=subprocess.PIPE)
        watts = powers(loop)
        assert loop.stdout is not None
        rate, began, ended = map(float, loop.stdout.read().split())
    record = json.loads(found)["record"]
    flops = 2 * width * width * (3 * LAYERS - 1)  # the first layer's input needs no gradient
    print(f"FLOPs of a sample: {record['cost']['flops']:.6g}, by hand {flops:.6g}")
    from advisor.cache.codec import from_plain
    from advisor.cache.record import Record
    from advisor.cost import mfu, peak_of

    kept = from_plain(
        Record, {name: record[name] for name in record if name not in ("id", "script")}
    )
    own, row = kept.baseline, peak_of(kept.key.environment.device)
    print(f"samples/s: {own.samples_per_s:.5g}, by itself {rate:.5g}")
    if row:
        by_hand = flops * rate / (1e12 * float(row["tf32"]))
        print(f"MFU: {mfu(kept, own.config, own.samples_per_s):.4f}, by hand {by_hand:.4f}")
    timed = [watt for at, watt in watts if began + 1 < at < ended]
    by_smi = statistics.mean(timed) / rate if timed else float("nan")
    print(f"J/sample: {own.joules:.5g}, nvidia-smi {by_smi:.5g}")


def end_with(one: subprocess.Popen[bytes], other: subprocess.Popen[bytes]) -> None:
    other.wait()
    one.kill()


def powers(loop: subprocess.Popen[bytes]) -> list[tuple[float, float]]:
    """Returns what nvidia-smi reports while a process runs: times of `time.perf_counter`, which
    Linux shares among processes, and watts; [] without a GPU."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=power.draw.instant", "--format=csv,noheader,nounits"]
    found = list[tuple[float, float]]()
    with contextlib.suppress(OSError):
        watch = subprocess.Popen([*query, "-i", gpu, "-lms", "100"], stdout=subprocess.PIPE)
        threading.Thread(target=end_with, args=(watch, loop), daemon=True).start()
        assert watch.stdout is not None
        found += [(time.perf_counter(), float(line)) for line in watch.stdout]
    return found


if __name__ == "__main__":
    main()
