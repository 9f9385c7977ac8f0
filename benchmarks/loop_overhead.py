"""Compares a loop through Advice with a hand-written loop that has the same settings.

    python benchmarks/loop_overhead.py examples/mnist.py --shape 8x1x28x28

A small model with a small batch is limited by the host, so every microsecond of Python shows.
Prints the time of the Advice loop as a multiple of the hand-written loop's, with a 99% interval,
and the same for a second hand-written loop, which shows this machine's noise.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record as results
import torch
from torch.nn import functional

from advisor.cache.config import Config
from advisor.tuners import target
from advisor.tuners.act.advice import Advice
from advisor.tuners.environment import default_device
from advisor.tuners.search.ratio import paired

CONFIGS: dict[str, dict[str, Any]] = {
    "default": {"precision": "default"},
    "channels_last": {"precision": "tf32", "channels_last": True},
    "bf16": {"precision": "bf16", "channels_last": True},
    "fp16": {"precision": "fp16"},
    "bf16, pinned": {"precision": "bf16", "channels_last": True, "pin_memory": True},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def advice_loop(advice: Advice, loaded: target.Loaded, batches: list[Any]) -> Callable[[], None]:
    model = advice.prepare(target.build(loaded))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, **advice.optimizer)

    def epoch() -> None:
        for x, y in advice.batches(batches):
            with advice.autocast():
                loss = functional.cross_entropy(model(x).flatten(1), y)
            advice.step(loss, optimizer)

    return epoch


def hand_loop(advice: Advice, loaded: target.Loaded, batches: list[Any]) -> Callable[[], None]:
    config, device = advice.config, advice.device
    model = target.build(loaded).to(device)
    layout = torch.channels_last if config.get("channels_last") else torch.preserve_format
    if config.get("channels_last"):
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    dtype = DTYPES.get(str(config["precision"]))
    scaler = torch.amp.GradScaler(device.type) if dtype is torch.float16 else None
    pinned = bool(config.get("pin_memory"))

    def epoch() -> None:
        for x, y in batches:
            x = x.to(device, memory_format=layout, non_blocking=pinned)
            y = y.to(device, non_blocking=pinned)
            with torch.autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext():
                loss = functional.cross_entropy(model(x).flatten(1), y)
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad(set_to_none=True)

    return epoch


def timed(epoch: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    epoch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--device", default=None)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each configuration")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    args = parser.parse_args()
    batch, *sample = map(int, args.shape.split("x"))
    device_name = args.device or default_device()
    loaded = target.load(target.parse(args.target), Config())
    rows = {}
    for name, values in CONFIGS.items():
        pinned = bool(values.get("pin_memory"))
        if device_name == "cpu" and (pinned or values["precision"] in ("tf32", "fp16")):
            continue
        advice = Advice(Config(values), device=device_name, batch_size=batch)
        advice.set_flags()
        classes = target.build(loaded)(torch.zeros(1, *sample)).flatten(1).shape[1]
        batches = [
            (torch.randn(batch, *sample), torch.randint(0, classes, (batch,))) for _ in range(8)
        ]
        if pinned:
            batches = [(x.pin_memory(), y.pin_memory()) for x, y in batches]
        device = torch.device(device_name)
        epochs = [make(advice, loaded, batches) for make in (hand_loop, advice_loop, hand_loop)]
        for epoch in epochs:
            epoch_s = [timed(epoch, device) for _ in range(5)][-1]
        # About 20 ms a turn: the machine hardly changes between short turns, and many average out.
        epoch_count = max(1, round(0.02 / epoch_s))
        turns: tuple[list[float], ...] = ([], [], [])
        began = time.perf_counter()
        while time.perf_counter() - began < args.seconds or len(turns[0]) < 10:
            order = (0, 1, 2) if len(turns[0]) % 2 == 0 else (2, 1, 0)
            for loop in order:
                spent_s = sum(timed(epochs[loop], device) for _ in range(epoch_count))
                turns[loop].append(spent_s / epoch_count / len(batches))
        advised, control = (paired(seconds, turns[0]) for seconds in turns[1:])
        rows[name] = {
            "by_hand_step_s": statistics.median(turns[0]),
            "x_by_hand": advised.mean,
            "low": advised.low,
            "high": advised.high,
            "control": control.mean,
            "control_low": control.low,
            "control_high": control.high,
            "turns": len(turns[0]),
        }
        print(
            f"{name:<14} by hand {rows[name]['by_hand_step_s'] * 1e6:10,.1f} us a step   through "
            f"Advice {advised.mean:.4f}x ({advised.low:.4f}-{advised.high:.4f})   by hand again "
            f"{control.mean:.4f}x ({control.low:.4f}-{control.high:.4f})"
        )
    path = results.append(
        "loop_overhead",
        {"target": args.target, "shape": args.shape, "device": device_name, "rows": rows},
        args.results,
    )
    print(f"appended to {path.name}")


if __name__ == "__main__":
    main()
