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

// Fields of the specification that say what happens anyway, and a call that max_tokens cuts off, sent back as it came.
const same = { store: false, verbosity: "low", modalities: ["text"], prediction: null, functions: [], web_search_options: null, audio: null, n: 1 };
const allowed = { type: "allowed_tools", allowed_tools: { mode: "auto", tools: [{ type: "function", function: { name: "weather" } }] } };
const offered = [{ type: "function", function: { name: "weather", parameters } }];
const cut = await client.chat.completions.create({ model, ...same, tools: offered, tool_choice: allowed, max_completion_tokens: 40, messages: say("Is it wet in Oslo?") });
found.cut = [cut.choices[0].finish_reason, cut.choices[0].message.tool_calls.length];
const afterCut = await client.chat.completions.create({ model, tools: offered, messages: [...say("Is it wet in Oslo?"), cut.choices[0].message, ...say("And tomorrow?")] });
found.afterCut = afterCut.choices[0].message.content;
const nulls = { conversation: null, previous_response_id: null, prompt: null, max_tool_calls: null, background: false, truncation: "disabled" };
const responseCut = await client.responses.create({ model, ...nulls, tools, max_output_tokens: 40, input: say("Is it wet in Oslo?") });
found.responseCut = responseCut.status;
const responseAfter = await client.responses.create({ model, tools, input: [...say("Is it wet in Oslo?"), ...responseCut.output, ...say("And tomorrow?")] });
found.responseAfterCut = responseAfter.output_text;
const quiet = client.responses.stream({ model, input: "Say hello.", stream_options: { include_obfuscation: false } });
found.quiet = (await quiet.finalResponse()).output_text;

found.completion = "";
for await (const part of await client.completions.create({ model, prompt: "Say hello.", max_tokens: 50, stream: true })) found.completion += part.choices[0]?.text ?? "";

found.asked = asked;
found.error = await client.chat.completions.create({ model: "gpt-5", messages: say("Say hello.") }).catch((error) => error.constructor.name);
console.log(JSON.stringify(found));
