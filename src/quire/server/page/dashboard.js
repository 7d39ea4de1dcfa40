// The dashboard: asks for figures while it is looked at, and shows them.

import { call, getJson } from "./api.js";
import { drawBlocks, drawHistogram, drawLines } from "./charts.js";
import { byId, element, setText, short } from "./dom.js";

const INTERVAL = 2000; // milliseconds between questions
const MOST_SENTENCES = 4; // of a request, which may have many completions
const KEPT = 90; // rates that are shown: three minutes

const view = byId("dashboard");
const rates = { generated: [], prompt: [] };
const rows = new Map(); // of live requests, by id
let last = null; // the figures before
let timer = null;
let isAsking = false;

/** Asks now and goes on as long as somebody looks. */
async function refresh() {
  clearTimeout(timer);
  if (isAsking || !isSeen()) return;
  isAsking = true;
  try {
    const requests = getJson("v1/requests").catch((error) => ({ data: [], problem: error.message }));
    const [stats, listed] = await Promise.all([getJson("stats"), requests]);
    show(stats, listed);
    showTrouble(stats.engine_up ? "" : "The engine is down, or is being replaced.");
  } catch (error) {
    showTrouble(`No figures: ${error.message}`);
  }
  isAsking = false;
  if (isSeen()) timer = setTimeout(refresh, INTERVAL);
}

const isSeen = () => !document.hidden && !view.hidden;

function showTrouble(text) {
  byId("trouble").hidden = !text;
  setText(byId("trouble"), text);
}

function show(stats, requests) {
  const change = changeSince(last, stats);
  if (last) {
    keep(rates.generated, change.generated);
    keep(rates.prompt, change.prompt);
  }
  last = stats;
  showTiles(stats, change);
  drawLines(byId("rates"), Object.entries(rates), KEPT);
  drawBlocks(byId("blocks"), byId("blocks-legend"), stats.kv_blocks, change.evicted);
  drawHistogram(byId("ttft"), byId("ttft-summary"), stats.time_to_first_token);
  drawHistogram(byId("itl"), byId("itl-summary"), stats.inter_token_latency);
  showRequests(requests);
  showTenants(stats.tenants);
}

/** Returns tokens per second, and evicted blocks, since the figures before; counters may have begun anew. */
function changeSince(before, now) {
  if (!before) return { generated: 0, prompt: 0, evicted: 0 };
  const seconds = Math.max(0.1, now.time - before.time);
  const grown = (read) => Math.max(0, read(now) - read(before));
  return {
    generated: grown((stats) => stats.tokens.generated) / seconds,
    prompt: grown((stats) => stats.tokens.prompt) / seconds,
    evicted: grown((stats) => stats.kv_blocks.evicted),
  };
}

function keep(values, value) {
  values.push(value);
  if (values.length > KEPT) values.shift();
}

function showTiles({ requests, kv_blocks: blocks, tokens }, change) {
  const used = blocks.total ? (100 * (blocks.total - blocks.free)) / blocks.total : 0;
  const tiles = [
    ["Running", short(requests.running), `${short(requests.preempted)} preempted so far`],
    ["Waiting", short(requests.waiting), `${short(requests.awaiting)} for grammar or KV`],
    ["Generated tokens", `${short(change.generated)}/s`, `${short(tokens.generated)} so far`],
    ["Prompt tokens", `${short(change.prompt)}/s`, `${short(tokens.prompt)} so far`],
    ["KV in use", `${short(used)} %`, `of ${short(blocks.total)} blocks`],
    ["Prefix cache hits", tokens.looked_up ? `${short((100 * tokens.cached) / tokens.looked_up)} %` : "–",
      `${short(tokens.cached)} of ${short(tokens.looked_up)} prompt tokens`],
  ];
  const node = byId("tiles");
  while (node.childElementCount < tiles.length) {
    node.append(element("div", { class: "tile" }, element("h2"), element("p", { class: "value" }), element("p")));
  }
  tiles.forEach((texts, index) => [...node.children[index].children].forEach((child, at) => setText(child, texts[at])));
}

function showRequests({ data, has_more: hasMore, problem }) {
  const body = byId("requests").tBodies[0];
  const live = new Set(data.map(({ id }) => id));
  for (const [id, row] of rows) {
    if (live.has(id)) continue;
    row.remove();
    rows.delete(id);
  }
  for (const { id, state } of data) {
    if (!rows.has(id)) {
      rows.set(id, newRow(id));
      body.append(rows.get(id));
    }
    const more = state.length > MOST_SENTENCES ? [`and ${state.length - MOST_SENTENCES} more`] : [];
    setText(rows.get(id).cells[1], [...state.slice(0, MOST_SENTENCES), ...more].join("\n"));
  }
  byId("requests").hidden = !data.length;
  const note = data.length ? "" : "No request is being served.";
  setText(byId("requests-note"), problem ?? (hasMore ? "There are more." : note));
}

function newRow(id) {
  const button = element("button", { type: "button", class: "quiet", "aria-label": `End ${id}` }, "End");
  button.addEventListener("click", async () => {
    button.disabled = true;
    // It may have ended by itself: either way, the next figures show what is left.
    await call(`v1/requests/${encodeURIComponent(id)}`, { method: "DELETE" }).catch((error) => showTrouble(error.message));
    refresh();
  });
  return element("tr", {}, element("td", { class: "id" }, id), element("td", { class: "state" }), element("td", {}, button));
}

function showTenants(tenants) {
  byId("tenants-card").hidden = !tenants.length;
  const left = (number) => (number === null ? "no limit" : short(number));
  byId("tenants").tBodies[0].replaceChildren(
    ...tenants.map((one) => element("tr", {}, ...[
      one.name, short(one.calls), left(one.requests_left), left(one.tokens_left),
    ].map((text) => element("td", {}, text)))),
  );
}

document.addEventListener("visibilitychange", refresh);
view.addEventListener("show", refresh);
