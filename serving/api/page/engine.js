// The engine beside the conversation: the history that the server keeps, and then what its stream tells.

import { colourOf, drawCells, element, frame, LineChart } from "./charts.js";
import { ask, events, problemOf, wait } from "./client.js";

const SPAN_S = 300, MOST_ROWS_PX = 256, ROW_PX = 8, MOST_LISTED = 32, RETRY_S = 1;
const CELLS = ["--free", "--others", "--prompt", ...[0, 1, 2, 3, 4].map((each) => `--request-${each}`)];
const PAGES = ["--free", "--cached", "--held", "--shared"];
const get = (id) => document.getElementById(id);
const bytesOf = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
const chart = (name, kind, ...series) => new LineChart(document.querySelector(`[data-chart=${name}]`), SPAN_S, kind, series);

const charts = [
  chart("requests", "numbers", ["running", (each) => each.running], ["waiting", (each) => each.waiting]),
  chart("tokens", "numbers", ["answers", (each) => each.output_tokens_per_s], ["prompts", (each) => each.prompt_tokens_per_s]),
  chart("first", "times", ["median", (each) => each.first_token_p50_s], ["95th percentile", (each) => each.first_token_p95_s]),
  chart("next", "times", ["median", (each) => each.next_token_p50_s], ["95th percentile", (each) => each.next_token_p95_s]),
  chart("cache", "numbers", ["in use", (each) => each.used_pages], ["cached", (each) => each.cached_pages]),
];
const slots = element("canvas");
slots.setAttribute("role", "img");
const labelSlots = frame(get("slots"), SPAN_S, slots);
let columns = [], samples = [], numSlots = 0; // each sample has its slots in `cells`

function takeSample(row, cells) {
  samples.push({ ...Object.fromEntries(columns.map((name, at) => [name, row[at]])), cells });
  while (samples[0].at_s < samples.at(-1).at_s - SPAN_S) samples.shift();
}

function drawHistory() {
  for (const each of charts) each.draw(samples);
  const until = samples.at(-1)?.at_s, colours = CELLS.map(colourOf), byColumn = new Array(SPAN_S);
  for (const each of samples) byColumn[SPAN_S - 1 - Math.round(until - each.at_s)] = each.cells;
  for (let x = 1; x < SPAN_S; x++) byColumn[x] ??= byColumn[x - 1]; // seconds that came between two samples
  drawCells(slots, SPAN_S, Math.max(1, numSlots), (x, y) => colours[byColumn[x]?.[y] ?? 0]);
  slots.style.height = `${Math.max(ROW_PX, Math.min(ROW_PX * numSlots, MOST_ROWS_PX))}px`;
  labelSlots(["0", numSlots > 8 ? Math.round(numSlots / 2) : "", Math.max(0, numSlots - 1)]);
  const taken = samples.at(-1)?.cells.filter((each) => each).length ?? 0;
  slots.setAttribute("aria-label", `${taken} of ${numSlots} slots are taken`);
}

async function readHistory() {
  const answer = await ask("history");
  if (!answer.ok) throw new Error(await problemOf(answer));
  const past = await answer.json(), cells = bytesOf(past.cells);
  ({ columns, num_slots: numSlots } = past);
  samples = [];
  past.samples.forEach((row, at) => takeSample(row, cells.subarray(at * numSlots, (at + 1) * numSlots)));
  drawHistory();
}

function show(event) {
  get("state").textContent = event.state;
  get("state").classList.toggle("bad", event.state !== "ready");
  get("trouble").hidden = !event.reason;
  get("trouble").textContent = event.reason ?? "";
  if (event.sample) {
    numSlots = event.num_slots ?? numSlots;
    takeSample(event.sample, bytesOf(event.cells));
    drawHistory();
  }
  if (event.num_pages === undefined) return;
  get("title").textContent = document.title = event.model;
  get("machine").textContent = `on ${event.device}, ${event.num_slots} slots, ` +
    `${event.num_pages.toLocaleString("en")} pages of ${event.page_size} tokens`;
  get("running").textContent = `${event.running} of ${event.num_slots}`;
  get("waiting").textContent = event.waiting + (event.held_back ? ` for ${event.held_back}` : "");
  get("pages").textContent = `${event.held_pages} of ${event.num_pages}`;
  get("hits").textContent = `${(100 * event.hit_rate).toFixed(1)} %`;
  get("preemptions").textContent = event.preemptions;
  drawPages(event);
  listOwn(event.slots ?? []);
}

function drawPages(event) {
  const cells = bytesOf(event.pages), colours = PAGES.map(colourOf);
  const across = Math.ceil(Math.sqrt(4 * cells.length)) || 1;
  const canvas = document.querySelector("#map canvas");
  drawCells(canvas, across, Math.ceil(cells.length / across) || 1, (x, y) => colours[cells[y * across + x]] ?? 0);
  const each = event.num_pages / Math.max(1, cells.length);
  document.querySelector("#map .dim").textContent = each > 1 ? `${each.toFixed(1)} a cell` : "";
}

function listOwn(all) {
  const own = all.flatMap((slot, index) => slot && slot.stream !== undefined ? [{ ...slot, index }] : []);
  const lines = own.slice(0, MOST_LISTED).map((slot) => element("li", "", element("i", `request-${slot.colour}`), [
    `slot ${slot.index}: ${slot.prompt} + ${slot.tokens - slot.prompt} tokens`,
    slot.form,
    slot.tools && `${slot.tools} tool${slot.tools > 1 ? "s" : ""}`,
    slot.adapter && `adapter ${slot.adapter}`,
  ].filter(Boolean).join(" · ")));
  if (own.length > MOST_LISTED) lines.push(element("li", "", `and ${own.length - MOST_LISTED} more`));
  document.querySelector("#own summary span").textContent = own.length;
  document.querySelector("#own ol").replaceChildren(...lines);
}

// Follow the engine while somebody looks; whoever comes back finds in the history what was missed.
async function follow() {
  for (;;) {
    while (document.hidden) await wait(RETRY_S);
    const looking = new AbortController();
    const onHide = () => { if (document.hidden) looking.abort(); };
    document.addEventListener("visibilitychange", onHide);
    try {
      await readHistory();
      const answer = await ask("live", { signal: looking.signal });
      if (!answer.ok) throw new Error(await problemOf(answer));
      for await (const data of events(answer)) show(JSON.parse(data));
    } catch (error) {
      if (!looking.signal.aborted) {
        get("state").textContent = "no connection";
        get("state").classList.add("bad");
      }
    }
    document.removeEventListener("visibilitychange", onHide);
    await wait(RETRY_S);
  }
}

follow();
