"""Captures the work of a training step on a device, and replays it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch


class Recorder:
    """Captures a step in one CUDA graph.

    A capture needs some steps on a side stream before it, buffers that keep their addresses, and
    code that neither waits for the device nor branches on its values:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
    """

    device = "cuda"

    @contextmanager
    def side_stream(self) -> Iterator[list[str]]:
        """For steps before a capture, and those compared with it. The list holds, afterwards, the
        lines of code that waited for the device."""
        side = _side_stream(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side), _noticing_waits() as waits:
                yield waits
        finally:
            torch.cuda.current_stream().wait_stream(side)

    def record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Run `step` once, changing no tensor that existed; returns its replay and its output,
        whose tensors each replay writes.

        Raises:
            RuntimeError: the step cannot be captured; nothing is left of the attempt.
        """
        graph = torch.cuda.CUDAGraph()
        side = _side_stream(torch.cuda.current_device())
        try:
            # thread_local: the thread that pins a DataLoader's memory goes on beside the capture.
            with (
                _without_collection(),
                torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),
            ):
                output = step()
        except BaseException:
            # A capture that succeeds ends the state in which a failed one leaves the generator.
            here = torch.zeros(1, device="cuda")
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                here.add_(1)
            raise
        return graph.replay, output

    def random_state(self) -> Any:
        return torch.get_rng_state(), torch.cuda.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1])

    def host_state(self) -> bytes:
        """Of torch's random numbers on the host, which a replay does not draw."""
        return torch.get_rng_state().numpy().tobytes()


RECORDERS: dict[str, Callable[[], Recorder]] = {"cuda": Recorder}
"""By the type of the device; on others a step is never captured."""


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep the garbage collector from ending another CUDA graph, which would break a capture (reset
    in PyTorch's CUDAGraph.cpp). PyTorch no longer collects before a capture."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@cache
def _side_stream(_device: int) -> torch.cuda.Stream:
    # One for all graphs: cuBLAS keeps tens of MiB for each stream that it was ever used on.
    return torch.cuda.Stream()


@contextmanager
def _noticing_waits() -> Iterator[list[str]]:
    """Lines of code that make the host wait for the device, as 'train.py:12'."""
    found: list[str] = []
    held = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(held)
    for warning in caught:
        said = str(warning.message)
        if "synchronizing CUDA operation" in said:
            found.append(f"{Path(warning.filename).name}:{warning.lineno}")
        elif not said.startswith("Synchronization debug mode is a prototype"):
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
