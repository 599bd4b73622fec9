// Tests of the Vercel AI SDK with its provider for OpenAI-compatible servers, against the answers of tests/clients/answers.py.

import assert from "node:assert/strict";
import { after, test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, cosineSimilarity, embed, embedMany, generateObject, generateText } from "ai";
import { stepCountIs, streamObject, streamText } from "ai";
import { z } from "zod";
import { testTools, weatherTools } from "./ai_tools.mjs";

const { SERVER, KEY, MODEL, HELLO } = process.env;
const PERSON = JSON.parse(process.env.PERSON);

globalThis.AI_SDK_LOG_WARNINGS = false;
const provider = createOpenAICompatible({
  name: "pelton",
  baseURL: `${SERVER}/v1`,
  apiKey: KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(MODEL);
const Person = z.object({ name: z.string(), age: z.number().int(), languages: z.array(z.string()) });

test("generateText", async () => {
  const { text, finishReason, usage } = await generateText({ model, prompt: "hello", maxRetries: 0 });
  assert.equal(text, HELLO);
  assert.equal(finishReason, "stop");
  assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
});

test("streamText", async () => {
  const result = streamText({ model, system: "Be kind.", prompt: "hello" });
  let text = "";
  for await (const piece of result.textStream) text += piece;
  assert.equal(text, HELLO);
  assert.equal(await result.finishReason, "stop");
  assert.ok((await result.usage).outputTokens > 1);
});

test("settings reach the server", async () => {
  const settings = { temperature: 0, topP: 0.5, maxOutputTokens: 2, seed: 3, presencePenalty: 0.5 };
  const { finishReason, usage } = await generateText({ model, prompt: "hello", ...settings, maxRetries: 0 });
  assert.equal(finishReason, "length");
  assert.equal(usage.outputTokens, 2);
  const options = { providerOptions: { pelton: { top_k: 5, min_p: 0.1 } } };
  assert.equal((await generateText({ model, prompt: "hello", ...options })).text, HELLO);
  await assert.rejects(
    generateText({ model, prompt: "hello", providerOptions: { pelton: { no_such: 1 } }, maxRetries: 0 }),
    /no_such/,
  );
});

testTools({ model, maxRetries: 0 });

test("a tool loop with reasoning", async () => {
  const seen = [];
  const tools = weatherTools(seen, "fine");
  const asked = { model, tools, prompt: "think and call", stopWhen: stepCountIs(3) };
  const result = await generateText({ ...asked, maxRetries: 0 });
  assert.equal(result.steps[0].reasoningText.trim(), "I should look.");
  assert.equal(result.reasoningText.trim(), "It came back.");
  assert.equal(result.text.trim(), "Done.");
  const stream = streamText(asked);
  assert.equal((await stream.text).trim(), "Done.");
  assert.deepEqual(seen, [{ city: "Bern" }, { city: "Bern" }]);
});

test("objects", async () => {
  const { object } = await generateObject({ model, schema: Person, prompt: "person?", maxRetries: 0 });
  assert.deepEqual(object, PERSON);
  const stream = streamObject({ model, schema: Person, prompt: "person?" });
  let last;
  for await (const partial of stream.partialObjectStream) last = partial;
  assert.deepEqual(last, PERSON);
  assert.deepEqual(await stream.object, PERSON);
});

test("objects as output of text", async () => {
  const output = Output.object({ schema: Person });
  assert.deepEqual((await generateText({ model, output, prompt: "person?", maxRetries: 0 })).output, PERSON);
  const stream = streamText({ model, output, prompt: "person?" });
  let last;
  for await (const partial of stream.partialOutputStream) last = partial;
  assert.deepEqual(last, PERSON);
});

test("reasoning", async () => {
  const { text, reasoningText } = await generateText({ model, prompt: "think", maxRetries: 0 });
  assert.equal(text.trim(), "Four.");
  assert.equal(reasoningText.trim(), "Two and two.");
  const stream = streamText({ model, prompt: "think" });
  let streamed = "";
  for await (const part of stream.fullStream) if (part.type === "reasoning-delta") streamed += part.text;
  assert.equal(streamed.trim(), "Two and two.");
});

test("completions", async () => {
  const { text } = await generateText({ model: provider.completionModel(MODEL), prompt: "plain", maxRetries: 0 });
  assert.equal(text, "As you like.");
});

test("embed and embedMany", async () => {
  const embeddings = provider.embeddingModel(MODEL);
  const values = ["The sky is blue.", "Grass is green."];
  const many = await embedMany({ model: embeddings, values, maxRetries: 0 });
  const one = await embed({ model: embeddings, value: values[1], maxRetries: 0 });
  assert.deepEqual(one.embedding, many.embeddings[1]);
  assert.ok(Math.abs(cosineSimilarity(one.embedding, one.embedding) - 1) < 1e-6);
  assert.ok(many.usage.tokens > one.usage.tokens);
});

test("errors", async () => {
  await assert.rejects(generateText({ model, prompt: "hello", temperature: 7, maxRetries: 2 }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 400);
    assert.equal(error.isRetryable, false);
    assert.match(error.message, /temperature/);
    return true;
  });
  const other = provider("other");
  await assert.rejects(generateText({ model: other, prompt: "hello" }), (error) => error.statusCode === 404);
  const stream = streamText({ model, prompt: "break", onError: () => {} });
  const errors = [];
  for await (const part of stream.fullStream) if (part.type === "error") errors.push(part.error);
  assert.equal(errors.length, 1);
  assert.match(JSON.stringify(errors[0]) + errors[0].message, /out of luck/);
});

after(() => {
  setImmediate(() => process.exit());
});
