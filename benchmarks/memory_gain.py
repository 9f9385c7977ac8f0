"""fp8, and an optimizer with 8-bit state: step time and peak memory on one GPU.

    python benchmarks/memory_gain.py --seconds 150

Feed-forward blocks 4096 wide, compiled, in bf16 and in fp8; examples/gpt2.py compiled in bf16 with
torch's AdamW and torchao's of 8-bit state. Each in a process of its own, given up after `--most`
seconds; one JSON line a result, as they come. What one has compiled the next find: first steps are
no cold ones. Needs torchao.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record as results
import torch

from advisor.cache.config import Config, Value
from advisor.cache.task import Task
from advisor.tuners import target
from advisor.tuners.act.advice import Advice
from advisor.tuners.measure.workload import OPTIMIZER_FACTORIES, Workload

HERE = Path(__file__).resolve().parent
GPT2 = str(HERE.parent / "examples" / "gpt2.py:GPT2")
WIDE = str(HERE / "targets" / "wide.py:Wide")
TURN_S, TURNS = 0.5, 5
GIB = 2**30

Case = tuple[str, dict[str, Value], str]
CASES: dict[str, Case] = {
    "wide, bf16": ("wide", {}, "sgd"),
    "wide, fp8": ("wide", {"precision": "fp8"}, "sgd"),
    "gpt2, AdamW": ("gpt2", {}, "adamw"),
    "gpt2, 8-bit AdamW": ("gpt2", {}, "adamw8bit"),
}
"""By what is to be known first: there may not be the time for all."""


def task_of(model: str, optimizer: str, *, tiny: bool) -> Task:
    if model == "gpt2":
        shape = (1, 1024) if tiny else (8, 1024)
        given: dict[str, Any] = {"target": GPT2, "dtype": "int64", "vocab": 50304}
    else:
        shape = (4, 16, 2048) if tiny else (4, 2048, 4096)
        size = Config(layers=1, width=2048) if tiny else Config(layers=8, width=4096)
        given = {"target": WIDE, "model_args": size}
    return Task(shapes=(shape,), optimizer=optimizer, **given)


def add_8_bit() -> None:
    """Have a workload know torchao's AdamW, with the learning rate of torch's."""
    from torchao.optim import AdamW8bit

    OPTIMIZER_FACTORIES["adamw8bit"] = lambda parameters, **_how: AdamW8bit(parameters, lr=1e-4)


def measure(case: str, device: str) -> dict[str, Any]:
    """One case, in this process."""
    model, changes, optimizer = CASES[case]
    if optimizer == "adamw8bit":
        add_8_bit()
    cuda = device != "cpu"
    task = task_of(model, optimizer, tiny=not cuda)
    loaded = target.load(target.parse(task.target), task.model_args)
    config = Config({"precision": "bf16", "compile": "default", **changes}).at(task.batch)
    advice = Advice(config, device=device, batch_size=task.batch)
    begun = time.perf_counter()
    workload = Workload(loaded, task, advice, batch=task.batch, seed=0)

    def steps(count: int) -> float:
        """Seconds of one."""
        begun = time.perf_counter()
        for _ in range(count):
            workload.step()
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / count

    steps(1)
    first_s = time.perf_counter() - begun
    steps(2)
    assert workload.loss is not None
    loss = float(workload.loss)
    count = max(1, round(TURN_S / steps(2)))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    turns = sorted(steps(count) for _ in range(TURNS))
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return {
        "step_ms": round(1000 * turns[TURNS // 2], 3),
        "from_ms": round(1000 * turns[0], 3),
        "to_ms": round(1000 * turns[-1], 3),
        "peak_gib": round(peak / GIB, 3),
        "first_step_s": round(first_s, 1),
        "third_loss": round(loss, 5),
    }


def measured(case: str, device: str, caches: str, seconds: float) -> dict[str, Any]:
    """The same in a process of its own, that is ended after so long."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--one", case, "--device", device],
        env=os.environ
        | {"TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": f"{caches}/triton"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, told = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"failed": f"not within {seconds:.0f} s"}
    if process.returncode:
        return {"failed": next(iter(told.strip().splitlines()[-1:]), "")[:300]}
    found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--most", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    parser.add_argument("--one", metavar="CASE")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.device)))
        return
    deadline = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        for case in CASES:
            left_s = min(given.most, deadline - time.monotonic())
            found = {"failed": "no time was left"}
            if left_s > 0:
                found = measured(case, given.device, caches, left_s)
            line = {"case": case, "torch": torch.__version__, **found}
            print(json.dumps(line), flush=True)
            results.append("memory_gain", line, given.results)


if __name__ == "__main__":
    main()
