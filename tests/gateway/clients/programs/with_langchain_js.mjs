// LangChain for JavaScript: ChatOpenAI over both of OpenAI's APIs, and ChatAnthropic.
import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const url = process.env.URL;
const openai = { model: "scripted", apiKey: "none", maxRetries: 0, configuration: { baseURL: `${url}/v1` } };
const models = {
  chat: new ChatOpenAI(openai),
  responses: new ChatOpenAI({ ...openai, useResponsesApi: true }),
  anthropic: new ChatAnthropic({ model: "scripted", apiKey: "none", maxRetries: 0, anthropicApiUrl: url }),
};
const weather = tool(async () => "rain", { name: "weather", description: "The weather.", schema: z.object({ city: z.string() }) });
const City = z.object({ city: z.string(), people: z.number().int() });
const found = {};
for (const [name, model] of Object.entries(models)) {
  const asked = [];
  const whole = await model.invoke("Say hello.");
  let streamed = "";
  for await (const part of await model.stream("Say hello.")) streamed += part.text;
  const bound = model.bindTools([weather]);
  const turn = async (stream) => {
    const talk = [new HumanMessage("Is it wet in Oslo?")];
    for (;;) {
      let answer;
      if (stream) for await (const part of await bound.stream(talk)) answer = answer === undefined ? part : answer.concat(part);
      else answer = await bound.invoke(talk);
      talk.push(answer);
      if (!answer.tool_calls?.length) return talk;
      for (const call of answer.tool_calls) {
        asked.push(call.args.city);
        talk.push(new ToolMessage({ tool_call_id: call.id, content: await weather.invoke(call.args) }));
      }
    }
  };
  const talk = await turn(false);
  const talkStreamed = await turn(true);
  const next = await bound.invoke([...talk, new HumanMessage("And tomorrow?")]);
  const parsed = await model.withStructuredOutput(City, { method: "jsonSchema" }).invoke("Name a city.");
  found[name] = {
    whole: whole.text,
    tokens: whole.usage_metadata.output_tokens > 0,
    streamed,
    tool: talk.at(-1).text,
    toolStreamed: talkStreamed.at(-1).text,
    next: next.text,
    parsed,
    asked,
  };
}
console.log(JSON.stringify(found));
