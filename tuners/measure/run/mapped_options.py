"""Options of a command that set knobs: reads their numbers, and replaces them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from advisor.cache.config import BATCH, Config, Value
from advisor.errors import UsageError
from advisor.tuners import knobs


class MappedOptions:
    """A command and its options that set knobs; `options`: by the knob's name in `--map`. Raises
    UsageError if the command gives such an option no whole number."""

    def __init__(self, words: Sequence[str], options: Mapping[str, Value]) -> None:
        self._words = tuple(words)
        self._options = {
            knob.name: str(options[knob.mapped]) for knob in knobs.KNOBS if knob.mapped in options
        }
        self.names = tuple(self._options)  # of the knobs
        self._given = {name: self._number(option) for name, option in self._options.items()}

    def at(self, config: Config, own: Config, processes: int) -> tuple[str, ...]:
        """The command with its options set for a config; see `numbers`."""
        numbers = self.numbers(config, own, processes)
        return self.put({name: numbers[name] for name in self.changed(config, own)})

    def put(self, numbers: Mapping[str, int]) -> tuple[str, ...]:
        """The command with its options given these numbers, by knob."""
        words = list(self._words)
        for name, number in numbers.items():
            option = self._options[name]
            places = list(_places(words, option))
            for at, before in places:
                words[at] = f"{before}{number}"
            if not places:
                words += [option, str(number)]
        return tuple(words)

    def numbers(self, config: Config, own: Config, processes: int) -> dict[str, int]:
        found = {}
        for name in self.names:
            value, given = config.get(name), self._given[name]
            if type(value) is int:
                found[name] = value
                # In proportion: the option may count one process's samples, or a micro-batch's.
                if name == BATCH:
                    at_own = own.batch // processes if given is None else given
                    found[name] = at_own * value // own.batch
        return found

    def changed(self, config: Config, own: Config) -> tuple[str, ...]:
        """The knobs that the options must change."""
        return tuple(name for name in self.names if config.get(name) != own.get(name))

    def within(self, config: Config, own: Config) -> Config:
        """The config for the pilot: a knob that an option sets keeps the script's own value."""
        return config.replace(**{name: own[name] for name in self.names if name in own})

    def given(self, name: str) -> bool:
        return self._given[name] is not None

    def described(self, numbers: Mapping[str, int]) -> str:
        """The options with their numbers, as '--batch-size 128'; `numbers`: by knob."""
        return ", ".join(f"{self._options[name]} {number}" for name, number in numbers.items())

    def _number(self, option: str) -> int | None:
        found = None
        for at, before in _places(self._words, option):
            text = self._words[at].removeprefix(before)
            if not text.isdecimal():
                raise UsageError(f"map: {option} {text!r} in the command: expected a whole number")
            found = int(text)
        return found


def _places(words: Sequence[str], option: str) -> Iterator[tuple[int, str]]:
    """Yield each place where a command gives an option: the value's word, and a prefix in it."""
    for at, word in enumerate(words):
        if word == option and at + 1 < len(words):
            yield at + 1, ""
        elif word.startswith(f"{option}="):
            yield at, f"{option}="
