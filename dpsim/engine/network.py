"""Flows over directed links that share them by max-min fairness, in virtual time.

Only this folder of dpsim imports simpy. The clock of the environment is an `int` in nanoseconds.

A flow is fluid: it holds all links of its route at once, at one rate. Rates are max-min fair and
change only when a flow starts or ends, which happens on whole nanoseconds: the end of a flow is
rounded half up, as `units.to_ns` does. A flow that shares its links may be moved by less than half
a nanosecond by each end of another flow; nothing adds up over separate transfers.

Rates are whole multiples of 2**-16 bytes/s and all else is integer arithmetic, so the order of
flows, of links and of starts at one time cannot change a result.

Source of the virtual time: Parekh and Gallager, IEEE/ACM Trans. Netw. 1(3), 1993.
Leaves out: packets, buffers, the ramp of a transport, losses and incast collapse.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import simpy
from simpy.events import EventPriority

from dpsim.engine.fairness import RESOLUTION, UNLIMITED, Ints, Units, fill, rate_units
from dpsim.errors import InputError
from dpsim.units import NS_PER_S

BYTE = RESOLUTION * NS_PER_S
"""One byte in the unit of service: rate units times nanoseconds."""
GRAIN = 1_000_000
"""Parts of a nanosecond. An end less than one part below a half counts as a half and is rounded
up: shares are rounded to rate units, and must not decide how an exact half is rounded."""
HALF = GRAIN // 2 + 1
CHANGED = -1
"""In place of the next end of a group whose flows have changed."""
LATE = EventPriority(2)
"""After all normal events of the same time, so that starts at one time are solved together."""


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What one directed link has carried so far."""

    nbytes: int  # of flows that have left it, each as often as its count and its hops say
    busy_ns: int  # with at least one flow


class _Alarm(simpy.Event):
    """A timer that goes off after all normal events of its time."""

    def __init__(self, env: simpy.Environment, delay_ns: int) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, LATE, delay_ns)


@dataclass(slots=True, order=True)
class _Flow:
    """One call of `transfer`, in the order of calls."""

    order: int
    event: simpy.Event = field(compare=False)
    nbytes: int = field(compare=False)
    count: int = field(compare=False)
    latency_ns: int = field(compare=False)
    label: str = field(compare=False)


@dataclass(slots=True)
class _Link:
    """A directed link and what it has carried."""

    index: int
    rate: Units
    nbytes: int = 0
    users: int = 0  # crossings by groups that hold it now
    since_ns: int = 0  # when it was last taken into use
    busy_ns: int = 0  # before that


@dataclass(slots=True)
class _Group:
    """Flows with the same links and cap: they have one rate and share one virtual clock.

    `level` is the service that a flow present since the group began has got, in rate units times
    nanoseconds. A flow ends when the level reaches its own start level plus its bytes.
    """

    links: tuple[_Link, ...]  # as often as they are crossed
    sharers: tuple[int, ...]  # of `links`: how many of `count` equal flows share a copy; 0: all
    cap: Units
    limits: Ints  # indexes of the links with a finite rate
    limit_sharers: Ints  # `sharers` of these
    loads: Ints  # how many times the rate of one flow each of `limits` carries
    flows: list[tuple[int, _Flow]] = field(default_factory=list)  # heap by final level
    count: int = 0  # flows, each as often as its count
    level: int = 0  # at `since_ns`
    since_ns: int = 0
    rate: int = 0
    end_ns: int = CHANGED  # when the next flow ends

    def admit(self, flow: _Flow, now_ns: int) -> None:
        """Start a flow."""
        self.serve(now_ns)
        heapq.heappush(self.flows, (self.level + flow.nbytes * BYTE, flow))
        self._change(flow.count)

    def pop_due(self, now_ns: int) -> list[_Flow]:
        """Remove and return the flows whose end rounds to the present."""
        due: list[_Flow] = []
        if self.end_ns > now_ns:
            return due
        self.serve(now_ns)
        while self.flows and self._wait_ns() <= 0:
            due.append(heapq.heappop(self.flows)[1])
            self._change(-due[-1].count)
        return due

    def set_rate(self, rate: int, now_ns: int) -> None:
        """Go on at another rate."""
        if rate != self.rate or self.end_ns == CHANGED:
            self.serve(now_ns)
            self.rate = rate
            self.end_ns = now_ns + max(0, self._wait_ns())

    def serve(self, now_ns: int) -> None:
        """Bring the level to the present."""
        self.level += self.rate * (now_ns - self.since_ns)
        self.since_ns = now_ns

    def _wait_ns(self) -> int:
        """Return the time from `since_ns` to the next end, rounded half up."""
        left = self.flows[0][0] - self.level
        return (GRAIN * left + HALF * self.rate) // (GRAIN * self.rate)

    def _change(self, count: int) -> None:
        self.count += count
        copies = self.limit_sharers * len(self.flows)
        self.loads = np.where(self.limit_sharers > 0, copies, self.count)
        self.end_ns = CHANGED

    def enter_bytes(self, nbytes: int, count: int) -> None:
        """Add the bytes of a flow to its links."""
        for link, sharers in zip(self.links, self.sharers, strict=True):
            link.nbytes += nbytes * (sharers or count)

    def hold(self, now_ns: int) -> None:
        """Take the links into use."""
        self.level, self.since_ns, self.rate = 0, now_ns, 0
        for link in self.links:
            if link.users == 0:
                link.since_ns = now_ns
            link.users += 1

    def release(self, now_ns: int) -> None:
        """End the use of the links."""
        for link in self.links:
            link.users -= 1
            if link.users == 0:
                link.busy_ns += now_ns - link.since_ns


