// Vercel AI SDK with @ai-sdk/openai-compatible, which takes chat completions.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { reportOf } from "./ai_sdk_checks.mjs";
import { baseURL, modelName } from "./checks.mjs";

const provider = createOpenAICompatible({ name: "quire", baseURL, supportsStructuredOutputs: true });
await reportOf(provider(modelName));
