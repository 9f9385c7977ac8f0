"""apply() and lookup(): what was found, served to a training script."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.arguments import Model, Permit, check_type, length_given, urls_of
from advisor.cache import settings
from advisor.cache.asking import Said
from advisor.cache.config import Config
from advisor.cache.explanation import Explanation, Seen
from advisor.cache.kinds import Seconds, Shape
from advisor.cache.match import Match, Query
from advisor.cache.seal import UNSIGNED
from advisor.cache.task import Task, rows
from advisor.errors import AdvisorError, AdvisorWarning, NoRecord, UsageError, printable
from advisor.finding.agree import decided_by_first
from advisor.finding.answer import Answer, akin, carried
from advisor.finding.artifacts import artifacts_of
from advisor.finding.find import Outcome, find
from advisor.finding.job import asked_for
from advisor.finding.meant import CODE, Meant, folder, script
from advisor.finding.request import Fits, Request, processes
from advisor.opening import Cache, open_records
from advisor.printed import tune_again, tune_first
from advisor.tuners.act.advice_usage import STALE, Served
from advisor.tuners.act.ranks import Group
from advisor.tuners.target import EDITED

if TYPE_CHECKING:
    from torch import nn

    from advisor.store import Store
    from advisor.tuners.act.advice import Advice

IN_HAND = "give the model itself: advisor.apply(model)"
"""What can be looked up where a file's code cannot be compared."""
_NOT_THEIRS = ("advisor", "torch")
"""Packages no line of which is the user's: a hook of PyTorch's stands between."""
_log = logging.getLogger("advisor")


def apply(
    target: str | nn.Module | Model | None = None,
    *,
    shape: Shape | Sequence[Shape] | None = None,
    batch: int | str | None = None,
    capture: bool = False,
    permit: Permit = Permit(),
    length: int | str | None = None,
    store: Store | Cache = None,
    on_miss: str | None = None,
    tune: float | str | None = None,
    strict: bool = False,
) -> Advice:
    """Set the process-wide flags that were found best, and return the advice for the rest.

    Never breaks a run: without a fitting record the advice changes nothing, and one
    AdvisorWarning says why. Creates no CUDA context and starts no process.

    Args:
        target: as given to `advisor tune`, the model itself, or an `advisor.Model` that also says
            how it is trained; None for what was tuned for the run of this script, which counts
            first, or for a model of the script or of a module that it imports from beside it, or
            from around the package that it lies in.
        shape: of one batch, (64, 3, 256, 256) or '64x3x256x256'; its first number is the batch.
            A list of shapes for a job that was tuned for a mix of them.
        batch: another batch size than shape's, or 'free' for the best one that was found
            (`advice.batch_size` says which).
        capture: the script gives its step to `advice.capture`: one CUDA graph over the whole step
            may be advised too. Without it what is best without is served.
        permit: only configs that keep to it. Of what it leaves out, whatever was tuned will do;
            `deterministic` is implied where the process already asks PyTorch for it.
        length: of this job: its steps at its batch, as 500, or its time, as '2h': the best over
            that job, with what is paid before the first step counted in. Default: what the record
            was tuned for.
        store: an `advisor.Store`, a store's URL, or several, looked up in order; default:
            $ADVISOR_CACHE, else [tool.advisor] cache in pyproject.toml, else the user's cache
            folder.
        on_miss: 'default' (torch's defaults), 'nearest' (what is safe to carry over from the
            nearest record: same target, other shape or device) or 'request' (torch's defaults, and
            a tuning is asked for at the first server among the stores, with the code sent along,
            in a thread that nothing waits for). Default: $ADVISOR_ON_MISS, else [tool.advisor]
            on-miss.
        tune: without a target alone: seconds, or '10m', of a run of which nothing is known. In this
            time configs are tried at step boundaries; the run trains in each of them, goes on with
            the best, and remembers it. A config that fails costs only its step, and none is tried
            with little memory free. What changes numerics, as bf16 does, is tried where
            `permit.precisions` names it, and used although it could not be compared with fp32.
        strict: raise instead of warning.

    Without a target a pilot is attached too, unless the script was started by `advisor run` or
    `advisor tune`, which bring one. At the first steps of training it looks up what `advisor tune
    -- COMMAND` found for this very model, and applies it in the running script, in the place of the
    flags; `permit`, `store`, `on_miss` and `strict` hold for that too. It stays away from a script
    that follows the advice by itself, with `prepare` and the like. `advisor.release()` takes it
    away.

    In an initialised torch.distributed process group, rank 0 looks up for all ranks; every rank
    must call this then.

    Raises:
        AdvisorError: with strict=True, why there is no advice.
    """
    given = dict(locals())
    target, asked = _asked(**{name: given[name] for name in given.keys() - {"tune", "strict"}})
    if target is None:
        from advisor.finding.inside import applied

        return applied(asked, tune=tune, strict=strict)
    here = Lookup(target, asked) if tune is None else _Untunable(target, asked, tune)
    advice = looked_up_by(here, asked, strict=strict)
    advice.set_flags()
    return advice


