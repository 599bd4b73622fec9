"""The page's status view in a browser under load: its figures change and equal those of /metrics."""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from shared.messages import WorkerStats
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.hermes import Answer, ids_of
from tests.fakes.page import no_surprises, opened, shot
from tests.fakes.prepared_server import MODEL, PreparedServer

# Token ids, because tokenizing each request kept a busy machine from answering pings, and the worker was lost.
ANSWERS: dict[str, Answer] = {"short": "Yes.", "endless": ids_of("word ")[:-1] * 20_000}
NUM_ENDLESS = 24
NUM_SHORT = 10
# The displayed figures with the text of /metrics that they come from.
RECORD = """
window.plain = window.fetch;
window.fetch = async (path, options) => {
  const response = await window.plain(path, options);
  if (path === "/metrics") window.metrics = await response.clone().text();
  return response;
}; 1
"""
SHOWN = """({
  metrics: window.metrics,
  ready: document.getElementById("ready").textContent,
  cards: Object.fromEntries([...document.querySelectorAll("#cards div")].map(card =>
    [card.firstChild.textContent, card.lastChild.textContent])),
  workers: [...document.querySelectorAll("#workers td")].map(cell => cell.textContent),
  latencies: Object.fromEntries([...document.querySelectorAll("#latencies tr")].map(row =>
    [row.firstChild.textContent, [...row.children].slice(1).map(cell => cell.textContent)])),
  chart: document.querySelector("#chart path")?.getAttribute("d") ?? "",
})"""


async def stream(session: aiohttp.ClientSession, question: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "stream": True}
    async with session.post("/v1/chat/completions", json=body) as response:
        await response.read()


def report(worker: FakeWorker) -> None:
    """Set the worker's report: its running requests, a growing number of tokens, and constant figures."""
    tokens = worker.stats.counters.get("generation_tokens_total", 0.0) + 10.0
    counters = {"generation_tokens_total": tokens, "prefix_cache_queries_total": 200.0, "prefix_cache_hits_total": 50.0}
    worker.stats = WorkerStats(num_running=worker.num_running, pages_in_use=512, counters=counters)


def totals(text):
    """Return the sum of each metric over its labels, failures without `abort`, and 0 for missing metrics."""
    found: defaultdict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("pelton:")
            if sample.labels.get("reason") == "abort":
                name += "_abort"
            found[name] += sample.value
    return found


def agrees(shown):
    """Return True if the displayed figures equal those of /metrics."""
    figures, cards = totals(shown["metrics"]), shown["cards"]
    hits = 100 * figures["prefix_cache_hits_total"] / max(1, figures["prefix_cache_queries_total"])
    expected = {
        "Running": figures["num_requests_running"],
        "Waiting": figures["num_requests_waiting"],
        "HTTP in flight": figures["http_requests_in_flight"],
        "Finished": figures["request_success_total"],
        "Aborted": figures["request_failures_total_abort"],
        "Failed": figures["request_failures_total"] + figures["requests_rejected_total"],
    }
    counts = {
        "Time to first token": figures["time_to_first_token_seconds_count"],
        "Inter-token latency": figures["inter_token_latency_seconds_count"],
        "Queue time": figures["request_queue_time_seconds_count"],
        "End-to-end latency": figures["e2e_request_latency_seconds_count"],
    }
    return (
        {name: float(cards[name]) for name in expected} == expected
        and cards["Prefix cache hits"] == (f"{hits:.1f} %" if hits else "none")
        and {name: float(cells[-1]) for name, cells in shown["latencies"].items()} == counts
        and shown["ready"] == "Ready"
        and shown["workers"][:4] == [MODEL, "0", "ready", f"{figures['num_requests_running']:g}"]
        and shown["workers"][5] == f"{100 * figures['kv_cache_usage_perc']:.1f} %"
    )


async def seen(page, worker, condition):
    """Wait until the figures equal /metrics and fulfil the condition; return them."""
    end = time.monotonic() + 50
    while True:
        report(worker)
        shown = await page.run(SHOWN)
        if shown["cards"] and shown["latencies"] and agrees(shown) and condition(shown):
            return shown
        shown.pop("metrics", None)  # long
        assert time.monotonic() < end, f"{shown}"
        await asyncio.sleep(0.05)


async def asks_no_more(page):
    """Check that polling stops, except for requests in flight."""
    end = time.monotonic() + 50
    asked = -1
    while len(page.urls) != asked:
        assert time.monotonic() < end, page.urls[-10:]
        asked = len(page.urls)
        await asyncio.sleep(2.5)


def has_moved(shown):
    """Return True if all streams have begun and continue."""
    begun = shown["latencies"]["Time to first token"][-1] == str(NUM_ENDLESS)
    continues = float(shown["cards"]["Tokens/s"]) > 0 and shown["latencies"]["Inter-token latency"][-1] != "0"
    return begun and continues and "L" in shown["chart"]


async def test_status_under_load(page):
    # Streams have 16,384 tokens and take half an hour. Faster ones would occupy a slow machine completely.
    with PreparedServer(ANSWERS, max_num_seqs=64, max_model_len=16_384, delay=0.1) as server:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(server.url, connector=connector) as session:
            endless = [asyncio.create_task(stream(session, "endless")) for _ in range(NUM_ENDLESS)]
            await opened(page, server)
            await page.run(RECORD)
            await page.run("document.getElementById('show-status').click()")
            first = await seen(page, server.worker, lambda shown: float(shown["cards"]["Running"]) == NUM_ENDLESS)
            assert float(first["cards"]["HTTP in flight"]) > NUM_ENDLESS
            moved = await seen(page, server.worker, has_moved)
            assert re.fullmatch(r"[\d.]+ (ms|s)", moved["latencies"]["Inter-token latency"][0])
            assert moved["workers"][5:] == ["50.0 %", "25.0 %"]
            await asyncio.gather(*(stream(session, "short") for _ in range(NUM_SHORT)))
            after = await seen(page, server.worker, lambda shown: shown["cards"]["Finished"] == str(NUM_SHORT))
            for name in ("Time to first token", "Inter-token latency"):
                assert int(after["latencies"][name][-1]) > int(moved["latencies"][name][-1])
            assert after["chart"].count("L") > moved["chart"].count("L")
            await shot(page, "status")
            await shot(page, "status", narrow=True)
            for task in endless:
                task.cancel()
            ended = (str(NUM_ENDLESS), "0")
            last = await seen(
                page, server.worker, lambda shown: (shown["cards"]["Aborted"], shown["cards"]["Running"]) == ended
            )
            assert last["cards"]["Failed"] == "0"
            # Polling stops while the page is hidden.
            await page.run("document.getElementById('show-chat').click()")
            await asks_no_more(page)
            # A busy machine may miss a ping of its worker.
            no_surprises(page, server, "503 (Service Unavailable)")
