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
        place: What tells ranks apart beside batch and speed; None: how many GPUs their node has,
            which decides how they share its links.

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
    for node in range(machine.nodes):
        ranks = machine.ranks_on(node)
        for rank in ranks:
            where = place(rank) if place else len(ranks)
            key = (batches[rank], straggle.get(rank, 1.0), where)
            classes.setdefault(key, []).append(rank)
    return [RankClass(members=tuple(r), batch=batches[r[0]]) for r in classes.values()]
