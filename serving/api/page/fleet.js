// The fleet beside the conversation: what each replica does, and why requests went where they did.

import { element } from "./charts.js";
import { ask, problemOf, wait } from "./client.js";

const EVERY_S = 1;
const get = (id) => document.getElementById(id);
const ROUTES = { round_robin: "in turns", least_loaded: "to the fewest requests", prefix: "by prefix" };

function total(name, value) {
  return element("div", "", element("dt", "", name), element("dd", "", String(value)));
}

function row(...cells) {
  return element("tr", "", ...cells.map((each) => each instanceof Node ? each : element("td", "", String(each))));
}

function why(choice, route) {
  if (choice.is_again) return "another was lost, or refused";
  if (route === "round_robin") return "its turn";
  if (route === "least_loaded") return "fewest requests";
  if (!choice.best_hit_tokens) return "nobody has any of it: least to do";
  return choice.hit_tokens === choice.best_hit_tokens ? "nobody has more of it" : "who has more of it has more to do";
}

function split(choice) {
  if (choice.cost_here === null) return "";
  const place = choice.prompt_at === null ? "computed here" : `prompt at ${choice.prompt_at}`;
  return `; ${place}: ${choice.cost_here.toFixed(0)} tokens here, ${choice.cost_there.toFixed(0)} there`;
}

function rowOf(replica, most) {
  const share = replica.prompt_tokens ? replica.hit_tokens / replica.prompt_tokens : 0;
  const state = element("td", replica.state, replica.drained ? "drained" : replica.state);
  if (replica.trouble) state.append(element("small", "", replica.trouble));
  const parts = [["found", share], ["computed", 1 - share]].map(([name, part]) => {
    const bar = element("i", name);
    bar.style.width = `${5 * part * replica.sent / most}rem`;
    return bar;
  });
  const found = element("td", "", `${(100 * share).toFixed(0)} %${replica.tells_pages ? "" : " by text"} `,
    element("span", "bar", ...parts));
  const models = element("td", "models", (replica.models ?? []).join(", "));
  return row(element("th", "", replica.url), models, state, replica.open, replica.sent, replica.lost, replica.requests,
    replica.queued_tokens, found);
}

function show(fleet) {
  const ready = fleet.replicas.filter((each) => each.state === "ready" && !each.drained).length;
  get("state").textContent = `${ready} of ${fleet.replicas.length} ready`;
  get("state").classList.toggle("bad", ready < fleet.replicas.length);
  get("totals").replaceChildren(
    total("sent", ROUTES[fleet.route] ?? fleet.route), total("open", fleet.open), total("waiting", fleet.waiting),
    total("sent again", fleet.sent_again), total("refused", fleet.refused), total("cut off", fleet.cut_off),
    total("known pages", fleet.known_pages.toLocaleString("en")),
  );
  const most = Math.max(1, ...fleet.replicas.map((each) => each.sent));
  document.querySelector("#replicas tbody").replaceChildren(...fleet.replicas.map((each) => rowOf(each, most)));
  document.querySelector("#choices tbody").replaceChildren(...fleet.choices.map((each) => row(
    element("th", "", each.replica), each.prompt_tokens, each.hit_tokens, each.best_hit_tokens, each.queued_tokens,
    each.requests, why(each, fleet.route) + split(each),
  )));
}

async function follow() {
  get("title").textContent = document.title = "Fleet";
  for (;;) {
    try {
      const answer = document.hidden ? null : await ask("fleet");
      if (answer && !answer.ok) throw new Error(await problemOf(answer));
      if (answer) show(await answer.json());
      get("trouble").hidden = true;
    } catch (error) {
      get("trouble").hidden = false;
      get("trouble").textContent = error.message;
      get("state").textContent = "no connection";
      get("state").classList.add("bad");
    }
    await wait(EVERY_S);
  }
}

follow();