class Network:
    """Links in virtual time.

    A change costs O(groups + log flows), where a group is all flows with the same hops and cap.
    """

    def __init__(self, env: simpy.Environment, rates: Mapping[str, float]) -> None:
        """Take the rate of each directed link in bytes/s, > 0, infinity allowed.

        A rate is looked up when its link is first used: the mapping may be lazy.
        """
        self._env = env
        self._rates = rates
        self._links: dict[str, _Link] = {}
        self._capacity: Ints = np.zeros(0, np.int64)
        self._groups: dict[tuple[tuple[str, ...], tuple[int, ...], Units], _Group] = {}
        self._active: list[_Group] = []
        self._waiting: list[tuple[_Group, _Flow]] = []
        self._started = 0
        self._alarm: simpy.Event | None = None
        self._alarm_ns = 0

    def transfer(  # noqa: PLR0913 - what is sent and how; all but two have defaults
        self,
        hops: tuple[str, ...],
        nbytes: int,
        *,
        latency_ns: int = 0,
        count: int = 1,
        own: Mapping[str, int] | frozenset[str] = frozenset(),
        cap_bytes_per_s: float = math.inf,
        label: str = "",
    ) -> simpy.Event:
        """Return an event that succeeds when the last byte has arrived.

        The flow holds its links from now until its bytes have left; they arrive `latency_ns` later.
        A flow without bytes, or without a finite limit, takes the latency alone.

        Args:
            hops: Directed links of the route; one named twice is crossed twice.
            nbytes: Bytes of one flow, >= 0.
            latency_ns: Sum of the latencies of the route, >= 0.
            count: Number of equal flows that this one stands for, >= 1; a link carries all.
            own: Hops of which each of the `count` flows has one of its own (its NIC, say), or how
                many of them have this one together (the NIC of a node). It carries so many, and
                its use is what these put on it.
            cap_bytes_per_s: Most that one flow can take (one connection), > 0.
            label: What is sent, for `in_flight`.

        Raises:
            InputError: A number is out of range, or a link is unknown or has no usable rate.
        """
        if nbytes < 0 or latency_ns < 0 or count < 1:
            raise InputError(
                f"network: a transfer needs nbytes >= 0, latency_ns >= 0 and count >= 1, got "
                f"{nbytes}, {latency_ns} and {count} for '{label}'. Correct the schedule."
            )
        sharers = own if isinstance(own, Mapping) else dict.fromkeys(own, 1)
        if any(not 1 <= n <= count for n in sharers.values()):
            raise InputError(
                f"network: 1 to count {count} flows can have a hop of their own, got "
                f"{dict(sharers)} for '{label}'. Correct the schedule."
            )
        group = self._group(
            hops, sharers, rate_units(cap_bytes_per_s, f"network: the cap of '{label}'")
        )
        if nbytes == 0 or (group.cap == UNLIMITED and len(group.limits) == 0):
            group.enter_bytes(nbytes, count)
            return self._env.timeout(latency_ns)
        flow = _Flow(self._started, self._env.event(), nbytes, count, latency_ns, label)
        self._started += 1
        self._waiting.append((group, flow))
        self._set_alarm(0)
        return flow.event

    def use(self) -> dict[str, LinkUse]:
        """Return what each link that a transfer has named carried until now."""
        now = self._now()
        return {
            name: LinkUse(
                nbytes=link.nbytes,
                busy_ns=link.busy_ns + (now - link.since_ns if link.users else 0),
            )
            for name, link in self._links.items()
        }

    def in_flight(self) -> tuple[str, ...]:
        """Return the labels of the flows that still hold links, in the order of their starts."""
        flows = [flow for group in self._active for _, flow in group.flows]
        flows += [flow for _, flow in self._waiting]
        return tuple(flow.label for flow in sorted(flows))

    def _now(self) -> int:
        return int(self._env.now)

    def _group(self, hops: tuple[str, ...], own: Mapping[str, int], cap: Units) -> _Group:
        """Return the group of flows with these links and cap, made when it is new."""
        sharers = tuple(own.get(name, 0) for name in hops)
        key = (hops, sharers, cap)
        if key not in self._groups:
            links = tuple(self._link(name) for name in hops)
            finite = [i for i, link in enumerate(links) if link.rate != UNLIMITED]
            self._groups[key] = _Group(
                links=links,
                sharers=sharers,
                cap=cap,
                limits=np.array([links[i].index for i in finite], np.int64),
                limit_sharers=np.array([sharers[i] for i in finite], np.int64),
                loads=np.zeros(len(finite), np.int64),
            )
        return self._groups[key]

    def _link(self, name: str) -> _Link:
        """Return a link, entered when it is first used."""
        if name not in self._links:
            if name not in self._rates:
                raise InputError(
                    f"network: every hop must be a link, got '{name}'. Take hops from a route."
                )
            rate = rate_units(self._rates[name], f"network: link '{name}'")
            self._links[name] = _Link(len(self._links), rate)
        return self._links[name]

    def _set_alarm(self, delay_ns: int) -> None:
        """Settle after `delay_ns`; an alarm for another time is void from now on."""
        at = self._now() + delay_ns
        if self._alarm is None or self._alarm_ns != at:
            self._alarm, self._alarm_ns = _Alarm(self._env, delay_ns), at
            self._alarm.callbacks.append(self._settle)

    def _settle(self, alarm: simpy.Event) -> None:
        """Bring the links to the present: serve, end, start, and share anew."""
        if alarm is not self._alarm:
            return
        self._alarm = None
        now = self._now()
        ended = self._end(now)
        for group, flow in self._waiting:
            if not group.flows:
                group.hold(now)
                self._active.append(group)
            group.admit(flow, now)
        self._waiting.clear()
        if self._active:
            self._share(now)
            self._set_alarm(min(group.end_ns for group in self._active) - now)
        for flow in sorted(ended):
            self._deliver(flow)

    def _end(self, now: int) -> list[_Flow]:
        """Remove and return the flows that have ended."""
        ended: list[_Flow] = []
        for group in self._active:
            due = group.pop_due(now)
            ended += due
            for flow in due:
                group.enter_bytes(flow.nbytes, flow.count)
            if not group.flows:
                group.release(now)
        self._active = [group for group in self._active if group.flows]
        return ended

    def _share(self, now: int) -> None:
        """Give every group its fair rate."""
        groups = self._active
        if len(self._capacity) < len(self._links):
            self._capacity = np.array([link.rate for link in self._links.values()], np.int64)
        rates = fill(
            np.repeat(np.arange(len(groups)), [len(group.limits) for group in groups]),
            np.concatenate([group.limits for group in groups]),
            np.concatenate([group.loads for group in groups]),
            self._capacity,
            np.array([group.cap for group in groups], np.int64),
        )
        for group, rate in zip(groups, rates.tolist(), strict=True):
            group.set_rate(rate, now)

    def _deliver(self, flow: _Flow) -> None:
        """Let the event of a flow succeed after its latency."""
        if flow.latency_ns == 0:
            flow.event.succeed()
            return
        arrival = self._env.timeout(flow.latency_ns)
        arrival.callbacks.append(flow.event.trigger)
