// Creation of elements without markup: text of a model or server is never interpreted as HTML.

const SAID_LAST = 5;

export const find = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Announce a text once to users of screen readers.
export function announce(text) {
  if (!text.trim()) return;
  const region = find("announce");
  region.append(make("p", { textContent: text }));
  // Remove old announcements, so that there is no second copy of the conversation.
  while (region.children.length > SAID_LAST) region.firstChild.remove();
}

export function notice(text) {
  find("notice").textContent = text;
  find("notice").hidden = !text;
}
