"""The README names every option, command and variable, and its loop runs."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from advisor.cli import cli

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_commands_and_options_are_documented(command: str) -> None:
    assert f"advisor {command}" in README
    for parameter in cli.commands[command].params:
        if isinstance(parameter, click.Option):
            assert any(re.search(rf"{name}\b", README) for name in parameter.opts), parameter.opts


def test_the_script_in_the_readme_runs(tmp_path: Path) -> None:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    code = README.split("```python\n")[1].split("```")[0].replace("(64, 3, 256, 256)", "(4, 8)")
    names = {
        "torch": torch,
        "DataLoader": torch.utils.data.DataLoader,
        "Net": lambda: nn.Linear(8, 3),
        "criterion": nn.functional.cross_entropy,
        "dataset": TensorDataset(torch.randn(12, 8), torch.randint(0, 3, (12,))),
    }
    with pytest.warns(UserWarning, match="advisor tune|no file"):
        exec(code, names)
    assert torch.isfinite(names["loss"])  # type: ignore[arg-type]
