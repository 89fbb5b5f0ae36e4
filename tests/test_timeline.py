"""Timeline: what a step's window keeps of its spans, and their sums."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpsim.timeline import PHASE_CODE, PHASES, Phase, Timeline, Track
from tests.predictions import timeline

ROWS = (
    (0, Phase.FORWARD, "before and inside", -40, 10, 0),
    (0, Phase.BACKWARD, "inside and after", 999_990, 1_000_500, 0),
    (1, Phase.FORWARD, "inside", 100, 350, 0),
    (1, Phase.FORWARD, "inside too", 400, 500, 0),
    (1, Phase.PUSH, "long ago", -90, -10, 7),
    (2, Phase.PULL, "all of it and more", -5, 1_000_005, 7),
)


def test_clipped_spans_lie_in_the_window() -> None:
    start, end = timeline(ROWS).clipped()
    assert [0, 999_990, 100, 400, 0, 0] == start.tolist()
    assert [10, 1_000_000, 350, 500, 0, 1_000_000] == end.tolist()


def test_busy_time_is_that_within_the_window() -> None:
    made = timeline(ROWS)
    assert [20, 350, 1_000_000, 0] == [made.busy_ns(track) for track in range(4)]


def test_phases_of_a_track_are_summed_in_the_order_of_phases() -> None:
    made = timeline(ROWS)
    assert {Phase.FORWARD: 10, Phase.BACKWARD: 10} == made.phase_ns(0)
    assert {Phase.FORWARD: 350} == made.phase_ns(1)
    assert [Phase.FORWARD, Phase.BACKWARD] == list(made.phase_ns(0))


def test_its_length_is_that_of_its_columns() -> None:
    assert 6 == len(timeline(ROWS))
    assert 0 == len(timeline(()))
    assert {} == timeline(()).phase_ns(0)


def test_every_phase_has_a_code() -> None:
    assert [PHASES[PHASE_CODE[phase]] for phase in Phase] == list(Phase)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from(PHASES),
            st.integers(-(10**15), 10**15),
            st.integers(0, 10**15),
        ),
        max_size=30,
    ),
    st.integers(1, 10**15),
)
def test_phases_of_a_track_add_up_to_its_busy_time(
    rows: list[tuple[int, Phase, int, int]], step_ns: int
) -> None:
    def column(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    made = Timeline(
        step_ns=step_ns,
        tracks=tuple(Track(rank=rank, name="compute", kind="stream") for rank in range(3)),
        names=("op",),
        start=column([start for _, _, start, _ in rows]),
        end=column([start + length for _, _, start, length in rows]),
        track=column([track for track, *_ in rows]).astype(np.int32),
        phase=column([PHASE_CODE[phase] for _, phase, *_ in rows]).astype(np.int32),
        op=column([0] * len(rows)).astype(np.int32),
        nbytes=column([0] * len(rows)),
        cause=column([-1] * len(rows)),
    )
    for track in range(3):
        assert made.busy_ns(track) == sum(made.phase_ns(track).values())
