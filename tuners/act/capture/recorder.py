"""What records the work of a training step on a device, and does it again."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch


class Recorder(Protocol):
    """Records what a function does to tensors, so that it can be done again without its Python."""

    device: str
    """'cuda': whose tensors it can hold."""

    def side_stream(self) -> AbstractContextManager[list[str]]:
        """For steps before a recording, and those that are compared with it. Yields a list that
        holds, afterwards, the lines of code that waited for the device."""

    def record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """What does the same again, and what `step` returned: tensors that it writes into.

        `step` runs once and changes no tensor that was there before.

        Raises:
            RuntimeError: the step does what cannot be recorded; nothing is left of the attempt.
        """

    def random_state(self) -> Any:
        """Of the numbers that steps draw on the device."""

    def set_random_state(self, state: Any) -> None: ...

    def host_state(self) -> bytes:
        """Of torch's numbers that are drawn on the host, and would stand still in a replay."""

    def empty(self) -> None:
        """Give back what memory is no longer used."""


class CudaRecorder:
    """One CUDA graph.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs says what a capture needs: some
    steps before it on another stream, buffers that stay where they are, and nothing that waits for
    the device or decides on its values.
    """

    device = "cuda"

    @contextmanager
    def side_stream(self) -> Iterator[list[str]]:
        side = _stream_of(torch.cuda.current_device())
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side), _noticing_waits() as waits:
                yield waits
        finally:
            torch.cuda.current_stream().wait_stream(side)

    def record(self, step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        side = _stream_of(torch.cuda.current_device())
        try:
            # thread_local: the thread that pins a DataLoader's memory goes on beside the capture.
            with (
                _without_collection(),
                torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"),
            ):
                output = step()
        except BaseException:
            _recover()
            raise
        return graph.replay, output

    def random_state(self) -> Any:
        return torch.get_rng_state(), torch.cuda.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1])

    def host_state(self) -> bytes:
        return torch.get_rng_state().numpy().tobytes()

    def empty(self) -> None:
        torch.cuda.empty_cache()


RECORDERS: dict[str, Callable[[], Recorder]] = {"cuda": CudaRecorder}
"""By the type of the device; on others a step is never captured."""


@contextmanager
def _without_collection() -> Iterator[None]:
    """No graph ends by garbage collection meanwhile: it may not while another is captured, which
    is lost with it (reset in PyTorch's CUDAGraph.cpp). PyTorch collects none before it any more."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@cache
def _stream_of(_device: int) -> torch.cuda.Stream:
    """One for all graphs: cuBLAS keeps tens of MiB for each stream that it was ever used on."""
    return torch.cuda.Stream()


@contextmanager
def _noticing_waits() -> Iterator[list[str]]:
    """The lines of code that make the host wait for the device, as 'train.py:12'."""
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


def _recover() -> None:
    """A capture that succeeds ends the state in which one that failed leaves the generator."""
    here = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        here.add_(1)
