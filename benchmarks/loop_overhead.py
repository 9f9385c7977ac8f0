"""What Advice costs in a loop: the same loop written by hand with the same settings, in turn.

    python benchmarks/loop_overhead.py examples/mnist.py --shape 8x1x28x28

A small model at a small batch is bound by the host, where every microsecond of Python shows.
Prints the loop through Advice as a multiple of the loop by hand, with its 99% interval, and the
same for a second loop by hand: what this machine's noise alone makes of no difference.
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


def by_advice(advice: Advice, loaded: target.Loaded, batches: list[Any]) -> Callable[[], None]:
    model = advice.prepare(target.build(loaded))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, **advice.optimizer)

    def epoch() -> None:
        for x, y in advice.batches(batches):
            with advice.autocast():
                loss = functional.cross_entropy(model(x).flatten(1), y)
            advice.step(loss, optimizer)

    return epoch


def by_hand(advice: Advice, loaded: target.Loaded, batches: list[Any]) -> Callable[[], None]:
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
    given = parser.parse_args()
    batch, *sample = map(int, given.shape.split("x"))
    where = given.device or default_device()
    loaded = target.load(target.parse(given.target), Config())
    rows = {}
    for name, values in CONFIGS.items():
        pinned = bool(values.get("pin_memory"))
        if where == "cpu" and (pinned or values["precision"] in ("tf32", "fp16")):
            continue
        advice = Advice(Config(values), device=where, batch_size=batch)
        advice.set_flags()
        classes = target.build(loaded)(torch.zeros(1, *sample)).flatten(1).shape[1]
        made = [
            (torch.randn(batch, *sample), torch.randint(0, classes, (batch,))) for _ in range(8)
        ]
        if pinned:
            made = [(x.pin_memory(), y.pin_memory()) for x, y in made]
        device = torch.device(where)
        epochs = [make(advice, loaded, made) for make in (by_hand, by_advice, by_hand)]
        for epoch in epochs:
            once = [timed(epoch, device) for _ in range(5)][-1]
        # About 20 ms a turn: short turns see the same machine, many of them average it.
        epoch_count = max(1, round(0.02 / once))
        turns: tuple[list[float], ...] = ([], [], [])
        began = time.perf_counter()
        while time.perf_counter() - began < given.seconds or len(turns[0]) < 10:
            order = (0, 1, 2) if len(turns[0]) % 2 == 0 else (2, 1, 0)
            for which in order:
                spent = sum(timed(epochs[which], device) for _ in range(epoch_count))
                turns[which].append(spent / epoch_count / len(made))
        ours, control = (paired(seen, turns[0]) for seen in turns[1:])
        rows[name] = {
            "by_hand_step_s": statistics.median(turns[0]),
            "x_by_hand": ours.mean,
            "low": ours.low,
            "high": ours.high,
            "control": control.mean,
            "control_low": control.low,
            "control_high": control.high,
            "turns": len(turns[0]),
        }
        print(
            f"{name:<14} by hand {rows[name]['by_hand_step_s'] * 1e6:10,.1f} us a step   through "
            f"Advice {ours.mean:.4f}x ({ours.low:.4f}-{ours.high:.4f})   by hand again "
            f"{control.mean:.4f}x ({control.low:.4f}-{control.high:.4f})"
        )
    path = results.append(
        "loop_overhead",
        {"target": given.target, "shape": given.shape, "device": where, "rows": rows},
        given.results,
    )
    print(f"appended to {path.name}")


if __name__ == "__main__":
    main()
