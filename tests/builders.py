"""Made-up places with a clock of their own, and what is tuned on them: nothing waits, nothing is
real."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import optuna
import torch
from torch import Tensor, nn

from advisor.arguments import Model, Permit
from advisor.cache.config import Config
from advisor.cache.key import Key
from advisor.cache.record import Choice, Measurement, Record, Target, Trial, Winner
from advisor.cache.task import Task
from advisor.tuners import fingerprint, target
from advisor.tuners.act.pilot.protocol import BlockRequest, BlockResult
from advisor.tuners.act.pilot.script_facts import ScriptFacts
from advisor.tuners.environment import detect, own_threads
from advisor.tuners.knobs import SearchContext
from advisor.tuners.measure.run.session import CommandProcess, PilotSession
from advisor.tuners.measure.runner import Block, Compared, ConfigFailed, Runner
from advisor.tuners.search.journal import JournaledTrial
from advisor.tuners.search.plan import Clock, Progress
from advisor.tuners.search.race import SearchResult
from advisor.tuners.search.space import Space
from advisor.tuners.search.tuner import SearchOptions, Tuner
from tests.cache import examples

OK = Compared("ok", "as fp32")
GAINS: Mapping[tuple[str, object], float] = {
    ("precision", "bf16"): 1.3,
    ("precision", "tf32"): 1.15,
    ("precision", "fp16"): 1.25,
    ("channels_last", True): 1.1,
    ("compile", "reduce-overhead"): 2.0,
    ("compile", "cudagraphs"): 1.6,
    ("compile", "default"): 1.5,
    ("compile", "blocks"): 1.45,
    ("fused_optimizer", True): 1.02,
    ("cudnn_benchmark", True): 1.03,
    ("step_graph", True): 1.7,
}
"""How many times as fast a value makes a step."""
BUILDS_S = {"none": 0.2, "cudagraphs": 4.0}
"""Seconds of a first step by the knob compile; others take COMPILING_S."""
COMPILING_S = 28.0


def space(device: str = "cuda", **more: Any) -> Space:
    """What is offered on a GPU to a run, or to a workload with `use="capture"`."""
    given = {"capability": (9, 0), "compiles": True, "use": "pilot", "batches": (64,), **more}
    return Space.of(SearchContext(device=device, **given))


class Net(nn.Module):
    """Keeps the number formats that it was called in. `backward`: called in it, under bf16."""

    backward = staticmethod(lambda gradient: gradient)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        self.dtypes.append(out.dtype)
        if out.dtype == torch.bfloat16 and out.requires_grad:
            out.register_hook(self.backward)
        return out.mean((2, 3))


def trained(
    net: nn.Module,
    batches: int | Iterable[Tensor] = 8,
    optimizer: torch.optim.Optimizer | None = None,
    shape: tuple[int, ...] = (4, 3, 8, 8),
) -> torch.optim.Optimizer:
    """The optimizer that a script's steps were made with, on batches or so many of them."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x in torch.randn(batches, *shape) if isinstance(batches, int) else batches:
        loss = net(x).square().mean()
        assert loss.dtype == torch.float32
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return optimizer


def net_of(name: str = "model.py:Net") -> nn.Module:
    """The model that a target names, below the current folder."""
    return target.build(target.load(target.parse(name), Config()))


def record_here(
    baseline: Choice,
    winners: tuple[Winner, ...],
    trials: tuple[Trial, ...] = (),
    *,
    name: str = "model.py:Net",
    **changes: Any,
) -> Record:
    """One of a file's model at 4x3x8x8 on this machine's CPU, with some of its key changed.

    Args:
        changes: as `examples.changed` has them, with two underscores for a dot.
    """
    spec = target.parse(name)
    key = Key(
        environment=detect("cpu"),
        model=fingerprint.of_model(net_of(name)),
        task=Task.of(name, {"shape": (4, 3, 8, 8)}),
        threads=own_threads(),
    )
    for field, value in changes.items():
        key = examples.changed(key, field.replace("__", "."), value)
    return replace(
        examples.record(key),
        target=Target(name=spec.name, origin=spec.origin, code=spec.code),
        baseline=baseline,
        winners=winners,
        input=Config(),
        trials=trials,
    )


