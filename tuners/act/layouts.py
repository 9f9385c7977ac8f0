"""Memory formats of weights: storages, and how gradients are exchanged after a change."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Stride = tuple[int, ...]


class Storages:
    """One storage of each tensor for each memory format that it was ever laid out in, by whatever
    names the tensors: a CUDA graph reads weights where they were when it was recorded."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, dict[Stride, Tensor]] = {}

    def laid_out(self, name: Hashable, tensor: Tensor, stride: Stride) -> Tensor:
        """The values of a tensor in the storage that is kept for a stride. What the tensor has now
        is kept for its own stride: the script may have replaced it."""
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


def can_rebuild(outer: nn.Module) -> bool:
    """Whether nothing but PyTorch has a part in how a module's gradients are exchanged."""
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
    """Exchange gradients by the present strides of weights; in all processes at one step.

    DistributedDataParallel writes gradients by the strides that weights had when its reducer was
    made, and reads them by their present ones (torch 2.11, reducer.cpp,
    `populate_bucket_views_out`). This does what its `__setstate__` does.
    """
    for parallel in outer.modules():
        if isinstance(parallel, DistributedDataParallel):
            parameters, sparse = parallel._build_params_for_reducer()
            names = parallel._build_debug_param_to_name_mapping(parameters)
            parallel._ddp_init_helper(parameters, sparse, names, parallel.static_graph)
