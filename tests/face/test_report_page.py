"""The report on a record: its HTML page, `advisor show KEY`, and the lines of advice."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from advisor.cache.config import Config
from advisor.cache.key import Key
from advisor.cache.record import Part, Record, Trial
from advisor.frameworks.tables import hf
from advisor.open_store import open_records
from advisor.report import sections
from advisor.report.data import Comparison, Timeline
from advisor.report.html import across, page
from advisor.report.sections import report
from advisor.report.text import ratios
from advisor.tuners import fp8
from tests import builders
from tests.cache import examples
from tests.face.commands import advisor
from tests.face.test_answer import compiled

TAGS = frozenset(
    re.findall(
        r"\w+",
        "html head meta title style body a header h1 h2 p nav ul li main section figure figcaption "
        "span b small svg desc text line circle rect div table caption thead tbody tr th td pre "
        "code dl dt dd",
    )
)
SECTIONS = ("chosen", "tried", "knobs", "loader", "numerics", "script")
RUN = examples.changed(
    examples.changed(examples.KEY, "command", ("python", "train.py")), "target", "train.py"
)
FAST = examples.DEFAULT.replace(precision="bf16", channels_last=True)


class Page:
    """A parsed page. Raises if the page is not well-formed XML."""

    def __init__(self, text: str) -> None:
        self.elements = list(ElementTree.fromstring(text).iter())
        self.tags = [one.tag for one in self.elements]
        self.text = "".join(self.elements[0].itertext())

    def values(self, name: str) -> list[str]:
        """The values of an attribute in all elements."""
        return [one.attrib[name] for one in self.elements if name in one.attrib]


def flat(text: str) -> str:
    """The text without whitespace, which a terminal and a page change."""
    return "".join(text.split())


def full_record() -> Record:
    """A record with content for every section, failures included."""
    made, paired = examples.record(), FAST.replace(num_workers=2, pin_memory=False)
    reason = "loss within 0.03% of fp32 over 24 steps, worst gradient 3.2% (conv.bias)"
    trials = (
        examples.trial(0),
        replace(examples.trial(1, FAST.at(512), "out_of_memory"), origin="large"),
        examples.trial(2, FAST),
        examples.trial(3, FAST.at(128)),
        builders.measured(paired, 2400.0, stage="input"),
        builders.measured(paired.replace(pin_memory=True), 2900.0, stage="input"),
        builders.verified(FAST, reason=reason),
        builders.verified(FAST.replace(precision="tf32"), "wrong", "said so"),
    )
    return replace(
        made,
        winners=examples.winners(
            made.baseline,
            examples.choice(FAST, 3000.0, 1.5),
            free_loop=examples.choice(FAST.at(128), 3300.0, 1.65),
        ),
        trials=tuple(replace(one, number=number) for number, one in enumerate(trials)),
        parts=(
            Part(knob=Config(precision="bf16"), ratio=1.4, low=1.3, high=1.5),
            Part(knob=Config(pin_memory=True), ratio=1.2, low=0.9, high=9.0, stage="input"),
        ),
        stale="loop: 1.1x now, 1.5x then",
    )


def check_page(text: str, sections: Sequence[str] = SECTIONS) -> Page:
    """Parse a page. Checks that it is self-contained, accessible and has valid coordinates."""
    assert text.startswith("<!DOCTYPE html>")
    parsed = Page(text)
    assert set(parsed.tags) <= TAGS
    assert not any(name.startswith("on") for one in parsed.elements for name in one.attrib)
    ids = parsed.values("id")
    assert len(ids) == len(set(ids)) and set(sections) < set(ids)
    assert {link.removeprefix("#") for link in parsed.values("href")} < set(ids)
    assert all(link.startswith("#") for link in parsed.values("href"))
    labels = {one for value in parsed.values("aria-labelledby") for one in value.split()}
    assert labels < set(ids)
    assert not parsed.values("src") and not parsed.values("style")
    for one in parsed.elements:
        if one.tag == "svg":
            assert "aria-labelledby" in one.attrib or one.attrib["aria-hidden"] == "true"
        if one.attrib.get("class") == "scroll":
            assert one.attrib["tabindex"] == "0" and one.attrib["role"] == "region"
    assert parsed.tags.count("h1") == 1
    assert parsed.tags.count("table") == parsed.tags.count("caption")
    for name in ("x", "y", "cx", "cy", "x1", "x2", "y1", "y2", "width"):
        for value in parsed.values(name):
            assert 0 <= float(value.removesuffix("%")) <= 100, (name, value)
    return parsed


def test_report_replaces_an_older_page(tmp_path: Path) -> None:
    record = full_record()
    open_records(None).put(record)
    file = tmp_path / "page.html"
    file.write_text("of another day")
    done = advisor(tmp_path, "report", record.id, "--html", str(file))
    assert (done.returncode, done.stdout) == (0, f"page: {file}\n"), done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]
    printed = advisor(tmp_path, "report", record.id[:6], "--html", "-").stdout
    assert printed.rstrip("\n") == file.read_text().rstrip("\n")
    refused = advisor(tmp_path, "report", record.id, "--html", str(tmp_path))
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("key", [examples.KEY, RUN], ids=["model", "run"])
def test_show_prints_the_same_facts_as_the_page(key: Key, tmp_path: Path) -> None:
    record = replace(full_record(), key=key)
    open_records(None).put(record)
    shown = advisor(tmp_path, "show", record.id)
    assert shown.returncode == 0, shown.stderr
    terminal, written = flat(shown.stdout), flat(check_page(page(record)).text)
    data = report(record)
    facts = [data.title, data.headline, data.stale, *(value for _, value in data.facts)]
    for section in data.sections:
        facts += [section.title, *section.lines, *section.code]
        rows = section.table.rows if section.table else []
        for cell in (cell for row in rows for cell in row.cells):
            # A narrow column wraps a cell; other columns come between its lines.
            assert flat(cell) in written and all(word in terminal for word in cell.split()), cell
    for fact in map(flat, facts):
        assert fact in terminal and fact in written, fact


def test_sections_tables_and_charts_of_a_full_record() -> None:
    record = full_record()
    by_name = {section.name: section for section in report(record).sections}
    assert tuple(by_name) == SECTIONS
    tables = [name for name, section in by_name.items() if section.table]
    assert tables == ["chosen", "tried", "knobs", "loader"]
    charts = [section.chart.title for section in by_name.values() if section.chart]
    assert not {section.title for section in by_name.values()} & set(charts), "a heading twice"
    parsed = check_page(page(record))
    assert "out of memory" in parsed.text and "said so" in parsed.text
    assert "loss within 0.03% of fp32" in parsed.text and "wrong result" in parsed.text
    assert "1.50x (1.47-1.53) as fast as torch's default" in parsed.text
    assert "batch free" in parsed.text and '# or, with the batch free: batch="free"' in parsed.text
    loader, tried, knobs = by_name["loader"].table, by_name["tried"].chart, by_name["knobs"].chart
    assert loader and [row.cells[3] for row in loader.rows] == ["80%", "97%"]
    assert isinstance(tried, Timeline) and isinstance(knobs, Comparison)
    assert [(one.at_s, one.samples_per_s, one.at_batch) for one in tried.points] == [
        (1.5, 2000.0, True),
        (3.0, 0.0, False),
        (4.5, 2000.0, True),
        (6.0, 2000.0, False),
    ]
    assert tried.leaders == [tried.points[0]], "the best so far is at the user's batch"
    scale = across(knobs)  # a wide interval is cut, so that others stay visible
    assert scale.cuts(9.0) and not scale.cuts(0.9) and not scale.cuts(1.5)
    places = [scale.at(value) for value in (0.9, 1.0, 1.2, 1.4, 9.0)]
    assert all(a < b for a, b in itertools.pairwise(places)) and places[-1] == 99


def test_remarks_name_the_step_from_which_the_advice_pays() -> None:
    assert "The advice pays from step 939 on (1m 02s)." in sections.remarks(compiled())


def test_empty_sections_are_left_out() -> None:
    made, left = examples.record(trials=0), ("chosen", "numerics", "script")
    default = tuple(replace(one, choice=made.baseline) for one in made.winners)
    nothing = replace(made, winners=default, input=Config())
    for one in (made, nothing):
        assert tuple(section.name for section in report(one).sections) == left
    assert "The advice is torch's default" in check_page(page(nothing), left).text


TEXT_FIELDS = ("name", "origin", "reason", "advisor", "effort", "stale")
"""Fields of a record that hold free text."""


def mapped(value: Any, change: Callable[[str, Any], Any], name: str = "") -> Any:
    """A copy of a record with each field's value replaced by `change(name, value)`."""
    if is_dataclass(value) and not isinstance(value, type):
        old = {one.name: getattr(value, one.name) for one in fields(value)}
        return replace(value, **{name: mapped(one, change, name) for name, one in old.items()})
    if isinstance(value, tuple):
        return tuple(mapped(one, change, name) for one in value)
    return change(name, value)


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "' onmouseover='alert(1)",
        "</style><style>@import 'http://example.org'</style>",
        "</title></svg><a href=javascript:alert(1)>",
        "{{ report.title }}{% include 'style.css' %}",
        "&lt;b&gt; &amp; ]]>",
    ],
)
def test_markup_in_a_record_is_escaped(text: str) -> None:
    def insert_markup(name: str, value: Any) -> Any:
        if isinstance(value, Config) and name in ("config", "knob"):
            return Config(value | {text: text})
        return text if name in TEXT_FIELDS else value

    plain = full_record()
    record = replace(mapped(plain, insert_markup), baseline=plain.baseline)
    whole = page(record)
    honest, parsed = check_page(page(plain)), check_page(whole)
    assert set(parsed.tags) == set(honest.tags)
    assert not any("alert" in value for one in parsed.elements for value in one.attrib.values())
    assert flat(parsed.text).count(flat(text)) > 20
    assert "<" not in text or text not in whole


