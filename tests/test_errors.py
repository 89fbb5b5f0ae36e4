"""The tree of errors: what a program can catch, and what the command exits with."""

from __future__ import annotations

import pickle
import re

import pytest

from dpsim import errors
from dpsim.errors import DpsimError, InputError, MissingExtraError, UnknownNameError

TREE = [value for value in vars(errors).values() if isinstance(value, type)]
ERRORS = [kind for kind in TREE if issubclass(kind, DpsimError)]


def test_a_missing_extra_prints_the_command_that_installs_it() -> None:
    assert (
        "calibration needs the extra 'calibrate'. "
        "Install it with: pip install 'dpsim-train[calibrate]'"
    ) == str(MissingExtraError("calibration", "calibrate"))


def test_names_are_listed_in_order_and_the_hint_comes_last() -> None:
    error = UnknownNameError("mode", "pss", ["ring", "ps"], "See 'dpsim list'.")
    assert "no mode 'pss'; known: ps, ring. Did you mean 'ps'? See 'dpsim list'." == str(error)


def test_nothing_known_is_said() -> None:
    assert "no mode 'ps'; known: none." == str(UnknownNameError("mode", "ps", []))


@pytest.mark.parametrize(
    "error",
    [
        UnknownNameError("mode", "pss", ["ring", "ps"], "See 'dpsim list'."),
        MissingExtraError("calibration", "calibrate"),
        InputError("batch must be >= 1, got 0"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_the_way_back_from_a_worker(error: DpsimError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(error), str(error)) == (type(again), str(again))


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_the_tree_in_the_docstring_is_the_tree(kind: type[DpsimError]) -> None:
    lines = (errors.__doc__ or "").splitlines()
    [drawn] = [line for line in lines if re.search(rf"\b{kind.__name__}\b", line)]
    assert kind is DpsimError or drawn.endswith(f"exit {kind.exit_code}")


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [kind.code for kind in ERRORS]
    assert sorted(set(codes)) == sorted(codes)
