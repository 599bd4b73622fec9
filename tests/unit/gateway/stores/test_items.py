"""Items of stored responses, by their ids."""

from __future__ import annotations

from typing import Any

from gateway.http.errors import dump_json
from gateway.stores.items import find_items
from gateway.stores.responses import ResponseStore, StoredResponse

OWNER = b"owner"


def response(put_in: list[dict[str, Any]], output: list[dict[str, Any]]) -> StoredResponse:
    items = tuple(item["id"] for item in (*put_in, *output))
    return StoredResponse(OWNER, b"{}", (dump_json(put_in),), dump_json(output), item_ids=items)


async def test_each_item_is_that_of_the_newest_response_that_has_it():
    """Ids of what is put in are its client's choice."""
    store = ResponseStore(max_bytes=1 << 20, time_to_live=60.0)
    old = {"id": "a", "version": 1}
    store.put("first", response([old], [{"id": "b"}]))
    store.put("second", response([{"id": "a", "version": 2}], [{"id": "c"}]))
    for wanted in (("a", "b", "c"), ("b", "a"), ("c", "b", "a", "x")):
        found = await find_items(store, wanted, OWNER)
        assert found == {name: {"id": name} | ({"version": 2} if name == "a" else {}) for name in wanted if name != "x"}
    assert await find_items(store, ("a", "b"), b"other") == {}
    store.delete("second", OWNER)
    assert await find_items(store, ("a", "c"), OWNER) == {}, "what was newer is gone, and not replaced"


async def test_thousands_of_items_are_found_at_once():
    store = ResponseStore(max_bytes=1 << 24, time_to_live=60.0)
    for index in range(40):
        store.put(str(index), response([{"id": f"{index}.{number}"} for number in range(100)], []))
    wanted = [f"{index}.{number}" for number in range(100) for index in range(40)]
    assert set(await find_items(store, wanted, OWNER)) == set(wanted)
