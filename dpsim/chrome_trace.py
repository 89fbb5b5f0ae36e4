"""Chrome trace: a timeline as JSON for Perfetto, chrome://tracing and PyTorch's trace tools.

One process for each rank and one thread for each track; times are microseconds from the first span.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from dpsim.errors import InputError, SimulationError
from dpsim.timeline import PHASES, Timeline, Track
from dpsim.units import NS_PER_MS, NS_PER_US, format_duration

NS_DIGITS = 3
"""Digits after the point that a nanosecond needs in microseconds."""


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as a Chrome trace: an object that `json.dumps` takes.

    Raises:
        SimulationError: Two spans of one track overlap.
    """
    _check(timeline)
    processes = _processes(timeline.tracks)
    first = min(int(timeline.start.min()), 0) if len(timeline) else 0
    return {
        "displayTimeUnit": "ms",
        "otherData": {"producer": "dpsim", "step_time_ms": timeline.step_ns / NS_PER_MS},
        "traceEvents": [
            *_labels(timeline.tracks, processes),
            *_marks(timeline.step_ns, first),
            *_spans(timeline, processes, first),
        ],
    }


def dumps(timeline: Timeline) -> str:
    """Return a timeline as the text of a Chrome trace. Raises as `trace_events` does."""
    return json.dumps(trace_events(timeline), allow_nan=False, separators=(",", ":")) + "\n"


def write(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline as a Chrome trace, compressed if the name ends in .gz.

    Raises:
        SimulationError: Two spans of one track overlap.
        InputError: The file cannot be written.
    """
    data = dumps(timeline).encode()
    path = Path(path)
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)  # the same timeline gives the same bytes
    try:
        path.write_bytes(data)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError(f"{path}: cannot be written ({reason}). Check the path.") from None


def _check(timeline: Timeline) -> None:
    """Refuse spans of one track that overlap, which viewers would draw wrongly or drop."""
    order = np.lexsort((timeline.end, timeline.start, timeline.track))
    start, end, track = timeline.start[order], timeline.end[order], timeline.track[order]
    bad = np.flatnonzero((track[1:] == track[:-1]) & (start[1:] < end[:-1]))
    if len(bad):
        a, b = order[bad[0]], order[bad[0] + 1]
        name = timeline.tracks[timeline.track[a]].name
        raise SimulationError(
            f"trace: spans of one track must not overlap, but on '{name}' of rank "
            f"{timeline.tracks[timeline.track[a]].rank} '{_name(timeline, b)}' starts at "
            f"{format_duration(int(timeline.start[b]))}, before '{_name(timeline, a)}' ends at "
            f"{format_duration(int(timeline.end[a]))}. This is a fault of the schedule."
        )


def _name(timeline: Timeline, span: int) -> str:
    return str(timeline.names[timeline.op[span]])


def _processes(tracks: tuple[Track, ...]) -> dict[int, int]:
    """Return the pid of each rank: the rank itself, and for the server (-1) the next number."""
    ranks = sorted({track.rank for track in tracks})
    after = max(ranks, default=0) + 1
    return {rank: rank if rank >= 0 else after - rank - 1 for rank in ranks}


def _labels(tracks: tuple[Track, ...], processes: dict[int, int]) -> list[dict[str, Any]]:
    events = []
    for rank, pid in processes.items():
        alike = max(track.count for track in tracks if track.rank == rank)
        name = f"rank {rank}" if rank >= 0 else "server"
        name += f" (x{alike} alike)" if alike > 1 else ""
        events.append(_label("process_name", pid, 0, name=name))
        events.append(_label("process_sort_index", pid, 0, sort_index=pid))
    for tid, track in enumerate(tracks, start=1):
        pid = processes[track.rank]
        events.append(_label("thread_name", pid, tid, name=f"{track.name} ({track.kind})"))
        events.append(_label("thread_sort_index", pid, tid, sort_index=tid))
    return events


def _label(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _marks(step_ns: int, first: int) -> list[dict[str, Any]]:
    """Return the two moments between which the step lies."""
    return [
        {"ph": "i", "s": "g", "name": name, "cat": "step", "pid": 0, "tid": 0, "ts": _us(at)}
        for name, at in (("step begins", -first), ("step ends", step_ns - first))
    ]


def _spans(timeline: Timeline, processes: dict[int, int], first: int) -> list[dict[str, Any]]:
    """Return the spans in the order of their start."""
    pids = [processes[track.rank] for track in timeline.tracks]
    order = np.argsort(timeline.start, kind="stable")
    columns = (timeline.track, timeline.start, timeline.end, timeline.phase, timeline.op)
    rows = zip(*(column[order].tolist() for column in (*columns, timeline.nbytes)), strict=True)
    return [
        {
            "ph": "X",
            "name": timeline.names[op],
            "cat": str(PHASES[phase]),
            "pid": pids[track],
            "tid": track + 1,
            "ts": _us(start - first),
            "dur": _us(end - start),
            "args": {"phase": str(PHASES[phase]), "bytes": nbytes},
        }
        for track, start, end, phase, op, nbytes in rows
    ]


def _us(ns: int) -> float:
    return round(ns / NS_PER_US, NS_DIGITS)
