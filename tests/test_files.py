"""Records as files: what is saved comes back equal, and what is wrong is refused in words."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dpsim import files
from dpsim._bundle import bundled
from dpsim.errors import FormatVersionError, InputError, MissingProfileError, UnknownNameError
from dpsim.hardware import (
    LONGEST_S,
    Architecture,
    Basis,
    CollectiveTable,
    Device,
    Duration,
    EfficiencyTable,
    HardwareProfile,
    Host,
    Link,
    NcclGraph,
    Network,
    PositiveQuantity,
    Quantity,
    Table,
    Topology,
)
from dpsim.workload import (
    DTYPE_BYTES,
    GradientReady,
    Linear,
    Op,
    OpClass,
    OptimizerOps,
    Source,
    Tensor,
    Workload,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
COUNT = st.integers(0, 2**40)
POSITIVE_COUNT = st.integers(1, 2**20)
NON_NEGATIVE = st.floats(0, 1e300)
POSITIVE = st.floats(0, 1e300, exclude_min=True)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
BASIS = st.sampled_from(Basis)
KINDS = [Workload, HardwareProfile, Network]


def quantities(value: st.SearchStrategy[float]) -> st.SearchStrategy[Quantity]:
    return st.builds(Quantity, value=value, basis=BASIS, source=NAME, spread=NON_NEGATIVE)


QUANTITY = quantities(st.floats(0, math.inf))
POSITIVE_QUANTITY = quantities(st.floats(0, math.inf, exclude_min=True))
DURATION = quantities(st.floats(0, LONGEST_S))
LINEAR = st.builds(Linear, fixed=FINITE, per_sample=FINITE)


@st.composite
def curves(draw: st.DrawFn, x: str, y: str, y_values: st.SearchStrategy[float]) -> dict[str, Any]:
    """Return two columns of one length >= 1, the first of which ascends."""
    at = draw(st.lists(POSITIVE, min_size=1, max_size=4, unique=True).map(sorted))
    values = draw(st.lists(y_values, min_size=len(at), max_size=len(at)))
    return {x: tuple(at), y: tuple(values)}


@st.composite
def built(draw: st.DrawFn, kind: type[Any], **given_fields: Any) -> Any:
    """Return a record whose fields are drawn by their type, but for those given."""
    hints = get_type_hints(kind, include_extras=True)
    values = {}
    for field in dataclasses.fields(kind):
        chosen = given_fields.get(field.name)
        values[field.name] = draw(_by_type(hints[field.name]) if chosen is None else chosen)
    return kind(**values)


def _by_type(hint: Any) -> st.SearchStrategy[Any]:
    known = {str: TEXT, bool: st.booleans(), Quantity: QUANTITY, Linear: LINEAR, Basis: BASIS}
    if hint in known:
        return known[hint]
    if hint == PositiveQuantity:
        return POSITIVE_QUANTITY
    if hint == Duration:
        return DURATION
    if get_origin(hint) is Annotated:
        return _by_constraint(hint)
    if str(get_origin(hint)) == "typing.Literal":
        return st.sampled_from(get_args(hint))
    message = f"no strategy for {hint}"
    raise AssertionError(message)


def _by_constraint(hint: Any) -> st.SearchStrategy[Any]:
    base, field = get_args(hint)[:2]
    limits = {type(rule).__name__: rule for rule in field.metadata}
    if base is str:
        return NAME
    if base is int:
        return st.integers(limits["Ge"].ge, 2**20)
    return POSITIVE if "Gt" in limits else NON_NEGATIVE


TABLE = st.builds(
    lambda curve, rest: Table(**curve, **rest),
    curves("at", "value", NON_NEGATIVE),
    st.fixed_dictionaries({"basis": BASIS, "source": NAME, "spread": NON_NEGATIVE}),
)
EFFICIENCY = st.builds(
    lambda curve, rest: EfficiencyTable(**curve, **rest),
    curves("work", "share", st.floats(0, 1, exclude_min=True)),
    st.fixed_dictionaries(
        {
            "op_class": st.sampled_from(OpClass),
            "basis": BASIS,
            "source": NAME,
            "spread": NON_NEGATIVE,
            "dtype": TEXT,
        }
    ),
)
COLLECTIVE = st.builds(
    lambda curve, rest: CollectiveTable(**curve, **rest),
    curves("nbytes", "seconds", POSITIVE),
    st.fixed_dictionaries(
        {
            "collective": st.sampled_from(["all_reduce", "broadcast"]),
            "ranks": st.integers(2, 64),
            "nodes": POSITIVE_COUNT,
            "basis": BASIS,
            "source": NAME,
            "spread": NON_NEGATIVE,
            "network": TEXT,
        }
    ),
)
LINK = built(Link, ends=st.tuples(NAME, NAME))
TOPOLOGY = st.integers(1, 3).flatmap(
    lambda gpus: built(
        Topology,
        gpus=st.just(gpus),
        links=st.tuples(
            *(built(Link, ends=st.just((f"gpu{i}", "cpu0"))) for i in range(gpus)), LINK
        ),
    )
)
DEVICE = built(
    Device,
    architecture=st.sampled_from(get_args(Architecture)),
    peak_flop_per_s=st.dictionaries(
        st.sampled_from(["fp32", "tf32", "fp16", "bf16"]), POSITIVE_QUANTITY
    ),
    efficiency=st.lists(EFFICIENCY, max_size=2).map(tuple),
)
PROFILES = built(
    HardwareProfile,
    device=DEVICE,
    host=built(Host, gil_handover_s=TABLE),
    topology=TOPOLOGY,
    nccl=st.lists(built(NcclGraph), max_size=2).map(tuple),
    collectives=st.lists(COLLECTIVE, max_size=2).map(tuple),
    framework=st.dictionaries(TEXT, TEXT, max_size=2),
    notes=st.lists(TEXT, max_size=2).map(tuple),
)
NETWORKS = built(Network)
OPS = st.lists(built(Op, op_class=st.sampled_from(OpClass)), max_size=3).map(tuple)
TENSORS = st.lists(
    built(
        Tensor,
        shape=st.lists(COUNT, max_size=3).map(tuple),
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    ),
    max_size=2,
).map(tuple)
WORKLOADS = built(
    Workload,
    source=built(Source, batches=st.lists(POSITIVE_COUNT, max_size=3).map(tuple)),
    parameters=TENSORS,
    buffers=TENSORS,
    forward=OPS,
    backward=OPS,
    gradients=st.lists(built(GradientReady), max_size=2).map(tuple),
    optimizers=st.lists(built(OptimizerOps, ops=OPS), max_size=2).map(tuple),
)


def load_text(kind: type[Any], text: str, folder: Path) -> Any:
    path = folder / "file.json"
    path.write_text(text, encoding="utf-8")
    return files.load(kind, path)


@given(WORKLOADS)
def test_a_workload_comes_back_equal(value: Workload) -> None:
    check_round_trip(value)


@given(PROFILES)
def test_a_profile_comes_back_equal(value: HardwareProfile) -> None:
    check_round_trip(value)


@given(NETWORKS)
def test_a_network_comes_back_equal(value: Network) -> None:
    check_round_trip(value)


def check_round_trip(value: Any) -> None:
    text = files.dumps(value)
    again = files.parse(type(value), json.loads(text), "text")
    assert value == again
    assert text == files.dumps(again)


def test_a_saved_file_loads(tmp_path: Path) -> None:
    files.save(NETWORK, tmp_path / "wire.json")
    assert NETWORK == files.load(Network, tmp_path / "wire.json")
    assert NETWORK == files.find(Network, str(tmp_path / "wire.json"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_shipped_file_loads_and_is_found_by_its_own_name(kind: type[Any]) -> None:
    names = files.names(kind)
    assert names, "the wheel ships at least one of each"
    assert [(name, name) for name in names] == [(n, files.find(kind, n).name) for n in names]


@pytest.mark.parametrize("kind", KINDS)
def test_every_shipped_file_is_as_save_writes_it(kind: type[Any]) -> None:
    """So that making one again shows what changed, and nothing else."""
    for path in sorted(bundled(files.FOLDERS[kind]).glob("*.json")):
        assert path.read_text(encoding="utf-8") == files.dumps(files.load(kind, path)), path.name


def test_a_file_begins_with_its_format_and_version() -> None:
    assert ["format", "version"] == list(json.loads(files.dumps(NETWORK)))[:2]
    assert ["format", "version"] == list(json.loads(files.dumps(WORKLOAD)))[:2]


def test_ops_are_stored_by_column() -> None:
    columns = json.loads(files.dumps(WORKLOAD))["forward"]
    assert ["aten.mm", "aten.relu"] == columns["name"]
    assert [2048, 0] == columns["flops_per_sample"]


# --- what is wrong is refused, word for word ------------------------------------------------


def known(value: float) -> Quantity:
    return Quantity(value=value, basis=Basis.ASSUMED, source="a test")


NETWORK = Network(
    name="wire",
    bandwidth_bytes_per_s=known(1.2e10),
    latency_s=known(1e-6),
    flow_bytes_per_s=known(1e9),
    rdma=True,
)
OPS_OF_TWO = (
    Op(name="aten.mm", op_class=OpClass.GEMM, flops=Linear(per_sample=2048.0)),
    Op(name="aten.relu", op_class=OpClass.ELEMENTWISE),
)
WORKLOAD = Workload(
    name="tiny",
    source=Source(command="dpsim trace tiny"),
    input_bytes=Linear(per_sample=128.0),
    target_bytes=Linear(per_sample=8.0),
    parameters=(Tensor(name="weight", shape=(32, 32)),),
    buffers=(),
    modules=1,
    forward=OPS_OF_TWO,
    loss_start=1,
    backward=OPS_OF_TWO,
    loss_backward_ops=1,
    gradients=(GradientReady(parameter=0, after_op=1),),
    saved_bytes=Linear(per_sample=128.0),
    output_bytes=Linear(per_sample=128.0),
    optimizers=(OptimizerOps(name="sgd", ops=OPS_OF_TWO),),
)
COLUMNS = (
    "name, op_class, module, flops_fixed, flops_per_sample, "
    "bytes_moved_fixed, bytes_moved_per_sample, kernels, module_calls"
)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that stands for all the shipped ones, with two records of every kind."""
    (tmp_path / "resnet50.json").write_text("{}")
    (tmp_path / "vgg16.json").write_text("{}")
    monkeypatch.setattr(files, "bundled", lambda _: tmp_path)
    return tmp_path


