"""The command: what its flags ask for, what it says, in which stream, with which exit code."""

from __future__ import annotations

import builtins
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from click.testing import CliRunner, Result

from dpsim import cli, files
from dpsim._options import SIMULATE
from dpsim._parameters import Named
from dpsim._question import question_of
from dpsim.errors import InfeasibleError
from dpsim.hardware import HardwareProfile, Network
from dpsim.prediction import Prediction
from dpsim.scenario import DataParallelOptions, RingOptions, Scenario, ServerOptions
from dpsim.units import GB, MIB
from dpsim.workload import Workload
from tests.predictions import prediction

ROOT = Path(__file__).parents[1]
PREDICT = importlib.import_module("dpsim.answer")
Asked = dict[str, Any]


def run(*words: str, **environment: str | None) -> Result:
    """Return what a command line did, on a terminal of 80 columns without colours."""
    env = {"COLUMNS": "80", "NO_COLOR": "1", "FORCE_COLOR": None, **environment}
    return CliRunner().invoke(cli.main, words, env=env)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Return a dictionary that gets what `predict` is called with; nothing is simulated."""
    kept: Asked = {}

    def predict(
        workload: Workload, profile: HardwareProfile, scenario: Scenario, network: Network | None
    ) -> Prediction:
        kept.update(workload=workload, profile=profile, scenario=scenario, network=network)
        return prediction(scenario=scenario, workload=workload.name, profile=profile.name)

    monkeypatch.setattr(PREDICT, "predict", predict)
    return kept


# ---------------------------------------------------------------------------- flags


def test_without_flags_the_defaults_of_the_scenario_hold(asked: Asked) -> None:
    assert 0 == run("simulate").exit_code
    assert replace(Scenario(), scaling="weak") == asked["scenario"]
    assert ("resnet50", "a100-sxm") == (asked["workload"].name, asked["profile"].name)
    assert asked["network"] is None


@pytest.mark.parametrize(
    ("flags", "field", "expected"),
    [
        ("--mode dp --gpus 2", "mode", "dp"),
        ("--gpus 4", "gpus", 4),
        ("--gpus 4", "mode", "ring"),
        ("--gpus 4 --nodes 2", "nodes", 2),
        ("--gpus 4", "batch", 128),
        ("--gpus 4", "scaling", "weak"),
        ("--gpus 4 --batch 64", "batch", 64),
        ("--gpus 4 --batch 64", "scaling", "strong"),
        ("--gpus 4 --batch-per-gpu 8", "batch", 32),
        ("--gpus 4 --batch-per-gpu 8", "scaling", "weak"),
        ("--precision amp", "precision", "amp"),
        ("--dtype bf16", "precision", "bf16"),
        ("--optimizer adam", "optimizer", "adam"),
        ("--optimizer-implementation fused", "optimizer_implementation", "fused"),
        ("--keep-gradients", "set_to_none", False),
        ("--accumulate 4", "accumulation", 4),
        ("--sync none", "sync", "none"),
        ("--pinned-input", "pinned_input", True),
        ("--evaluation", "evaluation", True),
        ("--iteration 3", "iteration", 3),
        ("--gpus 3 --device-ids 0,2,3", "device_ids", (0, 2, 3)),
        ("--device-ids 0,2,3", "gpus", 3),
        ("--split 3,1", "split", (3, 1)),
        ("--split 3,1", "batch", 4),
        ("--split 3,1", "scaling", "strong"),
        ("--split 3,1", "gpus", 2),
        ("--gpus 4 --straggler 3:1.5 --straggler 0:2", "stragglers", ((3, 1.5), (0, 2.0))),
        ("--seed 7", "seed", 7),
        ("--anchor-step-ms 350", "anchor_step_s", 0.35),
        ("--anchor-step-ms 350 --anchor-batch 64", "anchor_batch", 64),
    ],
)
def test_a_flag_sets_its_field(asked: Asked, flags: str, field: str, expected: object) -> None:
    assert "" == run("simulate", *flags.split(), "-q").stderr
    assert expected == getattr(asked["scenario"], field)


@pytest.mark.parametrize(
    ("mode", "flags", "expected"),
    [
        ("dp", "--output-device 1", DataParallelOptions(output_device=1)),
        ("dp", "--output-device cpu", DataParallelOptions(output_device=-1)),
        ("dp", "--output-device -1", DataParallelOptions(output_device=-1)),
        ("dp", "--loss-in-forward", DataParallelOptions(loss_in_forward=True)),
        ("dp", "--no-nccl", DataParallelOptions(nccl=False)),
        ("dp", "--input-on cpu", DataParallelOptions(input_on="cpu")),
        ("dp", "--keep-replicas --evaluation", DataParallelOptions(keep_replicas=True)),
        ("ring", "--bucket-mb 8", RingOptions(bucket_bytes=8 * MIB)),
        (
            "ring",
            "--bucket-list-mb 2,8,32",
            RingOptions(bucket_list_bytes=(2 * MIB, 8 * MIB, 32 * MIB)),
        ),
        ("ring", "--find-unused-parameters", RingOptions(find_unused_parameters=True)),
        ("ring", "--static-graph", RingOptions(static_graph=True)),
        ("ring", "--gradient-as-bucket-view", RingOptions(gradient_as_bucket_view=True)),
        ("ring", "--no-broadcast-buffers", RingOptions(broadcast_buffers=False)),
        ("ring", "--gradient-hook bf16", RingOptions(gradient_hook="bf16")),
        ("ring", "--all-reduce nccl", RingOptions(all_reduce="nccl")),
        ("ps", "--servers 2", ServerOptions(servers=2)),
        ("ps", "--placement cpu", ServerOptions(placement="cpu")),
        ("ps", "--sharding greedy", ServerOptions(sharding="greedy")),
        ("ps", "--update-on worker", ServerOptions(update_on="worker")),
        ("ps", "--path host", ServerOptions(path="host")),
        ("ps", "--gpus-per-worker 2", ServerOptions(gpus_per_worker=2)),
        ("ps", "--reduce-gbytes-per-s 3.5", ServerOptions(reduce_bytes_per_s=3.5 * GB)),
        ("ps", "--reduce-gbytes-per-s inf", ServerOptions(reduce_bytes_per_s=float("inf"))),
        ("ps", "--reduce-threads 2", ServerOptions(reduce_threads=2)),
    ],
)
def test_a_flag_of_a_mode_sets_its_option(
    asked: Asked, mode: str, flags: str, expected: object
) -> None:
    assert "" == run("simulate", "--gpus", "2", "--mode", mode, *flags.split()).stderr
    field = {"dp": "data_parallel", "ring": "ring", "ps": "server"}[mode]
    assert expected == getattr(asked["scenario"], field)


def test_names_that_flags_accept_are_those_of_the_records() -> None:
    hints = {
        name: hint
        for record in (Scenario, DataParallelOptions, RingOptions, ServerOptions)
        for name, hint in get_type_hints(record).items()
    }
    flags = {p.name: p.type for p in cli.main.commands["simulate"].params}
    named = {k: v for k, v in flags.items() if isinstance(v, Named) and not callable(v._names)}
    assert 9 == len(named)
    for name, kind in named.items():
        assert list(get_args(hints[str(name)])) == kind.names()


def test_every_field_of_the_records_has_a_flag_but_those_named_here() -> None:
    count = sum(
        len(get_type_hints(record))
        for record in (Scenario, DataParallelOptions, RingOptions, ServerOptions)
    )
    # no flags: scaling (from --batch), dim, and the three groups; two for batch; and six more:
    # --model --profile --network --network-gbytes-per-s --set
    assert count - 5 + 1 + 5 == len(SIMULATE)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--mode dp --gpus 2 --bucket-mb 8", "--bucket-mb is read by --mode ring alone; --mode dp ignores it"),
        ("--gpus 2 --servers 2", "--servers is read by --mode ps alone; --mode ring ignores it"),
        ("--network 10gbe", "--network changes nothing: all GPUs are on one node"),
        ("--network-gbytes-per-s 1", "--network-gbytes-per-s changes nothing: all GPUs are on one node"),
    ],
)  # fmt: skip
def test_a_flag_that_changes_nothing_is_said(asked: Asked, flags: str, expected: str) -> None:
    assert f"dpsim: warning: {expected}\n" == run("simulate", *flags.split()).stderr
    assert "" == run("-q", "simulate", *flags.split()).stderr
    made = json.loads(run("simulate", "--json", *flags.split()).stdout)
    assert [expected] == made["warnings"]


def test_several_nodes_get_the_usual_network_of_the_machine(asked: Asked) -> None:
    run("simulate", "--gpus", "16")
    assert "infiniband-hdr" == asked["network"].name
    run("simulate", "--gpus", "16", "--network", "10gbe")
    assert "10gbe" == asked["network"].name
    run("simulate", "--gpus", "8")
    assert asked["network"] is None


def test_servers_on_nodes_of_their_own_need_a_network(asked: Asked) -> None:
    run("simulate", "--gpus", "2", "--mode", "ps", "--placement", "dedicated")
    assert "infiniband-hdr" == asked["network"].name


def test_a_measured_bandwidth_replaces_that_of_the_network(asked: Asked) -> None:
    run("simulate", "--gpus", "16", "--network-gbytes-per-s", "2")
    assert "infiniband-hdr at 2 GB/s" == asked["network"].name
    assert 2e9 == asked["network"].flow_bytes_per_s.value
    run("simulate", *"--gpus 8 --profile rtx4090 --network-gbytes-per-s 2".split())
    assert "custom" == asked["network"].name


def test_a_number_of_the_machine_can_be_replaced(asked: Asked) -> None:
    result = run("simulate", "--set", "host.launch_gil_s=2e-5", "--set", "host.view_s=0")
    assert 2e-5 == asked["profile"].host.launch_gil_s.value
    assert 0 == asked["profile"].host.view_s.value
    assert "host.launch_gil_s 2e-05, from --set" in " ".join(result.stdout.split())


def test_what_was_chosen_is_said(asked: Asked) -> None:
    made = json.loads(run("simulate", "--gpus", "2", "--json").stdout)
    chosen = ["model resnet50", "profile a100-sxm", "batch 32 a GPU", "mode ring"]
    assert chosen == made["assumptions"][:4]


# ---------------------------------------------------------------------------- wrong input

WRONG = [
    ("--batch 0", 5, "--batch must be a whole number >= 1, got '0'. Correct the value."),
    ("--batch -4", 5, "--batch must be a whole number >= 1, got '-4'. Correct the value."),
    ("--batch 1.5", 2, "--batch must be a whole number >= 1, got '1.5'. Correct the value."),
    ("--batch nan", 2, "--batch must be a whole number >= 1, got 'nan'. Correct the value."),
    ("--batch 1e3", 2, "--batch must be a whole number >= 1, got '1e3'. Correct the value."),
    ("--batch " + "9" * 30, 2, f"--batch must be at most 1000000000, got '{'9' * 30}'. Lower the value."),
    ("--gpus 0", 5, "--gpus must be a whole number >= 1, got '0'. Correct the value."),
    ("--gpus 1000001", 2, "--gpus must be at most 1000000, got '1000001'. Lower the value."),
    ("--gpus x", 2, "--gpus must be a whole number >= 1, got 'x'. Correct the value."),
    ("--batch-per-gpu 0", 5, "--batch-per-gpu must be a whole number >= 1, got '0'. Correct the value."),
    ("--accumulate 0", 2, "--accumulate must be a whole number >= 1, got '0'. Correct the value."),
    ("--iteration 4", 2, "--iteration must be at most 3, got '4'. Lower the value."),
    ("--seed -1", 2, "--seed must be a whole number >= 0, got '-1'. Correct the value."),
    ("--bucket-mb 0", 2, "--bucket-mb must be a number > 0, got '0'. Correct the value."),
    ("--bucket-mb nan", 2, "--bucket-mb must be a number > 0, got 'nan'. Correct the value."),
    ("--bucket-mb inf", 2, "--bucket-mb must be a number > 0, got 'inf'. Correct the value."),
    ("--bucket-mb x", 2, "--bucket-mb must be a number > 0, got 'x'. Correct the value."),
    ("--bucket-mb 1e-9", 2, "--bucket-mb must be between 1e-06 and 1e+09, got '1e-9'. Correct the value."),
    ("--bucket-list-mb 2,,8", 2, "--bucket-list-mb must be a number > 0, got ''. Correct the value."),
    ("--bucket-mb 2 --bucket-list-mb 2,8", 2, "--bucket-mb and --bucket-list-mb exclude each other, got both. Give one of them."),
    ("--anchor-step-ms -inf", 2, "--anchor-step-ms must be a number > 0, got '-inf'. Correct the value."),
    ("--anchor-batch 8", 2, "--anchor-batch must come with --anchor-step-ms, got 8 alone. Give the measured step, or leave it out."),
    ("--network-gbytes-per-s 0", 2, "--network-gbytes-per-s must be a number > 0, got '0'. Correct the value."),
    ("--mode rign", 2, "no mode 'rign'; known: {modes}. Did you mean 'ring'?"),
    ("--precision fp8", 2, "no precision 'fp8'; known: amp, bf16, fp16, fp32, tf32."),
    ("--all-reduce nccll", 2, "no all-reduce algorithm 'nccll'; known: auto, measured, nccl, ring. Did you mean 'nccl'?"),
    ("--model resnet5", 2, "no model 'resnet5'; known: {models}. Did you mean 'resnet50'? A path to a .json file works too."),
    ("--model no/such.json", 2, "no/such.json: cannot be read (No such file or directory). Check the path."),
    ("--profile a100", 3, "no profile 'a100'; known: {profiles}. Did you mean 'a100-sxm'? A path to a .json file works too."),
    ("--gpus 16 --network 10gb", 2, "no network '10gb'; known: {networks}. Did you mean '10gbe'? A path to a .json file works too."),
    ("--batch 8 --batch-per-gpu 4", 2, "--batch and --batch-per-gpu exclude each other, got both. Give --batch for all GPUs together, or --batch-per-gpu for each."),
    ("--split 3,1 --batch-per-gpu 4", 2, "--split and --batch-per-gpu exclude each other, got both. Give --split for all GPUs together, or --batch-per-gpu for each."),
    ("--split 3,1 --batch 5", 2, "--split must sum to --batch, got 3+1 = 4 for 5. Correct one of them, or leave --batch out."),
    ("--split 3,0", 5, "--split must be a whole number >= 1, got '0'. Correct the value."),
    ("--gpus 4 --split 3,1", 2, "--split must list one value for each of 4 GPUs, got 2 (3,1). Add or remove values, or change --gpus."),
    ("--gpus 4 --device-ids 0,2,3", 2, "--device-ids must list one value for each of 4 GPUs, got 3 (0,2,3). Add or remove values, or change --gpus."),
    ("--device-ids 0,2,2", 2, "--device-ids must name each of them once, got 0,2,2. Remove what is double."),
    ("--device-ids 0;2", 2, "--device-ids must be a whole number >= 0, got '0;2'. Correct the value."),
    ("--gpus 4 --straggler 4:2", 2, "--straggler must name a rank below 4, got 4. Ranks count from 0; correct it, or raise --gpus."),
    ("--gpus 4 --straggler 1:2 --straggler 1:3", 2, "--straggler must name each of them once, got 1,1. Remove what is double."),
    ("--straggler 1", 2, "--straggler must be RANK:FACTOR, got '1'. Put a ':' between the two."),
    ("--straggler 0:0", 2, "--straggler must be a number > 0, got '0'. Correct the value."),
    ("--output-device gpu", 2, "--output-device must be a whole number >= 0, got 'gpu'. Correct the value."),
    ("--set host.launch_gil_s", 2, "--set must be PATH=VALUE, got 'host.launch_gil_s'. Put a '=' between the two."),
    ("--set host.launch_gil_s=fast", 2, "--set must get a number, got 'fast'. Correct the value."),
    ("--set host.launch_gil_s=nan", 2, "--set must get a number, got 'nan'. Correct the value."),
    ("--set host.launch_gil_s=-1", 2, "--set host.launch_gil_s=-1: value: Input should be greater than or equal to 0, got -1.0. Correct the value."),
    ("--set hots.x=1", 2, "no key of the profile 'hots'; known: device, host, nccl, topology. Did you mean 'host'?"),
    ("--trace - --json", 2, "--trace must name a file beside --json, got '-': both would go to standard output. Give --trace a file name."),
    ("--gpsu 4", 2, "no option '--gpsu'. Did you mean '--gpus'? 'dpsim simulate --help' lists the flags."),
]  # fmt: skip


def full(expected: str) -> str:
    from dpsim.schedules import SCHEDULES

    return expected.format(
        modes=", ".join(SCHEDULES.names()),
        models=", ".join(files.names(Workload)),
        profiles=", ".join(files.names(HardwareProfile)),
        networks=", ".join(files.names(Network)),
    )


@pytest.mark.parametrize(("flags", "code", "expected"), WRONG, ids=[flags for flags, *_ in WRONG])
def test_wrong_input_is_one_line_and_an_exit_code(
    asked: Asked, flags: str, code: int, expected: str
) -> None:
    result = run("simulate", *flags.split())
    shown = "" if "--json" in flags else f"dpsim: error: {full(expected)}\n"
    assert (code, shown) == (result.exit_code, result.stderr)
    assert {} == asked
    if not shown:
        assert full(expected) == json.loads(result.stdout)["error"]["message"]


@pytest.mark.parametrize(("flags", "code", "expected"), WRONG, ids=[flags for flags, *_ in WRONG])
def test_wrong_input_is_one_document_with_json(
    asked: Asked, flags: str, code: int, expected: str
) -> None:
    result = run("simulate", "--json", *flags.split())
    document = json.loads(result.stdout)
    assert (code, "") == (result.exit_code, result.stderr)
    assert (1, False) == (document["schema_version"], document["ok"])
    assert full(expected) == document["error"]["message"]
    assert {"code", "message", "hint"} == set(document["error"])


def test_an_error_document_has_a_code_and_a_hint(asked: Asked) -> None:
    error = json.loads(run("simulate", "--batch", "0", "--json").stdout)["error"]
    assert ("infeasible", "Correct the value.") == (error["code"], error["hint"])
    error = json.loads(run("simulate", "--profile", "a100", "--json").stdout)["error"]
    hint = "Did you mean 'a100-sxm'? A path to a .json file works too."
    assert ("missing_profile", hint) == (error["code"], error["hint"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["lst"], "no command 'lst'; known: list, simulate, trace. Did you mean 'list'?"),
        (["list", "modles"], "no section 'modles'; known: collectives, models, modes, networks, profiles. Did you mean 'modes'?"),
        (["--vresion"], "no option '--vresion'. Did you mean '--version'? 'dpsim --help' lists the flags."),
    ],
)  # fmt: skip
def test_wrong_words_are_answered_with_those_that_exist(words: list[str], expected: str) -> None:
    result = run(*words)
    assert (2, f"dpsim: error: {expected}\n") == (result.exit_code, result.stderr)


@pytest.mark.parametrize(
    "words",
    [["simulate", "--gpus"], ["simulate", "four"], ["trace"], ["simulate", "--explain=yes"]],
)
def test_what_click_refuses_is_one_line_too(words: list[str]) -> None:
    result = run(*words)
    assert 2 == result.exit_code
    assert 1 == result.stderr.count("\n")
    assert result.stderr.startswith("dpsim: error: ")
    assert f"'dpsim {words[0]} --help' lists the flags." in result.stderr


# ---------------------------------------------------------------------------- faults


def failing(error: BaseException) -> Callable[..., Any]:
    def predict(*_: Any) -> Any:
        raise error

    return predict


def test_an_error_of_the_tree_ends_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    error = InfeasibleError("one\nline")
    monkeypatch.setattr(PREDICT, "predict", failing(error))
    result = run("-v", "simulate")
    assert (5, "dpsim: error: one line\n") == (result.exit_code, result.stderr)


def test_a_fault_of_ours_is_one_line_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PREDICT, "predict", failing(KeyError("x")))
    expected = (
        "dpsim: error: unexpected KeyError: 'x'. This is a fault of dpsim; -v shows where it is.\n"
    )
    result = run("simulate")
    assert (1, expected) == (result.exit_code, result.stderr)
    for words in (("-v", "simulate"), ("simulate", "-v")):
        told = run(*words).stderr
        assert told.startswith("Traceback (most recent call last):\n")
        assert told.endswith(expected)
    assert "unexpected" == json.loads(run("simulate", "--json").stdout)["error"]["code"]


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PREDICT, "predict", failing(KeyboardInterrupt()))
    result = run("simulate")
    assert (130, "dpsim: error: interrupted") == (result.exit_code, result.stderr.strip())


def test_a_pipe_that_closes_ends_quietly() -> None:
    for words in ("list --json", "--help"):
        program = f"'{sys.executable}' -m dpsim.cli {words} | head -1"
        shell = subprocess.run(
            ["bash", "-o", "pipefail", "-c", program],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (0, "") == (shell.returncode, shell.stderr)
        assert 1 == shell.stdout.count("\n")


# ---------------------------------------------------------------------------- output


def test_the_result_is_on_stdout_and_warnings_come_last(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = prediction(warnings=("far from\nmeasured",))
    monkeypatch.setattr(PREDICT, "predict", lambda *_: made)
    result = run("simulate")
    assert result.stdout.startswith("VERDICT   dp on 8 GPUs")
    assert "dpsim: warning: far from measured\n" == result.stderr
    assert result.output.endswith(result.stderr)


def test_the_report_fits_the_terminal(asked: Asked) -> None:
    for columns, most in (("80", 80), ("20", 60), ("300", 100)):
        shown = run("simulate", "--explain", COLUMNS=columns).stdout
        assert max(map(len, shown.splitlines())) <= most


@pytest.mark.parametrize(
    ("words", "environment", "colored"),
    [
        ((), {}, False),
        ((), {"FORCE_COLOR": "1"}, True),
        ((), {"CLICOLOR_FORCE": "1"}, True),
        ((), {"CLICOLOR_FORCE": "0"}, False),
        ((), {"FORCE_COLOR": "1", "CLICOLOR": "0"}, True),
        ((), {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ((), {"FORCE_COLOR": "1", "TERM": "dumb"}, False),
        (("--no-color",), {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colours_follow_the_usual_variables(
    asked: Asked, words: tuple[str, ...], environment: dict[str, str], colored: bool
) -> None:
    clean = {"NO_COLOR": None, "TERM": "xterm", "CLICOLOR": None, "CLICOLOR_FORCE": None}
    for line in (("simulate", *words), (*words, "simulate")):
        assert colored == ("\x1b[" in run(*line, **{**clean, **environment}).stdout)


def test_json_is_one_document_and_the_same_every_time(asked: Asked) -> None:
    first = run("simulate", "--gpus", "4", "--json")
    assert first.stdout == run("simulate", "--gpus", "4", "--json").stdout
    assert json.loads(first.stdout)["ok"] is True
    assert "" == first.stderr


@pytest.mark.parametrize("mode", ["single", "dp", "ps", "ring"])
def test_a_simulated_step_is_the_same_every_time_and_has_a_valid_trace(
    mode: str, tmp_path: Path
) -> None:
    gpus = "1" if mode == "single" else "3"
    words = ("simulate", "--model", "small-cnn", "--gpus", gpus, "--mode", mode)
    first = run(*words, "--json", "--trace", str(tmp_path / "step.json"))
    assert (0, "") == (first.exit_code, first.stderr)
    assert first.stdout == run(*words, "--json").stdout
    assert mode == json.loads(first.stdout)["scenario"]["mode"]
    assert 10 < len(json.loads((tmp_path / "step.json").read_text())["traceEvents"])
    shown = run(*words, "--explain").stdout
    assert ["VERDICT", mode, "on"] == shown.split()[:3]
    assert max(map(len, shown.splitlines())) <= 80


def test_a_trace_is_written_and_said(asked: Asked, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    result = run("simulate", "--trace", str(path))
    note = f"dpsim: wrote {path}; https://ui.perfetto.dev opens it\n"
    assert (note, 0) == (result.stderr, result.exit_code)
    assert "traceEvents" in json.loads(path.read_text())
    assert "" == run("simulate", "--trace", str(path), "-q").stderr
    assert "" == run("simulate", "--trace", str(path), "--json").stderr


def test_a_trace_on_stdout_moves_the_report_to_stderr(asked: Asked) -> None:
    result = run("simulate", "--trace", "-")
    assert "traceEvents" in json.loads(result.stdout)
    assert result.stderr.startswith("VERDICT")


def test_a_trace_that_cannot_be_written_is_an_error(asked: Asked, tmp_path: Path) -> None:
    result = run("simulate", "--trace", str(tmp_path))
    expected = f"dpsim: error: {tmp_path}: cannot be written (Is a directory). Check the path.\n"
    assert (2, expected) == (result.exit_code, result.stderr)


def test_help_and_version() -> None:
    assert "0.1.0" in run("--version").stdout
    assert run("--help").stdout == run().stdout
    shown = run("simulate", "--help").stdout
    assert "--mode ring (DistributedDataParallel):" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_list_prints_one_section_or_all() -> None:
    shown = run("list").stdout
    headings = [line for line in shown.splitlines() if line.isupper()]
    assert [name.upper() for name in cli.LISTS] == headings
    for name in cli.LISTS:
        assert run("list", name).stdout in shown
        made = json.loads(run("list", name, "--json").stdout)
        assert ["schema_version", "ok", name] == list(made)
    assert list(cli.LISTS) == list(json.loads(run("list", "--json").stdout))[2:]


# ---------------------------------------------------------------------------- trace


LAYER = """
from torch import nn

