"""Answer: simulate a scenario and one GPU beside it, and say how every number is known."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Literal

import numpy as np

from dpsim.anchor import solve
from dpsim.basis import basis_of
from dpsim.costs import Scaling
from dpsim.engine import Cluster
from dpsim.errors import InfeasibleError
from dpsim.files import find
from dpsim.hardware import HardwareProfile, Network
from dpsim.prediction import Baseline, LinkUse, PhaseTime, Prediction, RankUse
from dpsim.scenario import Scenario
from dpsim.simulate import MOST_ITERATIONS, Simulation, simulate
from dpsim.timeline import PHASE_CODE, PHASES, Int64, Phase, Timeline
from dpsim.workload import Workload

COMPUTE_PHASES = (
    Phase.FORWARD,
    Phase.LOSS,
    Phase.LOSS_BACKWARD,
    Phase.BACKWARD,
    Phase.OPTIMIZER,
    Phase.ACCUMULATE,
)
"""Phases whose spans on a compute stream are kernels of the model or the optimizer."""
WAITS = (Phase.SYNC, Phase.GIL_WAIT, Phase.QUEUE_WAIT)
"""Phases in which a host thread does no work."""


def predict(
    workload: Workload,
    profile: HardwareProfile,
    scenario: Scenario,
    network: Network | None = None,
) -> Prediction:
    """Return the prediction for one scenario.

    Several nodes are joined by `network`, or by the profile's usual one if it is None.

    The speed-up compares with one GPU of the same kind: at the whole batch when `scaling` is
    "strong", at one rank's share of it when "weak".

    Raises:
        InfeasibleError: The scenario cannot run as asked.
        UnknownNameError: No such mode or algorithm.
    """
    check(scenario)
    network = network or _usual_network(profile, scenario)
    alone = baseline_scenario(scenario)
    scaling = None
    if scenario.anchor_step_s is not None:
        scaling = _anchored(workload, profile, scenario, scenario.anchor_step_s)
    one = simulate(workload, profile, alone, scaling=scaling)
    done = simulate(workload, profile, scenario, network, scaling=scaling)
    cluster = done.cluster
    timeline = cluster.recorder.timeline(done.start_ns, done.end_ns)
    return Prediction(
        workload=workload.name,
        sample=workload.sample,
        profile=profile.name,
        profile_description=profile.description,
        network=network.name
        if network and cluster.machine.nodes + cluster.machine.servers > 1
        else "",
        nodes=cluster.machine.nodes,
        scenario=scenario,
        step_ns=done.step_ns,
        samples=_samples(scenario),
        baseline=Baseline(
            batch=alone.batch, step_ns=one.step_ns, samples=alone.batch * alone.accumulation
        ),
        phases=_phases(timeline, _first(scenario)),
        ranks=_ranks(cluster, timeline),
        links=_links(cluster),
        messages=tuple(cluster.messages.items()),
        bound=bound_of(one),
        basis=basis_of(cluster, anchored=scaling is not None),
        warnings=_warnings(done, scenario),
        timeline=timeline,
    )


def _usual_network(profile: HardwareProfile, scenario: Scenario) -> Network | None:
    """Return the profile's own network if the scenario needs one and there is one."""
    nodes = scenario.nodes or -(-scenario.gpus // profile.topology.gpus)
    alone = nodes == 1 and scenario.server.placement != "dedicated"
    return None if alone or not profile.network else find(Network, profile.network)


def check(scenario: Scenario) -> None:
    """Refuse a scenario whose parts contradict each other.

    Raises:
        InfeasibleError: Naming the part, the rule and the value.
    """
    gpus = scenario.gpus
    if scenario.split and len(scenario.split) != gpus:
        raise InfeasibleError(
            f"--split must name one share for each of {gpus} GPUs, got {len(scenario.split)}: "
            f"{','.join(map(str, scenario.split))}. Correct either."
        )
    if scenario.split and sum(scenario.split) != scenario.batch:
        raise InfeasibleError(
            f"--split must sum to the batch of {scenario.batch}, got {sum(scenario.split)}. "
            "Correct either."
        )
    if scenario.device_ids and len(scenario.device_ids) != gpus:
        raise InfeasibleError(
            f"--device-ids must name {gpus} GPUs, got {len(scenario.device_ids)}: "
            f"{','.join(map(str, scenario.device_ids))}. Correct --device-ids or --gpus."
        )
    for rank, _ in scenario.stragglers:
        if rank >= gpus:
            raise InfeasibleError(
                f"--straggler must name a rank in 0..{gpus - 1}, got {rank}. Correct it."
            )


def baseline_scenario(scenario: Scenario) -> Scenario:
    """Return the same training on one GPU."""
    share = -(-scenario.batch // scenario.gpus)
    return Scenario(
        mode="single",
        gpus=1,
        batch=scenario.batch if scenario.scaling == "strong" else share,
        precision=scenario.precision,
        optimizer=scenario.optimizer,
        optimizer_implementation=scenario.optimizer_implementation,
        evaluation=scenario.evaluation or scenario.data_parallel.keep_replicas,
        set_to_none=scenario.set_to_none,
        accumulation=scenario.accumulation,
        sync=scenario.sync,
        pinned_input=scenario.pinned_input,
        seed=scenario.seed,
    )


def _anchored(
    workload: Workload, profile: HardwareProfile, scenario: Scenario, anchor_s: float
) -> Scaling:
    """Return the factors with which one GPU takes the anchor at the anchor's batch.

    The anchor is a step of one batch: it tells of the machine, so that the same anchor gives the
    same machine whatever `accumulation` the scenario asks for.
    """
    alone = baseline_scenario(scenario)
    measured = replace(alone, batch=scenario.anchor_batch or alone.batch, accumulation=1)
    bound = bound_of(simulate(workload, profile, measured))

    def step_ns(scaling: Scaling) -> int:
        return simulate(workload, profile, measured, scaling=scaling, record=False).step_ns

    return solve(step_ns, bound, anchor_s)


def bound_of(one: Simulation) -> Literal["host", "device"]:
    """Return what one GPU's step waits for: the busier of its stream and its host threads."""
    timeline = one.cluster.recorder.timeline(one.start_ns, one.end_ns)
    works = [PHASE_CODE[phase] for phase in PHASES if phase not in WAITS]
    busy = phase_times(timeline)[:, works].sum(axis=1)
    on_device = np.array([track.kind == "stream" for track in timeline.tracks])
    return "device" if busy[on_device].sum() >= busy[~on_device].sum() else "host"


def _samples(scenario: Scenario) -> int:
    return scenario.batch * scenario.accumulation


def _first(scenario: Scenario) -> int:
    return scenario.device_ids[0] if scenario.device_ids else 0


def _phases(timeline: Timeline, first: int) -> tuple[PhaseTime, ...]:
    """Return each phase's time on host threads, on the first GPU, and on the busiest other."""
    times = phase_times(timeline)
    none = np.zeros(len(PHASES), dtype=np.int64)
    host, device, other = none.copy(), none.copy(), none.copy()
    streams: dict[int, list[int]] = defaultdict(list)
    for index, track in enumerate(timeline.tracks):
        if track.kind == "stream":
            streams[track.rank].append(index)
        elif track.kind == "server":
            device = np.maximum(device, times[index])
        elif track.rank == first or "replica" in track.name:
            host = np.maximum(host, times[index])
    for rank, indexes in streams.items():
        mine = _any_of(timeline, times, indexes)
        if rank == first:
            device = np.maximum(device, mine)
        else:
            other = np.maximum(other, mine)
    return tuple(
        PhaseTime(phase=phase, host_ns=int(h), device_ns=int(d), other_ns=int(o))
        for phase, h, d, o in zip(PHASES, host, device, other, strict=True)
        if h or d or o
    )


def phase_times(timeline: Timeline) -> Int64:
    """Return the time within the step that each track spends in each phase, ns.

    The shape is [tracks, phases], with the phases in the order of `PHASES`.
    """
    start, end = timeline.clipped()
    shape = (len(timeline.tracks), len(PHASES))
    times = np.zeros(shape, dtype=np.int64)
    np.add.at(times, (timeline.track, timeline.phase), end - start)
    return times


def _any_of(timeline: Timeline, times: Int64, tracks: list[int]) -> Int64:
    """Return the time in which at least one of these tracks is in each phase, ns, [phases]."""
    total: Int64 = times[tracks].sum(axis=0)
    start, end = timeline.clipped()
    for phase in np.flatnonzero((times[tracks] > 0).sum(axis=0) > 1):
        both = np.isin(timeline.track, tracks) & (timeline.phase == phase)
        total[phase] = _union_ns(start[both], end[both])
    return total


def _union_ns(start: Int64, end: Int64) -> int:
    """Return the length of the union of n >= 1 intervals, ns."""
    order = np.argsort(start)
    start, end = start[order], np.maximum.accumulate(end[order])
    return int((end - np.maximum(start, np.append(start[0], end[:-1]))).clip(min=0).sum())


def _ranks(cluster: Cluster, timeline: Timeline) -> tuple[RankUse, ...]:
    """Return bytes and device time of each rank; equal neighbours are one entry."""
    compute: dict[int, int] = {}
    exposed: dict[int, int] = {}
    times = phase_times(timeline)
    kernels = [PHASE_CODE[phase] for phase in COMPUTE_PHASES]
    for index, track in enumerate(timeline.tracks):
        if (track.kind, track.name) != ("stream", "compute"):
            continue
        compute[track.rank] = int(times[index, kernels].sum())
        waited = _waited_ns(timeline, index)
        exposed[track.rank] = int(times[index].sum()) - compute[track.rank] + waited
    entries: list[RankUse] = []
    for rank in sorted(cluster.batches):
        source = cluster.stands_for[rank]
        use = RankUse(
            rank=rank,
            count=1,
            batch=cluster.batches[rank],
            sent_bytes=cluster.traffic[rank].sent,
            received_bytes=cluster.traffic[rank].received,
            compute_ns=compute.get(source, 0),
            exposed_ns=exposed.get(source, 0),
        )
        if entries and replace(entries[-1], rank=rank, count=1) == use:
            entries[-1] = replace(entries[-1], count=entries[-1].count + 1)
        else:
            entries.append(use)
    return tuple(entries)


def _waited_ns(timeline: Timeline, index: int) -> int:
    """Return how long a stream idles before what another stream or a server lets start, ns."""
    mine = np.flatnonzero(timeline.track == index)
    start, end = timeline.clipped()
    mine = mine[np.argsort(start[mine], kind="stable")]
    if not len(mine):
        return 0
    gaps = start[mine] - np.append(0, end[mine][:-1])
    threads = np.array([track.kind == "thread" for track in timeline.tracks])
    cause = timeline.cause[mine]
    source = timeline.track[np.maximum(cause, 0)]
    by_others = (cause >= 0) & ~threads[source] & (source != index)
    return int(gaps[by_others].sum())


def _links(cluster: Cluster) -> tuple[LinkUse, ...]:
    return tuple(
        LinkUse(link=name, kind=cluster.machine.link_kind(name), nbytes=nbytes)
        for name, nbytes in sorted(cluster.links.items(), key=lambda item: (-item[1], item[0]))
        if nbytes
    )


def _warnings(done: Simulation, scenario: Scenario) -> tuple[str, ...]:
    """Return what a reader must know before trusting the numbers."""
    cluster, texts = done.cluster, []
    idle = [rank for rank, batch in cluster.batches.items() if batch == 0]
    if idle:
        each = -(-scenario.batch // scenario.gpus)
        full = scenario.gpus * max(1, (scenario.batch + scenario.gpus // 2) // scenario.gpus)
        texts.append(
            f"{len(idle)} of {scenario.gpus} GPUs get no samples: DataParallel cuts "
            f"{scenario.batch} into chunks of {each}. A batch of {full} fills all."
        )
    if not done.steady:
        texts.append(
            f"the step does not settle in {MOST_ITERATIONS} iterations; the mean of the last half "
            "is shown."
        )
    texts += _beyond_tables(cluster)
    return tuple(texts)


def _beyond_tables(cluster: Cluster) -> list[str]:
    """Return a warning for each collective whose messages leave its measured table."""
    texts = []
    for group in cluster.groups:
        for collective, sizes in group.used.items():
            table = group.fabric.table(collective)
            if table is None or group.algorithm not in ("auto", "measured"):
                continue
            low, high = table.nbytes[0], table.nbytes[-1]
            outside = int(np.sum([not low <= size <= high for size in sizes]))
            if outside:
                what = collective.replace("_", "-")
                texts.append(
                    f"{outside} of {len(sizes)} sizes of {what} lie outside the measured "
                    f"{low:.3g} to {high:.3g} bytes: extrapolated."
                )
    return texts
