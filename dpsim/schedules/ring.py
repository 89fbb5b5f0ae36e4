"""DistributedDataParallel: one process for each GPU, buckets all-reduced during backward."""

from __future__ import annotations

from dpsim.collectives import Call
from dpsim.engine import Cluster, Communicator, Mark, Program, Run, Slowdown, latest
from dpsim.engine.recurrence import SPEED_UNITS
from dpsim.errors import InfeasibleError
from dpsim.schedules._buckets import Bucket, buckets, rebuild_iteration, unused_parameters
from dpsim.schedules._classes import RankClass, rank_classes
from dpsim.schedules._packing import DDP_BROADCAST_BYTES, close_when_full
from dpsim.schedules._registry import SCHEDULES
from dpsim.schedules._runs import CAST_BYTES, Hook, merge
from dpsim.schedules._worker import Worker, copy_hook
from dpsim.timeline import Phase

INDEX_BYTES = 4
"""One int32 for each parameter: bucket indexes at a rebuild, the map of used parameters."""
LEAST_SPEED = SPEED_UNITS // 4
"""However many channels a collective has, compute keeps a quarter of the multiprocessors."""
HALF_BYTES = 2


@SCHEDULES.add
def ring(cluster: Cluster) -> None:
    """Start one program for each class of ranks that cannot differ.

    Source: torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp,
    ProcessGroupNCCL.

    Raises:
        InfeasibleError: Some rank would get no samples, or parameters get no gradient and no
            option says so.
    """
    _check_unused(cluster)
    classes = rank_classes(cluster)
    group = Communicator(
        cluster,
        range(cluster.scenario.gpus),
        cluster.machine.nodes,
        cluster.scenario.ring.all_reduce,
    )
    for c in classes:
        replica = Replica(cluster, c, group, parties=len(classes))
        cluster.start(replica.program(), replica.label)


def _check_unused(cluster: Cluster) -> None:
    """Refuse what stops DDP in its second iteration: it waits for gradients that never come."""
    scenario, workload = cluster.scenario, cluster.workload
    told = scenario.ring.find_unused_parameters or scenario.ring.static_graph
    unused = unused_parameters(workload)
    if unused and not told and not scenario.evaluation:
        raise InfeasibleError(
            f"model {workload.name}: every trainable parameter must get a gradient in mode 'ring', "
            f"got none for {len(unused)}, the first '{workload.parameters[unused[0]].name}': "
            "DistributedDataParallel would stop. Add --find-unused-parameters or --static-graph."
        )


