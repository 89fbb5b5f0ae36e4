"""Register one object per file, and find it by the file's name.

A folder of plug-ins is a package. Each of its modules registers one object with `Registry.add`;
the name a user types is the module's, with `-` for `_`. Adding a mode, a collective algorithm or
an importer touches one new file.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Generic, TypeVar

from dpsim.errors import UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """The plug-ins of one package, imported on first look-up."""

    def __init__(self, package: str, kind: str) -> None:
        """Look in `package` (dotted name); `kind` is the word for messages."""
        self._package = package
        self._kind = kind
        self._objects: dict[str, T] = {}

    def add(self, value: T) -> T:
        """Register `value` under the name of the module that defines it; usable as a decorator."""
        module = value.__module__ if hasattr(value, "__module__") else type(value).__module__
        self._objects[module.rpartition(".")[2].replace("_", "-")] = value
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
        """
        if name not in self.names():
            raise UnknownNameError(self._kind, name, self.names())
        if name not in self._objects:
            importlib.import_module(f"{self._package}.{name.replace('-', '_')}")
        return self._objects[name]

    def summary(self, name: str) -> str:
        """Return the first line of the module's docstring: the help text of the plug-in."""
        module = importlib.import_module(f"{self._package}.{name.replace('-', '_')}")
        return (module.__doc__ or "").strip().splitlines()[0]
