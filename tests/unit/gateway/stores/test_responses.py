"""The store of responses: bounds, times, owners."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from collections.abc import Iterable

import pytest

from gateway.http.errors import kept_json
from gateway.stores.responses import ResponseStore, StoredResponse
from shared.errors import InvalidRequestError, NotFoundError

OWNER = b"owner"


def stored(size: int = 10, *, owner: bytes = OWNER, **fields) -> StoredResponse:
    return StoredResponse(owner, bytes(size), (b"[%d]" % 1,), b"[%d]" % 2, **fields)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_continues_a_response_begins_with_its_input_and_output():
    store = ResponseStore(max_bytes=1 << 20, time_to_live=1.0)
    store.put("a", stored())
    assert store.continued("a", OWNER) == (b"[1]", b"[2]")
    store.put("a", stored(done=False))
    with pytest.raises(InvalidRequestError):
        store.continued("a", OWNER)


def test_another_key_finds_and_deletes_nothing():
    store = ResponseStore(max_bytes=1 << 20, time_to_live=1.0)
    store.put("a", stored())
    for act in (store.get, store.continued, store.delete):
        with pytest.raises(NotFoundError):
            act("a", b"other")
    store.delete("a", OWNER)
    assert (len(store), store.num_bytes) == (0, 0)


def test_the_least_recently_used_go_first():
    store = ResponseStore(max_bytes=4 * stored(1000).size, time_to_live=1.0)
    for name in "abcd":
        store.put(name, stored(1000))
    store.get("a", OWNER)
    store.put("e", stored(1000))
    assert "b" not in store and all(name in store for name in "acde")
    store.put("f", stored(100_000))
    assert "f" not in store and len(store) == 4, "what is larger than all room is not kept, and pushes nothing out"
    store.put("e", stored(100_000))
    assert "e" not in store and store.num_bytes == 3 * stored(1000).size, "nor its earlier state"


def names_of(store: ResponseStore, owner: bytes, names: Iterable[str]) -> list[str]:
    """Those that the key still has."""
    kept = []
    for name in names:
        with contextlib.suppress(NotFoundError):
            store.get(name, owner)
            kept.append(name)
    return kept


def test_a_key_that_stores_much_pushes_out_nothing_of_one_that_stores_little():
    store = ResponseStore(max_bytes=20 * stored(1000).size, time_to_live=1.0)
    few = [f"few {number}" for number in range(5)]
    for name in few:
        store.put(name, stored(1000, owner=b"little"))
    for number in range(1000):
        store.put(f"many {number}", stored(1000, owner=b"much"))
    assert names_of(store, b"little", few) == few, "though they are the oldest"
    many = [f"many {number}" for number in range(1000)]
    assert names_of(store, b"much", many) == many[-15:], "the oldest of its own"
    more = [f"more {number}" for number in range(15)]
    for name in more:
        store.put(name, stored(1000, owner=b"little"))
    assert len(names_of(store, b"little", [*few, *more])) == len(names_of(store, b"much", many)) == 10


def test_by_number_too_a_key_gives_way_that_has_more():
    store = ResponseStore(max_bytes=1 << 30, time_to_live=1.0, max_responses=10)
    store.put("large", stored(100_000, owner=b"little"))
    for number in range(100):
        store.put(str(number), stored(owner=b"much"))
    assert len(store) == 10 and "large" in store and "91" in store and "90" not in store


def test_items_give_way_with_their_response():
    store = ResponseStore(max_bytes=5 * stored(1000, item_ids=("x",)).size, time_to_live=1.0)
    store.put("a", stored(1000, owner=b"little", item_ids=("x",)))
    for number in range(50):
        store.put(str(number), stored(1000, owner=b"much", item_ids=("x", str(number))))
    assert store.with_item("x", b"little") is store.get("a", b"little")
    assert store.with_item("x", b"much") is store.with_item("49", b"much") is store.get("49", b"much")
    with pytest.raises(NotFoundError):
        store.with_item("0", b"much")


def test_the_garbage_collector_does_not_look_at_what_is_stored():
    store = ResponseStore(max_bytes=1 << 30, time_to_live=1.0)
    for number in range(100):
        store.put(
            str(number), StoredResponse(OWNER, b"body", (bytes(10), bytes(10)), bytes(10), item_ids=(str(number),))
        )
    assert not any(gc.is_tracked(store.get(str(number), OWNER)) for number in range(100))
    gc.collect()
    assert sum(1 for found in gc.get_objects() if type(found) is tuple and found[:1] == (OWNER,)) == 0


def test_the_number_is_bounded_too():
    store = ResponseStore(max_bytes=1 << 30, time_to_live=1.0, max_responses=10)
    for index in range(100):
        store.put(str(index), stored())
    assert len(store) == 10 and "99" in store


def test_nothing_is_kept_where_there_is_no_room():
    store = ResponseStore(max_bytes=0, time_to_live=1.0)
    store.put("a", stored())
    assert len(store) == 0


def test_time_counts_from_the_last_use():
    clock = Clock()
    store = ResponseStore(max_bytes=1 << 20, time_to_live=10.0, clock=clock)
    store.put("a", stored())
    store.put("b", stored())
    clock.now = 6.0
    store.get("a", OWNER)
    clock.now = 11.0
    store.expire()
    assert "a" in store and "b" not in store
    clock.now = 16.0
    with pytest.raises(NotFoundError):
        store.get("a", OWNER)


def test_a_hundred_thousand_responses_leave_memory_flat():
    store = ResponseStore(max_bytes=1 << 20, time_to_live=1000.0)

    def put(first: int, count: int) -> None:
        for index in range(first, first + count):
            store.put(f"resp_{index:030}", stored(200))
            assert store.num_bytes <= 1 << 20

    put(0, 2000)
    tracemalloc.start()
    put(2000, 2000)
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    tracemalloc.start()
    put(4000, 96_000)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert abs(after - before) < 200_000


def test_a_long_conversation_takes_the_room_of_its_last_response():
    """Its parts are shared, and counted once, whichever of those that have them goes first."""
    store = ResponseStore(max_bytes=1 << 30, time_to_live=1000.0)
    turns = 100
    for turn in range(turns):
        put_in = store.continued(str(turn - 1), OWNER) if turn else ()
        store.put(str(turn), StoredResponse(OWNER, b"body", (*put_in, bytes(5000)), bytes(5000)))
    last = store.get(str(turns - 1), OWNER)
    assert len(last.conversation) == 2 * turns
    assert last.size < store.num_bytes < last.size + turns * 2500
    for turn in [*range(0, turns, 2), *range(1, turns - 1, 2)]:
        store.delete(str(turn), OWNER)
    assert store.num_bytes == last.size, "it has all that the others had"
    store.delete(str(turns - 1), OWNER)
    assert store.num_bytes == 0 and not store._shares


@pytest.mark.parametrize("length", [10, 300, 1000, 5000, 20_000])
def test_what_is_counted_is_what_is_taken(length):
    """The JSON of responses: its encoder's buffers are larger than what is in them."""
    store = ResponseStore(max_bytes=1 << 30, time_to_live=1000.0)
    items = [{"text": "x" * length}]
    tracemalloc.start()
    for index in range(200):
        name = f"resp_{index:030}"
        put_in = store.continued(f"resp_{index - 1:030}", OWNER) if index % 50 else ()
        store.put(
            name, StoredResponse(OWNER, kept_json({"output": items}), (*put_in, kept_json(items)), kept_json(items))
        )
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken <= store.num_bytes


