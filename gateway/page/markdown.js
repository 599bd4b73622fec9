// Markdown of models, parsed to blocks of plain values. Takes linear time for any text.
//
// A block is { tag, line, ... }, where `line` is the number of its first line, and tag with further fields is one of
//   p { content }, h { level, content }, code { language, code }, hr, quote { blocks },
//   list { ordered, first, items: [blocks] }, table { head: [content], sides, rows: [[content]] };
// `content` is the result of inline(). Follows CommonMark and GitHub's tables, except that indented text is not code, the
// content of an item may be indented less than its text, and blank lines between items have no effect.

import { inline } from "./inline.js";

const FENCE = /^[ \t]*(`{3,}|~{3,})(.*)$/;
const HEADING = /^[ \t]*(#{1,6})(?:[ \t]|$)/;
const RULE = /^[ \t]*([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^[ \t]*> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:([ \t]+)|$)/;
const DELIMITERS = /^(?:\|[ \t]*)?:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/;
const DEEPEST = 8;
const TAB = 4;

export function blocks(text) {
  const lines = text.split("\n").map((line) => (line.endsWith("\r") ? line.slice(0, -1) : line));
  return parse(lines, 0);
}

// Incremental parser of a growing text. It returns each final block once, and parses only the rest again.
export class Growing {
  constructor() {
    this.text = "";
  }

  // Return [final, open]: the blocks that have become final, and those that further text may change.
  add(text) {
    this.text += text;
    const found = blocks(this.text);
    const whole = this.text.split("\n");
    // A block is final once the next one has started. A block has started when its first line is complete (for a table,
    // its second line): a "-" may become "---", and a "|-" anything.
    const last = found.findLastIndex(({ line, tag }) => line + (tag === "table" ? 1 : 0) < whole.length - 1);
    if (last <= 0) return [[], found];
    this.text = whole.slice(found[last].line).join("\n");
    return [found.slice(0, last), found.slice(last)];
  }
}

// Return the text of a block for screen readers.
export function spoken(block) {
  const said = (content) => content.map((node) => (node.content ? said(node.content) : node)).join("");
  if (block.tag === "hr") return "";
  if (block.tag === "code") return block.code;
  if (block.tag === "quote") return block.blocks.map(spoken).join("\n");
  if (block.tag === "list") return block.items.map((item) => item.map(spoken).join("\n")).join("\n");
  if (block.tag === "table") return [block.head, ...block.rows].map((row) => row.map(said).join(", ")).join("\n");
  return said(block.content);
}

function parse(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, end] = next(lines, at, depth);
    found.push({ ...block, line: at });
    at = end;
  }
  return found;
}

// Return the block that starts at a line, and the number of the line after it.
function next(lines, at, depth) {
  const line = lines[at];
  if (depth < DEEPEST) {
    if (fenceOf(line)) return code(lines, at);
    if (HEADING.test(line)) return [heading(line), at + 1];
    if (RULE.test(line)) return [{ tag: "hr" }, at + 1];
    if (QUOTE.test(line)) return quote(lines, at, depth);
    if (ITEM.test(line)) return list(lines, at, depth);
    if (beginsTable(lines, at)) return table(lines, at);
  }
  return paragraph(lines, at, depth);
}

function isBlank(line) {
  return !line.trim();
}

function fenceOf(line) {
  const found = FENCE.exec(line);
  // `` ```a``` `` is inline code.
  return found && !(found[1][0] === "`" && found[2].includes("`")) ? found : null;
}

// Return true if a line starts a new block instead of continuing the paragraph.
function interrupts(lines, at, inList) {
  const line = lines[at];
  if (fenceOf(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  // A year at the start of a line does not start a list, and neither does a lone dash.
  if (item && (inList || (item[3] && /^([-*+]|1[.)])$/.test(item[2])))) return true;
  return beginsTable(lines, at);
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && (depth >= DEEPEST || !interrupts(lines, end, false))) end += 1;
  const text = lines.slice(at, end).map((line) => line.trim());
  return [{ tag: "p", content: inline(text.join("\n")) }, end];
}

function heading(line) {
  const { length: level } = HEADING.exec(line)[1];
  let text = line.trim().slice(level).trim();
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  if (end === 0 || /[ \t]/.test(text[end - 1])) text = text.slice(0, end).trim();
  return { tag: "h", level, content: inline(text) };
}

function code(lines, at) {
  const [, fence, info] = fenceOf(lines[at]);
  const indent = indentOf(lines[at]);
  const body = [];
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const closing = FENCE.exec(lines[end]);
    if (closing && closing[1][0] === fence[0] && closing[1].length >= fence.length && isBlank(closing[2])) break;
    body.push(outdented(lines[end], indent));
  }
  const language = /^[\w+#.-]{0,30}/.exec(info.trim())[0];
  return [{ tag: "code", language, code: body.join("\n") }, end + 1];
}

function quote(lines, at, depth) {
  let end = at;
  const body = [];
  for (; end < lines.length && QUOTE.test(lines[end]); end += 1) body.push(lines[end].replace(QUOTE, ""));
  return [{ tag: "quote", blocks: parse(body, depth + 1) }, end];
}

function list(lines, at, depth) {
  const [, , marker] = ITEM.exec(lines[at]);
  const kind = marker.at(-1);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (!found || found[2].at(-1) !== kind || RULE.test(lines[end])) break;
    const [body, after] = itemBody(lines, end, found);
    items.push(parse(body, depth + 1));
    end = after;
  }
  const ordered = kind === "." || kind === ")";
  return [{ tag: "list", ordered, first: ordered ? Number.parseInt(marker, 10) : 1, items }, end];
}

function itemBody(lines, at, [opening, before, marker, gap]) {
  const outer = indentOf(before);
  // Text far to the right of its marker is indented text within the item.
  const begin = gap && gap.length <= TAB ? opening.length : before.length + marker.length + (gap ? 1 : 0);
  const inner = outer + begin - before.length;
  const body = [lines[at].slice(begin)];
  let afterBlank = false;
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (!isBlank(line) && indentOf(line) < Math.min(outer + 2, inner)) {
      if (afterBlank || interrupts(lines, end, true)) break;
    }
    afterBlank = isBlank(line);
    body.push(outdented(line, inner));
  }
  return [body, end];
}

function beginsTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !DELIMITERS.test(lines[at + 1].trim())) return false;
  return lines[at + 1].includes("|") && cells(lines[at]).length === cells(lines[at + 1]).length;
}

function table(lines, at) {
  const head = cells(lines[at]).map(inline);
  const sides = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && !isBlank(lines[end]) && !interrupts(lines, end, false); end += 1) {
    rows.push(cells(lines[end]).slice(0, head.length).map(inline));
  }
  return [{ tag: "table", head, sides, rows }, end];
}

// Return the cells between the unescaped bars of a row.
function cells(line) {
  let row = line.trim();
  if (row.startsWith("|")) row = row.slice(1);
  const found = [];
  let cell = "";
  for (const part of row.split("|")) {
    if (part.endsWith("\\")) {
      cell += `${part.slice(0, -1)}|`;
      continue;
    }
    found.push((cell + part).trim());
    cell = "";
  }
  if (cell) found.push(cell.trim());
  else if (found.length > 1 && !found.at(-1)) found.pop();
  return found;
}

// Return the width of the indent in columns.
function indentOf(line) {
  let columns = 0;
  for (const character of line) {
    if (character === " ") columns += 1;
    else if (character === "\t") columns += TAB;
    else break;
  }
  return columns;
}

// Remove the indent, up to a number of columns.
function outdented(line, most) {
  let at = 0;
  for (let columns = 0; columns < most && (line[at] === " " || line[at] === "\t"); at += 1) {
    columns += line[at] === " " ? 1 : TAB;
  }
  return line.slice(at);
}
