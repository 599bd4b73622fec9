// Inline Markdown of a paragraph, parsed to a tree of plain values. Takes linear time for any text.
//
// A node is a string or { tag, content, href }, where tag is em, strong, del, code, a or br. HTML is not interpreted, and
// only http and https addresses become links. Follows CommonMark except for rare cases, and except where responses of
// models are more readable otherwise: each line end is a break, and formulas in \( \), \[ \] and $$ $$ are not changed.

const PLAIN = /[^\\`*_~[\]!<\nhH$]+/y;
const ESCAPED = /[!-/:-@[-`{-~]/;
const TICKS = /`+/y;
const RUN = /([*_~])\1*/y;
const BREAK = /<br ?\/?>/iy;
const IN_ANGLES = /<(https?:\/\/[^\s<>]{1,2000})>/iy;
const BARE = /https?:\/\/[^\s<>[\]"`\u3000-\u303f\uff00-\uffef]+/iy;
// An address with an optional title. Every part is bounded, because this may be tried at every character of the text.
const ADDRESS =
  /\([ \n]{0,3}(?:<([^<>\n]{0,2000})>|((?:[^\s()<]|\([^\s()]{0,200}\)){0,2000}))(?:[ \n]{1,3}(?:"[^"]{0,500}"|'[^']{0,500}'))?[ \n]{0,3}\)/y;
const FORMULAS = [
  ["\\(", "\\)"],
  ["\\[", "\\]"],
  ["$$", "$$"],
];
const MOST_OPEN = 32;
const LONGEST_RUN = 6;

export function inline(text) {
  return new Inline(text).parse();
}

// Return the full address if it is an http or https address without user information before its host, else null.
export function safeAddress(address) {
  if (!/^https?:\/\//i.test(address)) return null;
  try {
    const url = new URL(address);
    return url.username || url.password ? null : url.href;
  } catch {
    return null;
  }
}

class Inline {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.nodes = [];
    this.brackets = [];
    this.ticks = null;
    this.absent = new Set();
  }

  parse() {
    while (this.at < this.text.length) {
      const plain = this.#match(PLAIN);
      if (plain) this.#take(plain[0].length, plain[0]);
      else this.#special(this.text[this.at]);
    }
    return emphasized(this.nodes);
  }

  #special(character) {
    if (character === "\n") this.#take(1, { tag: "br", content: [] });
    else if (character === "`") this.#code();
    else if (character === "*" || character === "_" || character === "~") this.#run();
    else if (character === "[" || this.text.startsWith("![", this.at)) this.#openBracket(character);
    else if (character === "]") this.#closeBracket();
    else if (character === "<") this.#angle();
    else if (character === "h" || character === "H") this.#bareAddress();
    else if (!this.#formula()) this.#escape();
  }

  #match(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text);
  }

  #take(length, node) {
    this.nodes.push(node);
    this.at += length;
  }

  #escape() {
    const next = this.text[this.at + 1] ?? "";
    if (this.text[this.at] === "\\" && ESCAPED.test(next)) this.#take(2, next);
    else if (this.text[this.at] === "\\" && next === "\n") this.at += 1; // the line end is a break anyway
    else this.#take(1, this.text[this.at]);
  }

  #formula() {
    for (const [opening, closing] of FORMULAS) {
      if (!this.text.startsWith(opening, this.at) || this.absent.has(closing)) continue;
      const end = this.text.indexOf(closing, this.at + 2);
      if (end >= 0) {
        this.#take(end + 2 - this.at, this.text.slice(this.at, end + 2));
        return true;
      }
      this.absent.add(closing); // a later search would not find it either
    }
    return false;
  }

  #code() {
    this.ticks ??= ticksByLength(this.text);
    const { length } = this.#match(TICKS)[0];
    const places = this.ticks.get(length) ?? []; // empty if a backslash escapes the first of a run
    while (places.length && places.at(-1) <= this.at) places.pop();
    if (!places.length) {
      this.#take(length, "`".repeat(length));
      return;
    }
    const end = places.at(-1);
    let code = this.text.slice(this.at + length, end).replaceAll("\n", " ");
    if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
    this.#take(end + length - this.at, { tag: "code", content: [code] });
  }

  #run() {
    const [run, character] = this.#match(RUN);
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[this.at + run.length] ?? " ";
    // Beside * and ~ only white space matters, so that emphasized text may start or end with a quotation mark.
    let opens = !/\s/.test(after);
    let closes = !/\s/.test(before);
    if (character === "_") {
      opens &&= !/[\p{L}\p{N}]/u.test(before);
      closes &&= !/[\p{L}\p{N}]/u.test(after);
    }
    const usable = character === "~" ? run.length === 2 : run.length <= LONGEST_RUN;
    if (usable && (opens || closes)) {
      const { length } = run;
      this.#take(length, { mark: character, length, left: length, opens, closes, begins: [], ends: [] });
    } else {
      this.#take(run.length, run);
    }
  }

  #openBracket(character) {
    this.brackets.push(this.nodes.length);
    // An image becomes a link, because the page loads nothing from other servers.
    if (character === "!") this.#take(2, "![");
    else this.#take(1, "[");
  }

  #closeBracket() {
    const opening = this.brackets.pop();
    this.at += 1;
    const found = opening === undefined ? null : this.#match(ADDRESS);
    const href = found && safeAddress(found[1] ?? found[2]);
    if (!href) {
      this.nodes.push("]");
      return;
    }
    const content = this.nodes.splice(opening).slice(1);
    const inner = content.flatMap((node) => (node.tag === "a" ? node.content : [node]));
    this.#take(found[0].length, { tag: "a", href, content: inner.length ? emphasized(inner) : [href] });
    this.brackets.length = 0; // links cannot be nested
  }

  #angle() {
    const found = this.#match(BREAK);
    if (found) {
      this.#take(found[0].length, { tag: "br", content: [] });
      return;
    }
    const address = this.#match(IN_ANGLES);
    const href = address && safeAddress(address[1]);
    if (href) this.#take(address[0].length, { tag: "a", href, content: [address[1]] });
    else this.#take(1, "<");
  }

  #bareAddress() {
    const found = /\w/.test(this.text[this.at - 1] ?? "") ? null : this.#match(BARE);
    const shown = found && withoutTail(found[0]);
    const href = shown && safeAddress(shown);
    if (href) this.#take(shown.length, { tag: "a", href, content: [shown] });
    else if (found) this.#take(found[0].length, found[0]);
    else this.#take(1, this.text[this.at]);
  }
}

