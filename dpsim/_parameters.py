"""Parameters: how the texts of flags are read, and what is said about wrong ones.

Nothing but click and the errors is imported: `dpsim --help` passes here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from dpsim.errors import InfeasibleError, InputError, UnknownNameError

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]  # generic since click 8.3
else:
    ParamType = click.ParamType

MOST = 1_000_000_000
"""Of counts, milliseconds, mebibytes and factors: more than this is a slip of the keyboard, and
products with bytes or nanoseconds stay within 64 bits."""
MOST_GPUS = 1_000_000
"""Ten times the largest cluster; simulating them takes minutes and some gigabytes."""
LEAST = 1e-6
"""Of milliseconds, mebibytes, rates and factors, for the same reasons."""
MOST_SEED = (1 << 63) - 1


class Whole(ParamType):
    """A whole number."""

    name = "n"

    def __init__(self, least: int, *, most: int = MOST, infeasible: bool = False) -> None:
        """Accept `least` to `most`; below is infeasible (exit 5) or a wrong value (exit 2)."""
        self._least = least
        self._most = most
        self._below = InfeasibleError if infeasible else InputError

    def convert(self, value: Any, param: click.Parameter | None, _: click.Context | None) -> int:
        """Return the number that a text says."""
        flag, text = _flag(param), str(value).strip()
        rule = f"{flag} must be a whole number >= {self._least}, got '{text}'. Correct the value."
        if not re.fullmatch(r"[+-]?[0-9]{1,4000}", text):
            raise InputError(rule)
        if int(text) < self._least:
            raise self._below(rule)
        if int(text) > self._most:
            raise InputError(f"{flag} must be at most {self._most}, got '{text}'. Lower the value.")
        return int(text)


class Number(ParamType):
    """A number > 0."""

    name = "x"

    def __init__(self, *, infinite: bool = False) -> None:
        """Accept infinity as well, if asked to."""
        self._infinite = infinite

    def convert(self, value: Any, param: click.Parameter | None, _: click.Context | None) -> float:
        """Return the number that a text says."""
        flag, text = _flag(param), str(value).strip()
        number = to_float(text)
        if self._infinite and number == math.inf:
            return math.inf
        if not 0 < number < math.inf:
            raise InputError(f"{flag} must be a number > 0, got '{text}'. Correct the value.")
        if not LEAST <= number <= MOST:
            raise InputError(
                f"{flag} must be between {LEAST:g} and {MOST:g}, got '{text}'. Correct the value."
            )
        return number


class Named(ParamType):
    """One of some names, which are looked up when they are needed."""

    def __init__(self, kind: str, names: Callable[[], Iterable[str]] | Iterable[str]) -> None:
        """Call what the names are of `kind` in messages."""
        self.name = kind
        self._names = names

    def names(self) -> list[str]:
        """Return the names."""
        return list(self._names() if callable(self._names) else self._names)

    def convert(self, value: Any, _: click.Parameter | None, __: click.Context | None) -> str:
        """Return the name, if it is one."""
        if value not in self.names():
            raise UnknownNameError(self.name, str(value), self.names())
        return str(value)

    def get_metavar(
        self,
        param: click.Parameter,  # noqa: ARG002 - click calls it so
        ctx: click.Context | None = None,  # noqa: ARG002 - the same; click < 8.2 passes none
    ) -> str:
        """Return the names as help shows them."""
        return f"[{'|'.join(self.names())}]"

    def shell_complete(
        self,
        ctx: click.Context,  # noqa: ARG002 - click calls it so
        param: click.Parameter,  # noqa: ARG002 - the same
        incomplete: str,
    ) -> list[CompletionItem]:
        """Return the names that begin so."""
        return [CompletionItem(name) for name in self.names() if name.startswith(incomplete)]


class Listed(ParamType):
    """Values joined by commas."""

    def __init__(self, item: ParamType, metavar: str) -> None:
        """Read each value as `item`."""
        self.name = metavar
        self._item = item

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Return the values."""
        if isinstance(value, tuple):
            return value
        return tuple(self._item.convert(text, param, ctx) for text in str(value).split(","))


class Pair(ParamType):
    """Two values joined by a mark."""

    def __init__(self, mark: str, metavar: str, *items: ParamType) -> None:
        """Read "A<mark>B" as one of `items` each."""
        self.name = metavar
        self._mark = mark
        self._items = items

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Return both values."""
        if isinstance(value, tuple):
            return value
        words = str(value).split(self._mark, 1)
        if len(words) != 2:
            raise InputError(
                f"{_flag(param)} must be {self.name}, got '{value}'. "
                f"Put a '{self._mark}' between the two."
            )
        return tuple(
            item.convert(text, param, ctx) for item, text in zip(self._items, words, strict=True)
        )


class OutputDevice(Whole):
    """A position in the device ids, or the CPU."""

    name = "n|cpu"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the position, -1 for the CPU."""
        return -1 if value in ("cpu", "-1", -1) else super().convert(value, param, ctx)


class Value(ParamType):
    """A number >= 0 or infinity; the record that takes it has stricter rules."""

    name = "x"

    def convert(self, value: Any, param: click.Parameter | None, _: click.Context | None) -> float:
        """Return the number that a text says."""
        number = to_float(str(value))
        if math.isnan(number):
            raise InputError(f"{_flag(param)} must get a number, got '{value}'. Correct the value.")
        return number


class Text(ParamType):
    """A text that is not empty."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, _: click.Context | None) -> str:
        """Return the text."""
        if not str(value).strip():
            raise InputError(f"{_flag(param)} must not be empty, got ''. Give it a value.")
        return str(value)


def to_float(text: str) -> float:
    """Return the number that a text says, NaN if it says none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _flag(param: click.Parameter | None) -> str:
    return param.opts[0] if param else "the value"
