// Elements, made without markup: what a model or a server says is text and nothing else.

export const find = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function announce(text) {
  find("announce").textContent = text;
}

export function notice(text) {
  find("notice").textContent = text;
  find("notice").hidden = !text;
}