def test_items_are_found_by_owner_and_go_with_their_response():
    store = ResponseStore(max_bytes=1 << 20, time_to_live=1.0)
    store.put("a", stored(item_ids=("x", "y")))
    store.put("b", stored(item_ids=("y",)))
    store.put("c", stored(owner=b"other", item_ids=("x",)))
    assert store.with_item("x", OWNER) is store.get("a", OWNER)
    assert store.with_item("y", OWNER) is store.get("b", OWNER), "the newest"
    for item, owner in (("y", b"other"), ("z", OWNER), ("", OWNER)):
        with pytest.raises(NotFoundError):
            store.with_item(item, owner)
    store.put("a", stored(item_ids=("w",)))
    store.delete("b", OWNER)
    for item in ("x", "y"):
        with pytest.raises(NotFoundError):
            store.with_item(item, OWNER)
    assert store.with_item("w", OWNER).owner == OWNER and store.with_item("x", b"other").owner == b"other"


def test_the_index_of_items_has_a_bound():
    store = ResponseStore(max_bytes=100_000, time_to_live=1.0)
    for number in range(1000):
        store.put(str(number), stored(item_ids=tuple(f"{number}-{index}" for index in range(10))))
        assert store.num_bytes <= 100_000
        assert len(store._shares[OWNER].items) == 10 * len(store) < 400


def test_what_was_deleted_while_it_ran_does_not_come_back():
    store = ResponseStore(max_bytes=1 << 20, time_to_live=1.0)
    for number in range(100):
        identifier = str(number)
        store.put(identifier, stored(done=False))
        store.delete(identifier, OWNER)
        store.put(identifier, stored(done=False))
        store.put(identifier, stored(item_ids=("x",)))
        assert identifier not in store
    assert not store._deleted and not store._shares and store.num_bytes == 0
    store.put("a", stored())
    store.delete("a", OWNER)
    assert not store._deleted
