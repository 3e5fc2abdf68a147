// Anthropic's SDK for Node.js: messages whole and streamed, its own loop of tools, thinking, counting, models.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const client = new Anthropic({ baseURL: process.env.URL, apiKey: "none", maxRetries: 0 });
const found = {};
const say = (content) => [{ role: "user", content }];
const common = { model: "scripted", max_tokens: 500 };
const text = (message) => message.content.filter((block) => block.type === "text").map((block) => block.text).join("");
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

found.models = [];
for await (const one of client.models.list()) found.models.push([one.id, one.type, one.display_name, typeof one.created_at]);
found.model = (await client.models.retrieve("scripted")).id;

const whole = await client.messages.create({ ...common, messages: say("Say hello.") });
found.whole = text(whole);
found.tokens = whole.usage.output_tokens > 0;
found.counted = (await client.messages.countTokens({ model: "scripted", messages: say("Say hello.") })).input_tokens === whole.usage.input_tokens;

const stream = client.messages.stream({ ...common, messages: say("Say hello.") });
found.streamed = "";
stream.on("text", (delta) => (found.streamed += delta));
await stream.finalMessage();

const thinking = { type: "enabled", budget_tokens: 1024 };
const context_management = { edits: [{ type: "clear_thinking_20251015", keep: "all" }] };
const thought = await client.beta.messages.create({ ...common, max_tokens: 2000, thinking, messages: say("Say hello."), context_management, mcp_servers: [], betas: ["context-management-2025-06-27"] });
found.thinking = thought.content.map((block) => block.type);

const asked = [];
const weather = betaTool({ name: "weather", description: "The weather.", inputSchema: schema, run: ({ city }) => (asked.push(city), "rain") });
const loop = (stream) => client.beta.messages.toolRunner({ ...common, messages: say("Is it wet in Oslo?"), tools: [weather], stream });
found.tool = text(await loop(false));
let last;
for await (const one of loop(true)) last = await one.finalMessage();
found.toolStreamed = text(last);

const tools = [{ name: "weather", input_schema: schema }];
const talk = say("Is it wet in Oslo?");
const called = await client.messages.create({ ...common, messages: talk, tools });
const results = called.content.filter((block) => block.type === "tool_use").map((block) => ({ type: "tool_result", tool_use_id: block.id, content: [{ type: "text", text: "rain" }] }));
talk.push({ role: "assistant", content: called.content }, { role: "user", content: results });
const answered = await client.messages.create({ ...common, messages: talk, tools });
talk.push({ role: "assistant", content: answered.content }, ...say("And tomorrow?"));
found.next = text(await client.messages.create({ ...common, messages: talk, tools }));

// A call that max_tokens cuts off goes back as it came.
const cut = await client.messages.create({ ...common, max_tokens: 40, messages: say("Is it wet in Oslo?"), tools });
found.cut = cut.stop_reason;
const history = [...say("Is it wet in Oslo?"), { role: "assistant", content: cut.content }, ...say("And tomorrow?")];
found.afterCut = await client.messages.create({ ...common, messages: history, tools }).then(text, (error) => error.message);

found.asked = asked;
found.error = await client.messages.create({ ...common, model: "claude", messages: say("Say hello.") }).catch((error) => error.constructor.name);
console.log(JSON.stringify(found));
