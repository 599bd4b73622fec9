// Parse Markdown for a test. Each line of standard input is a JSON list of the pieces of a text. The answer is a line with the
// rendered whole text, the text rendered piece by piece, and its spoken form. With the argument "brief", only parse the text,
// as a whole if it has one piece.

import { createInterface } from "node:readline";

const { blocks, Growing, spoken } = await import(process.argv[2]);

const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const attribute = (node) => (node.href === undefined ? "" : ` ${node.href}`);
const within = (content) =>
  content
    .map((node) => (typeof node === "string" ? escaped(node) : `<${node.tag}${attribute(node)}>${within(node.content)}</>`))
    .join("");

function shown(block) {
  const { tag } = block;
  if (tag === "p") return `<p>${within(block.content)}</>`;
  if (tag === "h") return `<h${block.level}>${within(block.content)}</>`;
  if (tag === "hr") return "<hr>";
  if (tag === "code") return `<pre ${block.language}>${escaped(block.code)}</>`;
  if (tag === "quote") return `<quote>${block.blocks.map(shown).join("")}</>`;
  if (tag === "list") {
    const items = block.items.map((item) => `<li>${item.map(shown).join("")}</>`).join("");
    return `<${block.ordered ? `ol ${block.first}` : "ul"}>${items}</>`;
  }
  const row = (cells) => `<tr>${cells.map((cell, index) => `<td ${block.sides[index]}>${within(cell)}</>`).join("")}</>`;
  return `<table>${[block.head, ...block.rows].map(row).join("")}</>`;
}

function grown(pieces) {
  const growing = new Growing();
  const settled = [];
  let open = [];
  for (const piece of pieces) {
    const [more, rest] = growing.add(piece);
    settled.push(...more);
    open = rest;
  }
  return [settled, open];
}

const brief = process.argv[3] === "brief";
for await (const line of createInterface({ input: process.stdin })) {
  const pieces = JSON.parse(line);
  if (brief) {
    console.log(pieces.length === 1 ? blocks(pieces[0]).length : grown(pieces)[0].length);
    continue;
  }
  const whole = blocks(pieces.join(""));
  const [settled, open] = grown(pieces);
  const answer = {
    whole: whole.map(shown).join(""),
    grown: [...settled, ...open].map(shown).join(""),
    open: open.length,
    spoken: whole.map(spoken).join("\n"),
  };
  console.log(JSON.stringify(answer));
}
