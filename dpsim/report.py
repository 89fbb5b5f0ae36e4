"""Report: a prediction as text for people and as JSON for programs.

In JSON the unit is in every key that is not a count or a ratio, and the same prediction gives the
same bytes.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dpsim.hardware import Basis
from dpsim.prediction import LinkUse, PhaseTime, Prediction, RankUse
from dpsim.scenario import Scenario
from dpsim.units import MIB, MS_PER_S, NS_PER_MS, format_bytes, format_duration

SCHEMA_VERSION = 1
"""Version history of the JSON document. 1: first."""
WIDTH = 80
"""Columns that a report takes unless told otherwise."""
TOP_PHASES = 8
TOP_LINKS = 3
TOP_MESSAGES = 6
"""What is shown of phases, groups of links and sizes of messages before "more"."""


# ---------------------------------------------------------------------------- JSON


def as_dict(prediction: Prediction, *, assumptions: Sequence[str] = ()) -> dict[str, Any]:
    """Return a prediction as plain values, all but its timeline.

    Args:
        prediction: The answer.
        assumptions: What was chosen for the user, in words; those of the profile are added.
    """
    p = prediction
    return {
        "schema_version": SCHEMA_VERSION,
        "ok": True,
        "workload": p.workload,
        "sample": p.sample,
        "profile": p.profile,
        "profile_description": p.profile_description,
        "network": p.network,
        "nodes": p.nodes,
        "scenario": _plain(dataclasses.asdict(p.scenario)),
        "step_time_ms": p.step_ns / NS_PER_MS,
        "samples_per_step": p.samples,
        "throughput_samples_per_s": p.throughput_per_s,
        "speedup": p.speedup,
        "efficiency": p.efficiency,
        "baseline": {
            "batch": p.baseline.batch,
            "samples_per_step": p.baseline.samples,
            "step_time_ms": p.baseline.step_ns / NS_PER_MS,
            "throughput_samples_per_s": p.baseline.throughput_per_s,
            "bound": p.bound,
        },
        "phases": [
            {
                "phase": str(x.phase),
                "host_ms": x.host_ns / NS_PER_MS,
                "gpu0_ms": x.device_ns / NS_PER_MS,
                "other_gpus_ms": x.other_ns / NS_PER_MS,
            }
            for x in p.phases
        ],
        "ranks": [
            {
                "rank": x.rank,
                "count": x.count,
                "batch": x.batch,
                "sent_bytes": x.sent_bytes,
                "received_bytes": x.received_bytes,
                "compute_ms": x.compute_ns / NS_PER_MS,
                "exposed_ms": x.exposed_ns / NS_PER_MS,
            }
            for x in p.ranks
        ],
        "links": [{"link": x.link, "kind": x.kind, "bytes": x.nbytes} for x in p.links],
        "messages": [
            {"name": name, "count": len(sizes), "bytes": list(sizes)} for name, sizes in p.messages
        ],
        "basis": [
            {"what": x.what, "basis": str(x.basis), "spread": _plain(x.spread), "source": x.source}
            for x in p.basis
        ],
        "warnings": list(p.warnings),
        "assumptions": [
            *assumptions,
            *(f"{x.what}: {x.source}" for x in p.basis if x.basis is Basis.ASSUMED),
        ],
    }


def as_json(prediction: Prediction, *, assumptions: Sequence[str] = ()) -> str:
    """Return a prediction as one JSON document; arguments as in `as_dict`."""
    return dumps(as_dict(prediction, assumptions=assumptions))


def dumps(document: dict[str, Any]) -> str:
    """Return a document as JSON text: fixed order, ASCII, no NaN."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Return a value that JSON has: tuples as lists, an infinite limit as the text "inf"."""
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# ---------------------------------------------------------------------------- text


