"""apply() without a target: the pilot from inside the running script."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from advisor.cache import settings
from advisor.cache.kinds import Seconds
from advisor.cache.task import permissions
from advisor.errors import UsageError
from advisor.resolve.lookups import advise, warn
from advisor.resolve.online import OnlineTuner
from advisor.resolve.record_guide import RecordGuide, RunPolicy
from advisor.resolve.request import Request, folder
from advisor.tuners.act.pilot.pilot import ACTIVE_PILOT
from advisor.tuners.search.plan import Plan

if TYPE_CHECKING:
    from advisor.tuners.act.advice import Advice

PERMISSIONS = ("precisions", "deterministic", "max_memory", "tolerance", "compile")
"""Arguments of apply() that say what the user of a run permits."""


def apply_to_script(asked: Mapping[str, Any], *, tune: float | str | None, strict: bool) -> Advice:
    """The advice for the script's file; a pilot looks up again for its run.

    Raises:
        AdvisorError: with strict=True, an argument is wrong or no store can be read.
    """
    asked = {**asked, "quiet": True}
    advice = advise(lambda: Request.of(None, asked), asked, strict=strict)
    advice.set_flags()
    if settings.disabled() or asked.get("mode") == "infer":
        return advice
    try:
        guide, tune_s = _guide(asked, tune, strict)
        comparer = None
        if tune_s:
            from advisor.tuners.measure.run.recorded_steps import RecordedSteps

            comparer = RecordedSteps(careful=True)
        ACTIVE_PILOT.attach(guide, comparer)
    except UsageError as exc:
        if strict:
            raise
        warn(f"{exc}. No pilot is attached")
    return advice


def _guide(
    asked: Mapping[str, Any], tune: float | str | None, strict: bool
) -> tuple[RecordGuide, float]:
    policy = RunPolicy(
        given=permissions({name: asked.get(name) for name in PERMISSIONS}),
        cache=asked.get("cache"),
        on_miss=asked.get("on_miss"),
        strict=strict,
        folder=folder(),
    )
    if tune is None:
        return RecordGuide(own_command(), policy), 0.0
    seconds = Plan.of({"budget": Seconds().checked("tune", tune)}).seconds
    return OnlineTuner(own_command(), policy, tune_s=seconds), seconds


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
