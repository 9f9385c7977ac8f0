"""`advisor check`: faults of a script's own settings are found, and correct scripts are clean."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from advisor.cache.config import Config
from advisor.tuners.act.pilot.pilot import Pilot
from advisor.tuners.act.pilot.protocol import BlockRequest
from advisor.tuners.act.process_flags import PROCESS_FLAGS
from advisor.tuners.decisions import POINTS
from advisor.tuners.measure.run.recorded_steps import RecordedSteps
from advisor.tuners.measure.run.run import comparison
from tests.face.commands import LINEAR, advisor
from tests.runs.forked import COMPARE_LIMIT_S, TOLERANCE, Scaled, ScriptedGuide, left_behind

HALF, FP16 = torch.bfloat16, torch.float16


class CheckingGuide(ScriptedGuide):
    """A guide that checks the script, and then lets it train 16 steps more."""

    def __init__(self) -> None:
        super().__init__(lambda space: requests(Config(space.default | self.seen.own)))


def requests(own: Config) -> Iterator[BlockRequest]:
    asked = comparison(own, own, TOLERANCE, COMPARE_LIMIT_S, checks=True)
    yield BlockRequest(config=own, own=own, steps=POINTS, compare=asked)
    yield BlockRequest(config=own, own=own, steps=16)
    yield BlockRequest(config=own, own=own)


class Net(nn.Module):
    """`inside`: the format of an autocast of its own, as Accelerate adds one; `lost`: in that, a
    layer gets no gradient."""

    def __init__(
        self, dropout: float = 0.0, inside: torch.dtype | None = None, *, lost: bool = False
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 64)
        self.last, self.dropout = nn.Linear(64, 8), dropout
        self.inside, self.lost = inside, lost

    def forward(self, x: Tensor) -> Tensor:
        with nullcontext() if self.inside is None else torch.autocast("cpu", self.inside):
            hidden = functional.dropout(self.first(x).relu(), self.dropout)
            weight = self.second.weight
            if self.lost and torch.is_autocast_enabled("cpu"):
                weight = weight.detach() + 0 * weight
            hidden = functional.linear(hidden, weight, self.second.bias)
            return self.last(hidden.relu()).float()


def compiled(net: Net, fault: str = "") -> Callable[[Tensor], Tensor]:
    """torch.compile with a backend whose code has a fault. (No fault of Inductor shows on every
    machine.)"""
    stale = net.second.weight.detach().clone()

    def backend(graph: torch.fx.GraphModule, _examples: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            given = list(args)
            for at, one in enumerate(given):
                if isinstance(one, Tensor) and one.shape == stale.shape:
                    if fault == "layer":
                        given[at] = Scaled.apply(one, 0.9)
                    if fault == "stale":
                        given[at] = one + (stale - one).detach()
            lost = 0.3 * (fault == "dropout")
            return tuple(functional.dropout(one, lost) for one in graph(*given))

        return run

    return torch.compile(net, backend=backend)  # type: ignore[return-value]


class SkipsDecay(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        decay, group["weight_decay"] = group["weight_decay"], 0.0
        super().step(closure)
        group["weight_decay"] = decay


class OwnAlgorithm(torch.optim.AdamW):
    """Its step differs from AdamW's on purpose."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.mul_(0.9)


def every_epoch(schedule: Any, step: int) -> None:
    if step % 4 == 3:
        schedule.step()


