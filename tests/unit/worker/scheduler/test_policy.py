"""Queue order, admission reserve and deadlines."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.fakes.engine_harness import make_submit
from worker.kv.manager import SequencePages
from worker.requests.request import Request, Status
from worker.scheduler.policy import DeadlineQueue, RequestQueue, admission_reserve

_arrivals = itertools.count()


def make_request(name: str = "r", **fields) -> Request:
    return Request(
        make_submit(name, [5, 6, 7], **fields),
        0,
        owner=b"",
        arrival=next(_arrivals),
        eos_token_ids=frozenset({2}),
        max_model_len=64,
        pages=SequencePages(b"", 1),
    )


def test_queue_orders_by_priority_then_arrival():
    requests = [make_request(str(priority), priority=priority) for priority in (0, 5, -1, 0, 5, -1)]
    queue = RequestQueue()
    for request in random.Random(3).sample(requests, len(requests)):
        queue.add(request)
    expected = [requests[index] for index in (2, 5, 0, 3, 1, 4)]
    assert list(queue) == expected
    assert (queue[0], queue[-1], len(queue)) == (expected[0], expected[-1], 6)
    queue.remove(requests[0])
    assert list(queue) == [request for request in expected if request is not requests[0]]
    queue.add(requests[0])
    assert list(queue) == expected


def test_removing_absent_request_raises():
    queue = RequestQueue()
    queue.add(make_request())
    with pytest.raises(ValueError, match="request other is not in the queue"):
        queue.remove(make_request("other"))
    with pytest.raises(ValueError, match="request early is not in the queue"):
        RequestQueue().remove(make_request("early"))


@pytest.mark.parametrize(
    ("num_running", "num_pages", "reserve"), [(0, 1000, 0), (3, 1000, 3), (400, 1000, 50), (4, 10, 1), (1, 1, 1)]
)
def test_reserve_is_one_page_per_running_request_up_to_five_percent(num_running, num_pages, reserve):
    assert admission_reserve(num_running, num_pages) == reserve


def test_expired_requests_are_returned_once_in_deadline_order():
    queue = DeadlineQueue()
    requests = {deadline: make_request(str(deadline)) for deadline in (3.0, 1.0, 2.0, 9.0)}
    for deadline, request in requests.items():
        queue.add(request, deadline)
    assert list(queue.pop_expired(0.5)) == []
    assert list(queue.pop_expired(3.0)) == [requests[1.0], requests[2.0], requests[3.0]]
    assert list(queue.pop_expired(3.0)) == []


def test_started_or_ended_requests_do_not_expire():
    queue = DeadlineQueue()
    started, ended, follower, waiting = (make_request(name) for name in ("started", "ended", "follower", "waiting"))
    for request in (started, ended, follower, waiting):
        queue.add(request, 1.0)
    started.num_cached_tokens = 0
    ended.status = Status.FINISHED
    follower.leader = started
    assert list(queue.pop_expired(2.0)) == [waiting]


def test_deadline_entries_of_ended_requests_are_removed():
    queue = DeadlineQueue()
    waiting = [make_request() for _ in range(100)]
    for request in waiting:
        queue.add(request, 500.0)
    for _ in range(5000):
        request = make_request()
        queue.add(request, 1000.0)
        request.status = Status.FINISHED
    assert len(queue) <= 2 * len(waiting) + 64
    assert list(queue.pop_expired(2000.0)) == waiting
