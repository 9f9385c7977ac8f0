"""Runs a training script with a given config, without advisor.

    python benchmarks/others/wrapped.py --compile reduce-overhead --format bf16 train.py --epochs 9

The first module with weights that the script calls is taken for the trained model; with `--every`,
each outermost module is. Its training calls use autocast and torch.compile if their shapes are
those of the first call; all others stay eager. With `--seconds`, the script warms up, runs for so
many seconds, prints its steps per second and quantiles of a step's time, and is ended. With
`--profile`, it also prints how long the GPU was busy, and how long the script waited for data.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves, tree_map

COMPILES = ("none", "default", "reduce-overhead", "cudagraphs")
FORMATS = ("own", "tf32", "bf16")
LAYOUTS = ("own", "channels_last")
OWN = ("autocast", "compile")
SETTLE_STEPS = 8
"""Warm-up: at least so many optimizer steps, and `--settle` seconds if there is no profile."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", choices=COMPILES, default="none")
    parser.add_argument("--format", choices=FORMATS, default="own")
    parser.add_argument("--layout", choices=LAYOUTS, default="own")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--fused", action="store_true", help="fused optimizers")
    parser.add_argument("--without", choices=OWN, help="what the script must not use")
    parser.add_argument("--every", action="store_true", help="wrap every outermost model")
    parser.add_argument("--seconds", type=float, help="end after measuring this long")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds to warm up before")
    parser.add_argument("--profile", action="store_true", help="profile the steps of --seconds")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.fused:
        fuse()
    if args.without:
        disable(args.without)
    if args.seconds:
        count_steps(args.seconds, args.settle, Profile() if args.profile else None)
    if (args.compile, args.format, args.layout) != ("none", "own", "own"):
        wrap_called(args.compile, args.format, args.layout, every=args.every)
    sys.argv = [args.script, *args.arguments]
    sys.path[0] = str(Path(args.script).resolve().parent)
    runpy.run_path(args.script, run_name="__main__")


def wrap_called(compile_by: str, number_format: str, layout: str, *, every: bool) -> None:
    """Wraps the first module with weights that is called, or all outermost ones with `every`. The
    first call of a module stays unwrapped."""
    parts: set[nn.Module] = set()

    def on_call(model: nn.Module, inputs: Any) -> None:
        if model in parts or next(model.parameters(), None) is None:
            return
        parts.update(model.modules())
        if not every:
            handle.remove()
        wrap(model, compile_by, number_format, layout)

    handle = register_module_forward_pre_hook(on_call)


def fuse() -> None:
    """Makes the script's optimizers fused."""
    for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        optimizer.__init__ = functools.partialmethod(optimizer.__init__, fused=True)


def disable(feature: str) -> None:
    """Disables the script's own autocast or compilation."""
    if feature == "compile":
        torch.compile = lambda model, *args, **kwargs: model
    else:
        torch.autocast = lambda *args, **kwargs: nullcontext()


