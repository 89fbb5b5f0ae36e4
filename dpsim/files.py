"""Load and save records as JSON, and find the shipped ones by name.

A file begins with `format`, `version` and `source`. Ops are stored by column, because a model has
thousands of them. An older version names the command that converts it, a newer one asks to update.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from dpsim import hardware, workload
from dpsim._bundle import bundled
from dpsim.errors import FormatVersionError, InputError, MissingProfileError, UnknownNameError
from dpsim.hardware import HardwareProfile, Network
from dpsim.workload import Workload

T = TypeVar("T", Workload, HardwareProfile, Network)

FORMATS: dict[type, tuple[str, int]] = {
    Workload: (workload.FORMAT, workload.VERSION),
    HardwareProfile: (hardware.FORMAT, hardware.VERSION),
    Network: (hardware.NETWORK_FORMAT, hardware.VERSION),
}
FOLDERS: dict[type, str] = {
    Workload: "traces/workloads",
    HardwareProfile: "traces/profiles",
    Network: "traces/networks",
}
KINDS: dict[type, str] = {
    Workload: "model",
    HardwareProfile: "profile",
    Network: "network",
}


def names(kind: type) -> list[str]:
    """Return the names of the shipped records of one kind (Workload, HardwareProfile, Network)."""
    return sorted(path.stem for path in bundled(FOLDERS[kind]).glob("*.json"))


def find(kind: type[T], name: str) -> T:
    """Return the shipped record of that name, or the one in the file of that path.

    Raises:
        UnknownNameError: Neither a shipped name nor a file.
        MissingProfileError: The same, for a hardware profile.
        InputError: The file cannot be read as this record.
    """
    if name in names(kind):
        path = bundled(FOLDERS[kind]) / f"{name}.json"
        shipped: T = _load_shipped(kind, path)  # type: ignore[arg-type]  # see _adapter
        return shipped
    if name.endswith(".json") or "/" in name or _is_file(name):
        return load(kind, Path(name))
    error = UnknownNameError(KINDS[kind], name, names(kind), "A path to a .json file works too.")
    if kind is HardwareProfile:
        raise MissingProfileError(str(error))
    raise error


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # a name longer than the file system takes
        return False


@cache
def _load_shipped(kind: type[Any], path: Path) -> Any:
    return load(kind, path)


def load(kind: type[T], path: Path) -> T:
    """Return the record in a JSON file.

    Raises:
        InputError: Unreadable, not JSON, another format, or a value that breaks a rule.
        FormatVersionError: Written by an older or a newer version of the format.
    """
    error = MissingProfileError if kind is HardwareProfile else InputError
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise error(f"{path}: cannot be read ({reason}). Check the path.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: must be UTF-8 text, got binary data. Check the path.") from None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as problem:
        raise InputError(
            f"{path}: must be JSON, but line {problem.lineno} column {problem.colno} says: "
            f"{problem.msg}. Is the file complete?"
        ) from None
    except (ValueError, RecursionError) as problem:  # a number of 5000 digits, 5000 open brackets
        raise InputError(f"{path}: must be JSON, but {problem}. Check the path.") from None
    return parse(kind, data, str(path))


def parse(kind: type[T], data: Any, where: str) -> T:
    """Return the record in decoded JSON; `where` names it in messages. Raises as `load` does."""
    wanted, version = FORMATS[kind]
    if not isinstance(data, dict) or "format" not in data:
        raise InputError(
            f"{where}: must be an object whose first key is format, got {_brief(data)}. "
            f"Is this a {KINDS[kind]} file?"
        )
    if data["format"] != wanted:
        raise InputError(
            f"{where}: format must be '{wanted}', got {_brief(data['format'])}. "
            f"Is this a {KINDS[kind]} file?"
        )
    _check_version(data.get("version"), version, where)
    body = {key: value for key, value in data.items() if key not in ("format", "version")}
    if kind is Workload:
        body = _rows_from_columns(body, where)
    try:
        value: T = _adapter(kind).validate_python(body)  # type: ignore[arg-type]
    except ValidationError as problem:
        raise InputError(f"{where}: {explain(problem)}") from None
    return value


def save(value: Any, path: Path) -> None:
    """Write a record as JSON that `load` reads back to an equal record.

    Raises:
        InputError: The file cannot be written.
    """
    try:
        path.write_text(dumps(value), encoding="utf-8")
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError(f"{path}: cannot be written ({reason}). Check the path.") from None


def dumps(value: Any) -> str:
    """Return the JSON text of a record: two spaces, one line for each column or number list."""
    wanted, version = FORMATS[type(value)]
    body = dataclasses.asdict(value)
    if isinstance(value, Workload):
        body = _columns_from_rows(body)
    return _write({"format": wanted, "version": version, **body}, 0) + "\n"


def explain(problem: ValidationError) -> str:
    """Return the first fault of a pydantic error as 'key rule, got value'."""
    fault = problem.errors()[0]
    key = ".".join(str(part) for part in fault["loc"]) or "the record"
    message = fault["msg"].removeprefix("Value error, ")
    rest = problem.error_count() - 1
    more = f" ({rest} more)" if rest else ""
    if fault["type"] == "missing":
        return f"{key} is missing{more}. Add it, or make the file again."
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{key} is not a known key{more}. Remove it, or update dpsim."
    if fault["type"] == "value_error":  # our own rule, which says what it got
        return f"{key}: {message}{more}. Correct the value."
    return f"{key}: {message}, got {_brief(fault['input'])}{more}. Correct the value."


def _check_version(version: Any, current: int, where: str) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InputError(
            f"{where}: version must be a whole number >= 1, got {_brief(version)}. "
            "Make the file again."
        )
    if version > current:
        raise FormatVersionError(
            f"{where}: version must be at most {current}, got {version}. "
            "The file is newer than this dpsim: update dpsim."
        )
    if version < current:
        raise FormatVersionError(
            f"{where}: version must be {current}, got {version}. "
            "The file is older: make it again with the command in its source."
        )


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    # mypy compares a class's own __hash__ with Hashable, not its metaclass's
    return TypeAdapter(kind)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


OP_COLUMNS = (
    "name",
    "op_class",
    "module",
    "flops",
    "bytes_moved",
    "kernels",
    "module_calls",
)


def _columns(ops: list[dict[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for key in OP_COLUMNS:
        values = [op[key] for op in ops]
        if key in ("flops", "bytes_moved"):
            columns[f"{key}_fixed"] = [_plain(v["fixed"]) for v in values]
            columns[f"{key}_per_sample"] = [_plain(v["per_sample"]) for v in values]
        else:
            columns[key] = [str(v) if key == "op_class" else v for v in values]
    return columns


def _rows(columns: Any, where: str) -> list[dict[str, Any]]:
    wanted = [
        f"{key}{suffix}"
        for key in OP_COLUMNS
        for suffix in (("_fixed", "_per_sample") if key in ("flops", "bytes_moved") else ("",))
    ]
    if not isinstance(columns, dict) or sorted(columns) != sorted(wanted):
        got = ", ".join(columns) if isinstance(columns, dict) else _brief(columns)
        raise InputError(
            f"{where}: must have the columns {', '.join(wanted)}, got {got}. Make the file again."
        )
    for key, column in columns.items():
        if not isinstance(column, list):
            raise InputError(
                f"{where}.{key}: must be a list, got {_brief(column)}. Make the file again."
            )
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise InputError(
            f"{where}: columns must have one length, got {sorted(lengths)}. Make the file again."
        )
    rows = []
    for values in zip(*(columns[key] for key in wanted), strict=True):
        flat = dict(zip(wanted, values, strict=True))
        row = {key: flat[key] for key in OP_COLUMNS if key in flat}
        for key in ("flops", "bytes_moved"):
            row[key] = {"fixed": flat[f"{key}_fixed"], "per_sample": flat[f"{key}_per_sample"]}
        rows.append(row)
    return rows


def _columns_from_rows(body: dict[str, Any]) -> dict[str, Any]:
    body = {**body, "forward": _columns(body["forward"]), "backward": _columns(body["backward"])}
    body["optimizers"] = [{**o, "ops": _columns(o["ops"])} for o in body["optimizers"]]
    return body


def _rows_from_columns(body: dict[str, Any], where: str) -> dict[str, Any]:
    body = dict(body)
    for key in ("forward", "backward"):
        if key in body:
            body[key] = _rows(body[key], f"{where}: {key}")
    if isinstance(body.get("optimizers"), list):
        body["optimizers"] = [
            {**o, "ops": _rows(o.get("ops"), f"{where}: optimizers.{i}.ops")}
            if isinstance(o, dict)
            else o
            for i, o in enumerate(body["optimizers"])
        ]
    return body


def _plain(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


LINE_CHARACTERS = 100
"""A value that fits in one line of this length is written in one."""


def _write(value: Any, depth: int) -> str:
    """Return indented JSON in which short values and lists of plain values take one line."""
    line = json.dumps(value, ensure_ascii=False)
    children = list(value.values()) if isinstance(value, dict) else value
    plain = isinstance(value, list | tuple) and not any(
        isinstance(child, dict | list | tuple) for child in children
    )
    if not isinstance(value, dict | list | tuple) or plain or len(line) <= LINE_CHARACTERS:
        return line
    pad = "  " * (depth + 1)
    end = "\n" + "  " * depth
    if isinstance(value, dict):
        items = [f"{pad}{json.dumps(k)}: {_write(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(items) + end + "}"
    return "[\n" + ",\n".join(pad + _write(v, depth + 1) for v in value) + end + "]"
