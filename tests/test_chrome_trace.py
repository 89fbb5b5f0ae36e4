"""Timelines as files for trace viewers: valid, complete, and the same bytes every time."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dpsim.chrome_trace import dumps, trace_events, write
from dpsim.errors import InputError, SimulationError
from dpsim.timeline import Phase
from tests.predictions import ROWS, timeline


def events(kind: str, trace: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    trace = trace_events(timeline()) if trace is None else trace
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def test_every_span_is_one_complete_event() -> None:
    assert len(ROWS) == len(events("X"))


def test_times_are_microseconds_from_the_first_span_and_keep_nanoseconds() -> None:
    first, _, second = events("X")[:3]
    assert (0.0, 11.5) == (first["ts"], first["dur"])
    assert 1.55 == second["ts"]
    backward = next(event for event in events("X") if event["cat"] == "backward")
    assert (401.501, 499.999) == (backward["ts"], backward["dur"])


def test_a_span_says_its_phase_and_bytes() -> None:
    push = next(event for event in events("X") if event["name"] == "push")
    assert {"phase": "push", "bytes": 102_228_128} == push["args"]


def test_ranks_are_processes_and_tracks_are_threads() -> None:
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events("M")
        if "name" in event["args"]
    }
    assert {
        (2, 0): "server",
        (0, 0): "rank 0",
        (1, 0): "rank 1 (x7 alike)",
        (0, 1): "main thread (thread)",
        (0, 2): "compute (stream)",
        (1, 3): "compute (stream)",
        (2, 4): "cpu (server)",
    } == named


def test_the_step_lies_between_two_marks() -> None:
    assert [("step begins", 1.5), ("step ends", 1001.5)] == [
        (event["name"], event["ts"]) for event in events("i")
    ]


def test_events_of_one_track_follow_each_other() -> None:
    by_track: dict[int, list[tuple[float, float]]] = {}
    for event in events("X"):
        by_track.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_track.values():
        # 1e-6 us: sums of two floats, where the nanoseconds themselves meet exactly
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(spans))


def test_spans_that_overlap_are_refused() -> None:
    rows = (
        (1, Phase.FORWARD, "aten.mm", 0, 20_000, 0),
        (1, Phase.LOSS, "aten.nll_loss", 19_999, 30_000, 0),
    )
    with pytest.raises(SimulationError) as problem:
        trace_events(timeline(rows))
    assert (
        "trace: spans of one track must not overlap, but on 'compute' of rank 0 'aten.nll_loss' "
        "starts at 20.0 us, before 'aten.mm' ends at 20.0 us. This is a fault of the schedule."
        == str(problem.value)
    )


def test_spans_that_meet_and_spans_without_length_are_fine() -> None:
    rows = (
        (1, Phase.FORWARD, "a", 0, 10, 0),
        (1, Phase.FORWARD, "b", 10, 10, 0),
        (1, Phase.FORWARD, "c", 10, 20, 0),
    )
    assert 3 == len(events("X", trace_events(timeline(rows))))


def test_a_timeline_without_spans_is_a_valid_trace() -> None:
    trace = trace_events(timeline(()))
    assert [] == events("X", trace)
    assert 2 == len(events("i", trace))


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_a_file_holds_the_events_and_is_the_same_every_time(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(timeline(), path)
    first = path.read_bytes()
    write(timeline(), path)
    assert first == path.read_bytes()
    text = gzip.decompress(first) if name.endswith("gz") else first
    assert trace_events(timeline()) == json.loads(text)
    assert dumps(timeline()).encode() == text


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "no" / "step.json"
    with pytest.raises(InputError) as problem:
        write(timeline(), path)
    expected = f"{path}: cannot be written (No such file or directory). Check the path."
    assert expected == str(problem.value)