class MadeUp:
    """A place whose configs are as fast as their values say.

    Args:
        step_s: of the baseline.
        gains: in place of GAINS.
        noise: of a block's time, as the standard deviation of its logarithm.
        seed: of that noise.
        load: by what a step takes longer at a time.
        waits_s: seconds that a step of a config waits for its data at least.

    Attributes:
        time: seconds that have passed.
        fails: outcome by value of a knob; 'hangs' builds for ever.
        verdicts: comparisons by value of a knob.
        stops: what is raised at a block, by its number.
        blocks: configs of the blocks so far; `compared` and `forgotten` likewise.
    """

    def __init__(
        self,
        baseline: Config,
        *,
        step_s: float = 1 / 30,
        gains: Mapping[tuple[str, object], float] = GAINS,
        noise: float = 0.005,
        seed: int = 0,
        load: Callable[[float], float] = lambda _time: 1.0,
        waits_s: Callable[[Config], float] = lambda _config: 0.0,
    ) -> None:
        self.baseline = baseline
        self.step_s, self.gains, self.noise = step_s, gains, noise
        self.load, self.waits_s = load, waits_s
        self.time = 0.0
        self.compiling_s = COMPILING_S
        self.fails: dict[tuple[str, object], str] = {}
        self.verdicts: dict[tuple[str, object], Compared] = {}
        self.stops: dict[int, BaseException] = {}
        self.blocks: list[Config] = []
        self.compared: list[Config] = []
        self.forgotten: list[Config] = []
        self.saved: list[Config] = []
        self._draw = random.Random(seed)
        self._last: Config | None = None
        self._built: set[Config] = set()

    def now(self) -> float:
        """The clock that a tuning goes by."""
        return self.time

    def speedup(self, config: Config) -> float:
        """Of a config over the baseline, in truth."""
        return self._gain(config) / self._gain(self.baseline) * config.batch / self.baseline.batch

    def _gain(self, config: Config) -> float:
        larger = math.pow(config.batch / self.baseline.batch, -0.9)
        return larger * math.prod(self.gains.get(pair, 1.0) for pair in config.items())

    def _seconds(self, config: Config) -> tuple[float, float]:
        """Of a step, and how long it waits for its data."""
        step_s = self.step_s * self._gain(self.baseline) / self._gain(config)
        waited_s = max(0.0, self.waits_s(config) - step_s)
        return step_s + waited_s, waited_s

    def _spend(self, seconds: float, deadline_s: float) -> None:
        self.time += min(seconds, deadline_s)
        if seconds > deadline_s:
            self._last = None
            raise ConfigFailed("timed_out", "no time is left")

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
        """See Place."""
        self.blocks.append(config)
        if stop := self.stops.get(len(self.blocks)):
            raise stop
        step_s, waited_s = self._seconds(config)
        first_s = self._switch(config, deadline_s)
        slower = self.load(self.time) * math.exp(self._draw.gauss(0, self.noise))
        self._spend((steps + warm) * step_s * slower, deadline_s - first_s)
        return Block(
            steps=steps,
            samples=steps * config.batch,
            seconds=steps * step_s * slower,
            first_s=first_s,
            waited_s=steps * waited_s * slower,
            peak_bytes=2**30,
        )

    def _switch(self, config: Config, deadline_s: float) -> float:
        """Seconds that it takes; what a config shares with another is built once."""
        if config == self._last:
            return 0.0
        self._last = None
        outcome = next((o for pair, o in self.fails.items() if pair in config.items()), "")
        if outcome == "hangs":
            self._spend(math.inf, deadline_s)
        if outcome:
            self._spend(1.0, deadline_s)
            raise ConfigFailed(outcome, f"it is made to have {outcome}")
        code = config.only("compile", "precision", "channels_last", "batch_size")
        mode = str(config.get("compile", "none"))
        first_s = 0.05 if code in self._built else BUILDS_S.get(mode, self.compiling_s)
        self._spend(first_s, deadline_s)
        self._built.add(code)
        self._last = config
        return first_s

    def compare(self, config: Config, *, deadline_s: float) -> Compared:
        """See Place."""
        self.compared.append(config)
        self._last = None
        self.time += min(2.0, deadline_s)
        return next((v for pair, v in self.verdicts.items() if pair in config.items()), OK)

    def forget(self, config: Config) -> None:
        """See Place."""
        self.forgotten.append(config)

    def save(self, config: Config, file: Path) -> None:
        """See Place."""
        self.saved.append(config)
        file.write_bytes(b"compiled")


_: type[Runner] = MadeUp