def lookup(
    target: str | nn.Module | Model | None = None,
    *,
    shape: Shape | Sequence[Shape] | None = None,
    batch: int | str | None = None,
    capture: bool = False,
    permit: Permit = Permit(),
    length: int | str | None = None,
    store: Store | Cache = None,
    on_miss: str | None = None,
    strict: bool = False,
) -> Advice:
    """As `apply`, without touching any flag of the process: `advice.set_flags()` does that.

    `lookup(...).explanation` says what was looked for, what was found, and in which fields every
    other record of the target differs.
    """
    given = dict(locals())
    target, asked = _asked(**{name: given[name] for name in given.keys() - {"strict"}})
    return looked_up_by(Lookup(target, asked), asked, strict=strict)


def _asked(
    target: str | nn.Module | Model | None,
    permit: Permit = Permit(),
    length: int | str | None = None,
    store: Store | Cache = None,
    **own: Any,
) -> tuple[str | nn.Module | None, dict[str, Any]]:
    """The target, and all else that `lookup` was given as `Request.of` takes it."""
    model = Model.of(target)
    check_type("permit", permit, Permit)
    described = model.given | permit.given
    asked = {row.keyword for row in rows(Task).values() if row.asked}
    described = {name: value for name, value in described.items() if name in asked}
    return model.target, own | described | length_given(length) | {"cache": urls_of(store)}


def looked_up(target: Any, asked: Mapping[str, Any], *, fits: Fits) -> Advice:
    """As `lookup` of these keyword arguments, of the configs that fit alone.

    Raises:
        TypeError: `lookup` has no such argument.
        AdvisorError: with strict=True, why there is no advice.
    """
    given = inspect.signature(lookup).bind(target, **asked).arguments
    strict = bool(given.pop("strict", False))
    target, own = _asked(**given, fits=fits)
    return looked_up_by(Lookup(target, own), own, strict=strict)


def looked_up_by(here: Lookup, asked: Mapping[str, object], *, strict: bool) -> Advice:
    """What a lookup finds, where advice is not switched off; see `served`."""
    set_up_logging()
    device = _device(asked.get("device"))
    batch = named_batch(asked)
    if settings.disabled():
        return _disabled(device, batch).advice()
    return served(here, device=device, batch=batch, strict=strict)


