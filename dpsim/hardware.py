"""Hardware profile: what one node can do, every entry with its basis, source and spread."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from dpsim.records import (
    Count,
    Name,
    NonNegativeFloat,
    PositiveCount,
    PositiveFloat,
    record,
)
from dpsim.workload import OpClass

FORMAT = "dpsim.profile"
NETWORK_FORMAT = "dpsim.network"
VERSION = 1
"""Version history of both file formats. 1: first."""


class Basis(StrEnum):
    """How a number is known, best first."""

    MEASURED = "measured"  # on this machine or one of its kind
    PUBLISHED = "published"  # a data sheet, a paper, the constants of a library
    MODELLED = "modelled"  # computed from other entries
    ASSUMED = "assumed"  # nobody told us; the spread is wide


@record
class Quantity:
    """A number with its basis. The unit is in the name of the field that holds it."""

    value: Annotated[float, Field(ge=0)]  # NaN fails, infinity means free
    basis: Basis
    source: Name  # citation, URL, or the rule it follows
    spread: NonNegativeFloat = 0.0  # half width of a 90 % interval, as a share of the value


def _check_positive(quantity: Quantity) -> Quantity:
    if not quantity.value > 0:
        raise ValueError(f"value must be > 0, got {quantity.value}")
    return quantity


PositiveQuantity = Annotated[Quantity, AfterValidator(_check_positive)]
"""A quantity that divides: a bandwidth, a peak."""
LONGEST_S = 1000.0
"""Longest duration that a profile may state: no launch or copy takes a quarter of an hour."""


def _check_duration(quantity: Quantity) -> Quantity:
    if not quantity.value <= LONGEST_S:
        raise ValueError(f"value must be at most {LONGEST_S:.0f} s, got {quantity.value}")
    return quantity


Duration = Annotated[Quantity, AfterValidator(_check_duration)]
"""A quantity of seconds."""


@record
class Table:
    """A measured or assumed function, interpolated on logarithms and kept as it was measured."""

    at: tuple[NonNegativeFloat, ...]  # ascending
    value: tuple[NonNegativeFloat, ...]
    basis: Basis
    source: Name
    spread: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _check(self) -> Table:
        if not self.at or len(self.at) != len(self.value):
            raise ValueError(
                f"at and value must have the same length >= 1, got {len(self.at)} and "
                f"{len(self.value)}"
            )
        if any(b <= a for a, b in zip(self.at, self.at[1:], strict=False)):
            raise ValueError("at must ascend")
        return self


CONV_LIMIT = 2.5
"""Most of a peak that a convolution can seem to reach. Winograd's F(2x2, 3x3) multiplies 16 times
where the direct convolution, whose FLOP are counted, multiplies 36 times: 2.25 (Lavin and Gray,
CVPR 2016, section 4.1); clocks above the data sheet's add to it."""


@record
class EfficiencyTable:
    """Share of a peak that ops of one class reach, by the work of one kernel.

    A share is at most 1; for conv, whose FLOP are those of the direct convolution, at most
    `CONV_LIMIT`.
    Work is in FLOP for gemm, conv, attention and rnn, and in bytes for all other classes.
    Between entries the share is interpolated on the logarithm of the work; outside it is constant.
    """

    op_class: OpClass
    work: tuple[PositiveFloat, ...]
    share: tuple[PositiveFloat, ...]
    basis: Basis
    source: Name
    spread: NonNegativeFloat = 0.0
    dtype: str = ""  # "" for any

    @model_validator(mode="after")
    def _check(self) -> EfficiencyTable:
        if not self.work or len(self.work) != len(self.share):
            raise ValueError("work and share must have the same length >= 1")
        if any(b <= a for a, b in zip(self.work, self.work[1:], strict=False)):
            raise ValueError("work must ascend")
        limit = CONV_LIMIT if self.op_class == OpClass.CONV else 1.0
        if max(self.share) > limit:
            raise ValueError(
                f"share must be <= {limit:g} for {self.op_class}, got {max(self.share)}"
            )
        return self

    def at(self, work: np.ndarray) -> np.ndarray:
        """Return the share for each amount of work (float array of any shape)."""
        known = np.log(self.work)
        return np.asarray(np.interp(np.log(np.maximum(work, 1.0)), known, self.share))


Architecture = Literal[
    "cpu", "kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"
]


@record
class Device:
    """One accelerator (or one CPU that plays one)."""

    name: Name
    architecture: Architecture
    peak_flop_per_s: dict[Literal["fp32", "tf32", "fp16", "bf16"], PositiveQuantity]  # dense
    memory_bandwidth_bytes_per_s: PositiveQuantity
    memory_bytes: PositiveQuantity
    multiprocessors: PositiveCount
    kernel_floor_s: Duration  # shortest kernel, gap to the next included
    efficiency: tuple[EfficiencyTable, ...]
    copy_latency_s: Duration  # start of one device-initiated copy


