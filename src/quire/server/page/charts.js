// Pictures of figures: lines over time, histograms, and KV blocks as squares.

import { duration, element, setText, short, svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 100;
const MOST_SQUARES = 512;
const STATES = {
  used: "in use",
  replaced: "of them just taken from evicted prefixes",
  leased: "pinned",
  idle: "idle: cached prefixes",
  free: "free",
};

/** Draws lines over the same time; `series` are `[class, values]`, the newest value last, of at most `length`. */
export function drawLines(node, series, length) {
  const top = niceCeiling(Math.max(1, ...series.flatMap(([, values]) => values)));
  const shapes = series.map(([name, values]) => {
    const points = values.map((value, index) => {
      const x = WIDTH * (1 - (values.length - 1 - index) / (length - 1));
      return `${x.toFixed(1)},${(HEIGHT * (1 - value / top)).toFixed(1)}`;
    });
    return svg("polyline", { class: name, points: points.join(" ") });
  });
  const middle = svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2 });
  const now = series.map(([name, values]) => `${name} ${short(values.at(-1) ?? 0)}`).join(", ");
  const attributes = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
  node.replaceChildren(
    svg("svg", { ...attributes, "aria-label": `Tokens per second now: ${now}` }, middle, ...shapes),
    element("span", { class: "top" }, short(top)),
    element("span", { class: "middle" }, short(top / 2)),
  );
}

/** Draws a histogram of latencies, and says in words what it shows. */
export function drawHistogram(node, summary, { bounds, counts }) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (!total) {
    node.replaceChildren();
    setText(summary, "Nothing has been measured yet.");
    return;
  }
  const first = Math.max(0, counts.findIndex((count) => count > 0) - 1);
  const last = Math.min(counts.length - 1, counts.findLastIndex((count) => count > 0) + 1);
  const most = Math.max(...counts);
  const bars = counts.slice(first, last + 1).map((count, index) => {
    const bound = bounds[first + index];
    const label = bound === undefined ? `> ${duration(bounds.at(-1))}` : duration(bound);
    const bar = element("span", { class: "bar" });
    bar.style.height = `${(100 * count) / most}%`; // by script, which the content policy allows
    return element("span", { class: "column", title: `${label}: ${short(count)}` },
      element("span", { class: "room" }, bar), element("span", { class: "label" }, label));
  });
  node.replaceChildren(...bars);
  const text = `Half within ${within(bounds, counts, total / 2)}, 95 % within ${within(bounds, counts, total * 0.95)}; ` +
    `${short(total)} in all.`;
  setText(summary, text);
  node.setAttribute("aria-label", text);
}

/** Returns the bound that so many of the values are within. */
function within(bounds, counts, number) {
  let sum = 0;
  const index = counts.findIndex((count) => (sum += count) >= number);
  return index < bounds.length ? duration(bounds[index]) : `more than ${duration(bounds.at(-1))}`;
}

/** Draws KV blocks as squares by what they hold; each stands for several if there are many. */
export function drawBlocks(node, legend, blocks, numEvicted) {
  const inUse = blocks.total - blocks.free;
  const leased = Math.min(blocks.leased, inUse);
  const replaced = Math.min(numEvicted, inUse - leased);
  const counts = {
    used: inUse - leased - replaced,
    replaced,
    leased,
    idle: blocks.idle,
    free: blocks.free - blocks.idle,
  };
  const perSquare = Math.max(1, Math.ceil(blocks.total / MOST_SQUARES));
  const states = Object.entries(counts).flatMap(([state, count]) => Array(Math.ceil(count / perSquare)).fill(state));
  while (node.childElementCount > states.length) node.lastChild.remove();
  while (node.childElementCount < states.length) node.append(element("span"));
  states.forEach((state, index) => {
    const square = node.children[index];
    if (square.className !== state) square.className = state;
  });
  counts.used += replaced;
  const words = Object.entries(counts).map(([state, count]) => [state, `${short(count)} ${STATES[state]}`]);
  node.setAttribute("aria-label", `${blocks.total} KV blocks: ${words.map(([, text]) => text).join(", ")}`);
  legend.replaceChildren(
    ...words.map(([state, text]) => element("span", {}, element("span", { class: `key ${state}` }), text)),
    element("span", {}, `${short(blocks.evicted)} evicted since the start`),
    element("span", {}, perSquare > 1 ? `a square is ${perSquare} blocks` : "a square is a block"),
  );
}

/** Returns the next of 1, 2, 5, 10, 20, … that is not below a number. */
function niceCeiling(number) {
  const power = 10 ** Math.floor(Math.log10(number));
  return [1, 2, 5, 10].map((factor) => factor * power).find((bound) => bound >= number);
}
