"""Runs a training script with at most so much GPU memory, and reports its speed and its peak.

    STEPS=300 REPORT=out.json python capped.py 24 train.py --batch-size 64

The first argument is in GiB; 0: no limit. With STEPS, the script ends after so many steps of its
optimizer. REPORT gets a line of JSON: seconds per step from step 50 (SKIP) on, the peak, and with
LOSSES=1 every loss, for which each step waits for the GPU.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

GIB = 2**30
# Steps before the timed ones: the advice is in force after the first four.
SKIPPED = int(os.environ.get("SKIP", 50))


class Meter:
    def __init__(self, steps: int, report: str) -> None:
        self.steps, self.report = steps, report
        self.done, self.began, self.losses = 0, 0.0, list[float]()

    def stepped(self, *_: Any) -> None:
        self.done += 1
        if self.done == SKIPPED:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.began = time.perf_counter()
        elif self.done == self.steps:
            torch.cuda.synchronize()
            self.tell((time.perf_counter() - self.began) / (self.done - SKIPPED))
            sys.exit(0)

    def tell(self, step_s: float) -> None:
        line = {
            "steps": self.done,
            "step_s": round(step_s, 5),
            "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 3),
            "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3),
            "losses": self.losses,
        }
        with Path(self.report).open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    limit, script = float(sys.argv[1]), sys.argv[2]
    if limit:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(limit * GIB / total)
    meter = Meter(int(os.environ.get("STEPS", 0)), os.environ.get("REPORT", os.devnull))
    if meter.steps:
        register_optimizer_step_post_hook(meter.stepped)
    if os.environ.get("LOSSES"):
        plain = torch.autograd.backward

        def backward(loss: Any, *args: Any, **kwargs: Any) -> None:
            meter.losses.append(float(loss))
            plain(loss, *args, **kwargs)

        torch.autograd.backward = backward
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
