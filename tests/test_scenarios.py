"""Cases that users reported: inputs and the answer they should have had.

Each test names its issue thread. A prediction is told only what the case may be calibrated with; the
tolerance is that of the case.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpsim import files
from dpsim.answer import predict
from dpsim.hardware import Basis, HardwareProfile, Network, Quantity
from dpsim.prediction import Prediction
from dpsim.scenario import DataParallelOptions, RingOptions, Scenario, ServerOptions
from dpsim.timeline import Phase
from dpsim.units import NS_PER_MS, NS_PER_S, NS_PER_US
from dpsim.workload import Workload
from tests.synthetic import workload


def model(name: str) -> Workload:
    return files.find(Workload, name)


def profile(name: str) -> HardwareProfile:
    return files.find(HardwareProfile, name)


def network(name: str, bytes_per_s: float | None = None) -> Network:
    """Return a shipped network, with a measured rate if one is given."""
    found = files.find(Network, name)
    if bytes_per_s is None:
        return found
    rate = Quantity(value=bytes_per_s, basis=Basis.MEASURED, source="the report")
    return replace(found, bandwidth_bytes_per_s=rate, flow_bytes_per_s=rate)


def batches(prediction: Prediction) -> list[int]:
    """Return the samples of every rank."""
    return [use.batch for use in prediction.ranks for _ in range(use.count)]


# 1. How DataParallel cuts an uneven batch
# https://github.com/m-bain/frozen-in-time/pull/23, https://github.com/pytorch/pytorch/issues/15161


@pytest.mark.parametrize(
    ("batch", "gpus", "chunks", "balance", "nearest"),
    [
        (10, 4, [3, 3, 3, 1], 83.3, None),
        (9, 4, [3, 3, 3, 0], 75.0, 8),
        (5, 4, [2, 2, 1, 0], 62.5, 4),
        (36, 7, [6] * 6 + [0], 85.7, 35),
        (9, 8, [2, 2, 2, 2, 1, 0, 0, 0], 56.2, 8),
        (17, 8, [3, 3, 3, 3, 3, 2, 0, 0], 70.8, 16),
        (25, 8, [4] * 6 + [1, 0], 78.1, 24),
        (33, 8, [5] * 6 + [3, 0], 82.5, 32),
        (41, 8, [6] * 6 + [5, 0], 85.4, 40),
        (3, 8, [1, 1, 1, 0, 0, 0, 0, 0], 37.5, 8),
    ],
)
def test_data_parallel_cuts_a_batch_as_torch_chunk_does(
    batch: int, gpus: int, chunks: list[int], balance: float, nearest: int | None
) -> None:
    scenario = Scenario(mode="dp", gpus=gpus, batch=batch)
    it = predict(model("small-cnn"), profile("v100-dgx1"), scenario)
    assert chunks == batches(it)
    assert pytest.approx(balance, abs=0.06) == 100 * batch / (gpus * max(batches(it)))
    idle = chunks.count(0)
    expected = (
        f"{idle} of {gpus} GPUs get no samples: DataParallel cuts {batch} into chunks of "
        f"{chunks[0]}. A batch of {nearest} fills all."
    )
    assert (() if nearest is None else (expected,)) == it.warnings


def test_the_step_follows_the_largest_chunk() -> None:
    """41 and 48 samples on 8 GPUs are both cut into sixes: only the last GPUs differ."""
    steps = [
        predict(
            model("resnet50"), profile("v100-dgx1"), Scenario(mode="dp", gpus=8, batch=batch)
        ).phases
        for batch in (41, 48)
    ]
    backward = [
        next(row.device_ns for row in rows if row.phase is Phase.BACKWARD) for rows in steps
    ]
    assert backward[0] == backward[1]


# 8. Launch-bound net in threads: https://github.com/dmlc/dgl/issues/838

FORWARD_ONLY = DataParallelOptions(keep_replicas=True)


def deep_mlp_ms(gpus: int, mode: str = "dp") -> float:
    scenario = Scenario(
        mode=mode,
        gpus=gpus,
        batch=256 * gpus,
        scaling="weak",
        evaluation=mode == "ring",
        anchor_step_s=12.39e-3,
        data_parallel=FORWARD_ONLY,
    )
    return predict(model("deep-mlp"), profile("v100-dgx1"), scenario).step_ns / NS_PER_MS


@pytest.mark.parametrize(("gpus", "measured"), [(2, 21.63), (4, 41.38), (8, 79.0)])
def test_a_launch_bound_net_slows_down_with_every_thread(gpus: int, measured: float) -> None:
    assert pytest.approx(measured, rel=0.10) == deep_mlp_ms(gpus)


def test_a_launch_bound_net_stays_flat_with_a_process_for_each_gpu() -> None:
    assert pytest.approx(12.39, rel=0.01) == deep_mlp_ms(8, "ring")


@pytest.mark.parametrize(("width", "scales"), [(128, False), (4096, True)])
def test_wide_layers_make_threads_scale_again(width: int, scales: bool) -> None:
    wide = workload([(width, width)] * 100, flops=200.0 * width**2, input_bytes=4.0 * width)
    scenario = Scenario(
        mode="dp", gpus=8, batch=8 * 256, scaling="weak", data_parallel=FORWARD_ONLY
    )
    it = predict(wide, profile("v100-dgx1"), scenario)
    assert (it.efficiency > 0.9) == scales
    assert ("device" if scales else "host") == it.bound


# 10. Replicate cost per tensor: https://github.com/pytorch/pytorch/issues/3930


def broadcast_ns(tensors: int, elements: int) -> int:
    net = workload([(elements,)] * tensors)
    it = predict(net, profile("gtx1080ti"), Scenario(mode="dp", gpus=2, batch=2))
    row = next(row for row in it.phases if row.phase is Phase.BROADCAST)
    return max(row.host_ns, row.device_ns)


def test_replicating_many_small_tensors_is_bound_by_their_count() -> None:
    many, flat = broadcast_ns(3000, 3500), broadcast_ns(1, 3000 * 3500)
    assert pytest.approx(4 * NS_PER_MS, rel=0.15) == flat  # the thread's own 4 ms
    assert many > 4 * flat
    assert 5 * NS_PER_US < (many - flat) / 3000 < 20 * NS_PER_US


# 12. Gigabit Ethernet: https://github.com/horovod/horovod/issues/752 and /693

CASE_12 = {"a": (4, 32, 32 / 171), "b": (8, 64, 0.42)}
"""GPUs, batch of each, seconds of one alone. All on two nodes."""


def gigabit(case: str, accumulation: int = 1, bucket_bytes: float | None = None) -> Prediction:
    """Return the prediction over a ring, whose bytes the case counts.

    NCCL 2.4 and later take a tree over two nodes, which crosses the network with fewer bytes.
    """
    gpus, batch, step_s = CASE_12[case]
    scenario = Scenario(
        mode="ring",
        gpus=gpus,
        nodes=2,
        batch=gpus * batch,
        scaling="weak",
        accumulation=accumulation,
        anchor_step_s=step_s,
        ring=RingOptions(all_reduce="ring", bucket_bytes=bucket_bytes),
    )
    return predict(model("resnet50"), profile("gtx1080ti"), scenario, network("1gbe"))


def test_gigabit_ethernet_makes_two_nodes_slower_than_one() -> None:
    a, b = gigabit("a"), gigabit("b")
    assert 0.75 * 1.30 < a.step_ns / NS_PER_S < 1.25 * 1.49
    assert 0.75 * 21.5 < a.throughput_per_s / 4 < 1.25 * 24.5
    assert a.speedup < 1
    assert 264 < b.throughput_per_s < 337  # and 608 on one node


def test_bucket_size_does_not_help_where_the_network_is_the_bottleneck() -> None:
    """Beyond this range one bucket holds all, and what is left to lose is the overlap."""
    steps = [gigabit("a", bucket_bytes=size).step_ns for size in (None, 4e6, 10e6, 50e6)]
    assert max(steps) / min(steps) < 1.04


@pytest.mark.parametrize(("case", "needed"), [("a", 7), ("b", 4)])
def test_accumulation_is_the_lever_of_the_right_size(case: str, needed: int) -> None:
    assert gigabit(case, needed - 1).efficiency < 0.5 <= gigabit(case, needed).efficiency


# 15. Mixed cards: https://github.com/huggingface/pytorch-image-models/pull/580


def mixed_cards(split: tuple[int, ...], anchor_s: float) -> Prediction:
    """Return the prediction for two A6000, which take 2/3 of the time, and two 2080 Ti."""
    scenario = Scenario(
        mode="ring",
        gpus=4,
        batch=sum(split),
        split=split,
        scaling="weak",
        stragglers=((0, 2 / 3), (1, 2 / 3)),
        anchor_step_s=anchor_s,
        anchor_batch=200,
    )
    return predict(model("efficientnet-b0"), profile("rtx2080ti"), scenario)


def test_a_split_by_speed_makes_mixed_cards_faster() -> None:
    """The 0.40 s are a step of all four with equal batches, so they are met there."""
    equal_split, by_speed = (200, 200, 200, 200), (300, 300, 200, 200)
    beside = mixed_cards(equal_split, 0.40).step_ns / NS_PER_S - 0.40
    equal = mixed_cards(equal_split, 0.40 - beside)
    assert pytest.approx(2000, rel=0.03) == equal.throughput_per_s
    assert pytest.approx(2500, rel=0.03) == mixed_cards(by_speed, 0.40 - beside).throughput_per_s
    fast, slow = equal.ranks[0], equal.ranks[-1]
    assert (200, 200) == (fast.batch, slow.batch)
    assert fast.exposed_ns >= 0.33 * equal.step_ns  # it waits for the slow cards
    assert slow.exposed_ns < 0.15 * equal.step_ns


# 17. Parameter server limited by its protocol: https://github.com/tensorflow/tensorflow/issues/4498

CONVOLUTIONS = [(64, 3, 5, 5), (128, 64, 5, 5), (256, 128, 3, 3)]
THREE_CONVOLUTIONS_TWO_DENSE = [*CONVOLUTIONS, (1024, 8192), (10, 1024)]
"""The thread's net has 3 convolutions, 2 dense layers and 9 million parameters."""


