"""Replay against a fake server over real HTTP with real client processes."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from scripts.loadtest.cli import main
from scripts.loadtest.coordinator import Load
from scripts.loadtest.records import LoadRequest, Segment, Target
from tests.fakes.fake_openai_server import MODEL, TEMPLATE_TOKENS, FakeOpenAIServer, Fault, tokens_of

ROOT = Path(__file__).parents[2]


def requests(count: int, max_tokens: int = 6) -> list[LoadRequest]:
    return [LoadRequest(i, 0.0, max_tokens, segments=[Segment(f"line-{i}", 20)]) for i in range(count)]


async def run_load(server: FakeOpenAIServer, count: int, **options):
    timeout = options.pop("timeout", 50.0)
    async with server.running() as url:
        target = Target(url, "chat", MODEL, timeout=timeout, words=["the", "of", "and"], api_key="sk-test")
        return await Load(target, requests(count), num_processes=2, **options).run()


async def replay(
    *arguments: str, module: str = "scripts.loadtest.cli", interrupt_on: asyncio.Event | None = None
) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    if interrupt_on is not None:
        await interrupt_on.wait()
        process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_every_request_gives_one_record_with_tokens_from_usage_or_of_frames():
    server = FakeOpenAIServer(faults={3: "one_frame", 5: "no_usage"})
    result = await run_load(server, 10)
    assert [record.index for record in result.records] == list(range(10))
    assert {record.error for record in result.records} == {None}
    assert {record.output_tokens for record in result.records} == {6}
    assert sorted(record.tokens_from_usage for record in result.records) == [False] + [True] * 9
    assert sorted(len(record.frame_times) for record in result.records) == [1] + [6] * 9
    assert {record.finish_reason for record in result.records} == {"length"}
    assert set(server.authorizations) == {"Bearer sk-test"}
    assert {len(body["messages"][0]["content"].split()) for body in server.bodies} == {20}


FAULTS: dict[Fault, str] = {
    "http_429": "http_429",
    "http_500": "http_500",
    "cut": "truncated",
    "no_done": "truncated",
    "error_event": "stream_error",
    "bad_frame": "bad_frame",
    "stall": "timeout",
    "not_a_stream": "bad_frame",
}


async def test_faults_are_distinguished_and_fail_one_request_each():
    result = await run_load(FakeOpenAIServer(faults=dict(enumerate(FAULTS))), len(FAULTS) + 3, timeout=5.0)
    failed = [record for record in result.records if record.error]
    assert sorted(record.error for record in failed) == sorted(FAULTS.values())
    assert all(record.message for record in failed)
    assert {record.retry_after for record in failed if record.error.startswith("http")} == {"3"}


async def test_a_refused_connection_is_an_error():
    target = Target("http://127.0.0.1:9/v1", "chat", MODEL, timeout=20.0, words=["the"])
    result = await Load(target, requests(3), num_processes=1).run()
    assert [record.error for record in result.records] == ["connect"] * 3


async def test_the_concurrency_limit_holds_over_all_processes():
    server = FakeOpenAIServer(ttft=0.2)
    result = await run_load(server, 24, max_concurrency=3)
    assert len(result.records) == 24
    assert server.peak_open == 3


async def test_duration_stops_sending_and_awaits_running_requests():
    server = FakeOpenAIServer(ttft=0.2)
    result = await run_load(server, 40, max_concurrency=2, duration=1.0)
    assert 2 <= len(result.records) < 20
    assert {record.error for record in result.records} == {None}
    assert len(server.bodies) == len(result.records)


@pytest.mark.parametrize("llama_cpp", [False, True])
async def test_prompts_have_the_lengths_of_the_trace_and_share_blocks(tmp_path, llama_cpp):
    trace = tmp_path / "mooncake.jsonl"
    lines = [{"timestamp": 0, "input_length": 700 + i, "output_length": 3, "hash_ids": [1, 2 + i]} for i in range(4)]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    server = FakeOpenAIServer(llama_cpp=llama_cpp)
    async with server.running() as url:
        code, out, err = await replay(
            str(trace), "--url", url, "--ignore-eos", "--temperature", "0", "--goodput", "ttft:100000",
            "--output", str(tmp_path / "out"),
        )  # fmt: skip
    assert code == 0, err
    assert "one token each (/tokenize)" in err
    assert "100.0%" in out
    texts = [body["messages"][0]["content"] for body in server.bodies]
    assert sorted(TEMPLATE_TOKENS + tokens_of(text) - 1 for text in texts) == [700, 701, 702, 703]
    assert len({" ".join(text.split()[:512]) for text in texts}) == 1
    assert len({" ".join(text.split()[:520]) for text in texts}) == 4
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in server.bodies)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["summary"]
    assert summary["prompt_length_error"]["maximum"] == 0
    assert summary["output_tokens"] == 12
    assert len((tmp_path / "out" / "requests.jsonl").read_text().splitlines()) == 4
    assert (tmp_path / "out" / "replay.png").read_bytes().startswith(b"\x89PNG")


async def test_completions_without_tokenize_and_with_failures(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"2023-11-16 18:15:46.{i:07},40,5\n" for i in range(6))
    )
    server = FakeOpenAIServer(tokenize=False, faults={1: "http_429", 2: "cut"})
    async with server.running() as url:
        code, out, err = await replay(str(trace), "--url", url, "--endpoint", "completions", "--request-rate", "100")
    assert code == 0, err
    assert "assumed one token per word" in err
    assert "4 completed of 6 sent" in out
    assert "1 of them 429 responses" in out
    assert all(len(body["prompt"].split()) == 40 for body in server.bodies)


async def test_an_interrupted_replay_reports_its_results(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "\n".join(json.dumps({"arrival": i * 0.2, "prompt": "hi", "output_length": 4}) for i in range(500))
    )
    third = asyncio.Event()
    server = FakeOpenAIServer(on_request=lambda number: third.set() if number == 2 else None)
    async with server.running() as url:
        code, out, err = await replay(str(trace), "--url", url, interrupt_on=third)
    assert code == 130, err
    assert "interrupted" in out
    assert "not sent" in out
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--goodput", "speed:3"], "unknown goodput bound"),
        (["--num-requests", "2"], "the trace has only 1"),
        ([], "does not respond"),
    ],
)
def test_the_reason_for_a_failed_start_is_printed(tmp_path, capsys, arguments, message):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival": 0, "prompt": "hi"}')
    assert main([str(trace), "--url", "http://127.0.0.1:9/v1", *arguments]) == 1
    assert message in capsys.readouterr().err


async def test_the_serving_benchmark_measures_a_server_that_runs():
    server = FakeOpenAIServer(ttft=0.01)
    arguments = ["--no-ceiling", "--rounds", "1", "--concurrency", "4", "--tests", "load", "single"]
    async with server.running() as url:
        code, out, err = await replay("--url", url, *arguments, module="scripts.loadtest.bench")
    assert code == 0, err
    figures = json.loads(out.splitlines()[-1])
    assert figures["load"]["output_tokens_per_second"] > 0
    assert figures["single"]["ttft_p50_ms"] > 0
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts) == 2 + 4 + 4
    assert sorted(map(len, prompts)) == [32] * 2 + [128] * 8
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in server.bodies)


async def test_the_serving_benchmark_gives_no_figures_of_failed_requests():
    async with FakeOpenAIServer(faults={4: "http_500"}).running() as url:
        code, out, err = await replay("--url", url, "--no-ceiling", "--tests", "load", module="scripts.loadtest.bench")
    assert code == 1
    assert "http_500" in err
    assert out == ""
