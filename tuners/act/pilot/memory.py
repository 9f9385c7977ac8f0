"""Where the memory of a training step goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from advisor.cache.config import Config
from advisor.tuners.act.pilot.loop_observer import TrainedModel
from advisor.tuners.offloading import OffloadedCall
from advisor.tuners.recomputation import RecomputedCall


def breakdown(
    trained: Sequence[TrainedModel],
    optimizers: Iterable[torch.optim.Optimizer],
    device: torch.device,
) -> Config:
    """Bytes of the steps so far, by name in PARTS; empty on a CPU. Only steps that save memory have
    `host`, `blocks` and `block`, the name of the repeated blocks' class."""
    if device.type != "cuda":
        return Config()
    weights = [w for one in trained for w in (*one.model.parameters(), *one.model.buffers())]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    state = [value for one in states for value in one.values() if isinstance(value, Tensor)]
    found = {
        "weights": _bytes(weights, device),
        "gradients": _bytes((one for one in weights if one.requires_grad), device),
        "optimizer_state": _bytes(state, device),
    }
    peak = torch.cuda.max_memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    found |= {
        "peak": peak,
        "activations": max(0, peak - sum(found.values())),
        "fragmentation": torch.cuda.max_memory_reserved(device) - peak,
        "others": max(0, total - free - torch.cuda.memory_reserved(device)),
    }
    calls = [vars(m).get("_compiled_call_impl") for one in trained for m in one.outer.modules()]
    held = [call.most_bytes for call in calls if isinstance(call, OffloadedCall)]
    kept = [call for call in calls if isinstance(call, RecomputedCall)]
    # The peak has one block's.
    again = [call.kept_bytes for call in kept]
    saved = {"host": sum(held), "blocks": sum(again) - max(again, default=0)} if held else {}
    named = {"block": type(kept[0].block).__name__} if kept else {}
    return Config(found | saved, **named)


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    # Shared ones once. Not by their storage, which sharded tensors do not have.
    return sum({id(one): one.nbytes for one in tensors if one.device == device}.values())
