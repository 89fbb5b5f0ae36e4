"""Buckets against DistributedDataParallel itself: two processes on gloo, three iterations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from calibrate.trace import trace
from dpsim.scenario import RingOptions
from dpsim.schedules._buckets import buckets, rebuild_iteration
from dpsim.units import MIB
from dpsim.workload import Tensor, Workload

PROCESS = Path(__file__).parent / "ddp_process.py"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
TIMEOUT_S = 120  # two interpreters that import torch take 10 s on two busy cores

OPTIONS = {
    "default": RingOptions(),
    "find_unused_parameters": RingOptions(find_unused_parameters=True),
    "static_graph": RingOptions(static_graph=True),
    "bucket_cap_mb": RingOptions(bucket_bytes=4 * MIB),
    "bucket_cap_mb_list": RingOptions(bucket_list_bytes=(2 * MIB, 8 * MIB, 32 * MIB)),
}
UNUSED = {
    "unused, find_unused_parameters": RingOptions(find_unused_parameters=True),
    "unused, static_graph": RingOptions(static_graph=True),
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("ddp")
    # Only the loopback interface: a machine without a resolvable name has no other.
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROCESS), str(rank), str(directory)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [0, 0] == [process.returncode for process in processes], "\n".join(errors)
    found: dict[str, Any] = json.loads((directory / "buckets.json").read_text())
    return found


@pytest.fixture(scope="module")
def traced() -> Workload:
    return trace(f"{PROCESS}:model", inputs=["512"], loss="sum", optimizers=["sgd"])


@pytest.fixture(scope="module")
def traced_with_unused() -> Workload:
    return trace(f"{PROCESS}:with_unused", inputs=["8"], loss="sum", optimizers=["sgd"])


def nbytes(tensor: Tensor) -> int:
    return tensor.nbytes


def simulated(workload: Workload, options: RingOptions) -> list[list[Any]]:
    parameters = workload.parameters
    return [
        [
            [[parameters[i].name for i in bucket], sum(parameters[i].nbytes for i in bucket)]
            for bucket in buckets(workload, options, iteration, nbytes)
        ]
        for iteration in (1, 2, 3)
    ]


@pytest.mark.parametrize("setting", OPTIONS)
def test_order_and_bytes_are_those_of_pytorch(
    live: dict[str, Any], traced: Workload, setting: str
) -> None:
    if setting not in live:
        pytest.skip(f"this PyTorch has no {setting}")
    assert live[setting] == simulated(traced, OPTIONS[setting])


@pytest.mark.parametrize("setting", UNUSED)
def test_parameters_without_gradient_are_where_pytorch_has_them(
    live: dict[str, Any], traced_with_unused: Workload, setting: str
) -> None:
    assert live[setting] == simulated(traced_with_unused, UNUSED[setting])


def test_the_sizes_are_those_that_were_published(traced: Workload) -> None:
    def sizes(setting: str, iteration: int) -> list[int]:
        return [size for _, size in simulated(traced, OPTIONS[setting])[iteration - 1]]

    everything = sum(p.nbytes for p in traced.parameters)
    assert [everything] == sizes("default", 1) == sizes("static_graph", 2)
    assert [8.43, 27.28] == [round(size / 1e6, 2) for size in sizes("default", 2)]
    assert [0.05, 33.6, 2.1] == [
        round(s / 1e6, 2 if s < 1e6 else 1) for s in sizes("find_unused_parameters", 3)
    ]
    assert [8.43, 16.79, 8.40, 2.10] == [round(s / 1e6, 2) for s in sizes("bucket_cap_mb", 3)]
    assert [25.2, 8.39, 2.1] == [
        round(s / 1e6, d) for s, d in zip(sizes("bucket_cap_mb_list", 1), (1, 2, 1), strict=True)
    ]
    assert [8.43, 16.79, 10.5] == [round(s / 1e6, 2) for s in sizes("bucket_cap_mb_list", 2)]


def test_when_buckets_are_built_again() -> None:
    expected = {
        "default": 2,
        "find_unused_parameters": None,
        "static_graph": 3,
        "bucket_cap_mb": 2,
        "bucket_cap_mb_list": 2,
    }
    assert expected == {name: rebuild_iteration(options) for name, options in OPTIONS.items()}