EXTREMES = (5e-324, 1e-300, 0.5, 1.0, 1e17, 1e300, 1.7976931348623157e308)
"""Valid, but extreme values of a speed or a duration."""


@pytest.mark.parametrize("seed", range(12))
def test_extreme_numbers_are_drawn(seed: int) -> None:
    """Invalid intervals are drawn, too."""
    rng = random.Random(seed)

    def extreme(name: str, value: Any) -> Any:
        if name == "peak_bytes":
            return rng.choice((0, 1, 2**63))
        none = (0.0, -1e308) * name.endswith(("low", "high"))
        drawn = isinstance(value, float) and name not in ("created", "tolerance")
        return rng.choice(EXTREMES + none) if drawn else value

    parsed = check_page(page(mapped(full_record(), extreme)))
    assert not re.search(r"\bnan\b", parsed.text)


def without_advice(key: Key, **more: Any) -> Record:
    made = examples.record(key, **more)
    own = made.baseline
    return replace(made, winners=examples.winners(own, own), input=Config(), raced=(own,))


def trials_of(*rates: tuple[Config, float]) -> tuple[Trial, ...]:
    trials = (builders.measured(config, rate) for config, rate in rates)
    return tuple(replace(one, number=number) for number, one in enumerate(trials))


@pytest.mark.parametrize(
    ("key", "effort", "message"),
    [
        (RUN, "normal", "Nothing measured clearly gains on this machine; run it as usual."),
        (examples.KEY, "normal", "Nothing measured clearly gains on this machine; train as usual."),
        (RUN, "interrupted", "Could not tell what gains on this machine; run it as usual."),
    ],
)
def test_without_a_gain_the_report_says_so(key: Key, effort: str, message: str) -> None:
    trials = trials_of((examples.DEFAULT, 100.0), (FAST, 105.0))
    record = replace(without_advice(key, effort=effort), trials=trials)
    section = report(record).sections[-1]
    assert section == sections.use(record, None, url="https://host")
    (line,) = section.lines
    assert (section.name, section.code) == ("script", ()) and line.startswith(message)
    # A tuning that was cut short has said what to do.
    assert not any("--force" in one for one in (*sections.remarks(record), line))


