// One streamed response of the model: reasoning, text, tool calls, token probabilities and statistics.

import { make } from "./dom.js";
import { Prose } from "./prose.js";

const SHADES = [0.1, 0.3, 0.6, 0.9];

export class Answer {
  // `plain`: show the text without rendering Markdown; `onPlain`: callback for changes of this choice.
  constructor({ plain, onPlain }) {
    this.reasoning = "";
    this.calls = [];
    this.entries = [];
    this.usage = null;
    this.started = performance.now();
    this.first = null;
    this.thought = null;
    this.prose = new Prose(plain);
    this.callList = make("div");
    this.tokens = make("div");
    this.figures = make("p", { className: "figures" });
    this.element = make("li", { className: "assistant" }, make("p", { className: "who", textContent: "Model" }));
    this.below = make("div", { className: "below" }, this.figures);
    this.element.append(this.prose.element, this.callList, this.tokens, this.below);
    this.onPlain = onPlain;
  }

  get content() {
    return this.prose.text;
  }

  add(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if ((content || reasoning || calls) && this.first === null) this.first = performance.now();
    if (reasoning) this.#reason(reasoning);
    if (content) {
      if (!this.content) this.below.append(this.#plainButton());
      this.prose.append(content);
    }
    for (const call of calls ?? []) this.#call(call);
    for (const entry of choice.logprobs?.content ?? []) this.entries.push(entry);
    if (choice.finish_reason) this.finish = choice.finish_reason;
  }

  // Show statistics and probabilities at the end of the stream.
  close(ended) {
    this.prose.finish();
    const seconds = (performance.now() - this.started) / 1000;
    const parts = [ended === "stopped" ? "stopped" : this.finish === "length" ? "truncated at the token limit" : ""];
    const tokens = this.usage?.completion_tokens;
    if (this.usage) parts.push(`${this.usage.prompt_tokens} prompt + ${tokens} completion tokens`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) parts.push(`${cached} cached`);
    if (this.first !== null) {
      parts.push(`first token after ${Math.round(this.first - this.started)} ms`);
      const rest = (performance.now() - this.first) / 1000;
      if (tokens > 1 && rest > 0) parts.push(`${((tokens - 1) / rest).toFixed(1)} tokens/s`);
    }
    parts.push(`${seconds.toFixed(1)} s`);
    this.figures.textContent = parts.filter(Boolean).join(" · ");
    if (this.entries.length) this.#showProbabilities();
  }

  fail(message) {
    this.element.append(make("p", { className: "failed", role: "alert", textContent: message }));
  }

  message() {
    const message = { role: "assistant", content: this.content };
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, name, args }) => ({
        id,
        type: "function",
        function: { name, arguments: args },
      }));
    }
    return message;
  }

  #plainButton() {
    const button = make("button", { type: "button", className: "plain-text", textContent: "Plain text" });
    button.setAttribute("aria-pressed", String(this.prose.plain));
    button.addEventListener("click", () => {
      this.prose.showPlain(!this.prose.plain);
      button.setAttribute("aria-pressed", String(this.prose.plain));
      this.onPlain(this.prose.plain);
    });
    return button;
  }

  #reason(text) {
    if (!this.thought) {
      this.thought = make("p", { className: "content" });
      const details = make("details", { className: "reasoning", open: true }, make("summary", { textContent: "Reasoning" }));
      details.append(this.thought);
      this.prose.element.before(details);
    }
    this.reasoning += text;
    this.thought.append(text);
  }

  #call(delta) {
    let call = this.calls[delta.index];
    if (!call) {
      const shown = make("pre");
      call = this.calls[delta.index] = { id: delta.id, name: delta.function.name, args: "", shown };
      const title = make("p", { className: "who", textContent: `Tool call: ${call.name}` });
      call.box = make("div", { className: "call" }, title, shown);
      this.callList.append(call.box);
    }
    call.args += delta.function?.arguments ?? "";
    call.shown.textContent = call.args;
  }

  #showProbabilities() {
    const table = make("div", { className: "alternatives" });
    const line = make("div", { className: "tokens" });
    let chosen = null;
    for (const entry of this.entries) {
      const probability = Math.exp(entry.logprob);
      const shade = SHADES.filter((bound) => probability >= bound).length;
      const button = make("button", { type: "button", className: `p${shade}`, textContent: readable(entry.token) });
      button.setAttribute("aria-pressed", "false");
      button.setAttribute("aria-label", `${entry.token}, ${percent(probability)}`);
      button.title = percent(probability);
      button.addEventListener("click", () => {
        chosen?.setAttribute("aria-pressed", "false");
        button.setAttribute("aria-pressed", "true");
        chosen = button;
        table.replaceChildren(alternatives(entry));
      });
      line.append(button);
    }
    const details = make("details", {}, make("summary", { textContent: "Probabilities" }), line, table);
    this.tokens.append(details);
  }
}

// A token that is part of a character has no text. The API returns its bytes instead.
function readable(token) {
  return token.replace(/^bytes:(?=\\x)/, "");
}

function percent(probability) {
  return `${(100 * probability).toFixed(probability < 0.1 ? 2 : 1)} %`;
}

function alternatives(entry) {
  const likely = entry.top_logprobs ?? [];
  const all = likely.some(({ token }) => token === entry.token) ? likely : [...likely, entry];
  const rows = all.map((one) =>
    make(
      "tr",
      {},
      make("td", { textContent: JSON.stringify(readable(one.token)).replaceAll("\\\\x", "\\x") }),
      make("td", { textContent: percent(Math.exp(one.logprob)) }),
      make("td", { textContent: one.token === entry.token ? "chosen" : "" }),
    ),
  );
  const head = ["Token", "Probability", ""].map((text) => make("th", { scope: "col", textContent: text }));
  return make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
}
