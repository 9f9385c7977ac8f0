"""`advisor explain -- COMMAND`: what slows a script down is found at its line, with its time."""

from __future__ import annotations

import io
import itertools
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from advisor.cache.limit import Limit
from advisor.tuners.act.pilot.limits import WAITS, padding
from advisor.tuners.act.pilot.pilot import Pilot
from advisor.tuners.act.pilot.protocol import BlockRequest
from advisor.tuners.search.space import Space
from tests.face.commands import advisor
from tests.face.test_report_page import check_page
from tests.runs.forked import ScriptedGuide, left_behind

SLEEP_S, EPOCH, BATCH = 0.01, 16, 2


class Slow(list[Tensor]):
    def __getitem__(self, index: Any) -> Any:
        time.sleep(SLEEP_S)  # loading
        return super().__getitem__(index)

    def __reduce__(self) -> Any:
        time.sleep(8 * SLEEP_S)  # checkpoint
        return Slow, ()


ITEMS = [torch.full((16,), number) for number in range(EPOCH * BATCH)]
ITEM = compile("warnings.warn(WAITS); time.sleep(4 * SLEEP_S)", "<made-up item()>", "exec")


def scaled(items: Tensor, factor: int) -> Tensor:  # recompiling
    return items * factor % len(ITEMS)


def requests(space: Space) -> Iterator[BlockRequest]:
    own = space.default
    for _ in range(2):
        yield BlockRequest(config=own, own=own, steps=2 * EPOCH, limits=True)
    yield BlockRequest(config=own, own=own)


def limits(what: str, workers: int = 0) -> dict[str, Limit]:
    """Trains a script with one fault. Returns what was found at the end, by its first word."""
    model = nn.Sequential(nn.Embedding(len(ITEMS), 4), nn.Flatten(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guide, shown = ScriptedGuide(requests), warnings.showwarning
    torch.compiler.reset()  # else another test has reached its limit of recompilations
    again = torch.compile(scaled, backend="eager", dynamic=False)
    step = itertools.count(-EPOCH)
    pilot, data = Pilot(guide), Slow(ITEMS) if what == "loading" else ITEMS
    while len(guide.results) < 2:
        for items in DataLoader(data, BATCH, num_workers=workers):
            if what == "recompiling":
                items = again(items, max(0, next(step)))
            optimizer.zero_grad()
            model(items).square().mean().backward()
            optimizer.step()
            if what == "waiting":
                exec(ITEM)  # waiting
        if what == "evaluation":
            model.eval()
            time.sleep(8 * SLEEP_S)  # evaluation
            model.train()
        if what == "checkpoint":
            torch.save(Slow(), io.BytesIO())
    pilot.release()
    assert left_behind() == [] and warnings.showwarning == shown
    return {one.what.split()[0]: one for one in guide.results[-1].limits}


@pytest.mark.filterwarnings(f"ignore:{WAITS}")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("what", ["loading", "waiting", "recompiling", "evaluation", "checkpoint"])
def test_a_planted_limit_is_named_at_its_line(what: str, workers: int) -> None:
    found = limits(what, workers)[what]
    assert found.file == __file__
    assert f"# {what}" in Path(__file__).read_text().splitlines()[found.line - 1]
    times = {"loading": 1, "waiting": 4, "recompiling": 0, "evaluation": 8, "checkpoint": 8}
    least = times[what] * SLEEP_S
    assert what != "recompiling" or found.what.startswith("recompiling scaled: factor == "), found
    assert found.seconds > least / 2  # each sample is off by its distance from the last one


IDS = torch.tensor([[5, 6, 7, 8, 9, 2, 2, 2, 2, 2], [5, 6, 7, 8, 9, 5, 6, 7, 2, 2]])


def test_padding_is_measured() -> None:
    for given, name, share in (
        ({"ids": [IDS]}, "ids", 0.25),  # the first pad of a row may end its text
        ({"ids": [IDS.flip(1)]}, "ids", 0.25),
        ({"attention_mask": [IDS != 2]}, "attention_mask", 0.35),
        ({"padding_mask": [IDS == 2]}, "padding_mask", 0.35),
        ({"flags": [IDS != 2], "ids": [IDS[:, :6]], "none": [IDS[:0]]}, "", 0.0),
        ({"positions": [torch.arange(10).expand(2, 10)]}, "", 0.0),
    ):
        assert padding(given) == (name, pytest.approx(share)), given


SCRIPT = """
import time, torch
class Slow(list):
    def __getitem__(self, index):
        time.sleep(0.02)
        return super().__getitem__(index)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10**6):
    for items in torch.utils.data.DataLoader(Slow([torch.ones(8)] * 64), 2):
        model(items).square().mean().backward()
        optimizer.step()
"""


def test_command_names_the_line_and_its_report_has_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    train = "-- python train.py"
    tuned = advisor(tmp_path, *f"tune --budget 5s --no-compile --json {train}".split()).stdout
    document = json.loads(advisor(tmp_path, *f"explain --budget 8s --json {train}".split()).stdout)
    if "error" in document:
        assert "give a larger --budget" in document["error"]["message"]
        return
    first = document["limits"][0]
    assert (first["what"], first["file"], first["line"]) == ("loading", "train.py", 5)
    assert first["seconds"] > 0.01 and first["gain"] > 1.02 and document["ended"] == ""
    key = json.loads(tuned)["record"]["id"]
    text = advisor(tmp_path, "report", key, "--html", "-").stdout
    page = check_page(text, ("chosen", "limits"))
    assert "What no setting can fix" in page.text and "train.py:5" in page.text
