"""The log of a stream and the store of logs: what is kept, for whom, for how long and in how many bytes."""

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


def test_ids_name_their_gateway_and_differ():
    ids = {new_id("chatcmpl-", 63) for _ in range(100)}
    assert len(ids) == 100
    assert {gateway_of(one) for one in ids} == {63}
    assert gateway_of(new_id("resp_", 0)) == 0
    for wrong in ("", "resp_", "resp_zz" + "0" * 30, "resp_" + "0" * 31, "resp_" + "0" * 33, "../" + "0" * 32):
        assert gateway_of(wrong) is None


async def test_events_are_read_from_any_number():
    store = StreamStore(max_bytes=1 << 20, grace=1.0)
    log = store.open("s", OWNER)
    for number in range(5):
        log.append(b"%d" % number)
    assert [list(log.after(seen)) for seen in (0, 3, 5)] == [[b"0", b"1", b"2", b"3", b"4"], [b"3", b"4"], []]
    assert log.last == 5


async def test_a_reader_hears_of_news_and_of_the_end():
    log = StreamStore(max_bytes=1 << 20, grace=1.0).open("s", OWNER)
    for act in (lambda: log.append(b"x"), log.end):
        waiting = asyncio.create_task(log.news())
        await asyncio.sleep(0)
        act()
        await asyncio.wait_for(waiting, 5)
    assert log.ended


async def test_another_key_finds_nothing():
    store = StreamStore(max_bytes=1 << 20, grace=1.0)
    log = store.open("s", OWNER)
    assert store.find("s", OWNER) is log
    for identifier, owner in (("s", OTHER), ("t", OWNER)):
        with pytest.raises(NotFoundError):
            store.find(identifier, owner)


async def test_one_stream_has_a_bound():
    store = StreamStore(max_bytes=16 * 10_000, grace=1.0)
    log = store.open("s", OWNER)
    for _ in range(1000):
        log.append(bytes(872))
    assert log.num_bytes == store.num_bytes == 10_000 and len(log.after(990)) == 10
    with pytest.raises(NotFoundError, match="no longer kept"):
        log.after(989)
    log.append(bytes(50_000))
    assert len(log.after(1000)) == 1, "the newest event is kept, however large"


async def test_all_streams_have_a_bound_and_the_oldest_events_go_first():
    store = StreamStore(max_bytes=20_000, grace=1.0)
    logs = [store.open(str(index), OWNER) for index in range(40)]
    for _ in range(3):
        for log in logs:
            log.append(bytes(372))
            assert store.num_bytes <= 20_000
    assert [len(log.after(2)) for log in logs] == [1] * 40, "who has read so far misses nothing"
    with pytest.raises(NotFoundError, match="no longer kept"):
        logs[0].after(0)


async def test_a_key_that_streams_much_pushes_out_nothing_of_one_that_streams_little():
    store = StreamStore(max_bytes=100_000, grace=1.0)
    little = store.open("little", OWNER)
    for number in range(5):
        little.append(b"%d" % number)
    much = [store.open(f"much {number}", OTHER) for number in range(30)]
    for _ in range(100):
        for log in much:
            log.append(bytes(372))
            assert store.num_bytes <= 100_000
    assert len(little.after(0)) == 5, "though its events are the oldest"
    assert {len(log.after(99)) for log in much} == {1}
    many = [store.open(f"many {number}", OWNER) for number in range(30)]
    for _ in range(100):
        for log in many:
            log.append(bytes(372))
    assert 45_000 < sum(log.num_bytes for log in much) <= 50_500, "both have half when both want it"


async def test_what_nobody_reads_is_cancelled_and_forgotten():
    store = StreamStore(max_bytes=1 << 20, grace=0.02)
    log, ended = store.open("s", OWNER), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    store.run("s", work())
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


async def test_a_reader_that_comes_back_in_time_keeps_it():
    store = StreamStore(max_bytes=1 << 20, grace=0.05)
    log = store.open("s", OWNER)
    with store.claim("s", log):
        pass
    with store.claim("s", log):
        await asyncio.sleep(0.1)
        assert store.find("s", OWNER) is log


async def test_many_abandoned_streams_leave_nothing():
    store = StreamStore(max_bytes=1 << 20, grace=0.001)
    for index in range(100_000):
        log = store.open(str(index), OWNER)
        log.append(b"data: {}\n\n")
        store.drop(str(index))
        assert sum(len(share.order) for share in store._shares.values()) < 3000
    assert (len(store), store.num_bytes, len(store._shares)) == (0, 0, 0)


class Request:
    """What a refused request holds on to."""


def refused(request: Request) -> RateLimitError:
    try:
        raise RateLimitError(f"Too many beside {type(request).__name__}.", retry_after=2.5)
    except RateLimitError as error:
        return error


async def test_an_error_holds_on_to_nobody():
    log = StreamStore(max_bytes=1 << 20, grace=1.0).open("s", OWNER)
    gc.disable()
    try:
        request = Request()
        gone = weakref.ref(request)
        log.end(refused(request))
        del request
        assert gone() is None, "not to the request that failed"
        seen = Request()
        gone = weakref.ref(seen)

        def read(_: Request) -> None:
            with pytest.raises(RateLimitError) as caught:
                raise log.error or AssertionError
            assert caught.value.retry_after == 2.5 and caught.value.code == "rate_limit_exceeded"
            assert caught.value.message == "Too many beside Request."

        read(seen)
        assert log.error is not None and log.error.__traceback__ is None, "nor to who has read it"
    finally:
        gc.enable()


async def test_what_never_began_is_forgotten_with_its_reader():
    store = StreamStore(max_bytes=1 << 20, grace=60.0)
    log = store.open("s", OWNER)
    with store.claim("s", log):
        log.end(UnavailableError("No."))
        with store.claim("s", log):
            pass
        assert len(store) == 1
    assert len(store) == 0


async def test_who_reads_a_deleted_stream_hears_of_it_and_nothing_is_counted_any_more():
    store = StreamStore(max_bytes=1 << 20, grace=1.0)
    log = store.open("s", OWNER)
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


async def test_a_stream_whose_work_was_cancelled_before_it_began_has_ended():
    store = StreamStore(max_bytes=1 << 20, grace=1.0)
    log = store.open("s", OWNER)
    store.run("s", asyncio.sleep(60))
    await store.stop("s")
    assert log.ended


async def test_a_reader_takes_a_piece_at_a_time():
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


async def test_keeping_up_takes_as_long_at_the_end_of_a_stream_as_at_its_beginning():
    def stream(count: int) -> None:
        log = StreamStore(max_bytes=1 << 30, grace=1.0).open("s", OWNER)
        for number in range(count):
            log.append(b"x")
            assert len(log.after(number)) == 1

    expect_linear(stream, 2_000, 20_000)


async def test_an_ended_stream_without_events_left_is_forgotten():
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
        assert store.find("running", OWNER) is running and not running.has(1)


async def test_what_streams_take_is_what_is_counted():
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


async def test_a_retired_stream_is_read_to_its_end_and_then_forgotten():
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
