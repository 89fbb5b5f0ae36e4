"""Scenario: one question - mode, GPUs, batch and options. Names are checked where plug-ins are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dpsim.records import Count, Name, PositiveCount, PositiveFloat, Rate, record

Precision = Literal["fp32", "tf32", "fp16", "bf16", "amp"]
Slowness = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]
"""A factor on compute time: a device a thousand times slower is no device."""
SyncPoint = Literal["item-after-loss", "item-after-step", "none"]


@record
class DataParallelOptions:
    """How `nn.DataParallel` is called."""

    output_device: int = 0  # position in device_ids; -1: the CPU
    loss_in_forward: bool = False
    nccl: bool = True  # False: builds without NCCL copy instead
    keep_replicas: bool = False  # replicas made once: parallel_apply alone, forward only
    input_on: Literal["gpu", "cpu"] = "gpu"  # does the batch go to GPU 0 first?
    dim: Count = 0


@record
class RingOptions:
    """How `DistributedDataParallel` is built."""

    bucket_bytes: PositiveFloat | None = None  # bucket_cap_mb; None: 25 MiB, first 1 MiB
    bucket_list_bytes: tuple[PositiveFloat, ...] = ()  # bucket_cap_mb_list (torch >= 2.13)
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    broadcast_buffers: bool = True
    gradient_hook: Literal["none", "fp16", "bf16"] = "none"
    all_reduce: Name = "auto"  # a file in dpsim/collectives, or "auto"


@record
class ServerOptions:
    """How the synchronous parameter server is laid out."""

    servers: Annotated[int, Field(ge=0, le=4096)] = 0  # 0: chosen by placement
    placement: Literal["auto", "gpu0", "cpu", "dedicated", "colocated"] = "auto"
    sharding: Literal["round-robin", "greedy", "split"] = "split"
    update_on: Literal["server", "worker"] = "server"
    path: Literal["auto", "gpu", "host"] = "auto"  # GPU to GPU, or through host memory
    gpus_per_worker: PositiveCount = 1
    reduce_bytes_per_s: Rate | None = None  # overrides the host's rate, all threads
    reduce_threads: PositiveCount = 4


@record
class Scenario:
    """One question. Numbers are checked here, names where the plug-ins are visible."""

    mode: Name = "single"
    gpus: PositiveCount = 1
    nodes: PositiveCount | None = None  # None: as few as hold the GPUs
    batch: PositiveCount = 32  # global, one micro-step
    scaling: Literal["strong", "weak"] = "strong"  # one GPU to compare with: batch, or batch / gpus
    precision: Precision = "fp32"
    optimizer: Name = "momentum"
    optimizer_implementation: Literal["foreach", "fused", "for-loop"] = "foreach"
    evaluation: bool = False  # forward only, no graph
    set_to_none: bool = True  # zero_grad's default
    accumulation: PositiveCount = 1  # micro-steps an optimizer step
    sync: SyncPoint = "item-after-step"
    pinned_input: bool = False  # pinned + non_blocking; False: pageable and blocking
    iteration: Annotated[int, Field(ge=0)] = 0  # 0: steady state; 1, 2, 3: that one
    device_ids: tuple[Count, ...] = ()  # () for 0..gpus-1
    split: tuple[PositiveCount, ...] = ()  # samples a rank; () for the mode's own rule
    stragglers: tuple[tuple[Count, Slowness], ...] = ()  # (rank, factor on compute time)
    seed: Count = 0
    anchor_step_s: PositiveFloat | None = None  # a measured single-GPU step
    anchor_batch: PositiveCount | None = None  # its batch; None: that of the one GPU compared with
    data_parallel: DataParallelOptions = DataParallelOptions()
    ring: RingOptions = RingOptions()
    server: ServerOptions = ServerOptions()
