"""What a run costs, in a record, its report, and the trackers of a script."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import advisor
from advisor.cache.config import Config
from advisor.cache.record import Record
from advisor.cost import mfu
from advisor.errors import RecordDamaged, UsageError
from advisor.frameworks.callbacks import advisor_callback
from advisor.open_store import open_records, refusal
from advisor.report.cost import sections
from advisor.report.html import page
from advisor.resolve import tracking
from advisor.tuners.measure.runner import Block
from advisor.tuners.search.plan import Plan
from tests import builders
from tests.builders import MadeUp, Net, space, trained
from tests.cache import examples
from tests.runs.test_apply import facts_of, record_of

FP32, BF16 = examples.DEFAULT, examples.DEFAULT.replace(precision="bf16")
COST = {"flops": 1e9, "convolved": 0.0, "uncounted": "", "epoch": 50_000, "price": 0.0}
FIGURES = {"advisor/config": "bf16", "advisor/samples_per_s": 2.5}


def record(key: Any = examples.KEY, **cost: Any) -> Record:
    return replace(examples.record(key), cost=Config(COST | cost))


def shown(one: Record, price: float | None = None) -> str:
    return " ".join(line for part in sections(one, price) for line in part.lines)


def test_mfu_is_that_of_a_count_by_hand() -> None:
    """Of a linear layer of 4096x4096 on an H200: 6 FLOPs a weight and sample."""
    flops = 6.0 * 4096 * 4096
    one, rate = record(flops=flops), 4e6
    assert mfu(one, BF16, rate) == pytest.approx(flops * rate / 989.4e12)
    assert mfu(one, FP32, rate / 10) == pytest.approx(flops * rate / 10 / 67e12)
    tf32 = FP32.replace(precision="tf32")
    assert mfu(one, tf32, rate / 2) == pytest.approx(flops * rate / 2 / 494.7e12)
    # By torch's default, convolutions use TF32.
    half = mfu(record(flops=flops, convolved=flops / 2), FP32, rate / 10)
    assert half == pytest.approx(flops * rate / 20 * (1 / 67e12 + 1 / 494.7e12))


def test_no_peak_is_guessed() -> None:
    for name, value in (("name", "NVIDIA H300"), ("mig", "1g.18gb"), ("name", "NVIDIA L40S-24Q")):
        other = record(examples.changed(examples.KEY, f"device.{name}", value))
        assert mfu(other, BF16, 1e3) == 0 and "No MFU: no peak is known for" in shown(other)
    assert mfu(record(), FP32.replace(precision="fp8"), 1e3) == 0
    assert mfu(record(examples.changed(examples.KEY, "dtype", "float64")), FP32, 1e3) == 0
    v100 = record(examples.changed(examples.KEY, "device.name", "Tesla V100-SXM2-32GB"))
    assert mfu(v100, BF16, 1e3) == 0 < mfu(v100, FP32, 1e3)


def test_money_of_an_epoch_or_of_a_million_samples() -> None:
    default, fast = (examples.choice(c, 1000.0 * n, n) for c, n in ((FP32, 1.0), (BF16, 4.0)))
    winners = tuple(replace(one, choice=fast) for one in examples.record().winners)
    one = replace(record(price=3.6), baseline=default, winners=winners)
    assert "At 3.6 an hour, the advice saves 0.0375 per epoch, of 50,000 samples." in shown(one)
    assert "At 7.2 an hour, the advice saves 0.075 per epoch" in shown(one, 7.2)
    assert "saves 0.75 per 1,000,000 samples." in shown(replace(one, cost=one.cost | {"epoch": 0}))
    assert "an hour" not in shown(replace(one, cost=one.cost | {"price": 0.0}))


def test_the_report_says_what_is_not_known_and_a_page_escapes_it() -> None:
    none = shown(record(flops=0.0, uncounted="CUDA out of memory"))
    assert "The FLOPs are not counted: CUDA out of memory." in none
    assert "No energy: NVML reads no energy counter of NVIDIA H200." in none
    assert list(sections(examples.record())) == []  # an older record
    text = page(record(uncounted="<script>alert(1)</script>"))
    assert "because these are not counted: &lt;script" in text


def test_hostile_values_are_refused(tmp_path: Path) -> None:
    wrong = ("flops", -1.0), ("flops", "1"), ("epoch", 2.5), ("price", 1e300), ("uncounted", 1)
    for name, value in wrong:
        with pytest.raises(RecordDamaged, match=r"^cost"):
            refusal(record(**{name: value}))
    store = open_records(str(tmp_path))
    store.put(record(flops=-1.0))
    assert store.newest(9) == [] and len(store.damaged) == 1


def test_a_price_is_money_per_hour() -> None:
    assert Plan.of({"price": "2.5/h"}).price == Plan.of({"price": 2.5}).price == 2.5
    for price in ("-1/h", "2.5/d", "nan/h", "inf", "1e3/h", "", "2.5/h\n"):
        with pytest.raises(UsageError, match="expected money per hour"):
            Plan.of({"price": price})


class Powered(MadeUp):
    """A machine that needs 300 W, whatever it does."""

    def block(self, *given: Any, **named: Any) -> Block:
        block = super().block(*given, **named)
        return replace(block, joules=300 * block.seconds)


def test_joules_of_a_sample_follow_from_the_timed_blocks() -> None:
    default = space().default
    found = builders.tuned(Powered(default), space())
    for choice in (found.baseline, *(winner.choice for winner in found.winners)):
        assert choice.joules == pytest.approx(300 / choice.samples_per_s, rel=0.05)
    assert builders.tuned(MadeUp(default), space()).baseline.joules == 0.0


def opened(update: Callable[..., object] | None = None) -> tuple[SimpleNamespace, dict[str, Any]]:
    """Returns a tracker with an open run, as wandb, and what is written into it."""
    written: dict[str, Any] = {}
    put = update or (lambda given, **_how: written.update(given))
    return SimpleNamespace(
        run=SimpleNamespace(config=SimpleNamespace(update=put), summary=written)
    ), written


def test_figures_reach_an_open_run_and_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tracker that fails or hangs costs a line, or a moment."""
    wandb, written = opened()
    free = threading.Event()
    hangs, later = opened(lambda *_given, **_how: free.wait())
    fails, never = opened(lambda *_given, **_how: 1 / 0)
    for module in (wandb, fails, SimpleNamespace(run=None), SimpleNamespace(), None, hangs):
        monkeypatch.setattr(tracking, "TRACKER_WAIT_S", 0.01 if module is hangs else 60.0)
        monkeypatch.setitem(sys.modules, "wandb", module)
        if module is None:
            monkeypatch.delitem(sys.modules, "wandb")
            monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
        tracking.write(FIGURES, "wandb")
    assert (written, never, later) == (FIGURES, {}, {})
    free.set()
    lines = capsys.readouterr().err.splitlines()
    wrong = ("ZeroDivisionError", "no open run", "no open run", "not installed where the script")
    assert len(lines) == 4 and all(map(str.__contains__, lines, wrong))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", ["torch.utils.tensorboard", "tensorboardX"])
