// Ask the server that this page came from, with a key where it wants one, and read its streams of events.

const STORED = "api-key"; // in sessionStorage, which this tab alone reads, and which ends with it
const door = document.getElementById("door");
let opening = null; // a promise, while the key is asked for

export const hasKey = () => sessionStorage.getItem(STORED) !== null;

// Fetch a path; a key that is missing or wrong is asked for until the server takes it.
export async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(STORED);
    const headers = key === null ? options.headers : { ...options.headers, authorization: `Bearer ${key}` };
    const answer = await fetch(path, { cache: "no-store", ...options, headers });
    if (answer.status !== 401) return answer;
    if (key === sessionStorage.getItem(STORED)) await (opening ??= askForKey()); // else another answer brought one
  }
}

function askForKey() {
  return new Promise((done) => {
    const field = door.querySelector("input");
    door.oncancel = (event) => event.preventDefault(); // nothing works without it
    door.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(STORED, field.value);
      field.value = "";
      opening = null;
      door.close();
      done();
    };
    door.showModal();
  });
}

// The error of an answer, as one line.
export async function problemOf(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `status ${answer.status}: ${text.slice(0, 500)}`;
  }
}

// The data of each event of a stream; comments and other fields are passed over.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      if (line !== "" || !data.length) continue;
      yield data.join("\n");
      data = [];
    }
  }
}

export const wait = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));
