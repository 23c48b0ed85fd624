// The conversation: what is asked, and the answer as it comes. All text of a model becomes text nodes.

import { ask, events, hasKey, problemOf } from "./client.js";
import { curl, python } from "./sent.js";

const FIELDS = [ // of a request, in the order of the form; what they are, the server's own schema says
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop", "repetition_penalty", "presence_penalty",
  "frequency_penalty", "reasoning_effort", "thinking_token_budget", "tool_choice", "parallel_tool_calls",
];
const PATH = "v1/chat/completions";
const get = (id) => document.getElementById(id);
const turns = get("turns"), question = get("question"), fields = get("fields");
const messages = []; // the conversation as the API has it
let running = null; // the AbortController of the answer that is being read

// ---- Settings

async function fillSettings() {
  const listed = await ask("v1/models");
  const names = listed.ok ? (await listed.json()).data.map((each) => each.id) : [];
  fields.elements.model.replaceChildren(...names.map((name) => new Option(name)));
  const described = await ask("openapi.json");
  const schema = described.ok ? (await described.json()).components?.schemas?.ChatBody?.properties ?? {} : {};
  get("sampling").replaceChildren(...FIELDS.map((name) => fieldOf(name, schema[name] ?? {})));
}

function fieldOf(name, schema) {
  const kinds = (schema.anyOf ?? [schema]).flatMap((each) => each.enum ?? [each.type]);
  const kind = kinds.includes("boolean") ? "boolean" : kinds.some((each) => ["number", "integer"].includes(each)) ?
    "number" : schema.anyOf?.some((each) => each.enum) ? "choice" : "text";
  const choices = kind === "boolean" ? ["true", "false"] : kind === "choice" ? kinds.filter((each) => each !== "null") : null;
  const field = document.createElement(choices ? "select" : "input"), label = document.createElement("label");
  if (choices) field.replaceChildren(...["", ...choices].map((each) => new Option(each)));
  else if (kind === "number") Object.assign(field, { type: "number", step: "any" });
  Object.assign(field, { name, title: schema.description ?? "" });
  field.dataset.kind = kind;
  label.append(name, field);
  return label;
}

// The fields that are set; null, with the form open at the field, where one cannot be read.
function chosen() {
  const body = {};
  for (const field of fields.elements) {
    const text = field.value.trim(), { name } = field;
    field.setCustomValidity("");
    if (!text || name === "system") continue;
    try {
      if (name === "others") Object.assign(body, objectOf(text));
      else if (name === "tools") body.tools = JSON.parse(text);
      else if (name === "tool_choice" && text.startsWith("{")) body.tool_choice = JSON.parse(text);
      else body[name] = { number: Number, boolean: (each) => each === "true" }[field.dataset.kind]?.(text) ?? text;
    } catch (error) {
      field.setCustomValidity(error.message);
    }
    if (field.checkValidity()) continue;
    get("settings").open = true;
    field.reportValidity();
    return null;
  }
  return body;
}

function objectOf(text) {
  const value = JSON.parse(text);
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error("It must be a JSON object.");
  return value;
}

// ---- Turns

class Turn {
  constructor(role, text = "") {
    this.root = get("turn").content.firstElementChild.cloneNode(true);
    this.root.classList.add(role);
    this.part("h2").textContent = role;
    this.calls = [];
    this.message = { role, content: text };
    this.part(".content").textContent = text;
    turns.append(this.root);
  }

  part(selector) { return this.root.querySelector(selector); }

