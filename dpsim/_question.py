"""Question: from the flags of `dpsim simulate` to the records that `predict` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from dpsim import files
from dpsim.errors import InputError
from dpsim.hardware import HardwareProfile, Network
from dpsim.overrides import network_at, with_quantity
from dpsim.scenario import DataParallelOptions, RingOptions, Scenario, ServerOptions
from dpsim.units import GB, MIB, MS_PER_S, format_rate
from dpsim.workload import Workload

R = TypeVar("R", Scenario, DataParallelOptions, RingOptions, ServerOptions)

MODEL = "resnet50"
PROFILE = "a100-sxm"
BATCH_PER_GPU = 32
"""What is taken if nothing else is asked for; the output says so."""
STANDARD_INPUT = "/dev/stdin"

Flags = Mapping[str, Any]
"""Values by the names of the flags with "_" for "-"; None or () where a flag is not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What `predict` takes, and what was chosen for the user."""

    workload: Workload
    profile: HardwareProfile
    network: Network | None
    scenario: Scenario
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]


def question_of(flags: Flags) -> Question:
    """Return the question that flags ask.

    Raises:
        InputError: A flag is wrong, or flags contradict each other.
        InfeasibleError: The scenario cannot run as asked.
    """
    scenario, assumptions = _scenario(flags)
    model = flags["model"] or MODEL
    workload = files.find(Workload, STANDARD_INPUT if model == "-" else model)
    profile = files.find(HardwareProfile, flags["profile"] or PROFILE)
    for path, value in flags["settings"]:
        profile = with_quantity(profile, path, value)
        assumptions.append(f"{path} {value:g}, from --set")
    network, about = _network(flags, scenario, profile)
    chosen = [
        *([] if flags["model"] else [f"model {MODEL}"]),
        *([] if flags["profile"] else [f"profile {PROFILE}"]),
    ]
    return Question(
        workload=workload,
        profile=profile,
        network=network,
        scenario=scenario,
        assumptions=(*chosen, *assumptions, *about),
        warnings=_warnings(flags, scenario, profile),
    )


def _scenario(flags: Flags) -> tuple[Scenario, list[str]]:
    """Return the scenario, and what was chosen for it."""
    gpus = _gpus(flags)
    sizes, assumptions = _batch(flags, gpus)
    mode = flags["mode"] or ("single" if gpus == 1 else "ring")
    if not flags["mode"]:
        assumptions.append(f"mode {mode}")
    _check_ranks(flags, gpus)
    plain = (
        "nodes precision optimizer optimizer_implementation sync iteration device_ids split "
        "stragglers seed anchor_batch evaluation pinned_input"
    ).split()
    anchor_ms = flags["anchor_step_ms"]
    values = {
        **{name: flags[name] for name in plain},
        **sizes,
        "mode": mode,
        "gpus": gpus,
        "accumulation": flags["accumulate"],
        "anchor_step_s": None if anchor_ms is None else anchor_ms / MS_PER_S,
        "set_to_none": not flags["keep_gradients"],
        "data_parallel": _data_parallel(flags),
        "ring": _ring(flags),
        "server": _server(flags),
    }
    return _record(Scenario, values), assumptions


def _gpus(flags: Flags) -> int:
    """Return how many GPUs the flags ask for: --gpus, or as many as ids or shares are listed."""
    ids, split = flags["device_ids"] or (), flags["split"] or ()
    gpus = int(flags["gpus"] or len(ids) or len(split) or 1)
    for flag, listed in (("--device-ids", ids), ("--split", split)):
        if listed and len(listed) != gpus:
            raise InputError(
                f"{flag} must list one value for each of {gpus} GPUs, got {len(listed)} "
                f"({_joined(listed)}). Add or remove values, or change --gpus."
            )
    return gpus


def _batch(flags: Flags, gpus: int) -> tuple[dict[str, Any], list[str]]:
    """Return batch and scaling, and what was chosen for them."""
    batch, each, split = flags["batch"], flags["batch_per_gpu"], flags["split"]
    if each and (batch or split):
        other = "--batch" if batch else "--split"
        raise InputError(
            f"{other} and --batch-per-gpu exclude each other, got both. "
            f"Give {other} for all GPUs together, or --batch-per-gpu for each."
        )
    if split and batch and sum(split) != batch:
        raise InputError(
            f"--split must sum to --batch, got {'+'.join(map(str, split))} = {sum(split)} for "
            f"{batch}. Correct one of them, or leave --batch out."
        )
    if batch or split:
        return {"batch": batch or sum(split), "scaling": "strong"}, []
    words = [] if each else [f"batch {BATCH_PER_GPU} a GPU"]
    return {"batch": (each or BATCH_PER_GPU) * gpus, "scaling": "weak"}, words


def _check_ranks(flags: Flags, gpus: int) -> None:
    """Refuse ids and ranks given twice, ranks that do not exist, an --anchor-batch alone."""
    ids, ranks = flags["device_ids"] or (), [rank for rank, _ in flags["stragglers"]]
    for flag, listed in (("--device-ids", ids), ("--straggler", ranks)):
        if len(set(listed)) < len(listed):
            raise InputError(
                f"{flag} must name each of them once, got {_joined(listed)}. Remove what is double."
            )
    if ranks and max(ranks) >= gpus:
        raise InputError(
            f"--straggler must name a rank below {gpus}, got {max(ranks)}. "
            "Ranks count from 0; correct it, or raise --gpus."
        )
    if flags["anchor_batch"] and not flags["anchor_step_ms"]:
        raise InputError(
            f"--anchor-batch must come with --anchor-step-ms, got {flags['anchor_batch']} alone. "
            "Give the measured step, or leave it out."
        )


def _data_parallel(flags: Flags) -> DataParallelOptions:
    plain = ("output_device", "loss_in_forward", "input_on", "keep_replicas")
    values = {**{name: flags[name] for name in plain}, "nccl": not flags["no_nccl"]}
    if flags["keep_replicas"] and not flags["evaluation"]:
        raise InputError(
            "--keep-replicas must come with --evaluation, got it alone: replicas that are kept are "
            "not updated. Add --evaluation."
        )
    return _record(DataParallelOptions, values)


def _ring(flags: Flags) -> RingOptions:
    plain = "find_unused_parameters static_graph gradient_as_bucket_view gradient_hook all_reduce"
    if flags["bucket_mb"] and flags["bucket_list_mb"]:
        raise InputError(
            "--bucket-mb and --bucket-list-mb exclude each other, got both. Give one of them."
        )
    values = {
        **{name: flags[name] for name in plain.split()},
        "bucket_bytes": _times(flags["bucket_mb"], MIB),
        "bucket_list_bytes": tuple(mib * MIB for mib in flags["bucket_list_mb"] or ()),
        "broadcast_buffers": not flags["no_broadcast_buffers"],
    }
    return _record(RingOptions, values)


def _server(flags: Flags) -> ServerOptions:
    plain = "servers placement sharding update_on path gpus_per_worker reduce_threads"
    values = {
        **{name: flags[name] for name in plain.split()},
        "reduce_bytes_per_s": _times(flags["reduce_gbytes_per_s"], GB),
    }
    return _record(ServerOptions, values)


def _record(kind: type[R], values: Mapping[str, Any]) -> R:
    """Return a record in which what is not given keeps its default."""
    try:
        return kind(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as problem:
        raise InputError(f"scenario: {files.explain(problem)}") from None


def _network(
    flags: Flags, scenario: Scenario, profile: HardwareProfile
) -> tuple[Network | None, list[str]]:
    """Return the network between the nodes, None where none is needed, and what was chosen."""
    rate, name = flags["network_gbytes_per_s"], flags["network"]
    network = files.find(Network, name) if name else None
    about = []
    if not _crosses_nodes(scenario, profile):
        return None, []
    if network is None and profile.network:
        network = files.find(Network, profile.network)
        about = [f"network {profile.network}"]
    if rate is not None:
        network = network_at(network, rate * GB)
        about.append(f"network at {format_rate(rate * GB)}, from --network-gbytes-per-s")
    return network, about


def _crosses_nodes(scenario: Scenario, profile: HardwareProfile) -> bool:
    """Return whether GPUs, or servers on nodes of their own, are joined by a network."""
    nodes = scenario.nodes or -(-scenario.gpus // profile.topology.gpus)
    apart = scenario.mode.startswith("ps") and scenario.server.placement == "dedicated"
    return nodes > 1 or apart


def _warnings(flags: Flags, scenario: Scenario, profile: HardwareProfile) -> tuple[str, ...]:
    if _crosses_nodes(scenario, profile):
        return ()
    return tuple(
        f"{flag} changes nothing: all GPUs are on one node"
        for flag, name in (
            ("--network", "network"),
            ("--network-gbytes-per-s", "network_gbytes_per_s"),
        )
        if flags[name] is not None
    )


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _joined(values: Any) -> str:
    return ",".join(map(str, values))
