"""`async def` functions: concurrent within a slice, outputs in input order, failures handled like any other."""

from __future__ import annotations

import asyncio
import errno
import gc
import signal
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import eos
import eos.testing
from eos import App, Out, Record, Settings, dlq, retry, skip
from eos.app import concurrent
from eos.app.lineage import Ledger, with_lineage
from eos.app.routes import Route, feed_from
from eos.encoding.lineage import HEADER, decode
from eos.engine.handling import Collector, Halt, Handler
from eos.errors import ConfigurationError, IllegalState, Interruption, PoisonRecord, Temporary
from eos.records import FeedResult
from eos.worker.worker import Worker

pytestmark = pytest.mark.usefixtures("loop_ends")


def route(function: Callable[[Any], Any], **more: Any) -> Route:
    app = App("app")
    app.process("in", to="out", **more)(function)
    return app.routes["in"]


def records(*values: bytes) -> list[Record]:
    return [Record("in", 0, offset, value=value) for offset, value in enumerate(values)]


def feed(made: Route, given: list[Record]) -> tuple[list[bytes | None], FeedResult]:
    kept = Collector()
    fed = made.feed(given, kept)
    return [send[1] for send in kept.sends], fed


def test_async_feed_runs_records_concurrently_and_keeps_output_order() -> None:
    at_once = most = 0

    async def slowest_first(record: Record) -> bytes | None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.05 / (record.offset + 1))
        at_once -= 1
        return record.value

    values = [b"%d" % n for n in range(20)]
    put, fed = feed(route(slowest_first), records(*values))
    assert (put, fed) == (values, FeedResult(20, 20, None))
    assert most == 20


def test_async_feed_stops_at_first_failure_and_keeps_later_results() -> None:
    runs: dict[bytes, int] = {}

    async def f(value: bytes) -> bytes:
        runs[value] = runs.get(value, 0) + 1
        await asyncio.sleep(0)
        if value.startswith(b"bad"):
            raise ValueError(value.decode())
        return value

    made, given = route(f), records(b"a", b"bad 1", b"b", b"bad 2", b"c")
    put, fed = feed(made, given)
    assert (put, fed.sent, fed.handled, str(fed.error)) == ([b"a"], 1, 1, "bad 1")
    put, fed = feed(made, given[2:])
    assert (put, fed.sent, fed.handled, str(fed.error)) == ([b"b"], 1, 1, "bad 2")
    put, fed = feed(made, given[4:])
    assert (put, fed) == ([b"c"], FeedResult(1, 1, None))
    assert set(runs.values()) == {1}
    feed(made, given[4:])
    assert runs[b"c"] == 2, "results are forgotten once sent"


def test_async_retry_does_not_rerun_later_records() -> None:
    runs: dict[bytes, int] = {}

    async def f(value: bytes) -> bytes:
        runs[value] = runs.get(value, 0) + 1
        if value == b"bad" and runs[value] < 3:
            raise ValueError
        return value

    app = App("app")
    app.process("in", to="out", on_error=retry(2))(f)
    ran = eos.testing.run(app, [("in", value) for value in (b"a", b"bad", b"b", b"c")])
    assert ran.values("out") == [b"a", b"bad", b"b", b"c"]
    assert runs == {b"a": 1, b"bad": 3, b"b": 1, b"c": 1}


def test_async_decoding_and_generators_match_sync_functions() -> None:
    async def generated(order: dict[str, int]) -> AsyncIterator[object]:
        yield order["n"]
        await asyncio.sleep(0)
        yield None
        yield Out("x", key="k")

    made = route(generated, on_error=skip)
    assert [send[1:3] for send in made.outputs(Record("in", 0, 0, value=b'{"n":7}'))] == [(b"7", None), (b"x", b"k")]
    app = App("app")
    app.process("in", to="out", on_error=dlq)(generated)
    ran = eos.testing.run(app, [("in", {"n": 1}), ("in", "no"), ("in", {"n": 2})])
    assert ran.values("out") == [b"1", b"x", b"2", b"x"]
    assert ran.values("in.dlq") == [b"no"]
    with pytest.raises(PoisonRecord, match="generated failed on in"):
        app = App("app")
        app.process("in", to="out")(generated)
        eos.testing.run(app, [("in", "no")])


