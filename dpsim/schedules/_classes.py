"""Classes of ranks that cannot differ: one of each is simulated, with a multiplicity."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from dpsim.engine import Cluster
from dpsim.errors import InfeasibleError
from dpsim.schedules._packing import spread_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks with the same batch, speed and place: they do the same at the same time."""

    members: tuple[int, ...]
    batch: int


def rank_classes(
    cluster: Cluster, place: Callable[[int], Hashable] | None = None
) -> list[RankClass]:
    """Return the classes of a scenario, by first rank.

    Args:
        cluster: Where the ranks are.
        place: What tells ranks apart beside batch, speed and how fast their input comes, which
            depends on how many GPUs of their node share its links.

    Raises:
        InfeasibleError: Fewer samples than ranks, or a split or a straggler that does not fit.
    """
    scenario, machine = cluster.scenario, cluster.machine
    batches = scenario.split or spread_batch(scenario.batch, scenario.gpus)
    if 0 in batches:
        raise InfeasibleError(
            f"every rank needs a sample in mode '{scenario.mode}', got batch {scenario.batch} for "
            f"{scenario.gpus} GPUs. Raise --batch to {scenario.gpus} or more."
        )
    straggle = dict(scenario.stragglers)
    classes: dict[Hashable, list[int]] = {}
    rates: dict[int, list[float]] = {}
    for node in range(machine.nodes):
        ranks = machine.ranks_on(node)
        if len(ranks) not in rates:
            rates[len(ranks)] = _input_rates(cluster, node)
        for rank, rate in zip(ranks, rates[len(ranks)], strict=True):
            where = place(rank) if place else None
            key = (batches[rank], straggle.get(rank, 1.0), rate, where)
            classes.setdefault(key, []).append(rank)
    return [RankClass(members=tuple(r), batch=batches[r[0]]) for r in classes.values()]


def _input_rates(cluster: Cluster, node: int) -> list[float]:
    """Return how fast the batch comes to each GPU of a node when it comes to all, bytes/s."""
    rates = cluster.shared_rates(
        [(f"host{node}", f"gpu{rank}") for rank in cluster.machine.ranks_on(node)]
    )
    if cluster.scenario.pinned_input:
        return rates
    most = cluster.machine.profile.host.pageable_copy_bytes_per_s.value
    return [min(rate, most) for rate in rates]