def as_text(
    prediction: Prediction,
    *,
    explain: bool = False,
    width: int = WIDTH,
    color: bool = False,
    assumptions: Sequence[str] = (),
) -> str:
    """Return a prediction as text.

    Args:
        prediction: The answer.
        explain: Whether to show every phase, link and rank.
        width: Columns to fill, >= 40.
        color: Whether to mark text with the colours of a terminal.
        assumptions: What was chosen for the user, in words.
    """
    p = prediction
    rows: list[tuple[str, RenderableType]] = [
        ("VERDICT", _verdict(p)),
        ("SETUP", Text("\n".join(_setup(p)))),
    ]
    if p.scenario.gpus > 1:
        rows.append(("ONE GPU", Text(_one_gpu(p))))
    rows.append(("PHASES", _phases(p, None if explain else TOP_PHASES)))
    rows.append(("BYTES", _links(p.links, None if explain else TOP_LINKS)))
    if explain:
        rows.append(("RANKS", _ranks(p.ranks)))
    messages = [_message(name, sizes) for name, sizes in p.messages if sizes]
    if messages:
        rows.append(("MESSAGES", Text("\n".join(messages))))
    rows.append(("BASIS", _basis(p, width)))
    if assumptions:
        rows.append(("ASSUMED", Text("; ".join(assumptions))))
    return render(rows, width=width, color=color)


