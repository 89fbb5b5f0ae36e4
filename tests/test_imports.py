"""The shape of the project: what is imported when, how long that takes, how large files are."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ["numba", "pandas", "plotly", "scipy", "simpy", "streamlit", "torch"]
HELP = "import sys; sys.argv = ['dpsim', '--help']; from dpsim.cli import main; main()"
MAX_LINES = 420
LONGER: dict[str, str] = {}
"""Modules that may be longer, each with its reason."""


def python(*arguments: str) -> str:
    """Return what a fresh interpreter prints that starts in the checkout."""
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout


def heavy_after(program: str) -> list[str]:
    """Return the heavy packages that are loaded when `program` has ended."""
    report = f"print('loaded:', *(name for name in {HEAVY} if name in sys.modules))"
    wrapped = f"import atexit, sys\natexit.register(lambda: {report})\n{program}"
    return python("-c", wrapped).rpartition("loaded:")[2].split()


@pytest.mark.parametrize("program", ["import dpsim", HELP], ids=["import dpsim", "dpsim --help"])
def test_the_start_loads_nothing_heavy(program: str) -> None:
    assert [] == heavy_after(program)


def test_the_proof_can_fail() -> None:
    assert ["simpy"] == heavy_after("import simpy")
    assert ["scipy"] == heavy_after("import dpsim, scipy.optimize")


def test_the_module_of_the_command_runs() -> None:
    assert "simulate" in python("-m", "dpsim.cli", "--help")


def test_help_takes_at_most_ten_starts_of_the_interpreter() -> None:
    """A ratio of medians, taken in turns, so that a busy machine slows both.

    Here a bare start takes about 15 ms, of which the limit allows 150; torch alone takes 2 s.
    """
    bare, full = [], []
    for _ in range(7):
        bare.append(seconds("-c", "pass"))
        full.append(seconds("-m", "dpsim.cli", "--help"))
    assert statistics.median(full) <= 10 * statistics.median(bare)


def seconds(*arguments: str) -> float:
    start = time.perf_counter()
    python(*arguments)
    return time.perf_counter() - start


MODULES = sorted(path for name in ("dpsim", "calibrate") for path in (ROOT / name).rglob("*.py"))
IDS = [str(path.relative_to(ROOT)) for path in MODULES]


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_a_module_says_what_it_is_in_one_line(path: Path) -> None:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    assert first.startswith('"""')
    assert first.rstrip('"').endswith(".")


@pytest.mark.parametrize("path", MODULES, ids=IDS)
def test_a_module_is_short_enough_to_be_read_in_one_sitting(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES or LONGER.get(name)


def test_every_module_has_its_place_in_the_order_of_imports() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    [layers] = [c["layers"] for c in tools["importlinter"]["contracts"] if c["type"] == "layers"]
    placed = {name.strip(" ()") for layer in layers for name in layer.split("|")}
    children = (path for path in (ROOT / "dpsim").iterdir() if holds_code(path))
    assert {f"dpsim.{path.stem}" for path in children} <= placed


def holds_code(path: Path) -> bool:
    if path.is_dir():
        return (path / "__init__.py").is_file()
    return path.suffix == ".py" and path.stem != "__init__"
