"""Calls that a running script has handed over, made again here to compile them."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Mapping
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import torch

from advisor.cache.config import Config
from advisor.tuners.act.pilot.crew import Trained
from advisor.tuners.act.pilot.handing import CALLS, PLACE, Handed, Made
from advisor.tuners.act.pilot.switch import Switch
from advisor.tuners.act.pilot.trees import tensors
from advisor.tuners.knobs import BY_NAME
from advisor.tuners.measure.timing import Clock, CpuClock, CudaClock


def load(folder: Path) -> Handed:
    """What was handed over, with the flags of its process set in this one.

    It is a pickle: this runs what it says, as a process of the user who wrote it. See `handing`.
    """
    spawn.prepare(json.loads((folder / PLACE).read_text())["prepared"])
    with (folder / CALLS).open("rb") as file:
        found: Handed = pickle.load(file)
    torch.set_default_dtype(found.dtype)
    for name, held in found.flags.items():
        flag = BY_NAME[name].flag
        # One that is set to what it was makes another key to PyTorch than one that was left alone.
        if flag is not None and flag.now() != held:
            flag.set_back(held)
    return found


def first_step(handed: Handed, config: Config) -> float:
    """Make the calls as the script is, then under a config; seconds of the latter."""
    clock: Clock = CpuClock()
    if handed.device.type == "cuda":
        torch.cuda.set_device(handed.device)
        clock = CudaClock(handed.device)
    trained = [Trained(model, model, ()) for model in handed.models]
    switch = Switch(trained, [], Config(handed.own), handed.device, _feed, _raise)
    _make(handed)
    clock.synchronize()
    began = time.perf_counter()
    switch.set(config)
    _make(handed)
    clock.synchronize()
    return time.perf_counter() - began


def _make(handed: Handed) -> None:
    for one in handed.calls:
        found = [tensor for tensor in tensors(_called(handed, one)) if tensor.requires_grad]
        if found:
            torch.autograd.backward(found, [torch.ones_like(one) for one in found])


def _called(handed: Handed, one: Made) -> Any:
    device = handed.device.type
    with torch.autocast(device, one.autocast, enabled=one.autocast is not None):
        return handed.models[one.number](*one.args, **one.kwargs)


def _feed(_given: Mapping[str, Any]) -> None:
    """Nothing is loaded here."""


def _raise(exc: BaseException) -> None:
    raise exc
