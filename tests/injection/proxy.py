"""A TCP network between peers that can be made bad: proxies in front of the peers' announced ports, in a thread of their own.

    with Network() as network:
        proxy = network.front("b", listening_port)     # others dial proxy.port
        network.rule("a", "b", Rule(freeze=True))      # nothing goes from a to b any more; what b says still arrives at a
        network.partition({"a", "b"}, {"c", "d"})
        network.heal()
        fired(network.count("a", "b").frozen_seconds, "the cut from a to b")

Rules hold for an ordered pair (sender, receiver), whoever opened the connection; "*" stands for everybody, and the most
special rule wins. Who opened a connection is found in /proc from the processes told by `network.process(name, pid)`;
strangers are called "?". Everything is counted as it happens to bytes and connections, not as it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import TypeVar

CHUNK_BYTES = 65_536
QUEUE_BYTES = 32 << 20      # on its way over a slow or long link, for each direction of a connection
ANYBODY, STRANGER = "*", "?"

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """What happens to bytes from one peer to another, and to their connections."""

    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0              # up to so much more, order kept
    bytes_per_second: float | None = None    # shared by all connections that the rule holds for
    freeze: bool = False                     # half-open: bytes wait, nobody is told, new connections hang
    cut: bool = False                        # connections are reset and new ones refused
    reset_after_bytes: int | None = None     # a connection is reset once so many bytes went this way
    idle_seconds: float | None = None        # a connection without a byte for so long is dropped: both ends get no notice
    idle_reset: bool = False                 # ... or are reset


OPEN = Rule()


@dataclass
class Count:
    """What was done, and seen done: bytes that went this way, connections opened by the sender, and each fault."""

    bytes: int = 0
    connections: int = 0
    refused: int = 0                 # connections that met a cut
    resets: int = 0                  # connections that were reset by a rule
    idle_drops: int = 0
    delayed_bytes: int = 0
    throttled_seconds: float = 0.0   # that bytes had to wait for their turn
    frozen_seconds: float = 0.0      # that bytes or connections were held up by a freeze
    cut_seconds: float = 0.0         # that a rule with cut was in force

    def plus(self, other: Count) -> Count:
        return Count(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Count)))


@dataclass(eq=False)
class _Flow:
    """One connection through a proxy."""

    opener: str
    target: str
    writers: list[asyncio.StreamWriter]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    passed: dict[tuple[str, str], int] = field(default_factory=dict)
    last_byte: float = 0.0
    lost: bool = False               # dropped without notice: nothing passes any more

    def reset(self) -> None:
        for writer in self.writers:
            sock = writer.get_extra_info("socket")
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        for task in self.tasks:
            task.cancel()


@dataclass(frozen=True)
class Proxy:
    """In front of one peer."""

    name: str
    target_port: int
    port: int


class Network:
    """All proxies of a test. Methods may be called from any thread; what they ask for is in force when they return."""

    def __init__(self, seed: int = 0) -> None:
        self._rules: dict[tuple[str, str], Rule] = {}
        self._since: dict[tuple[str, str], float] = {}           # when a cut began
        self._free_at: dict[tuple[str, str], float] = {}         # by rule: when its link has room again
        self._counts: dict[tuple[str, str], Count] = {}
        self._processes: dict[str, int] = {}
        self._proxies: dict[str, Proxy] = {}
        self._flows: set[_Flow] = set()
        self._accepting: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="proxies", daemon=True)
        self._thread.start()
        self._ask(self._start)

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self._ask(self._stop)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    # ---------------------------------------------------------------- what tests ask for

    def front(self, name: str, target_port: int, port: int = 0) -> Proxy:
        """A proxy in front of `name`, which listens (or will listen) on `target_port` of this host."""
        return self._ask(lambda: self._front(name, target_port, port))

    def process(self, name: str, pid: int) -> None:
        """Connections opened by this process or its children are opened by `name`."""
        self._processes[name] = pid

    def rule(self, sender: str, receiver: str, rule: Rule) -> None:
        self._ask(lambda: self._set({**self._rules, (sender, receiver): rule}))

    def between(self, one: str, other: str, rule: Rule) -> None:
        """Both ways."""
        self._ask(lambda: self._set({**self._rules, (one, other): rule, (other, one): rule}))

    def around(self, name: str, rule: Rule) -> None:
        """All that `name` sends and all that is sent to it."""
        self.between(name, ANYBODY, rule)

    def partition(self, *islands: Iterable[str], rule: Rule = Rule(freeze=True)) -> None:
        """No way between peers of different islands."""
        sets = [frozenset(island) for island in islands]
        cuts = {(a, b): rule for one in sets for other in sets if one is not other for a in one for b in other}
        self._ask(lambda: self._set({**self._rules, **cuts}))

    def heal(self, *names: str) -> None:
        """All rules about these peers (of all, if none is named) are gone."""
        self._ask(
            lambda: self._set({} if not names else {k: r for k, r in self._rules.items() if not set(k) & set(names)})
        )

    def reset(self, one: str = ANYBODY, other: str = ANYBODY) -> int:
        """Reset the connections that are open now between the two; how many there were."""
        return self._ask(lambda: self._reset(one, other))

    def count(self, sender: str = ANYBODY, receiver: str = ANYBODY) -> Count:
        """The sum over all pairs that match."""
        return self._ask(lambda: self._count(sender, receiver))

    def holds(self, sender: str, receiver: str) -> bool:
        """Whether any rule is in force between the two."""
        return self._rule(sender, receiver) != OPEN or self._rule(receiver, sender) != OPEN

    def connections(self, one: str = ANYBODY, other: str = ANYBODY) -> int:
        """How many are open now."""
        return self._ask(lambda: len(self._flows_between(one, other)))

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _ask(self, work: Callable[[], T] | Callable[[], object]) -> T:
        async def answer() -> object:
            result = work()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(30.0)  # type: ignore[return-value]

    async def _start(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        for flow in list(self._flows):
            flow.reset()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _front(self, name: str, target_port: int, port: int) -> Proxy:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._accept(name, reader, writer))
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", port)
        self._servers.append(server)
        proxy = self._proxies[name] = Proxy(name, target_port, server.sockets[0].getsockname()[1])
        return proxy

    def _set(self, rules: dict[tuple[str, str], Rule]) -> None:
        self._settle_cuts()
        self._rules = rules
        self._since = {pair: time.monotonic() for pair, rule in rules.items() if rule.cut}
        self._free_at = {}
        for flow in list(self._flows):
            if any(self._rule(*pair).cut for pair in _ways(flow)):
                for pair in _ways(flow):
                    self._of(*pair).resets += self._rule(*pair).cut
                flow.reset()
        self._changed.set()
        self._changed = asyncio.Event()

    def _settle_cuts(self) -> None:
        now = time.monotonic()
        for pair, since in self._since.items():
            self._of(*pair).cut_seconds += now - since
            self._since[pair] = now

    def _rule(self, sender: str, receiver: str) -> Rule:
        return self._rules.get(self._key(sender, receiver), OPEN)

    def _key(self, sender: str, receiver: str) -> tuple[str, str]:
        for key in ((sender, receiver), (sender, ANYBODY), (ANYBODY, receiver)):
            if key in self._rules:
                return key
        return (ANYBODY, ANYBODY)

    def _of(self, sender: str, receiver: str) -> Count:
        return self._counts.setdefault((sender, receiver), Count())

    def _count(self, sender: str, receiver: str) -> Count:
        self._settle_cuts()
        found = Count()
        for (a, b), count in self._counts.items():
            if _matches(sender, a) and _matches(receiver, b):
                found = found.plus(count)
        return found

    def _flows_between(self, one: str, other: str) -> list[_Flow]:
        return [
            flow
            for flow in self._flows
            if any(_matches(one, a) and _matches(other, b) for a, b in ((flow.opener, flow.target), (flow.target, flow.opener)))
        ]

    def _reset(self, one: str, other: str) -> int:
        flows = self._flows_between(one, other)
        for flow in flows:
            self._of(flow.opener, flow.target).resets += 1
            flow.reset()
        return len(flows)

    async def _watch(self) -> None:
        """Drops what is idle."""
        while True:
            await asyncio.sleep(0.05)
            now = time.monotonic()
            for flow in list(self._flows):
                for pair in _ways(flow):
                    rule = self._rule(*pair)
                    if rule.idle_seconds is not None and not flow.lost and now - flow.last_byte > rule.idle_seconds:
                        self._of(*pair).idle_drops += 1
                        flow.lost = True
                        if rule.idle_reset:
                            flow.reset()

    # ---------------------------------------------------------------- a connection

    async def _accept(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opener = await asyncio.to_thread(self._who, writer.get_extra_info("peername"), writer.get_extra_info("sockname"))
        flow = _Flow(opener, target, [writer], last_byte=time.monotonic())
        there, back = (opener, target), (target, opener)
        self._flows.add(flow)
        me = asyncio.current_task()
        assert me is not None
        flow.tasks.append(me)
        try:
            self._of(*there).connections += 1
            for pair in (there, back):
                await self._while_frozen(flow, pair)
                if self._rule(*pair).cut:
                    self._of(*pair).refused += 1
                    flow.reset()
                    return
            port = self._proxies[target].target_port
            reader_there, writer_there = await asyncio.open_connection("127.0.0.1", port)
            flow.writers.append(writer_there)
            flow.tasks += [
                asyncio.create_task(self._pump(flow, there, reader, writer_there)),
                asyncio.create_task(self._pump(flow, back, reader_there, writer)),
            ]
            await asyncio.gather(*flow.tasks[1:])
        except OSError:
            pass
        except asyncio.CancelledError:
            pass  # it was reset
        finally:
            self._flows.discard(flow)
            flow.reset()

    async def _pump(
        self, flow: _Flow, pair: tuple[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Bytes one way. Raises OSError if an end was reset."""
        queue: deque[tuple[float, bytes]] = deque()
        filled, room, last_due = asyncio.Event(), asyncio.Event(), 0.0
        waiting = 0

        async def deliver() -> None:
            nonlocal waiting
            while True:
                while not queue:
                    filled.clear()
                    await filled.wait()
                due, data = queue.popleft()
                if (pause := due - time.monotonic()) > 0:
                    await asyncio.sleep(pause)
                await self._while_frozen(flow, pair)
                if not data:
                    if writer.can_write_eof():
                        writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()
                waiting -= len(data)
                room.set()
                self._of(*pair).bytes += len(data)
                self._passed(flow, pair, len(data))

        delivering = asyncio.create_task(deliver())
        flow.tasks.append(delivering)
        try:
            while True:
                await self._while_frozen(flow, pair)
                data = await reader.read(CHUNK_BYTES)
                flow.last_byte = flow.last_byte if flow.lost else time.monotonic()
                await self._while_frozen(flow, pair)
                due, pause = self._due(pair, len(data))
                last_due = max(last_due, due)
                queue.append((last_due, data))
                waiting += len(data)
                filled.set()
                if not data:
                    return await delivering
                if pause > 0:
                    await asyncio.sleep(pause)
                while waiting > QUEUE_BYTES:
                    room.clear()
                    await room.wait()
                if delivering.done():
                    return delivering.result()
        finally:
            delivering.cancel()

    def _due(self, pair: tuple[str, str], size: int) -> tuple[float, float]:
        """(when bytes that come now arrive, how long to read no more): a slow link takes them one after the other."""
        rule, key, now = self._rule(*pair), self._key(*pair), time.monotonic()
        start = now
        if rule.bytes_per_second is not None:
            start = max(now, self._free_at.get(key, 0.0)) + size / rule.bytes_per_second
            self._free_at[key] = start
            self._of(*pair).throttled_seconds += start - now
        late = rule.delay_seconds + rule.jitter_seconds * self._random.random()
        if late > 0:
            self._of(*pair).delayed_bytes += size
        return start + late, start - now

    def _passed(self, flow: _Flow, pair: tuple[str, str], size: int) -> None:
        flow.passed[pair] = flow.passed.get(pair, 0) + size
        limit = self._rule(*pair).reset_after_bytes
        if limit is not None and flow.passed[pair] >= limit:
            self._of(*pair).resets += 1
            flow.reset()

    async def _while_frozen(self, flow: _Flow, pair: tuple[str, str]) -> None:
        while flow.lost or self._rule(*pair).freeze:
            begun = time.monotonic()
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await changed.wait()
            self._of(*pair).frozen_seconds += time.monotonic() - begun

    # ---------------------------------------------------------------- who is it

    def _who(self, its_end: tuple[str, int], my_end: tuple[str, int]) -> str:
        inode = _inode(its_end, my_end)
        if inode:
            for name, pid in list(self._processes.items()):
                if any(_holds(process, inode) for process in family(pid)):
                    return name
        return STRANGER


def _ways(flow: _Flow) -> tuple[tuple[str, str], tuple[str, str]]:
    return (flow.opener, flow.target), (flow.target, flow.opener)


def _matches(pattern: str, name: str) -> bool:
    return pattern in (ANYBODY, name)


def _hex_end(end: tuple[str, int]) -> str:
    return f"{int.from_bytes(socket.inet_aton(end[0]), 'little'):08X}:{end[1]:04X}"


def _inode(local: tuple[str, int], remote: tuple[str, int]) -> str:
    """Of the socket with these ends, "" if there is none."""
    ends = [_hex_end(local), _hex_end(remote)]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[1:3] == ends:
            return words[9]
    return ""


def family(pid: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from family(int(child))


def _holds(pid: int, inode: str) -> bool:
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path) == f"socket:[{inode}]":
                    return True
    return False