class Profile:
    """Measures how long the GPU runs kernels, and how long the script waits for loaders."""

    def __init__(self) -> None:
        from torch.utils.data import dataloader

        kinds = torch.profiler.ProfilerActivity
        kind = kinds.CUDA if torch.cuda.is_available() else kinds.CPU
        self._profiler = torch.profiler.profile(activities=[kind])
        self._waited_s = self._began_s = 0.0
        take_next = dataloader._BaseDataLoaderIter.__next__

        def timed_next(loader: Any) -> Any:
            began = time.perf_counter()
            try:
                return take_next(loader)
            finally:
                self._waited_s += time.perf_counter() - began

        dataloader._BaseDataLoaderIter.__next__ = timed_next

    def start(self) -> None:
        synchronize()
        self._began_s = self._waited_s
        self._profiler.start()

    def result(self, steps: int, wall_s: float) -> dict[str, float]:
        """Ends the profile. Returns milliseconds per step, and kernels per step."""
        synchronize()
        self._profiler.stop()
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in self._profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        busy_us, until = 0.0, 0.0
        for start, end in spans:  # kernels of several streams overlap
            busy_us += max(0.0, end - max(start, until))
            until = max(until, end)
        waited_s = self._waited_s - self._began_s
        return {
            "step_ms": 1e3 * wall_s / steps,
            "gpu_busy_ms": 1e-3 * busy_us / steps,
            "loader_waited_ms": 1e3 * waited_s / steps,
            "kernels": len(spans) / steps,
        }


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def count_steps(seconds: float, settle_s: float, profile: Profile | None = None) -> None:
    """After `seconds` of optimizer steps, prints their speed and ends the script."""
    began, first, steps = 0.0, 0.0, 0
    ends: list[float] = []

    def on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal began, first, steps
        now, steps = time.perf_counter(), steps + 1
        ends.append(now)
        first = first or now
        if not began and steps >= SETTLE_STEPS and (profile or now - first >= settle_s):
            if profile is not None:
                profile.start()
            began, steps = time.perf_counter(), 0
            ends.clear()
        elif began and now - began >= seconds:
            times = sorted(1e3 * (end - start) for start, end in itertools.pairwise(ends))
            result: dict[str, Any] = {"steps_per_s": steps / (now - began)}
            result["step_ms_quantiles"] = [times[int(q * len(times))] for q in QUANTILES if times]
            result |= profile.result(steps, now - began) if profile is not None else {}
            print(json.dumps(result), flush=True)
            os._exit(0)

    register_optimizer_step_post_hook(on_step)


def wrap(model: nn.Module, compile_by: str, number_format: str, layout: str) -> None:
    if number_format == "tf32":
        torch.set_float32_matmul_precision("high")
    if layout == "channels_last":
        model.to(memory_format=torch.channels_last)
    model.forward = formatted(model.forward, number_format, layout)
    if compile_by != "none":
        plain = model._call_impl
        # `module(...)` calls this attribute instead of `_call_impl`, if it is set.
        model._compiled_call_impl = gated(model, plain, compiled(plain, compile_by))


def formatted(forward: Callable[..., Any], number_format: str, layout: str) -> Callable[..., Any]:
    """Wraps a forward: autocast, images in the layout of the weights, outputs in float32."""

    def to_channels_last(value: Any) -> Any:
        is_image = isinstance(value, torch.Tensor) and value.dim() == 4
        return value.contiguous(memory_format=torch.channels_last) if is_image else value

    def to_fp32(value: Any) -> Any:
        is_half = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
        return value.float() if is_half else value

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if layout == "channels_last":
            args, kwargs = tree_map(to_channels_last, (args, kwargs))
        with autocast(number_format):
            outputs = forward(*args, **kwargs)
        has_loss = isinstance(outputs, dict) and "loss" in outputs
        # Some loss functions refuse bf16. If the outputs have a loss, nothing else is used.
        return tree_map(to_fp32, outputs) if number_format == "bf16" and not has_loss else outputs

    return run


def autocast(number_format: str) -> AbstractContextManager[Any]:
    if number_format != "bf16":
        return nullcontext()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # CUDA graphs must not refer to casts that autocast's cache frees.
    return torch.autocast(device, torch.bfloat16, cache_enabled=False)


def compiled(plain: Callable[..., Any], compile_by: str) -> Callable[..., Any]:
    if compile_by == "cudagraphs":
        return torch.compile(plain, backend="cudagraphs")
    return torch.compile(plain, mode=compile_by)


def gated(
    model: nn.Module,
    plain: Callable[..., Any],
    fast: Callable[..., Any],
    signatures: int = 1,
) -> Callable[..., Any]:
    """Calls `fast` in training if the signature is among the first ones seen, else `plain`."""
    expected: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not (model.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        signature = [signature_of(leaf) for leaf in tree_leaves((args, kwargs))]
        if len(expected) < signatures and signature not in expected:
            expected.append(signature)
        return (fast if signature in expected else plain)(*args, **kwargs)

    return call


def signature_of(leaf: Any) -> Any:
    """Returns the part of a signature that describes one argument."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf)


if __name__ == "__main__":
    main()
