"""Replaces a function of a library or of the script, and undoes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

Function = Callable[..., Any]


class Patch:
    """Replaces a function of an object or a class by what `replacement` makes of it.

    What others put in its place later stays there; a removed patch only calls the original.
    """

    def __init__(self, owner: Any, name: str, replacement: Callable[[Function], Function]) -> None:
        self._owner, self._name = owner, name
        self._inherited = name not in vars(owner)
        self._original: Function = getattr(owner, name)
        self._acts = replacement(self._original)

        bound = isinstance(self._original, MethodType)

        @functools.wraps(self._original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._acts(*args[bound:], **kwargs)

        # A bound method stays one: learning rate schedulers look for its function.
        self._call: Function = MethodType(call, owner) if bound else call
        setattr(owner, name, self._call)

    def remove(self) -> None:
        """Put the original back if the replacement still stands."""
        self._acts = self._original
        if vars(self._owner).get(self._name) is not self._call:
            return
        if self._inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)
