"""Records attributes of a script's modules, and updates of its optimizers."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from advisor.tuners.act.pilot.loop_observer import numpy_state, weights_of
from advisor.tuners.act.pilot.wrappers import local
from advisor.tuners.decisions import UPDATE_OFF
from advisor.tuners.measure.samples import worst_update

_OURS = "_compiled_call_impl"  # set by configs, not by the script
_VALUES = (bool, int, float, complex, str, bytes, type(None))
_MOST_PARAMETERS = 64  # recorded of all optimizers' groups, evenly spaced
_MOST_ELEMENTS = 2**22  # of a recorded parameter; both limits save memory
# Bytes by element: of it, its gradient and two states, of each parameter, twice.
_COPIES_BYTES = 2 * 16 * _MOST_PARAMETERS


def save_attributes(modules: Sequence[nn.Module]) -> Callable[[], None]:
    """Record which objects modules hold. Returns a function that restores them."""
    tables = [t for one in modules for t in (vars(one), one._buffers)]
    tables = [one for one in tables if isinstance(one, dict)]  # else of a scripted module
    kept = [{name: held for name, held in table.items() if name != _OURS} for table in tables]

    def put() -> None:
        for table, before in zip(tables, kept, strict=True):
            for name in table.keys() - before.keys() - {_OURS}:
                del table[name]
            table.update(before)

    return put


def detect_changes(modules: Sequence[nn.Module]) -> Callable[[], str]:
    """Return a function that names a change since that cannot be restored, or ''. It sees objects
    in modules, such as lists and parameters, and numpy's random state; nothing deeper, no files."""
    before = [
        (f"{type(module).__name__}.{name}", held := [value, *_within(value)], [*map(_mark, held)])
        for module in modules
        for name, value in vars(module).items()
        if value is not module._buffers
    ]
    numpy = numpy_state()

    def changed() -> str:
        if numpy != numpy_state():
            return "numpy's random numbers"
        for name, held, marks in before:
            if marks != [_mark(one) for one in (held[0], *_within(held[0]))]:
                return name
        return ""

    return changed