def offered(target: str, asked: Mapping[str, Any]) -> Offer:
    """What a lookup would find, without a warning where that is nothing. Torch is not loaded.

    Args:
        asked: as `Request.of` takes it.
    """
    device, batch = _device(asked.get("device")), named_batch(asked)
    if settings.disabled():
        return _disabled(device, batch)
    here = Lookup(target, asked)
    try:
        return here.offer()
    except AdvisorError as exc:
        return here.nothing(str(exc), device, batch, silent=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a lookup serves, before it is advice.

    Attributes:
        config: with the name of every knob.
        device: where it is followed.
        batch_size: None where that is the script's.
        served: where it comes from.
    """

    config: Config
    device: str
    batch_size: int | None
    served: Served

    def advice(self) -> Advice:
        """The advice that a script follows."""
        from advisor.tuners.act.advice import Advice
        from advisor.tuners.knobs import Advised

        return Advice(
            Advised(self.config),
            device=self.device,
            batch_size=self.batch_size,
            served=self.served,
        )


def _disabled(device: str, batch: int | None) -> Offer:
    said = Served(status="disabled", reason="ADVISOR_DISABLE is set")
    return Offer(config=Config(), device=device, batch_size=batch, served=said)


def served(here: Lookup, *, device: str, batch: int | None = None, strict: bool = False) -> Advice:
    """What a lookup finds, on every rank alike; torch's defaults and one warning where that is
    nothing, or fails in any way.

    Raises:
        AdvisorError: with strict=True, why there is no advice.
    """
    try:
        # In a process group one rank decides for all: ranks that train differently hang.
        advice = decided_by_first(lambda: here.offer().advice(), device=device, batch=batch)
        advice.artifacts = artifacts_of(advice, here.cache)
        return advice
    except AdvisorError as exc:
        left = isinstance(exc, here.leaves)
        if strict and not left:
            raise
        return here.nothing(str(exc), device, batch, silent=left).advice()
    except Exception as exc:  # the one catch-all: whatever goes wrong, training goes on
        if strict:
            raise
        _log.error("the lookup failed; please report this", exc_info=exc)
        why = f"the lookup failed ({type(exc).__name__}: {exc})"
        return here.nothing(why, device, batch).advice()


class Lookup:
    """One lookup, as far as it came: for what is said of it where it fails."""

    leaves: tuple[type[AdvisorError], ...] = ()
    """Misses that are not its to speak of."""
    goes_on = "with torch's defaults"
    """How training does where there is no advice."""
    left_out = False
    """Whether a record's config is left out, of which all is said."""

    def __init__(self, target: object, asked: Mapping[str, object]) -> None:
        self._target = target
        self._asked = asked
        self._request: Request | None = None
        self._meant: Meant | None = None
        self._query: Query | None = None
        self._found: Said[Outcome] | None = None

    @property
    def cache(self) -> Cache:
        """Where it looks, as `open_records` takes it."""
        return self._asked.get("cache")  # type: ignore[return-value]

    def offer(self) -> Offer:
        """Raises AdvisorError where there is none."""
        request = self._request = self._requested()
        query = self._query = self._queried(request)
        records = open_records(request.cache, patient=False, fallback=True)
        meant = self._meant = Meant(request)
        said = self._found = find(records, request, meant, query)
        outcome = said.chosen
        if outcome is None:
            raise said.failed[0]
        if outcome.answered is not None:
            return self._served(request, outcome.match, outcome.answered)
        match = outcome.match
        if not outcome.refused and request.nearest and akin(query, match.nearest):
            return self._near(request, query, match)
        why = outcome.refused or self._missed(request, query, match)
        if request.asks and NoRecord not in self.leaves:
            near = match.record or match.nearest
            why += f"; {asked_for(request, query, near, self._folder())}"
        raise NoRecord(why)

    def _requested(self) -> Request:
        return Request.of(self._target, self._asked)

    def _queried(self, request: Request) -> Query:
        return request.query()

    def _folder(self) -> Path | None:
        """Where the script was started, as far as that is known."""
        return folder()

    def _served(self, request: Request, match: Match, answered: Answer) -> Offer:
        record = match.record
        assert record is not None
        reason, said = answered.reason, []
        ranks = processes()
        if ranks != record.key.task.processes:
            reason += f"; measured in {record.key.task.processes} process"
            reason += f"{'es' * (record.key.task.processes > 1)}, this job has {ranks}"
        name = record.target.name
        if match.differs:
            listed = ", ".join(map(str, match.differs))
            reason += f"; measured elsewhere: {listed}"
            said.append(
                f"{name} was tuned under other conditions ({listed}); its advice is used and may "
                f"be out of date. To measure again: {tune_again(record, request.cache)}"
            )
        if record.stale:
            reason += f"; marked stale by advisor verify: {record.stale}"
            said.append(
                f"the advice for {name} no longer holds ({record.stale}); it is used all the "
                f"same. To measure again: {tune_again(record, request.cache)}"
            )
        answered = dataclasses.replace(answered, reason=reason)
        if self.left_out:
            said.clear()
        status = STALE if match.differs or record.stale else "exact"
        return self._made(request, answered, match, status, said)

    def _near(self, request: Request, query: Query, match: Match) -> Offer:
        near = match.nearest
        assert near is not None
        answered = carried(near, request, query)
        differs = ", ".join(map(str, match.differs))
        reason = f"the nearest record, {near.id}, differs in {differs}; {answered.reason}"
        said = (
            f"{request.called or near.target.name} was not tuned for this; {reason}. To measure "
            f"it, {tune_first(request, near)}"
        )
        served = Answer(config=answered.config, reason=reason)
        return self._made(request, served, match, "nearest", [said])

    def _made(
        self, request: Request, answered: Answer, match: Match, status: str, said: Sequence[str]
    ) -> Offer:
        """The offer, and one warning for all there is to say."""
        from advisor.tuners.knobs import TORCH

        record = match.record or match.nearest
        assert record is not None and self._found is not None
        lines = [*said, *(f"{fault}; looked on without it" for fault in self._found.failed)]
        if lines:
            warn(". ".join(lines))
        held = next(one for one in self._found.held if one.record is record)
        reason = answered.reason if held.trusted else f"{answered.reason}; {UNSIGNED}"
        _log.info("record %s (%s): %s", record.id, status, reason)
        config = answered.config
        return Offer(
            config=config,
            device=request.device,
            batch_size=config.batch or request.batch,
            served=Served(
                status=status,
                reason=reason,
                doubt=answered.doubt,
                signed=held.trusted,
                record=record,
                explanation=self._explained(status, reason, record.id),
                use=request.use,
                # What the task itself asks for, as determinism, is no default of torch's.
                default=Config(record.baseline.config | TORCH),
                flags=answered.flags or None,
                gains=answered.gains,
            ),
        )

    def nothing(self, why: str, device: str, batch: int | None, *, silent: bool = False) -> Offer:
        """Torch's defaults, and one warning."""
        from advisor.tuners.knobs import TORCH

        if self._found is not None:
            others = map(str, [*self._found.failed, *self._found.damaged])
            why = "; ".join([why, *(other for other in others if other not in why)])
        if not silent:
            warn(f"{why}. Training goes on {self.goes_on}")
        return Offer(
            config=TORCH,
            device=device,
            batch_size=batch,
            served=Served(
                status="miss",
                reason=why,
                explanation=self._explained("miss", why, ""),
                default=TORCH,
            ),
        )

    def _missed(self, request: Request, query: Query, match: Match) -> str:
        near, differs = match.nearest, match.differs
        if near is not None and differs and differs[0].field == CODE:
            first, differs = differs[0], differs[1:]
            if first.wanted != EDITED:
                return f"the code of {near.target.name} is {first.wanted}; {IN_HAND}"
            what = f"the code of {near.target.name} has changed since it was tuned"
        else:
            this = "" if isinstance(request.target, str) else "this "
            what = f"{this}{request.called} was not tuned for this"
            if request.given.get("command"):
                what = "this run was not tuned"
            elif request.target is None:
                what = f"nothing was tuned for {script().name} or a module that it imports"
            what += f" on {query.environment.device.name}"
        if differs:
            what += f" (the nearest record differs in {', '.join(map(str, differs))})"
        return f"{what}; {tune_first(request, near)}"

    def _explained(self, status: str, reason: str, served: str) -> Explanation | None:
        """None where it did not come as far as looking."""
        if not (self._request and self._meant and self._query and self._found):
            return None
        return Explanation(
            target=self._request.called,
            query=self._query,
            stores=tuple(self._found.stores),
            served=served,
            status=status,
            reason=reason,
            refused=tuple(self._found.damaged),
            seen=tuple(
                Seen(
                    store=one.store.url,
                    record=one.record,
                    signed=one.trusted,
                    apart=self._meant.apart(one.record),
                )
                for one in self._found.held
            ),
        )


def named_batch(asked: Mapping[str, object]) -> int | None:
    """The batch that the script names, as far as it can be read."""
    from advisor.cache.kinds import Shapes
    from advisor.finding.request import known_batch

    given = {}
    with contextlib.suppress(AdvisorError):
        if asked.get("shape") is not None:
            given["shapes"] = Shapes().checked("shape", asked["shape"])
    return known_batch(given, asked.get("batch"))


def _device(asked: object) -> str:
    """Where training goes on without advice: the device asked for, if PyTorch knows it."""
    from advisor.tuners.environment import default_device
    from advisor.tuners.torch_facts import torch

    if asked is not None and isinstance(asked, str | torch.device):
        with contextlib.suppress(RuntimeError):
            return str(torch.device(asked))
    return default_device()


def warn(message: str) -> None:
    """One warning for a whole job: rank 0 speaks for all. It names the user's own line, if any."""
    if not _speaks():
        _log.debug(message)
        return
    message = printable(message)  # a setting or a store may have said it
    level, frame = 2, sys._getframe().f_back
    while frame and str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THEIRS:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"advisor: {message}", AdvisorWarning, stacklevel=level)


