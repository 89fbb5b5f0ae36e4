"""Runs: joining and merging lose no launch and no nanosecond."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpsim.engine import Run
from dpsim.schedules._runs import Hook, join, merge

TIMES = st.integers(0, 1000)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    rows = draw(st.lists(st.tuples(TIMES, TIMES, TIMES), max_size=6))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Run(
        names=tuple(f"op{i}" for i in range(len(rows))),
        locked=columns[:, 0],
        unlocked=columns[:, 1],
        durations=columns[:, 2],
        rest=draw(TIMES),
    )


HOOKS = st.lists(
    st.builds(
        Hook,
        after=st.integers(-1, 12),
        name=st.just("hook"),
        host=TIMES,
        duration=st.one_of(st.none(), TIMES),
    ),
    max_size=8,
)


def host_ns(run: Run) -> int:
    return int(run.locked.sum() + run.unlocked.sum()) + run.rest


@given(st.lists(runs(), max_size=4))
def test_joined_runs_take_as_long_on_host_and_device_as_apart(parts: list[Run]) -> None:
    joined = join(*parts)
    assert sum(map(host_ns, parts)) == host_ns(joined)
    assert [d for run in parts for d in run.durations] == list(joined.durations)
    assert sum((run.names for run in parts), ()) == joined.names


@given(runs(), HOOKS, st.data())
def test_hooks_are_put_behind_the_ops_they_follow(
    run: Run, hooks: list[Hook], data: st.DataObject
) -> None:
    places = sorted(
        data.draw(st.lists(st.integers(0, 12), min_size=len(run), max_size=len(run), unique=True))
    )
    merged, positions = merge(run, np.array(places, dtype=np.int64), hooks)
    assert host_ns(run) + sum(hook.host for hook in hooks) == host_ns(merged)
    kernels = [h for h, hook in enumerate(hooks) if hook.duration is not None]
    assert kernels == sorted(positions)
    assert len(run) + len(kernels) == len(merged) == len(merged.names)
    own = [k for k in range(len(merged)) if k not in positions.values()]
    assert list(run.durations) == [merged.durations[k] for k in own]
    for h, at in positions.items():
        assert hooks[h].duration == merged.durations[at]
        assert "hook" == merged.names[at]
        before = sum(k < at for k in own)
        assert before == sum(place <= hooks[h].after for place in places)
    # Those that fire at the same op keep their order.
    for a in kernels:
        for b in kernels:
            if a < b and hooks[a].after == hooks[b].after:
                assert positions[a] < positions[b]