class Replica(Worker):
    """One rank of DDP: a worker with a communication stream."""

    def __init__(
        self, cluster: Cluster, ranks: RankClass, group: Communicator, *, parties: int
    ) -> None:
        """Take a class of ranks, and the group they all belong to."""
        super().__init__(cluster, ranks.members, ranks.batch)
        self.options = self.scenario.ring
        self.group = group
        self.parties = parties
        self.leads = self.rank == 0
        self.comm = cluster.stream(self.rank, "comm", self.count)
        self.hooks = self.comm
        if self.options.gradient_hook != "none":  # callbacks have streams of their own
            self.hooks = cluster.stream(self.rank, "hook", self.count)
        self.label = f"rank {self.rank}"
        self.speed = self._compute_speed()
        self.buffer_buckets = [
            sum(self.runs.wire_bytes(t) for t in bucket)
            for dtype in dict.fromkeys(b.dtype for b in self.workload.buffers)
            for bucket in close_when_full(
                [b for b in self.workload.buffers if b.dtype == dtype],
                self.runs.wire_bytes,
                [DDP_BROADCAST_BYTES],
            )
        ]
        self.meetings = 0
        self.marks: list[Mark] = []

    def _compute_speed(self) -> int:
        """Return the speed of compute beside a collective: one CTA a channel takes an SM.

        Leaves out: contention for memory bandwidth.
        """
        if self.group.fabric.ranks < 2:
            return SPEED_UNITS
        taken = self.group.fabric.channels / self.cluster.machine.profile.device.multiprocessors
        return max(LEAST_SPEED, SPEED_UNITS - round(SPEED_UNITS * taken))

    def program(self) -> Program:
        """Run the training loop."""
        for iteration in range(1, self.cluster.iterations + 1):
            for micro_step in range(self.scenario.accumulation):
                yield from self._micro_step(iteration, micro_step)
            if not self.scenario.evaluation:
                self.optimizer()
            self.finish()

    def _micro_step(self, iteration: int, micro_step: int) -> Program:
        self.begin(iteration, micro_step)
        if micro_step == 0:  # DDP skips both in a forward that follows a no_sync one
            if iteration == rebuild_iteration(self.options) and not self.scenario.evaluation:
                yield from self._rebuild(iteration)
            # The same flag skips buffers in a forward that follows one without gradients.
            if self.options.broadcast_buffers and not (self.scenario.evaluation and iteration > 1):
                yield from self._sync_buffers(iteration)
        self.forward()
        if self.scenario.evaluation:
            return
        keeps = self.keeps_gradients(micro_step)
        if micro_step + 1 < self.scenario.accumulation:  # inside no_sync
            self.whole_backward(accumulate=keeps)
            return
        if self.options.find_unused_parameters:
            nodes = len(self.workload.backward)
            self.main.work(
                Phase.BUCKET, "search graph", self.host.ns(self.host.host.allocation_s, nodes)
            )
        yield from self._backward(iteration, accumulate=keeps)

    # Collectives

    def _collective(self, iteration: int, call: Call, phase: Phase, ready: Mark) -> Program:
        """Put a collective on the comm stream, where it starts when all ranks are there."""
        begin = latest(self.comm.tail, ready)
        self.meetings += 1
        key = f"{call.collective} {self.meetings} ({call.nbytes} bytes)"
        last: Mark = yield self.cluster.meet(key, self.parties, begin, self.label)
        end = last.at + self.group.cost_ns(call)
        self.comm.until(phase, call.collective, Mark(begin.at, last.span), end, call.nbytes)
        if self.leads:
            self.group.account(iteration, call)

    def _rebuild(self, iteration: int) -> Program:
        """Broadcast the bucket order from rank 0, and wait for it: once."""
        nbytes = INDEX_BYTES * len(self.workload.parameters)
        call = Call(collective="broadcast", nbytes=nbytes)
        self.main.work(Phase.BUCKET, "rebuild", self.host.ns(self.host.host.collective_s))
        yield from self._collective(iteration, call, Phase.BUCKET, self.main.now)
        self.compute.wait(self.comm.tail)
        self.item("rebuild")

    def _sync_buffers(self, iteration: int) -> Program:
        """Broadcast the buffers of rank 0, then copy them back one by one."""
        host = self.host.host
        for nbytes in self.buffer_buckets:
            self.main.work(Phase.BUFFERS, "cat", self.host.ns(host.launch_free_s))
            duration = self.device.memory_ns(2 * nbytes, self.straggle)
            self.compute.op(Phase.BUFFERS, "cat", self.main.now, duration)
            self.main.work(Phase.BUFFERS, "broadcast", self.host.ns(host.collective_s))
            ready = latest(self.compute.tail, self.main.now)
            call = Call(collective="broadcast", nbytes=nbytes)
            yield from self._collective(iteration, call, Phase.BUFFERS, ready)
            self.compute.wait(self.comm.tail)
        for buffer in self.workload.buffers if self.buffer_buckets else ():
            self.main.work(Phase.BUFFERS, "copy_", self.host.ns(host.launch_free_s))
            duration = self.device.memory_ns(2 * self.runs.wire_bytes(buffer), self.straggle)
            self.compute.op(Phase.BUFFERS, "copy_", self.main.now, duration)

    # Backward with hooks

    def _backward(self, iteration: int, *, accumulate: bool) -> Program:
        packed = buckets(self.workload, self.options, iteration, self.runs.wire_bytes)
        if self.leads and iteration == self.cluster.measured:
            self.cluster.messages["all-reduce buckets"] = tuple(map(self._bucket_bytes, packed))
        run, position = self._hooked_run(accumulate=accumulate)
        self.begin_backward()
        self.marks = []
        busy: list[tuple[int, int]] = []
        done = 0
        for bucket in packed:
            last = max(done, 1 + max(position[i] for i in bucket))
            self._launch_part(run, done, last, busy)
            done = last
            yield from self._reduce_bucket(iteration, bucket, busy)
        self._launch_part(run, done, len(run), busy)
        if self.options.find_unused_parameters:
            nbytes = INDEX_BYTES * len(self.workload.parameters)
            call = Call(collective="all_reduce", nbytes=nbytes)
            yield from self._collective(iteration, call, Phase.ALL_REDUCE, self.autograd.now)
        self._finalize(packed)
        self.end_backward()

    def _launch_part(self, run: Run, first: int, last: int, busy: list[tuple[int, int]]) -> None:
        if last > first:
            slowdown = Slowdown(intervals=tuple(busy), speed=self.speed)
            self.backward(run.part(first, last), slowdown)

    def _bucket_bytes(self, bucket: Bucket) -> int:
        return sum(self.runs.wire_bytes(self.workload.parameters[i]) for i in bucket)

    def _hooked_run(self, *, accumulate: bool) -> tuple[Run, dict[int, int]]:
        """Return backward with DDP's hooks, and where each parameter's copy to its bucket is."""
        costs = self.host.host
        launch = self.host.ns(costs.hook_s) + self.host.ns(costs.launch_free_s)
        hooks: list[Hook] = self.runs.gradient_hooks(accumulate=accumulate)
        owner: dict[int, int] = {}
        for ready in self.workload.gradients:
            tensor = self.workload.parameters[ready.parameter]
            owner[len(hooks)] = ready.parameter
            name = f"{tensor.name}: copy to bucket"
            nbytes = self.runs.wire_bytes(tensor)
            hooks.append(copy_hook(self.runs, ready.after_op, name, nbytes, launch))
        first = min((ready.after_op for ready in self.workload.gradients), default=-1)
        for i in unused_parameters(self.workload):  # all are ready with the first gradient
            tensor = self.workload.parameters[i]
            zeros = self.device.memory_ns(self.runs.wire_bytes(tensor), self.straggle)
            owner[len(hooks)] = i
            name = f"{tensor.name}: zeros to bucket"
            hooks.append(Hook(after=first, name=name, host=launch, duration=zeros))
        merged, positions = merge(self.runs.backward(self.batch), self.runs.places(), hooks)
        return merged, {owner[h]: at for h, at in positions.items() if h in owner}

    def _reduce_bucket(
        self, iteration: int, bucket: Bucket, busy: list[tuple[int, int]]
    ) -> Program:
        """Launch the all-reduce of one bucket, compressed if a hook asks for it."""
        nbytes = self._bucket_bytes(bucket)
        half = self.options.gradient_hook != "none"
        elements = sum(self.workload.parameters[i].numel for i in bucket)
        cast = self.device.memory_ns(CAST_BYTES * elements, self.straggle)
        if half:
            # to(16 bit) and div_(world size): two kernels on the compute stream.
            scale = self.device.memory_ns(2 * HALF_BYTES * elements, self.straggle)
            self.autograd.work(Phase.BUCKET, "compress", self._python_ns(2))
            self.compute.op(Phase.BUCKET, "compress", self.autograd.now, cast + scale)
            nbytes = HALF_BYTES * elements
        enqueue_ns = self.host.ns(self.host.host.collective_s)
        self.autograd.work(Phase.ALL_REDUCE, "all_reduce", enqueue_ns)
        ready = latest(self.compute.tail, self.autograd.now)
        begin = max(self.comm.tail.at, ready.at)
        call = Call(collective="all_reduce", nbytes=nbytes)
        yield from self._collective(iteration, call, Phase.ALL_REDUCE, ready)
        if self.group.fabric.ranks > 1:
            busy.append((begin, self.comm.tail.at))
        self.marks.append(self.comm.tail)
        if half:
            self.autograd.work(Phase.BUCKET, "decompress", self._python_ns(1))
            ready = latest(self.comm.tail, self.autograd.now)
            self.marks[-1] = self.hooks.op(Phase.BUCKET, "decompress", ready, cast)

    def _python_ns(self, launches: int) -> int:
        """Return the host time of a Python function that launches some kernels, ns."""
        host = self.host.host
        each = self.host.ns(host.launch_gil_s) + self.host.ns(host.launch_free_s)
        return self.host.ns(host.python_function_s) + launches * each

    def _finalize(self, packed: tuple[Bucket, ...]) -> None:
        """Make the compute stream wait for each bucket, then copy it back to the gradients."""
        costs = self.host.host
        unused = set(unused_parameters(self.workload))  # their .grad stays None
        for bucket, mark in zip(packed, self.marks, strict=True):
            self.autograd.work(Phase.BUCKET, "wait", self.host.ns(costs.event_s))
            if mark.at > self.compute.tail.at:
                self.compute.wait(mark)
            if self.options.gradient_as_bucket_view:
                continue
            for i in sorted(set(bucket) - unused, key=bucket.index):
                tensor = self.workload.parameters[i]
                self.autograd.work(Phase.BUCKET, "copy back", self.host.ns(costs.launch_free_s))
                duration = self.device.memory_ns(2 * self.runs.wire_bytes(tensor), self.straggle)
                self.compute.op(
                    Phase.BUCKET, f"{tensor.name}: copy back", self.autograd.now, duration
                )
