"""Predictions as text and as JSON: complete, with units, the same bytes every time."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from typing import Any

import pytest

from dpsim.prediction import Baseline, LinkUse, PhaseTime, RankUse
from dpsim.report import as_dict, as_json, as_text, shortened
from dpsim.scenario import Scenario, ServerOptions
from dpsim.timeline import PHASES
from tests.predictions import prediction

PLAIN = """\
VERDICT   dp on 8 GPUs of a100-sxm: 61.204 ms a step, 4,183 images/s
          5.36x of one GPU, efficiency 67%
SETUP     resnet50, batch 256 (32 a GPU), fp32, momentum (foreach)
          1 node, steady state
ONE GPU   batch 32: 41.000 ms a step, 780 images/s; it waits for the host
PHASES    phase                      host      GPU 0  other GPUs
          broadcast parameters   2.000 ms   4.100 ms    4.000 ms
          forward               30.000 ms  11.000 ms   10.900 ms
          loss                          -    12.3 us           -
BYTES     link            kind    bytes a step
          gpu0>nvswitch0  nvlink      715.6 MB
          nvswitch0>gpu1  nvlink      102.2 MB  6 more alike
MESSAGES  all-reduce buckets: 4, 52.50 MiB in all: 1.00, 2 x 25.00, 1.50
BASIS              known as   spread  source
          compute  published     15%  data sheet
          host     assumed       40%  as an EPYC as an EPYC as an EPYC as an...
