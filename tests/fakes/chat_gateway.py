"""Gateway with a worker that sends prepared texts, and assembly of streamed messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shared.messages import Submit
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.gateway_core import running_core, until
from tests.fakes.hermes import hermes_bundle, ids_of
from tests.fakes.http_gateway import Gateway, parse_events, run_gateway

MODEL = "talker"


@asynccontextmanager
async def chat_gateway(
    directory: Path, text: str | Callable[[Submit], list[int]], **options: Any
) -> AsyncIterator[tuple[Gateway, FakeWorker]]:
    """Run the real gateway in this process, with a worker that answers every request with `text`."""
    script = text if callable(text) else lambda _: ids_of(text)
    fields = {"bundle": hermes_bundle(), "model_names": (MODEL,), "script": script, **options}
    with FakeWorker(directory, **fields) as worker:
        async with running_core(directory) as core:
            await until(lambda: core.registry.ready()[0])
            async with run_gateway(core.generator, core.registry) as gateway:  # type: ignore[arg-type]
                yield gateway, worker


async def ask(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    status, body, _ = await gateway.chat(model=MODEL, **fields)
    assert status == 200, body
    return body


async def ask_streamed(gateway: Gateway, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of a stream in the shape of the choices of a whole response."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    events = parse_events(await gateway.stream_raw("/v1/chat/completions", body))
    assert events[-1] == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for chunk in events[:-1]:
        for news in chunk["choices"]:
            _add(choices, news)
    return [choices[index] for index in sorted(choices)]


def _add(choices: dict[int, dict[str, Any]], news: dict[str, Any]) -> None:
    """Apply one chunk (reports 14, 26, 27). The role, and the id and name of a call, come once; no field is null."""
    delta = news["delta"]
    if (choice := choices.get(news["index"])) is None:
        assert delta == {"role": "assistant", "content": ""}
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        choices[news["index"]] = {"index": news["index"], "message": message, "logprobs": None, "finish_reason": None}
        return
    assert "role" not in delta and None not in delta.values() and choice["finish_reason"] is None
    message = choice["message"]
    for name in ("content", "reasoning", "reasoning_content"):
        message[name] = message.get(name, "") + delta.get(name, "") if name in delta else message.get(name, "")
    for call in delta.get("tool_calls", []):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            assert set(call) == {"index", "id", "type", "function"} and call["function"]["arguments"] == ""
            calls.append({"id": call["id"], "type": call["type"], "function": {**call["function"]}})
        else:
            assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
            assert call["function"]["arguments"]
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    choice["finish_reason"] = news["finish_reason"]


def comparable(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice without the ids of its calls, which are random."""
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    assert all(call["id"] and call["type"] == "function" for call in message.get("tool_calls", []))
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning", ""),
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": calls,
        "finish_reason": choice["finish_reason"],
    }


async def both(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    """Return the message of a whole response, after checking that a stream gives the same one."""
    whole = [comparable(choice) for choice in (await ask(gateway, **fields))["choices"]]
    assert [comparable(choice) for choice in await ask_streamed(gateway, **fields)] == whole
    assert all(choice == whole[0] for choice in whole)
    return whole[0]
