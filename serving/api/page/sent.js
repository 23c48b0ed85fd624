// Write a request as the command and as the program that send it again. Neither holds the key.

const NATIVE = new Set([ // what OpenAI's client takes by name; the rest goes into its extra_body
  "frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "messages", "model", "n",
  "parallel_tool_calls", "presence_penalty", "reasoning_effort", "response_format", "seed", "stop", "stream",
  "stream_options", "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user",
]);
const WIDTH = 88;

export function curl(url, body, withKey) {
  const key = withKey ? ` -H "Authorization: Bearer $API_KEY"` : "";
  return `curl --no-buffer ${quoted(url)}${key} -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(body))}`;
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`; // for a shell

export function python(base, body, withKey) {
  const key = withKey ? `os.environ["API_KEY"]` : `"any"`;
  const named = Object.entries(body).filter(([name]) => NATIVE.has(name));
  const others = Object.fromEntries(Object.entries(body).filter(([name]) => !NATIVE.has(name)));
  if (Object.keys(others).length) named.push(["extra_body", others]);
  const given = named.map(([name, value]) => `    ${name}=${literal(value, 4, name.length + 2)},\n`).join("");
  return `${withKey ? "import os\n\n" : ""}import openai

client = openai.OpenAI(base_url=${literal(base)}, api_key=${key})
stream = client.chat.completions.create(
${given})
for event in stream:
    for choice in event.choices:
        print(choice.delta.content or "", end="", flush=True)
`;
}

// A JSON value in Python's notation, in one line if it fits behind `indent + ahead` columns.
function literal(value, indent = 0, ahead = 0) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value), [open, close] = isList ? "[]" : "{}";
  const parts = (inner) => isList ? value.map((each) => literal(each, inner)) :
    Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, inner, name.length + 4)}`);
  const line = open + parts(-Infinity).join(", ") + close;
  if (indent + ahead + line.length < WIDTH) return line;
  const margin = " ".repeat(indent + 4);
  return `${open}\n${parts(indent + 4).map((each) => `${margin}${each},\n`).join("")}${" ".repeat(indent)}${close}`;
}
