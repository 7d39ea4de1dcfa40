// Elements from text. Nothing in this page makes HTML of a string: what models and users write stays text.

/** Returns the element of the document with this id. */
export const byId = (id) => document.getElementById(id);

/** Returns a new element with attributes, and children: nodes, or strings that become text. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Like `element`, of SVG. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Sets an element's text if it differs, so that what has not changed is not drawn again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Returns a number in at most three digits: 0.123, 12.3, 1,234, 56.7 k. */
export function short(number) {
  if (number >= 1e6) return `${(number / 1e6).toPrecision(3)} M`;
  if (number >= 1e4) return `${(number / 1e3).toPrecision(3)} k`;
  if (number >= 100 || Number.isInteger(number)) return Math.round(number).toLocaleString("en");
  return String(Number(number.toPrecision(3)));
}

/** Returns seconds as people say them: 25 ms, 2.5 s, 2 min. */
export function duration(seconds) {
  if (seconds < 1) return `${short(seconds * 1000)} ms`;
  return seconds < 60 ? `${short(seconds)} s` : `${short(seconds / 60)} min`;
}
