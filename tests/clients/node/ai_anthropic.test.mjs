// Tests of the Vercel AI SDK with its provider for Anthropic, against the answers of tests/clients/answers.py.

import assert from "node:assert/strict";
import { after, test } from "node:test";
import { createAnthropic } from "@ai-sdk/anthropic";
import { APICallError, Output, generateObject, generateText, stepCountIs, streamText } from "ai";
import { z } from "zod";
import { testTools, weatherTools } from "./ai_tools.mjs";

const { SERVER, KEY, MODEL, HELLO } = process.env;
const PERSON = JSON.parse(process.env.PERSON);

globalThis.AI_SDK_LOG_WARNINGS = false;
const provider = createAnthropic({ baseURL: `${SERVER}/v1`, apiKey: KEY });
const model = provider(MODEL);
const settings = { model, maxRetries: 0, maxOutputTokens: 1000 };
const cached = { anthropic: { cacheControl: { type: "ephemeral" } } };
const Person = z.object({ name: z.string(), age: z.number().int(), languages: z.array(z.string()) });

test("text, whole and streamed", async () => {
  const { text, finishReason, usage } = await generateText({ ...settings, prompt: "hello", temperature: 0, topK: 5 });
  assert.equal(text, HELLO);
  assert.equal(finishReason, "stop");
  assert.ok(usage.inputTokens > 0 && usage.outputTokens > 1);
  const messages = [
    { role: "system", content: "Be kind.", providerOptions: cached },
    { role: "user", content: "hello", providerOptions: cached },
  ];
  const result = streamText({ ...settings, messages });
  let streamed = "";
  for await (const piece of result.textStream) streamed += piece;
  assert.equal(streamed, HELLO);
});

testTools(settings, { providerOptions: cached });

for (const thinking of [{ type: "enabled", budgetTokens: 1024 }, { type: "adaptive" }]) {
  test(`a tool loop with thinking, ${thinking.type}`, async () => {
    const seen = [];
    const tools = weatherTools(seen, "fine", { providerOptions: cached });
    const contextManagement = { edits: [{ type: "clear_thinking_20251015", keep: "all" }] };
    const providerOptions = { anthropic: { thinking, effort: "high", contextManagement } };
    const asked = { ...settings, tools, providerOptions, prompt: "think and call", stopWhen: stepCountIs(3) };
    const result = await generateText(asked);
    assert.equal(result.steps[0].reasoningText.trim(), "I should look.");
    assert.equal(result.text.trim(), "Done.");
    assert.equal((await streamText(asked).text).trim(), "Done.");
    assert.deepEqual(seen, [{ city: "Bern" }, { city: "Bern" }]);
  });
}

test("objects", async () => {
  const providerOptions = { anthropic: { structuredOutputMode: "outputFormat" } };
  const asked = { ...settings, prompt: "person?", providerOptions };
  assert.deepEqual((await generateObject({ ...asked, schema: Person })).object, PERSON);
  const output = Output.object({ schema: Person });
  assert.deepEqual((await generateText({ ...asked, output })).output, PERSON);
});

test("errors", async () => {
  await assert.rejects(generateText({ ...settings, prompt: "hello", topP: 7 }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /top_p/);
    return true;
  });
  const other = { ...settings, model: provider("other") };
  await assert.rejects(generateText({ ...other, prompt: "hello" }), (error) => error.statusCode === 404);
  const stream = streamText({ ...settings, prompt: "break", onError: () => {} });
  const errors = [];
  for await (const part of stream.fullStream) if (part.type === "error") errors.push(part.error);
  assert.equal(errors.length, 1);
  assert.match(JSON.stringify(errors[0]) + errors[0].message, /out of luck/);
});

after(() => {
  setImmediate(() => process.exit());
});
