"""What 16 bits change on the wire: autocast nothing, a 16-bit model half, a 16-bit hook half."""

from __future__ import annotations

from typing import Any

import pytest

from dpsim.scenario import RingOptions, ServerOptions
from dpsim.schedules._runs import Runs
from dpsim.simulate import Simulation
from dpsim.timeline import Phase
from tests.schedules.small import all_spans, chain, machine, model, run, spans

KINDS = {
    "dp": ("broadcast chunks", "reduce chunks"),
    "ring": ("all-reduce buckets",),
    "ps": ("bytes on each server",),
}


def sent(mode: str, precision: str, **options: Any) -> dict[str, int]:
    done = run(
        model("bert-base"), machine(), mode=mode, gpus=4, batch=8, precision=precision, **options
    )
    return {kind: sum(done.cluster.messages[kind]) for kind in KINDS[mode]}


@pytest.mark.parametrize("mode", KINDS)
def test_autocast_leaves_what_travels_as_it_is(mode: str) -> None:
    assert sent(mode, "fp32") == sent(mode, "amp") == sent(mode, "tf32")
    assert {model("bert-base").parameter_bytes} == set(sent(mode, "amp").values())


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_model_in_16_bits_sends_half(mode: str, precision: str) -> None:
    assert sent(mode, "fp32") == {
        kind: 2 * nbytes for kind, nbytes in sent(mode, precision).items()
    }


def test_integer_buffers_keep_their_size_in_a_model_of_16_bits() -> None:
    def buffers(precision: str) -> tuple[int, ...]:
        done = run(chain(2, buffers=2), machine(), mode="dp", gpus=2, precision=precision)
        return done.cluster.messages["buffer chunks"]

    assert ((256, 512), (128, 512)) == (buffers("fp32"), buffers("fp16"))


def test_a_16_bit_hook_halves_the_wire_exactly_whatever_the_model_is_cast_to() -> None:
    def reduced(**options: Any) -> list[int]:
        done = run(model("resnet50"), machine(), mode="ring", gpus=4, batch=64, **options)
        return [s.nbytes for s in spans(done, Phase.ALL_REDUCE, track="comm")]

    half = {"ring": RingOptions(gradient_hook="fp16")}
    for precision in ("fp32", "amp"):
        plain = reduced(precision=precision)
        assert plain == [2 * n for n in reduced(precision=precision, **half)]


def kernels(done: Simulation, ending: str) -> int:
    return sum(s.name.endswith(ending) for s in spans(done))


def test_autocast_casts_each_weight_matrix_forward_and_each_gradient_backward() -> None:
    workload = model("resnet50")
    matrices = sum(len(p.shape) > 1 for p in workload.parameters)
    done = run(workload, machine(), batch=32, precision="amp")
    assert matrices == kernels(done, "aten._to_copy") - kernels(
        run(workload, machine(), batch=32), "aten._to_copy"
    )
    assert matrices == kernels(done, "cast gradient")


def test_the_optimizer_of_autocast_works_in_32_bits() -> None:
    def optimizer_ns(precision: str) -> int:
        done = run(model("resnet50"), machine(), batch=32, precision=precision)
        return sum(s.length for s in spans(done, Phase.OPTIMIZER))

    assert optimizer_ns("fp32") == optimizer_ns("amp")
    assert optimizer_ns("fp16") < optimizer_ns("fp32")


def test_a_for_loop_optimizer_launches_tensor_by_tensor_at_a_whole_launch_each() -> None:
    done = run(model("resnet50"), machine(), batch=32, optimizer_implementation="for-loop")
    runs = Runs(model("resnet50"), done.cluster.scenario, (done.cluster.device, done.cluster.host))
    host = machine().host
    calls = sum(op.kernels for op in runs.optimizer_ops().ops)
    each = host.launch_gil_s.value + host.launch_free_s.value
    found = runs.optimizer()
    total = int(found.locked.sum() + found.unlocked.sum()) / 1e9
    # 161 tensors; views and rounding come on top.
    assert calls > 161
    assert calls * each <= total < 1.3 * calls * each


def test_a_server_keeps_a_16_bit_model_in_half_the_bytes() -> None:
    def update_ns(precision: str) -> int:
        options = ServerOptions(placement="cpu", servers=1)
        done = run(
            model("resnet50"), machine(), mode="ps", gpus=2, server=options, precision=precision
        )
        timeline = done.cluster.recorder.timeline(done.start_ns, done.end_ns)
        return sum(
            s.length for s in all_spans(timeline) if s.rank < 0 and s.phase == Phase.OPTIMIZER
        )

    assert update_ns("fp16") < update_ns("amp") == update_ns("fp32")
