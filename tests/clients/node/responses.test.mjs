// Tests of OpenAI's Node client with the Responses API, against the answers of tests/clients/answers.py.

import assert from "node:assert/strict";
import { after, test } from "node:test";
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const { SERVER, KEY, MODEL, HELLO } = process.env;
const WEATHER = JSON.parse(process.env.WEATHER);
const PERSON = JSON.parse(process.env.PERSON);

const client = new OpenAI({ baseURL: `${SERVER}/v1`, apiKey: KEY, maxRetries: 0, timeout: 30_000 });
const create = (fields) => client.responses.create({ model: MODEL, ...fields });

const Person = z.object({ name: z.string(), age: z.number().int(), languages: z.array(z.string()) });
const parameters = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ type: "function", name: "get_weather", parameters, strict: false }];

test("a response", async () => {
  const response = await create({ input: "hello", instructions: "Be kind." });
  assert.equal(response.output_text, HELLO);
  assert.equal(response.status, "completed");
  assert.equal(response.usage.total_tokens, response.usage.input_tokens + response.usage.output_tokens);
  assert.equal((await client.responses.retrieve(response.id)).output_text, HELLO);
  const items = [];
  for await (const item of client.responses.inputItems.list(response.id)) items.push(item.role);
  assert.deepEqual(items, ["user"]);
  await client.responses.delete(response.id);
  await assert.rejects(client.responses.retrieve(response.id), OpenAI.NotFoundError);
});

test("a stream", async () => {
  let text = "";
  let last;
  let number = 0;
  for await (const event of await create({ input: "hello", stream: true })) {
    assert.equal(event.sequence_number, number++);
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event;
  }
  assert.equal(text, HELLO);
  assert.equal(last.type, "response.completed");
  assert.ok(last.response.usage.output_tokens > 1);
});

test("the stream helper", async () => {
  const stream = client.responses.stream({ model: MODEL, input: "hello" });
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  assert.equal((await stream.finalResponse()).output_text, HELLO);
  assert.equal(text, HELLO);
});

for (const stream of [false, true]) {
  test(`a tool loop by previous_response_id, stream ${stream}`, async () => {
    const ask = async (fields) =>
      stream
        ? client.responses.stream({ model: MODEL, tools, ...fields }).finalResponse()
        : create({ tools, ...fields });
    const first = await ask({ input: "weather?" });
    const call = first.output.find((item) => item.type === "function_call");
    assert.deepEqual(JSON.parse(call.arguments), WEATHER);
    const output = { type: "function_call_output", call_id: call.call_id, output: '{"sky": "clear"}' };
    const second = await ask({ input: [output], previous_response_id: first.id });
    assert.equal(second.output_text, "It is clear there.");
    assert.equal(second.previous_response_id, first.id);
  });
}

test("parallel calls, and their items sent back", async () => {
  const first = await create({ input: "two cities?", tools, store: false });
  const calls = first.output.filter((item) => item.type === "function_call");
  assert.deepEqual(
    calls.map((call) => JSON.parse(call.arguments)),
    [{ city: "Bern" }, { city: "Rome" }],
  );
  const outputs = calls.map(({ call_id }, index) => ({
    type: "function_call_output",
    call_id,
    output: ["12 in Bern", "20 in Rome"][index],
  }));
  const input = [{ role: "user", content: "two cities?" }, ...first.output, ...outputs];
  assert.equal((await create({ input, tools })).output_text, "12 in Bern and 20 in Rome");
});

test("reasoning", async () => {
  const { output, output_text } = await create({ input: "think" });
  assert.deepEqual(
    output.map((item) => item.type),
    ["reasoning", "message"],
  );
  assert.equal(output_text.trim(), "Four.");
});

test("parsed output", async () => {
  const asked = { model: MODEL, input: "person?", text: { format: zodTextFormat(Person, "person") } };
  assert.deepEqual((await client.responses.parse(asked)).output_parsed, PERSON);
  assert.deepEqual((await client.responses.stream(asked).finalResponse()).output_parsed, PERSON);
});

test("errors have their classes", async () => {
  await assert.rejects(create({ input: "hello", temperature: 7 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  await assert.rejects(create({ input: "hello", previous_response_id: "resp_0" }), OpenAI.APIError);
  await assert.rejects(create({ input: "hello", tools: [{ type: "web_search" }] }), OpenAI.BadRequestError);
  const failed = await create({ input: "break" }).catch((error) => error);
  assert.match(failed.message ?? failed.error?.message, /out of luck/);
});

test("an error in a stream", async () => {
  let text = "";
  let failure;
  try {
    for await (const event of await create({ input: "break", stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
      if (event.type === "response.failed") failure = event.response.error.message;
    }
  } catch (error) {
    failure = error.message;
  }
  assert.equal(text, "Well");
  assert.match(failure, /out of luck/);
});

after(() => {
  // Open keep-alive connections would prevent the process from exiting.
  setImmediate(() => process.exit());
});
