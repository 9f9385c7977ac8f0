"""The pages name every command, option, variable and public name. Their examples work."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import advisor
from advisor.arguments import Budget, Model, Permit
from advisor.cli import cli
from advisor.errors import AdvisorWarning
from tests.face.commands import run_example

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md")
TEXT = "\n".join(page.read_text() for page in (README, *sorted((ROOT / "docs").glob("*.md"))))
SOURCES = "".join(
    file.read_text()
    for folder in ("advisor", "tuners", "cache")
    for file in sorted((ROOT / folder).rglob("*.py"))
)
_CONTEXT = click.Context(cli)
COMMANDS = {name: cli.get_command(_CONTEXT, name) for name in cli.list_commands(_CONTEXT)}
INTERNAL = tuple(
    f"ADVISOR_{name}" for name in ("COMPLETE", "LEAST_MEMORY", "MAX_MEMORY", "PILOT", "RUN")
)
"""Prefixes of the variables that advisor sets for processes that it starts."""


def is_documented(word: str) -> bool:
    """Whether a page has the words as code."""
    return bool(re.search(rf"[`| ]{re.escape(word)}(?![\w-])", TEXT))


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_commands_and_options_are_documented(command: str) -> None:
    assert is_documented(f"advisor {command}")
    for parameter in COMMANDS[command].params:
        if isinstance(parameter, click.Option):
            for option in parameter.opts:
                assert re.search(rf"[`| ,]{option}(?![\w-])", TEXT), option


def test_public_classes_and_constants_have_unique_names() -> None:
    lines = re.findall(r"(?m)^(?:class )?([A-Z]\w[\w, ]*)(?:[(:].*)?(?::| = .*)$", SOURCES)
    names = Counter(name for line in lines for name in line.split(", "))
    assert [name for name, times in names.items() if times > 1] == []


def test_variables_exported_names_and_arguments_are_documented() -> None:
    read = set(re.findall(r"(?<![\w])ADVISOR_[A-Z_]*[A-Z]", SOURCES))
    assert "ADVISOR_CACHE" in read
    public_variables = {name for name in read if not name.startswith(INTERNAL)}
    assert {name for name in public_variables if f"`{name}" not in TEXT} == set()
    names = {name for name in advisor.__all__ if not name.startswith("__")}
    # They may be written as `apply(model)`, `tune()` or `Advice`.
    assert {name for name in names if not re.search(rf"`{name}\b", TEXT)} == set()
    arguments = {field.name for one in (Model, Permit, Budget) for field in dataclasses.fields(one)}
    assert {word for word in arguments if f"`{word}`" not in TEXT} == set()
    public = {name for name in vars(advisor.Advice) if not name.startswith("_")}
    assert {name for name in public if not re.search(rf"advice\.{name}\b", TEXT)} == set()


def test_documented_variables_and_options_exist() -> None:
    mentioned = set(re.findall(r"ADVISOR_[A-Z_]*[A-Z]", TEXT))
    assert {name for name in mentioned if name not in SOURCES} == set()
    options = set(re.findall(r"(?<=`)--[a-z][a-z-]+", TEXT))
    known = {
        option
        for command in (cli, *COMMANDS.values())
        for parameter in command.get_params(click.Context(command))
        for option in parameter.opts
    }
    assert options - known == set()


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 100


def shown_commands(page: Path) -> Iterator[str]:
    """The commands in a page's indented blocks, without their prompts."""
    for block in re.findall(r"(?:^ {4}.*\n)+", page.read_text(), re.MULTILINE):
        lines = [line[4:] for line in block.splitlines()]
        session = any(line.startswith("$ ") for line in lines)
        for line in lines:
            if not session or line.startswith("$ "):
                yield line.removeprefix("$ ")


def check_command(words: list[str]) -> None:
    """Check that the CLI accepts the words, or that the example or rule of make exists."""
    program = Path(words[0]).name
    if program == "advisor":
        name, *rest = words[1:]
        COMMANDS[name].make_context(name, rest)
        if "--" in rest:
            check_command(rest[rest.index("--") + 1 :])
    elif program == "make":
        rules = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(rules)
    elif program == "python" and words[1].startswith("examples/"):
        assert (ROOT / words[1]).is_file()


DEMO = ["make", "-n", "--no-print-directory", "-o", ".venv/.installed", "demo"]


def test_shown_commands_are_valid() -> None:
    shown = {line for page in PAGES for line in shown_commands(page)}
    commands = {one for one in shown if one.split(" ")[0] in ("advisor", "make", "python")}
    assert "advisor run -- python train.py" in commands
    demo = subprocess.check_output(DEMO, cwd=ROOT, text=True).splitlines()
    assert len(demo) == 2
    for line in (*sorted(commands), *demo):
        check_command(shlex.split(re.split(r" > | \|\| ", line)[0], comments=True))


def test_the_plain_example_trains_and_prints_its_speed() -> None:
    (line,) = run_example("train_mnist_plain.py", "--epochs", "1", "--samples", "256")
    assert re.fullmatch(r"epoch 1: [\d,]+ samples/s, loss [\d.]+, accuracy [\d.]+%", line)


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings have on the web."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one).strip().lower().replace(" ", "-") for one in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_resolve(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"\s+", " ", page.read_text())):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" not in link:
            assert target.is_file(), link
            assert not anchor or anchor in anchors(target), link


def code_of(page: str) -> str:
    """The Python blocks of a page, joined."""
    text = (ROOT / "docs" / page).read_text()
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def test_the_documented_loop_runs() -> None:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    names = {
        "advisor": advisor,
        "torch": torch,
        "DataLoader": torch.utils.data.DataLoader,
        "Net": lambda: nn.Linear(8, 3),
        "criterion": nn.functional.cross_entropy,
        "dataset": TensorDataset(torch.randn(12, 8), torch.randint(0, 3, (12,))),
        "parts": 3,
    }
    try:
        with pytest.warns(AdvisorWarning, match="advisor tune|no file"):
            names["advice"] = advisor.apply("model.py:Net", shape=(4, 8))
            exec(code_of("loop-and-capture.md"), names)
    finally:
        advisor.release()
    assert torch.isfinite(names["loss"])  # type: ignore[arg-type]
