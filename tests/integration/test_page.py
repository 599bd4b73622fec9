"""The page in a browser: chat, stop, errors, tools, probabilities, and no requests to other servers."""

from __future__ import annotations

import asyncio
import json

from gateway.flow.events import TextDelta
from gateway.text.formats import TOOL_FORMATS, ModelFormats
from gateway.text.message_parser import ToolCallDelta
from gateway.text.reasoning import REASONING_FORMATS
from shared.errors import WorkerLostError
from tests.fakes.fake_generator import SUPPORT, FakeEntry, FakeGenerator, FakeModels, spell
from tests.fakes.gateway_core import until
from tests.fakes.http_gateway import USER_KEY, run_gateway
from tests.fakes.page import answered, no_surprises, opened, say, shot

THINKER = ModelFormats(reasoning=REASONING_FORMATS["think"], tools=TOOL_FORMATS["hermes"], template=SUPPORT)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


async def test_a_chat_with_parameters_and_probabilities(gateway, page):
    gateway.generator.script = spell("Hi <b>&\u2028 there \U0001f600")
    await opened(page, gateway)
    await page.run("document.getElementById('system').value = 'Be brief.'")
    await page.run("document.getElementById('temperature').value = '0.5'")
    await page.run("document.getElementById('logprobs').click()")
    await say(page, "Hello")
    await answered(page)
    assert await page.run("document.querySelector('.assistant .content').textContent") == (
        "Hi <b>&\u2028 there \U0001f600"
    )
    figures = await page.run("document.querySelector('.figures').textContent")
    assert "prompt +" in figures and "tokens/s" in figures and "first token after" in figures
    await page.run("document.querySelector('.assistant details').open = true")
    await page.run("document.querySelector('.tokens button').click()")
    rows = await page.run("[...document.querySelectorAll('.alternatives td')].map(cell => cell.textContent)")
    assert rows[0] == '"H"' and rows[1] == "60.7 %" and rows[2] == "chosen" and len(rows) == 15
    await say(page, "Again")
    await answered(page, 2)
    request = gateway.generator.requests[-1]
    prompt = bytes(request.prompt_token_ids).decode()
    assert prompt.startswith("system: Be brief.\nuser: Hello\nassistant: Hi <b>") and "user: Again" in prompt
    assert request.sampling.temperature == 0.5
    await shot(page, "chat")
    no_surprises(page, gateway)


async def test_page_sampling_defaults_and_overrides(gateway, page):
    gateway.generator.script = spell("Hi")
    await opened(page, gateway)
    await say(page, "Hello")
    await answered(page)
    await page.run("for (const name of ['temperature', 'top_p']) document.getElementById(name).value = ''")
    await say(page, "Again")
    await answered(page, 2)
    sampling = [request.sampling for request in gateway.generator.requests]
    # An empty field gives the API's default.
    assert [(values.temperature, values.top_p) for values in sampling] == [(0.7, 0.9), (1.0, 1.0)]


async def test_stop_and_errors(gateway, page):
    def script(request):
        if b"break" in bytes(request.prompt_token_ids):
            return [TextDelta(0, "Half", [1]), WorkerLostError("The worker died.")]
        return [TextDelta(0, "Endless", [1]), asyncio.Event()]

    gateway.generator.script = script
    await opened(page, gateway)
    await say(page, "go on")
    await page.until("document.querySelector('.assistant .content')?.textContent === 'Endless'")
    assert await page.run("document.getElementById('send').disabled && !document.getElementById('stop').disabled")
    await page.press("Escape")
    await answered(page)
    await until(lambda: not gateway.generator.live)
    assert "stopped" in await page.run("document.querySelector('.figures').textContent")
    await say(page, "break")
    await page.until("document.querySelector('[role=alert].failed')?.textContent === 'The worker died.'")
    await page.run("document.getElementById('temperature').value = '7'")
    await say(page, "too hot")
    await page.until("document.querySelectorAll('.failed').length === 2")
    assert "temperature" in await page.run("[...document.querySelectorAll('.failed')].at(-1).textContent")
    # A question can be asked again.
    await page.until("document.getElementById('prompt').value === 'too hot'")
    await shot(page, "errors")
    no_surprises(page, gateway, "400 (Bad Request)")


