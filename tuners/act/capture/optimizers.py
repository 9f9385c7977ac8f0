"""The optimizers that a recorded step takes with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


@dataclass(slots=True)
class _Rate:
    """A parameter group's learning rate, in a tensor that a graph reads at each replay."""

    group: dict[str, Any]
    value: float
    tensor: Tensor


class Optimizers:
    """Those of torch.optim that a step was seen to step.

    Args:
        device: 'cuda' or 'cpu': on which the step is recorded.
    """

    def __init__(self, device: str) -> None:
        self._on_cuda = device == "cuda"
        self._met: dict[int, torch.optim.Optimizer] = {}
        self._rates: list[_Rate] = []
        self._homes: dict[int, tuple[dict[str, Any], torch.device]] = {}
        self._hooks: list[Any] = []

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self._met.values())

    @contextmanager
    def counting(self) -> Iterator[list[int]]:
        """The optimizers that step, by id, in their order."""
        found: list[int] = []

        def see(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            self._met[id(optimizer)] = optimizer
            found.append(id(optimizer))

        seen = register_optimizer_step_pre_hook(see)
        try:
            yield found
        finally:
            seen.remove()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self for group in optimizer.param_groups]

    def settings(self) -> list[Any]:
        """All that a capture takes for given, the learning rates that it follows left out."""
        fluid = {id(rate.group) for rate in self._rates}
        # Loading a checkpoint replaces an optimizer's state and groups.
        found: list[Any] = [torch.is_grad_enabled(), *(id(one.state) for one in self)]
        for group in self._groups():
            found += [weight.data_ptr() for weight in group["params"]]
            for name, value in group.items():
                if name != "params" and (name != "lr" or id(group) not in fluid):
                    found.append(value.data_ptr() if isinstance(value, Tensor) else value)
        return found

    def weights(self) -> list[Tensor]:
        return [weight for group in self._groups() for weight in group["params"]]

    def state(self) -> list[Tensor]:
        """What they keep of each weight, as momentum."""
        states = (state for optimizer in self for state in optimizer.state.values())
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def begin(self) -> None:
        """What a capture cannot read from the host goes to the device: the counters of their steps,
        and the learning rates that can be read there."""
        for optimizer in self:
            known = len(self._homes)
            for weight, state in optimizer.state.items():
                step = state.get("step")
                if isinstance(step, Tensor) and step.device != weight.device:
                    self._homes[id(state)] = state, step.device
                    state["step"] = step.to(weight.device)
            if len(self._homes) > known:
                self._hooks.append(optimizer.register_state_dict_post_hook(self._at_home))
        self._rates = [
            _Rate(group, float(group["lr"]), torch.tensor(float(group["lr"]), device=device))
            for group in self._groups()
            if (device := self._rate_on(group)) is not None
        ]

    def _rate_on(self, group: dict[str, Any]) -> torch.device | None:
        """Where a group's kernels can read a learning rate that is not there yet."""
        reads = group.get("fused") or (self._on_cuda and "capturable" in group)
        rate = group.get("lr")
        there = isinstance(rate, Tensor) and rate.is_cuda
        weights = group["params"]
        return weights[0].device if reads and weights and rate is not None and not there else None

    def _at_home(self, _optimizer: Any, held: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint with counters where the script has them: an optimizer that loads one on the
        device waits for it at every step."""

        def own(state: Any) -> Any:
            _, home = self._homes.get(id(state), (None, None))
            return state if home is None else {**state, "step": state["step"].to(home)}

        return {**held, "state": {at: own(state) for at, state in held["state"].items()}}

    def follow_rates(self) -> None:
        """Take over what the script has set the learning rates to since."""
        for rate in self._rates:
            if (value := float(rate.group["lr"])) != rate.value:
                rate.value = value
                rate.tensor.fill_(value)

    def end(self) -> None:
        """Counters go back to where they were; no rate is followed."""
        for state, home in self._homes.values():
            state["step"] = state["step"].to(home)
        for hook in self._hooks:
            hook.remove()
        self._rates, self._homes, self._hooks = [], {}, []

    @contextmanager
    def capturable(self) -> Iterator[None]:
        """The optimizers as a capture needs them: their learning rates on the device."""
        groups = self._groups()
        own = ("lr", "capturable")
        held = [{name: value for name, value in g.items() if name in own} for g in groups]
        for group in groups:
            if "capturable" in group and self._on_cuda:
                group["capturable"] = True
        for rate in self._rates:
            rate.group["lr"] = rate.tensor
        try:
            yield
        finally:
            for group, values in zip(groups, held, strict=True):
                group.update(values)
