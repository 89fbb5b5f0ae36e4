"""Register one object per file, and find it by the file's name.

A folder of plug-ins is a package. Each of its modules registers one object with `Registry.add`;
the name a user types is the module's, with `-` for `_`. Adding a mode, a collective algorithm or
an importer touches one new file.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Generic, TypeVar

from dpsim.errors import InputError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """The plug-ins of one package, imported on first look-up."""

    def __init__(self, package: str, kind: str) -> None:
        """Look in `package` (dotted name); `kind` is the word for messages."""
        self._package = package
        self._kind = kind
        self._objects: dict[str, T] = {}

    def add(self, value: T) -> T:
        """Register `value` under the name of the module that defines it; usable as a decorator.

        Raises:
            InputError: The module has registered another object.
        """
        name = value.__module__.rpartition(".")[2].replace("_", "-")
        other = self._objects.setdefault(name, value)
        if other is not value:
            raise InputError(
                f"{value.__module__}: must register one {self._kind}, got {_label(other)} and "
                f"{_label(value)}. Move one to a file of its own."
            )
        return value

    def names(self) -> list[str]:
        """Return the names of all plug-ins, sorted, without importing them."""
        package = importlib.import_module(self._package)
        return sorted(
            info.name.replace("_", "-")
            for info in pkgutil.iter_modules(package.__path__)
            if not info.name.startswith("_")
        )

    def get(self, name: str) -> T:
        """Return the plug-in of that name.

        Raises:
            UnknownNameError: No such file; the message lists those that exist.
            InputError: The file registers nothing.
        """
        if name not in self.names():
            raise UnknownNameError(self._kind, name, self.names())
        if name not in self._objects:
            importlib.import_module(f"{self._package}.{name.replace('-', '_')}")
        if name not in self._objects:
            raise InputError(
                f"{self._package}.{name.replace('-', '_')}: must register one {self._kind}, "
                "got none. Decorate its object."
            )
        return self._objects[name]

    def summary(self, name: str) -> str:
        """Return the first line of the module's docstring: the help text of the plug-in."""
        module = importlib.import_module(f"{self._package}.{name.replace('-', '_')}")
        return (module.__doc__ or "").strip().partition("\n")[0]


def _label(value: object) -> str:
    return getattr(value, "__name__", repr(value))
