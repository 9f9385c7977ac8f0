"""The optimizers that a captured step steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Optimizers:
    """Those of torch.optim that a step was seen to step on a device."""

    def __init__(self, device: str) -> None:
        self._on_cuda = device == "cuda"
        self._met: dict[int, torch.optim.Optimizer] = {}
        # By id: the group, its learning rate, and the tensor where a graph reads it at each replay.
        self.rates: dict[int, tuple[dict[str, Any], float, Tensor]] = {}
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

        hook = register_optimizer_step_pre_hook(see)
        try:
            yield found
        finally:
            hook.remove()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self for group in optimizer.param_groups]

    def weights(self) -> list[Tensor]:
        return [weight for group in self._groups() for weight in group["params"]]

    def state(self) -> list[Tensor]:
        """What they keep of each weight, as momentum."""
        states = (state for optimizer in self for state in optimizer.state.values())
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def begin(self) -> None:
        """Move counters of steps to the device, and the learning rates that can be read there."""
        for optimizer in self:
            known = len(self._homes)
            for weight, state in optimizer.state.items():
                step = state.get("step")
                if isinstance(step, Tensor) and step.device != weight.device:
                    self._homes[id(state)] = state, step.device
                    state["step"] = step.to(weight.device)
            if len(self._homes) > known:
                self._hooks.append(optimizer.register_state_dict_post_hook(self._saved))
        self.rates = {}
        for group in self._groups():
            rate, weights = group.get("lr"), group["params"]
            reads = group.get("fused") or (self._on_cuda and "capturable" in group)
            if reads and weights and rate is not None and not getattr(rate, "is_cuda", False):
                tensor = torch.tensor(float(rate), device=weights[0].device)
                self.rates[id(group)] = group, float(rate), tensor

    def _saved(self, _optimizer: Any, saved: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint with counters where the script has them: an optimizer that loads one on the
        device waits for it at every step."""
        states = dict(saved["state"])
        for at, state in states.items():
            if id(state) in self._homes:
                states[at] = {**state, "step": state["step"].to(self._homes[id(state)][1])}
        return {**saved, "state": states}

    def follow_rates(self) -> None:
        """Take over what the script has set the learning rates to."""
        for group, known, tensor in [*self.rates.values()]:
            if (rate := float(group["lr"])) != known:
                self.rates[id(group)] = group, rate, tensor
                tensor.fill_(rate)

    def end(self) -> None:
        """Put counters back where they were; follow no rate."""
        for state, home in self._homes.values():
            state["step"] = state["step"].to(home)
        for hook in self._hooks:
            hook.remove()
        self.rates, self._homes, self._hooks = {}, {}, []

    @contextmanager
    def capturable(self) -> Iterator[None]:
        """The optimizers as a capture needs them: their learning rates on the device."""
        groups = self._groups()
        names = ("lr", "capturable")
        own = [{name: held for name, held in group.items() if name in names} for group in groups]
        for group in groups:
            if "capturable" in group and self._on_cuda:
                group["capturable"] = True
            if id(group) in self.rates:
                group["lr"] = self.rates[id(group)][2]
        try:
            yield
        finally:
            for group, values in zip(groups, own, strict=True):
                group.update(values)
