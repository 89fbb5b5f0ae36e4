"""What `dpsim list` knows, and how it is shown."""

from __future__ import annotations

import json

import pytest

from dpsim import files
from dpsim.catalog import SECTIONS, TABLES, as_text, catalog, weakest_basis
from dpsim.cli import LISTS
from dpsim.collectives import ALGORITHMS
from dpsim.hardware import Basis, HardwareProfile, Network
from dpsim.schedules import SCHEDULES
from dpsim.workload import Workload


def test_sections_are_known_to_the_command_and_can_be_shown() -> None:
    assert list(LISTS) == list(SECTIONS) == list(TABLES)


def test_everything_that_is_shipped_is_listed() -> None:
    expected = {
        "models": files.names(Workload),
        "profiles": files.names(HardwareProfile),
        "networks": files.names(Network),
        "modes": SCHEDULES.names(),
        "collectives": ALGORITHMS.names(),
    }
    rows = catalog()
    assert expected == {key: [row["name"] for row in value] for key, value in rows.items()}
    assert rows == json.loads(json.dumps(rows))


def test_a_model_has_the_size_that_everyone_knows() -> None:
    row = next(row for row in catalog(["models"])["models"] if row["name"] == "resnet50")
    assert (25_557_032, 102_228_128, 151) == (
        row["parameters"],
        row["parameter_bytes"],
        row["modules"],
    )
    # 4.09 G multiply-adds are in every table; each counts as two
    assert 8.18e9 == pytest.approx(row["forward_flop_per_sample"], rel=1e-3)


def test_the_weakest_basis_is_found_at_any_depth() -> None:
    profile = files.find(HardwareProfile, "a100-sxm")
    assert Basis.ASSUMED is weakest_basis(profile)
    assert Basis.MEASURED is weakest_basis(())
    assert Basis.MODELLED is weakest_basis(({"a": Basis.MODELLED}, Basis.PUBLISHED))


def test_tables_fit_80_columns() -> None:
    shown = as_text(catalog(), width=80, color=False)
    assert max(map(len, shown.splitlines())) <= 80
    assert "resnet50" in shown
