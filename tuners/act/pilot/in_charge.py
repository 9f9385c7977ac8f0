"""The pilot of this process: one at most, whoever brought it."""

from __future__ import annotations

import functools

from advisor.tuners.act.pilot.orders import Guide
from advisor.tuners.act.pilot.pilot import Pilot, Watch


class InCharge:
    """Keeps the first pilot that is brought: what starts a command comes before its script."""

    def __init__(self) -> None:
        self._pilot: Pilot | None = None

    def bring(self, guide: Guide, watch: Watch | None = None) -> None:
        """Attach a pilot, unless there is one."""
        if self._pilot is None:
            self._begin(guide, watch)

    def _begin(self, guide: Guide, watch: Watch | None) -> None:
        self._pilot = Pilot(guide, watch, functools.partial(self._begin, guide, watch))

    def release(self) -> None:
        """Leave the script and PyTorch as they were found, the flags that advice has set too."""
        from advisor.tuners.act.artifacts import have_own_keys
        from advisor.tuners.act.in_force import IN_FORCE

        if self._pilot is not None:
            self._pilot.release()
            self._pilot = None
        IN_FORCE.release()
        have_own_keys()


IN_CHARGE = InCharge()
