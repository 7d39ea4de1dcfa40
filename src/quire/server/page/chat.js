// The chat: a conversation, its requests as streams, and what is shown of the answers.

import { ApiError, call, events } from "./api.js";
import { byId, duration, element, setText, short } from "./dom.js";
import { SettingError, requestFields, systemMessage } from "./parameters.js";

const list = byId("messages");
const prompt = byId("prompt");
const model = byId("model");

let messages = []; // as the API takes them, without the system message
let openCalls = []; // tool calls whose results the user still has to write
let running = null; // the AbortController of the answer that is being streamed

/** An answer that grows: its reasoning and its tool calls can be folded away. */
class Answer {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.startedAt = performance.now();
    this.firstAt = null;
    this.meta = element("p", { class: "meta" });
    this.node = element("article", { class: "assistant", "aria-label": "Answer" }, this.meta);
    append(this.node);
  }

  /** Takes an event of the stream. */
  take(event) {
    if (event.error) throw new ApiError(200, event.error);
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls = [] } = choice.delta;
    if (content || reasoning || calls.length) this.firstAt ??= performance.now();
    if (reasoning) this.#takeReasoning(reasoning);
    if (content) this.#takeContent(content);
    for (const part of calls) this.#takeCall(part);
    this.finishReason = choice.finish_reason ?? this.finishReason;
  }

  /** Shows how the answer ended, and its figures. */
  end(reason, ignored) {
    this.node.classList.add("ended");
    if (this.reasoningFold) setText(this.reasoningFold.summary, "Reasoning");
    const seconds = (performance.now() - (this.firstAt ?? this.startedAt)) / 1000;
    const { usage } = this;
    const parts = [];
    if (usage) parts.push(`${short(usage.completion_tokens)} tokens`);
    if (usage?.completion_tokens > 1) parts.push(`${short((usage.completion_tokens - 1) / seconds)} per second`);
    if (this.firstAt) parts.push(`first after ${duration((this.firstAt - this.startedAt) / 1000)}`);
    if (usage) parts.push(`prompt ${short(usage.prompt_tokens)}, ${short(cachedTokens(usage))} cached`);
    if (reason !== "stop" && reason !== "tool_calls") parts.push(ENDS[reason] ?? reason);
    if (ignored) parts.push(`without effect: ${ignored}`);
    setText(this.meta, parts.join(" · "));
  }

  /** Returns the answer as a message of the conversation; null if there is nothing to continue from. */
  message() {
    const calls = this.completeCalls();
    if (!this.content && !calls.length) return null;
    return {
      role: "assistant",
      content: this.content || null,
      ...(this.reasoning && { reasoning_content: this.reasoning }),
      ...(calls.length && { tool_calls: calls }),
    };
  }

  /** Returns its calls, unless it was cut off: their arguments would be, too. */
  completeCalls() {
    return this.finishReason === "tool_calls" ? this.calls.map(({ message }) => message) : [];
  }

  #takeReasoning(text) {
    this.reasoning += text;
    this.reasoningFold ??= this.#fold("Thinking …", "reasoning");
    this.reasoningFold.text.appendData(text);
  }

  #takeContent(text) {
    this.content += text;
    if (!this.text) {
      if (this.reasoningFold) setText(this.reasoningFold.summary, "Reasoning");
      this.text = new Text();
      this.#insert(element("div", { class: "text" }, this.text));
    }
    this.text.appendData(text);
  }

  #takeCall({ index, id, function: part }) {
    const known = this.calls[index];
    if (!known) {
      const message = { id, type: "function", function: { name: part.name, arguments: part.arguments ?? "" } };
      const fold = this.#fold(`Calls ${part.name}`, "call");
      fold.text.appendData(message.function.arguments);
      this.calls[index] = { message, fold };
    } else {
      known.message.function.arguments += part.arguments ?? "";
      known.fold.text.appendData(part.arguments ?? "");
    }
  }

  #fold(title, kind) {
    const summary = element("summary", {}, title);
    const text = new Text();
    this.#insert(element("details", { class: `fold ${kind}` }, summary, element("div", { class: "text" }, text)));
    return { summary, text };
  }

  #insert(node) {
    this.node.insertBefore(node, this.meta);
  }
}

const ENDS = { length: "cut off at the maximum", aborted: "stopped", failed: "failed" };
const cachedTokens = (usage) => usage.prompt_tokens_details?.cached_tokens ?? 0;

/** Sends what is in the field: a message, or the result of a tool that the model called. */
async function send() {
  const text = prompt.value;
  if (running || (!text.trim() && !openCalls.length)) return;
  const opened = openCalls.shift();
  const message = opened
    ? { role: "tool", tool_call_id: opened.id, content: text }
    : { role: "user", content: text };
  let fields;
  try {
    fields = requestFields();
  } catch (error) {
    if (!(error instanceof SettingError)) throw error;
    if (opened) openCalls.unshift(opened);
    setText(byId("chat-status"), error.message);
    return;
  }
  prompt.value = "";
  messages.push(message);
  append(element("article", { class: message.role, "aria-label": opened ? "Result" : "Question" },
    element("div", { class: "text" }, text)));
  if (!openCalls.length) await answer(fields);
  showState();
}

/** Streams the answer to the conversation so far. */
async function answer(fields) {
  const controller = (running = new AbortController());
  const conversation = messages; // of which there may be another when the answer ends
  const shown = new Answer();
  showState();
  let ignored = "";
  let reason = "aborted";
  try {
    const system = systemMessage();
    const response = await call("v1/chat/completions", {
      method: "POST",
      signal: controller.signal,
      body: {
        model: model.dataset.name,
        messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
        stream: true,
        stream_options: { include_usage: true },
        ...fields,
      },
    });
    ignored = response.headers.get("X-Ignored-Parameters");
    for await (const event of events(response)) {
      const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
      shown.take(event);
      if (isAtEnd) list.scrollTop = list.scrollHeight;
    }
    reason = shown.finishReason;
    openCalls = shown.completeCalls();
  } catch (error) {
    if (!controller.signal.aborted) {
      reason = "failed";
      const field = error.param ? ` (${error.param})` : "";
      append(element("p", { class: "notice", role: "alert" }, `${error.message}${field}`));
    }
  }
  running = null;
  shown.end(reason, ignored);
  const message = shown.message();
  if (message) conversation.push(message);
  else if (conversation.at(-1)?.role === "user") conversation.pop(); // it can be asked again
  setText(byId("chat-status"), STATUS[reason] ?? "Answered.");
}

const STATUS = { aborted: "Stopped.", failed: "Failed.", length: "Cut off.", tool_calls: "The model calls tools." };

function append(node) {
  list.append(node);
  list.scrollTop = list.scrollHeight;
}

/** Shows what can be done now. */
function showState() {
  byId("send").hidden = Boolean(running);
  byId("stop").hidden = !running;
  if (running) setText(byId("chat-status"), "Answering …");
  const [next] = openCalls;
  prompt.placeholder = next ? `What ${next.function.name} returned` : "Ask something";
  if (!running) prompt.focus();
}

function clear() {
  running?.abort();
  messages = [];
  openCalls = [];
  list.replaceChildren();
  setText(byId("chat-status"), "");
  showState();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("chat").addEventListener("show", () => prompt.focus());
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", clear);
