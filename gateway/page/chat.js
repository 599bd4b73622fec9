// The conversation: its messages, the requests, and the streamed responses.

import { events, request } from "./api.js";
import { Answer } from "./answer.js";
import { announce, find, make } from "./dom.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
// Distance in pixels from the end of the log within which it keeps scrolling with new text.
const NEAR = 60;

export class Chat {
  constructor() {
    this.messages = [];
    this.running = null;
    this.plain = false;
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    find("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#submit();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    this.following = true;
    find("log").addEventListener("scroll", () => {
      const log = find("log");
      this.following = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
    });
    find("stop").addEventListener("click", () => this.stop());
    find("clear").addEventListener("click", () => this.clear());
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    find("log").replaceChildren();
    find("announce").replaceChildren();
    find("prompt").focus();
  }

  #submit() {
    const text = find("prompt").value.trim();
    if (!text || this.running) return;
    find("prompt").value = "";
    const item = make("li", { className: "user" }, make("p", { className: "who", textContent: "You" }));
    item.append(make("p", { className: "content", textContent: text }));
    find("log").append(item);
    this.#ask([{ role: "user", content: text }]);
  }

  async #ask(newMessages) {
    const messages = this.messages;
    // Show new responses as the user chose for the last one.
    const answer = new Answer({ plain: this.plain, onPlain: (plain) => (this.plain = plain) });
    find("log").append(answer.element);
    this.following = true;
    const drawn = new ResizeObserver(() => this.#follow());
    drawn.observe(answer.element);
    const running = (this.running = new AbortController());
    this.#setRunning(true);
    try {
      const body = this.#body([...messages, ...newMessages]);
      for await (const event of events(await request("/v1/chat/completions", body, running.signal))) {
        answer.add(event);
      }
      answer.close("finished");
      announce("The response is complete.");
    } catch (error) {
      const stopped = error.name === "AbortError";
      answer.close(stopped ? "stopped" : "failed");
      if (stopped) announce("Stopped.");
      else answer.fail(error.message);
    } finally {
      this.running = null;
      this.#setRunning(false);
    }
    // The text of a stopped or failed response stays in the conversation; its incomplete calls do not.
    if (!answer.finish) answer.calls = [];
    if (answer.content || answer.calls.length) messages.push(...newMessages, answer.message());
    else if (newMessages[0].role === "user" && !find("prompt").value) find("prompt").value = newMessages[0].content;
    if (answer.calls.length) this.#askForResults(answer);
    this.#follow();
    drawn.disconnect();
  }

  #body(messages) {
    const system = find("system").value.trim();
    const body = {
      model: find("model").value,
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      stream: true,
      stream_options: { include_usage: true },
    };
    for (const name of NUMBERS) {
      if (find(name).value !== "") body[name] = Number(find(name).value);
    }
    if (find("stop-text").value) body.stop = [find("stop-text").value];
    if (find("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    const tools = find("tools").value.trim();
    if (tools) {
      try {
        body.tools = JSON.parse(tools);
      } catch {
        throw new Error("The tools are not valid JSON.");
      }
    }
    return body;
  }

  #askForResults(answer) {
    const fields = answer.calls.map((call) => {
      const field = make("textarea", { rows: 2 });
      field.setAttribute("aria-label", `Result of ${call.name}`);
      field.placeholder = `Result of ${call.name}`;
      call.box.append(field);
      return field;
    });
    const button = make("button", { type: "button", textContent: fields.length > 1 ? "Send results" : "Send result" });
    button.addEventListener("click", () => {
      if (this.running) return;
      button.remove();
      for (const field of fields) field.readOnly = true;
      this.#ask(answer.calls.map(({ id }, index) => ({ role: "tool", tool_call_id: id, content: fields[index].value })));
    });
    answer.callList.append(button);
  }

  #setRunning(running) {
    find("send").disabled = running;
    find("stop").disabled = !running;
    find("log").setAttribute("aria-busy", String(running));
  }

  // Keep the end of the response in view unless the user has scrolled up.
  #follow() {
    if (this.following) find("log").scrollTop = find("log").scrollHeight;
  }
}
