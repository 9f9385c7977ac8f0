"""The blocks that a model repeats, as a transformer its layers: compiled once for all of them.

A compilation is guarded by what a module is, not by which it is: blocks that are alike share one
(https://docs.pytorch.org/tutorials/recipes/regional_compilation.html).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

from torch import nn

from advisor.tuners import fingerprint

LEAST = 4
"""Blocks that are alike in one container, before they are called repeated."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that are repeated; none where most of the model is outside of them, and
    would not be compiled."""
    found = list(_repeated(model))
    within = sum(_size(block) for block in found)
    return found if 2 * within >= _size(model) else []


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    alike = _alike(module) if isinstance(module, _CONTAINERS) else []
    yield from alike
    for child in module.children():
        if child not in alike:
            yield from _repeated(child)


def _alike(container: nn.Module) -> list[nn.Module]:
    """Of a container's modules those of which there are LEAST or more; not single layers, in which
    nothing is fused."""
    kinds: dict[Hashable, list[nn.Module]] = defaultdict(list)
    for block in container.children():
        if any(True for _ in block.children()):
            kinds[_kind(block)].append(block)
    return [block for blocks in kinds.values() if len(blocks) >= LEAST for block in blocks]


def _kind(block: nn.Module) -> Hashable:
    """What torch.compile tells blocks apart by: what they are, and the rates in their attributes,
    as of stochastic depth. Whole numbers there are rarely read, as a layer's index is not."""
    held = (value for module in block.modules() for value in vars(module).values())
    return fingerprint.of_model(block), tuple(value for value in held if type(value) is float)


def _size(module: nn.Module) -> int:
    return sum(1 for _ in module.modules())
