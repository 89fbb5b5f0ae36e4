from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from calibrate.target import resolve
from calibrate.trace import trace
from dpsim import files
from dpsim.errors import CaptureError, InputError
from dpsim.workload import OpClass, Workload

MODELS = Path(__file__).parent / "traced_models.py"
MIB = 1 << 20


def traced(model, /, *inputs, **options):
    options.setdefault("optimizers", ())
    return trace(f"{MODELS}:{model}", inputs=inputs, **options)


@pytest.fixture(scope="module")
def small_net():
    return traced("SmallNet", "3x32x32")


@pytest.fixture(scope="module")
def resnet50():
    return traced("ResNet50", "3x224x224", optimizers=("momentum",))


def flops(ops, batch):
    return sum(op.flops.at(batch) for op in ops)


def kernels(ops):
    return [op for op in ops if op.kernels]


def test_flops_of_a_small_network_are_those_counted_by_hand(small_net):
    assert 67_371_008 == flops(small_net.forward, 16)
    assert 106_430_464 == flops(small_net.backward, 16)


def test_first_convolution_has_no_input_gradient(small_net):
    convolutions = [op for op in small_net.backward if op.name == "aten.convolution_backward"]
    assert ["conv2", "conv1"] == [op.module for op in convolutions]
    # weight, bias and, but for the first layer, data
    assert [3, 2] == [op.kernels for op in convolutions]
    assert [75_497_472, 28_311_552] == [op.flops.at(16) for op in convolutions]


def test_linear_bias_gradient_is_a_reduction_of_its_own(small_net):
    ops = [op for op in kernels(small_net.backward) if op.module == "fc"]
    assert ["aten.mm", "aten.mm", "aten.sum"] == [op.name for op in ops]


def test_counting_batches_of_normalisation_is_a_kernel(small_net):
    counts = [op for op in small_net.forward if op.name == "aten.add_"]
    assert [("bn1", 1, 16.0), ("bn2", 1, 16.0)] == [
        (op.module, op.kernels, op.bytes_moved.at(1)) for op in counts
    ]


def test_bytes_of_element_wise_and_normalisation_ops_follow_the_rules(small_net):
    elements, element_bytes = 16 * 32 * 32 * 32, 4
    channels = 32 * element_bytes
    expected = {
        "aten.relu": 2 * elements * element_bytes,
        # the weights, the running statistics and those of the batch, beside 3 n e
        "aten.native_batch_norm": 3 * elements * element_bytes + 6 * channels,
        "aten.threshold_backward": 3 * elements * element_bytes,
        "aten.native_batch_norm_backward": 5 * elements * element_bytes,
    }
    ops = {}
    for op in (*small_net.forward, *reversed(small_net.backward)):
        ops.setdefault(op.name, op)
    for name, moved in expected.items():
        slack = 8 * channels if name.endswith("backward") else 0
        assert moved <= ops[name].bytes_moved.at(16) <= moved + slack, name


def test_backward_of_max_pooling_reads_wide_indices_and_fills_with_zeros(small_net):
    (op,) = [o for o in small_net.backward if o.op_class is OpClass.POOL]
    before, after = 32 * 32 * 32, 32 * 16 * 16
    assert 2 == op.kernels
    assert after * (4 + 8) + 2 * before * 4 == op.bytes_moved.per_sample


def test_loss_is_a_suffix_of_forward_and_a_prefix_of_backward(small_net):
    loss = small_net.forward[small_net.loss_start :]
    assert ["aten._log_softmax", "aten.nll_loss_forward"] == [op.name for op in kernels(loss)]
    before = small_net.backward[: small_net.loss_backward_ops]
    assert [
        "aten.ones_like",
        "aten.nll_loss_backward",
        "aten._log_softmax_backward_data",
    ] == [op.name for op in kernels(before)]
    assert "fc" == small_net.backward[small_net.loss_backward_ops].module


def test_modules_called_are_counted_before_the_op_they_lead_to(small_net):
    assert 2 == small_net.forward[0].module_calls  # the root and conv1
    assert 7 == sum(op.module_calls for op in small_net.forward)  # relu is no module
    assert 0 == sum(op.module_calls for op in small_net.backward)