def one_server(shapes: list[tuple[int, ...]], bytes_per_s: float) -> Prediction:
    scenario = Scenario(
        mode="ps",
        gpus=4,
        nodes=4,
        batch=4 * 128,
        scaling="weak",
        anchor_step_s=128 / 600,
        server=ServerOptions(servers=1, placement="dedicated"),
    )
    net = workload(shapes, flops=5e9)
    return predict(net, profile("gtx1080ti"), scenario, network("40gbe", bytes_per_s))


@pytest.mark.parametrize(("bytes_per_s", "low", "high"), [(161e6, 255, 460), (5e9, 1900, 2400)])
def test_the_measured_transport_drives_a_parameter_server_not_the_nic(
    bytes_per_s: float, low: float, high: float
) -> None:
    it = one_server(THREE_CONVOLUTIONS_TWO_DENSE, bytes_per_s)
    assert low < it.throughput_per_s < high


def test_keys_are_pushed_and_pulled_while_others_are() -> None:
    """A server at r bytes/s: the first of k gradients is ready after forward and 1/k of backward;

    then all are pushed, one after the other, and the last is pulled.
    """
    count, total = 10, 36e6
    it = one_server([(round(total / 4 / count),)] * count, 161e6)
    server = 4 * total / 161e6
    alone = 128 / 600
    expected = alone / 3 + alone * 2 / 3 / count + server * (1 + 1 / count)
    assert pytest.approx(expected, rel=0.01) == it.step_ns / NS_PER_S