// Return the start positions of the runs of each length, last one first.
function ticksByLength(text) {
  const places = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!places.has(run.length)) places.set(run.length, []);
    places.get(run.length).push(index);
  }
  for (const list of places.values()) list.reverse();
  return places;
}

// Strip punctuation that ends the sentence, and the closing bracket around the address.
function withoutTail(address) {
  let unopened = address.split(")").length - address.split("(").length;
  let end = address.length;
  for (; end > 0; end -= 1) {
    const last = address[end - 1];
    if (last === ")" && unopened > 0) unopened -= 1;
    else if (!".,:;!?'*_~".includes(last)) break;
  }
  return address.slice(0, end);
}

// Build the tree from the runs of *, _ and ~ and the nodes between them.
function emphasized(nodes) {
  const open = [];
  for (const run of nodes) {
    if (!run.mark) continue;
    while (run.closes && run.left) {
      const place = open.findLastIndex((opener) => fit(opener, run));
      if (place < 0) break;
      const opener = open[place];
      const used = Math.min(2, opener.left, run.left);
      const tag = run.mark === "~" ? "del" : used === 2 ? "strong" : "em";
      opener.begins.unshift(tag);
      run.ends.push(tag);
      opener.left -= used;
      run.left -= used;
      open.length = opener.left ? place + 1 : place;
    }
    // Limit the open runs, which bounds the search and the depth of the tree.
    if (run.opens && run.left && open.length < MOST_OPEN) open.push(run);
  }
  return nested(nodes);
}

// CommonMark's rule of three: *a**b* is not closed by half of the run of two.
function fit(opener, closer) {
  if (opener.mark !== closer.mark) return false;
  if (!opener.closes && !closer.opens) return true;
  return (opener.length + closer.length) % 3 !== 0 || opener.length % 3 === 0;
}

function nested(nodes) {
  const root = [];
  const stack = [root];
  for (const node of nodes) {
    if (!node.mark) {
      stack.at(-1).push(node);
      continue;
    }
    for (let number = node.ends.length; number > 0; number -= 1) stack.pop();
    if (node.left) stack.at(-1).push(node.mark.repeat(node.left));
    for (const tag of node.begins) {
      const content = [];
      stack.at(-1).push({ tag, content });
      stack.push(content);
    }
  }
  return root;
}