def test_module_that_calls_nothing_counts_with_the_op_before_it():
    workload = traced("EndsInIdentity", "4")
    assert 3 == sum(op.module_calls for op in workload.forward)


def test_gradients_are_ready_in_the_order_observed(small_net):
    names = [small_net.parameters[g.parameter].name for g in small_net.gradients]
    assert ["fc.bias", "fc.weight"] == names[:2]
    assert {"conv1.weight", "conv1.bias"} == set(names[-2:])
    after = [g.after_op for g in small_net.gradients]
    assert sorted(after) == after
    assert after[-1] < len(small_net.backward)


def test_tensors_of_a_batch_are_linear_in_it(small_net):
    assert 4 * 3 * 32 * 32 * 5 == small_net.input_bytes.at(5)
    assert 8 * 5 == small_net.target_bytes.at(5)
    assert 4 * 10 * 5 == small_net.output_bytes.at(5)
    assert 1 == small_net.output_tensors


def test_resnet50_has_its_known_sizes(resnet50):
    assert 161 == len(resnet50.parameters)
    assert 102_228_128 == resnet50.parameter_bytes == resnet50.gradient_bytes
    assert 159 == len(resnet50.buffers)
    by_dtype = {"float32": 0, "int64": 0}
    for buffer in resnet50.buffers:
        by_dtype[buffer.dtype] += buffer.nbytes
    assert {"float32": 212_480, "int64": 424} == by_dtype
    assert 8.178 == pytest.approx(resnet50.flops_per_sample_forward / 1e9, abs=5e-4)
    assert 1.971 == pytest.approx(
        flops(resnet50.backward, 1) / flops(resnet50.forward, 1), abs=5e-4
    )
    assert 85.9 == pytest.approx(resnet50.saved_bytes.per_sample / 1e6, abs=0.05)


def test_resnet50_makes_the_known_number_of_calls(resnet50):
    """280 forward, allocations included; 339 backward with `out.sum()`, its own call included."""
    views = {"aten.detach", "aten.t", "aten.view", "aten.expand"}
    forward = [op for op in resnet50.forward[: resnet50.loss_start] if op.name not in views]
    assert 280 == len(forward)
    backward = [op for op in resnet50.backward if op.name not in views]
    stored = len(resnet50.gradients)  # each gradient is detached as it is stored
    summed, cross_entropy = 1, 2  # calls of the two losses that the other does not make
    assert 339 == len(backward) + stored + summed - cross_entropy


def test_resnet50_fills_the_buckets_that_ddp_builds(resnet50):
    sizes = [resnet50.parameters[g.parameter].nbytes for g in resnet50.gradients]
    buckets, size, limit = [], 0, MIB
    for nbytes in sizes:
        size += nbytes
        if size >= limit:
            buckets.append(size)
            size, limit = 0, 25 * MIB
    buckets.append(size)
    assert [7.82, 30.04, 25.04, 25.32, 9.27] == [round(b / MIB, 2) for b in buckets]
    names = [resnet50.parameters[g.parameter].name for g in resnet50.gradients]
    assert (["fc.bias", "fc.weight"], "conv1.weight") == (names[:2], names[-1])


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_shipped_resnet50_is_the_same_network_kernel_for_kernel(resnet50, part):
    shipped = files.find(Workload, "resnet50")
    expected = kernels(getattr(shipped, part))
    actual = kernels(getattr(resnet50, part))
    assert [op.name for op in expected] == [op.name for op in actual]
    assert expected == actual
    assert [p.name for p in shipped.parameters] == [p.name for p in resnet50.parameters]
    assert [g.parameter for g in shipped.gradients] == [g.parameter for g in resnet50.gradients]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("SmallNet", (3, 32, 32)), ("ResNet50", (3, 64, 64)), ("Checkpointed", (4,))],
)
def test_flops_are_exactly_those_of_flop_counter_mode(name, shape):
    workload = traced(name, "x".join(map(str, shape)), loss="sum")
    with torch.device("meta"):
        model, x = resolve(f"{MODELS}:{name}")(), torch.randn(6, *shape)
    with FlopCounterMode(display=False) as forward:
        output = model(x)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert forward.get_total_flops() == flops(workload.forward, 6)
    assert backward.get_total_flops() == flops(workload.backward, 6)


