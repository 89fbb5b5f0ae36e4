"""Worker: one process with one GPU, and the parts of a training step that all modes share."""

from __future__ import annotations

from collections.abc import Sequence

from dpsim.engine import Cluster, Run, Slowdown, Stream
from dpsim.schedules._runs import ADD_BYTES, Hook, Runs
from dpsim.timeline import Phase

SCALAR_BYTES = 4
"""loss.item() copies one float32."""


class Worker:
    """A process, its main thread, its autograd thread and its compute stream."""

    def __init__(
        self, cluster: Cluster, ranks: Sequence[int], batch: int, *, loaders: Sequence[int] = ()
    ) -> None:
        """Take equal ranks that compute `batch` samples each; the first stands for all.

        `loaders` are the ranks whose input is copied at the same time; all of the node if empty.
        """
        rank, count = ranks[0], len(ranks)
        self.cluster = cluster
        self.rank = rank
        self.ranks = ranks
        self.batch = batch
        self.count = count
        self.loaders = loaders or cluster.machine.ranks_on(cluster.machine.node_of(rank))
        self.gpu = f"gpu{rank}"
        self.home = f"host{cluster.machine.node_of(rank)}"
        self.scenario = cluster.scenario
        self.workload = cluster.workload
        self.host = cluster.host
        self.device = cluster.device
        ids = cluster.scenario.device_ids  # stragglers are named by position among these
        self.straggle = cluster.straggle(ids.index(rank) if rank in ids else rank)
        self.runs = Runs(
            cluster.workload, cluster.scenario, (cluster.device, cluster.host), self.straggle
        )
        self.main = cluster.thread(rank, "main thread", count)
        self.autograd = cluster.thread(rank, "autograd thread", count)
        self.compute = cluster.stream(rank, "compute", count)
        for member in ranks:
            cluster.batches[member] = batch
            cluster.stands_for[member] = rank

    def begin(self, iteration: int, micro_step: int) -> None:
        """Start a micro-step: the loop's own Python, then the batch to the GPU."""
        host = self.host.host
        self.main.work(Phase.LOOP, "loop", self.host.ns(host.iteration_s))
        if micro_step == 0 and not self.scenario.set_to_none and not self.scenario.evaluation:
            self.zero_gradients()
        nbytes = int(self.workload.input_bytes.at(self.batch))
        nbytes += int(self.workload.target_bytes.at(self.batch))
        self.to_device(iteration, nbytes)

    def zero_gradients(self) -> None:
        """Launch zero_grad(set_to_none=False): one foreach kernel over all gradients."""
        nbytes = sum(self.runs.wire_bytes(p) for p in self.workload.parameters if p.trainable)
        host = self.host.host
        launch_ns = self.host.ns(host.launch_gil_s) + self.host.ns(host.launch_free_s)
        self.main.work(Phase.LOOP, "zero_grad", launch_ns)
        duration = self.device.memory_ns(nbytes, self.straggle)
        self.compute.op(Phase.LOOP, "zero_grad", self.main.now, duration)

    def to_device(self, iteration: int, nbytes: int) -> None:
        """Copy the batch to the GPU: blocking from pageable memory, or queued from pinned.

        A blocking copy ends with a stream synchronise: it waits for all that is on the stream.
        Copies of all ranks of a node run at the same time and share its links.
        """
        if not nbytes:
            return
        host = self.host.host
        pairs = [(self.home, f"gpu{rank}") for rank in self.loaders]
        rate = self.cluster.shared_rates(pairs)[self.loaders.index(self.rank)]
        if not self.scenario.pinned_input:
            rate = min(rate, host.pageable_copy_bytes_per_s.value)
        duration = self.cluster.copy_ns(self.home, self.gpu, nbytes, rate)
        self.main.work(Phase.INPUT, "input.to(device)", self.host.ns(host.copy_launch_s))
        self.compute.op(Phase.INPUT, "copy to device", self.main.now, duration, nbytes)
        for rank in self.ranks:
            home = f"host{self.cluster.machine.node_of(rank)}"
            self.cluster.account(iteration, home, f"gpu{rank}", nbytes)
        if not self.scenario.pinned_input:
            self.synchronise("input.to(device)")

    def synchronise(self, name: str, stream: Stream | None = None) -> None:
        """Block the main thread until a stream is done; the compute stream if none is given."""
        self.main.wait((stream or self.compute).tail, name)
        self.main.work(Phase.SYNC, name, self.host.ns(self.host.host.sync_s))

    def item(self, name: str, stream: Stream | None = None, gpu: str = "") -> None:
        """Read a scalar: a small copy to the host, then a stream synchronise.

        The scalar is on the worker's own GPU and compute stream, unless others are given.
        """
        stream = stream or self.compute
        self.main.work(Phase.SYNC, name, self.host.ns(self.host.host.copy_launch_s))
        duration = self.cluster.copy_ns(gpu or self.gpu, self.home, SCALAR_BYTES)
        stream.op(Phase.SYNC, name, self.main.now, duration)
        self.synchronise(name, stream)

    def forward(self) -> None:
        """Launch forward and the loss."""
        self.main.launch(self.compute, Phase.FORWARD, self.runs.forward(self.batch))
        self.main.launch(self.compute, Phase.LOSS, self.runs.loss(self.batch))
        if self.scenario.sync == "item-after-loss" and not self.scenario.evaluation:
            self.item("loss.item()")

    def begin_backward(self) -> None:
        """Hand over to the autograd thread; the main thread is blocked from here on."""
        self.autograd.resume(self.main.now)
        run = self.runs.loss_backward(self.batch)
        self.autograd.launch(self.compute, Phase.LOSS_BACKWARD, run)

    def backward(self, run: Run, slowdown: Slowdown | None = None) -> None:
        """Launch a part of backward."""
        self.autograd.launch(self.compute, Phase.BACKWARD, run, slowdown)

    def end_backward(self) -> None:
        """Return to the main thread. The host does not wait for the device."""
        self.main.resume(self.autograd.now)

    def whole_backward(self, *, accumulate: bool) -> None:
        """Launch all of backward, without communication."""
        self.begin_backward()
        hooks = self.runs.gradient_hooks(accumulate=accumulate)
        self.backward(self.runs.backward(self.batch, hooks))
        self.end_backward()

    def keeps_gradients(self, micro_step: int) -> bool:
        """Return whether `.grad` exists when this micro-step adds to it."""
        return micro_step > 0 or not self.scenario.set_to_none

    def optimizer(self) -> None:
        """Launch optimizer.step()."""
        host = self.host.host
        tensors = sum(p.trainable for p in self.workload.parameters)
        cost = self.host.ns(host.optimizer_step_s) + self.host.ns(host.optimizer_tensor_s, tensors)
        self.main.work(Phase.OPTIMIZER, "optimizer.step()", cost)
        self.main.launch(self.compute, Phase.OPTIMIZER, self.runs.optimizer())

    def finish(self) -> None:
        """End the iteration with the loop's sync point, and note when it was done."""
        if self.scenario.sync == "item-after-step" or (
            self.scenario.evaluation and self.scenario.sync != "none"
        ):
            self.item("loss.item()")
        self.cluster.finish_step(self.rank, self.compute.tail)


def copy_hook(runs: Runs, after: int, name: str, nbytes: int, host: int) -> Hook:
    """Return a kernel that reads and writes `nbytes` when a gradient is ready."""
    return Hook(
        after=after,
        name=name,
        host=host,
        duration=runs.device.memory_ns((ADD_BYTES - 1) * nbytes, runs.straggle),
    )
