"""A small prediction that nobody simulated, for the tests of what is made of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dpsim.hardware import Basis
from dpsim.prediction import Baseline, BasisEntry, LinkUse, PhaseTime, Prediction, RankUse
from dpsim.scenario import Scenario
from dpsim.timeline import PHASE_CODE, Phase, Timeline, Track
from dpsim.units import MIB, NS_PER_MS

Row = tuple[int, Phase, str, int, int, int]
"""Track, phase, op, start and end in nanoseconds, bytes."""

TRACKS = (
    Track(rank=0, name="main thread", kind="thread"),
    Track(rank=0, name="compute", kind="stream"),
    Track(rank=1, name="compute", kind="stream", count=7),
    Track(rank=-1, name="cpu", kind="server"),
)
ROWS: tuple[Row, ...] = (
    (0, Phase.FORWARD, "aten.convolution", -1_500, 10_000, 0),
    (1, Phase.FORWARD, "aten.convolution", 0, 400_001, 0),
    (1, Phase.BACKWARD, "aten.convolution", 400_001, 900_000, 0),
    (2, Phase.FORWARD, "aten.convolution", 50, 500_000, 0),
    (2, Phase.PUSH, "push", 500_000, 800_000, 102_228_128),
    (3, Phase.AGGREGATE, "add", 800_000, 950_000, 0),
)


def timeline(rows: tuple[Row, ...] = ROWS, tracks: tuple[Track, ...] = TRACKS) -> Timeline:
    """Return a timeline of 1 ms with these spans."""
    names = tuple(dict.fromkeys(row[2] for row in rows))

    def column(values: list[int], kind: Any = np.int64) -> Any:
        return np.array(values, dtype=kind)

    return Timeline(
        step_ns=1_000_000,
        tracks=tracks,
        names=names,
        start=column([row[3] for row in rows]),
        end=column([row[4] for row in rows]),
        track=column([row[0] for row in rows], np.int32),
        phase=column([PHASE_CODE[row[1]] for row in rows], np.int32),
        op=column([names.index(row[2]) for row in rows], np.int32),
        nbytes=column([row[5] for row in rows]),
        cause=column([-1] * len(rows)),
    )


def prediction(**changes: Any) -> Prediction:
    """Return 8 GPUs that take 61.2 ms for 256 images, where one takes 41 ms for 32."""
    made = Prediction(
        workload="resnet50",
        sample="image",
        profile="a100-sxm",
        profile_description="DGX A100",
        network="",
        nodes=1,
        scenario=Scenario(mode="dp", gpus=8, batch=256, scaling="weak"),
        step_ns=61_204_123,
        samples=256,
        baseline=Baseline(batch=32, step_ns=41 * NS_PER_MS, samples=32),
        phases=(
            PhaseTime(
                phase=Phase.BROADCAST, host_ns=2_000_000, device_ns=4_100_000, other_ns=4_000_000
            ),
            PhaseTime(
                phase=Phase.FORWARD, host_ns=30_000_000, device_ns=11_000_000, other_ns=10_900_000
            ),
            PhaseTime(phase=Phase.LOSS, host_ns=0, device_ns=12_345, other_ns=0),
        ),
        ranks=(
            RankUse(
                rank=0,
                count=1,
                batch=32,
                sent_bytes=715_596_896,
                received_bytes=0,
                compute_ns=33_000_000,
                exposed_ns=5_000_000,
            ),
            RankUse(
                rank=1,
                count=7,
                batch=32,
                sent_bytes=0,
                received_bytes=102_228_128,
                compute_ns=32_000_000,
                exposed_ns=4_000_000,
            ),
        ),
        links=(
            LinkUse(link="gpu0>nvswitch0", kind="nvlink", nbytes=715_596_896),
            *(
                LinkUse(link=f"nvswitch0>gpu{i}", kind="nvlink", nbytes=102_228_128)
                for i in range(1, 8)
            ),
            LinkUse(link="memory", kind="host", nbytes=0),
        ),
        messages=(("all-reduce buckets", (MIB, 25 * MIB, 25 * MIB, 3 * MIB // 2)),),
        bound="host",
        basis=(
            BasisEntry(what="compute", basis=Basis.PUBLISHED, spread=0.15, source="data sheet"),
            BasisEntry(what="host", basis=Basis.ASSUMED, spread=0.4, source="as an EPYC " * 20),
        ),
        warnings=(),
        timeline=timeline(),
    )
    return replace(made, **changes)
