"""Simulate: workload + profile + scenario -> timeline, and the prediction made of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from dpsim.costs import DeviceCosts, HostCosts, Scaling
from dpsim.engine import Cluster
from dpsim.errors import InfeasibleError
from dpsim.hardware import HardwareProfile, Network
from dpsim.machine import machine_of
from dpsim.scenario import Scenario
from dpsim.schedules import SCHEDULES
from dpsim.workload import Workload

FIRST_TRY = {"ring": 3}
"""First iteration that mostly equals the next: 2, but DDP rebuilds its buckets in the second."""
MOST_ITERATIONS = 31
"""After these, the mean of the last half is taken, with a warning."""
SETTLED = 0.02
"""Where flows share links, their order may differ from step to step for ever. Steps of the last
half that differ by at most this share of their mean have settled: no profile is known better."""
FEWEST_STEPS = 3
"""Steps of the last half, at least, that are compared so."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation:
    """A cluster after its run, and the window of the step that was asked for."""

    cluster: Cluster
    start_ns: int
    end_ns: int
    steady: bool
    step_ns: int


def simulate(
    workload: Workload,
    profile: HardwareProfile,
    scenario: Scenario,
    network: Network | None = None,
    *,
    scaling: Scaling | None = None,
    record: bool = True,
) -> Simulation:
    """Return the simulated step.

    The steady state is reached when two steps in a row take the same nanoseconds, or several about
    the same (`SETTLED`), whose mean is then taken.

    Raises:
        InfeasibleError: The scenario cannot run as asked.
        UnknownNameError: No such mode or algorithm.
    """
    schedule = SCHEDULES.get(scenario.mode)
    dedicated = scenario.mode == "ps" and scenario.server.placement == "dedicated"
    machine = machine_of(
        profile,
        network,
        _gpus(scenario, profile),
        scenario.nodes,
        servers=max(1, scenario.server.servers) if dedicated else 0,
    )
    costs = (DeviceCosts(profile, scenario.precision, scaling), HostCosts(profile, scaling))
    iterations = scenario.iteration or FIRST_TRY.get(scenario.mode, 2)
    while True:
        cluster = Cluster(machine, workload, scenario, costs, iterations=iterations, record=record)
        schedule(cluster)
        cluster.run()
        done = _window(cluster, scenario)
        if scenario.iteration or done.steady or iterations >= MOST_ITERATIONS:
            return done
        iterations = min(2 * iterations + 1, MOST_ITERATIONS)  # with the next one an even number


def _gpus(scenario: Scenario, profile: HardwareProfile) -> int:
    """Return how many GPUs the machine needs so that every device id exists, as far as one node."""
    named = 1 + max(scenario.device_ids, default=0)
    return max(scenario.gpus, min(named, profile.topology.gpus))


def _window(cluster: Cluster, scenario: Scenario) -> Simulation:
    """Return the measured step, the last but one: from the end of the one before to its own.

    A step ends when its last rank does.
    """
    ends = [0, *(max(step) for step in zip(*cluster.ends.values(), strict=True))]
    steps = [b - a for a, b in pairwise(ends)]
    last = cluster.measured
    steady, step_ns = (True, steps[last - 1]) if scenario.iteration else _settle(steps)
    if step_ns <= 0:
        raise InfeasibleError(
            f"the step must take some time, got {step_ns} ns for model "
            f"{cluster.workload.name}. Check the costs in the profile."
        )
    return Simulation(
        cluster=cluster, start_ns=ends[last - 1], end_ns=ends[last], steady=steady, step_ns=step_ns
    )


def _settle(steps: list[int]) -> tuple[bool, int]:
    """Return whether the steps have settled, and what they take, ns."""
    if steps[-1] == steps[-2]:
        return True, steps[-1]
    half = steps[len(steps) // 2 :]
    mean = round(sum(half) / len(half))
    settled = len(half) >= FEWEST_STEPS and max(half) - min(half) <= SETTLED * mean
    return settled, mean
