"""DistributedDataParallel's buckets, rebuilt after weights are laid out.

It writes gradients by the strides that weights had when its reducer was made, and reads them by
their present ones (torch 2.11, reducer.cpp, `populate_bucket_views_out`): those of weights laid out
since come back permuted. `rebuild` does what `DistributedDataParallel.__setstate__` does.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


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
    """Exchange gradients by the present strides of weights; in all processes at one step."""
    for parallel in outer.modules():
        if isinstance(parallel, DistributedDataParallel):
            parameters, sparse = parallel._build_params_for_reducer()
            names = parallel._build_debug_param_to_name_mapping(parameters)
            parallel._ddp_init_helper(parameters, sparse, names, parallel.static_graph)
