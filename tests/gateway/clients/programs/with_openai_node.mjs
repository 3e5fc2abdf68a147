// openai for Node.js: chat, responses and completions; whole, streamed, tools, structured output.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: "none", maxRetries: 0 });
const model = "scripted";
const found = {};
const say = (content) => [{ role: "user", content }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const City = z.object({ city: z.string(), people: z.number().int() });

found.models = [];
for await (const one of client.models.list()) found.models.push(one.id);

const whole = await client.chat.completions.create({ model, messages: say("Say hello.") });
found.whole = whole.choices[0].message.content;

const stream = client.chat.completions.stream({ model, messages: say("Say hello."), stream_options: { include_usage: true } });
found.deltas = "";
stream.on("content", (delta) => (found.deltas += delta));
found.streamed = await stream.finalContent();
found.usage = (await stream.totalUsage()).completion_tokens;

const asked = [];
const weather = {
  type: "function",
  function: { name: "weather", description: "The weather.", parameters, parse: JSON.parse, function: ({ city }) => (asked.push(city), "rain") },
};
const runner = client.chat.completions.runTools({ model, messages: say("Is it wet in Oslo?"), tools: [weather] });
found.tool = await runner.finalContent();
const runnerStreamed = client.chat.completions.runTools({ model, stream: true, messages: say("Is it wet in Oslo?"), tools: [weather] });
found.toolStreamed = await runnerStreamed.finalContent();
const next = await client.chat.completions.create({ model, messages: [...runner.messages, ...say("And tomorrow?")], tools: [{ ...weather, function: { name: "weather", parameters } }] });
found.next = next.choices[0].message.content;

const parsed = await client.chat.completions.parse({ model, messages: say("Name a city."), response_format: zodResponseFormat(City, "city") });
found.parsed = parsed.choices[0].message.parsed;

const response = await client.responses.create({ model, input: "Say hello." });
found.response = response.output_text;
const events = client.responses.stream({ model, input: "Say hello." });
for await (const event of events) found.lastEvent = event.type;
found.responseStreamed = (await events.finalResponse()).output_text;
const tools = [{ type: "function", name: "weather", parameters, strict: true }];
const talk = say("Is it wet in Oslo?");
const called = await client.responses.create({ model, input: talk, tools });
talk.push(...called.output);
for (const item of called.output) {
  if (item.type !== "function_call") continue;
  asked.push(JSON.parse(item.arguments).city);
  talk.push({ type: "function_call_output", call_id: item.call_id, output: "rain" });
}
const answered = await client.responses.create({ model, input: talk, tools });
found.responseTool = answered.output_text;
talk.push(...answered.output, ...say("And tomorrow?"));
found.responseNext = (await client.responses.create({ model, input: talk, tools })).output_text;
const typed = await client.responses.parse({ model, input: "Name a city.", text: { format: zodTextFormat(City, "city") } });
found.responseParsed = typed.output_parsed;

found.completion = "";
for await (const part of await client.completions.create({ model, prompt: "Say hello.", max_tokens: 50, stream: true })) found.completion += part.choices[0]?.text ?? "";

found.asked = asked;
found.error = await client.chat.completions.create({ model: "gpt-5", messages: say("Say hello.") }).catch((error) => error.constructor.name);
console.log(JSON.stringify(found));
