"""Measures what slows a script down and no setting can fix, by samples of its stack."""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections import defaultdict
from contextlib import ExitStack, suppress
from threading import Thread, get_ident
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path
from torch.utils.data import DataLoader

from advisor.cache.limit import Limit
from advisor.tuners.act.pilot.exchange import spans
from advisor.tuners.fingerprint import is_library

LOOK_STEPS, PROBE_S = 6, 2.0  # steps of each look; seconds of loading batches in this process
SHOWN_GAIN, SAMPLE_S = 1.02, 0.004  # smaller gains are not reported; seconds between two samples
GAP_US = 0.5  # between two kernels of a CUDA graph, on an H200 (benchmarks/results/checks.md)
WAITS = "called a synchronizing CUDA operation"
_Lines = tuple[tuple[str, int], ...]  # of a stack, the innermost first


class LimitObserver:
    """Observes a script from between two steps until `close`, in the thread that trains."""

    def __init__(self, calls: Any, loaders: Any, samples: int) -> None:
        self._calls, self._loaders, self._samples = calls, loaders, samples  # of a step
        self._sampled = defaultdict[tuple[str, int, _Lines], float](float)  # seconds: phase, step
        self._waits, self._called_at = set[tuple[str, int]](), ("", 0)
        self._given = defaultdict[str, list[torch.Tensor]](list)  # inputs that may be padded
        self._busy_s = self._sample_s = 0.0  # of the GPU in a step; of a sample, in a worker
        self._unwatched_s = 0.0  # of a step
        self._began = time.time()
        self._padded, self._aside, looks, self._step = ("", 0.0), "", self._look(), -1  # in a look
        self.end_step, self.close = looks.__next__, looks.close
        self.end_step()
        Thread(target=self._watch, args=(looks, get_ident()), daemon=True).start()

    def _look(self) -> Any:
        """Generator: goes on at the end of each step."""
        began = synchronized()
        yield from range(LOOK_STEPS)
        self._unwatched_s = (synchronized() - began) / LOOK_STEPS
        with warnings.catch_warnings(), ExitStack() as stack:
            warnings.filterwarnings("always", WAITS)
            warnings.showwarning = functools.partial(self._warned, warnings.showwarning)
            for call in self._calls:
                stack.callback(setattr, call, "act", call.act)
                call.act = functools.partial(self._keep, call.act)
            if torch.cuda.is_initialized():
                stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
                torch.cuda.set_sync_debug_mode("warn")
            yield from range(LOOK_STEPS)
        self._padded = padding(self._given)
        with suppress(Exception):  # the script may profile itself
            if torch.cuda.is_initialized():
                synchronized()
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
                    yield from range(LOOK_STEPS)
                _exchanges, work = spans(p.events(), of_gpu=True)
                busy_us = sum(end - start + GAP_US for start, end in work)
                self._busy_s = busy_us / 1e6 / LOOK_STEPS
        for self._step in range(sys.maxsize):
            yield

    def _keep(self, act: Any, *args: Any, **kwargs: Any) -> Any:
        for path, value in tree_flatten_with_path((args, kwargs))[0]:
            if torch.is_tensor(value) and value.dim() == 2 and not value.is_floating_point():
                self._given[str(path[-1]).strip("[]'")].append(value.detach().clone())
        (self._called_at,) = self._stack(sys._getframe())[1][:1] or [self._called_at]
        return act(*args, **kwargs)

    def _warned(self, shown: Any, message: Any, *more: Any) -> Any:
        if not str(message).startswith(WAITS):
            return shown(message, *more)
        self._waits.update(self._stack(sys._getframe())[1][:1])

    def _watch(self, looks: Any, main: int) -> None:
        before = time.perf_counter()
        while looks.gi_frame is not None:
            time.sleep(SAMPLE_S)
            now, frame = time.perf_counter(), sys._current_frames().get(main)
            if self._step >= 0:
                phase, lines = self._stack(frame)
                self._sampled[self._aside + phase, self._step, lines] += now - before
            before = now

    def _stack(self, frame: Any) -> tuple[str, _Lines]:
        """(The phase of the script, its own lines; for loading, those that load)."""
        trains = any(call.one.model.training for call in self._calls)
        phase, own, lines = "step" if trains else "evaluation", [], []
        while frame is not None:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            lines.append((file, frame.f_lineno or 0))
            if file[:1] != "<" and not is_library(file):
                own.append(lines[-1])
            elif trains and "torch/utils/data/" in file and name in ("fetch", "__next__"):
                return "loading", (*(own or lines),)
            elif name == "save" and file.endswith("torch/serialization.py"):
                phase = "checkpoint"
            frame = frame.f_back
        return phase, (*own,)

    def _phase(self, phase: str) -> tuple[dict[int, float], tuple[str, int], float]:
        """(Seconds by step, the innermost line with half of them or more, its share of them). Of an
        evaluation it is the outermost line that no training step has: not the model's own."""
        stacks, took, steps = (defaultdict[Any, float](float) for _ in range(3))
        trains = set[tuple[str, int]]()
        # Copied at once: the other thread goes on sampling.
        for (of, step, lines), seconds in self._sampled.copy().items():
            if of == "step":
                trains.update(lines)
            if of == phase:
                steps[step] += seconds
                stacks[lines] += seconds
                took |= {line: took[line] + seconds for line in lines}
        whole = sum(steps.values())
        usual = max(stacks, key=stacks.__getitem__, default=())
        found = [line for line in usual if took[line] >= whole / 2]
        evaluates = [one for one in found if one not in trains] if phase == "evaluation" else []
        at = next(iter((*evaluates[::-1], *found)), ("", 0))
        return steps, at, took[at] / whole if took[at] else 1.0

    def found(self) -> tuple[Limit, ...]:
        """What slows the script down. A step takes no less time than the GPU works in it."""
        self._aside, steps, feeding = "found ", max(1, self._step), self._loaders.feeding()
        loading, step_s = (sum(self._phase(n)[0].values()) / steps for n in ("loading", "step"))
        step_s += loading
        waits = loading > (SHOWN_GAIN - 1) * step_s and not self._sample_s
        if waits and getattr(feeding, "_num_workers", False):  # see the stacks of a worker
            loaded, began, collate = 0, time.perf_counter(), feeding._collate_fn
            with suppress(Exception):  # of any kind: the dataset may need a worker
                for _ in DataLoader(feeding._dataset, self._samples, collate_fn=collate):
                    loaded += self._samples
                    if time.perf_counter() > began + PROBE_S:
                        break
            self._sample_s = (time.perf_counter() - began) / loaded if loaded else 0.0
        sampled, busy = self._sampled.copy().items(), self._busy_s
        if self._unwatched_s:  # watched steps are slower, perhaps because a profiler was there
            busy *= max(1.0, (step_s - loading) / self._unwatched_s)
        _, at, share = self._phase("found loading" if self._sample_s else "loading")
        left = step_s - loading * share  # workers load while the step computes
        left = max(step_s - loading, step_s - step_s * share) if self._sample_s else left
        took = share * (self._sample_s or loading / self._samples)
        # What, its line, `Limit.seconds`, seconds with it, seconds without it.
        found = [("loading", at, took, step_s, max(left, busy))]
        for at in self._waits:
            took = sum(s for key, s in sampled if (key[0], *key[2][:1]) == ("step", at)) / steps
            found.append(("waiting for the GPU", at, took, step_s, max(step_s - took, busy)))
        took = (busy or step_s - loading) * self._padded[1]
        name = f"padding of input {self._padded[0]}"
        found.append((name, self._called_at, took, step_s, step_s - took))
        for phase in ("evaluation", "checkpoint"):
            seconds, at, _ = self._phase(phase)
            times, apart = len(seconds) or 1, max(seconds, default=0) - min(seconds, default=0)
            often_s = (apart / max(1, times - 1) or self._loaders.batches or steps) * step_s
            took = sum(seconds.values()) / times
            found.append((phase, at, took, took + often_s, often_s))
        for at, (what, compile_s) in recompilations(self._began).items():
            took = compile_s / (steps + 3 * LOOK_STEPS)
            found.append((f"recompiling {what}", at, took, step_s, step_s - took))
        left = min(step_s, busy + loading) if busy else step_s
        found.append(("an idle GPU", self._phase("step")[1], step_s - left, step_s, left))
        self._aside = ""
        return tuple(
            Limit(what=what, file=at[0], line=at[1], seconds=s, gain=gain)
            for what, at, s, whole, left in found
            if (gain := whole / max(left, whole / 1e3, 1e-9)) >= SHOWN_GAIN
        )