def test_an_unknown_model_gets_the_known_names_and_a_guess(shelf: Path) -> None:
    expected = (
        "no model 'resnet5'; known: resnet50, vgg16. Did you mean 'resnet50'? "
        "A path to a .json file works too."
    )
    with pytest.raises(UnknownNameError) as caught:
        files.find(Workload, "resnet5")
    assert expected == str(caught.value)
    assert 2 == caught.value.exit_code


def test_an_unknown_profile_is_a_missing_profile(shelf: Path) -> None:
    with pytest.raises(MissingProfileError) as caught:
        files.find(HardwareProfile, "lab")
    assert "no profile 'lab'; known: resnet50, vgg16. A path to a .json file works too." == str(
        caught.value
    )
    assert 3 == caught.value.exit_code


@pytest.mark.parametrize("name", ["", "..", "n" * 5000, "a\0b"])
def test_a_name_that_is_no_file_name_is_unknown(shelf: Path, name: str) -> None:
    with pytest.raises(UnknownNameError):
        files.find(Network, name)


@pytest.mark.parametrize(
    ("kind", "error"), [(Workload, InputError), (HardwareProfile, MissingProfileError)]
)
def test_a_path_that_leads_nowhere_is_named(
    kind: type[Any], error: type[InputError], tmp_path: Path
) -> None:
    path = tmp_path / "none.json"
    with pytest.raises(error) as caught:
        files.find(kind, str(path))
    assert f"{path}: cannot be read (No such file or directory). Check the path." == str(
        caught.value
    )


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        files.find(Workload, f"{tmp_path}/")
    assert f"{tmp_path}: cannot be read (Is a directory). Check the path." == str(caught.value)


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "wire.json"
    with pytest.raises(InputError) as caught:
        files.save(NETWORK, path)
    assert f"{path}: cannot be written (No such file or directory). Check the path." == str(
        caught.value
    )