def tell(message: str) -> None:
    """One line on stderr for a whole job: what somebody waits for. In the log, if that has it."""
    if _log.isEnabledFor(logging.INFO) or not _speaks():
        _log.info("%s", message)
    else:
        sys.stderr.write(f"advisor: {printable(message)}\n")


def _speaks() -> bool:
    """Whether this is rank 0, or there are no ranks."""
    group = Group.current()
    return (str(group.rank) if group else os.environ.get("RANK", "0")) == "0"


def set_up_logging() -> None:
    """Log to stderr where $ADVISOR_LOG asks for it."""
    level = os.environ.get("ADVISOR_LOG", "")
    if level and not _log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("advisor %(levelname)s %(message)s"))
        _log.addHandler(handler)
        named = logging.getLevelNamesMapping().get(level.upper())
        _log.setLevel(named if named is not None else logging.INFO)


class _Untunable(Lookup):
    """A lookup by a target, with a time to tune it in: `apply` tunes running scripts alone."""

    def __init__(self, target: object, asked: Mapping[str, object], tune: object) -> None:
        super().__init__(target, asked)
        self._tune = tune

    def offer(self) -> Offer:
        """Raises UsageError."""
        Seconds().checked("tune", self._tune)
        raise UsageError(
            f"tune={self._tune!r} tunes the running script, and takes no target; leave one of them "
            "out, or measure the target before, with advisor tune"
        )