  take(delta) {
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) {
      const box = this.part(".thoughts");
      if (box.hidden) box.hidden = !(box.open = true);
      box.querySelector(".text").append(thought);
      this.message.reasoning_content = (this.message.reasoning_content ?? "") + thought;
    }
    if (delta.content) {
      this.part(".content").append(delta.content);
      this.message.content += delta.content;
    }
    for (const piece of delta.tool_calls ?? []) this.takeCall(piece);
  }

  takeCall(piece) {
    if (!this.calls[piece.index]) {
      const box = get("call").content.firstElementChild.cloneNode(true);
      this.part(".calls").append(box);
      this.calls[piece.index] = { box, said: { id: "", type: "function", function: { name: "", arguments: "" } } };
    }
    const { box, said } = this.calls[piece.index], { name = "", arguments: text = "" } = piece.function ?? {};
    said.id ||= piece.id ?? "";
    said.function.name += name ?? "";
    said.function.arguments += text;
    box.querySelector("code").textContent = said.function.name;
    box.querySelector("pre").append(text);
  }

  fail(problem) {
    this.part(".trouble").hidden = false;
    this.part(".trouble").textContent = problem;
  }

  get saysSomething() { return Boolean(this.message.content || this.message.reasoning_content || this.calls.length); }

  // Offer what can follow an answer that has ended.
  end(figures, body) {
    const calls = this.calls.filter(Boolean).map((each) => each.said);
    if (calls.length) this.message.tool_calls = calls;
    this.part(".thoughts").open = !this.message.content && !calls.length;
    this.part("footer").hidden = false;
    this.part("footer .figures").textContent = figures.join(" · ");
    this.part(".again").onclick = () => regenerate(this);
    const url = new URL(PATH, document.baseURI).href, base = new URL("v1", document.baseURI).href;
    this.part(".curl").textContent = curl(url, body, hasKey());
    this.part(".python").textContent = python(base, body, hasKey());
    this.part(".sent").ontoggle = () => this.part("footer").scrollIntoView({ block: "nearest" });
    for (const button of this.root.querySelectorAll(".copy")) {
      button.onclick = () => copy(button, button.parentElement.nextElementSibling.textContent);
    }
    if (calls.length) this.wantResults();
  }

  wantResults() {
    const button = document.createElement("button");
    button.textContent = "Send results";
    button.onclick = () => {
      if (running || chosen() === null) return;
      if (messages.at(-1) !== this.message) return button.remove();  // the conversation has gone on without them
      for (const { box, said } of this.calls.filter(Boolean)) {
        const field = box.querySelector("textarea");
        field.readOnly = true;
        messages.push({ role: "tool", tool_call_id: said.id, content: field.value });
      }
      button.remove();
      answer();
    };
    for (const { box } of this.calls.filter(Boolean)) box.querySelector("label").hidden = false;
    this.part(".calls").append(button);
    this.part(".calls textarea").focus();
  }
}

async function copy(button, text) {
  await navigator.clipboard.writeText(text);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// ---- Asking

async function answer() {
  const settings = chosen();
  if (settings === null || running) return;
  const system = fields.elements.system.value.trim();
  const said = system ? [{ role: "system", content: system }, ...messages] : [...messages];
  const body = { ...settings, messages: said, stream: true, stream_options: { include_usage: true } };
  const turn = new Turn("assistant"), begun = performance.now();
  turn.place = messages.length;
  const seen = { first: null, last: begun, usage: null, reason: "" };
  running = new AbortController();
  showRunning();
  try {
    const headers = { "content-type": "application/json" };
    const response = await ask(PATH, { method: "POST", headers, body: JSON.stringify(body), signal: running.signal });
    if (!response.ok) throw new Error(await problemOf(response));
    await read(response, turn, seen);
  } catch (error) {
    if (running.signal.aborted) seen.reason = "stopped";
    else turn.fail(error.message);
  }
  running = null;
  turn.end(figuresOf(seen, begun), body);
  if (turn.root.isConnected && turn.saysSomething) messages.push(turn.message);
  showRunning();
}

async function read(response, turn, seen) {
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    seen.usage = event.usage ?? seen.usage;
    for (const choice of event.choices) {
      if (choice.index) continue;  // a turn has one answer, also where a parameter asks for more
      seen.first ??= performance.now();
      seen.last = performance.now();
      seen.reason = choice.finish_reason ?? seen.reason;
      const isAtEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
      turn.take(choice.delta);
      if (isAtEnd) turns.scrollTop = turns.scrollHeight;
    }
  }
  throw new Error("the connection ended before the answer did");
}

function figuresOf({ first, last, usage, reason }, begun) {
  const figures = [];
  if (usage) figures.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) figures.push(`${cached} found cached`);
  if (first !== null) figures.push(`first after ${Math.round(first - begun)} ms`);
  const between = usage?.completion_tokens > 1 ? (last - first) / (usage.completion_tokens - 1) : 0;
  if (between > 0) figures.push(`${between.toFixed(1)} ms between tokens`);
  if (reason) figures.push(reason);
  return figures;
}

// Ask again from where this turn stands; what came after it is dropped.
function regenerate(turn) {
  if (running || chosen() === null) return;
  messages.length = turn.place;
  while (turns.lastElementChild !== turn.root) turns.lastElementChild.remove();
  turn.root.remove();
  answer();
}

function showRunning() {
  get("send").hidden = running !== null;
  get("stop").hidden = running === null;
  turns.setAttribute("aria-busy", String(running !== null));
  turns.scrollTop = turns.scrollHeight;
}

get("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running || chosen() === null) return;
  const turn = new Turn("user", question.value);
  messages.push(turn.message);
  question.value = "";
  answer();
});
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  get("ask").requestSubmit();
});
fields.addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
get("stop").addEventListener("click", () => running?.abort());
get("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  turns.replaceChildren();
  question.focus();
});
fillSettings();
