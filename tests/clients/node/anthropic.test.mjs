// Tests of Anthropic's Node client with /v1/messages and /v1/models, against the answers of tests/clients/answers.py.

import assert from "node:assert/strict";
import { after, test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

const { SERVER, KEY, MODEL, HELLO } = process.env;
const WEATHER = JSON.parse(process.env.WEATHER);
const PERSON = JSON.parse(process.env.PERSON);

const client = new Anthropic({ baseURL: SERVER, apiKey: KEY, maxRetries: 0, timeout: 30_000 });
const ask = (content, fields) => ({
  model: MODEL,
  max_tokens: 1000,
  messages: [{ role: "user", content }],
  ...fields,
});

const Person = z.object({ name: z.string(), age: z.number().int(), languages: z.array(z.string()) });
const input_schema = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" }, detail: { type: "object" } },
  required: ["city"],
};
const tools = [{ name: "get_weather", description: "The weather.", input_schema }];

test("a message", async () => {
  const message = await client.messages.create(ask("hello"));
  assert.equal(message.content[0].text, HELLO);
  assert.equal(message.stop_reason, "end_turn");
  assert.ok(message.usage.input_tokens > 0 && message.usage.output_tokens > 0);
  assert.ok(message._request_id);
});

test("a stream, raw and by the helper", async () => {
  let text = "";
  const kinds = [];
  for await (const event of await client.messages.create(ask("hello", { stream: true }))) {
    if (event.type === "content_block_delta") text += event.delta.text;
    else kinds.push(event.type);
  }
  assert.equal(text, HELLO);
  assert.equal(kinds[0], "message_start");
  assert.equal(kinds.at(-1), "message_stop");
  const stream = client.messages.stream(ask("hello"));
  let heard = "";
  stream.on("text", (delta) => (heard += delta));
  assert.equal(await stream.finalText(), HELLO);
  assert.equal(heard, HELLO);
  assert.ok((await stream.finalMessage()).usage.output_tokens > 1);
});

for (const streamed of [false, true]) {
  test(`a tool loop, streamed ${streamed}`, async () => {
    const send = (body) => (streamed ? client.messages.stream(body).finalMessage() : client.messages.create(body));
    const body = ask("weather?", { tools });
    const message = await send(body);
    const [text, call] = message.content;
    assert.equal(text.text.trim(), "Let me look.");
    assert.equal(message.stop_reason, "tool_use");
    assert.deepEqual(call.input, WEATHER);
    const content = [{ type: "tool_result", tool_use_id: call.id, content: '{"sky": "clear"}' }];
    body.messages.push({ role: "assistant", content: message.content }, { role: "user", content });
    assert.equal((await send(body)).content[0].text, "It is clear there.");
  });
}

test("parallel calls in a stream", async () => {
  const pieces = [];
  const stream = client.messages.stream(ask("two cities?", { tools }));
  stream.on("inputJson", (piece) => pieces.push(piece));
  const { content } = await stream.finalMessage();
  assert.deepEqual(
    content.map((block) => block.input),
    [{ city: "Bern" }, { city: "Rome" }],
  );
  assert.ok(pieces.length > 2);
});

test("the tool runner", async () => {
  const seen = [];
  const run = async (input) => {
    seen.push(input);
    return "fine";
  };
  const tool = betaZodTool({
    name: "get_weather",
    description: "The weather.",
    inputSchema: z.object({ city: z.string() }),
    run,
  });
  const runner = client.beta.messages.toolRunner(ask("think and call", { tools: [tool] }));
  const final = await runner.runUntilDone();
  assert.equal(final.content.at(-1).text.trim(), "Done.");
  assert.deepEqual(seen, [{ city: "Bern" }]);
});

test("thinking", async () => {
  const thinking = { type: "enabled", budget_tokens: 1024 };
  const stream = client.messages.stream(ask("think", { thinking, max_tokens: 2000 }));
  let thought = "";
  stream.on("thinking", (delta) => (thought += delta));
  const { content } = await stream.finalMessage();
  assert.deepEqual(
    content.map((block) => block.type),
    ["thinking", "text"],
  );
  assert.equal(content[0].thinking.trim(), "Two and two.");
  assert.equal(thought, content[0].thinking);
  assert.ok(content[0].signature);
  const messages = [...ask("think").messages, { role: "assistant", content }, ...ask("hello").messages];
  assert.equal((await client.messages.create(ask("", { messages }))).content[0].text, HELLO);
});

test("parsed output", async () => {
  const output_config = { format: zodOutputFormat(Person) };
  const message = await client.messages.parse(ask("person?", { output_config }));
  assert.deepEqual(message.parsed_output, PERSON);
});

test("tokens and models", async () => {
  const { model, messages } = ask("hello");
  const { input_tokens } = await client.messages.countTokens({ model, messages });
  assert.equal((await client.messages.create(ask("hello"))).usage.input_tokens, input_tokens);
  const names = [];
  for await (const one of client.models.list({ limit: 1 })) names.push(one.id);
  assert.deepEqual(names, [MODEL]);
  const found = await client.models.retrieve(MODEL);
  assert.equal(found.display_name, MODEL);
  assert.equal(new Date(found.created_at).toISOString().slice(0, 4), found.created_at.slice(0, 4));
  await assert.rejects(client.models.retrieve("nobody"), Anthropic.NotFoundError);
});

test("errors have their classes", async () => {
  await assert.rejects(client.messages.create(ask("hello", { temperature: 7 })), (error) => {
    assert.ok(error instanceof Anthropic.BadRequestError);
    assert.match(error.message, /temperature/);
    assert.equal(error.error.error.type, "invalid_request_error");
    assert.ok(error.requestID);
    return true;
  });
  await assert.rejects(client.messages.create(ask("hello", { model: "other" })), Anthropic.NotFoundError);
  const stranger = new Anthropic({ baseURL: SERVER, apiKey: "sk-other", maxRetries: 0 });
  await assert.rejects(stranger.messages.create(ask("hello")), Anthropic.AuthenticationError);
  await assert.rejects(stranger.models.list(), Anthropic.AuthenticationError);
});

test("an error in a stream, and an abandoned stream", async () => {
  let text = "";
  await assert.rejects(async () => {
    for await (const event of await client.messages.create(ask("break", { stream: true }))) {
      text += event.delta?.text ?? "";
    }
  }, /out of luck/);
  assert.equal(text, "Well");
  const stream = await client.messages.create(ask("endless", { stream: true }));
  for await (const _ of stream) break;
  assert.ok(stream.controller.signal.aborted);
});

after(() => {
  // Open keep-alive connections would prevent the process from exiting.
  setImmediate(() => process.exit());
});