def test_depthwise_backward_costs_as_much_as_forward_for_each_half():
    """FlopCounterMode (2.13) counts the weight gradient as if there were no groups: 8 times."""
    workload = traced("Grouped", "4x8x8", loss="sum")
    forward = {op.module: op.flops.per_sample for op in workload.forward if op.flops.per_sample}
    assert {"conv1": 2 * 36 * 8 * 4 * 9, "conv2": 2 * 16 * 8 * 9} == forward
    backward = {op.module: op.flops.per_sample for op in workload.backward if op.flops.per_sample}
    assert {"conv1": forward["conv1"], "conv2": 2 * forward["conv2"]} == backward


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("Layer", "meta"),
        ("BranchesOnPositions", "meta"),
        ("SelectsEvenPositions", "meta"),
        ("BuildsWithData", "meta"),
        ("ForgetsPositions", "cpu"),
        ("ScalesByItem", "fake-cpu"),
        ("CreatesOnCpu", "fake-cpu"),
        ("Autocasts", "fake-cpu"),
        ("BranchesOnItem", "cpu"),
        ("SelectsByMask", "cpu"),
        ("SelectsByNonzero", "cpu"),
        ("UsesNumpy", "cpu"),
    ],
)
def test_models_that_need_more_than_shapes_fall_back(name, way):
    workload = traced(name, "4")
    assert way == workload.source.capture
    assert 2 * 16 == workload.flops_per_sample_forward
    assert 2 == len(workload.gradients)


@pytest.mark.parametrize("way", ["meta", "cpu"])
def test_ways_of_running_a_model_record_the_same_costs(way):
    other = {"meta": "Attention", "cpu": "AttentionOnData"}[way]
    ops = {op.name: op for op in traced(other, "5x16").forward}
    op = ops["aten._scaled_dot_product_efficient_attention"]
    assert (OpClass.ATTENTION, 4 * 5 * 5 * 16, 1) == (op.op_class, op.flops.at(1), op.kernels)


def test_failure_in_every_way_says_what_was_tried():
    with pytest.raises(CaptureError) as caught:
        traced("Raises", "4")
    assert str(caught.value) == (
        f"{MODELS}:Raises: one training step must run with --input 4, got the same error in every "
        "way tried (meta, fake-cpu, cpu): KeyError: 'no such layer'. Check that forward takes "
        "inputs of this shape and dtype (the batch is added in front)."
    )


def test_wrong_input_shape_is_one_line_and_logs_nothing(capfd):
    with pytest.raises(CaptureError) as caught:
        traced("Layer", "5")
    message = str(caught.value)
    assert "\n" not in message
    assert "cpu: RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)" in message
    assert ("", "") == capfd.readouterr()


def test_quadratic_cost_names_the_op():
    with pytest.raises(CaptureError) as caught:
        traced("ComparesSamples", "4")
    assert str(caught.value).endswith(
        "aten.mm of module '': FLOPs must be linear in the batch, got 32, 128, 512 at batches "
        "2, 4, 8 (320 expected at the last). A workload is linear in the batch: capture near the "
        "batch you will simulate (--batches 30,32,34), or allow an error (--tolerance 0.05)."
    )


def test_quadratic_cost_passes_near_one_batch_with_a_tolerance():
    workload = traced("ComparesSamples", "4", batches=(30, 32, 34), tolerance=0.05)
    product = next(op for op in workload.forward if op.name == "aten.mm")
    assert 2 * 4 * 32 * 32 == product.flops.at(32)


def test_loop_over_the_batch_says_that_the_number_of_ops_differs():
    with pytest.raises(CaptureError, match="the number of ops must be the same at every batch"):
        traced("LoopsOverSamples", "4")