# What every user asks first


@pytest.mark.parametrize("name", ["gtx1080ti", "p100-dgx1", "v100-dgx1", "rtx3090", "a100-sxm"])
def test_a_small_net_is_slower_with_data_parallel_than_on_one_gpu(name: str) -> None:
    it = predict(model("small-cnn"), profile(name), Scenario(mode="dp", gpus=4, batch=64))
    assert it.speedup < 1
    assert "host" == it.bound


@pytest.mark.parametrize("mode", ["dp", "ring", "ps"])
def test_resnet50_with_a_full_batch_is_faster_on_four_gpus(mode: str) -> None:
    scenario = Scenario(mode=mode, gpus=4, batch=4 * 64)
    it = predict(model("resnet50"), profile("v100-dgx1"), scenario)
    assert 2.5 < it.speedup < 4


@pytest.mark.parametrize(("name", "batch"), [("bert-base", 16), ("vgg16", 32)])
def test_processes_beat_threads_on_large_nets(name: str, batch: int) -> None:
    """Both pay for 440 and 553 MB of parameters; dp for a copy of them to each GPU as well."""
    efficiency = {
        mode: predict(
            model(name),
            profile("v100-dgx1"),
            Scenario(mode=mode, gpus=4, batch=4 * batch, scaling="weak"),
        ).efficiency
        for mode in ("dp", "ring")
    }
    assert 0.5 < efficiency["dp"] < efficiency["ring"] < 1


def test_vgg_suffers_most_where_the_network_is_slow() -> None:
    """553 MB for 31 GFLOP an image against ResNet-50's 102 MB for 8."""
    efficiency = {
        name: predict(
            model(name),
            profile("gtx1080ti"),
            Scenario(mode="ring", gpus=8, nodes=2, batch=256, scaling="weak"),
            network("10gbe"),
        ).efficiency
        for name in ("vgg16", "resnet50")
    }
    assert efficiency["vgg16"] < efficiency["resnet50"]