def _within(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return itertools.chain.from_iterable(value.items())
    if isinstance(value, list | tuple | set | deque):
        return value
    if isinstance(value, nn.Module | type | Tensor) or callable(value):
        return ()
    return vars(value).values() if hasattr(value, "__dict__") else ()


def _mark(value: object) -> object:
    """A value that stays equal as long as an object is unchanged."""
    if isinstance(value, _VALUES):
        return type(value), value
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().numpy().tobytes()
    return id(value)


def has_hooks(modules: Sequence[nn.Module]) -> bool:
    """Whether the script has hooks that a call of these modules would run."""
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    parameters = (p for one in modules for p in one.parameters(recurse=False))
    there = (getattr(one, table) for one in modules for table in tables)
    return any(there) or any(one._backward_hooks for one in parameters)


@dataclass(frozen=True, slots=True, eq=False)
class _Parameter:
    """Copies of a parameter, its gradient and its optimizer state."""

    number: int  # its `id`
    value: Tensor
    gradient: Tensor
    state: dict[str, Any]


_Groups = list[tuple[dict[str, Any], list[_Parameter]]]  # by group: settings, parameters


class RecordedUpdates:
    """The updates that optimizers with an option `fused` would make with the present gradients.
    `room`: bytes that may be used; None: any number."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], room: int | None = None
    ) -> None:
        most = _MOST_ELEMENTS if room is None else min(_MOST_ELEMENTS, room // _COPIES_BYTES)
        found = [(one, _kept(one, most)) for one in optimizers if _plain_step(one) is not None]
        self._updates = [one for one in found if any(kept for _, kept in one[1])]

    def error(self, settings: Mapping[str, Any], names: Mapping[int, str]) -> tuple[float, str]:
        """`worst_update` of other optimizer settings; `names`: the parameters' names by `id`."""
        return worst_update(
            (names.get(one.number, "a parameter"), one.value, wanted, found)
            for optimizer, groups in self._updates
            for one, wanted, found in zip(
                [one for _, kept in groups for one in kept],
                _made(optimizer, groups, {}),
                _made(optimizer, groups, {**settings, "foreach": False}),
                strict=True,
            )
        )

    def made_error(self, names: Mapping[int, str]) -> tuple[float, str]:
        """`worst_update` of the updates that the script has made since, beside those of the same
        class of torch.optim without fused kernels. A step of the script's own class may differ from
        that, but not skip the weight decay. Not of weights in half precision, which rounding moves.
        """
        worst, plain = (0.0, ""), {"fused": False, "foreach": False}
        for optimizer, groups in self._updates:
            kinds = (c for c in type(optimizer).__mro__ if c.__module__.startswith("torch.optim."))
            base = next(kinds)
            now = {id(one): local(one).detach() for one in weights_of(optimizer)}
            kept = [one for _, parameters in groups for one in parameters]
            (error, name), (bare, _) = (
                worst_update(
                    (names.get(one.number, "a parameter"), one.value, wanted, now[one.number])
                    for one, wanted in zip(kept, made, strict=True)
                    if one.value.dtype.itemsize >= torch.float32.itemsize
                )
                for made in (
                    _made(optimizer, groups, plain | decay, base)
                    for decay in ({}, {"weight_decay": 0.0})
                )
            )
            if bare <= UPDATE_OFF < error:
                name += ", which skips its weight decay,"
            if base is type(optimizer) or bare <= UPDATE_OFF:
                worst = max(worst, (error, name))
        return worst


def _plain_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """An optimizer class's `step` without hooks; None if it has none, or no option `fused`."""
    step = type(optimizer).step
    fits = all("fused" in group for group in optimizer.param_groups)
    return getattr(step, "__wrapped__", None) if fits and hasattr(step, "hooked") else None


def _kept(optimizer: torch.optim.Optimizer, most_elements: int) -> _Groups:
    found: _Groups = []
    for group in optimizer.param_groups:
        fit = [
            one
            for one in group["params"]
            if one.grad is not None and one.grad.layout == torch.strided
            if local(one).numel() <= most_elements and one.is_floating_point()
        ]
        few = fit[:: max(1, -(-len(fit) * len(optimizer.param_groups) // _MOST_PARAMETERS))]
        kept = []
        for one in few:
            value, gradient = (local(each).detach().clone() for each in (one, one.grad))
            kept.append(_Parameter(id(one), value, gradient, _cloned(optimizer.state.get(one, {}))))
        found.append((_cloned(group | {"params": []}), kept))
    return found


def _cloned(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: local(value).detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in values.items()
    }


def _made(
    optimizer: torch.optim.Optimizer,
    groups: _Groups,
    settings: Mapping[str, Any],
    base: type | None = None,
) -> list[Tensor]:
    step: Any = (base or type(optimizer)).step  # type: ignore[attr-defined]
    step = step.__wrapped__ if hasattr(step, "hooked") else step
    state: dict[Tensor, Any] = defaultdict(dict)
    made: list[Tensor] = []
    param_groups = []
    for group, kept in groups:
        parameters = [nn.Parameter(one.value.clone()) for one in kept]
        for parameter, one in zip(parameters, kept, strict=True):
            parameter.grad = one.gradient.clone()
            if one.state:
                state[parameter] = _cloned(one.state)
                count = one.state.get("step")
                if settings.get("fused") and isinstance(count, Tensor):
                    state[parameter]["step"] = count.to(parameter.device, copy=True)
        param_groups.append(_cloned(group) | {"params": parameters} | dict(settings))
        made += parameters
    shadow: torch.optim.Optimizer = object.__new__(base or type(optimizer))
    vars(shadow).update(
        vars(optimizer),
        param_groups=param_groups,
        state=state,
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    step(shadow)
    return [parameter.detach() for parameter in made]
