"""nn.DataParallel: one process, one thread for each GPU, everything through GPU 0."""

from __future__ import annotations

import numpy as np

from dpsim.collectives import Call
from dpsim.engine import (
    Cluster,
    Communicator,
    Mark,
    Program,
    Stream,
    Thread,
    latest,
    launch_together,
)
from dpsim.engine import Run as LaunchRun
from dpsim.errors import InfeasibleError
from dpsim.schedules import single
from dpsim.schedules._packing import broadcast_chunks, chunk_batch, reduce_chunks
from dpsim.schedules._registry import SCHEDULES
from dpsim.schedules._runs import ADD_BYTES, Runs, join
from dpsim.schedules._worker import SCALAR_BYTES, Worker
from dpsim.timeline import Phase
from dpsim.workload import Tensor

CPU = -1
"""`output_device` that stands for host memory."""


@SCHEDULES.add
def dp(cluster: Cluster) -> None:
    """Start the one process. One GPU is a plain call of the module, as in PyTorch.

    Source: torch/nn/parallel/{data_parallel,replicate,parallel_apply,scatter_gather}.py and
    torch/csrc/cuda/comm.cpp.

    Raises:
        InfeasibleError: The GPUs are not in one machine, or device ids do not fit them.
    """
    scenario, machine = cluster.scenario, cluster.machine
    if machine.nodes > 1:
        raise InfeasibleError(
            f"--gpus must be at most {machine.profile.topology.gpus} in mode 'dp' on "
            f"'{machine.profile.name}', got {scenario.gpus}: nn.DataParallel is one process on one "
            "machine. Lower --gpus, or choose --mode ring."
        )
    ids = scenario.device_ids or tuple(range(scenario.gpus))
    outside = [i for i in ids if i >= machine.profile.topology.gpus]
    if len(ids) != scenario.gpus or len(set(ids)) != len(ids) or outside:
        raise InfeasibleError(
            f"--device-ids must name --gpus different GPUs of 0..{machine.profile.topology.gpus - 1}"
            f", got {','.join(map(str, ids))} for {scenario.gpus} GPUs. Correct either."
        )
    if scenario.gpus == 1 and not scenario.data_parallel.keep_replicas:
        cluster.start(single.program(cluster), "the process")
    else:
        cluster.start(DataParallel(cluster, ids).program(), "the process")


