"""Reservation for a request that runs in parts: admitted and measured once, over a link to a fake worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from gateway.flow.beam_search import BeamSearch, start_beam_search
from gateway.flow.beam_state import BeamParams
from shared.errors import RateLimitError
from shared.messages import Submit, TokenLogprobs
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.gateway_core import Core, collect, make_request, running_core, until

REPORT = TokenLogprobs(65, -0.5, 1, [65, 66, 2, 67], [-0.5, -1.5, -2.0, -9.0])


class ReportingWorker(FakeWorker):
    """Worker that reports the same likely tokens at every position."""

    def _next_output(self, one):
        output = super()._next_output(one)
        return msgspec.structs.replace(output, logprobs=[REPORT])


def script(submit: Submit) -> list[int]:
    return [65] * submit.sampling.max_tokens


def searcher(core: Core, width: int) -> Callable[..., BeamSearch]:
    entry = core.registry.models()[0]
    return partial(
        start_beam_search, core.generator, BeamParams(width=width, num_returned=width), entry.pipeline, entry.facts
    )


async def test_parts_are_one_request_to_admission_and_metrics(tmp_path) -> None:
    with ReportingWorker(tmp_path, script=script) as worker:
        async with running_core(tmp_path) as core:
            await until(core.registry.models)
            async with searcher(core, 2)(make_request([5, 6], max_tokens=3, n=2)) as search:
                assert core.admission.num_sequences == 2 and core.admission.num_requests == 1
                assert core.admission.waiting_tokens == 2
                deltas = [delta async for delta in search]
                assert core.admission.num_sequences == 2 and core.admission.waiting_tokens == 0
            assert core.admission.num_sequences == core.admission.num_requests == 0
            assert [delta.token_ids for delta in deltas] == [[65, 65, 65], [65, 65, 66]]
            assert {message.sampling.max_tokens for message in worker.submits()} == {1}
            assert len(worker.submits()) == 1 + 2 + 2
            assert core.sample("requests_accepted_total", model_name="fake") == 1
            assert core.sample("request_success_total", model_name="fake", finished_reason="length") == 1
            assert core.sample("e2e_request_latency_seconds_count", model_name="fake") == 1


async def test_the_limits_hold_for_the_whole_width(tmp_path) -> None:
    with ReportingWorker(tmp_path, script=script, max_num_seqs=2) as worker:
        async with running_core(tmp_path, max_waiting_requests=1) as core:
            await until(core.registry.models)
            room = core.generator.reserve(make_request([5], n=2))
            with pytest.raises(RateLimitError):
                searcher(core, 2)(make_request([5], max_tokens=2, n=2))
            assert not worker.submits() and core.sample("requests_rejected_total", code="rate_limit_exceeded") == 1
            room.close()
            room.close()
            assert core.admission.num_sequences == 0
            assert len(await collect(searcher(core, 2)(make_request([5], max_tokens=2, n=2)))) == 2
