// openai for Node: chat completions and responses.
import OpenAI from "openai";
import {
  answer, baseURL, cities, maxTokens, modelName as model, question, report, same, secondAnswer, secondQuestion,
  streamed, weather, weatherQuestion,
} from "./checks.mjs";

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: cities }, days: { enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const user = (content) => ({ role: "user", content });

async function chat(messages, fields = {}) {
  return (await client.chat.completions.create({ model, messages, ...fields })).choices[0].message;
}

const call = () =>
  chat([user(weatherQuestion)], { tools, tool_choice: "required", parallel_tool_calls: false });

await report({
  text: async () => {
    same((await chat([user(question)])).content, answer);
    same((await client.responses.create({ model, input: question })).output_text, answer);
  },
  streaming: async () => {
    const pieces = [];
    const chunks = await client.chat.completions.create({ model, messages: [user(question)], stream: true });
    for await (const chunk of chunks) pieces.push(chunk.choices[0]?.delta?.content ?? "");
    streamed(pieces);
    const deltas = [];
    for await (const event of await client.responses.create({ model, input: question, stream: true })) {
      if (event.type === "response.output_text.delta") deltas.push(event.delta);
    }
    streamed(deltas);
  },
  tools: async () => {
    weather(JSON.parse((await call()).tool_calls[0].function.arguments));
    const flat = [{ type: "function", name: "get_weather", parameters, strict: true }];
    const chosen = { type: "function", name: "get_weather" };
    const response = await client.responses.create({ model, input: weatherQuestion, tools: flat, tool_choice: chosen });
    weather(JSON.parse(response.output.find((item) => item.type === "function_call").arguments));
  },
  "structured output": async () => {
    const json_schema = { name: "weather", schema: parameters, strict: true };
    const message = await chat([user(weatherQuestion)], { response_format: { type: "json_schema", json_schema } });
    weather(JSON.parse(message.content));
  },
  "second turn": async () => {
    const first = await chat([user(question)]);
    same((await chat([user(question), first, user(secondQuestion)])).content, secondAnswer);
    const called = await call();
    const result = { role: "tool", tool_call_id: called.tool_calls[0].id, content: "rain" };
    const last = await chat([user(weatherQuestion), called, result], { tools, max_tokens: maxTokens });
    if (!last.content) throw new Error("no answer from the tool's result");
  },
});