def synchronized() -> float:
    """The time, after all work of the GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def recompilations(since: float) -> dict[tuple[str, int], tuple[str, float]]:
    """What torch.compile has compiled again since a `time.time()`, by file and line: (its name and
    the guard that failed last, seconds)."""
    found: dict[tuple[str, int], tuple[str, float]] = {}
    dynamo = sys.modules.get("torch._dynamo.utils")
    for one in dynamo.get_compilation_metrics() if dynamo else ():
        if why := one.start_time >= since and one.recompile_reason:
            at = one.co_filename, one.co_firstlineno
            _id, _, guard = why.splitlines()[0].partition(": ")
            seconds = found.get(at, ("", 0.0))[1] + one.duration_us / 1e6
            found[at] = f"{one.co_name}: {guard}", seconds
    return found


def padding(given: dict[str, list[torch.Tensor]]) -> tuple[str, float]:
    """(The most padded input, the share of its positions that is padding). `given`: by name,
    integer or boolean tensors of shape (rows, positions). Padding is one value at an end of rows;
    the first may end the text. Zeros and ones count if the name has 'mask' or 'padding_mask'."""
    found = [("", 0.0)]
    for name, tensors in given.items():
        batches = [one.long().cpu() for one in tensors if one.numel()]
        binary = all(one.min() >= 0 and one.max() <= 1 for one in batches)
        for side in (0, -1) if batches and (not binary or "mask" in name) else ():
            value = int(torch.cat([one[:, side] for one in batches]).mode().values)
            value = int("padding" in name) if binary else value
            pads = [((n.flip(1) if side else n) == value).long().cumprod(1) for n in batches]
            if not any(bool(one.all(1).any()) for one in pads):
                padded = sum(int(one[:, 0 if binary else 1 :].sum()) for one in pads)
                found.append((name, padded / sum(one.numel() for one in pads)))
    return max(found, key=lambda one: one[1])
