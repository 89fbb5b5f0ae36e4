"""Simulate: the steady state, a named iteration, and the window of the step."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dpsim import files
from dpsim.engine import Cluster, Mark
from dpsim.errors import InfeasibleError, UnknownNameError
from dpsim.hardware import HardwareProfile, Network
from dpsim.scenario import Scenario
from dpsim.simulate import MOST_ITERATIONS, simulate
from dpsim.workload import Workload

V100 = files.find(HardwareProfile, "v100-dgx1")
RESNET = files.find(Workload, "resnet50")
SMALL = files.find(Workload, "small-cnn")
MODES = {"single": 1, "dp": 4, "ring": 4, "ps": 4}


def take_schedule(monkeypatch: pytest.MonkeyPatch, schedule: Callable[[Cluster], None]) -> None:
    """Make every mode this schedule."""

    class Modes:
        @staticmethod
        def get(_: str) -> Callable[[Cluster], None]:
            return schedule

    monkeypatch.setattr(sys.modules["dpsim.simulate"], "SCHEDULES", Modes)


def scenario(mode: str, **changes: Any) -> Scenario:
    return replace(Scenario(mode=mode, gpus=MODES[mode], batch=64), **changes)


@pytest.mark.parametrize("mode", MODES)
def test_two_runs_are_equal(mode: str) -> None:
    first, second = (simulate(RESNET, V100, scenario(mode)) for _ in range(2))
    assert first.step_ns == second.step_ns
    a, b = (it.cluster.recorder.timeline(it.start_ns, it.end_ns) for it in (first, second))
    for column in ("start", "end", "track", "phase", "op", "nbytes", "cause"):
        assert np.array_equal(getattr(a, column), getattr(b, column)), column


@pytest.mark.parametrize("mode", MODES)
def test_the_window_is_the_step(mode: str) -> None:
    it = simulate(SMALL, V100, scenario(mode))
    assert it.steady
    assert it.step_ns == it.end_ns - it.start_ns


@pytest.mark.parametrize("mode", MODES)
def test_recording_changes_nothing(mode: str) -> None:
    on, off = (simulate(SMALL, V100, scenario(mode), record=record) for record in (True, False))
    assert on.step_ns == off.step_ns
    assert 0 == len(off.cluster.recorder.timeline(off.start_ns, off.end_ns))


@pytest.mark.parametrize(("mode", "sync"), [*itertools.product(MODES, ["item-after-step", "none"])])
def test_the_steady_state_is_that_of_many_iterations(mode: str, sync: str) -> None:
    steady = simulate(SMALL, V100, scenario(mode, sync=sync, pinned_input=True))
    late = simulate(SMALL, V100, scenario(mode, sync=sync, pinned_input=True, iteration=12))
    assert steady.steady
    assert late.step_ns == steady.step_ns


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("iteration", [1, 2, 3])
def test_one_iteration_more_than_the_named_one_is_run(mode: str, iteration: int) -> None:
    """What the next iteration does early falls into the step."""
    it = simulate(SMALL, V100, scenario(mode, iteration=iteration))
    assert iteration == it.cluster.measured
    assert {iteration + 1} == {len(ends) for ends in it.cluster.ends.values()}
    end = max(ends[iteration - 1] for ends in it.cluster.ends.values())
    assert end == it.end_ns


def test_ddp_is_slower_before_its_buckets_are_rebuilt() -> None:
    """Iteration 1 reduces one bucket after backward; iteration 2 rebuilds; then all is steady."""
    first, second, third, steady = (
        simulate(RESNET, V100, scenario("ring", iteration=i)).step_ns for i in (1, 2, 3, 0)
    )
    assert first > second > third
    assert third == steady


def swinging(by: int) -> Callable[[Cluster], None]:
    """Return a schedule whose steps take 1000 ns and `by` more in turn."""

    def schedule(cluster: Cluster) -> None:
        clock = 0
        for i in range(cluster.iterations):
            clock += 1000 + by * (i % 2)
            cluster.finish_step(0, Mark(clock))

    return schedule


def test_an_unsettled_step_is_the_mean_of_the_last_half(monkeypatch: pytest.MonkeyPatch) -> None:
    take_schedule(monkeypatch, swinging(100))
    it = simulate(SMALL, V100, Scenario())
    assert (False, 1050, MOST_ITERATIONS) == (it.steady, it.step_ns, it.cluster.measured)
    named = simulate(SMALL, V100, Scenario(iteration=2))
    assert (True, 1100, 2) == (named.steady, named.step_ns, named.cluster.measured)


def test_steps_that_differ_little_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    take_schedule(monkeypatch, swinging(12))
    it = simulate(SMALL, V100, Scenario())
    assert (True, 5) == (it.steady, it.cluster.measured)
    assert 1000 < it.step_ns < 1012


def test_a_step_ends_with_its_last_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def uneven(cluster: Cluster) -> None:
        for i in range(1, cluster.iterations + 1):
            cluster.finish_step(0, Mark(100 * i))
            cluster.finish_step(1, Mark(100 * i + 30))

    take_schedule(monkeypatch, uneven)
    it = simulate(SMALL, V100, Scenario(iteration=1))
    assert (0, 130) == (it.start_ns, it.end_ns)
    it = simulate(SMALL, V100, Scenario())
    assert 100 == it.step_ns


def test_a_step_of_no_time_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(cluster: Cluster) -> None:
        for _ in range(cluster.iterations):
            cluster.finish_step(0, Mark(0))

    take_schedule(monkeypatch, idle)
    with pytest.raises(InfeasibleError) as error:
        simulate(SMALL, V100, Scenario())
    assert (
        "the step must take some time, got 0 ns for model small-cnn. Check the costs in the profile."
    ) == str(error.value)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="'rings'.*Did you mean 'ring'"):
        simulate(SMALL, V100, Scenario(mode="rings"))


def test_a_device_id_beyond_the_gpus_at_work_exists() -> None:
    """Two GPUs, the last of the node among them."""
    it = simulate(SMALL, V100, scenario("dp", gpus=2, device_ids=(0, 7)))
    assert {0, 7} == set(it.cluster.batches)


@pytest.mark.parametrize(
    ("placement", "servers", "nodes"), [("dedicated", 3, 3), ("colocated", 1, 0)]
)
def test_only_dedicated_servers_have_nodes_of_their_own(
    placement: Any, servers: int, nodes: int
) -> None:
    network = files.find(Network, "infiniband-edr")
    server = replace(Scenario().server, placement=placement, servers=servers)
    it = simulate(SMALL, V100, scenario("ps", nodes=2, server=server), network)
    assert nodes == it.cluster.machine.servers
