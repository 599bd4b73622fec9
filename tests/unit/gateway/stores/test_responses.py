"""Store of responses: limits, expiry, owners, items."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest

from gateway.http.errors import cached_json, dump_json
from gateway.stores.responses import ResponseStore, StoredResponse, find_items
from shared.errors import InvalidRequestError, NotFoundError

OWNER = b"owner"


def stored(size: int = 10, *, owner: bytes = OWNER, **fields) -> StoredResponse:
    return StoredResponse(owner, bytes(size), (b"[%d]" % 1,), b"[%d]" % 2, **fields)


@pytest.fixture
def store():
    return ResponseStore(max_bytes=1 << 20, time_to_live=60.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_continuation_starts_with_input_and_output(store):
    store.put("a", stored())
    assert store.continued("a", OWNER) == (b"[1]", b"[2]")
    store.put("a", stored(done=False))
    with pytest.raises(InvalidRequestError):
        store.continued("a", OWNER)


def test_another_key_cannot_find_or_delete(store):
    store.put("a", stored())
    for act in (store.get, store.continued, store.delete):
        with pytest.raises(NotFoundError):
            act("a", b"other")
    store.delete("a", OWNER)
    assert (len(store), store.num_bytes) == (0, 0)


def test_least_recently_used_is_evicted_first():
    store = ResponseStore(max_bytes=4 * stored(1000).size, time_to_live=1.0)
    for name in "abcd":
        store.put(name, stored(1000))
    store.get("a", OWNER)
    store.put("e", stored(1000))
    assert "b" not in store and all(name in store for name in "acde")
    store.put("f", stored(100_000))
    assert "f" not in store and len(store) == 4, "a response larger than the store is not kept and evicts nothing"
    store.put("e", stored(100_000))
    assert "e" not in store and store.num_bytes == 3 * stored(1000).size, "its earlier state is removed, too"


def names_of(store: ResponseStore, owner: bytes, names: Iterable[str]) -> list[str]:
    """Return the names that the key still has."""
    kept = []
    for name in names:
        with contextlib.suppress(NotFoundError):
            store.get(name, owner)
            kept.append(name)
    return kept


def test_a_key_with_much_data_evicts_nothing_of_a_key_with_little():
    store = ResponseStore(max_bytes=20 * stored(1000).size, time_to_live=1.0)
    few = [f"few {number}" for number in range(5)]
    for name in few:
        store.put(name, stored(1000, owner=b"little"))
    for number in range(1000):
        store.put(f"many {number}", stored(1000, owner=b"much"))
    assert names_of(store, b"little", few) == few, "they are kept although they are the oldest"
    many = [f"many {number}" for number in range(1000)]
    assert names_of(store, b"much", many) == many[-15:], "the key loses its own oldest responses"
    more = [f"more {number}" for number in range(15)]
    for name in more:
        store.put(name, stored(1000, owner=b"little"))
    assert len(names_of(store, b"little", [*few, *more])) == len(names_of(store, b"much", many)) == 10


def test_items_are_evicted_with_their_response():
    store = ResponseStore(max_bytes=5 * stored(1000, item_ids=("x",)).size, time_to_live=1.0)
    store.put("a", stored(1000, owner=b"little", item_ids=("x",)))
    for number in range(50):
        store.put(str(number), stored(1000, owner=b"much", item_ids=("x", str(number))))
    assert store.with_item("x", b"little") is store.get("a", b"little")
    assert store.with_item("x", b"much") is store.with_item("49", b"much") is store.get("49", b"much")
    with pytest.raises(NotFoundError):
        store.with_item("0", b"much")


def test_garbage_collector_does_not_track_responses():
    store = ResponseStore(max_bytes=1 << 30, time_to_live=1.0)
    for number in range(100):
        store.put(
            str(number), StoredResponse(OWNER, b"body", (bytes(10), bytes(10)), bytes(10), item_ids=(str(number),))
        )
    assert not any(gc.is_tracked(store.get(str(number), OWNER)) for number in range(100))
    gc.collect()
    assert sum(1 for found in gc.get_objects() if type(found) is tuple and found[:1] == (OWNER,)) == 0


def test_store_without_capacity_is_empty():
    store = ResponseStore(max_bytes=0, time_to_live=1.0)
    store.put("a", stored())
    assert len(store) == 0


def test_expiry_counts_from_the_last_use():
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


def test_conversation_counts_as_much_as_its_last_response():
    """Parts are shared and counted once, whichever response is removed first."""
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
    assert store.num_bytes == last.size, "the last response contains the parts of all others"
    store.delete(str(turns - 1), OWNER)
    assert store.num_bytes == 0 and not store._shares


@pytest.mark.parametrize("length", [10, 300, 1000, 5000, 20_000])
def test_counted_bytes_cover_allocated_bytes(length):
    """The buffers of the JSON encoder are larger than their contents and must not be kept."""
    store = ResponseStore(max_bytes=1 << 30, time_to_live=1000.0)
    items = [{"text": "x" * length}]
    tracemalloc.start()
    for index in range(200):
        name = f"resp_{index:030}"
        put_in = store.continued(f"resp_{index - 1:030}", OWNER) if index % 50 else ()
        store.put(
            name,
            StoredResponse(OWNER, cached_json({"output": items}), (*put_in, cached_json(items)), cached_json(items)),
        )
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken <= store.num_bytes


def test_items_are_found_by_owner_and_removed_with_their_response(store):
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


def test_item_index_is_bounded():
    store = ResponseStore(max_bytes=100_000, time_to_live=1.0)
    for number in range(1000):
        store.put(str(number), stored(item_ids=tuple(f"{number}-{index}" for index in range(10))))
        assert store.num_bytes <= 100_000
        assert len(store._shares[OWNER].items) == 10 * len(store) < 400


def test_response_deleted_while_running_is_not_stored_again(store):
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


def with_items(put_in: list[dict[str, Any]], output: list[dict[str, Any]]) -> StoredResponse:
    items = tuple(item["id"] for item in (*put_in, *output))
    return StoredResponse(OWNER, b"{}", (dump_json(put_in),), dump_json(output), item_ids=items)


async def test_item_has_the_state_of_the_newest_response(store):
    """Clients choose the ids of input items, so several responses may contain the same id."""
    old = {"id": "a", "version": 1}
    store.put("first", with_items([old], [{"id": "b"}]))
    store.put("second", with_items([{"id": "a", "version": 2}], [{"id": "c"}]))
    for wanted in (("a", "b", "c"), ("b", "a"), ("c", "b", "a", "x")):
        found = await find_items(store, wanted, OWNER)
        assert found == {name: {"id": name} | ({"version": 2} if name == "a" else {}) for name in wanted if name != "x"}
    assert await find_items(store, ("a", "b"), b"other") == {}
    store.delete("second", OWNER)
    assert await find_items(store, ("a", "c"), OWNER) == {}, "the older version does not come back"


async def test_thousands_of_items_are_found():
    store = ResponseStore(max_bytes=1 << 24, time_to_live=60.0)
    for index in range(40):
        store.put(str(index), with_items([{"id": f"{index}.{number}"} for number in range(100)], []))
    wanted = [f"{index}.{number}" for number in range(100) for index in range(40)]
    assert set(await find_items(store, wanted, OWNER)) == set(wanted)
