"""Recorder: spans in blocks, cut to a window, with causes that point at what is kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim.engine.recorder import NO_SPAN, Recorder
from dpsim.timeline import PHASES, Phase, Track

THREAD = Track(rank=0, name="main thread", kind="thread")
STREAM = Track(rank=0, name="compute", kind="stream", count=3)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_spans_come_out_as_they_were_recorded() -> None:
    recorder = Recorder()
    thread, stream = recorder.track(THREAD), recorder.track(STREAM)
    launch = recorder.span(thread, Phase.FORWARD, "mm", 0, 10, NO_SPAN)
    kernel = recorder.span(stream, Phase.INPUT, "copy", 10, 30, launch, 64)
    timeline = recorder.timeline(0, 30)
    assert (0, 1) == (launch, kernel)
    assert (THREAD, STREAM) == timeline.tracks
    assert ["mm", "copy"] == [timeline.names[i] for i in timeline.op]
    assert [Phase.FORWARD, Phase.INPUT] == [PHASES[i] for i in timeline.phase]
    assert [0, 10] == timeline.start.tolist()
    assert [10, 30] == timeline.end.tolist()
    assert [0, 64] == timeline.nbytes.tolist()
    assert [-1, 0] == timeline.cause.tolist()
    assert 30 == timeline.step_ns


def test_a_span_of_no_length_is_not_kept() -> None:
    recorder = Recorder()
    track = recorder.track(THREAD)
    assert NO_SPAN == recorder.span(track, Phase.LOOP, "nothing", 5, 5, NO_SPAN)
    assert 0 == len(recorder.timeline(0, 10))


def test_while_it_is_off_nothing_is_kept_and_no_index_given() -> None:
    recorder = Recorder(on=False)
    track = recorder.track(THREAD)
    assert NO_SPAN == recorder.span(track, Phase.LOOP, "loop", 0, 5, NO_SPAN)
    assert NO_SPAN == recorder.spans(track, Phase.LOOP, ints(0), ints(0), ints(5), ints(-1))
    assert NO_SPAN == recorder.next_index
    assert 0 == len(recorder.timeline(0, 10))
    assert (THREAD,) == recorder.timeline(0, 10).tracks


def test_the_window_keeps_what_touches_it_and_counts_from_its_start() -> None:
    recorder = Recorder()
    track = recorder.track(THREAD)
    edges = [(0, 100), (50, 101), (100, 150), (150, 200), (199, 300), (200, 250)]
    for start, end in edges:
        recorder.span(track, Phase.LOOP, f"{start}", start, end, NO_SPAN)
    timeline = recorder.timeline(100, 200)
    assert ["50", "100", "150", "199"] == [timeline.names[i] for i in timeline.op]
    assert [-50, 0, 50, 99] == timeline.start.tolist()
    assert [1, 50, 100, 200] == timeline.end.tolist()


def test_a_cause_outside_the_window_is_forgotten_and_others_are_renumbered() -> None:
    recorder = Recorder()
    track = recorder.track(THREAD)
    first = recorder.span(track, Phase.LOOP, "before", 0, 10, NO_SPAN)
    second = recorder.span(track, Phase.LOOP, "inside", 10, 20, first)
    recorder.span(track, Phase.LOOP, "also inside", 20, 30, second)
    assert [-1, 0] == recorder.timeline(10, 30).cause.tolist()
    assert [-1, 0, 1] == recorder.timeline(0, 30).cause.tolist()


def test_equal_names_have_one_code_whichever_tuple_they_come_in() -> None:
    recorder = Recorder()
    names = ("mm", "relu", "mm")
    assert [0, 1, 0] == recorder.codes(names).tolist()
    assert recorder.codes(names) is recorder.codes(names)
    assert [1, 2] == recorder.codes(("relu", "add")).tolist()
    assert 0 == recorder.name("mm")


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30), st.integers(-1, 20)), max_size=20),
    st.tuples(st.integers(0, 60), st.integers(1, 60)),
)
def test_a_window_is_the_recording_cut_by_hand(
    spans: list[tuple[int, int, int]], window: tuple[int, int]
) -> None:
    recorder = Recorder()
    track = recorder.track(STREAM)
    begin, finish = window[0], sum(window)
    kept: dict[int, int] = {}
    rows = []
    for index, (start, length, cause) in enumerate(spans):
        earlier = cause if cause < index else -1
        recorder.span(track, Phase.LOOP, "op", start, start + length, earlier)
        if start + length > begin and start < finish:
            kept[index] = len(kept)
            rows.append((start - begin, start + length - begin, kept.get(earlier, -1)))
    timeline = recorder.timeline(begin, finish)
    found = zip(timeline.start, timeline.end, timeline.cause, strict=True)
    assert rows == [tuple(map(int, row)) for row in found]


@pytest.mark.parametrize("window", [(0, 1), (5, 9)])
def test_an_empty_recording_is_an_empty_timeline(window: tuple[int, int]) -> None:
    timeline = Recorder().timeline(*window)
    assert (0, window[1] - window[0]) == (len(timeline), timeline.step_ns)