def test_a_summary_writer_of_the_script_is_found(module: str, tmp_path: Path) -> None:
    pytest.importorskip(module.replace("torch.utils.", ""))
    made = pytest.importorskip(module).SummaryWriter
    made(str(tmp_path / "a")).close()
    writer = made(str(tmp_path / "b"))
    tracking.write(FIGURES, "tensorboard")
    writer.close()
    found = [b"advisor/" in file.read_bytes() for file in sorted(tmp_path.glob("*/*"))]
    assert found == [False, True]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_and_wandb_take_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow, wandb = pytest.importorskip("mlflow"), pytest.importorskip("wandb")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run, wandb.init(mode="offline", dir=tmp_path) as other:
        tracking.write(FIGURES, *("wandb", "mlflow", "tensorboard"))
        assert dict(other.config) == {"advisor/config": "bf16"}
        assert other.summary["advisor/samples_per_s"] == 2.5
    data = mlflow.get_run(run.info.run_id).data
    assert data.metrics == {"advisor/samples_per_s": 2.5}
    assert data.tags["advisor/config"] == "bf16"
    assert "--log" not in capsys.readouterr().err


def test_a_run_writes_its_figures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback of a framework does the same as `advisor run --log`."""
    seen = facts_of(lambda: trained(Net()))
    known = record_of(seen, Config(precision="bf16", channels_last=True))
    open_records(None).put(replace(known, cost=Config(COST)))
    monkeypatch.setattr(tracking, "TIMED", 3)
    wandb, written = opened()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    advisor_callback(nn.Module).on_train_begin("arguments", control=None)
    net = Net()
    optimizer = trained(net, 8)
    assert written == {}
    trained(net, 12, optimizer)
    advisor.release()
    assert written.pop("advisor/samples_per_s") > 0 and tracking.SINKS == []
    what = {"advisor/config": "channels_last, bf16", "advisor/record": known.id}
    assert written == what | {"advisor/speedup": known.winner("pilot").speedup}  # no peak is known


def test_a_run_that_ends_before_its_figures_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_exit = list[Callable[[], None]]()
    monkeypatch.setattr("atexit.register", at_exit.append)
    tracking.expect("wandb")
    at_exit[0]()
    assert "--log wandb: the run ended before its speed was known" in capsys.readouterr().err
    tracking.SINKS.clear()
    at_exit[0]()
    assert capsys.readouterr().err == ""
