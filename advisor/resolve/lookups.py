"""apply() and lookup(): what a training script is served."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from advisor.arguments import Model, Permit, check_type, length_given, urls_of
from advisor.cache import settings
from advisor.cache.kinds import Seconds, Shape, Shapes
from advisor.cache.task import Task, rows
from advisor.errors import AdvisorError, AdvisorWarning, NoRecord, UsageError, printable
from advisor.open_store import Cache
from advisor.resolve.artifacts import artifacts_of
from advisor.resolve.broadcast import broadcast_from_rank0
from advisor.resolve.find import DISABLED, look_up
from advisor.resolve.request import Fits, Request, known_batch
from advisor.tuners.act.advice_usage import Served
from advisor.tuners.act.ranks import Group

if TYPE_CHECKING:
    from torch import nn

    from advisor.store import Store
    from advisor.tuners.act.advice import Advice

_LIBRARIES = ("advisor", "torch")
"""A warning names the user's own line, past the lines of these packages."""
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
        from advisor.resolve.inside import apply_to_script

        return apply_to_script(asked, tune=tune, strict=strict)

    def request() -> Request:
        if tune is not None:
            Seconds().checked("tune", tune)
            raise UsageError(
                f"tune={tune!r} tunes the running script, and takes no target; leave one of them "
                "out, or measure the target before, with advisor tune"
            )
        return Request.of(target, asked)

    advice = advise(request, asked, strict=strict)
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
    return advise(lambda: Request.of(target, asked), asked, strict=strict)


def lookup_for(target: Any, asked: Mapping[str, Any], *, fits: Fits) -> Advice:
    """As `lookup` with these keyword arguments, among the configs that fit.

    Raises:
        TypeError: `lookup` has no such argument.
        AdvisorError: with strict=True, why there is no advice.
    """
    given = inspect.signature(lookup).bind(target, **asked).arguments
    strict = bool(given.pop("strict", False))
    target, own = _asked(**given, fits=fits)
    return advise(lambda: Request.of(target, own), own, strict=strict)


def _asked(
    target: str | nn.Module | Model | None,
    permit: Permit = Permit(),
    length: int | str | None = None,
    store: Store | Cache = None,
    **own: Any,
) -> tuple[str | nn.Module | None, dict[str, Any]]:
    """The target, and the other arguments of `lookup` as `Request.of` takes them."""
    model = Model.of(target)
    check_type("permit", permit, Permit)
    described = model.given | permit.given
    asked = {row.keyword for row in rows(Task).values() if row.asked}
    described = {name: value for name, value in described.items() if name in asked}
    return model.target, own | described | length_given(length) | {"cache": urls_of(store)}


def advise(make: Callable[[], Request], asked: Mapping[str, Any], *, strict: bool) -> Advice:
    """As `serve`, with one warning for all that the user should know."""
    advice, notices = serve(make, asked, strict=strict)
    warn_of(notices)
    return advice


def warn_of(notices: Sequence[str]) -> None:
    """One warning for all notices, if there are any."""
    if notices:
        warn(". ".join(notices))


def serve(
    make: Callable[[], Request],
    asked: Mapping[str, Any],
    *,
    strict: bool,
    goes_on: str = "with torch's defaults",
) -> tuple[Advice, list[str]]:
    """The advice for a request, on every rank alike, and what to warn of. It changes nothing if
    advice is switched off, nothing fits or anything fails.

    Args:
        asked: what the request is made of; `device`, `cache`, `quiet` and the batch are read.
        goes_on: how training does without advice.

    Raises:
        AdvisorError: with strict=True, why there is no advice.
    """
    from advisor.tuners.knobs import TORCH

    set_up_logging()
    notices: list[str] = []
    if settings.disabled():
        return _advice(DISABLED, asked), notices
    try:
        # In a process group one rank decides for all: ranks that train differently hang.
        served = broadcast_from_rank0(lambda: look_up(make(), notices))
        if strict and served.status == "miss" and not asked.get("quiet"):
            raise NoRecord(served.reason)
        return _advice(served, asked), notices
    except AdvisorError as exc:
        if strict:
            raise
        why = str(exc)
    except Exception as exc:  # the one catch-all: whatever goes wrong, training goes on
        if strict:
            raise
        _log.error("the lookup failed; please report this", exc_info=exc)
        why = f"the lookup failed ({type(exc).__name__}: {exc})"
    served = Served(status="miss", reason=why, config=TORCH, default=TORCH)
    return _advice(served, asked), [f"{why}. Training goes on {goes_on}"]


def _advice(served: Served, asked: Mapping[str, Any]) -> Advice:
    from advisor.tuners.act.advice import Advice
    from advisor.tuners.knobs import Advised

    device, batch, config = _device(asked.get("device")), named_batch(asked), served.config
    if batch is not None and config.batch:
        config = config.at(batch)  # this rank's own
    batch = config.batch or batch
    advice = Advice(Advised(config), device=device, batch_size=batch, served=served)
    advice.artifacts = artifacts_of(served, device, asked.get("cache"))
    return advice


def named_batch(asked: Mapping[str, object]) -> int | None:
    """The batch that the script names, as far as it can be read."""
    given = {}
    with contextlib.suppress(AdvisorError):
        if asked.get("shape") is not None:
            given["shapes"] = Shapes().checked("shape", asked["shape"])
    return known_batch(given, asked.get("batch"))


def _device(asked: object) -> str:
    """The device that is asked for, if PyTorch knows it: training goes on there without advice."""
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
    while frame and str(frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES:
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