SCRIPT = ScriptFacts(
    model="ab" * 32,
    family="",
    libraries=(),
    modules=1,
    parameters=1,
    convolves=False,
    repeats=False,
    shape=(4, 8),
    dtype="float32",
    others="",
    varies=False,
    optimizer="sgd",
    own=Config(),
    kept=(),
    limits=(),
    rank=0,
    processes=1,
    device="cpu",
    threads=1,
    workers=0,
    room=0,
)
"""What is seen of a script that trains on a CPU."""


class MadeUpSession(PilotSession):
    """A start of a command, without a process.

    Args:
        seen: of its script.
        step_s: seconds of a step under a config.
        ends: called with a config and the steps that this start has made; why it is over.
    """

    def __init__(
        self,
        seen: ScriptFacts = SCRIPT,
        *,
        step_s: Callable[[Config], float] = lambda _config: 0.01,
        ends: Callable[[Config, int], Exception | None] = lambda _config, _made: None,
    ) -> None:
        self.seen, self._step_s, self._ends = seen, step_s, ends
        self.made, self.forgotten = 0, []
        self.command = cast(CommandProcess, SimpleNamespace(ended=False))

    def block(self, request: BlockRequest, until: float) -> Block:
        self.made += request.steps + request.warm
        if (ended := self._ends(request.config, self.made)) is not None:
            raise ended
        steps, samples = request.steps, request.steps * self.seen.shape[0]
        return Block(steps=steps, samples=samples, seconds=steps * self._step_s(request.config))

    def results(self, request: BlockRequest, until: float) -> list[BlockResult]:
        return [BlockResult(reason=OK.reason)]

    def end(self) -> None:
        """Nothing was started."""


class Heard(Progress):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.best: list[Config] = []
        self.notices: list[str] = []
        self.phases: list[str] = []

    def visited(self, done: JournaledTrial, what: str, best: Config, left_s: float) -> None:
        self.trials.append(done.trial)
        self.best.append(best)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def phase(self, what: str) -> None:
        self.phases.append(what)

    @property
    def configs(self) -> list[Config]:
        """In the order of their visits, the baseline first."""
        return [trial.config for trial in self.trials]


def tuned(
    runner: MadeUp,
    of: Space,
    budget_s: float = 90.0,
    *,
    heard: Progress | None = None,
    study: optuna.Study | None = None,
    **scope: Any,
) -> SearchResult:
    """What a search finds on a made-up place."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = study or optuna.create_study(direction="maximize")
    given, clock = SearchOptions(**{"modules": 150, **scope}), Clock(budget_s, now=runner.now)
    return Tuner(runner, of, study, given, heard or Progress(), clock).run()


def advised(found: SearchResult, use: str = "pilot") -> Config:
    """The config that a use is advised."""
    return next(w.choice.config for w in found.winners if (w.use, w.free) == (use, False))


def speedup(found: SearchResult, use: str = "pilot") -> float:
    """That its advice promises."""
    return next(w.choice.speedup for w in found.winners if (w.use, w.free) == (use, False))


def lookup_arguments(target: Any = None, **given: Any) -> dict[str, Any]:
    """The arguments of `advisor.lookup` that have what is given by keyword where it belongs."""
    model = {field.name for field in fields(Model)}
    permit = {field.name for field in fields(Permit)}
    if "duration" in given:
        given["length"] = str(given.pop("duration"))
    named = {"model_args": "args", "steps": "length", "cache": "store"}
    given = {named.get(name, name): value for name, value in given.items()}
    described = {name: given.pop(name) for name in [*given] if name in model}
    permitted = {name: given.pop(name) for name in [*given] if name in permit}
    if "permit" not in given:
        given["permit"] = Permit(**permitted)
    return {"target": Model(target, **described), **given}


def measured(
    config: Config,
    rate: float,
    first_step_s: float = 1.0,
    *,
    stage: str = "compute",
    origin: str = "guess",
    peak_bytes: int = 2**30,
) -> Trial:
    """A trial of a config that ran once at this many samples/s, known to a percent."""
    return Trial(
        number=0,
        config=config,
        measurement=Measurement(
            outcome="ok",
            samples_per_s=rate,
            low=0.99 * rate,
            high=1.01 * rate,
            step_s=1 / rate if rate else 0.0,
            first_step_s=first_step_s,
            peak_bytes=peak_bytes,
        ),
        stage=stage,
        origin=origin,
        seconds=1.0,
    )


def verified(config: Config, outcome: str = "ok", reason: str = "within rounding") -> Trial:
    """The comparison of a config with strict fp32, and how it ended."""
    found = measured(config, 0.0, stage="numerics", origin="fp32")
    return replace(found, measurement=Measurement(outcome=outcome, reason=reason))