def check(
    *,
    net: dict[str, Any] | None = None,
    fault: str | None = None,
    autocast: torch.dtype | None = None,
    scaled: bool = False,
    half_loss: bool = False,
    optimizer: type[torch.optim.AdamW] = torch.optim.AdamW,
    schedule: Callable[[Any, int], None] = every_epoch,
    rebuilt: bool = False,
    closure: bool = False,
    clips: str = "",
    samples: int = 128,
    evaluates: bool = False,
) -> list[str]:
    """Trains a script while it is checked. Returns why it differs from fp32, and other faults.

    Args:
        net: arguments of Net.
        fault: of its compiled code; None: it does not compile.
        schedule: called after each step; `samples` / 32 steps make an epoch.
        evaluates: whether a second pass over its data follows each step.
        rebuilt: whether the schedule belongs to an optimizer that the script has replaced.
    """
    PROCESS_FLAGS.release()
    guide, recorder = CheckingGuide(), RecordedSteps()
    pilot = Pilot(guide, recorder)
    torch.manual_seed(1)
    built = Net(**net or {})
    model = built if fault is None else compiled(built, fault)
    chosen: Any = optimizer(built.parameters(), lr=1e-2, weight_decay=0.1)
    plan = torch.optim.lr_scheduler.StepLR(chosen, 1)
    if rebuilt:
        chosen = torch.optim.AdamW(built.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    data = TensorDataset(torch.randn(samples, 16), torch.randint(8, (samples,)))
    for step, (x, y) in enumerate(row for _ in range(10) for row in DataLoader(data, 32)):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            output = model(x)
        loss = functional.cross_entropy(output, y)
        if half_loss:
            loss = loss.to(HALF)
        backward = partial(compute, chosen, scaler.scale(loss))
        if closure:
            chosen.step(backward)
        else:
            backward()
            if clips == "unscaled":
                scaler.unscale_(chosen)
            if clips:
                clip_grad_norm_(built.parameters(), 1.0)
            scaler.step(chosen)
            scaler.update()
        schedule(plan, step)
        if evaluates:
            list(DataLoader(data, 64))
    pilot.release()
    recorder.close()
    assert left_behind() == []
    compared, trained = guide.results
    return [compared.reason] * (compared.outcome != "ok") + [*trained.faults]


def compute(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    return loss


def is_overridden(schedule: Any, step: int) -> None:
    schedule.step()
    schedule.optimizer.param_groups[0]["lr"] = 1e-2


def named(value: object) -> str:
    """The id of a test's parameter: the same in all processes."""
    return " ".join(value) if isinstance(value, dict) else ""


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"fault": ""},
        {"autocast": HALF},
        {"autocast": HALF, "fault": ""},
        {"autocast": FP16, "scaled": True},
        {"autocast": FP16, "scaled": True, "clips": "unscaled"},
        {"clips": "plain"},
        {"optimizer": OwnAlgorithm},
        {"closure": True},  # as Lightning does
        {"net": {"inside": HALF}},
        {"schedule": lambda schedule, step: step % 8 or schedule.step()},
        # Warm-up by hand, before the schedule begins.
        {"schedule": lambda schedule, step: schedule.optimizer.param_groups[0].update(lr=step)},
        {"schedule": lambda *_: None, "samples": 40 * 32, "evaluates": True},
    ],
    ids=named,
)
def test_correct_script_is_clean(how: dict[str, Any]) -> None:
    assert check(**{"net": {"dropout": 0.2 * bool(how)}, **how}) == []


LAYER = "the gradient of second.weight is "


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"fault": "layer"}, LAYER),
        ({"fault": "layer", "autocast": HALF}, LAYER),
        ({"fault": "stale"}, ""),
        ({"fault": "dropout", "net": {"dropout": 0.3}}, "variance of the output 0"),
        (
            {"net": {"inside": HALF, "lost": True}},
            "% off, most of it in the gradient of second.weight; at most 5",
        ),
        ({"optimizer": SkipsDecay}, ", which skips its weight decay, is "),
        ({"autocast": FP16}, "fp16 without a GradScaler: 0"),
        ({"closure": True, "scaled": True}, "an optimizer steps with gradients of a loss that "),
        ({"autocast": FP16, "scaled": True, "clips": "scaled"}, "clip_grad_norm_ clips gradients"),
        ({"autocast": HALF, "half_loss": True}, "the loss is computed in bfloat16, which rounds"),
        ({"autocast": FP16, "half_loss": True, "scaled": True}, "the loss is computed in bfloat16"),
        (
            {"schedule": lambda *_: None},
            "StepLR never moves although an epoch ended; call its step(): the learning rate",
        ),
        ({"schedule": is_overridden}, "StepLR has no effect: the learning rate stays 0.01"),
        pytest.param(
            {"rebuilt": True},
            "StepLR moves an optimizer that never steps",
            marks=pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
        ),
    ],
    ids=named,
)
def test_planted_fault_is_found_and_named(how: dict[str, Any], message: str) -> None:
    found = check(**how)
    assert len(found) == 1 and message in found[0], found


@pytest.mark.parametrize(("fix", "code"), [("", 1), (".float()", 0)])
def test_command_tells_faults_by_its_exit_code(tmp_path: Path, fix: str, code: int) -> None:
    source = LINEAR.format(steps=10**7).replace(").square()", f").square(){fix}")
    autocast = 'with torch.autocast("cpu", torch.bfloat16): loss ='
    (tmp_path / "script.py").write_text(source.replace("loss =", autocast))
    done = advisor(tmp_path, "check", "--budget", "30s", "--json", "--", "python", "script.py")
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    assert found["own"] == "bf16" and found["compared"]
    assert ["bfloat16" in fault for fault in found["faults"]] == [True] * code
    assert found["steps_per_s"] > 0 or found["untimed"]
    assert {*found["without"], *found["failed"]} <= {"bf16"}
