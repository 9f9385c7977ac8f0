"""Options of a command that set knobs: what they are given, and the words that give them otherwise.

What only a start anew can change, as the batch, is changed in the words of the command.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from advisor.cache.config import BATCH, Config, Value
from advisor.errors import UsageError
from advisor.tuners import knobs


class Mapped:
    """A command, and which of its options set knobs.

    Args:
        words: of the command.
        options: by what `--map` calls the knob.

    Attributes:
        names: of the knobs.

    Raises:
        UsageError: such an option is given no whole number in the command.
    """

    def __init__(self, words: Sequence[str], options: Mapping[str, Value]) -> None:
        self._words = tuple(words)
        self._options = {
            knob.name: str(options[knob.mapped]) for knob in knobs.KNOBS if knob.mapped in options
        }
        self.names = tuple(self._options)
        for name in self.names:
            self._typed(name)

    def at(self, config: Config, own: Config, processes: int) -> tuple[str, ...]:
        """The command that starts with what its options set of a config; see `numbers`."""
        numbers = self.numbers(config, own, processes)
        return self.put({name: numbers[name] for name in self.changed(config, own)})

    def put(self, numbers: Mapping[str, int]) -> tuple[str, ...]:
        """The command with its options given these, by knob."""
        words = self._words
        for name, number in numbers.items():
            words = _with(words, self._options[name], number)
        return words

    def numbers(self, config: Config, own: Config, processes: int) -> dict[str, int]:
        """What its options are given for a config, by knob.

        A number of samples is set in proportion: it may be one process's, or a micro-batch's.

        Args:
            own: what the command as it is comes to, in all processes together.
        """
        found = {}
        for name in self.names:
            value = config.get(name)
            if type(value) is int:
                found[name] = value
                if name == BATCH:
                    typed = self._typed(name)
                    at_own = own.batch // processes if typed is None else typed
                    found[name] = at_own * value // own.batch
        return found

    def changed(self, config: Config, own: Config) -> tuple[str, ...]:
        """The knobs that the options must set otherwise."""
        return tuple(name for name in self.names if config.get(name) != own.get(name))

    def within(self, config: Config, own: Config) -> Config:
        """What of a config is for the pilot: of what options set the script's own."""
        return config.replace(**{name: own[name] for name in self.names if name in own})

    def given(self, name: str) -> bool:
        """Whether the command itself gives the option of a knob."""
        return self._typed(name) is not None

    def described(self, numbers: Mapping[str, int]) -> str:
        """'--batch-size 128', of numbers by knob."""
        return ", ".join(f"{self._options[name]} {number}" for name, number in numbers.items())

    def _typed(self, name: str) -> int | None:
        """The number that the command gives an option, the last where there are several."""
        option = self._options[name]
        found = None
        for at, word in _places(self._words, option):
            text = self._words[at + 1] if word is None else word
            if not text.isdecimal():
                raise UsageError(f"map: {option} {text!r} in the command: expected a whole number")
            found = int(text)
        return found


def _places(words: Sequence[str], option: str) -> Iterator[tuple[int, str | None]]:
    """Where a command gives an option: (place, what is given in that word; None for the next)."""
    for at, word in enumerate(words):
        if word == option and at + 1 < len(words):
            yield at, None
        elif word.startswith(f"{option}="):
            yield at, word.partition("=")[2]


def _with(words: tuple[str, ...], option: str, value: int) -> tuple[str, ...]:
    """A command with an option given a value where it was given one, else at its end."""
    found = list(words)
    places = list(_places(words, option))
    for at, text in places:
        found[at if text is not None else at + 1] = (
            str(value) if text is None else f"{option}={value}"
        )
    return tuple(found if places else (*found, option, str(value)))
