"""DistributedDataParallel's buckets, made anew where weights are laid out.

It writes gradients by the strides that weights had when its reducer was made, and reads them by
those that they have (torch 2.11, reducer.cpp, `populate_bucket_views_out`): of a weight laid out
since they come back permuted, unsaid. There is no public way to make a reducer anew; `rebuild` does
what `DistributedDataParallel.__setstate__` does.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def within(outer: nn.Module) -> list[DistributedDataParallel]:
    """What exchanges the gradients of a module, or of parts of it."""
    return [module for module in outer.modules() if isinstance(module, DistributedDataParallel)]


def can_rebuild(outer: nn.Module) -> bool:
    """Whether nothing but PyTorch has a part in how a module's gradients are exchanged."""
    return not any(
        parallel.static_graph
        or parallel._comm_hooks
        or parallel.mixed_precision is not None
        or getattr(parallel, "_use_python_reducer", False)
        or parallel._delay_all_reduce_params
        for parallel in within(outer)
    )


def rebuild(outer: nn.Module) -> None:
    """Exchange gradients by the strides that weights have now; in all processes at one step."""
    for parallel in within(outer):
        parameters, sparse = parallel._build_params_for_reducer()
        names = parallel._build_debug_param_to_name_mapping(parameters)
        parallel._ddp_init_helper(parameters, sparse, names, parallel.static_graph)