async def test_reasoning_and_tools(page):
    def script(request):
        if b"Rain" in bytes(request.prompt_token_ids):
            return [TextDelta(0, "It rains.", [1], finish_reason="stop")]
        return [
            TextDelta(0, "", [1], reasoning="I must look.", num_reasoning_tokens=1),
            TextDelta(0, "", [2], tool_calls=[ToolCallDelta(0, '{"city": ', id="call_1", name="weather")]),
            TextDelta(0, "", [3], tool_calls=[ToolCallDelta(0, '"Bern"}')]),
            TextDelta(0, "", [4], finish_reason="tool_calls"),
        ]

    models = FakeModels(FakeEntry(formats=THINKER))
    async with run_gateway(FakeGenerator(script), models) as gateway:
        await opened(page, gateway)
        await page.run(f"document.getElementById('tools').value = {json.dumps(json.dumps(TOOLS))}")
        await say(page, "Weather in Bern?")
        await answered(page)
        assert await page.run("document.querySelector('.reasoning .content').textContent") == "I must look."
        assert await page.run("document.querySelector('.call pre').textContent") == '{"city": "Bern"}'
        await shot(page, "tools")
        await page.run("document.querySelector('.call textarea').focus()")
        await page.type("Rain")
        await page.run("document.querySelector('.call + button').click()")
        await answered(page, 2)
        assert await page.run("[...document.querySelectorAll('.assistant .content')].at(-1).textContent") == "It rains."
        no_surprises(page, gateway)


async def test_the_key_is_requested_and_kept_for_the_tab_only(page):
    async with run_gateway(keys=True) as gateway:
        await opened(page, gateway)
        assert await page.until("document.getElementById('notice').textContent") == (
            "The API key is missing or unknown. Enter it above and press Use."
        )
        assert await page.run("document.activeElement.id") == "key"
        await page.type(USER_KEY)
        await page.press("Enter")
        await page.until("document.getElementById('notice').hidden && document.getElementById('model').value")
        await say(page, "Hello")
        await answered(page)
        assert await page.run(
            "Object.values(sessionStorage).join() + Object.values(localStorage).join() + document.cookie"
        ) == (USER_KEY)
        no_surprises(page, gateway, "401 (Unauthorized)")


async def test_every_control_has_a_name_and_a_place_in_the_order(gateway, page):
    await opened(page, gateway)
    await page.send("Accessibility.enable")
    nodes = (await page.send("Accessibility.getFullAXTree"))["nodes"]
    roles = ("button", "textbox", "combobox", "spinbutton", "checkbox")
    controls = [node for node in nodes if node.get("role", {}).get("value") in roles and not node["ignored"]]
    assert len(controls) >= 15 and all(node["name"]["value"] for node in controls)
    await page.run("document.activeElement.blur()")
    reached = set()
    for _ in range(30):
        await page.press("Tab")
        reached.add(await page.run("document.activeElement.id || document.activeElement.className"))
    assert {"skip", "show-chat", "show-status", "key", "log", "prompt", "send", "clear", "model", "system"} <= reached


async def test_durations_of_the_status_view(gateway, page):
    times = {0: "0.00 ms", 0.0123: "12.3 ms", 0.9991: "999 ms", 0.9999: "1.00 s", 8.75: "8.75 s", 99.96: "100 s"}
    await opened(page, gateway)
    shown = f"import('/page/metrics.js').then(({{ duration }}) => {[*times, None]}.map(duration))"
    assert await page.run(shown.replace("None", "null")) == [*times.values(), "–"]


async def test_the_chart_of_an_idle_server_is_at_zero(gateway, page):
    await opened(page, gateway)
    await page.run("document.getElementById('show-status').click()")
    shown = await page.until("document.getElementById('chart-top').textContent")
    assert shown == "last two minutes, maximum 0"


async def test_files_and_their_headers():
    async with run_gateway(keys=True) as gateway:
        status, body, headers = await gateway.get("/")
        assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
        policy = headers["Content-Security-Policy"]
        assert (
            policy.startswith("default-src 'none';") and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        )
        assert (
            b"<script>" not in body and b"style=" not in body and b"://" not in body.replace(b"http://www.w3.org", b"")
        )
        for name, kind in (("app.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")):
            status, _, headers = await gateway.get(f"/page/{name}")
            assert status == 200 and headers["Content-Type"].startswith(kind)
            assert headers["Content-Security-Policy"] == policy and headers["X-Content-Type-Options"] == "nosniff"
        for name in ("nope.js", "..%2Fapp.py", "%2e%2e/app.py", "index.html%00", "__init__.py"):
            assert (await gateway.get(f"/page/{name}"))[0] == 404
