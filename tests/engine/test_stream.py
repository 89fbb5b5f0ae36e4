"""Stream: a FIFO, what lets its ops start, and how many launches it remembers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.engine import Mark, Stream, latest
from dpsim.engine.recorder import NO_SPAN, Recorder
from dpsim.timeline import Phase, Timeline, Track

COMPUTE = Track(rank=0, name="compute", kind="stream")
FOREVER = 10**9


def stream(depth: int = 8, *, on: bool = True) -> Stream:
    return Stream(Recorder(on=on), COMPUTE, depth)


def rows(made: Stream) -> list[tuple[str, int, int, int]]:
    timeline = made.recorder.timeline(0, FOREVER)
    columns = zip(timeline.op, timeline.start, timeline.end, timeline.cause, strict=True)
    return [(timeline.names[op], int(a), int(b), int(cause)) for op, a, b, cause in columns]


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_the_latest_mark_is_the_first_of_equals() -> None:
    assert Mark(7, 2) == latest(Mark(3, 1), Mark(7, 2), Mark(7, 3))


def test_an_op_starts_when_it_is_launched_and_the_one_before_is_done() -> None:
    made = stream()
    launches = [made.recorder.span(made.track, Phase.LOOP, f"launch {i}", 0, 1, -1) for i in (0, 1)]
    first = made.op(Phase.FORWARD, "a", Mark(10, launches[0]), 20)
    second = made.op(Phase.FORWARD, "b", Mark(15, launches[1]), 5, nbytes=3)
    assert [("a", 10, 30, 0), ("b", 30, 35, 2)] == rows(made)[2:]
    assert (Mark(30, 2), Mark(35, 3)) == (first, second)
    assert second == made.tail


def test_an_op_that_is_launched_late_is_caused_by_its_launch() -> None:
    made = stream()
    made.op(Phase.FORWARD, "a", Mark(0), 10)
    made.op(Phase.FORWARD, "b", Mark(25, 0), 10)
    assert [("a", 0, 10, -1), ("b", 25, 35, 0)] == rows(made)


def test_a_mark_of_another_stream_holds_what_follows() -> None:
    recorder = Recorder()
    one, other = Stream(recorder, COMPUTE, 8), Stream(recorder, COMPUTE, 8)
    done = other.op(Phase.ALL_REDUCE, "sum", Mark(0), 50)
    one.wait(done)
    one.wait(Mark(20))
    one.op(Phase.OPTIMIZER, "add", Mark(5), 10)
    assert ("add", 50, 60, done.span) == rows(one)[-1]


def test_each_op_of_a_run_is_caused_by_its_launch_or_the_op_before() -> None:
    made = stream()
    made.op(Phase.FORWARD, "first", Mark(0), 10)
    codes = made.recorder.codes(("a", "b", "c"))
    causes = ints(100, 101, 102)  # launch spans, which are recorded elsewhere
    made.run(Phase.FORWARD, codes, ints(10, 30, 35), ints(20, 35, 40), causes)
    timeline = made.recorder._columns()
    assert [-1, 0, 101, 2] == timeline[5].tolist()
    assert Mark(40, 3) == made.tail


def test_a_run_without_ops_changes_nothing() -> None:
    made = stream()
    before = made.op(Phase.FORWARD, "a", Mark(0), 10)
    made.run(Phase.FORWARD, ints(), ints(), ints(), ints())
    assert before == made.tail


def test_only_as_many_ends_are_kept_as_launches_fit() -> None:
    made = stream(depth=3)
    for _ in range(2):
        made.op(Phase.FORWARD, "a", Mark(0), 10)
    assert [10, 20] == made.retired.tolist()
    ends = ints(30, 40, 50, 60)
    made.run(Phase.FORWARD, made.recorder.codes(tuple("bcde")), ends - 10, ends, ints(0, 0, 0, 0))
    assert [40, 50, 60] == made.retired.tolist()


def test_an_op_of_no_length_hands_on_what_let_it_start() -> None:
    made = stream()
    launch = made.recorder.span(made.track, Phase.LOOP, "launch", 0, 5, -1)
    assert Mark(5, launch) == made.op(Phase.FORWARD, "nothing", Mark(5, launch), 0)


def test_times_are_the_same_while_nothing_is_recorded() -> None:
    made = stream(on=False)
    assert Mark(30, NO_SPAN) == made.op(Phase.FORWARD, "a", Mark(10), 20)
    made.run(Phase.FORWARD, ints(0), ints(30), ints(45), ints(-1))
    assert Mark(45, NO_SPAN) == made.tail
    assert [30, 45] == made.retired.tolist()


STEPS = st.one_of(
    st.tuples(st.just("op"), st.integers(0, 99), st.integers(0, 30)),
    st.tuples(st.just("wait"), st.integers(0, 200), st.just(0)),
    st.tuples(st.just("until"), st.integers(0, 20), st.integers(0, 30)),
)


@settings(max_examples=300)
@given(st.lists(STEPS, max_size=20))
def test_ops_never_overlap_and_take_their_time(steps: list[tuple[str, int, int]]) -> None:
    made = stream()
    lengths = []
    for kind, at, length in steps:
        if kind == "wait":
            made.wait(Mark(at))
        elif kind == "op":
            made.op(Phase.FORWARD, "op", Mark(at), length)
        else:
            begin = Mark(made.tail.at + at, made.tail.span)
            made.until(Phase.PULL, "until", begin, begin.at + length)
        lengths += [length] if kind != "wait" and length else []
    timeline: Timeline = made.recorder.timeline(0, FOREVER)
    assert lengths == (timeline.end - timeline.start).tolist()
    assert all(end <= start for end, start in pairwise_edges(timeline))
    for i, cause in enumerate(timeline.cause.tolist()):
        assert cause < i
        assert cause < 0 or timeline.end[cause] <= timeline.start[i]


def pairwise_edges(timeline: Timeline) -> list[tuple[int, int]]:
    spans = list(zip(timeline.start.tolist(), timeline.end.tolist(), strict=True))
    return [(a[1], b[0]) for a, b in pairwise(spans)]
