// Try a client library for Node.js on a server of recipes/tiny/agent.yaml: node tried.mjs CLIENT URL
//
// It prints what tried.py prints of a client in Python; without arguments, the names of all clients.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

const HELLO = "What does the lamp cost?";
const SAID = "I have no tool for this.";
const QUESTION = "What do the lamp and the clock cost together?";
const ANSWER = "The lamp and the clock cost 623 together.";
const PRICES = { lamp: 348, clock: 275 };
const KEY = "any";
const MODEL = "agent";
const [name, url] = process.argv.slice(2);

const { z } = await import("zod");
const functions = { add: ({ a, b }) => a + b, price: ({ item }) => PRICES[item] };
const schemas = {
  add: z.object({ a: z.number().int(), b: z.number().int() }),
  price: z.object({ item: z.string() }),
};
const names = Object.keys(functions);
const Total = z.object({ total: z.number().int() });
const parameters = (tool) => z.toJSONSchema(schemas[tool]);
const user = (content) => ({ role: "user", content });
const gathered = async (pieces, text) => {
  let said = "";
  for await (const piece of pieces) said += text(piece) ?? "";
  return said;
};

async function openai() {
  const { default: OpenAI } = await import("openai");
  const { zodResponseFormat } = await import("openai/helpers/zod");
  const chats = new OpenAI({ baseURL: `${url}/v1`, apiKey: KEY, maxRetries: 0 }).chat.completions;
  const asked = { model: MODEL, temperature: 0 };
  return {
    chat: async () => (await chats.create({ ...asked, messages: [user(HELLO)] })).choices[0].message.content,
    stream: () => chats.stream({ ...asked, messages: [user(HELLO)] }).finalContent(),
    tools: () =>
      chats
        .runTools({
          ...asked,
          messages: [user(QUESTION)],
          tools: names.map((tool) => ({
            type: "function",
            function: {
              name: tool,
              parameters: parameters(tool),
              parse: JSON.parse,
              function: (given) => String(functions[tool](given)),
            },
          })),
        })
        .finalContent(),
    form: async () => {
      const form = { messages: [user(QUESTION)], response_format: zodResponseFormat(Total, "total") };
      return (await chats.parse({ ...asked, ...form })).choices[0].message.parsed;
    },
  };
}

async function openaiResponses() {
  const { default: OpenAI } = await import("openai");
  const { zodTextFormat } = await import("openai/helpers/zod");
  const responses = new OpenAI({ baseURL: `${url}/v1`, apiKey: KEY, maxRetries: 0 }).responses;
  const asked = { model: MODEL, temperature: 0 };
  return {
    chat: async () => (await responses.create({ ...asked, input: HELLO })).output_text,
    stream: async () => (await responses.stream({ ...asked, input: HELLO }).finalResponse()).output_text,
    tools: async () => {
      const tools = names.map((tool) => ({ type: "function", name: tool, parameters: parameters(tool), strict: true }));
      const input = [user(QUESTION)];
      for (;;) {
        const answer = await responses.create({ ...asked, input, tools });
        input.push(...answer.output);
        const calls = answer.output.filter((item) => item.type === "function_call");
        if (!calls.length) return answer.output_text;
        for (const { call_id, name: called, arguments: given } of calls)
          input.push({ type: "function_call_output", call_id, output: String(functions[called](JSON.parse(given))) });
      }
    },
    form: async () => {
      const form = { input: QUESTION, text: { format: zodTextFormat(Total, "total") } };
      return (await responses.parse({ ...asked, ...form })).output_parsed;
    },
  };
}

async function anthropic() {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const { betaZodTool } = await import("@anthropic-ai/sdk/helpers/beta/zod");
  const { zodOutputFormat } = await import("@anthropic-ai/sdk/helpers/zod");
  const client = new Anthropic({ baseURL: url, apiKey: KEY, maxRetries: 0 });
  const asked = { model: MODEL, temperature: 0, max_tokens: 500 };
  const last = (message) => message.content.at(-1).text;
  return {
    chat: async () => last(await client.messages.create({ ...asked, messages: [user(HELLO)] })),
    stream: () => client.messages.stream({ ...asked, messages: [user(HELLO)] }).finalText(),
    tools: async () => {
      const tools = names.map((tool) =>
        betaZodTool({
          name: tool,
          description: tool,
          inputSchema: schemas[tool],
          run: (given) => String(functions[tool](given)),
        }),
      );
      const thinking = { type: "adaptive" };
      return last(await client.beta.messages.toolRunner({ ...asked, thinking, messages: [user(QUESTION)], tools }));
    },
    form: async () => {
      const form = { messages: [user(QUESTION)], output_config: { format: zodOutputFormat(Total) } };
      return (await client.messages.parse({ ...asked, ...form })).parsed_output;
    },
  };
}

async function langchain(model, options = {}) {
  const { createAgent, tool } = await import("langchain");
  return {
    chat: async () => (await model.invoke(HELLO)).text,
    stream: async () => gathered(await model.stream(HELLO), (piece) => piece.text),
    tools: async () => {
      const made = names.map((each) =>
        tool((given) => String(functions[each](given)), { name: each, description: each, schema: schemas[each] }),
      );
      const { messages } = await createAgent({ model, tools: made }).invoke({ messages: [user(QUESTION)] });
      return messages.at(-1).text;
    },
    form: () => model.withStructuredOutput(Total, options).invoke(QUESTION),
  };
}

