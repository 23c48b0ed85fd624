// What OpenAI's package for Node.js sees of a server: node openai.mjs URL
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "any", maxRetries: 0 });
const model = "tiny";
const hello = { model, temperature: 0, messages: [{ role: "user", content: "Hello" }] };
const answer = "Hello! Ask me for a sum, a count or a story.";

const models = [];
for await (const each of client.models.list()) models.push(each.id);
assert.deepEqual(models, [model]);
assert.equal((await client.models.retrieve(model)).id, model);

const chat = await client.chat.completions.create({ ...hello, logprobs: true, top_logprobs: 2 });
assert.equal(chat.choices[0].message.content, answer);
assert.equal(chat.choices[0].finish_reason, "stop");
assert.equal(chat.choices[0].logprobs.content.length, chat.usage.completion_tokens);

let told = "";
let usage = null;
const pieces = await client.chat.completions.create({
  ...hello,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const piece of pieces) {
  told += piece.choices[0]?.delta?.content ?? "";
  usage = piece.usage ?? usage;
}
assert.equal(told, answer);
assert.deepEqual(usage.completion_tokens, chat.usage.completion_tokens);

const runner = client.chat.completions.stream(hello); // which puts the pieces together itself
assert.equal(await runner.finalContent(), answer);

const sums = await client.completions.create({ model, prompt: ["348+275=", "12+30="], temperature: 0 });
assert.deepEqual(sums.choices.map((choice) => choice.text), ["623", "42"]);
const echoed = await client.completions.create({ model, prompt: "1+1=", temperature: 0, echo: true, logprobs: 1 });
assert.equal(echoed.choices[0].text, "1+1=2");
assert.equal(echoed.choices[0].logprobs.token_logprobs[0], null);

const long = { model, prompt: "One day", max_tokens: 1500, stream: true, ignore_eos: true };
const stopped = await client.completions.create(long);
for await (const _ of stopped) break; // its connection is closed, and its request ends

await assert.rejects(client.completions.create({ model, prompt: "a", suffix: "b" }), OpenAI.BadRequestError);
await assert.rejects(client.completions.create({ model: "other", prompt: "a" }), OpenAI.NotFoundError);
const { response } = await client.models.list({ headers: { "x-request-id": "mine-7" } }).withResponse();
assert.equal(response.headers.get("x-request-id"), "mine-7");
console.log("passed");
