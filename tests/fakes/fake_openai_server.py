"""Small OpenAI-compatible server without a model, with configurable faults.

It is also a null server that shows the cost of a load generator: python -m tests.fakes.fake_openai_server
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

Fault = Literal[
    "http_429",
    "http_500",
    "stall",
    "cut",
    "no_done",
    "error_event",
    "bad_frame",
    "no_usage",
    "one_frame",
    "not_a_stream",
]

TEMPLATE_TOKENS = 7
MODEL = "fake-model"


def tokens_of(text: str) -> int:
    """Return the fake's tokens: a begin token, then one token per word, or two for words of more than five letters."""
    return 1 + sum(1 if len(word) <= 5 else 2 for word in text.split())


@dataclass
class FakeOpenAIServer:
    """OpenAI-compatible server with configurable faults.

    Args:
        faults: Fault of the n-th generation request.
        ttft, tpot: Seconds before the first frame and between later ones.
        tokenize: False answers /tokenize with 404, as servers without this route do.
        llama_cpp: True for llama.cpp's API: /tokenize accepts only `content` and returns no `count`;
            /apply-template returns the text of a chat.
        on_request: Function called with the number of each generation request.
    """

    faults: Mapping[int, Fault] = field(default_factory=dict)
    ttft: float = 0.0
    tpot: float = 0.0
    tokenize: bool = True
    llama_cpp: bool = False
    on_request: Callable[[int], None] = lambda number: None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    num_open: int = 0
    peak_open: int = 0

    def app(self) -> web.Application:
        """Return the application with its routes."""
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([
            web.get("/v1/models", self._models),
            web.post("/tokenize", self._tokenize),
            web.post("/apply-template", self._apply_template),
            web.post("/v1/chat/completions", self._generate),
            web.post("/v1/completions", self._generate),
        ])  # fmt: skip
        return app

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[str]:
        """Serve on the loopback interface and yield the base URL."""
        runner = web.AppRunner(self.app(), handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenize:
            raise web.HTTPNotFound
        body = await request.json()
        if self.llama_cpp:
            count = tokens_of(body["content"]) - (not body.get("add_special")) if "content" in body else 0
            return web.json_response({"tokens": list(range(count))})
        if "messages" in body:
            count = TEMPLATE_TOKENS + sum(tokens_of(message["content"]) - 1 for message in body["messages"])
        else:
            count = tokens_of(body["prompt"])
        return web.json_response({"count": count, "tokens": list(range(count)), "max_model_len": 8192})

    async def _apply_template(self, request: web.Request) -> web.Response:
        if not self.llama_cpp:
            raise web.HTTPNotFound
        messages = (await request.json())["messages"]
        texts = " ".join(message["content"] for message in messages)
        return web.json_response({"prompt": " ".join(["<|x|>"] * (TEMPLATE_TOKENS - 1)) + f" {texts}"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        body = await request.json()
        self.bodies.append(body)
        self.on_request(number)
        self.authorizations.append(request.headers.get("Authorization"))
        fault = self.faults.get(number)
        if fault in ("http_429", "http_500"):
            status = int(fault.removeprefix("http_"))
            error = {"message": f"no ({status})", "type": "server_error", "param": None, "code": None}
            return web.json_response({"error": error}, status=status, headers={"Retry-After": "3"})
        if fault == "not_a_stream":
            return web.json_response({"choices": []})
        self.num_open += 1
        self.peak_open = max(self.peak_open, self.num_open)
        try:
            return await self._stream(request, body, fault)
        finally:
            self.num_open -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any], fault: Fault | None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body
        num_tokens = body.get("max_tokens", 16)

        async def write(data: object) -> None:
            text = data if isinstance(data, str) else json.dumps(data)
            await response.write(f"data: {text}\n\n".encode())

        def choice(text: str, finish_reason: str | None = None) -> dict[str, Any]:
            content = {"delta": {"content": text}} if chat else {"text": text}
            return {"choices": [{"index": 0, **content, "finish_reason": finish_reason}]}

        await asyncio.sleep(self.ttft)
        await response.write(b": keep-alive\n\n")
        frames = 1 if fault == "one_frame" else num_tokens
        for i in range(frames):
            if i:
                await asyncio.sleep(self.tpot)
            if i == frames // 2:
                if fault == "stall":
                    await asyncio.sleep(3600)
                elif fault == "cut":
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                elif fault == "error_event":
                    await write({"error": {"message": "worker lost", "type": "server_error"}})
                    await write("[DONE]")
                    return response
                elif fault == "bad_frame":
                    await write('{"choices": [')
            await write(choice(f" word{i}", "length" if i == frames - 1 else None))
        if fault != "no_usage" and (body.get("stream_options") or {}).get("include_usage"):
            await write({"choices": [], "usage": self._usage(body, num_tokens)})
        if fault != "no_done":
            await write("[DONE]")
        return response

    def _usage(self, body: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        if "messages" in body:
            prompt = TEMPLATE_TOKENS + tokens_of(body["messages"][0]["content"]) - 1
        else:
            prompt = len(body["prompt"]) if isinstance(body["prompt"], list) else tokens_of(body["prompt"])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": num_tokens,
            "total_tokens": prompt + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--ttft", type=float, default=0.0)
    parser.add_argument("--tpot", type=float, default=0.0)
    options = parser.parse_args()
    async with FakeOpenAIServer(ttft=options.ttft, tpot=options.tpot).running(options.port) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
