// The status view. It polls /ready and /metrics every second while it is visible.

import { request } from "./api.js";
import { find, make } from "./dom.js";
import { buckets, duration, parse, quantile, total } from "./metrics.js";

const INTERVAL = 1000;
const MAX_SAMPLES = 120;
const LATENCY_SPAN = 60;
const LATENCIES = [
  ["time_to_first_token_seconds", "Time to first token"],
  ["inter_token_latency_seconds", "Inter-token latency"],
  ["request_queue_time_seconds", "Queue time"],
  ["e2e_request_latency_seconds", "End-to-end latency"],
];

export class Status {
  constructor() {
    this.history = [];
    this.timer = null;
    this.shown = 0;
  }

  show() {
    this.hide();
    this.#update(++this.shown);
  }

  hide() {
    clearTimeout(this.timer);
    this.shown += 1;
  }

  async #update(turn) {
    const state = await this.#ready();
    let samples = null;
    let failure = "";
    try {
      samples = parse(await (await request("/metrics")).text());
    } catch (error) {
      failure = error.message;
    }
    if (turn !== this.shown) return;
    find("ready").textContent = failure || (state ? `Not ready: ${state}` : "Ready");
    find("ready").className = `state ${failure || state ? "bad" : "good"}`;
    if (samples) {
      this.history.push({ time: performance.now() / 1000, samples });
      if (this.history.length > MAX_SAMPLES + 1) this.history.shift();
      this.#draw(samples);
    }
    this.timer = setTimeout(() => this.#update(turn), INTERVAL);
  }

  async #ready() {
    try {
      await request("/health");
      return (await (await fetch("/ready")).json()).error?.message ?? "";
    } catch (error) {
      return error.message;
    }
  }

  #draw(samples) {
    const rates = this.#rates("generation_tokens_total");
    const queries = total(samples, "prefix_cache_queries_total");
    const hits = total(samples, "prefix_cache_hits_total");
    const aborted = total(samples, "request_failures_total", { reason: "abort" });
    const cards = [
      ["Running", total(samples, "num_requests_running")],
      ["Waiting", total(samples, "num_requests_waiting")],
      ["HTTP in flight", total(samples, "http_requests_in_flight")],
      ["Tokens/s", (rates.at(-1) ?? 0).toFixed(1)],
      ["Prompt tokens/s", (this.#rates("prompt_tokens_total").at(-1) ?? 0).toFixed(1)],
      ["Prefix cache hits", queries ? `${((100 * hits) / queries).toFixed(1)} %` : "none"],
      ["Finished", total(samples, "request_success_total")],
      ["Aborted", aborted],
      ["Failed", total(samples, "request_failures_total") - aborted + total(samples, "requests_rejected_total")],
    ];
    find("cards").replaceChildren(
      ...cards.map(([name, value]) =>
        make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: String(value) })),
      ),
    );
    this.#chart(rates);
    this.#workers(samples);
    this.#latencies(samples);
  }

  // Return the rates per second between consecutive samples.
  #rates(name) {
    return this.history.slice(1).map(({ time, samples }, index) => {
      const before = this.history[index];
      const increase = total(samples, name) - total(before.samples, name);
      // The counters of a restarted worker start at 0.
      return Math.max(0, increase) / (time - before.time);
    });
  }

  #chart(rates) {
    const svg = "http://www.w3.org/2000/svg";
    const maximum = Math.max(0, ...rates);
    find("chart-top").textContent = `last two minutes, maximum ${maximum.toFixed(0)}`;
    const top = Math.max(1, maximum);
    const points = rates.map((rate, index) => {
      const x = 600 - ((rates.length - 1 - index) * 600) / (MAX_SAMPLES - 1);
      return `${x.toFixed(1)} ${(115 - (110 * rate) / top).toFixed(1)}`;
    });
    const base = document.createElementNS(svg, "line");
    for (const [name, value] of Object.entries({ x1: 0, x2: 600, y1: 115, y2: 115 })) base.setAttribute(name, value);
    const path = document.createElementNS(svg, "path");
    path.setAttribute("d", points.length ? `M${points.join("L")}` : "");
    find("chart").replaceChildren(base, path);
  }

  #workers(samples) {
    const rows = (samples.get("worker_ready") ?? []).map(({ labels, value }) => {
      const { worker, model_name } = labels;
      const of = (name) => total(samples, name, { worker, model_name });
      const queries = of("prefix_cache_queries_total");
      const state = make("td", { textContent: value ? "ready" : "not responding", className: value ? "good" : "bad" });
      return make(
        "tr",
        {},
        cell(model_name),
        cell(worker),
        state,
        cell(of("num_requests_running")),
        cell(of("num_requests_waiting")),
        cell(`${(100 * of("kv_cache_usage_perc")).toFixed(1)} %`),
        cell(queries ? `${((100 * of("prefix_cache_hits_total")) / queries).toFixed(1)} %` : "none"),
      );
    });
    if (!rows.length) rows.push(make("tr", {}, make("td", { colSpan: 7, textContent: "No worker is connected." })));
    find("workers").replaceChildren(...rows);
  }

  #latencies(samples) {
    const now = this.history.at(-1).time;
    const before = this.history.findLast(({ time }) => now - time >= LATENCY_SPAN);
    find("latency-span").textContent = before ? `last ${LATENCY_SPAN} s` : "since the server started";
    const rows = LATENCIES.map(([name, title]) => {
      const histogram = buckets(samples, before?.samples, name);
      const times = [0.5, 0.95, 0.99].map((share) => cell(duration(quantile(histogram, share))));
      return make("tr", {}, cell(title), ...times, cell(histogram.at(-1)?.[1] ?? 0));
    });
    find("latencies").replaceChildren(...rows);
  }
}

function cell(text) {
  return make("td", { textContent: String(text) });
}