def layer():
    return nn.Linear(8, 2)
"""
TRACED = ("trace", "layer.py:layer", "--input", "8", "--loss", "sum")


def test_a_model_is_traced_to_stdout_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("layer.py").write_text(LAYER)
    path = Path("traced.json")
    told = run(*TRACED, "--batches", "1,2,3", "-o", str(path))
    assert 0 == told.exit_code, told.stderr
    assert "" == told.stdout
    assert told.stderr.startswith(f"dpsim: wrote {path}: layer, 2 parameters, ")
    kept = files.load(Workload, path)
    assert (1, 2, 3) == kept.source.batches
    assert kept.source.command.endswith(f"-o {path}")
    plain = run(*TRACED, "--name", "line", "--sample", "word", "--optimizers", "sgd")
    made = json.loads(plain.stdout)
    assert ("line", "word", "") == (made["name"], made["sample"], plain.stderr)


def test_wrong_flags_of_trace_are_one_line() -> None:
    pytest.importorskip("torch")
    result = run("trace", "torch.nn:ReLU", "--input", "8", "--batches", "2,4")
    expected = "--batches must be three different whole numbers >= 1, got 2,4. Example: 2,4,8"
    assert (2, f"dpsim: error: {expected}\n") == (result.exit_code, result.stderr)
    result = run("trace", "torch.nn:ReLU")
    assert "dpsim: error: --input must be given at least once, got none." in result.stderr


def test_without_torch_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_torch(name: str, *rest: Any) -> Any:
        if name.startswith("calibrate"):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    result = run(*TRACED)
    expected = (
        "dpsim: error: dpsim trace needs the extra 'calibrate'. "
        "Install it with: pip install 'dpsim-train[calibrate]'\n"
    )
    assert (2, expected) == (result.exit_code, result.stderr)


# ---------------------------------------------------------------------------- library


def test_public_names_exist_and_are_listed() -> None:
    import dpsim

    assert set(dpsim.__all__) <= set(dir(dpsim))
    assert {"__version__", *dpsim._HOMES} == set(dpsim.__all__)
    for name in dpsim.__all__:
        assert getattr(dpsim, name) is not None
    with pytest.raises(AttributeError, match="module 'dpsim' has no attribute 'nothing'"):
        _ = dpsim.nothing


def test_a_question_needs_no_command() -> None:
    flags = dict.fromkeys(str(p.name) for p in cli.main.commands["simulate"].params)
    asked = question_of({**flags, "settings": (), "stragglers": (), "gpus": 2})
    assert ("ring", 64) == (asked.scenario.mode, asked.scenario.batch)
