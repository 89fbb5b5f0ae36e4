"""Cli: the command `dpsim`.

A command imports what it needs when it runs, so that `dpsim --help` starts at once.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from dpsim._options import SectionedCommand, given_flags, ignored_flags, simulate_options
from dpsim._parameters import Listed, Named, Text, Whole
from dpsim.errors import DpsimError, InputError, MissingExtraError, UnknownNameError

F = TypeVar("F", bound=Callable[..., Any])

SCHEMA_VERSION = 1
"""Of the JSON documents, as in dpsim.report, which --help must not load."""
WIDEST = 100
"""Columns that output takes on a terminal which has more; longer lines are hard to read."""
NARROWEST = 60
LISTS = ("models", "profiles", "networks", "modes", "collectives")
"""What `dpsim list` can be asked for: the keys of dpsim.catalog.SECTIONS."""


@dataclass(slots=True)
class Settings:
    """What flags of the whole program say."""

    json: bool = False
    no_color: bool = False
    quiet: bool = False
    verbose: bool = False


# ---------------------------------------------------------------------------- the program


class Program(click.Group):
    """The group of all commands; it turns errors into one line, or one JSON document."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **extra: Any) -> NoReturn:
        """Run a command line, and exit."""
        words = sys.argv[1:] if args is None else list(args)
        settings = Settings(json="--json" in words)
        extra = {key: value for key, value in extra.items() if key != "prog_name"}
        try:
            code = self._run(words, settings, extra)
        except BrokenPipeError:  # while it says what went wrong
            code = _end_quietly()
        sys.exit(code)

    def _run(self, words: list[str], settings: Settings, extra: dict[str, Any]) -> int:
        """Return the exit code."""
        try:
            extra |= {"standalone_mode": False, "obj": settings}
            code = super().main(words, "dpsim", **extra)
        except DpsimError as error:
            return _fail(settings, error.code, str(error), error.exit_code)
        except click.ClickException as error:
            command = next((word for word in words if word in self.commands), "")
            return _fail(settings, "usage", _usage(error, command), error.exit_code)
        except click.Abort:
            return _fail(settings, "interrupted", "interrupted", 130)
        except OSError as error:
            return _lost(error)
        except Exception as error:  # noqa: BLE001 - the last line of defence
            if settings.verbose:
                traceback.print_exc()
            text = f"unexpected {type(error).__name__}: {error}. This is a fault of dpsim; "
            return _fail(settings, "unexpected", f"{text}-v shows where it is.", 1)
        return code if isinstance(code, int) else 0

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, and end quietly when nobody reads its output any more."""
        try:
            value = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            return _end_quietly()
        return value

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names."""
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            raise UnknownNameError("command", args[0], self.commands)
        return super().resolve_command(ctx, args)


def _lost(error: OSError) -> int:
    """Say that the output could not be written; it cannot hold the message, whatever its format."""
    _end_quietly()
    reason = error.strerror or str(error)
    click.echo(
        f"dpsim: error: the output must be writable, got: {reason}. Send it elsewhere.", err=True
    )
    return 1


def _end_quietly() -> int:
    """Send what is left to nowhere, so that the interpreter does not complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _usage(error: click.ClickException, command: str) -> str:
    """Return what is wrong with a command line, and which help to read."""
    if isinstance(error, click.NoSuchOption):
        close = error.possibilities or ()
        guess = f" Did you mean '{close[0]}'?" if close else ""
        text = f"no option '{error.option_name}'.{guess}"
    else:
        text = error.format_message()
    end = "" if text.endswith((".", "?")) else "."
    return f"{text}{end} '{f'dpsim {command}'.strip()} --help' lists the flags."


def _fail(settings: Settings, code: str, message: str, exit_code: int) -> int:
    """Say what went wrong, in one line or one document, and return the exit code."""
    line = " ".join(message.split())
    if settings.json:
        hint = line.rpartition(". ")[2] if ". " in line else ""
        error = {"code": code, "message": line, "hint": hint}
        _emit(_json({"schema_version": SCHEMA_VERSION, "ok": False, "error": error}))
    else:
        click.echo(f"dpsim: error: {line}", err=True)
    return exit_code


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _emit(text: str, *, err: bool = False) -> None:
    """Write text that may hold characters which the terminal does not have."""
    stream = sys.stderr if err else sys.stdout
    encoding = stream.encoding or "utf-8"
    text = text.encode(encoding, "replace").decode(encoding)
    click.echo(text, nl=False, err=err, color=True)  # whoever made the text has chosen


def _wants_color(settings: Settings) -> bool:
    """Return whether to colour: --no-color, NO_COLOR, TERM, FORCE_COLOR, CLICOLOR, terminal."""
    environment = os.environ
    if settings.no_color or environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return False
    if any(
        environment.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")
    ):
        return True
    return environment.get("CLICOLOR") != "0" and sys.stdout.isatty()


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)


def _switch(*names: str, about: str) -> Callable[[F], F]:
    """Return a flag of the whole program, to be given before or after the command."""

    def store(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and param.name:
            setattr(ctx.find_object(Settings), param.name, True)

    return click.option(*names, is_flag=True, expose_value=False, callback=store, help=about)


def switches(command: F) -> F:
    """Give a command the flags of the whole program; usable as a decorator."""
    for switch in (
        _switch("-v", "--verbose", about="Show where an unexpected error comes from."),
        _switch("-q", "--quiet", about="No warnings and no notes."),
        _switch("--no-color", about="No colours; NO_COLOR does the same."),
    ):
        command = switch(command)
    return command


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        import dpsim

        click.echo(f"dpsim {dpsim.__version__}")
        ctx.exit()


@click.group(cls=Program, invoke_without_command=True)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
    help="Print the version.",
)  # fmt: skip
@switches
@click.pass_context
def main(ctx: click.Context) -> None:
    """Predict one step of data-parallel training: why more GPUs are faster, or slower."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


