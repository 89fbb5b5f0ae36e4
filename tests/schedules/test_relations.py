"""What must hold between steps, whatever the numbers are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim import files
from dpsim.engine import Communicator
from dpsim.hardware import HardwareProfile
from dpsim.overrides import with_quantity
from dpsim.scenario import DataParallelOptions, RingOptions, Scenario, ServerOptions
from dpsim.schedules import ring as ring_module
from dpsim.schedules._runs import Hook
from dpsim.simulate import Simulation
from dpsim.timeline import PHASES, Phase
from dpsim.workload import Workload
from tests.schedules.small import (
    chain,
    faster_kernels,
    faster_links,
    free_links,
    machine,
    model,
    run,
    spans,
    step_ns,
    without_lock,
)

PROFILES = files.names(HardwareProfile)
HALF = [name for name in PROFILES if "fp16" in machine(name).device.peak_flop_per_s]
"""Machines that compute in every precision below."""
MODES = ("dp", "ring", "ps")

CHAINS = st.builds(
    chain,
    st.integers(1, 12),
    width=st.sampled_from([8, 200, 1024, 2000]),
    per_sample=st.sampled_from([0.0, 1e5, 4e6, 4e7]),
    flops=st.sampled_from([0.0, 1e8, 1e10]),
    kinds=st.sampled_from([(), ("frozen",), ("", "frozen")]).map(
        lambda kinds: kinds if kinds == ("frozen",) else ()
    ),
    buffers=st.integers(0, 5),
    outputs=st.integers(1, 3),
    output_bytes=st.sampled_from([4.0, 4e3, 1e6]),
    loss_inside=st.booleans(),
)
OPTIONS = st.fixed_dictionaries(
    {
        "accumulation": st.integers(1, 3),
        "set_to_none": st.booleans(),
        "evaluation": st.booleans(),
        "pinned_input": st.booleans(),
        "precision": st.sampled_from(["fp32", "amp", "fp16"]),
        "sync": st.sampled_from(["item-after-loss", "item-after-step", "none"]),
    }
)


# One GPU


@settings(max_examples=40)
@given(
    workload=CHAINS,
    options=OPTIONS,
    profile=st.sampled_from(HALF),
    batch=st.integers(1, 64),
    parallel=st.builds(
        DataParallelOptions,
        loss_in_forward=st.booleans(),
        nccl=st.booleans(),
        output_device=st.sampled_from([0, -1]),
        input_on=st.sampled_from(["gpu", "cpu"]),
    ),
)
def test_data_parallel_on_one_gpu_is_the_module_alone(
    workload: Workload,
    options: dict[str, Any],
    profile: str,
    batch: int,
    parallel: DataParallelOptions,
) -> None:
    alone = step_ns(workload, machine(profile), batch=batch, **options)
    options["data_parallel"] = parallel
    assert alone == step_ns(workload, machine(profile), mode="dp", batch=batch, **options)


@pytest.mark.parametrize("name", ["resnet50", "bert-base", "deep-mlp"])
def test_shipped_models_on_one_gpu_of_data_parallel_are_themselves(name: str) -> None:
    for loss_in_forward in (False, True):
        parallel = DataParallelOptions(loss_in_forward=loss_in_forward)
        alone = step_ns(model(name), machine(), batch=16)
        assert alone == step_ns(model(name), machine(), mode="dp", batch=16, data_parallel=parallel)


# Free communication


@contextmanager
def free_collectives() -> Iterator[None]:
    """Make collectives take no time: with endless bandwidth, NCCL's own latencies remain."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "cost_ns", lambda *_: 0)
        yield


@contextmanager
def free_hooks() -> Iterator[None]:
    """Make copies to buckets free; they are kernels like others, so no entry of a profile does."""
    with pytest.MonkeyPatch.context() as patch:
        nothing = Hook(after=-1, name="free", host=0, duration=0)
        patch.setattr(ring_module, "copy_hook", lambda _, after, *__: replace(nothing, after=after))
        yield


@settings(max_examples=30)
@given(
    workload=CHAINS,
    options=OPTIONS,
    profile=st.sampled_from(HALF),
    gpus=st.sampled_from([1, 2]),
    each=st.integers(1, 32),
)
def test_a_ring_whose_communication_is_free_is_one_gpu(
    workload: Workload, options: dict[str, Any], profile: str, gpus: int, each: int
) -> None:
    free = free_links(machine(profile))
    for name in ("collective_s", "event_s"):
        free = with_quantity(free, f"host.{name}", 0.0)
    chosen = RingOptions(broadcast_buffers=False, gradient_as_bucket_view=True)
    with free_collectives(), free_hooks():
        found = step_ns(
            workload, free, mode="ring", gpus=gpus, batch=gpus * each, ring=chosen, **options
        )
    assert step_ns(workload, free, batch=each, **options) == found


