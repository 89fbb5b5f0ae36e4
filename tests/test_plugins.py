"""One object per file, found by the file's name."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpsim.collectives import ALGORITHMS
from dpsim.errors import InputError, UnknownNameError
from dpsim.plugins import Registry
from dpsim.schedules import SCHEDULES

NUMBERS = itertools.count()
HEAD = "from {package} import REGISTRY\n"
REGISTERED = (
    '"""{summary}\n\nMore.\n"""\n'
    + HEAD
    + "@REGISTRY.add\ndef run() -> str:\n    return {summary!r}\n"
)
Shop = Callable[..., Registry[Any]]


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """Return a function that makes a package of plug-ins from the text of its files."""
    package = f"dpsim_test_shop_{next(NUMBERS)}"
    folder = tmp_path / package
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)

    def make(**modules: str) -> Registry[Any]:
        (folder / "__init__.py").write_text(
            f"from dpsim.plugins import Registry\nREGISTRY = Registry({package!r}, 'cake')\n"
        )
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text.replace("{package}", package))
        registry: Registry[Any] = importlib.import_module(package).REGISTRY
        return registry

    yield make
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]


def plugin(summary: str) -> str:
    return REGISTERED.replace("{summary!r}", repr(summary)).replace("{summary}", summary)


def test_a_plug_in_has_the_name_of_its_file_with_dashes(shop: Shop) -> None:
    registry = shop(apple_pie=plugin("With apples."), bun=plugin("Plain."))
    assert ["apple-pie", "bun"] == registry.names()
    assert "With apples." == registry.get("apple-pie")()


def test_the_help_text_is_the_first_line_of_the_file(shop: Shop) -> None:
    assert "With apples." == shop(apple_pie=plugin("With apples.")).summary("apple-pie")


def test_a_file_without_a_docstring_has_no_help_text(shop: Shop) -> None:
    assert "" == shop(bun="").summary("bun")


def test_names_are_known_before_anything_is_imported(shop: Shop) -> None:
    assert ["broken"] == shop(broken="raise RuntimeError\n").names()


def test_files_that_begin_with_an_underscore_are_no_plug_ins(shop: Shop) -> None:
    assert ["bun"] == shop(bun=plugin("Plain."), _oven="").names()


def test_an_unknown_name_gets_the_known_ones_and_a_guess(shop: Shop) -> None:
    registry = shop(apple_pie=plugin("With apples."), bun=plugin("Plain."))
    with pytest.raises(UnknownNameError) as caught:
        registry.get("aple-pie")
    assert "no cake 'aple-pie'; known: apple-pie, bun. Did you mean 'apple-pie'?" == str(
        caught.value
    )


def test_a_file_that_registers_nothing_is_named(shop: Shop) -> None:
    registry = shop(bun='"""Plain."""\n')
    with pytest.raises(InputError) as caught:
        registry.get("bun")
    assert str(caught.value).endswith(
        ".bun: must register one cake, got none. Decorate its object."
    )


def test_a_file_that_registers_two_is_named(shop: Shop) -> None:
    registry = shop(bun=plugin("Plain.") + "@REGISTRY.add\ndef walk() -> None: ...\n")
    with pytest.raises(InputError) as caught:
        registry.get("bun")
    assert str(caught.value).endswith(
        ".bun: must register one cake, got run and walk. Move one to a file of its own."
    )


@pytest.mark.parametrize("registry", [ALGORITHMS, SCHEDULES], ids=["collectives", "schedules"])
def test_every_shipped_file_registers_one_object_and_says_what_it_is(
    registry: Registry[Any],
) -> None:
    names = registry.names()
    assert names
    for name in names:
        assert registry.get(name).__module__.endswith(f".{name.replace('-', '_')}")
        assert registry.summary(name).endswith("."), f"{name}: the first line is the help text"