def test_async_batch_function_runs_to_its_end() -> None:
    app = App("app")

    @app.process_batch("in", to="out", on_error=dlq)
    async def batch(batch: list[Record]) -> list[Out]:
        await asyncio.sleep(0)
        return [record.out(b"%d" % (1 // int(record.value or b"0"))) for record in batch]

    ran = eos.testing.run(app, [("in", "1"), ("in", "0"), ("in", "1")])
    assert (ran.values("out"), ran.values("in.dlq")) == ([b"1", b"1"], [b"0"])


def test_async_lineage_matches_outputs_to_records() -> None:
    async def f(value: bytes) -> list[bytes]:
        await asyncio.sleep(0.01 / len(value))
        return [value] * len(value)

    ledger, kept = Ledger(), Collector()
    ledger.begin(("in", 0), 0, None)
    assert feed_from(with_lineage(route(f).each, ledger))(records(b"a", b"bb"), kept) == FeedResult(3, 2, None)
    last = [headers[-1] for *_, headers in kept.sends if headers]
    assert [(name, *decode(source or b"")[2:]) for name, source in last] == [
        (HEADER, 0, 0, 1, 0),
        (HEADER, 1, 0, 2, 1),
        (HEADER, 1, 1, 2, 2),
    ]


def test_async_feed_limits_concurrency() -> None:
    from eos.engine.handling import Handler
    from tests.unit.test_policies import Txn

    app = App("app")

    @app.process("in", to="out")
    async def f(value: bytes) -> bytes:
        return value

    txn = Txn()
    assert Handler(app, concurrent_most=3).handle(txn, records(*[b"x"] * 8)) is None
    assert txn.fed == [3, 3, 2]


def test_async_hooks_and_functions_share_event_loop() -> None:
    loops = []
    app = App("app")

    @app.on_start
    async def opened() -> None:
        loops.append(asyncio.get_running_loop())

    @app.process("in")
    async def f(value: bytes) -> None:
        loops.append(asyncio.get_running_loop())

    @app.on_stop
    async def closed() -> None:
        loops.append(asyncio.get_running_loop())

    eos.testing.run(app, [("in", "a"), ("in", "b")])
    assert len(loops) == 4
    assert len(set(map(id, loops))) == 1
    assert loops[0].is_closed()


def test_async_cancelled_coroutine_fails_its_record() -> None:
    async def f(value: bytes) -> None:
        raise asyncio.CancelledError

    assert isinstance(feed(route(f), records(b"a"))[1].error, asyncio.CancelledError)


class Stop(Interruption):
    pass


@pytest.mark.parametrize("busy", [False, True], ids=["waiting", "working"])
def test_async_signal_exception_leaves_running_coroutines(busy: bool) -> None:
    async def f(value: bytes) -> None:
        if value == b"a":
            timer.start()  # only now: the signal must arrive while the coroutines run
        while busy:
            await asyncio.sleep(0)
            time.sleep(0.001)
        await asyncio.sleep(60)

    def raising(*_: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGUSR1, raising)
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1))
    try:
        with pytest.raises(Stop):
            feed(route(f), records(b"a", b"b"))
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
        concurrent.close()


# ---- inside a running event loop -------------------------------------------------------------------------------------


async def passes(value: bytes) -> bytes:
    return value


async def batch_passes(given: list[Record]) -> list[Out]:
    return [record.out(record.value) for record in given]


def app_with_async_function(batch: bool = False) -> App:
    app = App("app")
    if batch:
        app.process_batch("in", to="out", on_error=skip)(batch_passes)
    else:
        app.process("in", to="out", on_error=skip)(passes)
    return app


@pytest.mark.parametrize("batch", [False, True])
def test_async_run_in_running_loop_is_refused_at_start(batch: bool) -> None:
    async def notebook() -> None:
        eos.testing.run(app_with_async_function(batch), [("in", b"a")])

    with pytest.raises(ConfigurationError, match=r"asyncio\.to_thread"):
        asyncio.run(notebook())


def test_async_hook_in_running_loop_is_refused() -> None:
    async def notebook() -> list[bytes | None]:
        app = App("app")
        app.process("in", to="out")(lambda record: b"x")
        ran = eos.testing.run(app, [("in", b"a")])
        app.on_stop(later)
        with pytest.raises(ConfigurationError, match="event loop"):
            eos.testing.run(app, [("in", b"a")])
        return ran.values("out")

    async def later() -> None: ...

    assert asyncio.run(notebook()) == [b"x"]


def test_async_remedy_for_running_loop_works() -> None:
    async def notebook() -> list[bytes | None]:
        ran = await asyncio.to_thread(eos.testing.run, app_with_async_function(), [("in", b"a")])
        return ran.values("out")

    assert asyncio.run(notebook()) == [b"a"]


def test_async_worker_in_running_loop_is_refused_before_connecting() -> None:
    async def notebook() -> None:
        settings = {"bootstrap.servers": "127.0.0.1:1", "eos.startup.timeout.ms": 1_000}
        Worker(app_with_async_function(), Settings(settings)).run()

    with pytest.raises(ConfigurationError, match="event loop"):
        asyncio.run(notebook())


@pytest.mark.parametrize("batch", [False, True])
def test_async_loop_that_runs_later_is_not_a_record_failure(batch: bool) -> None:
    kept = Collector()

    async def handle_in_loop() -> Halt | None:
        return Handler(app_with_async_function(batch)).handle(kept, records(b"a", b"b"))

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        halt = asyncio.run(handle_in_loop())
        assert halt is not None
        assert isinstance(halt.error, ConfigurationError)
        assert (halt.handled, kept.skipped) == (0, 0)
        del halt
        gc.collect()
    assert [str(w.message) for w in warned if "never awaited" in str(w.message)] == []


def test_async_closed_loop_does_not_fail_next_record() -> None:
    app = App("app")

    @app.process("in", to="out", on_error=skip)
    async def ends(value: bytes) -> bytes:
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
        await asyncio.sleep(30)
        return value

    with pytest.raises(IllegalState, match="has stopped"):
        eos.testing.run(app, [("in", b"a"), ("in", b"b")])


def test_async_loop_creation_error_is_not_a_record_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> asyncio.AbstractEventLoop:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "new_event_loop", fail)
    monkeypatch.setattr(asyncio.events, "new_event_loop", fail)
    with pytest.raises(Temporary, match="Too many open files"):
        eos.testing.run(app_with_async_function(), [("in", b"a")])


def test_async_runtime_error_of_a_function_is_a_record_failure() -> None:
    app = App("app")

    @app.process("in", to="out", on_error=skip)
    async def fails(value: bytes) -> bytes:
        raise RuntimeError("of the function")

    assert eos.testing.run(app, [("in", b"a")]).skipped == 1
