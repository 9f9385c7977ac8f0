"""The end of every optimizer's step, for whatever of advisor's waits for it. One hook serves all:
PyTorch raises if one comes or goes while it runs them, as when a pilot compiles there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

Stepped = Callable[[torch.optim.Optimizer], None]


class Steps:
    """A hook in PyTorch while there is somebody to tell."""

    def __init__(self) -> None:
        self._told: list[Stepped] = []
        self._handle: RemovableHandle | None = None
        self._inside = False

    def tell(self, stepped: Stepped) -> Callable[[], None]:
        """Have it called with the optimizer after each step of any; returns what ends that."""
        self._told.append(stepped)
        if self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._stepped)

        def remove() -> None:
            if stepped in self._told:
                self._told.remove(stepped)
                self._let_go()

        return remove

    def _let_go(self) -> None:
        if self._inside and not self._told:
            # At the next call of a module, whose hooks PyTorch runs from a copy.
            def later(_module: torch.nn.Module, _args: object) -> None:
                handle.remove()
                self._let_go()

            handle = register_module_forward_pre_hook(later)
        elif self._handle is not None and not self._told:
            self._handle.remove()
            self._handle = None

    def _stepped(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        self._inside = True
        try:
            for stepped in tuple(self._told):
                stepped(optimizer)
        finally:
            self._inside = False


EVERY_STEP = Steps()
