"""Starts a training script with one config set by hand, without advisor.

    python benchmarks/others/wrapped.py --compile reduce-overhead --format bf16 train.py --epochs 9

The first module with weights that the script calls counts as the trained model, or each outermost
one with `--every`. Its calls in training go through autocast and torch.compile, if they have the
shapes of the first one; all others stay eager. With `--seconds` it is ended after so many seconds
of steps, the first of which do not count, and prints how many it made in a second. With `--profile`
it prints where the time of these steps goes: the GPU, waiting for the loader, anything else.
"""

from __future__ import annotations

import argparse
import functools
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
SETTLE_STEPS, SETTLE_S = 8, 2.0
"""Steps of the optimizers, and seconds, that do not count; for a profile, only the steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", choices=COMPILES, default="none")
    parser.add_argument("--format", choices=FORMATS, default="own")
    parser.add_argument("--layout", choices=LAYOUTS, default="own")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--fused", action="store_true", help="fused optimizers")
    parser.add_argument("--without", choices=OWN, help="what of the script's own is left out")
    parser.add_argument("--every", action="store_true", help="wrap every outermost model")
    parser.add_argument("--seconds", type=float, help="of steps, after which it is ended")
    parser.add_argument("--profile", action="store_true", help="profile the steps of --seconds")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.fused:
        fuse()
    if args.without:
        leave_out(args.without)
    if args.seconds:
        count_steps(args.seconds, Profile() if args.profile else None)
    if (args.compile, args.format, args.layout) != ("none", "own", "own"):
        wrap_called(args.compile, args.format, args.layout, every=args.every)
    sys.argv = [args.script, *args.arguments]
    sys.path[0] = str(Path(args.script).resolve().parent)
    runpy.run_path(args.script, run_name="__main__")


def wrap_called(compile_by: str, number_format: str, layout: str, *, every: bool) -> None:
    """Wraps the first module with weights that is called, or every outermost one, from its second
    call on."""
    parts: set[nn.Module] = set()

    def called(model: nn.Module, inputs: Any) -> None:
        if model in parts or next(model.parameters(), None) is None:
            return
        parts.update(model.modules())
        if not every:
            handle.remove()
        wrap(model, compile_by, number_format, layout)

    handle = register_module_forward_pre_hook(called)


def fuse() -> None:
    """Makes the optimizers of the script fused ones."""
    for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        optimizer.__init__ = functools.partialmethod(optimizer.__init__, fused=True)


def leave_out(own: str) -> None:
    """Has the script's own autocast or compilation do nothing."""
    if own == "compile":
        torch.compile = lambda model, *args, **kwargs: model
    else:
        torch.autocast = lambda *args, **kwargs: nullcontext()


class Profile:
    """The seconds in which the GPU runs a kernel, and in which loaders are waited for."""

    def __init__(self) -> None:
        from torch.utils.data import dataloader

        kinds = torch.profiler.ProfilerActivity
        kind = kinds.CUDA if torch.cuda.is_available() else kinds.CPU
        self._profiler = torch.profiler.profile(activities=[kind])
        self._waited_s = self._begun_s = 0.0
        take_next = dataloader._BaseDataLoaderIter.__next__

        def timed(loader: Any) -> Any:
            begun = time.perf_counter()
            try:
                return take_next(loader)
            finally:
                self._waited_s += time.perf_counter() - begun

        dataloader._BaseDataLoaderIter.__next__ = timed

    def start(self) -> None:
        synchronize()
        self._begun_s = self._waited_s
        self._profiler.start()

    def result(self, steps: int, wall_s: float) -> dict[str, float]:
        """Milliseconds of one step."""
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
        waited_s = self._waited_s - self._begun_s
        return {
            "step_ms": 1e3 * wall_s / steps,
            "gpu_busy_ms": 1e-3 * busy_us / steps,
            "loader_waited_ms": 1e3 * waited_s / steps,
            "kernels": len(spans) / steps,
        }


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def count_steps(seconds: float, profile: Profile | None = None) -> None:
    """Prints the steps per second of the script's optimizers after so many seconds, and ends it."""
    begun, first, steps = 0.0, 0.0, 0

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal begun, first, steps
        now, steps = time.perf_counter(), steps + 1
        first = first or now
        if not begun and steps >= SETTLE_STEPS and (profile or now - first >= SETTLE_S):
            if profile is not None:
                profile.start()
            begun, steps = time.perf_counter(), 0
        elif begun and now - begun >= seconds:
            found = {"steps_per_s": steps / (now - begun)}
            found |= profile.result(steps, now - begun) if profile is not None else {}
            print(json.dumps(found), flush=True)
            os._exit(0)

    register_optimizer_step_post_hook(stepped)


def wrap(model: nn.Module, compile_by: str, number_format: str, layout: str) -> None:
    if number_format == "tf32":
        torch.set_float32_matmul_precision("high")
    if layout == "channels_last":
        model.to(memory_format=torch.channels_last)
    model.forward = formatted(model.forward, number_format, layout)
    if compile_by != "none":
        plain = model._call_impl
        # The wrapper that `module(...)` asks first.
        model._compiled_call_impl = gated(model, plain, compiled(plain, compile_by))


def formatted(forward: Callable[..., Any], number_format: str, layout: str) -> Callable[..., Any]:
    """The forward under autocast, images in the layout of the weights, outputs in float32."""

    def images(value: Any) -> Any:
        is_image = isinstance(value, torch.Tensor) and value.dim() == 4
        return value.contiguous(memory_format=torch.channels_last) if is_image else value

    def single(value: Any) -> Any:
        is_half = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
        return value.float() if is_half else value

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if layout == "channels_last":
            args, kwargs = tree_map(images, (args, kwargs))
        with autocast(number_format):
            outputs = forward(*args, **kwargs)
        has_loss = isinstance(outputs, dict) and "loss" in outputs
        # Some losses refuse bf16; of outputs with a loss of their own only that is used.
        return tree_map(single, outputs) if number_format == "bf16" and not has_loss else outputs

    return run


def autocast(number_format: str) -> AbstractContextManager[Any]:
    if number_format != "bf16":
        return nullcontext()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # CUDA graphs must not hold casts that a cache frees.
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
    """Calls `fast` in training with one of the first signatures seen there, else `plain`."""
    expected: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not (model.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        signature = [described(leaf) for leaf in tree_leaves((args, kwargs))]
        if len(expected) < signatures and signature not in expected:
            expected.append(signature)
        return (fast if signature in expected else plain)(*args, **kwargs)

    return call


def described(leaf: Any) -> Any:
    """What compiled code was made for, of one argument."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf)


if __name__ == "__main__":
    main()