def test_branch_on_the_batch_names_both_ops():
    with pytest.raises(CaptureError) as caught:
        traced("BranchesOnBatch", "4")
    assert (
        "must be the same at every batch, got aten.tanh of module '', aten.tanh of module '', "
        "aten.sigmoid of module '' at batches 2, 4, 8. The model branches on the batch"
    ) in str(caught.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("resnet50", "target must be MODULE:CALLABLE, got 'resnet50'. Example: "),
        (
            "no_such_module:Net",
            "no_such_module:Net: no module named 'no_such_module'. Install it, ",
        ),
        ("nowhere.py:Net", "nowhere.py: must be a Python file, but there is none. Check the path."),
        (f"{MODELS}:Nothing", "must define 'Nothing', but has no such name (callables: "),
        (f"{MODELS}:constant", "must be an nn.Module, or a callable that returns one, got int. "),
        (f"{MODELS}:not_a_module", "must return an nn.Module, got int. Name a class or function "),
        (f"{MODELS}:NeedsArgument", "without arguments, but missing a required argument: 'width'."),
    ],
)
def test_wrong_target_says_what_to_do(target, message):
    with pytest.raises(InputError) as caught:
        trace(target, inputs=["4"])
    assert message in str(caught.value)


def test_model_without_parameters_has_nothing_to_train():
    with pytest.raises(CaptureError, match="must have parameters, got none"):
        traced("NoParameters", "4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": []}, "--input must be given at least once, got none. Example: --input 3x224x"),
        ({"inputs": ["3xfoo"]}, "--input 3xfoo: dimensions must be whole numbers >= 1 joined by x"),
        (
            {"inputs": ["3x0"]},
            "--input 3x0: dimensions must be whole numbers >= 1 joined by x, got",
        ),
        ({"inputs": [""]}, "dimensions must be whole numbers >= 1 joined by x, got ''. Leave the"),
        ({"inputs": ["BxB"]}, "--input BxB: dimensions must be whole numbers"),
        ({"inputs": ["int:4"]}, "the dtype before ':' must be one of float64, float32,"),
        ({"inputs": ["a b=4"]}, "NAME must be a Python name, got 'a b'."),
        ({"targets": ["4:int64"]}, "--target 4:int64: the dtype before ':' must be one of"),
        ({"batches": (2, 2, 4)}, "--batches must be three different whole numbers >= 1, got 2,2,4"),
        ({"tolerance": -1.0}, "--tolerance must be in [0, 1), got -1.0."),
        (
            {"optimizers": ("sdg",)},
            "no optimizer 'sdg'; known: adam, adamw, momentum, sgd. Did you",
        ),
        ({"loss": "hinge"}, "--loss must be one of cross-entropy, mse, sum, model, or MODULE:CALL"),
        ({"loss": f"{MODELS}:constant"}, "must be callable as loss(output, target). Name another."),
        (
            {"loss": f"{MODELS}:not_scalar"},
            "must give a scalar that depends on the parameters, got",
        ),
    ],
)
def test_wrong_flag_says_where_and_what_to_do(options, message):
    with pytest.raises(InputError) as caught:
        trace(f"{MODELS}:Layer", **{"inputs": ["4"], **options})
    assert message in str(caught.value)


def test_unknown_dtype_is_named():
    with pytest.raises(CaptureError, match="dtype of 'phases' must be one of .*, got complex64."):
        traced("Complex", "4")


def test_model_too_large_to_run_is_not_run(monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda _: 4)  # 16 bytes of memory
    with pytest.raises(CaptureError, match="cpu: MemoryError: parameters and gradients take 0 GiB"):
        traced("BranchesOnItem", "4")


