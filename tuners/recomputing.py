"""torch.compile that keeps fewer activations for the backward pass, which recomputes the others.

`activation_memory_budget` of `torch._functorch.config` is the share of activations to keep; the
partitioner reads it while a graph is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor
from torch import fx, nn
from torch._functorch import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from advisor.tuners import known_wrong


def keep(model: nn.Module, share: float) -> None:
    """Compile a model in place, in the mode "default"; it keeps this share of activations."""
    nn.Module.compile(model, backend=_Keeping(share))


@dataclass(frozen=True, slots=True)
class _Keeping:
    """Inductor with a share. Each share is a backend of its own, so that code is not mixed up."""

    share: float

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        options = known_wrong.avoided() | {"joint_custom_pre_pass": _KeepDraws()}
        with config.patch(activation_memory_budget=self.share):
            compiled: Callable[..., Any] = torch._inductor.compile(graph, list(inputs), options)
        return compiled


class _KeepDraws(CustomGraphPass):
    """Keep everything of a graph that draws random numbers: recomputing draws others, so gradients
    would be wrong (https://github.com/pytorch/pytorch/issues/190758)."""

    def __call__(self, graph: fx.Graph) -> None:
        if any(map(_draws, graph.nodes)):
            config.activation_memory_budget = 1.0  # until the patch around it ends

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


def _draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers; attention does if its dropout is not 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0
