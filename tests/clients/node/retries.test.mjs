// Tests of retries by both Node clients. Two endless streams fill the server; it admits other requests after they end.

import assert from "node:assert/strict";
import { after, test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { RetryError, generateText } from "ai";
import OpenAI from "openai";

const { SERVER, MODEL, HELLO } = process.env;
const client = (options) => new OpenAI({ baseURL: `${SERVER}/v1`, apiKey: "any", ...options });
const plain = client({ maxRetries: 0 });
const sdkModel = (options) => createOpenAICompatible({ name: "pelton", baseURL: `${SERVER}/v1`, ...options })(MODEL);
const model = sdkModel({});
const messages = (content) => [{ role: "user", content }];

async function fill() {
  const streams = [];
  for (let index = 0; index < 2; index++) {
    // The streams of an earlier test may have ended only a moment ago.
    const stream = await client({ maxRetries: 8 }).chat.completions.create({ model: MODEL, messages: messages("endless"), stream: true });
    const iterator = stream[Symbol.asyncIterator]();
    await iterator.next();
    streams.push(stream);
  }
  return () => streams.forEach((stream) => stream.controller.abort());
}

test("a rate limit error has a retry time", async () => {
  const empty = await fill();
  await assert.rejects(plain.chat.completions.create({ model: MODEL, messages: messages("hello") }), (error) => {
    assert.ok(error instanceof OpenAI.RateLimitError);
    assert.ok(Number(error.headers.get("retry-after")) >= 1);
    return true;
  });
  await assert.rejects(generateText({ model, prompt: "hello", maxRetries: 0 }), (error) => error.isRetryable);
  // The streams end once each client that retries was refused.
  const refused = new Set();
  const watched = (name) => async (...request) => {
    const response = await fetch(...request);
    if (response.status === 429 && refused.add(name).size === 2) empty();
    return response;
  };
  const [first, second] = await Promise.all([
    client({ maxRetries: 8, fetch: watched("client") }).chat.completions.create({
      model: MODEL,
      messages: messages("hello"),
    }),
    generateText({ model: sdkModel({ fetch: watched("sdk") }), prompt: "hello", maxRetries: 8 }),
  ]);
  assert.equal(refused.size, 2);
  assert.equal(first.choices[0].message.content, HELLO);
  assert.equal(second.text, HELLO);
});

test("too few retries end with a RetryError", async () => {
  const empty = await fill();
  await assert.rejects(generateText({ model, prompt: "hello", maxRetries: 1 }), RetryError.isInstance);
  empty();
});

after(() => {
  setImmediate(() => process.exit());
});
