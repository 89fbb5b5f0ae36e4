"""Predict: the baseline, phases, ranks, links, warnings, and what is refused."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dpsim import files
from dpsim.answer import baseline_scenario, check, phase_times, predict
from dpsim.errors import InfeasibleError
from dpsim.hardware import CollectiveTable, HardwareProfile, Network
from dpsim.prediction import PhaseTime, Prediction
from dpsim.scenario import DataParallelOptions, Scenario
from dpsim.timeline import PHASES, Phase, Track
from dpsim.workload import Workload
from tests.predictions import timeline
from tests.synthetic import workload

V100 = files.find(HardwareProfile, "v100-dgx1")
EDR = files.find(Network, "infiniband-edr")
RESNET = files.find(Workload, "resnet50")
SMALL = files.find(Workload, "small-cnn")
MODES = ("single", "dp", "ring", "ps")


def ask(mode: str, gpus: int = 4, batch: int = 64, **changes: Any) -> Prediction:
    scenario = Scenario(mode=mode, gpus=1 if mode == "single" else gpus, batch=batch)
    return predict(SMALL, V100, replace(scenario, **changes))


def row(prediction: Prediction, phase: Phase) -> PhaseTime:
    return next(found for found in prediction.phases if found.phase is phase)


# The baseline


def test_strong_scaling_compares_with_the_whole_batch_and_weak_with_a_share() -> None:
    strong, weak = (ask("ring", scaling=scaling) for scaling in ("strong", "weak"))
    assert (64, 16) == (strong.baseline.batch, weak.baseline.batch)
    assert strong.step_ns == weak.step_ns
    assert strong.speedup == 64e9 / strong.step_ns / (64e9 / strong.baseline.step_ns)
    assert weak.efficiency == pytest.approx(weak.baseline.step_ns / weak.step_ns)


def test_an_uneven_batch_compares_with_the_largest_share() -> None:
    assert 17 == ask("ring", batch=65, scaling="weak").baseline.batch


def test_one_gpu_is_its_own_baseline() -> None:
    it = ask("single")
    assert (1.0, 1.0) == (it.speedup, it.efficiency)
    assert it.step_ns == it.baseline.step_ns


def test_the_baseline_trains_in_the_same_way() -> None:
    asked = Scenario(
        mode="ring",
        gpus=8,
        batch=512,
        precision="amp",
        optimizer="adam",
        optimizer_implementation="fused",
        accumulation=3,
        sync="none",
        pinned_input=True,
        set_to_none=False,
        stragglers=((1, 2.0),),
        iteration=1,
        anchor_step_s=0.1,
    )
    alone = baseline_scenario(asked)
    kept = "precision optimizer optimizer_implementation accumulation sync pinned_input set_to_none"
    for name in kept.split():
        assert getattr(asked, name) == getattr(alone, name), name
    assert ("single", 1, 512, 0, (), None) == (
        alone.mode,
        alone.gpus,
        alone.batch,
        alone.iteration,
        alone.stragglers,
        alone.anchor_step_s,
    )


def test_replicas_that_are_kept_run_forward_only_and_so_does_the_baseline() -> None:
    kept = DataParallelOptions(keep_replicas=True)
    assert baseline_scenario(Scenario(data_parallel=kept)).evaluation


def test_accumulation_multiplies_samples_of_both() -> None:
    it = ask("ring", accumulation=3)
    assert (3 * 64, 3 * 64) == (it.samples, it.baseline.samples)


# Relations


@pytest.mark.parametrize("mode", MODES)
def test_two_predictions_are_equal(mode: str) -> None:
    first, second = ask(mode), ask(mode)
    for name in ("step_ns", "baseline", "phases", "ranks", "links", "messages", "basis"):
        assert getattr(first, name) == getattr(second, name), name


@settings(max_examples=10)
@given(st.permutations(range(4)))
def test_which_rank_is_slow_does_not_matter_to_a_ring(order: list[int]) -> None:
    factors = (1.0, 1.3, 1.5, 2.0)
    steps = {
        ask("ring", stragglers=tuple((r, factors[i]) for i, r in enumerate(ranks))).step_ns
        for ranks in (range(4), order)
    }
    assert 1 == len(steps)


@pytest.mark.parametrize("mode", ["dp", "ring", "ps"])
def test_a_straggler_never_makes_a_step_faster(mode: str) -> None:
    plain = predict(RESNET, V100, Scenario(mode=mode, gpus=4, batch=128))
    slow = predict(RESNET, V100, Scenario(mode=mode, gpus=4, batch=128, stragglers=((3, 1.5),)))
    assert plain.step_ns < slow.step_ns < 1.6 * plain.step_ns


# Phases


@pytest.mark.parametrize("mode", MODES)
def test_no_phase_is_longer_than_the_step(mode: str) -> None:
    for it in (ask(mode), predict(RESNET, V100, ask(mode).scenario)):
        for found in it.phases:
            for ns in (found.host_ns, found.device_ns, found.other_ns):
                assert 0 <= ns <= it.step_ns, found.phase


def test_phases_are_listed_in_their_order_and_only_those_that_occur() -> None:
    listed = [found.phase for found in ask("dp").phases]
    assert listed == sorted(listed, key=PHASES.index)
    assert Phase.PUSH not in listed
    assert {Phase.BROADCAST, Phase.GATHER, Phase.REDUCE} <= set(listed)


def test_device_phases_of_one_stream_sum_to_its_busy_time() -> None:
    it = ask("single")
    (stream,) = (i for i, t in enumerate(it.timeline.tracks) if t.kind == "stream")
    assert it.timeline.busy_ns(stream) == sum(found.device_ns for found in it.phases)


def test_a_server_phase_is_that_of_the_busiest_server_not_their_sum() -> None:
    scenario = Scenario(mode="ps", gpus=64, batch=64 * 32)
    it = predict(RESNET, V100, scenario, EDR)
    times = phase_times(it.timeline)[:, PHASES.index(Phase.AGGREGATE)]
    servers = [i for i, track in enumerate(it.timeline.tracks) if track.kind == "server"]
    assert 8 == len(servers)
    assert times[servers].max() == row(it, Phase.AGGREGATE).device_ns < times[servers].sum()


def test_pulls_at_the_same_time_count_once() -> None:
    """Each server has a stream of pulls: rank 0 pulls while any of them runs."""
    scenario = Scenario(mode="ps", gpus=64, batch=64 * 32)
    it = predict(RESNET, V100, scenario, EDR)
    start, end = it.timeline.clipped()
    mine = it.timeline.phase == PHASES.index(Phase.PULL)
    moments = np.unique(np.concatenate((start[mine], end[mine])))
    busy = [bool(((start[mine] <= a) & (end[mine] > a)).any()) for a in moments[:-1].tolist()]
    assert int(np.diff(moments)[busy].sum()) == row(it, Phase.PULL).device_ns


def test_times_of_phases_are_those_of_the_timeline() -> None:
    made = timeline()
    times = phase_times(made)
    for index in range(len(made.tracks)):
        told = {phase: int(ns) for phase, ns in zip(PHASES, times[index], strict=True) if ns}
        assert made.phase_ns(index) == told


# Ranks


def test_equal_ranks_are_one_entry() -> None:
    network = predict(SMALL, V100, Scenario(mode="ps", gpus=64, batch=640), EDR)
    assert [(0, 64, 10)] == [(use.rank, use.count, use.batch) for use in network.ranks]


@pytest.mark.parametrize("mode", MODES)
def test_every_rank_and_every_sample_is_there_once(mode: str) -> None:
    it = ask(mode, batch=67)
    assert it.scenario.gpus == sum(use.count for use in it.ranks)
    assert 67 == sum(use.batch * use.count for use in it.ranks)
    assert [use.rank for use in it.ranks] == list(
        np.cumsum([0, *(use.count for use in it.ranks)])[:-1]
    )


@pytest.mark.parametrize("mode", MODES)
def test_compute_and_what_is_exposed_fit_in_the_step(mode: str) -> None:
    for use in predict(RESNET, V100, ask(mode).scenario).ranks:
        assert 0 < use.compute_ns
        assert 0 <= use.exposed_ns
        assert use.compute_ns + use.exposed_ns <= ask_step(mode)


def ask_step(mode: str) -> int:
    return predict(RESNET, V100, ask(mode).scenario).step_ns


def test_waiting_for_a_server_is_exposed() -> None:
    """36 MB to one server over Gigabit Ethernet: the GPU idles most of the step."""
    slow = files.find(Network, "1gbe")
    net = workload([(3000, 3000)], flops=1e9)
    it = predict(net, V100, Scenario(mode="ps", gpus=4, nodes=4, batch=64), slow)
    assert it.ranks[0].exposed_ns > 0.9 * (it.step_ns - it.ranks[0].compute_ns)


def test_waiting_for_a_straggler_is_exposed() -> None:
    scenario = Scenario(mode="ring", gpus=2, batch=64, stragglers=((1, 2.0),))
    fast, slow = predict(RESNET, V100, scenario).ranks
    assert pytest.approx(2 * fast.compute_ns, rel=0.02) == slow.compute_ns
    assert fast.exposed_ns - slow.exposed_ns > 0.9 * fast.compute_ns


def test_a_slow_host_is_not_exposed_communication() -> None:
    """One GPU waits for its host between kernels, but for no other stream."""
    it = ask("single")
    copies = row(it, Phase.INPUT).device_ns + row(it, Phase.SYNC).device_ns
    assert copies == it.ranks[0].exposed_ns


# Links


@pytest.mark.parametrize("mode", ["dp", "ring", "ps"])
def test_what_is_sent_is_received(mode: str) -> None:
    """The inputs come from host memory, and a server in it takes and gives the same."""
    it = predict(RESNET, V100, Scenario(mode=mode, gpus=4, batch=128))
    sent = sum(use.sent_bytes * use.count for use in it.ranks)
    received = sum(use.received_bytes * use.count for use in it.ranks)
    batch = RESNET.input_bytes.at(128) + RESNET.target_bytes.at(128)
    assert sent + batch == received


def test_a_ring_sends_twice_its_parameters_but_a_share() -> None:
    """2 (n - 1) / n S a rank, beside the broadcast of buffers."""
    gpus = 4
    bare = replace(RESNET, buffers=())
    it = predict(bare, V100, Scenario(mode="ring", gpus=gpus, batch=128))
    total = sum(use.sent_bytes * use.count for use in it.ranks)
    assert pytest.approx(2 * (gpus - 1) * RESNET.parameter_bytes, abs=1000) == total


@pytest.mark.parametrize("mode", ["ring", "ps"])
def test_bytes_that_enter_the_network_leave_it(mode: str) -> None:
    it = predict(RESNET, V100, Scenario(mode=mode, gpus=64, batch=640), EDR)
    into = sum(use.nbytes for use in it.links if use.link.endswith(">net"))
    out = sum(use.nbytes for use in it.links if use.link.startswith("net>"))
    assert 0 < into == out


@pytest.mark.parametrize("name", ["v100-dgx1", "a100-sxm", "rtx2080ti", "gtx1080ti"])
@pytest.mark.parametrize("mode", ["dp", "ring", "ps"])
def test_switches_pass_on_what_they_take(name: str, mode: str) -> None:
    profile = files.find(HardwareProfile, name)
    it = predict(RESNET, profile, Scenario(mode=mode, gpus=4, batch=128))
    balance: Counter[str] = Counter()
    for use in it.links:
        if ">" in use.link:
            source, target = use.link.split("#")[0].split(">")
            balance[source] -= use.nbytes
            balance[target] += use.nbytes
    switches = [end for end in balance if end.startswith(("switch", "nvswitch"))]
    assert [0] * len(switches) == [balance[end] for end in switches]


def test_busy_links_come_first_and_idle_ones_not_at_all() -> None:
    links = ask("dp").links
    nbytes = [use.nbytes for use in links]
    assert nbytes == sorted(nbytes, reverse=True)
    assert min(nbytes) > 0


def test_the_network_is_named_only_where_it_is_used() -> None:
    assert "" == predict(SMALL, V100, Scenario(mode="ring", gpus=2), EDR).network
    assert "infiniband-edr" == predict(SMALL, V100, Scenario(mode="ring", gpus=16), EDR).network


def test_messages_name_the_buckets() -> None:
    (buckets,) = (
        sizes
        for what, sizes in predict(RESNET, V100, Scenario(mode="ring", gpus=2)).messages
        if "bucket" in what
    )
    assert RESNET.gradient_bytes == sum(buckets)


# Iterations


def test_the_first_iteration_of_ddp_has_one_bucket() -> None:
    sizes = defaultdict(int)
    for iteration in (1, 2, 3):
        it = predict(RESNET, V100, Scenario(mode="ring", gpus=2, iteration=iteration))
        sizes[iteration] = len(dict(it.messages)["all-reduce buckets"])
    assert {1: 1, 2: 5, 3: 5} == sizes


# Warnings


def test_idle_gpus_are_warned_of_with_the_nearest_batch_that_fills_all() -> None:
    assert (
        "2 of 8 GPUs get no samples: DataParallel cuts 17 into chunks of 3. "
        "A batch of 16 fills all.",
    ) == ask("dp", 8, 17).warnings
    assert () == ask("dp", 8, 16).warnings


@pytest.mark.parametrize(("batch", "gpus", "fills"), [(9, 7, 7), (12, 7, 14), (3, 8, 8), (1, 2, 2)])
def test_the_batch_that_is_proposed_fills_all(batch: int, gpus: int, fills: int) -> None:
    (text,) = ask("dp", gpus, batch).warnings
    assert text.endswith(f" A batch of {fills} fills all.")
    assert () == ask("dp", gpus, fills).warnings


def test_sizes_outside_a_measured_table_are_warned_of() -> None:
    (table,) = (
        t for t in V100.collectives if (t.collective, t.ranks, t.nodes) == ("all_reduce", 8, 1)
    )
    short: CollectiveTable = replace(table, nbytes=(1e7, 3e7), seconds=(1e-3, 3e-3))
    profile = replace(V100, collectives=(short,))
    it = predict(RESNET, profile, Scenario(mode="ring", gpus=8, batch=128))
    sizes = set(dict(it.messages)["all-reduce buckets"]) | {RESNET.gradient_bytes}
    outside = sum(not 1e7 <= size <= 3e7 for size in sizes)
    assert (
        f"{outside} of {len(sizes)} sizes of all-reduce lie outside the measured 1e+07 to 3e+07 "
        "bytes: extrapolated.",
    ) == it.warnings


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"split": (32, 32)},
            "--split must name one share for each of 4 GPUs, got 2: 32,32. Correct either.",
        ),
        (
            {"split": (16, 16, 16, 17)},
            "--split must sum to the batch of 64, got 65. Correct either.",
        ),
        (
            {"device_ids": (0, 1)},
            "--device-ids must name 4 GPUs, got 2: 0,1. Correct --device-ids or --gpus.",
        ),
        (
            {"stragglers": ((0, 1.5), (4, 2.0))},
            "--straggler must name a rank in 0..3, got 4. Correct it.",
        ),
    ],
)
def test_parts_that_contradict_each_other_are_refused_in_words(
    changes: dict[str, Any], message: str
) -> None:
    scenario = replace(Scenario(mode="ring", gpus=4, batch=64), **changes)
    for refuse in (check, lambda it: predict(SMALL, V100, it)):
        with pytest.raises(InfeasibleError) as error:
            refuse(scenario)
        assert message == str(error.value)


def test_parts_that_fit_are_not_refused() -> None:
    check(
        Scenario(
            mode="ring",
            gpus=2,
            batch=64,
            split=(40, 24),
            device_ids=(0, 1),
            stragglers=((1, 2.0),),
        )
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 0.0])
def test_factors_and_anchors_are_finite_and_above_zero(bad: float) -> None:
    for changes in ({"stragglers": ((0, bad),)}, {"anchor_step_s": bad}):
        with pytest.raises(ValidationError):
            Scenario(**changes)


def test_a_track_without_spans_spends_no_time() -> None:
    made = timeline(tracks=(*timeline().tracks, Track(rank=5, name="idle", kind="stream")))
    assert 0 == phase_times(made)[-1].sum()


# Speed of dpsim itself: printed with `pytest -m benchmark -s`


@pytest.mark.benchmark
@pytest.mark.parametrize(("mode", "gpus"), [("dp", 8), ("ring", 1024), ("ps", 1024)])
def test_time_of_a_prediction(mode: str, gpus: int) -> None:
    scenario = Scenario(mode=mode, gpus=gpus, batch=32 * gpus, scaling="weak")
    predict(RESNET, V100, scenario, EDR)
    begun = time.perf_counter()
    predict(RESNET, V100, scenario, EDR)
    print(f"\n{mode}, {gpus} GPUs: {time.perf_counter() - begun:.3f} s")  # noqa: T201
