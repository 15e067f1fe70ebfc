"""Order in a link: held and streamed frames and the end of either side stay in order, whole and never stuck.

Without sockets: the transports here record their calls, and refuse the calls that asyncio's transports refuse.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eos.shim.addresses.book import Endpoint
from eos.shim.faults import Event, FaultJob, Plan, Rule
from eos.shim.link import Link, ReadBuffer
from eos.shim.memory import MemoryBudget
from eos.shim.pipeline import Exchange, Job, Pipeline
from eos.shim.send_queue import HeldFrame
from eos.shim.wire import api
from tests.shim.fake_broker import FakeBroker
from tests.unit.shim.test_frames import cut
from tests.unit.shim.test_link import IgnoringObserver, Keeping, answer, frame
from tests.unit.shim.test_protect_frames import encoded, produce_request, requests

UNCHANGED, HELD, ANSWERED, RESET, ANSWER_HELD = 36, 37, 38, 39, 40


class Noted(Keeping):
    """A transport that accepts all bytes and records the end of its half."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.ended = False

    def write(self, data: Any) -> None:
        if self.ended:
            raise RuntimeError("Cannot call write() after write_eof()")  # asyncio's
        self.sent += bytes(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "socket" else default  # asyncio sets options on it before the close

    def setsockopt(self, *option: Any) -> None:
        pass


class Holding(Job):
    """A job that holds requests or responses by API, as faults do; `asked` and `held` are in order."""

    def __init__(self) -> None:
        self.has_request: list[Exchange] = []
        self.held: list[HeldFrame] = []

    def wants_request(self, api_key: int, version: int) -> bool:
        return api_key in (HELD, ANSWERED, RESET, ANSWER_HELD)

    def wants_response(self, api_key: int, version: int) -> bool:
        return api_key == ANSWER_HELD

    def request(self, exchange: Exchange, frame: bytes) -> bytes:
        self.has_request.append(exchange)
        if exchange.api_key == ANSWERED:
            exchange.answer = answer(exchange.correlation_id, b"ours")
            return b""
        if exchange.api_key == ANSWER_HELD:
            return frame
        held = self._hold(frame)
        if exchange.api_key == RESET:
            held.on_turn = lambda: exchange.connection.link.reset_before(exchange)
        return held

    def response(self, exchange: Exchange, frame: bytes) -> bytes:
        return self._hold(frame)

    def _hold(self, frame: bytes) -> HeldFrame:
        self.held.append(HeldFrame(frame))
        return self.held[-1]


class Wired:
    """A link whose sides the test reads and writes."""

    def __init__(self, job: Job | None = None, port: int = 1) -> None:
        self.job = Holding()
        self.link = Link(
            1,
            Endpoint(("127.0.0.1", port)),
            Pipeline([job or self.job], 1 << 20),
            1 << 20,
            IgnoringObserver(),
            ReadBuffer(),
            MemoryBudget(1 << 30, 1),
        )
        self.client, self.broker = Noted(), Noted()
        self.link.client._transport, self.link.upstream._transport = self.client, self.broker

    def client_sends(self, data: bytes) -> None:
        self._read(self.link.client, data)

    def broker_sends(self, data: bytes) -> None:
        self._read(self.link.upstream, data)

    @staticmethod
    def _read(side: Any, data: bytes) -> None:
        view = side.get_buffer(-1)
        view[: len(data)] = data
        side.buffer_updated(len(data))
        view[: len(data)] = b"\xee" * len(data)  # as the next read does


kinds = st.sampled_from([UNCHANGED, HELD, ANSWERED])


@given(
    st.lists(st.tuples(kinds, st.integers(0, 300)), min_size=1, max_size=8),
    st.lists(st.integers(1, 200), max_size=20),
    st.randoms(use_true_random=False),
    st.integers(0, 3),
)
def test_held_and_streamed_frames_keep_order_after_client_eof(
    requests: list[tuple[int, int]], steps: list[int], chance: Any, ends_once_in: int
) -> None:
    wired = Wired()
    frames = [(key, frame(key, number, b"%d" % number * size)) for number, (key, size) in enumerate(requests)]
    chunks = cut(b"".join(made for _, made in frames), steps)
    fed, left, ended = 0, list[HeldFrame](), False
    while chunks or len(left) < len(wired.job.held):
        kept = [held for held in wired.job.held if held not in left]
        if chunks and (not kept or chance.random() < 0.6):
            wired.client_sends(chunks[0])
            fed += len(chunks.pop(0))
        else:
            left.append(chance.choice(kept))
            left[-1].release()
        if ends_once_in and wired.link.has_request and chance.random() < 1 / (4 * ends_once_in):
            ended = True
            assert wired.link.can_send_requests
            assert wired.link.client.eof_received(), "a client that ended its half still gets its responses"
            break
        # All frames up to the first held one, and no incomplete frame after it.
        assert wired.broker.sent == leaving(frames, fed, wired.job.held, left)
    assert wired.broker.sent == leaving(frames, fed, wired.job.held, left)
    assert wired.broker.ended is ended
    assert wired.link.can_send_requests is not ended
    if ended:
        before = wired.broker.sent
        for held in wired.job.held:
            held.release()
        assert wired.broker.sent == before


def leaving(frames: list[tuple[int, bytes]], fed: int, held: list[HeldFrame], released: list[HeldFrame]) -> bytes:
    """Return the bytes of the first `fed` that must have been forwarded."""
    expected, at, number = b"", 0, 0
    for key, made in frames:
        came = made[: max(0, fed - at)]
        at += len(made)
        if key == UNCHANGED:
            # The head of the frame is examined first.
            expected += came if len(came) >= 12 else b""
        elif key == HELD and len(came) == len(made):
            if not any(held[number] is each for each in released):
                return expected
            number += 1
            expected += made
    return expected


@pytest.mark.parametrize("action", ["delay", "duplicate"])
def test_released_request_arrives_after_client_eof(action: str) -> None:
    """The connection to the broker has an end of file, after which nothing can be written."""
    plan = Plan([Rule("EndTxn", action, seconds=0 if action == "delay" else None, side="broker")])
    end_txn = encoded(requests(api.END_TXN, 1))
    arrived = list[bytes]()

    def broker_answers(request: bytes) -> bytes:
        arrived.append(request)
        return bytes(6)  # throttle_time_ms, no error

    async def test(port: int) -> None:
        wired = Wired(FaultJob(plan.on("broker")), port)
        wired.client_sends(end_txn)
        wired.link.client.eof_received()
        async with asyncio.timeout(20):
            while any(each.open for each in plan.progress):
                await asyncio.sleep(0.01)
        assert (wired.broker.sent, wired.broker.ended) == (b"", True)

    with FakeBroker(broker_answers) as broker:
        asyncio.run(test(broker.port))
    assert arrived == [end_txn[4:]] * (2 if action == "duplicate" else 1)
    assert not plan.complaints()


@pytest.mark.parametrize(("pattern", "opens"), [(None, "t"), ("t*", "t-alternate"), ("u", "u")])
def test_delay_waits_for_event_of_matching_transactional_id(pattern: str | None, opens: str) -> None:
    until = Event("Produce", when="arrives", transactional_id=pattern)
    plan = Plan([Rule("EndTxn", "delay", until=until, side="broker")])
    end_txn = encoded(requests(api.END_TXN, 1))
    others = [produce_request(9, name, {"a": {0: None}}) for name in ("t", "t-alternate", "u", "v") if name != opens]
    if pattern == "t*":
        del others[0]
    event = produce_request(9, opens, {"a": {0: None}})

    async def test() -> None:
        wired = Wired(FaultJob(plan.on("broker")))
        wired.client_sends(end_txn)
        for other in others:
            wired.client_sends(other)
        await asyncio.sleep(0)
        assert [each.open for each in plan.progress] == [1]
        wired.client_sends(event)
        async with asyncio.timeout(20):
            while wired.broker.sent != b"".join([end_txn, *others, event]):
                await asyncio.sleep(0.01)

    asyncio.run(test())
    assert not plan.complaints()


@pytest.mark.parametrize("at", [8, 9, 30])
def test_reset_waits_for_the_whole_earlier_response(at: int) -> None:
    async def test() -> None:
        wired = Wired()
        wired.client_sends(frame(UNCHANGED, 1) + frame(RESET, 2))
        before = answer(1, b"a large answer" * 10)
        wired.broker_sends(before[:at])
        assert not wired.client.closed
        wired.broker_sends(before[at:])
        assert wired.client.closed
        assert wired.client.sent == before

    asyncio.run(test())


def test_response_of_the_shim_waits_for_earlier_responses() -> None:
    wired = Wired()
    wired.client_sends(frame(ANSWER_HELD, 1) + frame(UNCHANGED, 2))
    first, second = answer(1, b"held"), answer(2, b"a large answer" * 10)
    wired.broker_sends(first + second[:20])
    wired.client_sends(frame(ANSWERED, 3))
    assert wired.client.sent == b""
    wired.broker_sends(second[20:])
    wired.job.held[0].release()
    assert wired.client.sent == first + second + answer(3, b"ours")


def test_stop_completes_a_request_in_progress() -> None:
    wired = Wired()
    sent = frame(UNCHANGED, 1, b"a large request" * 10)
    wired.client_sends(sent[:50])
    wired.link.drain()
    assert (wired.client.reading_stopped, wired.client.closed) == (False, False)
    wired.client_sends(sent[50:] + frame(UNCHANGED, 2, b"the next one came too late"))
    assert wired.broker.sent == sent
    assert (wired.client.reading_stopped, wired.client.closed) == (True, False)
    wired.broker_sends(answer(1, b"done"))
    assert wired.client.sent == answer(1, b"done")
    assert wired.client.closed


def test_stop_waits_for_the_rest_of_an_acks_0_produce() -> None:
    wired = Wired()
    sent = produce_request(9, None, {"a": {0: b"records" * 100}})
    acks_at = sent.index(b"\0\xff\xff") + 1  # after the transactional.id, which is null
    sent = sent[:acks_at] + b"\0\0" + sent[acks_at + 2 :]
    wired.client_sends(sent[:200])
    wired.link.drain()
    assert not wired.client.closed
    wired.client_sends(sent[200:])
    assert wired.broker.sent == sent
    assert wired.client.closed


@pytest.mark.parametrize("came", [b"", frame(UNCHANGED, 1)[:7]], ids=["nothing", "a part of a head"])
def test_stop_ignores_a_request_that_was_not_forwarded(came: bytes) -> None:
    wired = Wired()
    if came:
        wired.client_sends(came)
    wired.link.drain()
    assert (wired.client.reading_stopped, wired.client.closed) == (True, True)


def test_stop_closes_a_connection_with_a_held_frame() -> None:
    wired = Wired()
    wired.client_sends(frame(HELD, 1) + frame(UNCHANGED, 2, b"behind it")[:15])
    wired.link.drain()
    assert wired.client.closed
    assert wired.broker.closed
