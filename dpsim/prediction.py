"""Prediction: the answer to one scenario, with the basis of every number."""

from __future__ import annotations

from dataclasses import dataclass

from dpsim.hardware import Basis
from dpsim.scenario import Scenario
from dpsim.timeline import Phase, Timeline
from dpsim.units import NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """Bytes that crossed one directed link in one step."""

    link: str  # "gpu0>gpu1", "node0.nic0>net"
    kind: str  # "nvlink", "pcie", "socket", "network", "host"
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """One rank (or `count` equal ranks): bytes in and out, and how busy its device was."""

    rank: int
    count: int
    batch: int  # samples of this rank, 0 for a GPU that gets none
    sent_bytes: int
    received_bytes: int
    compute_ns: int  # its compute stream busy with kernels, within the step
    exposed_ns: int  # its compute stream in copies or collectives, or waiting for them


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """Time of one phase within the step. Phases of different tracks overlap: no sum is meant."""

    phase: Phase
    host_ns: int  # the busiest host thread of rank 0's process
    device_ns: int  # any stream of rank 0 (GPU 0), or the busiest server
    other_ns: int  # any stream of the rank, not rank 0, that spends most time in it


@dataclass(frozen=True, slots=True, kw_only=True)
class BasisEntry:
    """How one group of numbers is known."""

    what: str  # "compute", "host", "links", "collectives", "network"
    basis: Basis  # the weakest of the group
    spread: float  # the widest of the group, half width of a 90 % interval
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One GPU of the same kind, simulated the same way."""

    batch: int
    step_ns: int
    samples: int  # of one step, accumulation included

    @property
    def throughput_per_s(self) -> float:
        """Return samples a second."""
        return self.samples * NS_PER_S / self.step_ns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """One step of one scenario."""

    workload: str
    sample: str  # "image"
    profile: str
    profile_description: str
    network: str  # "" on one node
    nodes: int
    scenario: Scenario
    step_ns: int
    samples: int  # of one step, accumulation included
    baseline: Baseline
    phases: tuple[PhaseTime, ...]
    ranks: tuple[RankUse, ...]
    links: tuple[LinkUse, ...]
    messages: tuple[tuple[str, tuple[int, ...]], ...]  # ("all-reduce buckets", bytes of each)
    bound: str  # "host" or "device": what the baseline step waits for
    basis: tuple[BasisEntry, ...]
    warnings: tuple[str, ...]
    timeline: Timeline

    @property
    def throughput_per_s(self) -> float:
        """Return samples a second."""
        return self.samples * NS_PER_S / self.step_ns

    @property
    def speedup(self) -> float:
        """Return throughput relative to the baseline."""
        return self.throughput_per_s / self.baseline.throughput_per_s

    @property
    def efficiency(self) -> float:
        """Return speed-up divided by the number of GPUs."""
        return self.speedup / self.scenario.gpus
