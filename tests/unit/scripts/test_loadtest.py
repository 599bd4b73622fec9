"""Tests of arrivals, prompts, and the figures computed from records."""

import itertools
import math

import pytest

from scripts.loadtest import prompts, report
from scripts.loadtest.bench import faster, gap_figures, report_load, report_single
from scripts.loadtest.coordinator import LoadResult
from scripts.loadtest.records import LoadRequest, Record, Segment
from scripts.loadtest.statistics import GoodputError, parse_goodput, summarize
from scripts.loadtest.traces import poisson, timed
from tests.fakes.fake_openai_server import tokens_of

REQUESTS = [LoadRequest(i, float(i * i), 4, segments=[Segment(f"line-{i}", 10)]) for i in range(50)]


def test_timed_arrivals_are_scaled():
    assert [r.arrival for r in timed(REQUESTS[:3], 2.0)] == [0.0, 0.5, 2.0]


def test_poisson_arrivals_have_given_rate_and_seed():
    sent = [r.arrival for r in poisson(REQUESTS, 5.0, seed=1)]
    assert sent == sorted(sent)
    assert sent[-1] == pytest.approx(49 / 5)
    assert sent == [r.arrival for r in poisson(REQUESTS, 5.0, seed=1)]
    assert sent != [r.arrival for r in poisson(REQUESTS, 5.0, seed=2)]
    gaps = [b - a for a, b in itertools.pairwise(sent)]
    assert max(gaps) > 3 * min(gaps)
    assert {r.arrival for r in poisson(REQUESTS, math.inf, seed=1)} == {0.0}


def test_equal_segments_give_equal_text():
    words = ["a", "b", "c", "d"]
    one = prompts.words_text(words, 0, [Segment("x", 40), Segment("y", 5)])
    two = prompts.words_text(words, 0, [Segment("x", 40), Segment("z", 5)])
    other_seed = prompts.words_text(words, 1, [Segment("x", 40)])
    assert one[:80] == two[:80]
    assert one != two
    assert one[:80] != other_seed[:80]
    assert len(one.split()) == 45


def test_prompts_are_shortened_at_the_end():
    segments = [Segment("x", 10), Segment("y", 3)]
    assert prompts.shorten(segments, 5) == [Segment("x", 8)]
    assert prompts.shorten(segments, 100) == [Segment("x", 1)]


async def test_words_of_several_tokens_are_excluded():
    calls = 0

    async def count(text: str) -> int:
        nonlocal calls
        calls += 1
        return tokens_of(text)

    words = await prompts.single_token_words(count)
    assert words == [word for word in prompts.CANDIDATES if len(word) <= 5]
    assert await prompts.single_token_words(count, ["the"] * 640) == ["the"] * 640
    assert len(prompts.CANDIDATES) > 300


def record(index: int, sent: float, frames: list[float], tokens: int | None = None, **more) -> Record:
    return Record(index=index, due=sent, sent=sent, done=frames[-1] if frames else sent + 0.05, frame_times=frames,
                  output_tokens=len(frames) if tokens is None else tokens, tokens_from_usage=True, **more)  # fmt: skip


def test_summary_of_known_records():
    result = LoadResult(num_offered=4, start=100.0, records=[
        record(0, 100.0, [100.1, 100.2, 100.4], prompt_tokens=12),
        record(1, 101.0, [101.3, 101.5], tokens=5, prompt_tokens=10),
        record(2, 101.2, [], error="http_429", message="busy"),
    ])  # fmt: skip
    summary = summarize(REQUESTS[:4], result, {"ttft": 200.0})
    assert (summary.num_completed, summary.num_requests, summary.num_not_sent) == (2, 3, 1)
    assert summary.errors == {"http_429": 1}
    assert summary.ttft.mean == pytest.approx(200.0)
    assert summary.tpot.p50 == pytest.approx((150.0 + 50.0) / 2)  # 300 ms over 2, and 200 ms over 4 tokens
    assert summary.itl.count == 3
    assert summary.e2el.maximum == pytest.approx(500.0)
    assert summary.seconds == pytest.approx(1.5)
    assert summary.output_tokens_per_second == pytest.approx(8 / 1.5)
    assert summary.goodput_share == pytest.approx(1 / 3)
    assert summary.frames_per_token == pytest.approx(5 / 8)
    assert summary.max_concurrency_seen == 2
    assert summary.prompt_length_error.mean == pytest.approx(1.0)
    text = report.render(summary)
    for part in ("http_429", "busy", "1 not sent", "goodput", "0.62 frames with text per token", "+1.0 tokens"):
        assert part in text


