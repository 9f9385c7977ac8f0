"""Whose time it was where one call had returned and the next had not begun: the one's that ended
in operators, or the caller's. No look can tell, so that a few samples are timed for it."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable, Mapping
from types import CodeType, FrameType

_Spent = collections.defaultdict[str, float]
LEARN_S = 1.0
"""At most: to be told of each call takes time."""


class Returned:
    """By place, a call in some code, the time until then of what returned there and of the caller.

    Args:
        part: what a call is a part of.
    """

    def __init__(self, part: Callable[[FrameType], str]) -> None:
        self._part = part
        self._times: dict[tuple[CodeType, int], _Spent] = {}
        self._ended: _Spent = collections.defaultdict(float)
        self._last_s = self._until_s = 0.0

    def learn(self) -> None:
        """From now on, until `learnt`."""
        self._last_s = time.perf_counter()
        self._until_s = self._last_s + LEARN_S
        sys.setprofile(self._told)

    def learnt(self) -> None:
        """No more of it."""
        if self._until_s:
            self._until_s = 0.0
            sys.setprofile(None)

    def shares(self, frame: FrameType) -> Mapping[str, float]:
        """By part, of the time until a frame's present call; empty where nothing returned to it."""
        known: Mapping[str, float] = self._times.get((frame.f_code, frame.f_lasti), {})
        whole = sum(known.values())
        return {part: spent_s / whole for part, spent_s in known.items()} if whole else {}

    def _told(self, frame: FrameType, event: str, _what: object) -> None:
        spent_s = time.perf_counter() - self._last_s
        at = frame.f_back if event == "call" else frame
        if event == "return":
            self._ended[self._part(frame)] += spent_s
        elif event in ("call", "c_return") and at is not None and self._ended:
            place = at.f_code, at.f_lasti
            times = self._times.setdefault(place, collections.defaultdict(float))
            for part, ended_s in self._ended.items():
                times[part] += ended_s
            times[self._part(at)] += spent_s
        elif event in ("c_call", "c_exception"):
            return  # who calls has the time of it
        if event != "return":
            self._ended.clear()
        self._last_s = time.perf_counter()
        if self._last_s >= self._until_s:
            self.learnt()