def render(rows: Iterable[tuple[str, RenderableType]], *, width: int, color: bool) -> str:
    """Return labelled parts below each other."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(ratio=1)
    for label, part in rows:
        grid.add_row(label, part)
    return draw(grid, width=width, color=color)


def draw(part: RenderableType, *, width: int, color: bool) -> str:
    """Return a table or a text as lines without blanks at their ends."""
    file = io.StringIO()
    Console(
        file=file,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
    ).print(part)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def table(*columns: str) -> Table:
    """Return an empty table without lines; a name that begins with ">" aligns right."""
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in columns:
        made.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    return made


def shortened(text: str, width: int) -> str:
    """Return a text of at most `width` characters, "..." for what is left out."""
    return text if len(text) <= width else text[: max(width - 3, 1)].rstrip() + "..."


def _verdict(p: Prediction) -> Text:
    gpus = p.scenario.gpus
    head = (
        f"{p.scenario.mode} on {gpus} GPU{'s' * (gpus > 1)} of {p.profile}: "
        f"{format_duration(p.step_ns)} a step, {_rate(p, p.throughput_per_s)}"
    )
    if gpus == 1:
        return Text(head, style="bold")
    slower = p.speedup < 1
    tail = f"{p.speedup:.2f}x of one GPU, efficiency {p.efficiency:.0%}"
    tail += ": slower than one GPU" if slower else ""
    return Text(f"{head}\n{tail}", style="bold red" if slower else "bold green")


def _rate(p: Prediction, per_s: float) -> str:
    number = f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
    return f"{number} {p.sample}s/s"


def _setup(p: Prediction) -> list[str]:
    s = p.scenario
    update = f"{s.optimizer} ({s.optimizer_implementation})"
    work = [
        p.workload,
        f"batch {s.batch}{_share(p.ranks, s.gpus)}",
        s.precision,
        "forward only" if s.evaluation else update,
    ]
    place = [
        f"{p.nodes} node{'s' * (p.nodes > 1)}",
        *([f"network {p.network}"] if p.network else []),
        f"iteration {s.iteration}" if s.iteration else "steady state",
        *([f"{s.accumulation} micro-steps"] if s.accumulation > 1 else []),
    ]
    return [", ".join(work), ", ".join([*place, *_peculiarities(s)])]


def _share(ranks: Sequence[RankUse], gpus: int) -> str:
    """Return the samples of one GPU in words."""
    sizes = sorted({rank.batch for rank in ranks if rank.rank >= 0})
    if gpus == 1 or not sizes:
        return ""
    each = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return f" ({each} a GPU)"


def _peculiarities(s: Scenario) -> list[str]:
    """Return what is not as usual, in words."""
    words = [f"rank {rank} takes {factor:g}x the time" for rank, factor in s.stragglers]
    if s.anchor_step_s is not None:
        batch = f" at batch {s.anchor_batch}" if s.anchor_batch else ""
        words.append(f"anchored to {s.anchor_step_s * MS_PER_S:g} ms{batch}")
    return words


def _one_gpu(p: Prediction) -> str:
    one = p.baseline
    return (
        f"batch {one.batch}: {format_duration(one.step_ns)} a step, "
        f"{_rate(p, one.throughput_per_s)}; it waits for the {p.bound}"
    )


def _phases(p: Prediction, most: int | None) -> RenderableType:
    """Return the longest phases, in the order of the step."""

    def longest(phase: PhaseTime) -> int:
        return max(phase.host_ns, phase.device_ns, phase.other_ns)

    some = sorted((x for x in p.phases if longest(x)), key=longest, reverse=True)
    kept = {x.phase for x in some[:most]}
    others = any(x.other_ns for x in p.phases)
    shown = table("phase", ">host", ">GPU 0", *([">other GPUs"] * others))
    for x in p.phases:
        if x.phase in kept:
            times = (x.host_ns, x.device_ns, *([x.other_ns] * others))
            shown.add_row(str(x.phase), *(format_duration(ns) if ns else "-" for ns in times))
    left = len(some) - len(kept)
    if left:
        shown.add_row(f"({left} more with --explain)")
    return shown


def _links(links: Sequence[LinkUse], most: int | None) -> RenderableType:
    """Return the busiest links; those of one kind with the same bytes are one row."""
    used = [link for link in links if link.nbytes]
    if not used:
        return Text("none cross a link")
    ordered = sorted(used, key=lambda x: (-x.nbytes, x.kind))
    groups = [list(group) for _, group in groupby(ordered, key=lambda x: (-x.nbytes, x.kind))]
    shown = table("link", "kind", ">bytes a step", "")
    for group in groups[:most]:
        alike = f"{len(group) - 1} more alike" if len(group) > 1 else ""
        first = group[0]
        shown.add_row(first.link, first.kind, format_bytes(first.nbytes), alike)
    left = sum(len(group) for group in groups[most:]) if most is not None else 0
    if left:
        shown.add_row(f"({left} more with --explain)")
    return shown


def _ranks(ranks: Sequence[RankUse]) -> RenderableType:
    names = (">rank", ">alike", ">batch", ">sent", ">received", ">compute", ">exposed")
    shown = table(*names)
    for x in ranks:
        shown.add_row(
            str(x.rank) if x.rank >= 0 else "server",
            str(x.count),
            str(x.batch),
            format_bytes(x.sent_bytes),
            format_bytes(x.received_bytes),
            format_duration(x.compute_ns),
            format_duration(x.exposed_ns),
        )
    return shown


def _message(name: str, sizes: Sequence[int]) -> str:
    """Return the sizes of one kind of message, equal neighbours together."""
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    words = [f"{n} x {size / MIB:.2f}" if n > 1 else f"{size / MIB:.2f}" for size, n in runs]
    more = ["..."] if len(words) > TOP_MESSAGES else []
    listed = ", ".join([*words[:TOP_MESSAGES], *more])
    return f"{name}: {len(sizes)}, {sum(sizes) / MIB:.2f} MiB in all: {listed}"


def _basis(p: Prediction, width: int) -> RenderableType:
    shown = table("", "known as", ">spread", "source")
    before = sum(max(len(text) for text in column) + 2 for column in _basis_columns(p))
    for x in p.basis:
        source = shortened(x.source, max(width - before - len("MESSAGES") - 2, 10))
        shown.add_row(x.what, str(x.basis), f"{x.spread:.0%}", source)
    return shown


def _basis_columns(p: Prediction) -> list[list[str]]:
    return [
        ["", *(x.what for x in p.basis)],
        ["known as", *(str(x.basis) for x in p.basis)],
        ["spread", *(f"{x.spread:.0%}" for x in p.basis)],
    ]
