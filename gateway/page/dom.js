// Elements, made without markup: what a model or a server says is text and nothing else.

const SAID_LAST = 5;

export const find = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Said to those who hear the page, once.
export function announce(text) {
  if (!text.trim()) return;
  const region = find("announce");
  region.append(make("p", { textContent: text }));
  // No second copy of the conversation: what is gone from here has been said, or is waiting to be.
  while (region.children.length > SAID_LAST) region.firstChild.remove();
}

export function notice(text) {
  find("notice").textContent = text;
  find("notice").hidden = !text;
}
