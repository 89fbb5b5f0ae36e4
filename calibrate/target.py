"""Target: the model that `MODULE:CALLABLE` names, and what the user wrote about its tensors."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dpsim._bundle import bundled
from dpsim.errors import CaptureError, InputError
from dpsim.records import record
from dpsim.workload import DTYPE_BYTES

GRAMMAR = "[NAME=][DTYPE:]DIMS, for example 3x224x224, int64:512 or labels=int64:128"


@record
class TensorSpec:
    """One tensor of a batch as the user writes it, without its batch dimension."""

    text: str
    name: str = ""  # keyword of forward, "" for a positional argument
    dtype: str = "float32"
    dims: tuple[int, ...] = ()
    batch_dim: int = 0

    def shape(self, batch: int) -> tuple[int, ...]:
        """Return the shape for a batch of `batch` samples."""
        return (*self.dims[: self.batch_dim], batch, *self.dims[self.batch_dim :])


def parse_spec(text: str, flag: str) -> TensorSpec:
    """Return the tensor that `text` describes: `[NAME=][DTYPE:]DIMS`.

    DIMS are joined by `x` and exclude the batch, which comes first; a dimension written `B` puts
    the batch elsewhere (`50xBx128`). DIMS may be left out after a dtype: one value for each
    sample (`int64:`). DTYPE is float32 if it is left out.

    >>> parse_spec("labels=int64:128", "--target").shape(4)
    (4, 128)

    Raises:
        InputError: The text does not follow this grammar; `flag` names its origin.
    """
    head, equals, rest = text.rpartition("=")
    dtype, colon, dims_text = rest.rpartition(":")
    if equals and not head.isidentifier():
        raise InputError(f"{flag} {text}: NAME must be a Python name, got '{head}'. Use {GRAMMAR}.")
    if colon and dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise InputError(
            f"{flag} {text}: the dtype before ':' must be one of {known}, got '{dtype}'. "
            f"Use {GRAMMAR}."
        )
    words = dims_text.split("x") if dims_text else []
    sizes = [word for word in words if word != "B"]
    bad = next((w for w in sizes if not (w.isascii() and w.isdigit() and int(w) > 0)), None)
    if bad is not None or len(words) - len(sizes) > 1 or not (words or colon):
        got = f"'{dims_text}'" if bad is None else f"'{bad}'"
        raise InputError(
            f"{flag} {text}: dimensions must be whole numbers >= 1 joined by x, got {got}. "
            f"Leave the batch out and use {GRAMMAR}."
        )
    return TensorSpec(
        text=text,
        name=head,
        dtype=dtype or "float32",
        dims=tuple(int(size) for size in sizes),
        batch_dim=words.index("B") if "B" in words else 0,
    )


def resolve(target: str, flag: str = "target") -> Any:
    """Return the object that `MODULE:CALLABLE` names; MODULE may be the path of a .py file.

    Raises:
        InputError: Not of this form, no such module, or nothing of that name in it.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise InputError(
            f"{flag} must be MODULE:CALLABLE, got '{target}'. "
            "Example: torchvision.models:resnet50, or my_model.py:Net."
        )
    found: Any = _import_file(where) if where.endswith(".py") else _import_module(where, target)
    for part in name.split("."):
        if not hasattr(found, part):
            names = [n for n in dir(found) if not n.startswith("_") and callable(getattr(found, n))]
            some = ", ".join(names[:8]) or "none"
            raise InputError(
                f"{target}: '{where}' must define '{part}', but has no such name "
                f"(callables: {some}{', ...' if len(names) > 8 else ''}). Check the spelling."
            )
        found = getattr(found, part)
    return found


def resolve_model(target: str) -> torch.nn.Module | Callable[[], object]:
    """Return the model of that name, or what makes it when called without arguments.

    Raises:
        InputError: As `resolve`; or it is neither a module nor a callable without arguments.
    """
    found = resolve(target)
    if isinstance(found, torch.nn.Module):
        return found
    if not callable(found):
        raise InputError(
            f"{target}: must be an nn.Module, or a callable that returns one, got "
            f"{type(found).__name__}. Name a class or a function."
        )
    try:
        inspect.signature(found).bind()
    except TypeError as problem:
        raise InputError(
            f"{target}: must be callable without arguments, but {problem}. "
            "Write a function that gives them and returns the model."
        ) from None
    except ValueError:
        pass  # a built-in without a signature: calling it will tell
    return found  # type: ignore[no-any-return]


def checked_model(model: object, target: str) -> torch.nn.Module:
    """Return `model` if it is an nn.Module.

    Raises:
        InputError: It is something else.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(
            f"{target}: must return an nn.Module, got {type(model).__name__}. "
            "Name a class or function that makes the model."
        )
    if next(model.parameters(), None) is None:
        raise CaptureError(
            f"{target}: the model must have parameters, got none. There is nothing to train."
        )
    return model


def definition(target: str, model: torch.nn.Module) -> str:
    """Return where the model's layers are defined: distribution, version, dotted name."""
    where, _, name = target.rpartition(":")
    home = type(model).__module__
    top = home.partition(".")[0]
    if top in ("torch", where.partition(".")[0]):  # a bare Sequential says nothing
        top, dotted = where.partition(".")[0], f"{where}.{name}"
    else:
        dotted = f"{home}.{type(model).__qualname__}"
    number = dpsim_version() if top == "calibrate" else version(top)
    words = ("dpsim" if top == "calibrate" else top, number, dotted)
    return " ".join(words) if number else dotted


def version(distribution: str) -> str:
    """Return the version of an installed distribution without its build tag, or ""."""
    try:
        return metadata.version(distribution).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def dpsim_version() -> str:
    """Return the version of dpsim: installed, or of this checkout; "" if neither is known."""
    installed = version("dpsim-train")
    project = bundled("calibrate").parent / "pyproject.toml"
    if installed or not project.is_file():
        return installed
    return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])


def _import_module(where: str, target: str) -> ModuleType:
    here = str(Path.cwd())
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)  # as `python -m` does: a user's own file lies here
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as problem:
        raise InputError(
            f"{target}: no module named '{problem.name}'. Install it, or check the spelling."
        ) from None
    except Exception as problem:  # noqa: BLE001 - a user's file may raise anything
        raise InputError(
            f"{target}: importing '{where}' failed with {brief(problem)}. Correct the module."
        ) from None
    finally:
        if added:
            sys.path.remove(here)


def _import_file(where: str) -> ModuleType:
    path = Path(where)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"{where}: must be a Python file, but there is none. Check the path.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as problem:  # noqa: BLE001 - a user's file may raise anything
        raise InputError(
            f"{where}: running it failed with {brief(problem)}. Correct the file."
        ) from None
    return module


def brief(problem: BaseException) -> str:
    """Return an exception as one short line: its type and the first line it says."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return f"{type(problem).__name__}: {text if len(text) <= 160 else text[:157] + '...'}"
