// Tests of the Vercel AI SDK with its provider for OpenAI, which uses the Responses API. The provider references stored
// items, and sends reasoning back if nothing is stored.

import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { APICallError, Output, generateText, stepCountIs, streamText } from "ai";
import { z } from "zod";
import { weatherTools } from "./ai_tools.mjs";

const { SERVER, KEY, MODEL, HELLO } = process.env;
const WEATHER = JSON.parse(process.env.WEATHER);
const PERSON = JSON.parse(process.env.PERSON);

globalThis.AI_SDK_LOG_WARNINGS = false;
const sent = [];
const provider = createOpenAI({
  baseURL: `${SERVER}/v1`,
  apiKey: KEY,
  fetch: (url, init) => {
    sent.push(JSON.parse(init.body));
    return fetch(url, init);
  },
});
const model = provider(MODEL);

test("generateText and streamText", async () => {
  const { text, finishReason, usage } = await generateText({ model, prompt: "hello", maxRetries: 0 });
  assert.equal(text, HELLO);
  assert.equal(finishReason, "stop");
  assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
  const result = streamText({ model, system: "Be kind.", prompt: "hello" });
  let streamed = "";
  for await (const piece of result.textStream) streamed += piece;
  assert.equal(streamed, HELLO);
  assert.equal(await result.finishReason, "stop");
});

test("objects", async () => {
  const schema = z.object({ name: z.string(), age: z.number().int(), languages: z.array(z.string()) });
  const { output } = await generateText({ model, prompt: "person?", output: Output.object({ schema }) });
  assert.deepEqual(output, PERSON);
});

test("the steps of a stored conversation are referenced", async () => {
  sent.length = 0;
  const tools = weatherTools([], { sky: "grey" });
  const { text, steps } = await generateText({ model, prompt: "weather?", tools, stopWhen: stepCountIs(3) });
  assert.equal(text, "It is grey there.");
  assert.deepEqual(steps[0].toolCalls[0].input, WEATHER);
  const types = sent[1].input.map((item) => item.type ?? item.role);
  assert.ok(types.includes("item_reference"), types.join());
  assert.equal(types.at(-1), "function_call_output");
});

for (const stream of [false, true]) {
  test(`without a store reasoning is sent back, ${stream ? "streamed" : "whole"}`, async () => {
    sent.length = 0;
    const options = {
      model,
      prompt: "think and call",
      tools: weatherTools([], "sunny"),
      stopWhen: stepCountIs(3),
      providerOptions: {
        openai: { store: false, include: ["reasoning.encrypted_content"], forceReasoning: true, reasoningSummary: "auto" },
      },
    };
    const result = stream ? streamText(options) : await generateText(options);
    assert.equal((await result.text).trim(), "Done.");
    const back = sent[1].input.find((item) => item.type === "reasoning");
    assert.ok(back?.encrypted_content, JSON.stringify(sent[1].input));
  });
}

test("a failure is an APICallError with the field", async () => {
  const broken = generateText({ model, prompt: "x", providerOptions: { openai: { maxToolCalls: 3 } }, maxRetries: 0 });
  await assert.rejects(broken, (error) => APICallError.isInstance(error) && /max_tool_calls/.test(error.message));
});