def test_empty_result_is_reported():
    summary = summarize(REQUESTS, LoadResult(num_offered=50, interrupted=True), {"tpot": 1.0})
    assert "interrupted" in report.render(summary)
    assert summary.goodput_share is None


def test_goodput_bounds_are_parsed():
    assert parse_goodput(["ttft:500", "e2el:2e3"]) == {"ttft": 500.0, "e2el": 2000.0}
    for wrong in ("tbt:1", "ttft", "ttft:x", "ttft:0", "ttft:nan"):
        with pytest.raises(GoodputError, match=wrong.partition(":")[0]):
            parse_goodput([wrong])


def test_gaps_inside_and_outside_an_interval():
    steady = record(0, 0.0, [i * 0.01 for i in range(1, 101)])
    slow = record(1, 0.0, [0.1, 0.2, 0.5, 0.8, 0.9])
    figures = gap_figures([steady, slow], 0.3, 0.7)
    assert figures["outside_median_ms"] == pytest.approx(10.0)
    assert figures["inside_p99_ms"] == pytest.approx(300.0, rel=0.1)
    assert gap_figures([], 0.0, 1.0)["ratio"] is None


CEILINGS = {"decode_ms": {"1": 4.0, "16": 32.0}, "prefill_ms": {"128": 50.0, "512": 512.0}}


def test_load_is_compared_with_ideal_time():
    records = [record(i, 0.0, [4.0 + i / 16, 5.0], tokens=64, prompt_tokens=128) for i in range(16)]
    summary = summarize(REQUESTS[:16], LoadResult(num_offered=16, records=records), {})
    lines, figures = report_load("16 x", summary, CEILINGS, 16)
    assert figures["ideal_seconds"] == pytest.approx(2.048 + 2.048)
    assert figures["share_of_ideal"] == pytest.approx(4.096 / 5.0)
    assert lines[-1] == ("16 x: share of the ideal time", "81.9% (4.10 of 5.00 s)", "")
    assert "share_of_ideal" not in report_load("16 x", summary, {}, 16)[1]


def test_latencies_of_one_stream_are_compared_with_ceilings():
    frames = [0.06 + 0.006 * i for i in range(64)]
    summary = summarize(REQUESTS[:1], LoadResult(records=[record(0, 0.0, frames, prompt_tokens=128)]), {})
    lines, figures = report_single(summary, CEILINGS)
    assert figures["ttft"]["ratio"] == pytest.approx(1.2)
    assert figures["token"]["ratio"] == pytest.approx(1.5)
    assert [line[1] for line in lines] == ["1.20x of 50.0 ms", "1.50x of 4.00 ms"]
    assert report_single(summary, {}) == ([], {})


def test_faster_ceiling_is_used_and_change_is_reported(capsys):
    after = {"decode_ms": {"1": 4.1, "16": 28.0}, "prefill_ms": {"128": 51.0, "512": 500.0}}
    found = faster(CEILINGS, after)
    assert found == {"decode_ms": {"1": 4.0, "16": 28.0}, "prefill_ms": {"128": 50.0, "512": 500.0}}
    assert capsys.readouterr().err == "note: decode_ms of 16 rows changed; other programs may have used the machine\n"