@pytest.mark.parametrize("text", ["import no_such_package", "1 / 0"])
def test_file_that_cannot_be_imported_is_named(tmp_path, monkeypatch, text):
    (tmp_path / "bad_model.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"bad_model.py: running it failed with \w+Error: "):
        trace("bad_model.py:Net", inputs=["4"])
    with pytest.raises(InputError, match="bad_model:Net: (no module named|importing)"):
        trace("bad_model:Net", inputs=["4"])


def test_output_without_a_default_loss_asks_for_one():
    with pytest.raises(InputError) as caught:
        traced("ThreeDimensional", "int64:7")
    assert str(caught.value) == (
        "--loss must be given for an output of shape (2, 7, 11) and dtype float32: only a 2-D "
        "float output has a default. Choose one of cross-entropy, mse, sum, model, or "
        "MODULE:CALLABLE(output, target)."
    )


def test_output_that_is_no_tensor_is_refused():
    with pytest.raises(InputError, match="the model must return a tensor, got int. Wrap it."):
        traced("ReturnsNumber", "4")


def test_cross_entropy_of_tokens_has_one_class_a_token():
    workload = traced("ThreeDimensional", "int64:7", loss="cross-entropy")
    assert 7 * 8 == workload.input_bytes.per_sample == workload.target_bytes.per_sample


def test_loss_of_the_model_takes_labels_by_keyword():
    workload = traced("OwnLoss", "int64:7", targets=["int64:7"], loss="model")
    assert 7 * 8 == workload.target_bytes.per_sample
    assert len(workload.forward) == workload.loss_start  # the loss is part of the model
    assert (4, 0) == (workload.output_bytes.fixed, workload.output_bytes.per_sample)


@pytest.mark.parametrize("loss", ["mse", "sum", f"{MODELS}:squared"])
def test_losses_can_be_named(loss):
    targets = [] if loss in ("mse", "sum") else ["4"]
    workload = traced("Layer", "4", loss=loss, targets=targets)
    assert (0 if loss == "sum" else 16) == workload.target_bytes.per_sample
    assert 2 == len(workload.gradients)


def test_side_outputs_add_to_the_loss():
    workload = traced("SideOutput", "4", loss="cross-entropy")
    losses = [op for op in workload.forward if op.name == "aten.nll_loss_forward"]
    assert (2, 2, 4) == (len(losses), workload.output_tensors, len(workload.gradients))


def test_inputs_can_be_named_and_the_batch_elsewhere():
    workload = traced("KeywordInputs", "a=4", "b=Bx5")
    assert 4 * (4 + 5) == workload.input_bytes.per_sample


def test_shared_parameter_is_listed_once_and_ready_once():
    workload = traced("Tied", "int64:7")
    assert [("table.weight", (11, 4))] == [(p.name, p.shape) for p in workload.parameters]
    assert 1 == len(workload.gradients)


def test_sparse_gradients_are_marked():
    workload = traced("Sparse", "int64:7")
    assert [True, False, False] == [p.sparse_gradient for p in workload.parameters]


def test_frozen_and_unused_parameters_have_no_gradient():
    workload = traced("PartlyFrozen", "4", optimizers=("momentum",))
    assert [False, False, True, True, True, True] == [p.trainable for p in workload.parameters]
    assert {2, 3} == {g.parameter for g in workload.gradients}
    assert "no gradient reaches 2: unused.weight, unused.bias" == workload.source.note
    assert 4 * (16 + 4) == workload.optimizer("momentum").state_bytes


def test_recomputed_layers_appear_in_backward():
    workload = traced("Checkpointed", "4")
    # torch stops recomputing at the last tensor that backward needs: the input of the last layer
    assert ["second.0"] == [op.module for op in workload.backward if op.name == "aten.addmm"]
    assert 4 == sum(op.module_calls for op in workload.backward)


def test_module_instances_are_not_changed_by_tracing():
    assert "meta" == traced("instance", "4").source.capture


def test_source_holds_the_command_that_makes_the_workload_again():
    workload = traced(
        "Layer", "4", loss="mse", name="one", sample="row", optimizers=("sgd",), output="one.json"
    )
    expected = (
        f"dpsim trace {MODELS}:Layer --input 4 --loss mse --name one --sample row "
        "--optimizers sgd -o one.json"
    )
    assert expected == workload.source.command
    assert ("one", "row") == (workload.name, workload.sample)
    assert (2, 4, 8) == workload.source.batches


def test_workload_comes_back_from_its_file(small_net, tmp_path):
    path = tmp_path / "small.json"
    files.save(small_net, path)
    assert small_net == files.load(Workload, path)
