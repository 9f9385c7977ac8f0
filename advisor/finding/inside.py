"""The pilot from inside: a script that calls `advisor.apply()` and nothing else."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from advisor.cache import settings
from advisor.cache.kinds import Seconds
from advisor.cache.task import permissions
from advisor.errors import NoRecord, UsageError
from advisor.finding.conducted import Conducted
from advisor.finding.lookups import Lookup, looked_up_by, warn
from advisor.finding.meant import folder
from advisor.finding.piloted import Found, Terms
from advisor.tuners.act.pilot.pilot import ACTIVE_PILOT
from advisor.tuners.search.plan import Plan

if TYPE_CHECKING:
    from advisor.tuners.act.advice import Advice
    from advisor.tuners.act.pilot.pilot import StepComparer

PERMISSIONS = ("precisions", "deterministic", "max_memory", "tolerance", "compile")
"""Of apply()'s arguments, those that say of a run what its user permits."""


class _OfScript(Lookup):
    """A lookup by the running script's file; where it misses, its pilot has the word."""

    leaves = (NoRecord,)


def applied(asked: Mapping[str, Any], *, tune: float | str | None, strict: bool) -> Advice:
    """`apply` without a target: what was tuned for the script's file, and a pilot for its run.

    Raises:
        AdvisorError: with strict=True, an argument is wrong or no store can be read.
    """
    advice = looked_up_by(_OfScript(None, asked), asked, strict=strict)
    advice.set_flags()
    if settings.disabled() or asked.get("mode") == "infer":
        return advice
    try:
        ACTIVE_PILOT.attach(_guide(asked, tune, strict), None if tune is None else _watch())
    except UsageError as exc:
        if strict:
            raise
        warn(f"{exc}. No pilot is attached")
    return advice


def _guide(asked: Mapping[str, Any], tune: float | str | None, strict: bool) -> Found:
    terms = Terms(
        given=permissions({name: asked.get(name) for name in PERMISSIONS}),
        cache=asked.get("cache"),
        on_miss=asked.get("on_miss"),
        strict=strict,
        folder=folder(),
    )
    if tune is None:
        return Found(own_command(), terms)
    seconds = Plan.of({"budget": Seconds().checked("tune", tune)}).seconds
    return Conducted(own_command(), terms, tune_s=seconds)


def _watch() -> StepComparer:
    """What compares configs in a run that is tuned within itself."""
    from advisor.tuners.measure.run.recorded_steps import RecordedSteps

    return RecordedSteps(careful=True)


def release() -> None:
    """Take away all that advisor has put into this process: the pilot that `apply()` attached or
    `advisor run` brought, its hooks, what it has set in models and optimizers, and every flag.

    The script trains on as it would have without advisor.
    """
    ACTIVE_PILOT.release()


def own_command() -> list[str]:
    """How this process was started, as a person would type it."""
    python, *words = sys.orig_argv
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["python" if shutil.which("python") == sys.executable else python, *words]
    words = [word for word in words if word != "-u"]  # torchrun's own
    return ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1"), *words]
