"""nn.DataParallel: one process, one thread for each GPU, everything through GPU 0."""

from __future__ import annotations

import numpy as np

from dpsim.engine import Cluster, Mark, Program, Thread, latest, launch_together
from dpsim.engine import Run as LaunchRun
from dpsim.errors import InfeasibleError
from dpsim.schedules import single
from dpsim.schedules._packing import broadcast_chunks, chunk_batch, reduce_chunks
from dpsim.schedules._registry import SCHEDULES
from dpsim.schedules._replica import Replica, Replicas
from dpsim.schedules._runs import ADD_BYTES, join
from dpsim.schedules._worker import SCALAR_BYTES, Worker
from dpsim.timeline import Phase
from dpsim.units import to_ns
from dpsim.workload import Op, Tensor

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
            "--device-ids must name --gpus different GPUs of "
            f"0..{machine.profile.topology.gpus - 1}, got {','.join(map(str, ids))} for "
            f"{scenario.gpus} GPUs. Correct either."
        )
    if scenario.gpus == 1 and not scenario.data_parallel.keep_replicas:
        cluster.start(single.program(cluster), "the process")
    else:
        cluster.start(DataParallel(cluster, ids).program(), "the process")


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
        replicas = [
            Replica(cluster, i, ids[i], chunk, self.first) for i, chunk in enumerate(chunks)
        ]
        for gpu in ids[len(chunks) :]:
            cluster.batches[gpu] = 0
            cluster.stands_for[gpu] = gpu
        self.replicas = Replicas(cluster, self.first, replicas)
        self.root = self.replicas.root
        self.on_cpu = self.options.output_device == CPU
        self.out = self._output_replica(ids)
        self._pack()

    def _pack(self) -> None:
        size, parameters = self.replicas.size, self.workload.parameters
        self.parameter_chunks = broadcast_chunks(parameters, size)
        self.buffer_chunks = broadcast_chunks(self.workload.buffers, size)
        self.sparse = [p for p in parameters if p.sparse_gradient]
        self.gradient_chunks = reduce_chunks([p for p in parameters if not p.sparse_gradient], size)
        for name, chunks in (
            ("broadcast chunks", self.parameter_chunks),
            ("buffer chunks", self.buffer_chunks),
            ("reduce chunks", self.gradient_chunks),
        ):
            self.cluster.messages[name] = tuple(sum(map(size, chunk)) for chunk in chunks)

    def _output_replica(self, ids: tuple[int, ...]) -> Replica:
        position = 0 if self.on_cpu else self.options.output_device
        if not 0 <= position < len(ids):
            raise InfeasibleError(
                f"--output-device must be a position in 0..{len(ids) - 1} or 'cpu', got "
                f"{self.options.output_device}. Correct it."
            )
        if position < len(self.replicas):
            return self.replicas.all[position]
        # The GPU gets no samples, but outputs are still gathered on it.
        return Replica(self.cluster, position, ids[position], 0, self.first)

    def program(self) -> Program:
        """Run the training loop."""
        for iteration in range(1, self.cluster.iterations + 1):
            self.replicas.iteration = iteration
            for micro_step in range(self.scenario.accumulation):
                self.main.work(Phase.LOOP, "loop", self.host.ns(self.costs.iteration_s))
                if self.options.keep_replicas:
                    self._parallel_apply()
                else:
                    self._micro_step(micro_step)
            if not self._forward_only:
                self.first.optimizer()
            self._finish()
        yield from ()

    @property
    def _forward_only(self) -> bool:
        return self.scenario.evaluation or self.options.keep_replicas

    @property
    def _loss_inside(self) -> bool:
        """Is the loss part of the module, by the scenario or by the model itself?"""
        return self.options.loss_in_forward or self.workload.loss_start == len(
            self.workload.forward
        )

    def _micro_step(self, micro_step: int) -> None:
        if micro_step == 0 and not self.scenario.set_to_none and not self._forward_only:
            self.first.zero_gradients()
        self._load()
        tensors = len(self.workload.parameters) + len(self.workload.buffers)
        check_ns = self.host.ns(self.costs.device_check_s, tensors)
        self.main.work(Phase.DEVICE_CHECK, "device check", check_ns)
        self._scatter()
        self._replicate()
        self._parallel_apply()
        self._gather()
        self._loss()
        if not self._forward_only:
            self._backward(accumulate=self.first.keeps_gradients(micro_step))

    def _finish(self) -> None:
        """End the iteration with the loop's sync point, and note when it was done."""
        sync = self.scenario.sync
        if self.options.keep_replicas:
            for replica in self.replicas:  # torch.cuda.synchronize on each
                self.first.synchronise("synchronize", replica.stream)
        elif sync == "item-after-step" or (self._forward_only and sync != "none"):
            self._item()
        ends = [replica.stream.tail for replica in (self.root, self.out)]
        if self.options.keep_replicas:
            ends = [replica.stream.tail for replica in self.replicas]
        self.cluster.finish_step(self.first.rank, latest(*ends))

    # Phase 0: the batch to GPU 0, the labels to the output device

    def _load(self) -> None:
        """Copy inputs and labels. A loss inside the module has its labels with the inputs."""
        inputs = int(self.workload.input_bytes.at(self.scenario.batch))
        targets = int(self.workload.target_bytes.at(self.scenario.batch))
        moved = 0 if self.options.input_on == "cpu" else inputs
        apart = False
        if self._loss_inside:
            moved += 0 if self.options.input_on == "cpu" else targets
        elif not self.on_cpu:  # labels of a loss on the CPU stay there
            apart = self.out is not self.root
            moved += 0 if apart else targets
        self.first.to_device(self.replicas.iteration, moved)
        if apart and targets:
            self._load_labels(targets)

    def _load_labels(self, nbytes: int) -> None:
        name, home = "target.to(device)", self.first.home
        pinned = self.scenario.pinned_input
        rate = float("inf") if pinned else self.costs.pageable_copy_bytes_per_s.value
        duration = self.cluster.copy_ns(home, self.out.name, nbytes, rate)
        self.main.work(Phase.INPUT, name, self.host.ns(self.costs.copy_launch_s))
        self.out.stream.op(Phase.INPUT, name, self.main.now, duration, nbytes)
        self.cluster.account(self.replicas.iteration, home, self.out.name, nbytes)
        if not pinned:
            self.main.wait(self.out.stream.tail, name)
            self.main.work(Phase.SYNC, name, self.host.ns(self.costs.sync_s))

    # Phase 2: scatter

    def _scatter(self) -> None:
        """Scatter the inputs, and the labels too if the loss is inside the module."""
        lines = [self.workload.input_bytes]
        lines += [self.workload.target_bytes] if self._loss_inside else []
        for line in lines:
            sizes = [int(line.at(replica.batch)) for replica in self.replicas]
            cost = self.host.ns(self.costs.python_function_s)
            self.main.work(Phase.SCATTER, "Scatter", cost)
            if self.options.input_on == "cpu":
                pageable = not self.scenario.pinned_input
                self.replicas.from_host(self.main, sizes, Phase.SCATTER, pageable=pageable)
                continue
            for replica, nbytes in zip(self.replicas, sizes, strict=True):
                if replica is not self.root:
                    self.replicas.copy(self.main, (self.root, replica), nbytes, Phase.SCATTER)

    # Phases 3 to 5: replicate

    def _replicate(self) -> None:
        """Broadcast parameters and buffers, trained or not, and build the module trees."""
        parts: tuple[tuple[Phase, list[list[Tensor]]], ...] = (
            (Phase.BROADCAST, self.parameter_chunks),
            (Phase.BUFFERS, self.buffer_chunks),
        )
        for phase, chunks in parts:
            if chunks:
                self.main.work(phase, "Broadcast", self.host.ns(self.costs.python_function_s))
            for chunk in chunks:
                self.replicas.broadcast(self.main, phase, chunk)
        modules = self.workload.modules * len(self.replicas)
        self.main.work(
            Phase.REPLICATE, "build modules", self.host.ns(self.costs.module_replicate_s, modules)
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
        return join(run, replica.runs.loss(replica.batch)) if self._loss_inside else run

    # Phase 8: gather

    def _outputs(self, replica: Replica) -> list[int]:
        """Return the bytes of each tensor that a replica returns."""
        if self.options.loss_in_forward:
            return [SCALAR_BYTES]
        count = self.workload.output_tensors
        each, rest = divmod(int(self.workload.output_bytes.at(replica.batch)), count)
        return [each + rest] + [each] * (count - 1)

    def _gather(self) -> None:
        """Copy output by output, replica by replica: one chain, whoever is done first."""
        pieces = [self._outputs(replica) for replica in self.replicas]
        for sizes in zip(*pieces, strict=True):
            cost = self.host.ns(self.costs.python_function_s)
            self.main.work(Phase.GATHER, "Gather", cost)
            self.main.work(Phase.GATHER, "allocate", self.host.ns(self.costs.allocation_s))
            for replica, nbytes in zip(self.replicas, sizes, strict=True):
                if self.on_cpu:
                    self.replicas.to_host(self.main, replica, nbytes, Phase.GATHER)
                else:
                    self.replicas.copy(self.main, (replica, self.out), nbytes, Phase.GATHER)

    # Phase 9: loss on the output device

    def _loss(self) -> None:
        if self._loss_inside:
            self._mean(self.main, Phase.LOSS)
        elif self.on_cpu:
            ops = self.workload.forward[self.workload.loss_start :]
            self._on_host(Phase.LOSS, ops, self.out.runs.loss(self.scenario.batch))
        else:
            run = self.out.runs.loss(self.scenario.batch)
            self.main.launch(self.out.stream, Phase.LOSS, run)
        if self.scenario.sync == "item-after-loss" and not self._forward_only:
            self._item()

    def _mean(self, thread: Thread, phase: Phase) -> None:
        """Average N scalars: one small kernel, forward or backward; on the CPU, host time alone."""
        launch_ns = self.host.ns(self.costs.launch_gil_s) + self.host.ns(self.costs.launch_free_s)
        thread.work(phase, "mean", launch_ns)
        if not self.on_cpu:
            self.out.stream.op(phase, "mean", thread.now, self.out.memory_ns(0))

    def _on_host(self, phase: Phase, ops: tuple[Op, ...], run: LaunchRun) -> None:
        """Compute ops on the CPU, bound by its memory. Leaves out: their FLOP."""
        nbytes = sum(op.bytes_moved.at(self.scenario.batch) for op in ops)
        memory_ns = to_ns(nbytes / self.costs.memory_bandwidth_bytes_per_s.value)
        host_ns = int(run.locked.sum() + run.unlocked.sum()) + run.rest
        self.main.work(phase, "on the CPU", host_ns + memory_ns)

    def _item(self) -> None:
        """Read the loss on the output device; on the CPU it is there."""
        if not self.on_cpu:
            self.first.item("loss.item()", self.out.stream, self.out.name)

    # Phases 10 to 15: backward

    def _backward(self, *, accumulate: bool) -> None:
        """Run backward from the loss, in the autograd threads; nodes on the CPU in the main one."""
        first = self.main if self.on_cpu else self.out.autograd
        first.resume(self.main.now)
        if self._loss_inside:
            self._mean(first, Phase.LOSS_BACKWARD)
        elif self.on_cpu:
            ops = self.workload.backward[: self.workload.loss_backward_ops]
            run = self.out.runs.loss_backward(self.scenario.batch)
            self._on_host(Phase.LOSS_BACKWARD, ops, run)
        else:
            run = self.out.runs.loss_backward(self.scenario.batch)
            first.launch(self.out.stream, Phase.LOSS_BACKWARD, run)
        self._scatter_gradients(first)
        ready = first.now  # of all threads: launching the first replica must not delay the others
        for replica in self.replicas:
            replica.autograd.resume(ready)
            replica.autograd.launch(replica.stream, Phase.BACKWARD, self._backward_run(replica))
        last = latest(*(replica.autograd.now for replica in self.replicas))
        self._reduce(last, accumulate=accumulate)

    def _backward_run(self, replica: Replica) -> LaunchRun:
        runs, batch = replica.runs, replica.batch
        run = runs.backward(batch, runs.cast_hooks())
        return join(runs.loss_backward(batch), run) if self._loss_inside else run

    def _scatter_gradients(self, thread: Thread) -> None:
        """Gather.backward: serial copies on the output stream, before any replica's backward.

        Of a module with its loss inside, only the losses lead to a gradient.
        """
        phase = Phase.SCATTER_GRADIENTS
        loss = [SCALAR_BYTES]
        pieces = [loss if self._loss_inside else self._outputs(r) for r in self.replicas]
        for sizes in zip(*pieces, strict=True):
            thread.work(phase, "GatherBackward", self.host.ns(self.costs.python_function_s))
            if self.on_cpu:
                self.replicas.from_host(thread, sizes, phase, pageable=True)
                continue
            for replica, nbytes in zip(self.replicas, sizes, strict=True):
                if replica is not self.out:
                    self.replicas.copy(thread, (self.out, replica), nbytes, phase)

    # Phase 13: one node reduces all gradients of all replicas, when the last is there

    def _reduce(self, last: Mark, *, accumulate: bool) -> None:
        thread = self.root.autograd
        thread.resume(last)
        thread.work(Phase.REDUCE, "BroadcastBackward", self.host.ns(self.costs.python_function_s))
        self._fill_missing(thread)
        for tensor in self.sparse:  # taken as dense: what rows are touched is not known
            self.replicas.reduce(thread, Phase.REDUCE, [tensor], sparse=True)
        for chunk in self.gradient_chunks:
            self.replicas.reduce(thread, Phase.REDUCE, chunk, sparse=False)
        self._accumulate(thread, accumulate=accumulate)
        self.main.resume(thread.now)

    def _fill_missing(self, thread: Thread) -> None:
        """Make zeros for gradients that backward does not give: they are reduced all the same."""
        given = {ready.parameter for ready in self.workload.gradients}
        for i, tensor in enumerate(self.workload.parameters):
            if i in given:
                continue
            for replica in self.replicas:
                thread.work(Phase.REDUCE, "zeros", self.host.ns(self.costs.backward_launch_s))
                duration = replica.memory_ns(self.replicas.size(tensor))
                replica.stream.op(Phase.REDUCE, "zeros", thread.now, duration)

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
        durations = [self.root.memory_ns(ADD_BYTES * self.replicas.size(p)) for p in trainable]
        host = np.full(len(trainable), self.host.ns(self.costs.backward_launch_s), dtype=np.int64)
        run = LaunchRun(
            names=tuple(f"{p.name}: add to .grad" for p in trainable),
            locked=np.zeros_like(host),
            unlocked=host,
            durations=np.array(durations, dtype=np.int64),
        )
        thread.launch(self.root.stream, Phase.ACCUMULATE, run)