class Replica:
    """One GPU of DataParallel: its stream, its forward thread and its autograd thread."""

    def __init__(self, cluster: Cluster, position: int, gpu: int, batch: int, main: Worker) -> None:
        """Take a position in device_ids; position 0 is the worker that holds the parameters."""
        self.gpu = gpu
        self.name = f"gpu{gpu}"
        self.batch = batch
        self.stream: Stream = main.compute if position == 0 else cluster.stream(gpu, "compute")
        self.autograd: Thread = (
            main.autograd if position == 0 else cluster.thread(gpu, "autograd thread")
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


class DataParallel:
    """The step of semantics "one process, N replicas", phase by phase."""

    def __init__(self, cluster: Cluster, ids: tuple[int, ...]) -> None:
        """Cut the batch, and make a replica for each GPU that gets a part."""
        self.cluster = cluster
        self.scenario = cluster.scenario
        self.options = cluster.scenario.data_parallel
        self.workload = cluster.workload
        self.host = cluster.host
        self.costs = cluster.host.host
        chunks = self.scenario.split or chunk_batch(self.scenario.batch, len(ids))
        self.first = Worker(cluster, ids[:1], self.scenario.batch, loaders=ids[:1])
        self.main = self.first.main
        self.replicas = [
            Replica(cluster, i, ids[i], chunk, self.first) for i, chunk in enumerate(chunks)
        ]
        for gpu in ids[len(chunks) :]:
            cluster.batches[gpu] = 0
            cluster.stands_for[gpu] = gpu
        self.root = self.replicas[0]
        self.on_cpu = self.options.output_device == CPU
        self.out = self._output_replica(ids)
        self.group = Communicator(cluster, [r.gpu for r in self.replicas], 1, "auto")
        self.size = self.root.runs.wire_bytes
        self.parameter_chunks = broadcast_chunks(self.workload.parameters, self.size)
        self.buffer_chunks = broadcast_chunks(self.workload.buffers, self.size)
        self.gradient_chunks = reduce_chunks(self.workload.parameters, self.size)
        cluster.messages["broadcast chunks"] = self._sizes(self.parameter_chunks)
        cluster.messages["buffer chunks"] = self._sizes(self.buffer_chunks)
        cluster.messages["reduce chunks"] = self._sizes(self.gradient_chunks)
        self.iteration = 0

    def _sizes(self, chunks: list[list[Tensor]]) -> tuple[int, ...]:
        return tuple(sum(map(self.size, chunk)) for chunk in chunks)

    def _output_replica(self, ids: tuple[int, ...]) -> Replica:
        position = 0 if self.on_cpu else self.options.output_device
        if not 0 <= position < len(ids):
            raise InfeasibleError(
                f"--output-device must be a position in 0..{len(ids) - 1} or 'cpu', got "
                f"{self.options.output_device}. Correct it."
            )
        if position < len(self.replicas):
            return self.replicas[position]
        # The GPU gets no samples, but outputs are still gathered on it.
        return Replica(self.cluster, position, ids[position], 0, self.first)

    def program(self) -> Program:
        """Run the training loop."""
        for iteration in range(1, self.cluster.iterations + 1):
            self.iteration = iteration
            for micro_step in range(self.scenario.accumulation):
                self._micro_step(micro_step)
            if not self._forward_only:
                self.first.optimizer()
            self.first.finish()
        yield from ()

    @property
    def _forward_only(self) -> bool:
        return self.scenario.evaluation or self.options.keep_replicas

    @property
    def _loss_inside(self) -> bool:
        return self.options.loss_in_forward or self.workload.loss_start == len(
            self.workload.forward
        )

    def _micro_step(self, micro_step: int) -> None:
        self._load()
        if not self.options.keep_replicas:
            self.main.work(
                Phase.DEVICE_CHECK,
                "device check",
                self.host.ns(self.costs.device_check_s, self._tensors),
            )
            self._scatter()
            self._replicate()
        self._parallel_apply()
        self._gather()
        self._loss()
        if not self._forward_only:
            self._backward(accumulate=self.first.keeps_gradients(micro_step))

    @property
    def _tensors(self) -> int:
        return len(self.workload.parameters) + len(self.workload.buffers)

    # Phase 0: the batch to GPU 0, the labels to the output device

    def _load(self) -> None:
        worker = self.first
        self.main.work(Phase.LOOP, "loop", self.host.ns(self.costs.iteration_s))
        if not self.scenario.set_to_none and not self._forward_only:
            worker.zero_gradients()
        inputs = int(self.workload.input_bytes.at(self.scenario.batch))
        targets = int(self.workload.target_bytes.at(self.scenario.batch))
        moved = 0 if self.options.input_on == "cpu" else inputs
        if self.out is self.root:
            moved += targets
        worker.to_device(self.iteration, moved)
        if self.out is not self.root and targets:
            self._host_copy(self.out.stream, self.out.name, targets, "target.to(device)")

    def _host_copy(self, stream: Stream, gpu: str, nbytes: int, name: str) -> None:
        rate = float("inf")
        if not self.scenario.pinned_input:
            rate = self.costs.pageable_copy_bytes_per_s.value
        duration = self.cluster.copy_ns(self.first.home, gpu, nbytes, rate)
        self.main.work(Phase.INPUT, name, self.host.ns(self.costs.copy_launch_s))
        stream.op(Phase.INPUT, name, self.main.now, duration, nbytes)
        self.cluster.account(self.iteration, self.first.home, gpu, nbytes)
        if not self.scenario.pinned_input:
            self.main.wait(stream.tail, name)
            self.main.work(Phase.SYNC, name, self.host.ns(self.costs.sync_s))

    # Phase 2: scatter

    def _scatter(self) -> None:
        self.main.work(Phase.SCATTER, "Scatter", self.host.ns(self.costs.python_function_s))
        for replica in self.replicas:
            nbytes = int(self.workload.input_bytes.at(replica.batch))
            if self.options.input_on == "cpu":
                self._host_copy(replica.stream, replica.name, nbytes, "scatter")
            elif replica is not self.root:
                self._copy(self.main, self.root, replica, nbytes, Phase.SCATTER)

    def _copy(
        self, thread: Thread, source: Replica, target: Replica, nbytes: int, phase: Phase
    ) -> None:
        """Copy between GPUs: on the source's stream, with a barrier against the target's.

        Source: aten/src/ATen/native/cuda/Copy.cu copy_device_to_device.
        """
        thread.work(phase, "copy", self._copy_launch_ns)
        if not nbytes:
            return
        duration = self.cluster.copy_ns(source.name, target.name, nbytes)
        begin = latest(source.stream.tail, target.stream.tail, thread.now)
        end = source.stream.until(
            phase, f"copy to {target.name}", begin, begin.at + duration, nbytes
        )
        target.stream.wait(end)
        self.cluster.account(self.iteration, source.name, target.name, nbytes)

    @property
    def _copy_launch_ns(self) -> int:
        """One asynchronous copy with its two event pairs."""
        return self.host.ns(self.costs.copy_launch_s) + self.host.ns(self.costs.event_s, 4)

    # Phases 3 to 5: replicate

    def _replicate(self) -> None:
        for phase, chunks in (
            (Phase.BROADCAST, self.parameter_chunks),
            (Phase.BUFFERS, self.buffer_chunks),
        ):
            if chunks:
                self.main.work(phase, "Broadcast", self.host.ns(self.costs.python_function_s))
            for chunk in chunks:
                self._broadcast(phase, chunk)
        modules = self.workload.modules * len(self.replicas)
        self.main.work(
            Phase.REPLICATE, "build modules", self.host.ns(self.costs.module_replicate_s, modules)
        )

    def _broadcast(self, phase: Phase, chunk: list[Tensor]) -> None:
        others = self.replicas[1:]
        nbytes = sum(map(self.size, chunk))
        self._flatten(self.main, phase, self.root, chunk)
        self.main.work(
            phase, "allocate", self.host.ns(self.costs.allocation_s, max(1, len(others)))
        )
        if others and self.options.nccl:
            self._collective(self.main, phase, "broadcast", nbytes)
        else:
            for other in others:
                self._copy(self.main, self.root, other, nbytes, phase)
        views = len(chunk) * len(others)
        self.main.work(phase, "unflatten", self.host.ns(self.costs.tensor_replicate_s, views))

    def _flatten(self, thread: Thread, phase: Phase, replica: Replica, chunk: list[Tensor]) -> None:
        """Copy the tensors of a chunk together; one alone is a view."""
        thread.work(phase, "flatten", self.host.ns(self.costs.tensor_replicate_s, len(chunk)))
        if len(chunk) > 1:
            thread.work(phase, "cat", self.host.ns(self.costs.backward_launch_s))
            duration = self.cluster.device.memory_ns(2 * sum(map(self.size, chunk)))
            replica.stream.op(phase, "cat", thread.now, duration)

    def _collective(self, thread: Thread, phase: Phase, name: str, nbytes: int) -> None:
        """Enqueue one NCCL group: a kernel on the compute stream of every GPU."""
        thread.work(phase, name, self.host.ns(self.costs.collective_s))
        launched = []
        for _ in self.replicas:
            thread.work(phase, name, self.host.ns(self.costs.collective_rank_s))
            launched.append(thread.now)
        call = Call(collective=name, nbytes=nbytes)  # type: ignore[arg-type]
        # A group is launched when it ends: no kernel starts before all are enqueued.
        self.group.run(
            self.iteration,
            call,
            [r.stream for r in self.replicas],
            [launched[-1]] * len(self.replicas),
            phase,
        )

    # Phases 6 and 7: the forwards, in threads under one interpreter lock

    def _parallel_apply(self) -> None:
        """Launch one replica on the main thread, or several on threads of their own."""
        runs = [self._forward_run(replica) for replica in self.replicas]
        if len(self.replicas) == 1:
            self.main.launch(self.root.stream, Phase.FORWARD, runs[0])
            return
        for replica in self.replicas:
            self.main.work(Phase.THREADS, "start thread", self.host.ns(self.costs.thread_s))
            replica.thread.resume(self.main.now)
        threads = [replica.thread for replica in self.replicas]
        streams = [replica.stream for replica in self.replicas]
        if self.costs.gil:
            handover = self.host.handover_ns(len(threads))
            launch_together(threads, streams, Phase.FORWARD, runs, handover)
        else:
            for thread, stream, run in zip(threads, streams, runs, strict=True):
                thread.launch(stream, Phase.FORWARD, run)
        for thread in threads:
            self.main.wait(thread.now, "join", Phase.THREADS)

    def _forward_run(self, replica: Replica) -> LaunchRun:
        run = replica.runs.forward(replica.batch)
        return join(run, replica.runs.loss(replica.batch)) if self.options.loss_in_forward else run

    # Phase 8: gather

    def _output_bytes(self, replica: Replica) -> int:
        if self.options.loss_in_forward:
            return SCALAR_BYTES
        return int(self.workload.output_bytes.at(replica.batch))

    def _gather(self) -> None:
        outputs = 1 if self.options.loss_in_forward else self.workload.output_tensors
        self.main.work(Phase.GATHER, "Gather", self.host.ns(self.costs.python_function_s, outputs))
        self.main.work(Phase.GATHER, "allocate", self.host.ns(self.costs.allocation_s, outputs))
        for _ in range(outputs):
            for replica in self.replicas:
                nbytes = self._output_bytes(replica) // outputs
                if self.on_cpu:
                    self._to_cpu(replica, nbytes)
                else:
                    self._copy(self.main, replica, self.out, nbytes, Phase.GATHER)

    def _to_cpu(self, replica: Replica, nbytes: int) -> None:
        """Copy an output to host memory; the copy blocks (non_blocking is off for CPU targets)."""
        self.main.work(Phase.GATHER, "copy", self.host.ns(self.costs.copy_launch_s))
        duration = self.cluster.copy_ns(replica.name, self.first.home, nbytes)
        end = replica.stream.op(Phase.GATHER, "copy to host", self.main.now, duration, nbytes)
        self.cluster.account(self.iteration, replica.name, self.first.home, nbytes)
        self.main.wait(end, "gather to host", Phase.GATHER)
        self.main.work(Phase.GATHER, "gather to host", self.host.ns(self.costs.sync_s))

    # Phase 9: loss on the output device

    def _loss(self) -> None:
        if self.on_cpu:
            return
        if self.options.loss_in_forward:
            self._mean(self.main, Phase.LOSS)
        else:
            run = self.out.runs.loss(self.scenario.batch)
            self.main.launch(self.out.stream, Phase.LOSS, run)
        if self.scenario.sync == "item-after-loss" and not self._forward_only:
            self._item()

    def _mean(self, thread: Thread, phase: Phase) -> None:
        """Average N scalars: one small kernel, forward or backward."""
        cost = self.costs.launch_free_s.value + self.costs.launch_gil_s.value
        thread.work(phase, "mean", int(cost * self.host.factor * 1e9 + 0.5))
        self.out.stream.op(phase, "mean", thread.now, self.cluster.device.memory_ns(0))

    def _item(self) -> None:
        """Read the loss on the output device."""
        self.main.work(Phase.SYNC, "loss.item()", self.host.ns(self.costs.copy_launch_s))
        duration = self.cluster.copy_ns(self.out.name, self.first.home, SCALAR_BYTES)
        self.out.stream.op(Phase.SYNC, "loss.item()", self.main.now, duration)
        self.main.wait(self.out.stream.tail, "loss.item()")
        self.main.work(Phase.SYNC, "loss.item()", self.host.ns(self.costs.sync_s))

    # Phases 10 to 15: backward

    def _backward(self, *, accumulate: bool) -> None:
        first = self.out.autograd
        first.resume(self.main.now)
        if self.options.loss_in_forward:
            self._mean(first, Phase.LOSS_BACKWARD)
        else:
            run = self.out.runs.loss_backward(self.scenario.batch)
            first.launch(self.out.stream, Phase.LOSS_BACKWARD, run)
        self._scatter_gradients(first)
        for replica in self.replicas:
            replica.autograd.resume(first.now)
            replica.autograd.launch(replica.stream, Phase.BACKWARD, self._backward_run(replica))
        last = latest(*(replica.autograd.now for replica in self.replicas))
        self._reduce(last, accumulate=accumulate)

    def _backward_run(self, replica: Replica) -> LaunchRun:
        runs, batch = replica.runs, replica.batch
        if not self.options.loss_in_forward:
            return runs.backward(batch)
        return join(runs.loss_backward(batch), runs.backward(batch))

    def _scatter_gradients(self, thread: Thread) -> None:
        """Gather.backward: serial copies on the output stream, before any replica's backward."""
        phase = Phase.SCATTER_GRADIENTS
        thread.work(phase, "GatherBackward", self.host.ns(self.costs.python_function_s))
        for replica in self.replicas:
            nbytes = self._output_bytes(replica)
            if self.on_cpu:
                thread.work(phase, "copy", self._copy_launch_ns)
                duration = self.cluster.copy_ns(self.first.home, replica.name, nbytes)
                replica.stream.op(phase, "copy from host", thread.now, duration, nbytes)
                self.cluster.account(self.iteration, self.first.home, replica.name, nbytes)
            elif replica is not self.out:
                self._copy(thread, self.out, replica, nbytes, phase)

    # Phase 13: one node reduces all gradients of all replicas, when the last is there

    def _reduce(self, last: Mark, *, accumulate: bool) -> None:
        thread = self.root.autograd
        thread.resume(last)
        thread.work(Phase.REDUCE, "BroadcastBackward", self.host.ns(self.costs.python_function_s))
        self._fill_missing(thread)
        if len(self.replicas) > 1:
            for chunk in self.gradient_chunks:
                self._reduce_chunk(thread, chunk)
        self._accumulate(thread, accumulate=accumulate)
        self.main.resume(thread.now)
        for replica in self.replicas:
            self.root.stream.wait(replica.stream.tail)

    def _fill_missing(self, thread: Thread) -> None:
        """Make zeros for gradients that backward does not give: they are reduced all the same."""
        given = {ready.parameter for ready in self.workload.gradients}
        for i, tensor in enumerate(self.workload.parameters):
            if i in given:
                continue
            duration = self.cluster.device.memory_ns(self.size(tensor))
            for replica in self.replicas:
                thread.work(Phase.REDUCE, "zeros", self.host.ns(self.costs.backward_launch_s))
                replica.stream.op(Phase.REDUCE, "zeros", thread.now, duration)

    def _reduce_chunk(self, thread: Thread, chunk: list[Tensor]) -> None:
        nbytes = sum(map(self.size, chunk))
        for replica in self.replicas:
            self._flatten(thread, Phase.REDUCE, replica, chunk)
        if self.options.nccl:
            self._collective(thread, Phase.REDUCE, "reduce", nbytes)
        else:
            add = self.cluster.device.memory_ns(ADD_BYTES * nbytes)
            for replica in self.replicas[1:]:
                self._copy(thread, replica, self.root, nbytes, Phase.REDUCE)
                thread.work(Phase.REDUCE, "add", self.host.ns(self.costs.backward_launch_s))
                self.root.stream.op(Phase.REDUCE, "add", thread.now, add)
        thread.work(
            Phase.REDUCE, "unflatten", self.host.ns(self.costs.tensor_replicate_s, len(chunk))
        )

    def _accumulate(self, thread: Thread, *, accumulate: bool) -> None:
        """AccumulateGrad: takes the view when there is no gradient yet, else adds to it."""
        trainable = [p for p in self.workload.parameters if p.trainable]
        thread.work(
            Phase.ACCUMULATE,
            "AccumulateGrad",
            self.host.ns(self.costs.accumulate_grad_s, len(trainable)),
        )
        if not accumulate:
            return
        durations = [self.cluster.device.memory_ns(ADD_BYTES * self.size(p)) for p in trainable]
        host = np.full(len(trainable), self.host.ns(self.costs.backward_launch_s), dtype=np.int64)
        run = LaunchRun(
            names=tuple(f"{p.name}: add to .grad" for p in trainable),
            locked=np.zeros_like(host),
            unlocked=host,
            durations=np.array(durations, dtype=np.int64),
        )
        thread.launch(self.root.stream, Phase.ACCUMULATE, run)
