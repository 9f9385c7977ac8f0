"""Counts the FLOPs of one step with torch's FlopCounterMode, which changes no number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from advisor.cache.config import Config
from advisor.tuners.act.compiled import graphs_compiled
from advisor.tuners.act.hooks import Patch, in_backward
from advisor.tuners.act.pilot.loop_observer import RngState
from advisor.tuners.act.pilot.switch import ModelCall
from advisor.tuners.faults import failure

_COMPILES = "the script compiles, and an eager step would train on other numbers"
# Operators without a formula that may compute much: these of aten, and all of other namespaces.
_HEAVY = ("rnn", "cdist", "fft_", "linalg_", "grouped_mm", "int_mm")
_OWN = ("aten", "c10d", "_c10d_functional", "fsdp", "prim", "prims", "profiler")


class _Counter(FlopCounterMode):
    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker: Any = nullcontext()  # torch's own puts hooks on the script's tensors
        self.total, self.convolutions, self.create_graph = 0.0, 0.0, False
        self.unknown: dict[str, None] = {}  # an ordered set

    def _count_flops(self, operator: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if in_backward() and torch.is_grad_enabled() and not self.create_graph:
            return out  # activation checkpointing calls a part of the model again
        name = str(operator)
        if operator in self.flop_registry:
            flops = self.flop_registry[operator](*args, **kwargs, out_val=out)
            self.total += flops
            self.convolutions += flops if "convolution" in name else 0
        elif name.partition(".")[0] not in _OWN or any(part in name for part in _HEAVY):
            self.unknown[name] = None
        return out


class StepFlops:
    """Counts the training calls of models, and their backward, from now on until `end`. Calls of
    activation checkpointing in backward do not count, as usual for MFU (PaLM, Chowdhery et al.
    2022, appendix B). Compiled code runs eagerly meanwhile; in a `real` run it is not counted."""

    def __init__(self, calls: Sequence[ModelCall], *, real: bool) -> None:
        self._counter, self._ends, self._real = _Counter(), ExitStack(), real
        self._why = _COMPILES if real and graphs_compiled() else ""
        for call in calls:
            self._ends.callback(setattr, call, "act", call.act)
            call.act = partial(self._call, call.act)
        self._ends.callback(Patch(torch.autograd, "backward", self._backward).remove)
        if triton := sys.modules.get("triton.runtime.jit"):  # a launch of a kernel is no operator
            self._ends.callback(Patch(triton.JITFunction, "run", self._launched).remove)

    def end(self, samples: int) -> Config:
        """For one of the step's `samples`: `flops`, and `convolved`, those of convolutions. And
        `uncounted`: operators without a formula, or why there is no count."""
        self._ends.close()
        found, names = self._counter, ", ".join(self._counter.unknown)
        if self._why or not found.total or not samples:
            return Config(uncounted=self._why or names or "no operator with a formula was seen")
        flops, convolved = found.total / samples, found.convolutions / samples
        return Config(flops=flops, convolved=convolved, uncounted=names)

    def _call(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._counter.mode is not None or self._why:  # within another call, or in backward
            return act(*args, **kwargs)
        rng = RngState()
        try:
            eager = nullcontext() if self._real else torch.compiler.set_stance("force_eager")
            with eager, self._counter:
                return act(*args, **kwargs)
        except Exception as exc:  # of any kind: the call is repeated without a count
            self._why = failure(exc)[1]
        rng.restore()
        return act(*args, **kwargs)

    def _backward(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._counter.create_graph = bool(kwargs.get("create_graph", args[3:4] == (True,)))
        with nullcontext() if self._counter.mode is not None or self._why else self._counter:
            return plain(*args, **kwargs)

    def _launched(self, plain: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if self._counter.mode is not None:
            self._counter.unknown[f"triton.{kernel.__name__}"] = None
        return plain(kernel, *args, **kwargs)
