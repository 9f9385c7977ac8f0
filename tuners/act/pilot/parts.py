"""Parts of a running script's model that a config has compiled, the model itself not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from advisor.tuners.act.pilot import hooks


class Parts:
    """What is called through something else within a model, as long as that is set."""

    def __init__(self, calls: Mapping[nn.Module, Callable[..., Any]]) -> None:
        self._calls = calls
        self._set = False

    @classmethod
    def taken_out(cls, outer: nn.Module) -> Parts:
        """What was just compiled within a model, which is as it was again."""
        found = {m: vars(m).get("_compiled_call_impl") for m in outer.modules() if m is not outer}
        parts = cls({module: call for module, call in found.items() if call is not None})
        for module in parts._calls:
            hooks.through(module, None)
        return parts

    def set(self) -> None:
        """Call them through that from here on."""
        self._set = True
        for module, call in self._calls.items():
            hooks.through(module, call)

    def set_back(self) -> None:
        """Call them as they are."""
        self._set = False
        for module in self._calls:
            hooks.through(module, None)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Call them as they are, for one call of the model."""
        was_set = self._set
        self.set_back()
        try:
            yield
        finally:
            if was_set:
                self.set()


NONE = Parts({})
