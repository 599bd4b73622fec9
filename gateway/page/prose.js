// Streamed text of a model, shown as rendered Markdown or as plain text.

import { announce, make } from "./dom.js";
import { Growing, spoken } from "./markdown.js";

const LEAST_WAIT = 30;
const REST = 4;

export class Prose {
  constructor(plain) {
    this.text = "";
    this.unread = "";
    this.growing = new Growing();
    this.settled = [];
    this.open = [];
    this.shown = [];
    this.timer = null;
    this.next = 0;
    this.plain = plain;
    this.element = make("div", { className: "content" });
  }

  append(text) {
    this.text += text;
    this.unread += text;
    if (this.timer !== null) return;
    const wait = this.next - performance.now();
    if (wait > 0) this.timer = setTimeout(() => this.#read(), wait);
    else this.#read();
  }

  // Render the rest at the end of the text.
  finish() {
    this.#read();
    this.open.forEach((block) => announce(spoken(block)));
  }

  showPlain(plain) {
    this.plain = plain;
    this.shown = [];
    if (!plain) this.element.replaceChildren(...this.settled.map(blockElement));
    this.#show([]);
  }

  #read() {
    clearTimeout(this.timer);
    this.timer = null;
    const begun = performance.now();
    const [settled, open] = this.growing.add(this.unread);
    this.unread = "";
    this.settled.push(...settled);
    this.open = open;
    this.#show(settled);
    // Announce each block once, when it is complete.
    settled.forEach((block) => announce(spoken(block)));
    // A long block is rendered again completely, so it is rendered less often. Reading offsetHeight includes the layout,
    // which scrolling needs anyway, in the measured time.
    void this.element.offsetHeight;
    const now = performance.now();
    this.next = now + Math.max(LEAST_WAIT, REST * (now - begun));
  }

  #show(settled) {
    this.element.classList.toggle("plain", this.plain);
    if (this.plain) {
      grow(this.element, this.text);
      return;
    }
    const blocks = [...settled, ...this.open];
    const elements = blocks.map((block, index) => again(this.shown[index], block) ?? blockElement(block));
    for (const [index, element] of elements.entries()) {
      if (this.shown[index] === element) continue;
      if (this.shown[index]) this.shown[index].replaceWith(element);
      else this.element.append(element);
    }
    this.shown.slice(elements.length).forEach((element) => element.remove());
    this.shown = elements.slice(settled.length);
  }
}

// Growing code keeps its element, and so the selection in it and the state of its button.
function again(element, block) {
  if (block.tag !== "code" || element?.dataset.language !== block.language) return null;
  grow(element.querySelector("code"), block.code);
  return element;
}

// Replace the text of an element. If the new text extends the old one, the selection is kept.
function grow(element, text) {
  const before = element.firstChild;
  if (before?.nodeType === Node.TEXT_NODE && text.startsWith(before.data)) before.appendData(text.slice(before.length));
  else element.textContent = text;
}

function blockElement(block) {
  const element = BLOCKS[block.tag](block);
  element.normalize();
  return element;
}

const BLOCKS = {
  p: ({ content }) => textElement("p", content),
  // Use lower levels than the headings of the page.
  h: ({ level, content }) => textElement(`h${Math.min(level + 2, 6)}`, content),
  hr: () => make("hr"),
  quote: ({ blocks }) => make("blockquote", {}, ...blocks.map(blockElement)),
  list: ({ ordered, first, items }) => {
    const list = make(ordered ? "ol" : "ul", {}, ...items.map((item) => make("li", {}, ...item.map(blockElement))));
    if (first !== 1) list.start = first;
    return list;
  },
  table: tableElement,
  code: codeElement,
};

function textElement(tag, content, properties = {}) {
  // Detect right-to-left text.
  return make(tag, { dir: "auto", ...properties }, ...content.map(inlineNode));
}

function inlineNode(node) {
  if (typeof node === "string") return node;
  const properties = node.tag === "a" ? { href: node.href, title: node.href, target: "_blank", rel: "noopener noreferrer" } : {};
  return make(node.tag, properties, ...node.content.map(inlineNode));
}

function tableElement({ head, sides, rows }) {
  const row = (tag, contents) =>
    make("tr", {}, ...contents.map((content, index) => textElement(tag, content, { className: sides[index] })));
  const body = make("tbody", {}, ...rows.map((contents) => row("td", contents)));
  const table = make("table", {}, make("thead", {}, row("th", head)), body);
  table.querySelectorAll("th").forEach((cell) => (cell.scope = "col"));
  return make("div", { className: "wide" }, table);
}

function codeElement({ language, code }) {
  const text = make("code");
  text.append(document.createTextNode(code));
  const button = make("button", { type: "button", textContent: "Copy" });
  button.setAttribute("aria-label", "Copy code");
  button.addEventListener("click", async () => {
    const copied = await copy(text.textContent);
    button.textContent = copied ? "Copied" : "Copying failed";
    announce(button.textContent);
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  const head = make("div", { className: "code-head" }, make("span", { textContent: language }), button);
  const element = make("div", { className: "code" }, head, make("pre", { dir: "ltr" }, text));
  element.dataset.language = language;
  return element;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // The clipboard API is not available without TLS, except on localhost; use the older command.
    const before = document.activeElement;
    const field = make("textarea", { value: text, className: "unseen" });
    document.body.append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    before?.focus();
    return copied;
  }
}
