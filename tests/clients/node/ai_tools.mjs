// Tests of tools with the Vercel AI SDK for any provider, against the answers of tests/clients/answers.py.

import assert from "node:assert/strict";
import { test } from "node:test";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const HELLO = process.env.HELLO;
const WEATHER = JSON.parse(process.env.WEATHER);

// Return a tool that appends its inputs to `seen` and returns `result`, or calls it if it is a function.
export function weatherTools(seen, result, options = {}) {
  const inputSchema = z.object({ city: z.string() }).passthrough();
  const execute = async (input) => {
    seen.push(input);
    return typeof result === "function" ? result(input) : result;
  };
  return { get_weather: tool({ description: "The weather.", inputSchema, execute, ...options }) };
}

// Define tests of tool loops, whole and streamed, and of forced calls. Each request has the given settings.
export function testTools(settings, options) {
  test("a tool loop", async () => {
    const seen = [];
    const tools = weatherTools(seen, { sky: "clear" }, options);
    const result = await generateText({ ...settings, tools, prompt: "weather?", stopWhen: stepCountIs(3) });
    assert.deepEqual(seen, [WEATHER]);
    assert.equal(result.text, "It is clear there.");
    assert.deepEqual(
      result.steps.map((step) => step.finishReason),
      ["tool-calls", "stop"],
    );
  });

  test("a tool loop in streams, with two calls at once", async () => {
    const seen = [];
    const tools = weatherTools(seen, ({ city }) => city, options);
    const result = streamText({ ...settings, tools, prompt: "two cities?", stopWhen: stepCountIs(3) });
    const kinds = new Set();
    for await (const part of result.fullStream) {
      assert.notEqual(part.type, "error", String(part.error));
      kinds.add(part.type);
    }
    assert.deepEqual(seen, [{ city: "Bern" }, { city: "Rome" }]);
    assert.match(await result.text, /Bern.* and .*Rome/);
    for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result"]) assert.ok(kinds.has(kind));
  });

  test("forced calls", async () => {
    const seen = [];
    const tools = weatherTools(seen, "fine", options);
    for (const toolChoice of ["required", { type: "tool", toolName: "get_weather" }]) {
      const { toolCalls } = await generateText({ ...settings, tools, toolChoice, prompt: "only a call" });
      assert.deepEqual(toolCalls[0].input, { city: "Bern" });
    }
    const { text } = await generateText({ ...settings, tools, toolChoice: "none", prompt: "hello" });
    assert.equal(text, HELLO);
  });
}
