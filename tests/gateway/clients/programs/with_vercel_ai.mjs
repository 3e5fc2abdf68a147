// Vercel's ai with its providers for OpenAI, OpenAI-compatible services and Anthropic.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = `${process.env.URL}/v1`;
const openai = createOpenAI({ baseURL: url, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "kvforge", baseURL: url, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true });
const anthropic = createAnthropic({ baseURL: url, apiKey: "none" });
const models = {
  compatible: compatible("scripted"),
  chat: openai.chat("scripted"),
  responses: openai.responses("scripted"),
  anthropic: anthropic("scripted"),
};
const found = {};
for (const [name, model] of Object.entries(models)) {
  const asked = [];
  const weather = tool({
    description: "The weather.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => (asked.push(city), "rain"),
  });
  const options = { model, maxRetries: 0, tools: { weather }, stopWhen: stepCountIs(4) };
  const whole = await generateText({ ...options, prompt: "Say hello." });
  const streamed = streamText({ ...options, prompt: "Say hello." });
  let text = "";
  for await (const part of streamed.textStream) text += part;
  const called = await generateText({ ...options, prompt: "Is it wet in Oslo?" });
  const calledStreamed = streamText({ ...options, prompt: "Is it wet in Oslo?" });
  const messages = [{ role: "user", content: "Is it wet in Oslo?" }, ...called.response.messages, { role: "user", content: "And tomorrow?" }];
  const next = await generateText({ ...options, messages });
  const city = Output.object({ schema: z.object({ city: z.string(), people: z.number().int() }) });
  const parsed = await generateText({ ...options, tools: undefined, output: city, prompt: "Name a city." });
  found[name] = {
    whole: whole.text,
    tokens: whole.usage.outputTokens > 0 && (await streamed.usage).outputTokens > 0,
    streamed: text,
    tool: called.text,
    toolStreamed: await calledStreamed.text,
    next: next.text,
    parsed: parsed.output,
    asked,
  };
}
console.log(JSON.stringify(found));
