"""One step of a script's optimizers, made again with other settings, on copies."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MOST = 64
"""Parameters of an optimizer that are looked at, evenly taken from all of its groups."""
LARGEST = 2**22
"""Elements of a parameter beyond which it is left out, for its memory: a copy each of its value,
its gradient and its state is kept."""


@dataclass(frozen=True, slots=True, eq=False)
class _Update:
    """An optimizer, and copies of what its next step would be made of.

    Attributes:
        groups: its settings, with numbers of `values` for parameters.
        names: which parameters these are, by `id`.
    """

    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]]
    values: list[Tensor]
    gradients: list[Tensor]
    states: list[dict[str, Any]]
    names: list[int]


class KeptUpdates:
    """What optimizers would make of the gradients that are there now.

    Those whose step has no `fused` are left out, as no config changes them, and sparse gradients.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        found = [_kept(one) for one in optimizers if _plain_step(one) is not None]
        self._updates = [one for one in found if one.values]

    def error(self, settings: Mapping[str, Any], names: Mapping[int, str]) -> tuple[float, str]:
        """The largest part of an update that an optimizer with other settings makes otherwise, and
        the parameter's name."""
        worst = (0.0, "")
        for update in self._updates:
            own, ours = _made(update, {}), _made(update, {**settings, "foreach": False})
            for number, value in enumerate(update.values):
                start, wanted, found = (t.double() for t in (value, own[number], ours[number]))
                # Beyond what rounding the weight after it leaves.
                rounding = 2 * torch.finfo(value.dtype).eps * start.norm()
                off = float((found - wanted).norm() - rounding)
                moved = float((wanted - start).norm())
                part = off / moved if moved else float(off > 0)
                if not part <= worst[0]:  # as one that is not a number
                    worst = (part, names.get(update.names[number], "a parameter"))
        return worst


def _plain_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """Its class's step without PyTorch's hooks, which would tell of it; None where there is none
    such, or where it has no kernels to choose from."""
    step = type(optimizer).step
    fits = all("fused" in group for group in optimizer.param_groups)
    return getattr(step, "__wrapped__", None) if fits and hasattr(step, "hooked") else None


def _kept(optimizer: torch.optim.Optimizer) -> _Update:
    update = _Update(optimizer, [], [], [], [], [])
    for group in optimizer.param_groups:
        fit = [p for p in group["params"] if _fits(p)]
        few = fit[:: max(1, -(-len(fit) * len(optimizer.param_groups) // MOST))]
        numbers = range(len(update.values), len(update.values) + len(few))
        update.groups.append(_cloned(group | {"params": []}) | {"params": list(numbers)})
        for parameter in few:
            assert parameter.grad is not None
            update.values.append(parameter.detach().clone())
            update.gradients.append(parameter.grad.detach().clone())
            update.states.append(_cloned(optimizer.state.get(parameter, {})))
            update.names.append(id(parameter))
    return update


def _fits(parameter: Tensor) -> bool:
    gradient = parameter.grad
    dense = gradient is not None and gradient.layout == torch.strided
    return dense and parameter.numel() <= LARGEST and parameter.is_floating_point()


def _cloned(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in values.items()
    }


def _made(update: _Update, settings: Mapping[str, Any]) -> list[Tensor]:
    """The parameters after a step with these settings."""
    step = _plain_step(update.optimizer)
    assert step is not None, "others are not kept"
    parameters = [nn.Parameter(value.clone()) for value in update.values]
    state: dict[Tensor, Any] = defaultdict(dict)
    for parameter, gradient, kept in zip(parameters, update.gradients, update.states, strict=True):
        parameter.grad = gradient.clone()
        if kept:
            state[parameter] = _cloned(kept)
            count = kept.get("step")
            if settings.get("fused") and isinstance(count, Tensor):
                state[parameter]["step"] = count.to(parameter.device, copy=True)
    shadow: torch.optim.Optimizer = object.__new__(type(update.optimizer))
    vars(shadow).update(
        vars(update.optimizer),
        param_groups=[
            _cloned(group) | {"params": [parameters[n] for n in group["params"]]} | dict(settings)
            for group in update.groups
        ],
        state=state,
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    step(shadow)
    return [parameter.detach() for parameter in parameters]
