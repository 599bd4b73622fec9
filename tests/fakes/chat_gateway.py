"""Gateway with a worker that sends prepared texts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from shared.messages import Submit
from tests.fakes.fake_worker import FakeWorker
from tests.fakes.gateway_core import running_core, until
from tests.fakes.hermes import hermes_bundle, ids_of
from tests.fakes.http_gateway import Gateway, assembled, run_gateway

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
    *chunks, done = await gateway.stream_chat(model=MODEL, **fields)
    assert done == "[DONE]"
    return assembled(chunks)


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
