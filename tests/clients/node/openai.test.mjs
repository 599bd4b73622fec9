// Tests of OpenAI's Node client, against the answers of tests/clients/answers.py.

import assert from "node:assert/strict";
import { after, test } from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { SERVER, KEY, MODEL, HELLO } = process.env;
const WEATHER = JSON.parse(process.env.WEATHER);
const PERSON = JSON.parse(process.env.PERSON);

const client = new OpenAI({ baseURL: `${SERVER}/v1`, apiKey: KEY, maxRetries: 0, timeout: 30_000 });
const ask = (content) => [{ role: "user", content }];
const create = (fields) => client.chat.completions.create({ model: MODEL, ...fields });

const Person = z.object({ name: z.string(), age: z.number().int(), languages: z.array(z.string()) });
const tools = [
  {
    type: "function",
    function: { name: "get_weather", parameters: { type: "object", properties: { city: { type: "string" } } } },
  },
];

test("chat", async () => {
  const { choices, usage } = await create({ messages: ask("hello") });
  assert.equal(choices[0].message.content, HELLO);
  assert.equal(choices[0].finish_reason, "stop");
  assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
});

test("a stream and its usage", async () => {
  const stream = await create({ messages: ask("hello"), stream: true, stream_options: { include_usage: true } });
  let text = "";
  let last;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    last = chunk;
  }
  assert.equal(text, HELLO);
  assert.equal(last.choices.length, 0);
  assert.ok(last.usage.completion_tokens > 1);
});

test("the stream helper", async () => {
  const stream = client.chat.completions.stream({ model: MODEL, messages: ask("hello") });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  assert.equal(await stream.finalContent(), HELLO);
  assert.equal(text, HELLO);
});

test("streams side by side", async () => {
  const texts = await Promise.all(
    Array.from({ length: 8 }, async () => {
      let text = "";
      for await (const chunk of await create({ messages: ask("hello"), stream: true })) {
        text += chunk.choices[0].delta.content ?? "";
      }
      return text;
    }),
  );
  assert.deepEqual(texts, Array(8).fill(HELLO));
});

for (const stream of [false, true]) {
  test(`a tool loop, stream ${stream}`, async () => {
    const results = [];
    const run = client.chat.completions.runTools({
      model: MODEL,
      messages: ask("weather?"),
      stream,
      tools: [
        {
          type: "function",
          function: {
            name: "get_weather",
            parameters: { type: "object", properties: { city: { type: "string" } } },
            parse: JSON.parse,
            function: (args) => {
              results.push(args);
              return { sky: "clear" };
            },
          },
        },
      ],
    });
    assert.equal(await run.finalContent(), "It is clear there.");
    assert.deepEqual(results, [WEATHER]);
  });
}

test("parallel calls in a stream", async () => {
  const stream = client.chat.completions.stream({ model: MODEL, messages: ask("two cities?"), tools });
  const { message, finish_reason } = (await stream.finalChatCompletion()).choices[0];
  assert.deepEqual(
    message.tool_calls.map((call) => JSON.parse(call.function.arguments)),
    [{ city: "Bern" }, { city: "Rome" }],
  );
  assert.equal(finish_reason, "tool_calls");
});

test("a forced call", async () => {
  const tool_choice = { type: "function", function: { name: "get_weather" } };
  const { message } = (await create({ messages: ask("only a call"), tools, tool_choice })).choices[0];
  assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { city: "Bern" });
});

test("parsed output", async () => {
  const response_format = zodResponseFormat(Person, "person");
  const whole = await client.chat.completions.parse({ model: MODEL, messages: ask("person?"), response_format });
  assert.deepEqual(whole.choices[0].message.parsed, PERSON);
  const stream = client.chat.completions.stream({ model: MODEL, messages: ask("person?"), response_format });
  assert.deepEqual((await stream.finalChatCompletion()).choices[0].message.parsed, PERSON);
});

test("parsed arguments", async () => {
  const person = zodFunction({ name: "Person", parameters: Person });
  const body = { model: MODEL, messages: ask("call a person"), tools: [person] };
  const { message } = (await client.chat.completions.parse(body)).choices[0];
  assert.deepEqual(message.tool_calls[0].function.parsed_arguments, PERSON);
});

test("reasoning", async () => {
  const { message } = (await create({ messages: ask("think") })).choices[0];
  assert.equal(message.content.trim(), "Four.");
  assert.equal(message.reasoning_content.trim(), "Two and two.");
});

test("completions and models", async () => {
  const answer = await client.completions.create({ model: MODEL, prompt: "hello", max_tokens: 100 });
  assert.equal(answer.choices[0].text, HELLO);
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.deepEqual(names, [MODEL]);
});

test("embeddings", async () => {
  const input = ["The sky is blue.", "Caf\u00e9"];
  const { data, usage } = await client.embeddings.create({ model: MODEL, input });
  assert.deepEqual(data.map(({ index }) => index), [0, 1]);
  assert.equal(usage.total_tokens, usage.prompt_tokens);
  const floats = (await client.embeddings.create({ model: MODEL, input, encoding_format: "float" })).data;
  for (const [index, { embedding }] of data.entries()) {
    assert.ok(Math.abs(Math.hypot(...embedding) - 1) < 1e-6);
    assert.deepEqual(Array.from(embedding), Array.from(floats[index].embedding, Math.fround));
  }
  assert.notDeepEqual(floats[0].embedding, floats[1].embedding);
  await assert.rejects(client.embeddings.create({ model: MODEL, input: [] }), { status: 400, param: "input" });
});

test("errors have their classes", async () => {
  const bad = await assert.rejects(create({ messages: ask("hello"), temperature: 7 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    assert.equal(error.type, "invalid_request_error");
    assert.ok(error.requestID);
    return true;
  });
  assert.equal(bad, undefined);
  await assert.rejects(create({ messages: ask("hello"), model: "other" }), OpenAI.NotFoundError);
  await assert.rejects(create({ messages: ask("break") }), OpenAI.InternalServerError);
  const stranger = new OpenAI({ baseURL: `${SERVER}/v1`, apiKey: "sk-other", maxRetries: 0 });
  await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
});

test("an error in a stream", async () => {
  let text = "";
  await assert.rejects(async () => {
    for await (const chunk of await create({ messages: ask("break"), stream: true })) {
      text += chunk.choices[0].delta.content ?? "";
    }
  }, /out of luck/);
  assert.equal(text, "Well");
});

test("a timeout, and an abandoned stream", async () => {
  const request = client.chat.completions.create({ model: MODEL, messages: ask("endless") }, { timeout: 300 });
  await assert.rejects(request, OpenAI.APIConnectionTimeoutError);
  const stream = await create({ messages: ask("endless"), stream: true });
  for await (const _ of stream) break;
  assert.ok(stream.controller.signal.aborted);
});

after(() => {
  // Open keep-alive connections would prevent the process from exiting.
  setImmediate(() => process.exit());
});
