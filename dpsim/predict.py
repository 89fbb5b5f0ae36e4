"""Predict: simulate a scenario and one GPU beside it, and say how every number is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dpsim.anchor import solve
from dpsim.basis import basis_of
from dpsim.costs import Scaling
from dpsim.engine import Cluster
from dpsim.errors import InfeasibleError
from dpsim.hardware import HardwareProfile, Network
from dpsim.prediction import Baseline, LinkUse, PhaseTime, Prediction, RankUse
from dpsim.scenario import Scenario
from dpsim.simulate import MOST_ITERATIONS, Simulation, simulate
from dpsim.timeline import PHASES, Phase, Timeline
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

    The speed-up compares with one GPU of the same kind: at the whole batch when `scaling` is
    "strong", at one rank's share of it when "weak".

    Raises:
        InfeasibleError: The scenario cannot run as asked.
        UnknownNameError: No such mode or algorithm.
    """
    check(scenario)
    alone = baseline_scenario(scenario)
    one = simulate(workload, profile, alone, record=True)
    bound = _bound(one)
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
        bound=bound,
        basis=basis_of(cluster, anchored=scaling is not None),
        warnings=_warnings(done, scenario),
        timeline=timeline,
    )


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
    """Return the factors with which one GPU takes the anchor at the anchor's batch."""
    alone = baseline_scenario(scenario)
    measured = replace(alone, batch=scenario.anchor_batch or alone.batch)
    bound = _bound(simulate(workload, profile, measured))

    def step_ns(scaling: Scaling) -> int:
        return simulate(workload, profile, measured, scaling=scaling, record=False).step_ns

    return solve(step_ns, bound, anchor_s)


def _bound(one: Simulation) -> str:
    """Return what one GPU's step waits for: the busier of its stream and its host threads."""
    timeline = one.cluster.recorder.timeline(one.start_ns, one.end_ns)
    device, host = 0, 0
    for index, track in enumerate(timeline.tracks):
        busy = sum(ns for phase, ns in timeline.phase_ns(index).items() if phase not in WAITS)
        if track.kind == "stream":
            device += busy
        else:
            host += busy
    return "device" if device >= host else "host"


def _samples(scenario: Scenario) -> int:
    return scenario.batch * scenario.accumulation


def _first(scenario: Scenario) -> int:
    return scenario.device_ids[0] if scenario.device_ids else 0


def _phases(timeline: Timeline, first: int) -> tuple[PhaseTime, ...]:
    """Return each phase's time on host threads, on the first GPU, and on the busiest other."""
    host = dict.fromkeys(PHASES, 0)
    device = dict.fromkeys(PHASES, 0)
    others: dict[int, dict[Phase, int]] = {}
    for index, track in enumerate(timeline.tracks):
        times = timeline.phase_ns(index)
        if track.kind == "thread" and (track.rank == first or "replica" in track.name):
            for phase, ns in times.items():
                host[phase] = max(host[phase], ns)
        if track.kind == "server" or (track.kind == "stream" and track.rank == first):
            for phase, ns in times.items():
                device[phase] += ns
        elif track.kind == "stream":
            mine = others.setdefault(track.rank, dict.fromkeys(PHASES, 0))
            for phase, ns in times.items():
                mine[phase] += ns
    rows = [
        PhaseTime(
            phase=phase,
            host_ns=host[phase],
            device_ns=device[phase],
            other_ns=max((times[phase] for times in others.values()), default=0),
        )
        for phase in PHASES
    ]
    return tuple(row for row in rows if row.host_ns or row.device_ns or row.other_ns)


def _ranks(cluster: Cluster, timeline: Timeline) -> tuple[RankUse, ...]:
    """Return bytes and device time of each rank; equal neighbours are one entry."""
    compute: dict[int, int] = {}
    exposed: dict[int, int] = {}
    for index, track in enumerate(timeline.tracks):
        if (track.kind, track.name) != ("stream", "compute"):
            continue
        times = timeline.phase_ns(index)
        busy = sum(ns for phase, ns in times.items() if phase in COMPUTE_PHASES)
        compute[track.rank] = compute.get(track.rank, 0) + busy
        exposed[track.rank] = exposed.get(track.rank, 0) + sum(times.values()) - busy
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
        texts.append(
            f"{len(idle)} of {scenario.gpus} GPUs get no samples: DataParallel cuts "
            f"{scenario.batch} into chunks of {each}. A batch of {each * scenario.gpus} fills all."
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
                texts.append(
                    f"{outside} of {len(sizes)} sizes of {collective.replace('_', '-')} lie outside the "
                    f"measured {low:.3g} to {high:.3g} bytes: extrapolated."
                )
    return texts