@pytest.mark.parametrize("name", ["resnet50", "deep-mlp", "bert-base", "small-cnn"])
def test_a_ring_with_free_wires_costs_its_hooks_at_most(name: str) -> None:
    workload, profile = model(name), free_links(machine())
    chosen = RingOptions(broadcast_buffers=False)
    alone = step_ns(workload, profile, batch=16)
    with free_collectives():
        done = run(workload, profile, mode="ring", gpus=4, batch=64, ring=chosen)
    host, device = profile.host, done.cluster.device
    buckets = len(done.cluster.messages["all-reduce buckets"])
    hooks_s = len(workload.gradients) * (host.hook_s.value + 2 * host.launch_free_s.value)
    hooks_s += buckets * (host.collective_s.value + host.event_s.value)
    kernels_ns = sum(2 * device.memory_ns(2 * p.nbytes) for p in workload.parameters)
    assert alone <= done.step_ns <= alone + hooks_s * 1e9 + kernels_ns + 1000  # rounding


def test_data_parallel_with_free_wires_still_has_its_host() -> None:
    """The floor of a launch-bound model: replicas are built, and threads share one interpreter."""
    workload, profile = model("deep-mlp"), free_links(machine())
    for gpus in (2, 4, 8):
        alone = step_ns(workload, profile, batch=16)
        assert 1.5 * alone < step_ns(workload, profile, mode="dp", gpus=gpus, batch=16 * gpus)


def test_copies_over_free_wires_still_pay_their_launches_and_adds() -> None:
    profile = free_links(machine())
    copies = DataParallelOptions(nccl=False)
    done = run(model("resnet50"), profile, mode="dp", gpus=4, batch=256, data_parallel=copies)
    assert {"cat"} == {s.name for s in spans(done, Phase.BROADCAST)}  # copies take no time
    assert 13 * 3 == sum(s.name == "add" for s in spans(done, Phase.REDUCE))


# What bounds a step


def test_faster_kernels_speed_up_what_they_bound_and_nothing_else() -> None:
    fast = faster_kernels(machine(), 10)

    def speed_up(name: str, batch: int, **options: Any) -> float:
        slow = step_ns(model(name), machine(), batch=batch, **options)
        return slow / step_ns(model(name), fast, batch=batch, **options)

    # Launch-bound: what is left is the last kernels, 1 % of the step.
    assert 1 <= speed_up("deep-mlp", 16) < 1.02
    assert 1 <= speed_up("deep-mlp", 128, mode="dp", gpus=8) < 1.02
    assert 5 < speed_up("vgg16", 256)
    assert 2 < speed_up("resnet50", 1024, mode="dp", gpus=4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["resnet50", "deep-mlp", "gpt2"])
def test_a_step_is_never_shorter_than_the_compute_of_its_slowest_rank(mode: str, name: str) -> None:
    done = run(model(name), machine(), mode=mode, gpus=4, batch=10, stragglers=((3, 1.3),))
    assert done.step_ns >= max(compute_ns(done).values())
    dp = run(model(name), machine(), mode="dp", gpus=4, split=(1, 2, 3, 4), batch=10)
    busy = compute_ns(dp)
    assert max(busy, key=lambda rank: (busy[rank], -rank)) in (0, 3)  # 0 has loss and optimizer
    assert dp.step_ns >= max(busy.values())


def compute_ns(done: Simulation) -> dict[int, int]:
    busy: dict[int, int] = {}
    for span in spans(done, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER):
        busy[span.rank] = busy.get(span.rank, 0) + span.length
    return busy


@pytest.mark.parametrize("mode", ["single", *MODES])
@pytest.mark.parametrize("name", ["resnet50", "deep-mlp"])
def test_a_kernel_never_starts_before_its_launch_is_done(mode: str, name: str) -> None:
    gpus = 1 if mode == "single" else 4
    done = run(model(name), machine(), mode=mode, gpus=gpus, batch=16 * gpus)
    timeline = done.cluster.recorder.timeline(done.start_ns, done.end_ns)
    kinds = np.array([t.kind == "stream" and t.name == "compute" for t in timeline.tracks])
    phases = np.array(
        [p in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER) for p in PHASES]
    )
    mine = kinds[timeline.track] & phases[timeline.phase] & (timeline.cause >= 0)
    assert mine.sum() > 100
    caused = timeline.end[timeline.cause[mine]]
    assert (caused <= timeline.start[mine]).all()
    # Within a track nothing overlaps.
    for track in range(len(timeline.tracks)):
        rows = np.flatnonzero(timeline.track == track)
        rows = rows[np.argsort(timeline.start[rows], kind="stable")]
        assert (timeline.end[rows][:-1] <= timeline.start[rows][1:]).all()


