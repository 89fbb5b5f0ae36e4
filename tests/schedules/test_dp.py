"""nn.DataParallel, phase by phase: who copies what, when, and what the host pays for it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from dpsim.collectives import Call
from dpsim.engine import Cluster
from dpsim.errors import InfeasibleError
from dpsim.scenario import DataParallelOptions
from dpsim.schedules._runs import Runs
from dpsim.simulate import Simulation
from dpsim.timeline import Phase
from dpsim.units import to_ns
from dpsim.workload import Linear
from tests.schedules.small import (
    chain,
    free_device,
    free_host,
    host_ns,
    machine,
    model,
    network,
    run,
    spans,
    without_lock,
)

GPUS = 4
BATCH = 64
BIG = chain(4, per_sample=4e7, width=1024, buffers=4)  # 1 ms and more a kernel


def dp(workload: Any = BIG, profile: Any = None, **options: Any) -> Simulation:
    parallel = options.pop("parallel", DataParallelOptions())
    chosen = {"gpus": GPUS, "batch": BATCH} | options
    return run(workload, profile or machine(), mode="dp", data_parallel=parallel, **chosen)


def end_of_forward(done: Simulation, rank: int) -> int:
    return max(s.end for s in spans(done, Phase.FORWARD) if s.rank == rank)


# Phases in order


def test_the_phases_follow_each_other_on_gpu_0() -> None:
    first = {}
    for span in spans(dp(set_to_none=False)):
        if span.rank == 0:
            first.setdefault(span.phase, span.start)
    expected = [
        Phase.LOOP,
        Phase.INPUT,
        Phase.SCATTER,
        Phase.BROADCAST,
        Phase.BUFFERS,
        Phase.FORWARD,
        Phase.GATHER,
        Phase.LOSS,
        Phase.LOSS_BACKWARD,
        Phase.SCATTER_GRADIENTS,
        Phase.BACKWARD,
        Phase.REDUCE,
        Phase.ACCUMULATE,
        Phase.OPTIMIZER,
        Phase.SYNC,
    ]
    assert expected == list(first)


def test_resnet50_has_24_nccl_groups_a_step() -> None:
    done = dp(model("resnet50"))
    for rank in range(GPUS):
        names = [s.name for s in spans(done) if s.rank == rank]
        assert (9 + 2, 13) == (names.count("broadcast"), names.count("reduce"))


def test_nothing_is_launched_before_replicate_is_done_for_all() -> None:
    done = dp()
    built = max(s.end for s in spans(done, Phase.REPLICATE, track="main thread"))
    for i in range(GPUS):
        assert built < min(s.start for s in spans(done, track=f"replica thread {i}"))


def test_gather_starts_when_the_slowest_thread_has_launched_its_forward() -> None:
    done = dp()
    launched = max(
        s.end for i in range(GPUS) for s in spans(done, Phase.FORWARD, track=f"replica thread {i}")
    )
    gather = spans(done, Phase.GATHER, track="main thread")
    assert launched <= gather[0].start


def test_the_reduction_overlaps_with_no_backward_kernel() -> None:
    done = dp(split=(40, 8, 8, 8))
    last = max(s.end for s in spans(done, Phase.BACKWARD))
    reduce = [s for s in spans(done, Phase.REDUCE) if s.name == "reduce"]
    assert last <= min(
        s.end - done.cluster.groups[0].cost_ns(Call(collective="reduce", nbytes=s.nbytes))
        for s in reduce
    )


def test_only_gpu_0_has_an_optimizer() -> None:
    assert {0} == {s.rank for s in spans(dp(), Phase.OPTIMIZER)}


# Copies: the source's stream, with a barrier against the target's


@pytest.mark.parametrize("split", [(16, 16, 16, 16), (4, 28, 16, 16), (30, 2, 16, 16)])
def test_gather_is_a_chain_in_device_order(split: tuple[int, ...]) -> None:
    workload = replace(BIG, output_bytes=Linear(per_sample=1e6))
    done = dp(workload, split=split)
    copies = spans(done, Phase.GATHER)
    assert list(range(GPUS)) == [s.rank for s in copies]
    end = 0
    for rank, span in enumerate(copies):
        nbytes = split[rank] * 1_000_000
        copy = done.cluster.copy_ns(f"gpu{rank}", "gpu0", nbytes)
        end = max(end, end_of_forward(done, rank)) + copy
        assert (end, nbytes) == (span.end, span.nbytes)


def test_a_copy_takes_latency_and_bytes_over_bandwidth() -> None:
    cluster = dp().cluster
    profile, route = cluster.machine.profile, cluster.machine.route("gpu0", "gpu3")
    seconds = profile.device.copy_latency_s.value + route.latency_s
    seconds += 1e7 / route.bandwidth_bytes_per_s
    assert to_ns(seconds) == cluster.copy_ns("gpu0", "gpu3", 10_000_000)


def test_scatter_leaves_the_first_chunk_where_it_is_and_is_serial_on_gpu_0() -> None:
    done = dp()
    copies = spans(done, Phase.SCATTER)
    assert [(0, f"copy to gpu{i}") for i in (1, 2, 3)] == [(s.rank, s.name) for s in copies]
    assert [int(6e5 * 16)] * 3 == [s.nbytes for s in copies]
    assert all(a.end <= b.start for a, b in itertools.pairwise(copies))


def test_the_output_gpu_starts_its_backward_after_all_copies_of_gradients() -> None:
    workload = replace(BIG, output_bytes=Linear(per_sample=1e6))
    done = dp(workload, parallel=DataParallelOptions(output_device=2))
    copies = spans(done, Phase.SCATTER_GRADIENTS)
    assert [(2, f"copy to gpu{i}") for i in (0, 1, 3)] == [(s.rank, s.name) for s in copies]
    start = min(s.start for s in spans(done, Phase.BACKWARD) if s.rank == 2)
    assert copies[-1].end <= start


def test_several_outputs_are_gathered_one_after_the_other() -> None:
    done = dp(replace(BIG, output_tensors=3, output_bytes=Linear(fixed=1, per_sample=1e6)))
    copies = spans(done, Phase.GATHER)
    assert list(range(GPUS)) * 3 == [s.rank for s in copies]
    assert GPUS * 16_000_001 == sum(s.nbytes for s in copies)
    back = spans(done, Phase.SCATTER_GRADIENTS)
    assert 3 * 3 == len(back)
    assert 3 * 16_000_001 == sum(s.nbytes for s in back)


def test_slices_of_an_inner_dimension_cost_temporaries_without_peer_access() -> None:
    def scatter_ns(profile: str, dim: int) -> int:
        done = dp(profile=machine(profile), parallel=DataParallelOptions(dim=dim))
        return sum(s.length for s in spans(done, Phase.SCATTER))

    assert scatter_ns("a100-sxm", 0) == scatter_ns("a100-sxm", 1)
    pieces = dp(profile=machine("rtx2080ti")).cluster.device.memory_ns(2 * int(6e5 * 16))
    assert scatter_ns("rtx2080ti", 0) + 3 * 2 * pieces == scatter_ns("rtx2080ti", 1)


# NCCL, or copies


@pytest.mark.parametrize("name", ["a100-sxm", "rtx2080ti", "v100-dgx1"])
def test_without_nccl_a_broadcast_is_n_minus_1_copies_of_everything(name: str) -> None:
    profile = machine(name)
    done = dp(model("resnet50"), profile, parallel=DataParallelOptions(nccl=False))
    copies = [s for s in spans(done, Phase.BROADCAST) if s.name.startswith("copy")]
    assert 9 * (GPUS - 1) == len(copies)
    assert {0} == {s.rank for s in copies}
    expected = 0.0
    for other in range(1, GPUS):
        route = done.cluster.machine.route("gpu0", f"gpu{other}")
        latency = profile.device.copy_latency_s.value + route.latency_s
        expected += 102_228_128 / route.bandwidth_bytes_per_s + 9 * latency
    # Each copy is rounded to a nanosecond.
    assert to_ns(expected) == pytest.approx(sum(s.length for s in copies), abs=len(copies))


def test_without_nccl_a_reduction_is_copies_with_adds_between_on_gpu_0() -> None:
    done = dp(model("resnet50"), parallel=DataParallelOptions(nccl=False))
    copies = [s for s in spans(done, Phase.REDUCE) if s.name == "copy to gpu0"]
    adds = [s for s in spans(done, Phase.REDUCE) if s.name == "add"]
    assert [i for _ in range(13) for i in (1, 2, 3)] == [s.rank for s in copies]
    assert {0} == {s.rank for s in adds}
    assert len(copies) == len(adds)
    for copied, added, after in zip(copies, adds, [*copies[1:], adds[-1]], strict=True):
        assert copied.end <= added.start
        assert added.end <= after.start or after is adds[-1]
    assert 3 * 102_228_128 == sum(s.nbytes for s in copies)


def test_a_sparse_gradient_is_never_sent_by_nccl() -> None:
    first = replace(BIG.parameters[0], sparse_gradient=True)
    workload = replace(BIG, parameters=(first, *BIG.parameters[1:]))
    done = dp(workload)
    copies = [s for s in spans(done, Phase.REDUCE) if s.name == "copy to gpu0"]
    assert [first.nbytes] * 3 == [s.nbytes for s in copies]
    groups = [s for s in spans(done, Phase.REDUCE) if s.name == "reduce" and s.rank == 0]
    assert 3 * first.nbytes == sum(s.nbytes for s in groups)
    assert max(s.end for s in copies) <= min(s.start for s in groups)


# What travels


def test_frozen_and_unused_parameters_are_reduced_and_get_zeros() -> None:
    workload = chain(4, width=1024, per_sample=4e7, kinds=("frozen", "unused"))
    done = dp(workload)
    for phase, name in ((Phase.BROADCAST, "broadcast"), (Phase.REDUCE, "reduce")):
        sent = sum(s.nbytes for s in spans(done, phase) if s.name == name and s.rank == 0)
        assert sum(p.nbytes for p in workload.parameters) == sent
    zeros = [s for s in spans(done, Phase.REDUCE) if s.name == "zeros"]
    assert [2] * GPUS == [sum(s.rank == rank for s in zeros) for rank in range(GPUS)]


def test_buffers_are_broadcast_in_evaluation_too_and_nothing_comes_back() -> None:
    done = dp(evaluation=True)
    names = [s.name for s in spans(done) if s.rank == 0]
    assert (2 + 2, 0) == (names.count("broadcast"), names.count("reduce"))
    assert not spans(done, Phase.BACKWARD, Phase.OPTIMIZER)
    assert done.cluster.messages["buffer chunks"] == (2 * 256, 2 * 512)


@pytest.mark.parametrize("accumulation", [2, 3])
def test_accumulation_pays_broadcast_and_reduction_each_time(accumulation: int) -> None:
    done = dp(accumulation=accumulation)
    names = [s.name for s in spans(done) if s.rank == 0]
    assert (2 + 2) * accumulation == names.count("broadcast")
    assert 2 * accumulation == names.count("reduce")
    adds = [s for s in spans(done, Phase.ACCUMULATE) if s.name.endswith("add to .grad")]
    assert 4 * (accumulation - 1) == len(adds)


def test_gradients_that_are_kept_cost_one_add_a_parameter_and_one_zeroing_a_step() -> None:
    for accumulation in (1, 3):
        done = dp(set_to_none=False, accumulation=accumulation)
        assert 4 * accumulation == len(spans(done, Phase.ACCUMULATE))
        assert ["zero_grad"] == [s.name for s in spans(done, Phase.LOOP)]
    assert not spans(dp(), Phase.ACCUMULATE, Phase.LOOP)


def test_autocast_casts_gradients_in_every_replica_before_they_are_reduced() -> None:
    done = dp(precision="amp")
    casts = [s for s in spans(done, Phase.BACKWARD) if s.name.endswith("cast gradient")]
    assert [4] * GPUS == [sum(s.rank == rank for s in casts) for rank in range(GPUS)]
    for rank in range(GPUS):
        reduced = min(s.start for s in spans(done, Phase.REDUCE) if s.rank == rank)
        assert max(s.end for s in casts if s.rank == rank) <= reduced
    assert not [s for s in spans(dp()) if s.name.endswith("cast gradient")]


# Where the loss is


def test_a_loss_in_forward_shrinks_what_is_gathered_to_one_scalar_a_gpu() -> None:
    plain, inside = dp(), dp(parallel=DataParallelOptions(loss_in_forward=True))
    assert [4e3 * 16] * GPUS == [s.nbytes for s in spans(plain, Phase.GATHER)]
    assert [4] * GPUS == [s.nbytes for s in spans(inside, Phase.GATHER)]
    assert [4] * (GPUS - 1) == [s.nbytes for s in spans(inside, Phase.SCATTER_GRADIENTS)]
    for phase in (Phase.LOSS, Phase.LOSS_BACKWARD):
        assert ["mean"] == [s.name for s in spans(inside, phase)]


def test_a_loss_in_forward_sends_the_labels_with_the_inputs() -> None:
    workload = replace(BIG, target_bytes=Linear(per_sample=1e5))
    done = dp(workload, parallel=DataParallelOptions(loss_in_forward=True))
    assert [9_600_000] * 3 + [1_600_000] * 3 == [s.nbytes for s in spans(done, Phase.SCATTER)]
    assert 3 == len(spans(dp(workload), Phase.SCATTER))


def test_a_model_that_returns_its_loss_gathers_all_it_returns_but_sends_scalars_back() -> None:
    workload = chain(4, per_sample=4e7, loss_inside=True, outputs=2, output_bytes=1e5)
    done = dp(workload)
    assert GPUS * 1_600_000 == sum(s.nbytes for s in spans(done, Phase.GATHER))
    assert [4] * (GPUS - 1) == [s.nbytes for s in spans(done, Phase.SCATTER_GRADIENTS)]
    ranks = [s.rank for s in spans(done, Phase.BACKWARD) if "loss_backward" in s.name]
    assert list(range(GPUS)) == sorted(ranks)


def test_another_output_device_takes_gather_and_loss_but_not_the_optimizer() -> None:
    done = dp(parallel=DataParallelOptions(output_device=3))
    assert {"copy to gpu3"} == {s.name for s in spans(done, Phase.GATHER)}
    for phase in (Phase.LOSS, Phase.LOSS_BACKWARD, Phase.SYNC):
        assert {3} == {s.rank for s in spans(done, phase)}
    assert {0} == {s.rank for s in spans(done, Phase.OPTIMIZER)}
    assert {0, 3} == {s.rank for s in spans(done, Phase.INPUT)}  # labels go to the loss


def test_an_output_device_without_samples_still_takes_the_loss() -> None:
    done = dp(batch=9, gpus=8, parallel=DataParallelOptions(output_device=7))
    assert {7} == {s.rank for s in spans(done, Phase.LOSS)}
    assert [2, 2, 2, 2, 1, 0, 0, 0] == [done.cluster.batches[i] for i in range(8)]
    assert set(range(5)) == {s.rank for s in spans(done, Phase.FORWARD)}


def test_gathering_on_the_cpu_blocks_and_puts_the_loss_on_the_host() -> None:
    done = dp(parallel=DataParallelOptions(output_device=-1))
    copies = spans(done, Phase.GATHER)
    assert ["copy to host"] * GPUS == [s.name for s in copies]
    assert not spans(done, Phase.LOSS, Phase.LOSS_BACKWARD, Phase.SYNC)
    for phase in (Phase.LOSS, Phase.LOSS_BACKWARD):
        assert ["on the CPU"] == [s.name for s in spans(done, phase, track="main thread")]
    # The copies are serial: each blocks the main thread, even from different GPUs.
    assert all(a.end <= b.start for a, b in itertools.pairwise(copies))
    back = spans(done, Phase.SCATTER_GRADIENTS, track="copies from host")
    assert list(range(GPUS)) == [s.rank for s in back]
    moved = int(BIG.input_bytes.at(BATCH))  # without labels, which stay on the CPU
    assert [moved] == [s.nbytes for s in spans(done, Phase.INPUT)]


# Where the input is


def test_an_input_on_the_cpu_goes_to_each_gpu_directly_on_a_stream_of_its_own() -> None:
    done = dp(parallel=DataParallelOptions(input_on="cpu"), pinned_input=True)
    copies = spans(done, Phase.SCATTER, track="copies from host")
    assert list(range(GPUS)) == [s.rank for s in copies]
    assert [int(6e5 * 16)] * GPUS == [s.nbytes for s in copies]
    assert copies[-1].start < copies[0].end  # at the same time
    assert [8 * BATCH] == [s.nbytes for s in spans(done, Phase.INPUT)]  # the labels
    for copied in copies:
        start = min(s.start for s in spans(done, Phase.FORWARD) if s.rank == copied.rank)
        assert copied.end <= start


def test_an_input_in_pageable_memory_is_copied_one_gpu_at_a_time() -> None:
    done = dp(parallel=DataParallelOptions(input_on="cpu"))
    copies = spans(done, Phase.SCATTER, track="copies from host")
    assert GPUS == len(copies)
    assert all(a.end <= b.start for a, b in itertools.pairwise(copies))


# The host


def test_the_main_thread_checks_devices_and_builds_modules_for_every_gpu() -> None:
    host = machine().host
    done = dp(model("resnet50"), gpus=8)
    assert to_ns(host.device_check_s.value * (161 + 159)) == host_ns(done, Phase.DEVICE_CHECK)
    assert to_ns(host.module_replicate_s.value * 151 * 8) == host_ns(done, Phase.REPLICATE)
    started = [s for s in spans(done, Phase.THREADS, track="main thread") if "start" in s.name]
    assert [to_ns(host.thread_s.value)] * 8 == [s.length for s in started]


def test_many_small_tensors_cost_far_more_than_one_of_the_same_bytes() -> None:
    """3000 tensors of 14 kB to one other GPU took 34 ms where one of 42 MB took 4 ms."""

    def replicate_ns(count: int, numel: int) -> int:
        made = chain(1)
        tensor = replace(made.parameters[0], shape=(numel,), trainable=False)
        parameters = tuple(replace(tensor, name=f"t{i}") for i in range(count))
        workload = replace(made, parameters=parameters, gradients=())
        done = dp(workload, gpus=2, evaluation=True, batch=2)
        cat = list(spans(done, Phase.BROADCAST, track="main thread"))
        return max(s.end for s in spans(done, Phase.BROADCAST)) - cat[0].start

    many, one = replicate_ns(3000, 3500), replicate_ns(1, 3500 * 3000)
    assert 5_000 < (many - one) / 3000 < 20_000
    assert many / one > 4


def test_threads_share_the_interpreter_only_where_it_has_a_lock() -> None:
    workload = model("deep-mlp")
    locked = dp(workload, gpus=8, batch=8 * 16)
    free = dp(workload, without_lock(machine()), gpus=8, batch=8 * 16)
    assert spans(locked, Phase.GIL_WAIT, track="replica thread 3")
    assert not spans(free, Phase.GIL_WAIT, track="replica thread 3")
    assert free.step_ns < locked.step_ns


def test_backward_is_launched_without_the_lock() -> None:
    done = dp(model("deep-mlp"), gpus=4, batch=64)
    starts = [min(s.start for s in spans(done, Phase.BACKWARD) if s.rank == r) for r in range(4)]
    ends = [max(s.end for s in spans(done, Phase.BACKWARD) if s.rank == r) for r in range(4)]
    assert max(starts) < min(ends)
    assert not list(spans(done, Phase.GIL_WAIT, track="autograd thread"))


# Short-cuts and refusals


def test_a_batch_of_one_chunk_runs_on_the_main_thread() -> None:
    done = dp(batch=1)
    assert not spans(done, Phase.THREADS, track="main thread")
    assert spans(done, Phase.FORWARD, track="main thread")
    names = {s.name for s in spans(done)}
    assert "cat" in names  # chunks are made flat even for one GPU
    assert not names & {"broadcast", "reduce"}


def test_kept_replicas_are_parallel_apply_alone() -> None:
    done = dp(model("deep-mlp"), parallel=DataParallelOptions(keep_replicas=True))
    assert {Phase.FORWARD} == {s.phase for s in spans(done)}
    found = {s.phase for s in spans(done, track="main thread")}
    assert {Phase.LOOP, Phase.THREADS, Phase.SYNC} == found


def test_launch_bound_threads_scale_as_users_saw() -> None:
    """Linear + ReLU x 100 in threads: 12.39 ms on one GPU, 21.63 on two, 41.38 on four."""
    kept = DataParallelOptions(keep_replicas=True)

    def ms(gpus: int) -> float:
        return dp(model("deep-mlp"), gpus=gpus, batch=256 * gpus, parallel=kept).step_ns / 1e6

    # The host is another, so ratios alone: 1.75 and 3.34 were measured, serial share 0.7 to 1.
    one = ms(1)
    assert 1.7 < ms(2) / one < 2.6
    assert 3.1 < ms(4) / one < 5.5


def test_a_straggler_is_named_by_its_position_in_the_device_ids() -> None:
    def forward_ns(rank: int, **options: Any) -> int:
        return sum(s.length for s in spans(dp(**options), Phase.FORWARD) if s.rank == rank)

    slow = {"device_ids": (4, 5, 6, 7), "stragglers": ((0, 2.0),)}
    assert 2 * forward_ns(0) == pytest.approx(forward_ns(4, **slow), abs=4)
    optimizer = spans(dp(**slow), Phase.OPTIMIZER)[0].length
    assert 2 * spans(dp(), Phase.OPTIMIZER)[0].length == pytest.approx(optimizer, abs=1)


def test_data_parallel_is_refused_on_two_machines() -> None:
    text = (
        "--gpus must be at most 8 in mode 'dp' on 'a100-sxm', got 16: nn.DataParallel is one "
        "process on one machine. Lower --gpus, or choose --mode ring."
    )
    with pytest.raises(InfeasibleError) as raised:
        run(BIG, machine(), network(), mode="dp", gpus=16, batch=64)
    assert text == str(raised.value)


@pytest.mark.parametrize("ids", [(0, 1, 2, 2), (0, 1, 2, 9), (0, 1)])
def test_device_ids_that_do_not_fit_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(InfeasibleError) as raised:
        dp(device_ids=ids)
    assert (
        "--device-ids must name --gpus different GPUs of 0..7, got "
        f"{','.join(map(str, ids))} for 4 GPUs. Correct either." == str(raised.value)
    )


def test_an_output_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InfeasibleError) as raised:
        dp(parallel=DataParallelOptions(output_device=4))
    text = "--output-device must be a position in 0..3 or 'cpu', got 4. Correct it."
    assert text == str(raised.value)


# Closed forms


def parts_ns(cluster: Cluster, workload: Any, batch: int) -> int:
    """Return the sum of the parts of a step whose host takes no time, ns.

    Source: the closed form for NCCL, equal chunks and a compute-bound model.
    """
    scenario, runs = cluster.scenario, cluster.groups[0]
    launches = Runs(workload, scenario, (cluster.device, cluster.host))
    gpus, device = scenario.gpus, cluster.device
    rate = cluster.machine.profile.host.pageable_copy_bytes_per_s.value
    moved = int(workload.input_bytes.at(batch)) + int(workload.target_bytes.at(batch))
    total = cluster.copy_ns("host0", "gpu0", moved, rate)
    piece = int(workload.input_bytes.at(batch // gpus))
    total += sum(cluster.copy_ns("gpu0", f"gpu{i}", piece) for i in range(1, gpus))
    for name, collective in (
        ("broadcast chunks", "broadcast"),
        ("buffer chunks", "broadcast"),
        ("reduce chunks", "reduce"),
    ):
        for nbytes in cluster.messages[name]:
            total += device.memory_ns(2 * nbytes)
            total += runs.cost_ns(Call(collective=collective, nbytes=nbytes))  # type: ignore[arg-type]
    output = int(workload.output_bytes.at(batch // gpus))
    total += sum(cluster.copy_ns(f"gpu{i}", "gpu0", output) for i in range(gpus))
    total += sum(cluster.copy_ns("gpu0", f"gpu{i}", output) for i in range(1, gpus))
    total += int(launches.loss(batch).durations.sum())
    total += int(launches.loss_backward(batch).durations.sum())
    total += int(launches.forward(batch // gpus).durations.sum())
    total += int(launches.backward(batch // gpus).durations.sum())
    total += int(launches.optimizer().durations.sum())
    return total + cluster.copy_ns("gpu0", "host0", 4)  # loss.item()


@pytest.mark.parametrize("name", ["a100-sxm", "rtx2080ti"])
def test_a_step_whose_host_is_free_is_the_sum_of_its_parts(name: str) -> None:
    workload = chain(6, width=1000, per_sample=4e7, buffers=4, output_bytes=1e5)
    done = dp(workload, free_host(machine(name)))
    assert parts_ns(done.cluster, workload, BATCH) == done.step_ns


def test_a_compute_bound_step_is_the_sum_of_its_parts_and_of_exposed_host_work() -> None:
    workload, batch = model("resnet50"), 1024
    free = dp(workload, free_host(machine()), batch=batch)
    # Two chunks are one tensor, which is not concatenated.
    parts = parts_ns(free.cluster, workload, batch)
    assert parts == pytest.approx(free.step_ns, rel=0.002)
    done = dp(workload, batch=batch)
    # Exposed: what the main thread does from the blocking copy of the input to the first kernel
    # of forward, and what the autograd thread does after the last gradient.
    exposed = 0
    for phase in (
        Phase.LOOP,
        Phase.INPUT,
        Phase.DEVICE_CHECK,
        Phase.SCATTER,
        Phase.BROADCAST,
        Phase.BUFFERS,
        Phase.REPLICATE,
        Phase.THREADS,
        Phase.GATHER,
    ):
        exposed += host_ns(done, phase)
    exposed += host_ns(done, Phase.REDUCE, "autograd thread")
    assert free.step_ns < done.step_ns < free.step_ns + exposed


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_launch_bound_step_is_the_time_of_the_host(gpus: int) -> None:
    """T = host before + ops * h(N) + ops of backward * launch + host of reduce and optimizer."""
    depth = 200
    workload = replace(chain(depth, width=8, per_sample=0), input_bytes=Linear(per_sample=4))
    profile = free_device(machine())
    done = dp(workload, profile, gpus=gpus, batch=8 * gpus, precision="fp32")
    host = profile.host
    locked = (
        host.launch_gil_s.value
        + host.module_call_s.value
        + done.cluster.host.handover_ns(gpus)[-1] / 1e9
    )
    free = host.launch_free_s.value
    forward = depth * max(locked + free, gpus * locked)
    backward = depth * host.backward_launch_s.value
    rest = sum(
        host_ns(done, phase)
        for phase in (
            Phase.LOOP,
            Phase.INPUT,
            Phase.DEVICE_CHECK,
            Phase.SCATTER,
            Phase.BROADCAST,
            Phase.REPLICATE,
            Phase.GATHER,
            Phase.LOSS,
            Phase.OPTIMIZER,
        )
    )
    rest += gpus * to_ns(host.thread_s.value)
    for phase in (Phase.LOSS_BACKWARD, Phase.SCATTER_GRADIENTS, Phase.REDUCE, Phase.ACCUMULATE):
        rest += host_ns(done, phase, "autograd thread")
    expected = rest + to_ns(forward + backward)
    # 2 %: the first threads launch while others are started; NCCL's latency is exposed at the end.
    assert expected == pytest.approx(done.step_ns, rel=0.02)


def test_the_queue_of_a_stream_is_what_a_host_may_run_ahead() -> None:
    workload = chain(40, per_sample=4e7)
    short = replace(machine(), host=replace(machine().host, launch_queue=4))
    done = dp(workload, short)
    assert spans(done, Phase.QUEUE_WAIT, track="autograd thread")
    assert not spans(dp(workload), Phase.QUEUE_WAIT, track="autograd thread")
