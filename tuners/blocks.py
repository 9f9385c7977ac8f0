"""Blocks that a model repeats, as a transformer's layers: one compilation serves them all
(https://docs.pytorch.org/tutorials/recipes/regional_compilation.html).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

from torch import nn

from advisor.tuners import fingerprint

LEAST = 4
"""Equal blocks in one container."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated(model: nn.Module) -> list[nn.Module]:
    """The outermost repeated modules; none if they are less than half of the model's modules."""
    found = list(_repeated(model))
    within = sum(1 for block in found for _ in block.modules())
    return found if 2 * within >= sum(1 for _ in model.modules()) else []


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    alike = _alike(module) if isinstance(module, _CONTAINERS) else []
    yield from alike
    for child in module.children():
        if child not in alike:
            yield from _repeated(child)


def _alike(container: nn.Module) -> list[nn.Module]:
    """Modules of which a container has LEAST or more; not single layers, which fuse nothing."""
    kinds: dict[Hashable, list[nn.Module]] = defaultdict(list)
    for block in container.children():
        if any(True for _ in block.children()):
            kinds[_kind(block)].append(block)
    return [block for blocks in kinds.values() if len(blocks) >= LEAST for block in blocks]


def _kind(block: nn.Module) -> Hashable:
    """What torch.compile guards on: the code, and floats in attributes, as rates of stochastic
    depth. Integers are left out: a layer's index is mostly read in inference only."""
    held = (value for module in block.modules() for value in vars(module).values())
    return fingerprint.of_model(block), tuple(value for value in held if type(value) is float)
