// The settings of a chat: fields with the limits of the server's own schema, and the part of a request they make.

import { byId, element, short } from "./dom.js";
import { getJson } from "./api.js";

const form = byId("parameters");
const fields = form.elements;

const SAMPLING = {
  temperature: "Temperature",
  top_p: "Top p",
  top_k: "Top k",
  min_p: "Min p",
  max_completion_tokens: "Maximum tokens",
  presence_penalty: "Presence penalty",
  frequency_penalty: "Frequency penalty",
  repetition_penalty: "Repetition penalty",
  seed: "Seed",
  thinking_token_budget: "Thinking budget",
  reasoning_effort: "Reasoning effort",
  stop: "Stop at, one text a line",
};

const STRUCTURE_LABELS = { json_schema: "Schema", regex: "Regular expression", choice: "Answers, one a line" };

const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

/** Says what is wrong with a setting. */
export class SettingError extends Error {}

/** Makes the fields of sampling parameters, with the limits that the server has. */
export async function loadLimits(maxModelLength) {
  const openapi = await getJson("openapi.json");
  const { properties } = openapi.components.schemas.ChatCompletionRequest;
  for (const [name, label] of Object.entries(SAMPLING)) {
    const definition = properties[name];
    const schema = definition?.anyOf?.find((one) => one.type !== "null");
    if (!schema) continue;
    if (name.endsWith("_tokens")) schema.maximum = maxModelLength;
    byId("sampling").append(labelled(label, definition.description, fieldOf(name, schema)));
  }
}

function labelled(label, meaning, [field, limits]) {
  const small = limits ? [element("small", {}, limits)] : [];
  return element("label", { title: meaning ?? "" }, element("span", {}, label, ...small), field);
}

/** Returns a field for a schema, and its limits in words. */
function fieldOf(name, schema) {
  if (schema.enum) {
    const options = ["", ...schema.enum].map((value) => element("option", { value }, value || "default"));
    return [element("select", { name }, ...options), ""];
  }
  if (schema.oneOf) {
    const list = schema.oneOf.find((one) => one.type === "array");
    const field = element("textarea", { name, rows: 1 });
    return [field, `at most ${list.maxItems}`];
  }
  const least = schema.minimum ?? schema.exclusiveMinimum;
  const attributes = { name, type: "number", step: schema.type === "integer" ? 1 : "any", placeholder: "default" };
  if (Number.isSafeInteger(least) || least % 1) attributes.min = least;
  if (schema.maximum <= Number.MAX_SAFE_INTEGER) attributes.max = schema.maximum;
  const field = element("input", attributes);
  const isExclusive = schema.exclusiveMinimum !== undefined;
  if (isExclusive) field.addEventListener("input", () => requireAbove(field, schema.exclusiveMinimum));
  return [field, inWords(attributes, isExclusive)];
}

function requireAbove(field, bound) {
  const isTooSmall = field.value !== "" && field.valueAsNumber <= bound;
  field.setCustomValidity(isTooSmall ? `The value must be above ${bound}.` : "");
}

function inWords({ min, max }, isExclusive) {
  if (min === undefined) return "";
  const from = `${isExclusive ? "above " : ""}${min}`;
  return max === undefined ? `${isExclusive ? from : `at least ${from}`}` : `${from} to ${short(max)}`;
}

/** Returns the settings as fields of a request; throws `SettingError`. */
export function requestFields() {
  const wrong = [...fields].find((field) => field.willValidate && !field.checkValidity());
  if (wrong) {
    byId("settings").open = true;
    wrong.reportValidity();
    const label = SAMPLING[wrong.name] ?? wrong.name;
    throw new SettingError(`${label}: ${wrong.validationMessage}`);
  }
  return { ...samplingFields(), ...structureFields(), ...toolFields() };
}

/** Returns the system message; empty if there is none. */
export const systemMessage = () => fields.system.value.trim();

function samplingFields() {
  const found = {};
  for (const name of Object.keys(SAMPLING)) {
    const field = fields[name];
    if (!field || field.value === "") continue;
    if (name === "stop") found.stop = lines(field.value);
    else found[name] = field.type === "number" ? field.valueAsNumber : field.value;
  }
  return found;
}

function structureFields() {
  const kind = fields.structure.value;
  const text = fields.structure_text.value;
  switch (kind) {
    case "json_object":
      return { response_format: { type: kind } };
    case "json_schema":
      return { response_format: { type: kind, json_schema: { name: "answer", schema: json("Schema", text) } } };
    case "regex":
      return { structured_outputs: { regex: text } };
    case "choice":
      return { structured_outputs: { choice: lines(text) } };
    default:
      return {};
  }
}

function toolFields() {
  const text = fields.tools.value.trim();
  if (!text) return {};
  const choice = fields.tool_choice.value;
  return { tools: json("Functions", text), ...(choice && { tool_choice: choice }) };
}

function json(label, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingError(`${label}: ${error.message}`);
  }
}

const lines = (text) => text.split("\n").filter((line) => line !== "");

fields.structure.addEventListener("change", () => {
  const label = STRUCTURE_LABELS[fields.structure.value];
  fields.structure_text.closest("label").hidden = !label;
  byId("structure-label").textContent = label ?? "";
});
byId("example-tool").addEventListener("click", () => {
  fields.tools.value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
});
form.addEventListener("submit", (event) => event.preventDefault());
