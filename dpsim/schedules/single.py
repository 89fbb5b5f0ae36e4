"""One GPU: forward, backward, optimizer."""

from __future__ import annotations

from dpsim.engine import Cluster, Program
from dpsim.errors import InfeasibleError
from dpsim.schedules._registry import SCHEDULES
from dpsim.schedules._worker import Worker


@SCHEDULES.add
def single(cluster: Cluster) -> None:
    """Start the one process. Whether host or device bounds it comes out by itself.

    Raises:
        InfeasibleError: The scenario asks for several GPUs.
    """
    gpus = cluster.scenario.gpus
    if gpus != 1:
        raise InfeasibleError(
            f"--gpus must be 1 in mode 'single', got {gpus}. "
            "Choose a mode that uses several GPUs: dp, ps or ring."
        )
    cluster.start(program(cluster), "the process")


def program(cluster: Cluster) -> Program:
    """Run the training loop on GPU 0."""
    worker = Worker(cluster, cluster.scenario.device_ids or (0,), cluster.scenario.batch)
    for iteration in range(1, cluster.iterations + 1):
        for micro_step in range(cluster.scenario.accumulation):
            worker.begin(iteration, micro_step)
            worker.forward()
            if not cluster.scenario.evaluation:
                worker.whole_backward(accumulate=worker.keeps_gradients(micro_step))
        if not cluster.scenario.evaluation:
            worker.optimizer()
        worker.finish()
    yield from ()
