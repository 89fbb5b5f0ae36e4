"""The shipped workloads: they load, and are the networks that they claim to be."""

import shlex

import pytest

from calibrate.models import TARGET_WORDS, deep_mlp, lstm_attention, small_cnn
from calibrate.trace import trace
from dpsim import files
from dpsim._bundle import bundled
from dpsim.workload import OpClass, Workload

PARAMETERS = {
    "small-cnn": 431_080,
    "deep-mlp": 1_651_200,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "alexnet": 61_100_840,
    "inception-v3": 27_161_264,
    "mobilenet-v2": 3_504_872,
    "efficientnet-b0": 5_288_548,
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "lstm-attention": 84_822_004,
}
FORWARD_GFLOP = {  # per sample, twice the multiply-adds that the papers print
    "resnet18": 3.63,
    "resnet101": 15.60,
    "resnet152": 23.03,
    "vgg16": 30.94,
    "alexnet": 1.43,
    "mobilenet-v2": 0.60,
    "efficientnet-b0": 0.77,
}
MAX_FILE_BYTES = 700_000


@pytest.fixture(scope="module", params=sorted(PARAMETERS))
def shipped(request):
    return files.find(Workload, request.param)


def test_all_of_them_are_shipped():
    assert sorted(PARAMETERS) == files.names(Workload)


def test_parameters_are_those_of_the_network(shipped):
    assert PARAMETERS[shipped.name] == sum(p.numel for p in shipped.parameters)
    assert 4 * PARAMETERS[shipped.name] == shipped.parameter_bytes == shipped.gradient_bytes


def test_every_trainable_parameter_has_one_gradient(shipped):
    trainable = [index for index, p in enumerate(shipped.parameters) if p.trainable]
    assert trainable == sorted(g.parameter for g in shipped.gradients)
    after = [g.after_op for g in shipped.gradients]
    assert after == sorted(after)
    assert after[-1] < len(shipped.backward)
    assert "" == shipped.source.note


def test_costs_are_sane(shipped):
    forward = sum(op.flops.per_sample for op in shipped.forward)
    backward = sum(op.flops.per_sample for op in shipped.backward)
    assert forward == shipped.flops_per_sample_forward > 0
    assert 1.5 < backward / forward < 2.2
    assert shipped.saved_bytes.per_sample > shipped.input_bytes.per_sample > 0
    assert 0 < shipped.loss_start <= len(shipped.forward)
    assert 0 < shipped.loss_backward_ops < len(shipped.backward)
    for op in (*shipped.forward, *shipped.backward):
        assert (op.kernels == 0) == (op.op_class is OpClass.VIEW), op
        assert min(op.flops.at(1), op.bytes_moved.at(1)) >= 0
        assert (op.bytes_moved.at(32) > 0) == (op.kernels > 0), op


def test_modules_are_entered_before_ops(shipped):
    names = {op.module for op in shipped.forward}
    assert {op.module for op in shipped.backward} <= names
    assert len(names) <= shipped.modules <= 2 * sum(op.module_calls for op in shipped.forward)


def test_optimizers_are_there_in_every_implementation(shipped):
    state = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
    for name, copies in state.items():
        for implementation in ("foreach", "fused", "for-loop"):
            found = shipped.optimizer(name, implementation)
            assert copies * shipped.gradient_bytes == found.state_bytes
            assert sum(op.kernels for op in found.ops) > 0


def test_command_names_the_file_it_makes(shipped):
    words = shlex.split(shipped.source.command)
    assert ["dpsim", "trace"] == words[:2]
    assert f"traces/workloads/{shipped.name}.json" == words[-1]
    assert shipped.name == words[words.index("--name") + 1]
    assert "meta" == shipped.source.capture
    assert "" != shipped.source.dpsim_version
    assert shipped.source.definition.split()[0] in ("dpsim", "torchvision", "transformers")


def test_file_is_small_and_comes_back_byte_for_byte(shipped):
    text = (bundled("traces/workloads") / f"{shipped.name}.json").read_text(encoding="utf-8")
    assert len(text) < MAX_FILE_BYTES
    assert text == files.dumps(shipped)


@pytest.mark.parametrize("name", sorted(FORWARD_GFLOP))
def test_forward_flops_are_those_of_the_papers(name):
    found = files.find(Workload, name).flops_per_sample_forward / 1e9
    assert FORWARD_GFLOP[name] == pytest.approx(found, abs=0.005)


@pytest.mark.parametrize("name", ["bert-base", "gpt2"])
def test_transformers_call_fused_attention_once_a_layer(name):
    workload = files.find(Workload, name)
    for ops in (workload.forward, workload.backward):
        assert 12 == sum(op.op_class is OpClass.ATTENTION for op in ops)


def test_decoder_with_input_feeding_launches_in_every_step():
    workload = files.find(Workload, "lstm-attention")
    cells = [op for op in workload.forward if op.name == "aten._thnn_fused_lstm_cell"]
    assert 2 * TARGET_WORDS == len(cells)
    assert 1 == sum(op.op_class is OpClass.RNN for op in workload.forward)


@pytest.mark.parametrize("make", [small_cnn, deep_mlp, lstm_attention])
def test_shipped_workloads_of_our_own_models_are_made_again(make):
    expected = files.find(Workload, make.__name__.replace("_", "-"))
    words = shlex.split(expected.source.command)
    loss = words[words.index("--loss") + 1] if "--loss" in words else None
    inputs = [words[i + 1] for i, word in enumerate(words) if word == "--input"]
    again = trace(words[2], inputs=inputs, loss=loss, optimizers=())
    for part in ("forward", "backward"):
        assert [op for op in getattr(expected, part) if op.kernels] == [
            op for op in getattr(again, part) if op.kernels
        ]
    assert expected.parameters == again.parameters
    assert expected.saved_bytes == again.saved_bytes