# More of something


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("profile", PROFILES)
def test_more_bandwidth_is_never_slower(mode: str, profile: str) -> None:
    for name in ("resnet50",) if mode == "ps" else ("resnet50", "bert-base"):
        steps = [
            step_ns(
                model(name), faster_links(machine(profile), factor), mode=mode, gpus=2, batch=32
            )
            for factor in (1, 2, 8)
        ]
        assert sorted(steps, reverse=True) == steps


@settings(max_examples=30)
@given(workload=CHAINS, profile=st.sampled_from(HALF), options=OPTIONS)
def test_more_bandwidth_is_never_slower_for_copies_without_nccl(
    workload: Workload, profile: str, options: dict[str, Any]
) -> None:
    options |= {"data_parallel": DataParallelOptions(nccl=False), "mode": "dp", "gpus": 2}
    steps = [
        step_ns(workload, faster_links(machine(profile), factor), batch=16, **options)
        for factor in (1, 3)
    ]
    assert steps[1] <= steps[0]


@settings(max_examples=40)
@given(
    workload=CHAINS,
    options=OPTIONS,
    profile=st.sampled_from(HALF),
    gpus=st.integers(1, 2),
    each=st.integers(1, 16),
)
def test_an_interpreter_without_lock_is_never_slower(
    workload: Workload, options: dict[str, Any], profile: str, gpus: int, each: int
) -> None:
    options |= {"mode": "dp", "gpus": gpus, "batch": gpus * each}
    locked = step_ns(workload, machine(profile), **options)
    assert step_ns(workload, without_lock(machine(profile)), **options) <= locked


@pytest.mark.parametrize("name", ["deep-mlp", "lstm-attention", "resnet50", "gpt2"])
def test_shipped_models_are_never_slower_without_a_lock(name: str) -> None:
    options: dict[str, Any] = {"mode": "dp", "gpus": 8, "batch": 64}
    locked = step_ns(model(name), machine(), **options)
    free = step_ns(model(name), without_lock(machine()), **options)
    assert free <= locked
    if name in ("deep-mlp", "lstm-attention"):
        assert free < 0.8 * locked


@pytest.mark.parametrize("mode", ["single", *MODES])
@pytest.mark.parametrize("name", ["resnet50", "deep-mlp", "bert-base", "small-cnn"])
def test_a_larger_batch_is_never_a_faster_step(mode: str, name: str) -> None:
    # Multiples of the GPUs: 5 samples on 4 GPUs of dp use three of them, which can be faster.
    gpus = 1 if mode == "single" else 4
    shares = (1, 2, 64) if mode == "ps" else (1, 2, 3, 8, 16, 64, 200)  # ps takes longest
    for profile in ("a100-sxm", "rtx2080ti"):
        steps = [
            step_ns(model(name), machine(profile), mode=mode, gpus=gpus, batch=gpus * each)
            for each in shares
        ]
        assert sorted(steps) == steps


def test_a_chunk_that_leaves_a_gpu_idle_can_be_faster_than_a_smaller_batch() -> None:
    """Threads cost: five samples on four GPUs of dp run in three threads, four samples in four."""
    workload = model("deep-mlp")
    five = step_ns(workload, machine(), mode="dp", gpus=4, batch=5)
    assert five < step_ns(workload, machine(), mode="dp", gpus=4, batch=4)


# The same for all modes


@pytest.mark.parametrize("mode", MODES)
def test_the_same_question_has_the_same_answer(mode: str) -> None:
    steps = {step_ns(model("resnet50"), machine(), mode=mode, gpus=4, batch=64) for _ in range(2)}
    assert 1 == len(steps)


@pytest.mark.parametrize("mode", ["ring", "ps"])
def test_equal_ranks_in_classes_of_one_are_as_fast_as_in_one_class(mode: str) -> None:
    """A straggler of factor 1 + 1e-12 changes no nanosecond, but tells the rank apart."""
    options: dict[str, Any] = {"mode": mode, "gpus": 4, "batch": 64}
    if mode == "ps":
        options["server"] = ServerOptions(placement="cpu", servers=1)
    apart = tuple((rank, 1 + 1e-12 * (rank + 1)) for rank in range(4))
    together = step_ns(model("resnet50"), machine(), **options)
    found = step_ns(model("resnet50"), machine(), stragglers=apart, **options)
    # ps: flows that end in the same nanosecond may be served in another order.
    assert together == pytest.approx(found, rel=0 if mode == "ring" else 1e-3)


@settings(max_examples=25)
@given(workload=CHAINS, options=OPTIONS, mode=st.sampled_from(MODES))
def test_any_small_question_has_an_answer(
    workload: Workload, options: dict[str, Any], mode: str
) -> None:
    done = run(workload, machine(), mode=mode, gpus=4, batch=12, **options)
    assert done.steady
    assert done.step_ns > 0
    assert Scenario(mode=mode, gpus=4, batch=12, **options) == done.cluster.scenario
