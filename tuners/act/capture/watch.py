"""What a training step can reach in Python: a graph replays kernels, and all of this stands still.

It is compared before and after a step, and looked at again between steps.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from advisor.tuners.act.capture.reach import SCALARS, Place, Reach, library

_GONE = object()

Seen = list[dict[Any, Any]]


@dataclass(frozen=True, slots=True)
class _Look:
    """Some values of a place, quick to hold against what they are later."""

    place: Place
    names: tuple[Any, ...]
    get: Callable[[Any], Any]
    before: Any
    plain: bool
    """Compared as values; others are the same objects or not."""

    def differs(self) -> bool:
        try:
            now = self.get(self.place.held)
            if self.plain:
                return bool(now != self.before)
        except (KeyError, IndexError, ValueError, RuntimeError, AttributeError):
            return True  # gone, or a tensor where a number was
        return any(map(lambda a, b: a is not b, now, self.before))


class Watch:
    """All that `train_step` reaches, as it is when this is made: held against what it is later.

    Attributes:
        tensors: those in places and modules, each once, by id.
        complete: False where there was too much to look at.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        modules: Iterable[nn.Module],
        also: Iterable[torch.optim.Optimizer | torch.amp.GradScaler],
    ) -> None:
        self._reach = Reach(train_step, modules, also)
        self._places = self._reach.places
        self.tensors = self._reach.tensors
        self.complete = self._reach.complete
        self._looks: list[_Look] = []

    def read(self) -> Seen:
        """What every place holds now: for `moved`, `replaced` and `put_back`."""
        return [place.read() for place in self._places]

    def moved(self, before: Seen) -> str:
        """What a step has changed in Python, as 'schedule.last_epoch'; '' where nothing.

        An object in the place of another, as an output that is kept, is no change.
        """
        for place, old in zip(self._places, before, strict=True):
            new = place.read()
            for name in old.keys() | new.keys():
                if name not in old or name not in new or not _alike(old[name], new[name]):
                    return place.called(name)
        return ""

    def put_back(self, before: Seen) -> None:
        """Each value that was there; what has been added to a list goes."""
        for place, old in zip(self._places, before, strict=True):
            new = place.read()
            for name, value in old.items():
                if name not in new or new[name] is not value:
                    place.write(name, value)
            if isinstance(place.held, list | deque) and "len()" not in old:
                while len(place.held) > len(old):
                    place.held.pop()
        # Notes on a step that did not end would hold for the next.
        for scaler in self._reach.scalers:
            scaler._per_optimizer_states.clear()
        for optimizer in self._reach.optimizers:
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)

    @property
    def between_steps(self) -> bool:
        """Whether no GradScaler holds notes on a step, which it does until it is updated."""
        return not any(scaler._per_optimizer_states for scaler in self._reach.scalers)

    def replaced(self, before: Seen) -> list[tuple[Place, Any, Any, Any]]:
        """Where another object stands than before: place, name, the object then and now."""
        return [
            (place, name, old[name], new)
            for place, old in zip(self._places, before, strict=True)
            for name, new in place.read().items()
            if name in old and old[name] is not new and not _plain(new)
        ]

    def settle(self, before: Seen) -> None:
        """From now on `differs` compares with what there is; not what the step itself replaces."""
        own = {(id(place.held), name) for place, name, _old, _new in self.replaced(before)}
        self._looks = [look for place in self._places for look in self._look(place, own)]

    def _look(self, place: Place, own: set[tuple[int, Any]]) -> Iterator[_Look]:
        if not self._reach.looked_at(place):
            return
        ways = None if place.module else place.ways
        held = {n: v for n, v in place.read().items() if (id(place.held), n) not in own}
        if place.library:
            held = {name: v for name, v in held.items() if isinstance(v, bool | float)}
        elif not place.settings:
            held = {name: value for name, value in held.items() if self._reach.reads(name, ways)}
        shadowing = tuple(name for name in _of_class(place) if self._reach.reads(name, ways))
        if shadowing:

            def get_all(held: dict[str, Any]) -> tuple[Any, ...]:
                return tuple(held.get(name, _GONE) for name in shadowing)

            yield _Look(place, shadowing, get_all, get_all(place.held), False)
        for plain in (True, False):
            names = tuple(name for name, value in held.items() if _plain(value) is plain)
            if names:
                get = _getter(place, names)
                yield _Look(place, names, get, get(place.held), plain)

    def differs(self) -> str:
        """What the script has changed since `settle`, between two steps; '' where nothing."""
        for look in self._looks:
            if look.differs():
                now = look.place.read()
                was = dict(zip(look.names, look.before, strict=True))
                changed = [n for n in look.names if n not in now or not _same(now[n], was[n])]
                return look.place.called((changed or look.names)[0])
        return ""


def _of_class(place: Place) -> Iterator[str]:
    """Values of the user's classes that this object has no own of, yet."""
    for one in place.kind.__mro__ if place.kind else ():
        if not library(one.__module__):
            for name, value in vars(one).items():
                if _plain(value) and not name.startswith("__") and name not in place.held:
                    yield name


def _getter(place: Place, names: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Reads these names as a tuple."""
    if type(place.held) is dict and names:
        if len(names) > 1:
            return itemgetter(*names)
        (name,) = names
        return lambda held: (held[name],)
    return lambda _held: tuple(map(place.read().__getitem__, names))


def _plain(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_plain, value))
    return isinstance(value, SCALARS)


def _same(a: Any, b: Any) -> bool:
    return a is b or (_plain(a) and _plain(b) and _alike(a, b))


def _alike(a: Any, b: Any) -> bool:
    """Equal in value as far as Python can tell: of what it cannot, the same type is enough."""
    if a is b:
        return True
    if type(a) is not type(b):
        # An output that is kept is None, or missing, before the first.
        return False
    if isinstance(a, SCALARS):
        return bool(a == b or (a != a and b != b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[name], b[name]) for name in a)
    if isinstance(a, set | frozenset):
        return len(a) == len(b)
    return True


def drawn() -> object:
    """The state of Python's and NumPy's random numbers, for comparison."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), kind, keys.tobytes(), tuple(rest)
