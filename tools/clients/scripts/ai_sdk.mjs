// Vercel AI SDK with @ai-sdk/openai, which takes the Responses API.
import { createOpenAI } from "@ai-sdk/openai";
import { reportOf } from "./ai_sdk_checks.mjs";
import { baseURL, modelName } from "./checks.mjs";

await reportOf(createOpenAI({ baseURL, apiKey: "none" })(modelName));
