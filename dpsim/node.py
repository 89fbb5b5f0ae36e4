"""Paths in one node: a graph of directed links between GPUs, switches, CPUs and NICs.

All nodes of a machine are alike: one graph serves them all. Paths are found when first asked for.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass

from dpsim.errors import InputError
from dpsim.hardware import HardwareProfile, Link, LinkKind, Network

HOST = "host"
MEMORY = "memory"
NET = "net"
ALL_KINDS: frozenset[LinkKind] = frozenset(("nvlink", "pcie", "socket", "network", "host"))
WITHIN_SOCKET = ALL_KINDS - {"socket"}
NVLINK: frozenset[LinkKind] = frozenset(("nvlink",))

Path = tuple[str, ...]
"""Names of links, in the order in which they are crossed."""


@dataclass(frozen=True, slots=True)
class DirectedLink:
    """One direction of a wire; of a shared wire, both directions at once."""

    name: str
    ends: tuple[str, str]
    kind: LinkKind
    bandwidth_bytes_per_s: float
    latency_s: float
    back: str  # the link in the other direction; the same one when it is shared


class NodeGraph:
    """The graph of one node, with its paths by the names that they have in it."""

    def __init__(self, profile: HardwareProfile, network: Network | None) -> None:
        """Draw the links of the profile, the memory of the host, and NICs to the network.

        Raises:
            InputError: A GPU reaches no CPU.
        """
        self.profile = profile
        self.links: dict[str, DirectedLink] = {}
        self._from: dict[str, list[DirectedLink]] = {}
        for link in profile.topology.links:
            self._add(link.ends, link.kind, _rate_and_latency(link), link.duplex)
        memory = profile.host.memory_bandwidth_bytes_per_s.value
        self.links[MEMORY] = DirectedLink(MEMORY, (MEMORY,) * 2, "host", memory, 0.0, MEMORY)
        ends = sorted(self._from, key=_natural)
        self._cpus = [end for end in ends if species(end) == "cpu"]
        self._drawn_nics = [end for end in ends if species(end) == "nic"]
        self._nics = self._drawn_nics or [f"nic{i}" for i in range(profile.nics_per_node)]
        self.direct = False  # GPUs and NICs exchange data past host memory
        self.flow_bytes_per_s = math.inf
        if network is not None:
            self.direct = network.rdma and profile.topology.peer_access != "none"
            self.flow_bytes_per_s = network.flow_bytes_per_s.value
            # half of the latency on each side, so that every route pays it once
            speed = network.bandwidth_bytes_per_s.value, network.latency_s.value / 2
            for nic in self._nics:
                self._add((nic, NET), "network", speed, duplex=True)
        self._paths: dict[tuple[str, str, frozenset[LinkKind]], Path | None] = {}
        self._out: dict[str, tuple[Path, bool]] = {}
        self._cpu_of = {
            f"gpu{i}": self._nearest_cpu(f"gpu{i}") for i in range(profile.topology.gpus)
        }

    def inside(self, source: str, target: str) -> tuple[Path, bool]:
        """Return the path between two GPUs, or a GPU and "host", and whether it is staged.

        A staged copy lies in the memory at the CPU of the first GPU, both ways.
        """
        if source == target:
            return ((MEMORY, MEMORY) if source == HOST else ()), False
        if target == HOST:
            return self._to_host(source), False
        if source == HOST or _natural(target) < _natural(source):
            path, staged = self.inside(target, source)
            return self._back(path), staged
        peer = self._peer(source, target)
        if peer is not None:
            return peer, False
        down = self._require(self._cpu_of[source], target)
        return (*self._to_host(source), MEMORY, *down), True

    def out(self, end: str) -> tuple[Path, bool]:
        """Return the path from a GPU, or from "host", to the network, and whether it is staged."""
        if end not in self._out:
            self._out[end] = self._find_out(end)
        return self._out[end]

    def into(self, end: str) -> tuple[Path, bool]:
        """Return the path from the network to a GPU, or to "host", and whether it is staged."""
        path, staged = self.out(end)
        return self._back(path), staged

    def bandwidth(self, path: Path) -> float:
        """Return the bytes/s of one flow alone; a link that is crossed twice gives half."""
        crossed = Counter(path)
        return min(
            (self.links[name].bandwidth_bytes_per_s / times for name, times in crossed.items()),
            default=math.inf,
        )

    def latency_s(self, path: Path) -> float:
        """Return the sum of the latencies, in seconds."""
        return sum(self.links[name].latency_s for name in path)

    def _peer(self, source: str, target: str) -> Path | None:
        """Return the path of a direct copy between two GPUs, or None when there is none.

        Where there is peer access, NVLink is taken if it leads from one GPU to the other, alone or
        through switches.
        """
        access = self.profile.topology.peer_access
        if access == "none":
            return None
        path = self._path(source, target, NVLINK)
        if path is not None or access == "nvlink":
            return path
        return self._path(source, target, ALL_KINDS if access == "all" else WITHIN_SOCKET)

    def _find_out(self, end: str) -> tuple[Path, bool]:
        if end == HOST:
            nic = self._nics[0]
            cpu = self._nearest_cpu(nic) if self._drawn_nics else nic
            return (MEMORY, *self._to_nic(cpu, nic)), False
        nic = self._nic_of(end)
        if self.direct:
            return self._to_nic(end, nic), False
        return (*self._to_host(end), MEMORY, *self._to_nic(self._cpu_of[end], nic)), True

    def _to_host(self, gpu: str) -> Path:
        """Return the path from a GPU into the memory at its nearest CPU."""
        return (*self._require(gpu, self._cpu_of[gpu]), MEMORY)

    def _back(self, path: Path) -> Path:
        """Return the same path in the other direction."""
        return tuple(self.links[name].back for name in reversed(path))

    def _add(
        self, ends: tuple[str, str], kind: LinkKind, speed: tuple[float, float], duplex: bool
    ) -> None:
        """Enter a wire as two directed links, or as one that serves both directions."""
        a, b = ends
        names = [f"{a}>{b}", f"{b}>{a}"] if duplex else [f"{a}-{b}"] * 2
        known = sum(set(link.ends) == {a, b} for link in self._from.get(a, ()))
        if known:
            names = [f"{name}#{known + 1}" for name in names]
        for i, (source, target) in enumerate(((a, b), (b, a))):
            link = DirectedLink(names[i], (source, target), kind, *speed, names[1 - i])
            self.links.setdefault(link.name, link)
            self._from.setdefault(source, []).append(link)

    def _path(self, source: str, target: str, kinds: frozenset[LinkKind]) -> Path | None:
        """Return the shortest path; of these the widest; of these the first by name.

        It passes through no GPU and no NIC, and one of NVLink alone through no CPU either: peers
        are joined by NVLink itself. The way back is the same way.
        """
        if _natural(target) < _natural(source):
            path = self._path(target, source, kinds)
            return None if path is None else self._back(path)
        key = (source, target, kinds)
        if key not in self._paths:
            self._paths[key] = self._search(source, target, kinds)
        return self._paths[key]

    def _search(self, source: str, target: str, kinds: frozenset[LinkKind]) -> Path | None:
        """Search outwards (Dijkstra), by number of hops, then width, then names."""
        closed = {"gpu", "nic", NET} | ({"cpu"} if kinds == NVLINK else set())
        heap: list[tuple[int, float, Path, str]] = [(0, -math.inf, (), source)]
        seen: set[str] = set()
        while heap:
            hops, width, path, end = heapq.heappop(heap)
            if end == target:
                return path
            if end in seen or (end != source and species(end) in closed):
                continue
            seen.add(end)
            for link in self._from[end]:
                if link.kind in kinds and link.ends[1] not in seen:
                    narrow = max(width, -link.bandwidth_bytes_per_s)
                    heapq.heappush(heap, (hops + 1, narrow, (*path, link.name), link.ends[1]))
        return None

    def _require(self, source: str, target: str) -> Path:
        path = self._path(source, target, ALL_KINDS)
        if path is None:
            raise InputError(
                f"profile '{self.profile.name}': topology.links must join '{source}' and "
                f"'{target}' without passing a GPU or a NIC, found no way. Add the missing link."
            )
        return path

    def _nearest_cpu(self, end: str) -> str:
        """Return the CPU with the best path, by hops, width and name."""
        if not self._cpus:
            raise InputError(
                f"profile '{self.profile.name}': topology.links must have an end 'cpu0' that "
                f"'{end}' reaches, got none. Add the link to the host."
            )
        paths = {cpu: self._path(end, cpu, ALL_KINDS) for cpu in self._cpus}
        reached = {cpu: path for cpu, path in paths.items() if path is not None}
        if not reached:
            self._require(end, self._cpus[0])
        return min(reached, key=lambda cpu: (*self._distance(reached[cpu]), _natural(cpu)))

    def _distance(self, path: Path) -> tuple[int, float]:
        """Return hops and negative width: the smaller, the nearer."""
        return len(path), -self.bandwidth(path)

    def _nic_of(self, gpu: str) -> str:
        """Return the nearest NIC; GPUs that share the same nearest NICs take them in turn."""
        nearest = self._nearest_nics(gpu)
        sharers = [other for other in self._cpu_of if self._nearest_nics(other) == nearest]
        return nearest[sharers.index(gpu) % len(nearest)]

    def _nearest_nics(self, gpu: str) -> list[str]:
        if not self._drawn_nics:
            return self._nics
        lengths = {nic: self._distance(self._require(gpu, nic)) for nic in self._nics}
        return [nic for nic in self._nics if lengths[nic] == min(lengths.values())]

    def _to_nic(self, end: str, nic: str) -> Path:
        """Return the path to a NIC and out of it; one that is not drawn sits at every CPU."""
        if self._drawn_nics:
            path = self._require(end, nic)
        else:
            path = self._require(end, self._cpu_of[end]) if end in self._cpu_of else ()
        return (*path, f"{nic}>{NET}")


def _natural(name: str) -> tuple[str, int]:
    """Return a key that sorts gpu2 before gpu10."""
    kind = species(name)
    return kind, int(name[len(kind) :] or 0)


def species(name: str) -> str:
    """Return the name of an end without its number."""
    return name.rstrip("0123456789")


def _rate_and_latency(link: Link) -> tuple[float, float]:
    return link.bandwidth_bytes_per_s.value, link.latency_s.value
