"""Memory formats of weights: their storages, and DistributedDataParallel after a change."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Stride = tuple[int, ...]


class Storages:
    """Keeps one storage for each tensor, by any name, and each memory format: a CUDA graph reads
    weights at the addresses that they had when the graph was recorded."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, dict[Stride, Tensor]] = {}

    def laid_out(self, name: Hashable, tensor: Tensor, stride: Stride) -> Tensor:
        """Return a tensor's values in the storage that is kept for `stride`. The given tensor is
        kept for its own stride, because the script may have replaced an earlier one."""
        kept = self._kept.setdefault(name, {})
        kept[tensor.stride()] = tensor
        found = kept.get(stride)
        same = (tensor.shape, tensor.dtype, tensor.device)
        if found is None or (found.shape, found.dtype, found.device) != same:
            found = kept[stride] = strided(tensor, stride)
        elif found is not tensor:
            found.copy_(tensor)
        return found


def strided(tensor: Tensor, stride: Stride) -> Tensor:
    if tensor.stride() == stride:
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def is_alone(weight: Tensor) -> bool:
    """Whether no other tensor and no other process uses a weight's storage, so that it may move."""
    try:
        if weight.device.type == "cpu" and weight.is_shared():
            return False
        one = torch.empty(0)
        ours, alone = weight.untyped_storage(), one.untyped_storage()
        count = torch._C._storage_Use_Count  # also counts views, and a tensor taken by `.data`
        return bool(count(ours._cdata) == count(alone._cdata))
    except (AttributeError, NotImplementedError, RuntimeError):  # has no storage of its own
        return False


def can_rebuild(outer: nn.Module) -> bool:
    """Whether each DistributedDataParallel has only options with which `rebuild` works."""
    return not any(
        parallel.static_graph
        or parallel._comm_hooks
        or parallel.mixed_precision is not None
        or getattr(parallel, "_use_python_reducer", False)
        or parallel._delay_all_reduce_params
        for parallel in outer.modules()
        if isinstance(parallel, DistributedDataParallel)
    )


def rebuild(outer: nn.Module) -> None:
    """Have DistributedDataParallel use weights' present strides; all processes at the same step.

    It writes gradients with the strides that weights had when its reducer was made, and reads
    gradients with the present strides (torch 2.11, reducer.cpp, `populate_bucket_views_out`).
    `rebuild` makes a new reducer, as `__setstate__` does.
    """
    for parallel in outer.modules():
        if isinstance(parallel, DistributedDataParallel):
            parameters, sparse = parallel._build_params_for_reducer()
            names = parallel._build_debug_param_to_name_mapping(parameters)
            parallel._ddp_init_helper(parameters, sparse, names, parallel.static_graph)