@record
class Host:
    """One host process and its interpreter: what launching costs, in seconds an operation."""

    gil: bool = True  # False for a free-threaded interpreter
    launch_gil_s: Duration  # of an eager op in Python: the part that holds the GIL
    launch_free_s: Duration  # the part that does not: dispatch, autograd, allocator, launch
    kernel_launch_s: Duration  # each further kernel of one op (bare launch call)
    view_s: Duration  # an op without kernel (GIL held)
    module_call_s: Duration  # nn.Module.__call__ (GIL held)
    backward_launch_s: Duration  # an op launched by the C++ autograd engine
    gil_handover_s: Table  # extra cost of one GIL retake, by number of *other* threads that want it
    thread_s: Duration  # create, start and join one thread
    python_function_s: Duration  # one Python autograd.Function call, forward or backward
    module_replicate_s: Duration  # replicate(): one module, one replica
    tensor_replicate_s: (
        Duration  # replicate(): one parameter or buffer, one replica (narrow, view, wrap, setattr)
    )
    device_check_s: Duration  # DataParallel's device check: one parameter or buffer
    collective_s: Duration  # enqueue one NCCL group or ProcessGroup call
    collective_rank_s: Duration  # each rank's kernel inside a single-process NCCL group
    copy_launch_s: Duration  # one cudaMemcpyAsync with its events
    event_s: Duration  # record or wait for one event
    sync_s: Duration  # return from a stream synchronise
    allocation_s: Duration  # one cached allocation
    hook_s: Duration  # DDP's gradient hook on one parameter, its copy kernel's launch apart
    accumulate_grad_s: Duration  # one AccumulateGrad node
    optimizer_step_s: Duration  # optimizer.step(), the part that does not grow
    optimizer_tensor_s: Duration  # optimizer.step(), each parameter tensor
    iteration_s: Duration  # the training loop's own Python, zero_grad included
    launch_queue: PositiveCount = 1024  # launches that fit on one stream before the host blocks
    memory_bandwidth_bytes_per_s: PositiveQuantity  # all cores, read + write
    reduce_bytes_per_s: PositiveQuantity  # gradient bytes that one thread adds a second
    pageable_copy_bytes_per_s: PositiveQuantity  # memcpy into the driver's staging buffer
    cores: PositiveCount


LinkKind = Literal["nvlink", "pcie", "socket", "network", "host"]


@record
class Link:
    """A full-duplex (or shared) wire between two ends of the node's graph."""

    ends: tuple[Name, Name]  # "gpu0", "switch1", "cpu0", "nic0"
    kind: LinkKind
    bandwidth_bytes_per_s: PositiveQuantity  # payload, each direction
    latency_s: Duration
    duplex: bool = True

    @property
    def name(self) -> str:
        """Return "a-b"."""
        return "-".join(self.ends)


@record
class Topology:
    """The graph of one node. GPUs are named gpu0..gpuN-1; every GPU reaches a "cpu" end."""

    gpus: PositiveCount
    links: tuple[Link, ...]
    peer_access: Literal["all", "nvlink", "pcie-tree", "none"]
    # all: any pair; nvlink: pairs with a direct NVLink; pcie-tree: pairs below one CPU;
    # none: every copy between GPUs goes through host memory
    description: str = ""

    @model_validator(mode="after")
    def _check(self) -> Topology:
        seen = {end for link in self.links for end in link.ends}
        missing = [f"gpu{i}" for i in range(self.gpus) if f"gpu{i}" not in seen]
        if missing:
            raise ValueError(f"every GPU needs a link; none for {', '.join(missing)}")
        return self


@record
class NcclGraph:
    """What NCCL's topology search finds for the first `gpus` GPUs of a node."""

    gpus: Annotated[int, Field(ge=2)]
    channels: PositiveCount
    channel_bytes_per_s: PositiveQuantity  # bandwidth of one channel
    path: Literal["nvlink", "pcie", "host"]  # host: no peer access, staged
    nvls: bool = False


@record
class CollectiveTable:
    """Measured times of one collective, kept as a table."""

    collective: Literal["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"]
    ranks: Annotated[int, Field(ge=2)]
    nodes: PositiveCount = 1
    nbytes: tuple[PositiveFloat, ...]
    seconds: tuple[PositiveFloat, ...]
    basis: Basis
    source: Name
    spread: NonNegativeFloat = 0.0
    network: str = ""  # name of the network, for nodes > 1

    @model_validator(mode="after")
    def _check(self) -> CollectiveTable:
        if not self.nbytes or len(self.nbytes) != len(self.seconds):
            raise ValueError("nbytes and seconds must have the same length >= 1")
        if any(b <= a for a, b in zip(self.nbytes, self.nbytes[1:], strict=False)):
            raise ValueError("nbytes must ascend")
        return self


@record
class Network:
    """The wire between nodes: one NIC."""

    name: Name
    bandwidth_bytes_per_s: PositiveQuantity  # payload of one NIC, each direction
    latency_s: Duration  # one way, one message
    flow_bytes_per_s: PositiveQuantity  # the most that one connection reaches
    rdma: bool
    description: str = ""


@record
class HardwareProfile:
    """One kind of node, and how it is wired to others of its kind."""

    name: Name
    description: str
    device: Device
    host: Host
    topology: Topology
    nccl: tuple[NcclGraph, ...]
    collectives: tuple[CollectiveTable, ...] = ()
    nics_per_node: PositiveCount = 1
    network: str = ""  # name of the usual network; "" when the box has none worth the name
    cpu_vendor: Literal["intel", "amd", "arm", "power"] = "intel"
    max_nodes: Count = 0  # 0: no limit
    framework: dict[str, str] = Field(default_factory=dict)  # torch, nccl, driver, ...
    notes: tuple[str, ...] = ()
