"""Logs of streams and their store: contents, owners, lifetime and size."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref

import pytest

from gateway.stores.ids import gateway_of, new_id
from gateway.stores.streams import StreamStore
from shared.errors import NotFoundError, RateLimitError, UnavailableError
from tests.fakes.growth import expect_linear

OWNER, OTHER = b"owner", b"other"


@pytest.fixture
async def store():
    return StreamStore(max_bytes=1 << 20, grace=1.0)


@pytest.fixture
async def log(store):
    return store.open("s", OWNER)


def test_ids_name_their_gateway_and_are_unique():
    ids = {new_id("chatcmpl-", 63) for _ in range(100)}
    assert len(ids) == 100
    assert {gateway_of(one) for one in ids} == {63}
    assert gateway_of(new_id("resp_", 0)) == 0
    for wrong in ("", "resp_", "resp_zz" + "0" * 30, "resp_" + "0" * 31, "resp_" + "0" * 33, "../" + "0" * 32):
        assert gateway_of(wrong) is None


async def test_events_are_read_from_any_number(store, log):
    for number in range(5):
        log.append(b"%d" % number)
    assert [list(log.after(seen)) for seen in (0, 3, 5)] == [[b"0", b"1", b"2", b"3", b"4"], [b"3", b"4"], []]
    assert log.last == 5


async def test_reader_is_woken_by_events_and_by_the_end(log):
    for act in (lambda: log.append(b"x"), log.end):
        waiting = asyncio.create_task(log.news())
        await asyncio.sleep(0)
        act()
        await asyncio.wait_for(waiting, 5)
    assert log.ended


async def test_another_key_cannot_find_a_stream(store, log):
    assert store.find("s", OWNER) is log
    for identifier, owner in (("s", OTHER), ("t", OWNER)):
        with pytest.raises(NotFoundError):
            store.find(identifier, owner)


async def test_one_stream_is_bounded():
    store = StreamStore(max_bytes=16 * 10_000, grace=1.0)
    log = store.open("s", OWNER)
    for _ in range(1000):
        log.append(bytes(872))
    assert log.num_bytes == store.num_bytes == 10_000 and len(log.after(990)) == 10
    with pytest.raises(NotFoundError, match="no longer kept"):
        log.after(989)
    log.append(bytes(50_000))
    assert len(log.after(1000)) == 1, "the newest event is kept, however large"


async def test_all_streams_are_bounded_and_lose_the_oldest_events_first():
    store = StreamStore(max_bytes=20_000, grace=1.0)
    logs = [store.open(str(index), OWNER) for index in range(40)]
    for _ in range(3):
        for log in logs:
            log.append(bytes(372))
            assert store.num_bytes <= 20_000
    assert [len(log.after(2)) for log in logs] == [1] * 40, "a reader that is up to date misses nothing"
    with pytest.raises(NotFoundError, match="no longer kept"):
        logs[0].after(0)


async def test_a_key_with_many_events_evicts_nothing_of_a_key_with_few():
    store = StreamStore(max_bytes=100_000, grace=1.0)
    little = store.open("little", OWNER)
    for number in range(5):
        little.append(b"%d" % number)
    much = [store.open(f"much {number}", OTHER) for number in range(30)]
    for _ in range(100):
        for log in much:
            log.append(bytes(372))
            assert store.num_bytes <= 100_000
    assert len(little.after(0)) == 5, "they are kept although they are the oldest"
    assert {len(log.after(99)) for log in much} == {1}
    many = [store.open(f"many {number}", OWNER) for number in range(30)]
    for _ in range(100):
        for log in many:
            log.append(bytes(372))
    assert 45_000 < sum(log.num_bytes for log in much) <= 50_500, "both keys get half if both need it"


async def test_unclaimed_stream_is_cancelled_and_removed():
    store = StreamStore(max_bytes=1 << 20, grace=0.02)
    log, ended = store.open("s", OWNER), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    store.run("s", work())
    with store.claim("s", log):
        pass
    # A reader that returns in time keeps the stream.
    with store.claim("s", log):
        await asyncio.sleep(0.06)
        with store.claim("s", log):
            pass
        await asyncio.sleep(0.06)
        assert store.find("s", OWNER) is log and not ended.is_set()
    await asyncio.wait_for(ended.wait(), 5)
    assert len(store) == 0 and store.num_bytes == 0
    with pytest.raises(NotFoundError):
        store.find("s", OWNER)


async def test_abandoned_streams_leave_no_memory():
    store = StreamStore(max_bytes=1 << 20, grace=0.001)
    for index in range(20_000):
        log = store.open(str(index), OWNER)
        log.append(b"data: {}\n\n")
        store.drop(str(index))
        assert sum(len(share.order) for share in store._shares.values()) < 3000
    assert (len(store), store.num_bytes, len(store._shares)) == (0, 0, 0)


class Request:
    """Object that the traceback of a refused request refers to."""


def refused(request: Request) -> RateLimitError:
    try:
        raise RateLimitError(f"Too many beside {type(request).__name__}.", retry_after=2.5)
    except RateLimitError as error:
        return error


async def test_error_keeps_no_traceback_alive(log):
    gc.disable()
    try:
        request = Request()
        gone = weakref.ref(request)
        log.end(refused(request))
        del request
        assert gone() is None, "the error keeps the failed request alive"
        seen = Request()
        gone = weakref.ref(seen)

        def read(_: Request) -> None:
            with pytest.raises(RateLimitError) as caught:
                raise log.error or AssertionError
            assert caught.value.retry_after == 2.5 and caught.value.code == "rate_limit_exceeded"
            assert caught.value.message == "Too many beside Request."

        read(seen)
        assert log.error is not None and log.error.__traceback__ is None, "the error keeps its reader alive"
    finally:
        gc.enable()


async def test_refused_stream_is_removed_with_its_last_reader():
    store = StreamStore(max_bytes=1 << 20, grace=60.0)
    log = store.open("s", OWNER)
    with store.claim("s", log):
        log.end(UnavailableError("No."))
        with store.claim("s", log):
            pass
        assert len(store) == 1
    assert len(store) == 0


async def test_deleting_a_stream_wakes_readers_and_frees_its_bytes(store, log):
    with store.claim("s", log):
        log.append(b"x")
        waiting = asyncio.create_task(log.news())
        await asyncio.sleep(0)
        store.drop("s")
        await asyncio.wait_for(waiting, 5)
        assert log.ended and isinstance(log.error, NotFoundError)
        log.append(b"late")
        log.end()
        assert isinstance(log.error, NotFoundError), "the first end counts"
    assert (store.num_bytes, len(store._shares), len(store)) == (0, 0, 0)


async def test_stream_cancelled_before_its_start_has_ended(store, log):
    store.run("s", asyncio.sleep(60))
    await store.stop("s")
    assert log.ended


async def test_reader_gets_bounded_pieces():
    store = StreamStore(max_bytes=1 << 30, grace=1.0)
    log = store.open("s", OWNER)
    events = [bytes([index % 251]) * 1000 for index in range(1000)]
    for event in events:
        log.append(event)
    seen: list[bytes] = []
    while piece := log.after(len(seen)):
        assert sum(map(len, piece)) < 70_000
        seen += piece
    assert seen == events
    log.append(bytes(1_000_000))
    assert len(log.after(1000)) == 1


async def test_reading_the_newest_event_takes_constant_time():
    def stream(count: int) -> None:
        log = StreamStore(max_bytes=1 << 30, grace=1.0).open("s", OWNER)
        for number in range(count):
            log.append(b"x")
            assert len(log.after(number)) == 1

    expect_linear(stream, 2_000, 20_000)


async def test_ended_stream_without_events_is_removed():
    store = StreamStore(max_bytes=100_000, grace=60.0)
    for index in range(1000):
        log = store.open(str(index), OWNER)
        with store.claim(str(index), log):
            for _ in range(3):
                log.append(bytes(100))
            log.end()
    assert store.num_bytes <= 100_000 and len(store) < 100
    running = store.open("running", OWNER)
    with store.claim("running", running):
        running.append(b"x")
        for index in range(200):
            other = store.open(f"more {index}", OWNER)
            with store.claim(f"more {index}", other):
                other.append(bytes(2000))
                other.end()
        assert store.find("running", OWNER) is running and running.first > 1


async def test_counted_bytes_match_allocated_bytes():
    store = StreamStore(max_bytes=1 << 30, grace=60.0)
    tracemalloc.start()
    for index in range(500):
        identifier = f"chatcmpl-{index:032}"
        log = store.open(identifier, OWNER)
        with store.claim(identifier, log):
            for number in range(1 + index % 10):
                log.append(b"id: %d\n%b" % (number, bytes(250)))
            log.end()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.5 * store.num_bytes < taken < 1.2 * store.num_bytes
    await store.close()


async def test_retired_stream_is_read_to_its_end_and_removed():
    store = StreamStore(max_bytes=1 << 20, grace=5.0)
    log = store.open("s", OWNER)

    async def work() -> None:
        with store.claim("s", log):
            try:
                await asyncio.Event().wait()
            finally:
                log.append(b"last")
                log.end()

    store.run("s", work())
    log.append(b"first")
    await asyncio.sleep(0)
    with store.claim("s", log):
        with store.claim("s", log):
            await store.retire("s")
        with pytest.raises(NotFoundError):
            store.find("s", OWNER)
        assert list(log.after(0)) == [b"first", b"last"] and log.ended and log.error is None
        assert store.num_bytes == log.num_bytes > 0
    assert store.num_bytes == 0 and not log.after(log.last) and not store._shares
    store.open("t", OWNER).append(b"x")
    await store.retire("t")
    await store.retire("no such")
    assert len(store) == 0 and store.num_bytes == 0
