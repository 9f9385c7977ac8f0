"""Measures step time and peak memory with fp8, and with an 8-bit optimizer, on one GPU.

    python benchmarks/memory_gain.py --seconds 150

The cases: compiled feed-forward blocks, 4096 wide, in bf16 and in fp8; examples/gpt2.py, compiled
in bf16, with torch's AdamW and with torchao's 8-bit AdamW. Each runs in its own process for at most
`--most` seconds and adds one JSON line. They share a compile cache, so
their first steps are not cold. Needs torchao.
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
"""The most important come first, as there may not be time for all."""


def task_of(model: str, optimizer: str, *, tiny: bool) -> Task:
    if model == "gpt2":
        shape = (1, 1024) if tiny else (8, 1024)
        args: dict[str, Any] = {"target": GPT2, "dtype": "int64", "vocab": 50304}
    else:
        shape = (4, 16, 2048) if tiny else (4, 2048, 4096)
        size = Config(layers=1, width=2048) if tiny else Config(layers=8, width=4096)
        args = {"target": WIDE, "model_args": size}
    return Task(shapes=(shape,), optimizer=optimizer, **args)


def register_8bit_adamw() -> None:
    """Makes torchao's 8-bit AdamW available to workloads, with the learning rate of torch's."""
    from torchao.optim import AdamW8bit

    OPTIMIZER_FACTORIES["adamw8bit"] = lambda parameters, **_how: AdamW8bit(parameters, lr=1e-4)


def measure(case: str, device: str) -> dict[str, Any]:
    """Measures a case in this process."""
    model, changes, optimizer = CASES[case]
    if optimizer == "adamw8bit":
        register_8bit_adamw()
    cuda = device != "cpu"
    task = task_of(model, optimizer, tiny=not cuda)
    loaded = target.load(target.parse(task.target), task.model_args)
    config = Config({"precision": "bf16", "compile": "default", **changes}).at(task.batch)
    advice = Advice(config, device=device, batch_size=task.batch)
    begun = time.perf_counter()
    workload = Workload(loaded, task, advice, batch=task.batch, seed=0)

    def seconds_per_step(count: int) -> float:
        """Makes some steps. Returns the seconds of one."""
        begun = time.perf_counter()
        for _ in range(count):
            workload.step()
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / count

    seconds_per_step(1)
    first_s = time.perf_counter() - begun
    seconds_per_step(2)
    assert workload.loss is not None
    loss = float(workload.loss)
    count = max(1, round(TURN_S / seconds_per_step(2)))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    turns = sorted(seconds_per_step(count) for _ in range(TURNS))
    peak_bytes = torch.cuda.max_memory_allocated() if cuda else 0
    return {
        "step_ms": round(1000 * turns[TURNS // 2], 3),
        "from_ms": round(1000 * turns[0], 3),
        "to_ms": round(1000 * turns[-1], 3),
        "peak_gib": round(peak_bytes / GIB, 3),
        "first_step_s": round(first_s, 1),
        "third_loss": round(loss, 5),
    }


def measure_in_process(case: str, device: str, caches: str, seconds: float) -> dict[str, Any]:
    """Measures a case in a new process, which is killed after `seconds`."""
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
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"failed": f"timed out after {seconds:.0f} s"}
    if process.returncode:
        return {"failed": next(iter(errors.strip().splitlines()[-1:]), "")[:300]}
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--most", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    parser.add_argument("--one", metavar="CASE")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.device)))
        return
    deadline = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        for case in CASES:
            left_s = min(args.most, deadline - time.monotonic())
            result = {"failed": "no time left"}
            if left_s > 0:
                result = measure_in_process(case, args.device, caches, left_s)
            line = {"case": case, "torch": torch.__version__, **result}
            print(json.dumps(line), flush=True)
            results.append("memory_gain", line, args.results)


if __name__ == "__main__":
    main()