# ---------------------------------------------------------------------------- simulate


@main.command(cls=SectionedCommand)
@simulate_options
@click.option("--explain", is_flag=True, help="Show every phase, link and rank.")
@click.option("--trace", metavar="FILE", help="Write the timeline for trace viewers; - prints it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of tables.")
@switches
@click.pass_context
def simulate(
    ctx: click.Context, /, *, explain: bool, trace: str | None, as_json: bool, **flags: Any
) -> None:
    """Predict one training step.

    Without flags: ResNet-50, 32 images, one GPU of a shipped machine.
    """
    from dataclasses import replace

    from dpsim import report
    from dpsim._question import question_of
    from dpsim.answer import predict

    settings = ctx.ensure_object(Settings)
    if trace == "-" and as_json:
        raise InputError(
            "--trace must name a file beside --json, got '-': both would go to standard output. "
            "Give --trace a file name."
        )
    asked = question_of(flags)
    answer = predict(asked.workload, asked.profile, asked.scenario, asked.network)
    ignored = ignored_flags(given_flags(ctx), asked.scenario.mode)
    answer = replace(answer, warnings=(*answer.warnings, *asked.warnings, *ignored))
    if trace is not None:
        _write_trace(answer.timeline, trace, note=not (settings.quiet or as_json))
    if as_json:
        _emit(report.as_json(answer, assumptions=asked.assumptions))
        return
    color = _wants_color(settings)
    words = asked.assumptions
    text = report.as_text(answer, explain=explain, width=_width(), color=color, assumptions=words)
    _emit(text, err=trace == "-")
    _warn(settings, answer.warnings)


def _write_trace(timeline: Any, name: str, *, note: bool) -> None:
    from dpsim import chrome_trace

    if name == "-":
        _emit(chrome_trace.dumps(timeline))
        return
    chrome_trace.write(timeline, name)
    if note:
        click.echo(f"dpsim: wrote {name}; https://ui.perfetto.dev opens it", err=True)


def _warn(settings: Settings, warnings: Sequence[str]) -> None:
    if settings.quiet:
        return
    sys.stdout.flush()  # warnings come last, also where both streams end in one file
    for text in warnings:
        _emit(f"dpsim: warning: {' '.join(text.split())}\n", err=True)


# ---------------------------------------------------------------------------- trace


@main.command()
@click.argument("target", metavar="MODULE:CALLABLE")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    help="[NAME=][DTYPE:]DIMS of one input of forward, without the batch; repeatable.",
)
@click.option("--target", "targets", multiple=True, help="The same for one tensor of labels.")
@click.option("--loss", help="cross-entropy, mse, sum, model or MODULE:CALLABLE.")
@click.option("--name", help="Name of the workload; the callable's if not given.")
@click.option(
    "--sample", type=Text(), help="What one unit of the batch is called: image, sequence."
)
@click.option(
    "--batches",
    type=Listed(Whole(1), "B,B,B"),
    help="Two batches to fit and one to check; 2,4,8 if not given.",
)
@click.option("--tolerance", type=click.FLOAT, help="Relative error allowed at the third batch.")
@click.option(
    "--optimizers",
    type=Listed(Text(), "NAME,..."),
    help="Whose kernels are recorded; all known if not given.",
)
@click.option("--citation", help="Where the model comes from.")
@click.option("--output", "-o", help="File to write; standard output if not given.")
@switches
@click.pass_context
def trace(ctx: click.Context, /, target: str, output: str | None, **flags: Any) -> None:
    """Turn a model into a workload; needs PyTorch, and no GPU.

    MODULE:CALLABLE returns an nn.Module and takes no arguments; MODULE may be a .py file.
    """
    from dpsim import files

    settings = ctx.ensure_object(Settings)
    written = output if output not in (None, "-") else None
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    given.setdefault("inputs", ())
    workload = _tracer()(target, output=written or "", **given)
    if written is None:
        _emit(files.dumps(workload))
        return
    files.save(workload, Path(written))
    if not settings.quiet:
        click.echo(
            f"dpsim: wrote {written}: {workload.name}, {len(workload.parameters)} parameters, "
            f"{len(workload.forward)} ops forward and {len(workload.backward)} backward",
            err=True,
        )


def _tracer() -> Callable[..., Any]:
    """Return `calibrate.trace.trace`, from the wheel or the checkout."""
    from dpsim._bundle import bundled

    root = str(bundled("calibrate").parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    try:
        from calibrate.trace import trace as tracer
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] != "torch":
            raise
        raise MissingExtraError("dpsim trace", "calibrate") from None
    return tracer


# ---------------------------------------------------------------------------- list


@main.command("list")
@click.argument("what", type=Named("section", LISTS), required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of tables.")
@switches
@click.pass_context
def list_(ctx: click.Context, /, what: str | None, as_json: bool) -> None:
    """Print the shipped models, machines and networks, the modes and the collectives."""
    from dpsim import catalog

    sections = catalog.catalog((what,) if what else ())
    if as_json:
        _emit(_json({"schema_version": SCHEMA_VERSION, "ok": True, **sections}))
        return
    color = _wants_color(ctx.ensure_object(Settings))
    _emit(catalog.as_text(sections, width=_width(), color=color))


if __name__ == "__main__":
    main()
