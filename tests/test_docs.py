"""The documentation names what exists, and nothing that does not."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dpsim.cli import main
from dpsim.collectives import ALGORITHMS
from dpsim.schedules import SCHEDULES
from dpsim.timeline import PHASES

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("traces/**/*.md")])
CLI = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
COMMANDS = main.commands
OPTIONS = sorted(
    {
        (command, flag)
        for command, entry in COMMANDS.items()
        for parameter in entry.params
        if isinstance(parameter, click.Option) and not parameter.hidden
        for flag in [*parameter.opts, *parameter.secondary_opts]
        if flag.startswith("--")
    }
)


def section(command: str) -> str:
    """Return the part of docs/cli.md about one command."""
    return CLI.partition(f"\n## `dpsim {command}`\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_section_and_help(command: str) -> None:
    assert section(command)
    assert COMMANDS[command].help


def test_every_section_is_about_a_command() -> None:
    assert sorted(COMMANDS) == sorted(re.findall(r"^## `dpsim ([a-z-]+)`$", CLI, re.MULTILINE))


@pytest.mark.parametrize(("command", "flag"), OPTIONS)
def test_every_flag_occurs_in_the_section_of_its_command(command: str, flag: str) -> None:
    assert re.search(rf"(?<![\w-]){flag}(?![\w-])", section(command))


def test_every_flag_of_a_section_exists() -> None:
    for command in COMMANDS:
        written = set(re.findall(r"`(--[a-z-]+)", section(command))) - {"--help"}
        assert written <= {flag for owner, flag in OPTIONS if owner == command}


@pytest.mark.parametrize("mode", SCHEDULES.names())
def test_every_mode_occurs_in_the_reference(mode: str) -> None:
    assert f"| `{mode}` |" in CLI


@pytest.mark.parametrize("algorithm", ALGORITHMS.names())
def test_every_collective_algorithm_occurs_in_the_reference(algorithm: str) -> None:
    assert f"| `{algorithm}` |" in CLI


def test_every_phase_has_a_row_in_the_description_of_the_model() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "model.md").read_text(), re.MULTILINE)
    assert [str(phase) for phase in PHASES] == rows


def test_ci_runs_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    expected = "pip install -c constraints.txt '.[dev,calibrate]' && pytest"
    assert 1 == readme.count(f"\n{expected}\n")
    printed = subprocess.run(
        ["bash", ".ci/run", "--print-test-command"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{expected}\n" == printed.stdout


SHOWN = [
    (page.name, command, text)
    for page in PAGES
    for command, text in re.findall(
        r"^<!-- output: dpsim ([^\n]*) -->\n```text\n(.*?)^```$",
        page.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
]


@pytest.mark.parametrize(("page", "command", "text"), SHOWN)
def test_shown_output_is_real(page: str, command: str, text: str) -> None:
    run = CliRunner().invoke(main, shlex.split(command), env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert (0, text) == (run.exit_code, run.stdout)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    targets = [link.partition("#")[0] for link in links if "://" not in link]
    assert [] == [target for target in targets if not (page.parent / target).exists()]
