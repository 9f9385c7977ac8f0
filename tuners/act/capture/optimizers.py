"""The optimizers that a recorded step takes with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


class _Rate:
    """The learning rate of a parameter group, in a tensor that a graph reads at each replay."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group
        self._value = float(group["lr"])
        self.tensor = torch.full((), self._value, device=group["params"][0].device)

    @staticmethod
    def fits(group: dict[str, Any], device: str) -> bool:
        """Whether its optimizer takes a tensor; one on the device already needs no other."""
        if not group["params"] or "lr" not in group:
            return False
        held = group["lr"]
        takes = bool(group.get("fused")) or ("capturable" in group and device == "cuda")
        return takes and not (isinstance(held, Tensor) and held.device.type == "cuda")

    def follow(self) -> None:
        """Take over what a scheduler has set."""
        value = float(self.group["lr"])
        if value != self._value:
            self._value = value
            self.tensor.fill_(value)


class Optimizers:
    """Those of torch.optim that a step was seen to step.

    Args:
        device: 'cuda' or 'cpu': on which the step is recorded.
    """

    def __init__(self, device: str) -> None:
        self._device = device
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
        return [group for optimizer in self._met.values() for group in optimizer.param_groups]

    def settings(self) -> list[Any]:
        """All that a capture takes for given, the learning rates that it follows left out."""
        fluid = {id(rate.group) for rate in self._rates}
        # Loading a checkpoint replaces an optimizer's state and groups.
        found: list[Any] = [id(optimizer.state) for optimizer in self._met.values()]
        for group in self._groups():
            for name, value in group.items():
                if name == "params":
                    found += [(weight.data_ptr(), weight.requires_grad) for weight in value]
                elif name != "lr" or id(group) not in fluid:
                    found.append(value.data_ptr() if isinstance(value, Tensor) else value)
        found.append(torch.is_grad_enabled())
        return found

    def weights(self) -> list[Tensor]:
        return [p for g in self._groups() for p in g["params"]]

    def state(self) -> list[Tensor]:
        """What they keep of each weight, as momentum."""
        states = (state for one in self._met.values() for state in one.state.values())
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def begin(self) -> None:
        """What a capture cannot read from the host goes to the device: the counters of their steps,
        and the learning rates that can be read there."""
        for optimizer in self._met.values():
            moved = False
            for weight, state in optimizer.state.items():
                step = state.get("step")
                if isinstance(step, Tensor) and step.device != weight.device:
                    self._homes[id(state)] = state, step.device
                    state["step"], moved = step.to(weight.device), True
            if moved:
                hook = optimizer.register_state_dict_post_hook(self._as_the_script_has_it)
                self._hooks.append(hook)
        self._rates = [_Rate(group) for group in self._groups() if _Rate.fits(group, self._device)]

    def _as_the_script_has_it(self, _optimizer: Any, held: dict[str, Any]) -> dict[str, Any]:
        """Counters on the host: an optimizer that loads one on the device waits at every step."""

        def own(state: Any) -> Any:
            _, home = self._homes.get(id(state), (None, None))
            return state if home is None else {**state, "step": state["step"].to(home)}

        return {**held, "state": {at: own(state) for at, state in held["state"].items()}}

    def follow_rates(self) -> None:
        """Take over what the script has set the learning rates to since."""
        for rate in self._rates:
            rate.follow()

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
        on_device = self._device == "cuda"
        groups = self._groups()
        held = [{name: g[name] for name in ("lr", "capturable") if name in g} for g in groups]
        for group in groups:
            if "capturable" in group and on_device:
                group["capturable"] = True
        for rate in self._rates:
            rate.group["lr"] = rate.tensor
        try:
            yield
        finally:
            for group, values in zip(groups, held, strict=True):
                group.update(values)