ASSUMED   profile a100-sxm
"""
"""Text for people: a change of it is a change that users see."""


def text(**changes: Any) -> str:
    return as_text(prediction(**changes))


def scenario(**changes: Any) -> Scenario:
    return replace(prediction().scenario, **changes)


def test_the_text_word_for_word() -> None:
    assert PLAIN == as_text(prediction(), assumptions=("profile a100-sxm",))


def test_explain_adds_the_ranks() -> None:
    lines = as_text(prediction(), explain=True).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("RANKS"))
    assert [
        "RANKS     rank  alike  batch      sent  received    compute   exposed",
        "             0      1     32  715.6 MB       0 B  33.000 ms  5.000 ms",
        "             1      7     32       0 B  102.2 MB  32.000 ms  4.000 ms",
    ] == lines[start : start + 3]


def test_the_plain_text_keeps_the_longest_phases_in_the_order_of_the_step() -> None:
    phases = tuple(
        PhaseTime(phase=phase, host_ns=1000 * (i + 1), device_ns=0, other_ns=0)
        for i, phase in enumerate(PHASES[:12])
    )
    rows = re.findall(r"^ {10}(\S.*?)  +\S+ us +-$", text(phases=phases), re.MULTILINE)
    assert [str(phase) for phase in PHASES[4:12]] == rows
    assert "(4 more with --explain)" in text(phases=phases)
    assert "more with --explain" not in as_text(prediction(phases=phases), explain=True)


def test_the_plain_text_keeps_the_busiest_kinds_of_link() -> None:
    links = tuple(LinkUse(link=f"a{i}>b", kind="pcie", nbytes=i * 10**6) for i in range(1, 7))
    assert "(3 more with --explain)" in text(links=links)
    shown = re.findall(r"(a\d)>b +pcie +(\S+ MB)", as_text(prediction(links=links), explain=True))
    assert [(f"a{i}", f"{i}.0 MB") for i in range(6, 0, -1)] == shown


def test_links_that_nothing_crosses_are_not_shown() -> None:
    assert "memory" not in text()
    assert "BYTES     none cross a link\n" in text(links=())


def test_more_gpus_that_are_slower_are_called_so() -> None:
    slow = text(step_ns=600_000_000)
    assert "0.55x of one GPU, efficiency 7%: slower than one GPU" in slow


def test_one_gpu_is_not_compared_with_itself() -> None:
    one = text(scenario=Scenario(), samples=32, phases=(), ranks=())
    assert one.startswith("VERDICT   single on 1 GPU of a100-sxm: 61.204 ms a step, 523 images/s\n")
    assert "ONE GPU" not in one
    assert "of one GPU" not in one


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"iteration": 2}, "iteration 2"),
        ({"accumulation": 4}, "4 micro-steps"),
        ({"evaluation": True}, "fp32, forward only\n"),
        ({"stragglers": ((3, 1.5),)}, "steady state, rank 3 takes 1.5x the time"),
        ({"anchor_step_s": 0.35}, "steady state, anchored to 350 ms"),
        ({"anchor_step_s": 0.35, "anchor_batch": 64}, "anchored to 350 ms at batch 64"),
    ],
)
def test_what_is_not_as_usual_is_said(changes: dict[str, Any], expected: str) -> None:
    assert expected in text(scenario=scenario(**changes))


def test_nodes_and_network_are_said() -> None:
    assert "2 nodes, network 10gbe" in text(nodes=2, network="10gbe")


def test_unequal_shares_are_said() -> None:
    ranks = (replace(prediction().ranks[0], batch=0), prediction().ranks[1])
    assert "batch 256 (0 to 32 a GPU)" in text(ranks=ranks)


def test_a_server_is_no_rank() -> None:
    server = RankUse(
        rank=-1,
        count=1,
        batch=0,
        sent_bytes=1,
        received_bytes=1,
        compute_ns=1,
        exposed_ns=0,
    )
    shown = as_text(prediction(ranks=(*prediction().ranks, server)), explain=True)
    assert "(32 a GPU)" in shown
    assert "server" in shown


def test_many_messages_are_cut() -> None:
    shown = text(messages=(("push", tuple(range(1 << 20, (1 << 20) + 100))),))
    assert "push: 100, 100.00 MiB in all: 1.00, 1.00, 1.00, 1.00, 1.00, 1.00, ..." in shown


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("explain", [False, True])
def test_no_line_is_longer_than_the_width(width: int, explain: bool) -> None:
    shown = as_text(prediction(), explain=explain, width=width, assumptions=("word " * 50,))
    assert max(map(len, shown.splitlines())) <= width
    assert not re.search(r" $", shown, re.MULTILINE)


def test_the_text_is_ascii_and_has_no_colour_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text().isascii()
    assert "\x1b" not in text()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" in as_text(prediction(), color=True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in text()


def test_brackets_in_names_are_no_markup() -> None:
    assert "[red]net[/red] :smile:" in text(workload="[red]net[/red] :smile:")


def test_a_short_text_stays_and_a_long_one_is_cut() -> None:
    assert "abc" == shortened("abc", 3)
    assert "ab..." == shortened("ab cdefgh", 6)


# ---------------------------------------------------------------------------- JSON


def test_json_holds_every_field_of_the_scenario() -> None:
    kept = as_dict(prediction())["scenario"]
    assert [field.name for field in fields(Scenario)] == list(kept)
    assert [field.name for field in fields(ServerOptions)] == list(kept["server"])


def test_json_holds_the_answer() -> None:
    made = as_dict(prediction(), assumptions=("profile a100-sxm",))
    assert (1, True) == (made["schema_version"], made["ok"])
    assert 61.204123 == made["step_time_ms"]
    assert 256 * 1e9 / 61_204_123 == made["throughput_samples_per_s"]
    assert made["efficiency"] == made["speedup"] / 8
    assert {
        "phase": "loss",
        "host_ms": 0.0,
        "gpu0_ms": 0.012345,
        "other_gpus_ms": 0.0,
    } == made["phases"][2]
    assert {"link": "memory", "kind": "host", "bytes": 0} == made["links"][-1]
    assert ["profile a100-sxm", "host: " + "as an EPYC " * 20] == made["assumptions"]


def test_json_is_valid_ascii_and_the_same_every_time() -> None:
    first = as_json(prediction())
    assert first == as_json(prediction())
    assert first.isascii()
    assert as_dict(prediction()) == json.loads(first)


def test_an_infinite_rate_is_a_word_in_json() -> None:
    free = scenario(server=ServerOptions(reduce_bytes_per_s=math.inf))
    made = json.loads(as_json(prediction(scenario=free)))
    assert "inf" == made["scenario"]["server"]["reduce_bytes_per_s"]


def test_every_time_and_size_in_json_has_its_unit() -> None:
    made = as_dict(prediction())
    counts = {"rank", "count", "batch", "nodes", "speedup", "efficiency", "spread", "gpus"}
    counts |= {"schema_version", "samples_per_step", "iteration", "accumulation", "seed"}
    parts = [made, made["baseline"], *made["phases"], *made["ranks"], *made["links"]]
    numbers = {
        key
        for part in parts
        for key, value in part.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    assert set() == {key for key in numbers - counts if not re.search(r"_ms$|bytes$|_per_s$", key)}


def test_the_baseline_is_in_json() -> None:
    made = as_dict(prediction(baseline=Baseline(batch=16, step_ns=20_000_000, samples=32)))
    assert {
        "batch": 16,
        "samples_per_step": 32,
        "step_time_ms": 20.0,
        "throughput_samples_per_s": 1600.0,
        "bound": "host",
    } == made["baseline"]
