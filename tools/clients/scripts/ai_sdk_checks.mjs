// The Vercel AI SDK with a model of either provider.
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import {
  answer, cities, maxTokens, question, report, same, secondAnswer, secondQuestion, streamed, weather,
  weatherQuestion,
} from "./checks.mjs";

const schema = jsonSchema({
  type: "object",
  properties: { city: { type: "string", enum: cities }, days: { enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
});
const user = (content) => ({ role: "user", content });

export async function reportOf(model) {
  const called = [];
  const getWeather = tool({
    description: "Weather of a city",
    inputSchema: schema,
    execute: async (input) => {
      called.push(input);
      return { rain: true };
    },
  });
  await report({
    text: async () => same((await generateText({ model, prompt: question })).text, answer),
    streaming: async () => {
      const pieces = [];
      for await (const piece of streamText({ model, prompt: question }).textStream) pieces.push(piece);
      streamed(pieces);
    },
    tools: async () => {
      const options = { model, tools: { getWeather }, maxOutputTokens: maxTokens };
      const { toolCalls } = await generateText({ ...options, toolChoice: "required", prompt: weatherQuestion });
      weather(toolCalls[0].input);
      const chosen = { type: "tool", toolName: "getWeather" };
      weather((await streamText({ ...options, toolChoice: chosen, prompt: weatherQuestion }).toolCalls)[0].input);
      weather(called[1]);
    },
    "structured output": async () => {
      weather((await generateText({ model, output: Output.object({ schema }), prompt: weatherQuestion })).output);
    },
    "second turn": async () => {
      const first = await generateText({ model, prompt: question });
      const messages = [user(question), ...first.response.messages, user(secondQuestion)];
      same((await generateText({ model, messages })).text, secondAnswer);
      const result = await generateText({
        model,
        tools: { getWeather },
        maxOutputTokens: maxTokens,
        prompt: weatherQuestion,
        stopWhen: stepCountIs(2),
        prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "auto" : "required" }),
      });
      if (!result.text) throw new Error("no answer from the tool's result");
    },
  });
}
