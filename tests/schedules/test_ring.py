"""DistributedDataParallel: hooks, buckets in order on a stream of their own, then the optimizer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from dpsim.collectives import Call
from dpsim.errors import InfeasibleError
from dpsim.scenario import RingOptions
from dpsim.schedules._buckets import buckets
from dpsim.simulate import Simulation
from dpsim.timeline import Phase
from dpsim.units import MIB
from tests.schedules.small import Span, chain, machine, model, network, run, spans, step_ns

GPUS = 4
BATCH = 64
BIG = chain(8, per_sample=4e7, width=1024, buffers=4)  # 4 MiB a layer


def ring(workload: Any = BIG, profile: Any = None, **options: Any) -> Simulation:
    chosen = RingOptions(**options.pop("ring", {}))
    settings = {"gpus": GPUS, "batch": BATCH} | options
    return run(workload, profile or machine(), mode="ring", ring=chosen, **settings)


def reductions(done: Simulation) -> list[Span]:
    return spans(done, Phase.ALL_REDUCE, track="comm")


def copies(done: Simulation, what: str) -> list[Span]:
    return [s for s in spans(done, Phase.BACKWARD, Phase.BUCKET) if s.name.endswith(what)]


# Buckets


def test_buckets_are_reduced_in_index_order_one_after_the_other() -> None:
    done = ring(model("resnet50"), batch=256)
    found = reductions(done)
    workload = model("resnet50")
    packed = buckets(workload, RingOptions(), 3, lambda t: t.nbytes)
    sizes = [sum(workload.parameters[i].nbytes for i in bucket) for bucket in packed]
    assert [7.82, 30.04, 25.04, 25.32, 9.27] == [round(size / MIB, 2) for size in sizes]
    assert sizes == [s.nbytes for s in found]
    assert tuple(sizes) == done.cluster.messages["all-reduce buckets"]
    assert all(a.end <= b.start for a, b in itertools.pairwise(found))


def test_a_bucket_starts_when_its_last_copy_is_done_and_its_predecessors_are() -> None:
    done = ring()
    packed = buckets(BIG, RingOptions(), 3, lambda t: t.nbytes)
    copied = {s.name.partition(":")[0]: s.end for s in copies(done, "copy to bucket")}
    before = 0
    for bucket, span in zip(packed, reductions(done), strict=True):
        ready = max(copied[BIG.parameters[i].name] for i in bucket)
        assert max(before, ready) == span.start
        cost = done.cluster.groups[0].cost_ns(Call(collective="all_reduce", nbytes=span.nbytes))
        assert cost == span.length
        before = span.end


def test_a_later_bucket_that_is_ready_waits_for_those_before_it() -> None:
    # In definition order reversed, the first layers are in the last bucket; with unused
    # parameters searched for, order never follows readiness. Here layer 0 is ready first.
    ready = tuple(replace(r, parameter=7 - r.parameter) for r in BIG.gradients)
    workload = replace(BIG, gradients=ready)
    options = {"find_unused_parameters": True}
    done = ring(workload, ring=options)
    packed = buckets(workload, RingOptions(**options), 3, lambda t: t.nbytes)
    copied = {s.name.partition(":")[0]: s.end for s in copies(done, "copy to bucket")}
    first = max(copied[workload.parameters[i].name] for i in packed[0])
    last = max(copied[workload.parameters[i].name] for i in packed[-1])
    assert last < first  # the last bucket is ready first
    found = reductions(done)
    assert first <= found[0].start
    assert [sum(workload.parameters[i].nbytes for i in b) for b in packed] == [
        s.nbytes for s in found[:-1]
    ]


def test_backward_goes_on_while_buckets_are_reduced() -> None:
    done = ring()
    assert reductions(done)[0].start < max(s.end for s in spans(done, Phase.BACKWARD))


def test_compute_is_slower_beside_a_collective_by_its_share_of_the_device() -> None:
    alone = sum(s.length for s in spans(run(BIG, machine(), batch=16), Phase.BACKWARD))
    beside = sum(
        s.length
        for s in spans(ring(), Phase.BACKWARD)
        if s.rank == 0 and not s.name.endswith("bucket")
    )
    channels = ring().cluster.groups[0].fabric.channels
    share = channels / machine().device.multiprocessors
    assert 0 < share < 1
    assert alone < beside < alone / (1 - share)


@pytest.mark.parametrize("iteration", [1, 2, 3])
def test_iterations_have_the_buckets_that_ddp_has_then(iteration: int) -> None:
    for options, counts in (
        ({}, (1, 2, 2)),
        ({"static_graph": True}, (1, 1, 2)),
        ({"find_unused_parameters": True}, (2, 2, 2)),
        ({"bucket_bytes": 8.0 * MIB}, (1, 4, 4)),
    ):
        done = ring(ring=options, iteration=iteration)
        reduced = done.cluster.messages["all-reduce buckets"]
        assert counts[iteration - 1] == len(reduced)
        assert sum(p.nbytes for p in BIG.parameters) == sum(reduced)


def test_the_rebuild_sends_an_order_once_and_waits_for_it() -> None:
    second, third = ring(iteration=2), ring(iteration=3)
    assert ["broadcast"] == [s.name for s in spans(second, Phase.BUCKET, track="comm")]
    assert [4 * 8] == [s.nbytes for s in spans(second, Phase.BUCKET, track="comm")]
    assert not spans(third, Phase.BUCKET, track="comm")
    never = ring(ring={"find_unused_parameters": True}, iteration=2)
    assert not spans(never, Phase.BUCKET, track="comm")


# After backward


def test_the_optimizer_starts_after_all_buckets_on_every_rank() -> None:
    done = ring()
    optimizer = spans(done, Phase.OPTIMIZER)
    assert {0} == {s.rank for s in optimizer}  # one rank that stands for all four
    assert reductions(done)[-1].end <= optimizer[0].start
    assert 4 == next(t.count for t in timeline(done).tracks if t.name == "compute")


def timeline(done: Simulation) -> Any:
    return done.cluster.recorder.timeline(done.start_ns, done.end_ns)


def test_gradients_are_copied_back_unless_they_are_views_of_their_bucket() -> None:
    done, view = ring(), ring(ring={"gradient_as_bucket_view": True})
    assert (8, 8) == (len(copies(done, "copy to bucket")), len(copies(done, "copy back")))
    assert (8, 0) == (len(copies(view, "copy to bucket")), len(copies(view, "copy back")))
    assert min(s.start for s in copies(done, "copy back")) >= reductions(done)[0].end


# no_sync


def test_accumulation_communicates_once_a_step() -> None:
    for accumulation in (1, 2, 3):
        done = ring(accumulation=accumulation)
        assert 2 == len(reductions(done))
        assert 8 == len(copies(done, "copy to bucket"))
        assert 8 * (accumulation - 1) == len(copies(done, "add to .grad"))
        # Buffers: skipped in a forward that follows one in no_sync.
        assert 2 == len(spans(done, Phase.BUFFERS, track="comm"))


def test_zero_grad_that_keeps_gradients_runs_once_a_step() -> None:
    for accumulation in (1, 3):
        done = ring(set_to_none=False, accumulation=accumulation)
        assert ["zero_grad"] == [s.name for s in spans(done, Phase.LOOP)]
        assert 8 * accumulation == len(copies(done, "add to .grad"))


# Buffers


def test_buffers_are_broadcast_by_dtype_on_the_way_to_forward() -> None:
    done = ring()
    sent = spans(done, Phase.BUFFERS, track="comm")
    assert [2 * 256, 2 * 512] == [s.nbytes for s in sent]
    assert sent[-1].end <= min(s.start for s in spans(done, Phase.FORWARD))
    assert 4 == sum(s.name == "copy_" for s in spans(done, Phase.BUFFERS))
    off = ring(ring={"broadcast_buffers": False})
    assert not spans(off, Phase.BUFFERS, track="comm")
    assert not spans(ring(chain(4)), Phase.BUFFERS, track="comm")


def test_evaluation_reduces_nothing_and_broadcasts_buffers_in_its_first_forward_alone() -> None:
    first, later = ring(evaluation=True, iteration=1), ring(evaluation=True)
    assert 2 == len(spans(first, Phase.BUFFERS, track="comm"))
    assert not spans(later, track="comm")
    assert not spans(later, Phase.BACKWARD, Phase.OPTIMIZER)


# Unused and frozen parameters


def test_frozen_parameters_are_left_out() -> None:
    workload = chain(8, per_sample=4e7, width=1024, kinds=("frozen", "frozen"))
    assert 6 * 4 * MIB == sum(s.nbytes for s in reductions(ring(workload)))


def test_a_search_for_unused_parameters_costs_host_time_and_a_map_after_the_last_bucket() -> None:
    plain, search = ring(), ring(ring={"find_unused_parameters": True})
    host = [s for s in spans(search, Phase.BUCKET, track="main thread") if "search" in s.name]
    assert 1 == len(host)
    assert host[0].length > 0
    assert [4 * 8] == [s.nbytes for s in reductions(search)][2:]
    assert len(reductions(plain)) + 1 == len(reductions(search))
    # Nobody waits for the map.
    assert spans(search, Phase.OPTIMIZER)[0].start <= reductions(search)[-1].end + 10**6


def test_unused_parameters_are_zeros_in_their_bucket_and_travel() -> None:
    workload = chain(8, per_sample=4e7, width=1024, kinds=("unused",))
    done = ring(workload, ring={"find_unused_parameters": True})
    assert 8 * 4 * MIB + 4 * 8 == sum(s.nbytes for s in reductions(done))
    [zeros] = copies(done, "zeros to bucket")
    [first, *_] = copies(done, "copy to bucket")
    assert first.end == zeros.start  # ready with the first gradient
    assert 7 == len(copies(done, "copy back"))


def test_unused_parameters_that_nobody_announced_are_refused() -> None:
    workload = chain(8, kinds=("unused", "", "unused"))
    workload = replace(workload, gradients=chain(8, kinds=("unused", "x", "unused")).gradients)
    with pytest.raises(InfeasibleError) as raised:
        ring(workload)
    assert (
        "model chain: every trainable parameter must get a gradient in mode 'ring', got none for "
        "3, the first 'layer0': DistributedDataParallel would stop. Add --find-unused-parameters "
        "or --static-graph." == str(raised.value)
    )
    assert ring(workload, evaluation=True).step_ns > 0
    assert ring(workload, ring={"static_graph": True}).step_ns > 0


# Hooks that compress


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_a_16_bit_hook_halves_what_is_sent_and_adds_passes(hook: str) -> None:
    plain, half = ring(), ring(ring={"gradient_hook": hook})
    assert [s.nbytes for s in reductions(plain)] == [2 * s.nbytes for s in reductions(half)]
    for rank in range(GPUS):
        traffic = [done.cluster.traffic[rank].sent for done in (plain, half)]
        # Buffers (1536 bytes) are not compressed.
        assert traffic[0] == pytest.approx(2 * traffic[1], abs=1536 * 2)
    assert 2 == len([s for s in spans(half, Phase.BUCKET) if s.name == "compress"])
    assert 2 == len([s for s in spans(half, track="hook") if s.name == "decompress"])
    host = spans(half, Phase.BUCKET, track="autograd thread")
    assert {"compress", "decompress"} <= {s.name for s in host}


def test_decompression_does_not_delay_the_next_bucket() -> None:
    done = ring(ring={"gradient_hook": "fp16", "bucket_bytes": 4.0 * MIB})
    found = reductions(done)
    unpacked = spans(done, track="hook")
    assert len(found) == len(unpacked) == 8
    for span, after in zip(unpacked, found, strict=True):
        assert after.end <= span.start
    assert unpacked[-1].end <= spans(done, Phase.OPTIMIZER)[0].start


# Bytes


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_each_rank_sends_2_n_minus_1_over_n_of_the_parameters(gpus: int) -> None:
    done = ring(chain(8, width=1024), gpus=gpus, batch=8 * gpus)
    expected = 2 * (gpus - 1) * 8 * 4 * MIB / gpus
    for rank in range(gpus):
        use = done.cluster.traffic[rank]
        assert expected == pytest.approx(use.sent, abs=32)
        assert use.sent + 8 * 600_008 == use.received  # and its share of the batch


def test_ranks_on_two_nodes_meet_in_the_same_collectives() -> None:
    done = run(BIG, machine(), network(), mode="ring", gpus=16, batch=16 * 16)
    assert 2 == len({s.start for s in reductions(done)})
    assert 8 * 4 * MIB == sum(s.nbytes for s in reductions(done))


def test_all_wait_for_a_straggler() -> None:
    even = ring().step_ns
    slow = ring(stragglers=((2, 1.5),))
    assert even < slow.step_ns
    ends = {s.rank: s.end for s in reductions(slow)}
    assert 1 == len(set(ends.values()))


def test_fewer_samples_than_ranks_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="every rank needs a sample in mode 'ring'"):
        ring(batch=3)


def test_without_hidden_communication_a_step_is_longer_by_all_of_it() -> None:
    """In the first iteration one bucket starts after the last gradient: nothing overlaps."""
    first = ring(chain(8, per_sample=4e7, width=1024), iteration=1)
    [span] = reductions(first)
    last = max(s.end for s in copies(first, "copy to bucket"))
    assert last == span.start
    assert step_ns(BIG, machine(), batch=16) < first.step_ns
