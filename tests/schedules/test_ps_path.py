"""--path: gradients go from GPU to GPU, or through host memory."""

from __future__ import annotations

import pytest

from dpsim.errors import InfeasibleError
from dpsim.files import find
from dpsim.hardware import HardwareProfile
from dpsim.scenario import Scenario, ServerOptions
from dpsim.simulate import Simulation, simulate
from dpsim.workload import Workload

VGG = find(Workload, "vgg16")
A100 = find(HardwareProfile, "a100-sxm")
DIRECT, STAGED = "gpu1>nvswitch0", "memory"


def run(path: str, placement: str = "auto") -> Simulation:
    options = ServerOptions(path=path, placement=placement)  # type: ignore[arg-type]
    return simulate(VGG, A100, Scenario(mode="ps", gpus=4, batch=16, server=options))


def test_auto_goes_from_gpu_to_gpu_where_they_reach_each_other() -> None:
    assert run("gpu").step_ns == run("auto").step_ns
    assert VGG.gradient_bytes == run("auto").cluster.links[DIRECT]


def test_the_way_through_host_memory_crosses_it_and_not_nvlink() -> None:
    direct, staged = run("gpu"), run("host")
    assert 0 == staged.cluster.links[DIRECT]
    # Three workers push S and pull S, and each crossing writes and reads host memory.
    moved = staged.cluster.links[STAGED] - direct.cluster.links[STAGED]
    assert 2 * 2 * 3 * VGG.gradient_bytes == moved
    assert staged.step_ns > direct.step_ns


def test_gpu_to_gpu_needs_a_server_on_a_gpu() -> None:
    with pytest.raises(InfeasibleError, match="^--path gpu needs a server on a GPU"):
        run("gpu", "cpu")
