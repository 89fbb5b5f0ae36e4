"""The synchronous parameter server: push when ready, sum in order of arrival, pull, go on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from dpsim.scenario import ServerOptions
from dpsim.simulate import Simulation
from dpsim.timeline import Phase
from dpsim.units import MIB, to_ns
from dpsim.workload import GradientReady
from tests.schedules.small import (
    Span,
    all_spans,
    chain,
    host_ns,
    machine,
    model,
    network,
    run,
    spans,
)

GPUS = 4
BATCH = 64
BIG = chain(8, per_sample=4e7, width=1024)  # 4 MiB a layer


def ps(workload: Any = BIG, profile: Any = None, **options: Any) -> Simulation:
    server = ServerOptions(**options.pop("server", {}))
    settings = {"gpus": GPUS, "batch": BATCH} | options
    return run(workload, profile or machine(), mode="ps", server=server, **settings)


def served(done: Simulation, *phases: Phase) -> list[Span]:
    found = all_spans(done.cluster.recorder.timeline(done.start_ns, done.end_ns))
    return sorted((s for s in found if s.rank < 0 and s.phase in phases), key=lambda s: s.start)


CPU = {"placement": "cpu", "servers": 1}


def test_gradients_are_pushed_in_the_order_in_which_they_are_ready() -> None:
    for rank in {s.rank for s in spans(ps(server=CPU), track="push")}:
        pushes = [s for s in spans(ps(server=CPU), track="push") if s.rank == rank]
        assert [f"layer{i}" for i in reversed(range(8))] == [s.name for s in pushes]
        assert all(a.end <= b.start for a, b in pairwise(pushes))


def test_a_push_starts_when_its_gradient_is_ready_while_backward_goes_on() -> None:
    done = ps(server=CPU)
    backward = [s for s in spans(done, Phase.BACKWARD) if s.rank == 0 and "mm_backward" in s.name]
    ready = {s.name.partition(":")[0]: s.end for s in backward}
    pushes = [s for s in spans(done, track="push") if s.rank == 0]
    before = 0
    for push in pushes:
        assert max(ready[push.name], before) == push.start
        before = push.end
    assert pushes[0].start < backward[-1].end


def test_a_server_works_on_one_request_at_a_time() -> None:
    done = ps(server=CPU)
    work = served(done, Phase.AGGREGATE, Phase.OPTIMIZER)
    assert all(a.end <= b.start for a, b in pairwise(work))


def test_a_key_is_updated_when_all_workers_have_pushed_it_and_pulled_after_that() -> None:
    done = ps(server=CPU)
    for name in (f"layer{i}" for i in range(8)):
        last = max(s.end for s in spans(done, track="push") if s.name == name)
        [update] = [s for s in served(done, Phase.OPTIMIZER) if s.name == name]
        sums = [s for s in served(done, Phase.AGGREGATE) if s.name == name]
        assert max(s.end for s in sums) <= update.start
        assert last <= sums[-1].end
        pulls = [s for s in spans(done, track="pull from server 0") if s.name == name]
        assert update.end <= min(s.start for s in pulls)


def test_a_key_does_not_wait_for_other_keys() -> None:
    done = ps(server=CPU)
    pulls = spans(done, track="pull from server 0")
    assert pulls[0].start < max(s.end for s in spans(done, track="push"))


def test_the_next_forward_waits_for_all_pulls() -> None:
    done = ps(server=CPU)
    last = max(s.end for s in spans(done, track="pull from server 0"))
    assert last <= spans(done, Phase.SYNC)[-1].start


def test_sums_copy_the_first_arrival_and_add_the_others() -> None:
    """(3N - 1) S over the rate at which a thread adds, which reads two and writes one."""
    options = {**CPU, "reduce_bytes_per_s": 1e9}
    done = ps(server=options)
    total = sum(s.length for s in served(done, Phase.AGGREGATE))
    expected = (3 * GPUS - 1) * 8 * 4 * MIB / 3 / 1e9
    assert to_ns(expected) == pytest.approx(total, abs=len(served(done, Phase.AGGREGATE)))


def test_a_faster_custom_reduction_is_never_slower() -> None:
    steps = [ps(server={**CPU, "reduce_bytes_per_s": rate}).step_ns for rate in (1e9, 4e9, 1.6e10)]
    assert sorted(steps, reverse=True) == steps


def test_the_update_is_where_it_is_asked_for() -> None:
    for place, on_server, on_workers in (("server", 8, 0), ("worker", 0, 1)):
        done = ps(server={**CPU, "update_on": place})
        ranks = len({s.rank for s in spans(done)})
        found = len(served(done, Phase.OPTIMIZER)), len(spans(done, Phase.OPTIMIZER))
        assert (on_server, on_workers * ranks) == found


@pytest.mark.parametrize("mode", [{}, CPU, {"placement": "cpu", "servers": 3}])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_each_worker_pushes_and_pulls_every_parameter_once(mode: Any, gpus: int) -> None:
    done = ps(server=mode, gpus=gpus, batch=16 * gpus)
    size = 8 * 4 * MIB
    own = not mode  # a worker that is the server sends itself nothing
    assert size * (gpus - 1 if own else gpus) == sum(
        done.cluster.traffic[rank].sent for rank in range(1 if own else 0, gpus)
    )
    for rank in range(1 if own else 0, gpus):
        use = done.cluster.traffic[rank]
        assert (size, size + 16 * 600_008) == (use.sent, use.received)


def test_frozen_parameters_and_those_without_gradient_stay_where_they_are() -> None:
    workload = chain(8, width=1024, kinds=("frozen", "unused"))
    done = ps(workload, server=CPU)
    assert 6 * 4 * MIB == done.cluster.traffic[1].sent
    assert (6 * 4 * MIB,) == done.cluster.messages["bytes on each server"]


def test_a_model_of_frozen_parameters_has_nothing_to_exchange() -> None:
    done = ps(chain(2, kinds=("frozen", "frozen")), server=CPU)
    assert done.step_ns > 0
    assert not spans(done, track="push")


def test_a_gradient_made_by_the_loss_is_ready_before_the_first_kernel_of_backward() -> None:
    early = (GradientReady(parameter=7, after_op=0), *BIG.gradients[1:])
    done = ps(replace(BIG, gradients=early), server=CPU)
    pushes = [s for s in spans(done, track="push") if s.rank == 0]
    begun = min(s.start for s in spans(done, Phase.BACKWARD) if s.rank == 0)
    assert pushes[0].start <= begun


def test_accumulation_exchanges_once_a_step() -> None:
    for accumulation in (1, 3):
        done = ps(server=CPU, accumulation=accumulation)
        assert 8 * 4 * MIB == done.cluster.traffic[1].sent
        assert not spans(done, Phase.ALL_REDUCE, Phase.REDUCE)


def test_evaluation_exchanges_nothing() -> None:
    done = ps(server=CPU, evaluation=True)
    assert not spans(done, track="push")
    assert not served(done, Phase.AGGREGATE, Phase.OPTIMIZER)


def test_a_worker_of_several_gpus_sums_them_first_and_pushes_once() -> None:
    done = ps(server={**CPU, "gpus_per_worker": 2})
    assert {0, 2} == {r for r in range(GPUS) if done.cluster.traffic[r].sent}
    assert spans(done, Phase.LOCAL_REDUCE, track="local reduce")


def test_one_server_on_a_network_takes_at_least_n_s_over_its_nic() -> None:
    net = network("10gbe")
    workload = model("resnet50")
    done = run(
        workload,
        machine("rtx2080ti"),
        net,
        mode="ps",
        gpus=4,
        nodes=4,
        batch=128,
        server=ServerOptions(placement="dedicated", servers=1),
    )
    ingress = 4 * workload.gradient_bytes / net.bandwidth_bytes_per_s.value
    egress_of_one = workload.gradient_bytes / net.bandwidth_bytes_per_s.value
    assert to_ns(ingress) < done.step_ns
    compute = run(workload, machine("rtx2080ti"), batch=32).step_ns
    # Both ways pipelined, in full duplex: far below the sum of the two.
    assert done.step_ns < compute + to_ns(ingress + 4 * egress_of_one)


def test_more_servers_are_not_slower_on_a_network() -> None:
    def step_ns(servers: int) -> int:
        return run(
            model("resnet50"),
            machine("rtx2080ti"),
            network("10gbe"),
            mode="ps",
            gpus=8,
            nodes=8,
            batch=256,
            server=ServerOptions(placement="dedicated", servers=servers, sharding="greedy"),
        ).step_ns

    steps = [step_ns(servers) for servers in (1, 2, 4)]
    assert sorted(steps, reverse=True) == steps


def test_the_host_pays_a_hook_for_each_push() -> None:
    profile = machine()
    slower = replace(
        profile,
        host=replace(profile.host, hook_s=replace(profile.host.hook_s, value=1e-4)),
    )
    extra = host_ns(ps(profile=slower, server=CPU), Phase.BACKWARD, "autograd thread")
    extra -= host_ns(ps(server=CPU), Phase.BACKWARD, "autograd thread")
    ranks = len({s.rank for s in spans(ps(server=CPU), track="autograd thread")})
    each = 1e-4 - profile.host.hook_s.value
    # The hook of the last gradient falls behind the last launch.
    assert 7 * ranks * each * 1e9 <= extra + 1
    assert extra <= 8 * ranks * each * 1e9 + 8