def test_a_gain_only_at_a_larger_batch_is_advised_for_that_batch() -> None:
    made = without_advice(RUN)
    winners = examples.winners(
        made.baseline, made.baseline, free_pilot=examples.choice(FAST.at(128), 3300.0, 1.65)
    )
    section = sections.use(replace(made, winners=winners), None)
    (line,), (code,) = section.lines, section.code
    assert line.startswith("Nothing measured clearly gains") and "# or, with the batch free" in code


def test_a_trial_is_shown_with_its_ratio_to_the_latest_baseline() -> None:
    own = examples.DEFAULT
    trials = trials_of((own, 100.0), (FAST, 150.0), (own, 125.0), (FAST, 150.0))
    assert ratios(trials, own) == {0: 1.0, 1: 1.5, 2: 1.0, 3: 1.2}
    made = replace(without_advice(RUN), trials=trials)
    assert made.baseline.samples_per_s == 2000.0  # measured in the race
    shown = {row.cells[0]: row.cells[4] for row in sections.trials(made).rows}
    assert shown == {"0": "1.00x", "1": "1.50x", "2": "1.00x", "3": "1.20x"}


def test_a_record_with_fp8_shows_the_caveat_once() -> None:
    made, config = examples.record(), examples.DEFAULT.replace(precision="fp8")
    assert fp8.CAVEAT not in list(sections.remarks(made))
    one = examples.choice(config)
    record = replace(made, winners=examples.winners(one, one))
    assert list(sections.remarks(record)).count(fp8.CAVEAT) == 1
    assert hf.setup(record, config).unsupported["precision"] == "fp8"
