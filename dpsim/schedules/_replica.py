"""Replica: one GPU of DataParallel, and what moves between several of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from dpsim.collectives import Call
from dpsim.engine import Cluster, Communicator, Stream, Thread, latest
from dpsim.schedules._runs import ADD_BYTES, Runs
from dpsim.schedules._worker import Worker
from dpsim.timeline import Phase
from dpsim.workload import Tensor


class Replica:
    """One GPU: its stream, its forward thread and its autograd thread."""

    def __init__(
        self, cluster: Cluster, position: int, gpu: int, batch: int, first: Worker
    ) -> None:
        """Take a position in device_ids; position 0 is the worker that holds the parameters."""
        self.gpu = gpu
        self.name = f"gpu{gpu}"
        self.batch = batch
        self.stream: Stream = first.compute if position == 0 else cluster.stream(gpu, "compute")
        self.autograd: Thread = (
            first.autograd if position == 0 else cluster.thread(gpu, "autograd thread")
        )
        self.thread = cluster.thread(gpu, f"replica thread {position}")
        self.runs = Runs(
            cluster.workload,
            cluster.scenario,
            (cluster.device, cluster.host),
            cluster.straggle(position),
        )
        cluster.batches[gpu] = batch
        cluster.stands_for[gpu] = gpu

    def memory_ns(self, nbytes: float) -> int:
        """Return the time of a kernel that moves bytes, ns."""
        return self.runs.device.memory_ns(nbytes, self.runs.straggle)


class Replicas:
    """The replicas that get samples, the root first, and what moves between them."""

    def __init__(self, cluster: Cluster, first: Worker, replicas: list[Replica]) -> None:
        """Take the replicas, and the worker whose main thread drives them."""
        self.cluster = cluster
        self.host = cluster.host
        self.costs = cluster.host.host
        self.nccl = cluster.scenario.data_parallel.nccl  # False: builds without it copy
        self.strided = cluster.scenario.data_parallel.dim > 0
        self.home = first.home
        self.root = replicas[0]
        self.size = self.root.runs.wire_bytes
        self.iteration = 0
        self.all = tuple(replicas)
        self._group = Communicator(cluster, [r.gpu for r in replicas], 1, "auto")
        self._inputs: list[Stream] = []

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.all)

    def __iter__(self) -> Iterator[Replica]:
        """Yield them in the order of device_ids."""
        return iter(self.all)

    # Copies

    def copy(
        self, thread: Thread, ends: tuple[Replica, Replica], nbytes: int, phase: Phase
    ) -> None:
        """Copy between GPUs: on the source's stream, with a barrier against the target's.

        Without peer access a slice along an inner dimension is made contiguous on both sides.

        Source: aten/src/ATen/native/cuda/Copy.cu copy_device_to_device.
        """
        source, target = ends
        # One asynchronous copy with its two event pairs.
        launch_ns = self.host.ns(self.costs.copy_launch_s) + self.host.ns(self.costs.event_s, 4)
        thread.work(phase, "copy", launch_ns)
        if not nbytes:
            return
        duration = self.cluster.copy_ns(source.name, target.name, nbytes)
        if self.strided and source is not target:
            route = self.cluster.machine.route(source.name, target.name)
            duration += 0 if route.peer else 2 * source.memory_ns(2 * nbytes)
        begin = latest(source.stream.tail, target.stream.tail, thread.now)
        end = source.stream.until(
            phase, f"copy to {target.name}", begin, begin.at + duration, nbytes
        )
        target.stream.wait(end)
        self.cluster.account(self.iteration, source.name, target.name, nbytes)

    def to_host(self, thread: Thread, replica: Replica, nbytes: int, phase: Phase) -> None:
        """Copy to pageable host memory; the thread waits (non_blocking is off for CPU targets)."""
        thread.work(phase, "copy", self.host.ns(self.costs.copy_launch_s))
        rate = self.costs.pageable_copy_bytes_per_s.value
        duration = self.cluster.copy_ns(replica.name, self.home, nbytes, rate)
        end = replica.stream.op(phase, "copy to host", thread.now, duration, nbytes)
        self.cluster.account(self.iteration, replica.name, self.home, nbytes)
        thread.wait(end, "copy to host", phase)
        thread.work(phase, "copy to host", self.host.ns(self.costs.sync_s))

    def from_host(
        self, thread: Thread, sizes: Sequence[int], phase: Phase, *, pageable: bool
    ) -> None:
        """Copy a part to each replica, on a stream beside its compute, which then waits.

        Copies from pinned memory run at the same time; one from pageable memory holds the thread.

        Source: torch/nn/parallel/_functions.py Scatter, torch/csrc/cuda/comm.cpp scatter.
        """
        if not self._inputs:
            self._inputs = [self.cluster.stream(r.gpu, "copies from host") for r in self]
        rates = self.cluster.shared_rates([(self.home, r.name) for r in self])
        alone = self.costs.pageable_copy_bytes_per_s.value
        for replica, stream, nbytes, rate in zip(self, self._inputs, sizes, rates, strict=True):
            thread.work(phase, "copy", self.host.ns(self.costs.copy_launch_s))
            thread.work(phase, "copy", self.host.ns(self.costs.event_s, 2))
            duration = self.cluster.copy_ns(
                self.home, replica.name, nbytes, alone if pageable else rate
            )
            end = stream.op(phase, "copy from host", thread.now, duration, nbytes)
            self.cluster.account(self.iteration, self.home, replica.name, nbytes)
            replica.stream.wait(end)
            if pageable:
                thread.wait(end, "copy from pageable memory")

    # Chunks

    def broadcast(self, thread: Thread, phase: Phase, chunk: list[Tensor]) -> None:
        """Send a chunk from the root to all others, who take views of it."""
        others = self.all[1:]
        nbytes = sum(map(self.size, chunk))
        self._flatten(thread, phase, self.root, chunk)
        allocations = max(1, len(others))
        thread.work(phase, "allocate", self.host.ns(self.costs.allocation_s, allocations))
        if others and self.nccl:
            self._collective(thread, phase, "broadcast", nbytes)
        else:
            for other in others:
                self.copy(thread, (self.root, other), nbytes, phase)
        views = len(chunk) * len(others)
        thread.work(phase, "unflatten", self.host.ns(self.costs.tensor_replicate_s, views))

    def reduce(self, thread: Thread, phase: Phase, chunk: list[Tensor], *, sparse: bool) -> None:
        """Add a chunk of all replicas on the root. Sparse gradients are never sent by NCCL."""
        nbytes = sum(map(self.size, chunk))
        for replica in self:
            self._flatten(thread, phase, replica, chunk)
        others = self.all[1:]
        if others and self.nccl and not sparse:
            thread.work(phase, "allocate", self.host.ns(self.costs.allocation_s))
            self._collective(thread, phase, "reduce", nbytes)
        else:
            for replica in others:
                self.copy(thread, (replica, self.root), nbytes, phase)
                thread.work(phase, "add", self.host.ns(self.costs.backward_launch_s))
                add = self.root.memory_ns(ADD_BYTES * nbytes)
                self.root.stream.op(phase, "add", thread.now, add)
        thread.work(phase, "unflatten", self.host.ns(self.costs.tensor_replicate_s, len(chunk)))

    def _flatten(self, thread: Thread, phase: Phase, replica: Replica, chunk: list[Tensor]) -> None:
        """Copy the tensors of a chunk together; one alone is a view."""
        thread.work(phase, "flatten", self.host.ns(self.costs.tensor_replicate_s, len(chunk)))
        if len(chunk) > 1:
            thread.work(phase, "cat", self.host.ns(self.costs.backward_launch_s))
            duration = replica.memory_ns(2 * sum(map(self.size, chunk)))
            replica.stream.op(phase, "cat", thread.now, duration)

    def _collective(
        self, thread: Thread, phase: Phase, name: Literal["broadcast", "reduce"], nbytes: int
    ) -> None:
        """Enqueue one NCCL group: a kernel on the compute stream of every GPU.

        A group is launched when it ends: no kernel starts before all are enqueued.
        """
        thread.work(phase, name, self.host.ns(self.costs.collective_s))
        thread.work(phase, name, self.host.ns(self.costs.collective_rank_s, len(self)))
        call = Call(collective=name, nbytes=nbytes)
        streams = [replica.stream for replica in self]
        self._group.run(self.iteration, call, streams, [thread.now] * len(self), phase)
