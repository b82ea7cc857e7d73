"use strict";
// Requests to the server with the address's token, and its events.
{
const KEY = "tmx-token";

/** Takes the token out of the address and keeps it for this window; the rest of the address stays. */
studio.takeToken = () => {
  const parts = new URLSearchParams(location.hash.slice(1));
  if (!parts.has("token")) return;
  sessionStorage.setItem(KEY, parts.get("token"));
  parts.delete("token");
  history.replaceState(null, "", `${location.pathname}${parts.size ? `#${parts}` : ""}`);
};

studio.Problem = class extends Error {
  constructor(message, problems = [], status = 0) {
    super(message);
    this.problems = problems;
    this.status = status;
  }
};

const request = async (path, options = {}) => {
  const headers = { "X-Studio-Token": sessionStorage.getItem(KEY) ?? "", ...options.headers };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new studio.Problem("The studio does not answer: is `tmx studio` still running?");
  }
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({ error: { message: `the studio answered ${answer.status}` } }));
  throw new studio.Problem(error.message, error.problems, answer.status);
};

studio.get = async (path) => (await request(path)).json();

studio.send = async (method, path, body) =>
  (await request(path, { method, body: JSON.stringify(body ?? {}), headers: { "Content-Type": "application/json" } })).json();

studio.post = (path, body) => studio.send("POST", path, body);

studio.sendFile = async (path, file, signal) => (await request(path, { method: "POST", body: file, signal })).json();

/** Calls `handle(name, data)` for each event, for ever; `connected(whether)` when the connection comes and goes. */
studio.listen = async (handle, connected) => {
  for (let wait = 250; ; wait = Math.min(2 * wait, 5000)) {
    try {
      const answer = await request("/api/events");
      await connected(true);
      wait = 250;
      await readEvents(answer.body.pipeThrough(new TextDecoderStream()).getReader(), handle);
    } catch (error) {
      if (error.status === 401) { studio.askForAddress(); return; }
    }
    await connected(false);
    await new Promise((resume) => setTimeout(resume, wait));
  }
};

const readEvents = async (reader, handle) => {
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (buffer + value).split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: ?(.*)/s)));
      if (fields.event) handle(fields.event, JSON.parse(fields.data));
    }
  }
};

/** Asks for the address that `tmx studio` printed, where this window has no token or an old one. */
studio.askForAddress = () => {
  document.body.classList.add("locked-out");
  const box = studio.find("address"), field = studio.find("address-field");
  box.hidden = false;
  field.focus();
  studio.find("address-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const token = field.value.trim().split("#token=").pop().split("&")[0];
    sessionStorage.setItem(KEY, token);
    location.reload();
  }, { once: true });
};
}