async function langchainOpenai(useResponsesApi = false) {
  const { ChatOpenAI } = await import("@langchain/openai");
  const configuration = { baseURL: `${url}/v1` };
  const asked = { model: MODEL, temperature: 0, apiKey: KEY, maxRetries: 0, useResponsesApi, configuration };
  return langchain(new ChatOpenAI(asked));
}

async function langchainAnthropic() {
  const { ChatAnthropic } = await import("@langchain/anthropic");
  const options = { anthropicApiUrl: url, apiKey: KEY, model: MODEL, maxTokens: 500, maxRetries: 0, temperature: 0 };
  return langchain(new ChatAnthropic(options), { method: "jsonSchema" });
}

async function vercel(model, providerOptions = {}) {
  const { generateText, stepCountIs, streamText, tool } = await import("ai");
  const ai = await import("ai");
  const asked = { model, temperature: 0, maxRetries: 0, maxOutputTokens: 500 };
  return {
    chat: async () => (await generateText({ ...asked, prompt: HELLO })).text,
    stream: () => gathered(streamText({ ...asked, prompt: HELLO }).textStream, (piece) => piece),
    tools: async () => {
      const tools = Object.fromEntries(
        names.map((each) => [
          each,
          tool({ description: each, inputSchema: schemas[each], execute: (given) => String(functions[each](given)) }),
        ]),
      );
      const stopWhen = stepCountIs(6);
      return (await generateText({ ...asked, prompt: QUESTION, tools, stopWhen, providerOptions })).text;
    },
    form: async () => (await ai.generateObject({ ...asked, prompt: QUESTION, schema: Total })).object,
  };
}

async function vercelCompatible() {
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  const options = { name: "local", baseURL: `${url}/v1`, apiKey: KEY, supportsStructuredOutputs: true };
  return vercel(createOpenAICompatible({ ...options, includeUsage: true })(MODEL));
}

async function vercelOpenai() {
  const { createOpenAI } = await import("@ai-sdk/openai");
  // Nothing is stored here, so items are sent again and not by reference
  return vercel(createOpenAI({ baseURL: `${url}/v1`, apiKey: KEY })(MODEL), { openai: { store: false } });
}

async function vercelAnthropic() {
  const { createAnthropic } = await import("@ai-sdk/anthropic");
  const thinking = { type: "enabled", budgetTokens: 1024 };
  return vercel(createAnthropic({ baseURL: `${url}/v1`, apiKey: KEY })(MODEL), { anthropic: { thinking } });
}

async function openaiAgents(useResponses = false) {
  const { default: OpenAI } = await import("openai");
  const agents = await import("@openai/agents");
  agents.setTracingDisabled(true);
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: KEY, maxRetries: 0 });
  const Model = useResponses ? agents.OpenAIResponsesModel : agents.OpenAIChatCompletionsModel;
  const agent = (options) =>
    new agents.Agent({
      name: "agent",
      model: new Model(client, MODEL),
      modelSettings: { temperature: 0 },
      ...options,
    });
  const run = async (text, options = {}) => (await agents.run(agent(options), text)).finalOutput;
  return {
    chat: () => run(HELLO),
    stream: async () => gathered((await agents.run(agent({}), HELLO, { stream: true })).toTextStream(), (piece) => piece),
    tools: () =>
      run(QUESTION, {
        tools: names.map((each) =>
          agents.tool({
            name: each,
            description: each,
            parameters: schemas[each],
            execute: (given) => String(functions[each](given)),
          }),
        ),
      }),
    form: () => run(QUESTION, { outputType: Total }),
  };
}

const CLIENTS = {
  openai: ["openai", openai],
  "openai+responses": ["openai", openaiResponses],
  "@anthropic-ai/sdk": ["@anthropic-ai/sdk", anthropic],
  "@langchain/openai": ["@langchain/openai", langchainOpenai],
  "@langchain/openai+responses": ["@langchain/openai", () => langchainOpenai(true)],
  "@langchain/anthropic": ["@langchain/anthropic", langchainAnthropic],
  "ai+@ai-sdk/openai-compatible": ["ai", vercelCompatible],
  "ai+@ai-sdk/openai": ["ai", vercelOpenai],
  "ai+@ai-sdk/anthropic": ["ai", vercelAnthropic],
  "@openai/agents": ["@openai/agents", openaiAgents],
  "@openai/agents+responses": ["@openai/agents", () => openaiAgents(true)],
};

function versionOf(name) {
  // Not every package lets its own package.json be imported
  for (const folder of createRequire(import.meta.url).resolve.paths(name))
    try {
      return JSON.parse(readFileSync(path.join(folder, name, "package.json"))).version;
    } catch (error) {
      if (error.code !== "ENOENT") throw error;
    }
  throw new Error(`${name} is not installed`);
}

async function judged(way, client) {
  const expected = { chat: SAID, stream: SAID, tools: ANSWER };
  try {
    const said = await client[way]();
    const isRight = way === "form" ? Number.isInteger(said.total) : said === expected[way];
    return isRight ? "ok" : `said ${JSON.stringify(said)}`.slice(0, 600);
  } catch (error) {
    return `${error.name}: ${error.responseBody ?? error.message}`.slice(0, 600);
  }
}

if (name === undefined) {
  console.log(JSON.stringify(Object.keys(CLIENTS)));
} else {
  const [from, made] = CLIENTS[name];
  const client = await made();
  const ways = {};
  for (const way of ["chat", "stream", "tools", "form"]) ways[way] = await judged(way, client);
  console.log(JSON.stringify({ version: versionOf(from), ways }));
}
