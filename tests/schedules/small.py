"""Small workloads, machines with parts made free, and what the tests of schedules measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache

import numpy as np

from dpsim import files
from dpsim.hardware import HardwareProfile, Network, Quantity
from dpsim.overrides import with_quantity
from dpsim.scenario import Scenario
from dpsim.simulate import Simulation, simulate
from dpsim.timeline import PHASES, Phase, Timeline
from dpsim.workload import (
    GradientReady,
    Linear,
    Op,
    OpClass,
    OptimizerOps,
    Source,
    Tensor,
    Workload,
)

INFINITE = float("inf")
NOTHING_S = 1e-14  # thousands of these are rounded to 0 ns


@cache
def model(name: str) -> Workload:
    return files.find(Workload, name)


@cache
def machine(name: str = "a100-sxm") -> HardwareProfile:
    return files.find(HardwareProfile, name)


@cache
def network(name: str = "100gbe") -> Network:
    return files.find(Network, name)


def chain(
    depth: int = 4,
    *,
    width: int = 256,
    per_sample: float = 4e6,
    flops: float = 0.0,
    kinds: tuple[str, ...] = (),
    buffers: int = 0,
    outputs: int = 1,
    output_bytes: float = 4e3,
    loss_inside: bool = False,
) -> Workload:
    """Return layers in a row, each with a square weight; `kinds` are "frozen" or "unused"."""
    kind = dict(enumerate(kinds))
    layers = range(depth)

    def op(name: str, module: str, passes: float = 1.0) -> Op:
        return Op(
            name=name,
            module=module,
            op_class=OpClass.GEMM if flops else OpClass.ELEMENTWISE,
            flops=Linear(per_sample=flops * passes),
            bytes_moved=Linear(per_sample=per_sample * passes),
            module_calls=1,
        )

    forward = [op("mm", f"layer{i}") for i in layers]
    loss = [op("loss", "")]
    trained = [i for i in reversed(layers) if i not in kind]
    size = 4 * width * width
    total = size * len(trained)
    return Workload(
        name="chain",
        source=Source(),
        input_bytes=Linear(per_sample=6e5),
        target_bytes=Linear(per_sample=8),
        parameters=tuple(
            Tensor(name=f"layer{i}", shape=(width, width), trainable=kind.get(i) != "frozen")
            for i in layers
        ),
        buffers=tuple(
            Tensor(
                name=f"buffer{i}", shape=(64,), dtype=("float32", "int64")[i % 2], trainable=False
            )
            for i in range(buffers)
        ),
        modules=depth + 1,
        forward=tuple(forward + ([] if loss_inside else loss)),
        loss_start=depth,
        backward=(
            op("loss_backward", ""),
            *(op("mm_backward", f"layer{i}", 2.0) for i in reversed(layers)),
        ),
        loss_backward_ops=1,
        gradients=tuple(GradientReady(parameter=i, after_op=depth - i) for i in trained),
        saved_bytes=Linear(per_sample=per_sample),
        output_bytes=Linear(per_sample=output_bytes),
        output_tensors=outputs,
        optimizers=(
            OptimizerOps(
                name="momentum",
                ops=(
                    Op(
                        name="foreach",
                        op_class=OpClass.ELEMENTWISE,
                        bytes_moved=Linear(fixed=5.0 * total),
                    ),
                ),
                state_bytes=total,
            ),
        ),
    )


def free_links(profile: HardwareProfile) -> HardwareProfile:
    """Return the machine with wires that take no time; NCCL's own latencies stay."""
    for i in range(len(profile.topology.links)):
        profile = with_quantity(profile, f"topology.links.{i}.bandwidth_bytes_per_s", INFINITE)
        profile = with_quantity(profile, f"topology.links.{i}.latency_s", 0.0)
    for i in range(len(profile.nccl)):
        profile = with_quantity(profile, f"nccl.{i}.channel_bytes_per_s", INFINITE)
    profile = with_quantity(profile, "device.copy_latency_s", 0.0)
    profile = with_quantity(profile, "host.memory_bandwidth_bytes_per_s", INFINITE)
    return dataclasses.replace(profile, collectives=())


