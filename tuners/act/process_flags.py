"""The flags of this process that advice has set."""

from __future__ import annotations

from typing import Any, NamedTuple

from advisor.cache.config import Config, Value
from advisor.tuners.knobs import BY_NAME, Flag


class _SetFlag(NamedTuple):
    """A flag that was set; `before` and `after`: the values of `Flag.now` before and after it."""

    flag: Flag
    value: Value
    before: Any
    after: Any

    @property
    def is_intact(self) -> bool:
        return bool(self.flag.now() == self.after)


class ProcessFlags:
    """The process flags that advice has set and that no other code has changed since."""

    def __init__(self) -> None:
        self._put: dict[str, _SetFlag] = {}

    def put(self, flags: Config) -> None:
        for name, value in flags.items():
            flag = BY_NAME[name].flag
            assert flag is not None
            held, now = self._put.get(name), flag.now()
            before = held.before if held is not None and held.after == now else now
            flag.set(value)
            self._put[name] = _SetFlag(flag, value, before, flag.now())

    def release(self, flags: Config | None = None) -> None:
        """Reset these flags, or all. A flag that other code has changed since stays."""
        for name, held in list(self._put.items()):
            if flags is not None and (name not in flags or flags[name] != held.value):
                continue
            del self._put[name]
            if held.is_intact:
                (held.flag.back or held.flag.set)(held.before)

    @property
    def config(self) -> Config:
        return Config({name: held.value for name, held in self._put.items() if held.is_intact})

    @property
    def changed(self) -> dict[str, Any]:
        return {name: one.flag.now() for name, one in self._put.items() if not one.is_intact}


PROCESS_FLAGS = ProcessFlags()
