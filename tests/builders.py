"""Test data, and simulated runners with a clock of their own, so that tests neither wait nor need a
GPU."""

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
"""Speed-up of a step by knob value."""
BUILDS_S = {"none": 0.2, "cudagraphs": 4.0}
"""Seconds of the first step by value of the knob compile. Other values take COMPILING_S."""
COMPILING_S = 28.0


def space(device: str = "cuda", **more: Any) -> Space:
    """Returns the space of a run on a GPU, or of a workload with `use="capture"`."""
    given = {"capability": (9, 0), "compiles": True, "use": "pilot", "batches": (64,), **more}
    return Space.of(SearchContext(device=device, **given))


class Net(nn.Module):
    """Records the dtype of each call. `backward`: a hook that is called in backward under bf16."""

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
    """Trains on the given batches, or on so many random ones. Returns the optimizer."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x in torch.randn(batches, *shape) if isinstance(batches, int) else batches:
        loss = net(x).square().mean()
        assert loss.dtype == torch.float32
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return optimizer


def net_of(name: str = "model.py:Net") -> nn.Module:
    """Returns the model that a target names, relative to the current folder."""
    return target.build(target.load(target.parse(name), Config()))


def record_here(
    baseline: Choice,
    winners: tuple[Winner, ...],
    trials: tuple[Trial, ...] = (),
    *,
    name: str = "model.py:Net",
    **changes: Any,
) -> Record:
    """Returns a record of a model at 4x3x8x8 on this machine's CPU, with changes to its key.

    Args:
        changes: fields of the key as in `examples.changed`, with two underscores for a dot.
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
    """Simulates a runner whose configs are as fast as the gains of their values.

    Args:
        step_s: seconds of a step of the baseline.
        gains: speed-up by knob value.
        noise: standard deviation of the logarithm of a block's time.
        seed: of the noise.
        load: factor by which steps are slower at a given time.
        waits_s: seconds in which the loader makes a batch. Shorter steps wait for it.
        fails: outcome by knob value; 'hangs' never finishes building.
        verdicts: result of the comparison by knob value.
        stops: exception to raise, by number of the block.

    Attributes:
        time: seconds that have passed.
        blocks: configs of all blocks so far. `compared` and `forgotten` are alike.
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
        fails: Mapping[tuple[str, object], str] | None = None,
        verdicts: Mapping[tuple[str, object], Compared] | None = None,
        stops: Mapping[int, BaseException] | None = None,
    ) -> None:
        self.baseline = baseline
        self.step_s, self.gains, self.noise = step_s, gains, noise
        self.load, self.waits_s = load, waits_s
        self.time = 0.0
        self.compiling_s = COMPILING_S
        self.fails, self.verdicts, self.stops = fails or {}, verdicts or {}, stops or {}
        self.blocks: list[Config] = []
        self.compared: list[Config] = []
        self.forgotten: list[Config] = []
        self.saved: list[Config] = []
        self._draw = random.Random(seed)
        self._last: Config | None = None
        self._built: set[Config] = set()

    def now(self) -> float:
        """Returns the simulated time."""
        return self.time

    def speedup(self, config: Config) -> float:
        """Returns the true speed-up of a config over the baseline."""
        return self._gain(config) / self._gain(self.baseline) * config.batch / self.baseline.batch

    def _gain(self, config: Config) -> float:
        larger = math.pow(config.batch / self.baseline.batch, -0.9)
        return larger * math.prod(self.gains.get(pair, 1.0) for pair in config.items())

    def _seconds(self, config: Config) -> tuple[float, float]:
        """Returns the seconds of a step, and those of them in which it waits for data."""
        step_s = self.step_s * self._gain(self.baseline) / self._gain(config)
        waited_s = max(0.0, self.waits_s(config) - step_s)
        return step_s + waited_s, waited_s

    def _spend(self, seconds: float, deadline_s: float) -> None:
        self.time += min(seconds, deadline_s)
        if seconds > deadline_s:
            self._last = None
            raise ConfigFailed("timed_out", "no time is left")

    def block(self, config: Config, steps: int, *, warm: int = 1, deadline_s: float) -> Block:
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
        """Switches to a config. Returns the seconds that it takes; shared code is built once."""
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
        self.compared.append(config)
        self._last = None
        self.time += min(2.0, deadline_s)
        return next((v for pair, v in self.verdicts.items() if pair in config.items()), OK)

    def forget(self, config: Config) -> None:
        self.forgotten.append(config)

    def save(self, config: Config, file: Path) -> None:
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
"""The facts of a script that trains on a CPU."""


class MadeUpSession(PilotSession):
    """Simulates a started command without a process.

    Args:
        seen: the facts of its script.
        step_s: seconds of a step under a config.
        ends: called with a config and the number of steps so far; returns why it ended, or None.
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
        """There is no process to end."""


class Heard(Progress):
    """Records everything that is reported."""

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
        """The tried configs in order, the baseline first."""
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
    """Returns the result of a search with a simulated runner."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = study or optuna.create_study(direction="maximize")
    given, clock = SearchOptions(**{"modules": 150, **scope}), Clock(budget_s, now=runner.now)
    return Tuner(runner, of, study, given, heard or Progress(), clock).run()


def advised(result: SearchResult, use: str = "pilot") -> Config:
    """Returns the config that is advised for a use."""
    return next(w.choice.config for w in result.winners if (w.use, w.free) == (use, False))


def speedup(result: SearchResult, use: str = "pilot") -> float:
    """Returns the speed-up of the config that is advised for a use."""
    return next(w.choice.speedup for w in result.winners if (w.use, w.free) == (use, False))


def lookup_arguments(target: Any = None, **given: Any) -> dict[str, Any]:
    """Returns the arguments of `advisor.lookup`, with flat keywords sorted into its parts."""
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
    """Returns a trial of a config that ran at `rate` samples/s, with an interval of one percent."""
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
    """Returns the trial that compared a config with strict fp32, with this outcome."""
    trial = measured(config, 0.0, stage="numerics", origin="fp32")
    return replace(trial, measurement=Measurement(outcome=outcome, reason=reason))