def free_host(profile: HardwareProfile) -> HardwareProfile:
    """Return the machine with a host that takes no time."""
    for field in dataclasses.fields(profile.host):
        value = getattr(profile.host, field.name)
        if isinstance(value, Quantity) and field.name.endswith("_s") and "_per_s" not in field.name:
            profile = with_quantity(profile, f"host.{field.name}", NOTHING_S)
    table = dataclasses.replace(profile.host.gil_handover_s, at=(0.0,), value=(0.0,))
    return dataclasses.replace(
        profile, host=dataclasses.replace(profile.host, gil_handover_s=table)
    )


def free_device(profile: HardwareProfile) -> HardwareProfile:
    """Return the machine with kernels that take no time."""
    for peak in profile.device.peak_flop_per_s:
        profile = with_quantity(profile, f"device.peak_flop_per_s.{peak}", INFINITE)
    profile = with_quantity(profile, "device.memory_bandwidth_bytes_per_s", INFINITE)
    return with_quantity(profile, "device.kernel_floor_s", 0.0)


def faster_kernels(profile: HardwareProfile, factor: float) -> HardwareProfile:
    device = profile.device
    for peak, quantity in device.peak_flop_per_s.items():
        value = quantity.value * factor
        profile = with_quantity(profile, f"device.peak_flop_per_s.{peak}", value)
    bandwidth = device.memory_bandwidth_bytes_per_s.value * factor
    profile = with_quantity(profile, "device.memory_bandwidth_bytes_per_s", bandwidth)
    return with_quantity(profile, "device.kernel_floor_s", device.kernel_floor_s.value / factor)


def faster_links(profile: HardwareProfile, factor: float) -> HardwareProfile:
    """Return the machine with wires of that many times the bandwidth, NCCL's view of them too."""
    for i, link in enumerate(profile.topology.links):
        value = link.bandwidth_bytes_per_s.value * factor
        profile = with_quantity(profile, f"topology.links.{i}.bandwidth_bytes_per_s", value)
    for i, graph in enumerate(profile.nccl):
        value = graph.channel_bytes_per_s.value * factor
        profile = with_quantity(profile, f"nccl.{i}.channel_bytes_per_s", value)
    return dataclasses.replace(profile, collectives=())


def without_lock(profile: HardwareProfile) -> HardwareProfile:
    return dataclasses.replace(profile, host=dataclasses.replace(profile.host, gil=False))


def run(
    workload: Workload, profile: HardwareProfile, net: Network | None = None, **options: object
) -> Simulation:
    return simulate(workload, profile, Scenario(**options), net)


def step_ns(
    workload: Workload, profile: HardwareProfile, net: Network | None = None, **options: object
) -> int:
    return simulate(workload, profile, Scenario(**options), net, record=False).step_ns


@dataclasses.dataclass(frozen=True)
class Span:
    rank: int
    track: str
    phase: Phase
    name: str
    start: int
    end: int
    nbytes: int

    @property
    def length(self) -> int:
        return self.end - self.start


def spans(done: Simulation, *phases: Phase, track: str = "compute") -> list[Span]:
    """Return what begins in the window of the step on tracks of that name, by start."""
    timeline = done.cluster.recorder.timeline(done.start_ns, done.end_ns)
    found = [
        span
        for span in all_spans(timeline)
        if span.track == track and (not phases or span.phase in phases)
    ]
    return sorted(found, key=lambda span: span.start)


def all_spans(timeline: Timeline) -> Iterator[Span]:
    for i in np.flatnonzero((timeline.start >= 0) & (timeline.start < timeline.step_ns)).tolist():
        track = timeline.tracks[timeline.track[i]]
        yield Span(
            rank=track.rank,
            track=track.name,
            phase=PHASES[timeline.phase[i]],
            name=timeline.names[timeline.op[i]],
            start=int(timeline.start[i]),
            end=int(timeline.end[i]),
            nbytes=int(timeline.nbytes[i]),
        )


def host_ns(done: Simulation, phase: Phase, track: str = "main thread") -> int:
    return sum(span.length for span in spans(done, phase, track=track))
