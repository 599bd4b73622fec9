"""The store of responses: bounds, times, owners."""

from __future__ import annotations

import tracemalloc

import pytest

from gateway.responses import dump_json
from gateway.stores.responses import ResponseStore, StoredResponse
from shared.errors import InvalidRequestError, NotFoundError

OWNER = b"owner"


def stored(size: int = 10, *, owner: bytes = OWNER, **fields) -> StoredResponse:
    return StoredResponse(owner, bytes(size), (b"[1]",), b"[2]", **fields)


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
    assert store.num_bytes == 0 and not store._sharers and not store._items


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
            name, StoredResponse(OWNER, dump_json({"output": items}), (*put_in, dump_json(items)), dump_json(items))
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
        assert len(store._items) == 10 * len(store) < 400


def test_what_was_deleted_while_it_ran_does_not_come_back():
    store = ResponseStore(max_bytes=1 << 20, time_to_live=1.0)
    for number in range(100):
        identifier = str(number)
        store.put(identifier, stored(done=False))
        store.delete(identifier, OWNER)
        store.put(identifier, stored(done=False))
        store.put(identifier, stored(item_ids=("x",)))
        assert identifier not in store
    assert not store._deleted and not store._items and store.num_bytes == 0
    store.put("a", stored())
    store.delete("a", OWNER)
    assert not store._deleted
