// The server's API. Paths are relative to the page, which may be served below a prefix.

import { byId } from "./dom.js";

const KEY = "quire-api-key";
const WANTED = "The server wants a key.";
const dialog = byId("key-dialog");
let asking = null; // the dialog's outcome, while it is open
let hasDeclined = false; // a dialog that opened by itself is not opened again
let ready = null; // whether the server wants a key is known, and if so it was asked for

/** What the server refused a request with. */
export class ApiError extends Error {
  constructor(status, detail) {
    super(detail.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.param = detail.param ?? null;
  }
}

/** Sends a request, with the API key if there is one, which is asked for where it is wanted; throws `ApiError`. */
export async function call(path, { method = "GET", body, signal } = {}) {
  await (ready ??= requireKey());
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { "Content-Type": "application/json" };
    if (key) headers.Authorization = `Bearer ${key}`;
    const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
    if (response.ok) return response;
    const error = new ApiError(response.status, await detailOf(response));
    if (response.status !== 401) throw error;
    const hasAnother = sessionStorage.getItem(KEY) !== key; // entered while this request was under way
    if (!hasAnother && !(await wantKey(key ? "The server does not know this key." : WANTED))) throw error;
  }
}

/** Asks for a key before anything is refused, since browsers report refusals as errors of the page. */
async function requireKey() {
  try {
    const { needs_key: needsKey } = await (await fetch("page/server.json")).json();
    if (needsKey && !sessionStorage.getItem(KEY)) await wantKey(WANTED);
  } catch (error) {
    ready = null;
    throw error;
  }
}

/** Asks for another key unless the user has declined to enter one; returns whether there is one. */
async function wantKey(problem) {
  if (hasDeclined) return false;
  const isChanged = await askForKey(problem);
  hasDeclined = !isChanged;
  return isChanged;
}

/** Returns the JSON that a path answers. */
export const getJson = async (path, options) => (await call(path, options)).json();

/** Has the user enter an API key, or leave it as it is; returns whether there is another one. */
export function askForKey(problem = "") {
  asking ??= new Promise((resolve) => {
    byId("key-problem").textContent = problem;
    const field = byId("key-form").elements.key;
    field.value = "";
    dialog.addEventListener("close", () => {
      asking = null;
      resolve(dialog.returnValue === "changed");
    }, { once: true });
    dialog.returnValue = "";
    dialog.showModal();
    field.focus();
  });
  return asking;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = event.target.elements.key.value.trim();
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  dialog.close("changed");
});
byId("cancel-key").addEventListener("click", () => dialog.close());

/** Yields the data of an answer's server-sent events, up to the one that says it is complete. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let received = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    const lines = (received + value).split("\n");
    received = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

async function detailOf(response) {
  try {
    return (await response.json()).error ?? {};
  } catch {
    return {}; // not from Quire: a proxy's page
  }
}