def test_binary_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(InputError) as caught:
        files.load(Workload, path)
    assert f"{path}: must be UTF-8 text, got binary data. Check the path." == str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"format": ',
            "must be JSON, but line 1 column 12 says: Expecting value. Is the file complete?",
        ),
        ("", "must be JSON, but line 1 column 1 says: Expecting value. Is the file complete?"),
        (
            "[1, 2]",
            "must be an object whose first key is format, got [1, 2]. Is this a model file?",
        ),
        ("{}", "must be an object whose first key is format, got {}. Is this a model file?"),
        (
            '{"format": "dpsim.profile", "version": 1}',
            "format must be 'dpsim.workload', got 'dpsim.profile'. Is this a model file?",
        ),
        (
            '{"format": "dpsim.workload"}',
            "version must be a whole number >= 1, got None. Make the file again.",
        ),
        (
            '{"format": "dpsim.workload", "version": "1"}',
            "version must be a whole number >= 1, got '1'. Make the file again.",
        ),
    ],
)
def test_what_is_no_such_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_text(Workload, text, tmp_path)
    assert f"{tmp_path}/file.json: {message}" == str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5_000])
def test_json_beyond_the_reader_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="file.json: must be JSON, but .* Check the path"):
        load_text(Workload, text, tmp_path)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (
            2,
            "version must be at most 1, got 2. The file is newer than this dpsim: update dpsim.",
        ),
        (
            1,
            "version must be 2, got 1. "
            "The file is older: make it again with the command in its source.",
        ),
    ],
)
def test_other_versions_say_which_side_is_old(
    version: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = 3 - version
    monkeypatch.setitem(files.FORMATS, Network, ("dpsim.network", current))
    data = {**json.loads(files.dumps(NETWORK)), "version": version}
    with pytest.raises(FormatVersionError) as caught:
        files.parse(Network, data, "wire.json")
    assert f"wire.json: {message}" == str(caught.value)


def changed(record: Any, *keys: str, to: Any) -> dict[str, Any]:
    """Return the decoded JSON of `record` with one value replaced."""
    data: dict[str, Any] = json.loads(files.dumps(record))
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            changed(NETWORK, "bandwidth_bytes_per_s", "value", to=math.nan),
            "bandwidth_bytes_per_s.value: Input should be greater than or equal to 0, got nan. "
            "Correct the value.",
        ),
        (
            changed(NETWORK, "bandwidth_bytes_per_s", "value", to=0),
            "bandwidth_bytes_per_s: value must be > 0, got 0.0. Correct the value.",
        ),
        (
            changed(NETWORK, "latency_s", "basis", to="guessed"),
            "latency_s.basis: Input should be 'measured', 'published', 'modelled' or 'assumed', "
            "got 'guessed'. Correct the value.",
        ),
        (
            changed(NETWORK, "colour", to="blue"),
            "colour is not a known key. Remove it, or update dpsim.",
        ),
        (
            {"format": "dpsim.network", "version": 1, "name": "wire", "rdma": True},
            "bandwidth_bytes_per_s is missing (2 more). Add it, or make the file again.",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_key(data: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        files.parse(Network, data, "wire.json")
    assert f"wire.json: {message}" == str(caught.value)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (
            ("forward", "kernels"),
            [1],
            "forward: columns must have one length, got [1, 2]. Make the file again.",
        ),
        (
            ("forward", "kernels"),
            1,
            "forward.kernels: must be a list, got 1. Make the file again.",
        ),
        (
            ("forward",),
            {"name": []},
            f"forward: must have the columns {COLUMNS}, got name. Make the file again.",
        ),
        (
            ("backward",),
            [],
            f"backward: must have the columns {COLUMNS}, got []. Make the file again.",
        ),
        (
            ("optimizers",),
            [{"name": "sgd"}],
            f"optimizers.0.ops: must have the columns {COLUMNS}, got None. Make the file again.",
        ),
        (
            ("forward", "kernels"),
            [1, -1],
            "forward.1.kernels: Input should be greater than or equal to 0, got -1. "
            "Correct the value.",
        ),
        (
            ("forward", "op_class"),
            ["gemm", "gem"],
            "forward.1.op_class: Input should be 'gemm', 'conv', 'attention', 'rnn', "
            "'elementwise', 'normalization', 'reduction', 'pool', 'embedding', 'copy' or 'view', "
            "got 'gem'. Correct the value.",
        ),
    ],
)
def test_a_wrong_column_is_named(keys: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        files.parse(Workload, changed(WORKLOAD, *keys, to=value), "tiny.json")
    assert f"tiny.json: {message}" == str(caught.value)


def test_an_optimizer_that_is_no_object_is_refused_and_not_dropped() -> None:
    with pytest.raises(InputError, match=r"^tiny\.json: optimizers\.0: .*, got 'sgd'\. "):
        files.parse(Workload, changed(WORKLOAD, "optimizers", to=["sgd"]), "tiny.json")


def test_a_long_value_is_cut() -> None:
    data = changed(NETWORK, "latency_s", "basis", to="x" * 1000)
    with pytest.raises(InputError) as caught:
        files.parse(Network, data, "wire.json")
    assert str(caught.value).endswith(f"got '{'x' * 56}.... Correct the value.")


def test_a_record_refuses_bad_values_from_python_too() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        dataclasses.replace(known(1.0), value=-1.0)


def test_a_duration_that_no_machine_takes_is_refused() -> None:
    text = "value must be at most 1000 s, got inf"
    with pytest.raises(ValidationError, match=text):
        Link(
            ends=("gpu0", "cpu0"),
            kind="pcie",
            bandwidth_bytes_per_s=known(1e9),
            latency_s=known(math.inf),
        )
