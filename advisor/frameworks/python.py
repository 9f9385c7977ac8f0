"""Settings written as Python."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from advisor.frameworks.words import Made, Words


def literal(value: object) -> str:
    """A setting as Python's source, strings in double quotes."""
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, Made):
        return f"{value.name}({keywords(value.keywords)})"
    return repr(value)


def keywords(given: Mapping[str, object]) -> str:
    """'fused=True, batch_size=64'."""
    return ", ".join(f"{name}={literal(value)}" for name, value in given.items())


def imports(words: Words) -> str:
    """The lines that what is written needs."""
    found = [
        f"import {name}\n"
        for name in ("os", "torch")
        if any(line.startswith(f"{name}.") for line in words.flags)
    ]
    made = [value for value in words.settings.values() if isinstance(value, Made)]
    found += [f"from {one.module} import {one.name}\n" for one in made]
    return "".join(found) + ("\n" if found else "")


def writer(call: str) -> Callable[[Words], str]:
    """Writes the switches, then a dictionary `arguments`; `call`: where it goes."""

    def write(words: Words) -> str:
        flags = "".join(f"{line}\n" for line in words.flags)
        lines = "".join(
            f'    "{name}": {literal(value)},\n' for name, value in words.settings.items()
        )
        body = f"arguments = {{\n{lines}}}\n" if lines else "arguments = {}\n"
        return f"{imports(words)}{flags}{body}# {call}\n"

    return write
