// Both clients of Node at a server that two endless streams fill: refused at first, let in when one has gone.

import assert from "node:assert/strict";
import { after, test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { RetryError, generateText } from "ai";
import OpenAI from "openai";

const { SERVER, MODEL, HELLO } = process.env;
const plain = new OpenAI({ baseURL: `${SERVER}/v1`, apiKey: "any", maxRetries: 0 });
const model = createOpenAICompatible({ name: "pelton", baseURL: `${SERVER}/v1` })(MODEL);
const messages = (content) => [{ role: "user", content }];

async function fill() {
  const streams = [];
  for (let index = 0; index < 2; index++) {
    const stream = await plain.chat.completions.create({ model: MODEL, messages: messages("endless"), stream: true });
    const iterator = stream[Symbol.asyncIterator]();
    await iterator.next();
    streams.push(stream);
  }
  return () => streams.forEach((stream) => stream.controller.abort());
}

test("a rate limit is refused with a time", async () => {
  const empty = await fill();
  await assert.rejects(plain.chat.completions.create({ model: MODEL, messages: messages("hello") }), (error) => {
    assert.ok(error instanceof OpenAI.RateLimitError);
    assert.ok(Number(error.headers.get("retry-after")) >= 1);
    return true;
  });
  await assert.rejects(generateText({ model, prompt: "hello", maxRetries: 0 }), (error) => error.isRetryable);
  const patient = new OpenAI({ baseURL: `${SERVER}/v1`, apiKey: "any", maxRetries: 4 });
  const answers = Promise.all([
    patient.chat.completions.create({ model: MODEL, messages: messages("hello") }),
    generateText({ model, prompt: "hello", maxRetries: 4 }),
  ]);
  empty();
  const [first, second] = await answers;
  assert.equal(first.choices[0].message.content, HELLO);
  assert.equal(second.text, HELLO);
});

test("whoever does not wait long enough is told so", async () => {
  const empty = await fill();
  await assert.rejects(generateText({ model, prompt: "hello", maxRetries: 1 }), RetryError.isInstance);
  empty();
});

after(() => {
  setImmediate(() => process.exit());
});
