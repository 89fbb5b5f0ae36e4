"""The errors of dpsim. A message says where, which rule, the value got, and what to do.

DpsimError
|-- InputError (ValueError)         a file, flag or argument is wrong      exit 2
|   |-- UnknownNameError            a name that no registry or folder has  exit 2
|   |-- FormatVersionError          a file of another version              exit 2
|   `-- MissingProfileError         no such hardware profile               exit 3
|-- InfeasibleError (ValueError)    the scenario cannot run as asked       exit 5
|-- CaptureError (RuntimeError)     a model could not be traced            exit 2
|-- MissingExtraError (ImportError) an optional part is not installed      exit 2
`-- SimulationError (RuntimeError)  the simulation could not finish        exit 1
    `-- DeadlockError               nothing can happen, but work is left   exit 1
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class DpsimError(Exception):
    """Base of every error that dpsim raises on purpose."""

    code = "error"
    exit_code = 1


class InputError(DpsimError, ValueError):
    """A file, a flag or an argument breaks a rule."""

    code = "bad_input"
    exit_code = 2


class UnknownNameError(InputError):
    """A name that is not known here; the message lists the names that are."""

    code = "unknown_name"

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        names = sorted(known)
        self._arguments = (kind, name, names, hint)
        close = difflib.get_close_matches(name, names, n=1)
        guess = f" Did you mean '{close[0]}'?" if close else ""
        tail = f" {hint}" if hint else ""
        listed = ", ".join(names) if names else "none"
        super().__init__(f"no {kind} '{name}'; known: {listed}.{guess}{tail}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make it again, so that it survives the way back from a worker process."""
        return type(self), self._arguments


class FormatVersionError(InputError):
    """A file whose format version this dpsim does not read."""

    code = "format_version"


class MissingProfileError(InputError):
    """No hardware profile of that name or path."""

    code = "missing_profile"
    exit_code = 3


class InfeasibleError(DpsimError, ValueError):
    """The scenario cannot run as asked: batch 0, more GPUs than there are, ..."""

    code = "infeasible"
    exit_code = 5


class CaptureError(DpsimError, RuntimeError):
    """A model could not be traced in any of the ways tried."""

    code = "capture"
    exit_code = 2


class MissingExtraError(DpsimError, ImportError):
    """An optional part of dpsim is not installed."""

    code = "missing_extra"
    exit_code = 2

    def __init__(self, task: str, extra: str) -> None:
        self._arguments = (task, extra)
        super().__init__(
            f"{task} needs the extra '{extra}'. Install it with: pip install 'dpsim-train[{extra}]'"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make it again, so that it survives the way back from a worker process."""
        return type(self), self._arguments


class SimulationError(DpsimError, RuntimeError):
    """The simulation could not finish."""

    code = "simulation"


class DeadlockError(SimulationError):
    """Nothing can happen any more, but work is left; the message lists who waits for what."""

    code = "deadlock"
