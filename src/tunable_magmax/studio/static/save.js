"use strict";
// Save: the model written with progress, the preference file, the command and the address to keep.
{
studio.buildSave = () => {
  studio.find("copy-tailor").append(studio.copyButton("Copy", () => studio.find("tailor").textContent));
  studio.find("copy-address").append(studio.copyButton("Copy this page’s address", () => location.href));
  studio.find("model-form").addEventListener("submit", (event) => { event.preventDefault(); writeModel(); });
  studio.find("preference-form").addEventListener("submit", (event) => { event.preventDefault(); savePreference(); });
  const commandSoon = studio.later(drawCommand, 200);
  studio.watch((topics) => {
    if (topics.has("now") || topics.has("facts")) commandSoon();
    if (topics.has("models") || topics.has("facts")) drawModels();
  });
};

// -- the command ---------------------------------------------------------------------------------------------------------

const drawCommand = async () => {
  try {
    writeCommand(studio.find("tailor"), (await studio.post("/api/command", { point: studio.request() })).tailor);
  } catch (error) {
    studio.write(studio.find("tailor"), error.message);
  }
};

/** Options are not broken at their hyphens. */
const writeCommand = (target, text) => {
  if (target.textContent === text) return;
  target.replaceChildren(...text.split(/(?<=\s)(-\S+)/).map((part, k) =>
    (k % 2 ? studio.element("span", { className: "option", textContent: part }) : part)));
};

// -- models -----------------------------------------------------------------------------------------------------------

const say = (id, text, wrong = false) => {
  const message = studio.find(id);
  studio.write(message, text);
  message.classList.toggle("failed", wrong);
};

const writeModel = async () => {
  say("model-message", "");
  try {
    await studio.post("/api/models", { name: studio.find("model-name").value, point: studio.request() });
  } catch (error) {
    say("model-message", error.message, true);
  }
};

/** Takes the event `model`. */
studio.takeModel = (model) => {
  const { facts } = studio.state;
  const others = facts.models.filter((other) => other.name !== model.name);
  facts.models = [...others, model];
  if (model.state !== "writing") studio.announce(`${model.name}: ${STATES[model.state]}`);
  studio.changed("models");
};

const STATES = { writing: "being written", done: "written", cancelled: "cancelled, nothing is left", failed: "failed" };
const items = new Map(); // by name: progress must not rebuild the button that somebody is about to press

const drawModels = () => {
  const { models } = studio.state.facts;
  studio.find("write").disabled = models.some((model) => model.state === "writing");
  const names = new Set(models.map((model) => model.name));
  for (const [name, item] of items) if (!names.has(name)) { item.root.remove(); items.delete(name); }
  for (const model of models) {
    let item = items.get(model.name);
    if (!item || item.state !== model.state) {
      const made = makeModel(model);
      if (item) item.root.replaceWith(made.root);
      else studio.find("models").prepend(made.root);
      items.set(model.name, made);
      item = made;
    }
    item.update(model);
  }
};

const makeModel = (model) => {
  const { name, state } = model;
  const head = studio.element("div", { className: "model-head" }, studio.element("strong", { textContent: name }));
  const about = studio.element("p", { className: "soft" });
  const root = studio.element("li", { className: `model ${state}`, attributes: { "data-model": name } }, head, about);
  let bar = null;
  if (state === "writing") {
    bar = studio.element("progress", { max: 1, attributes: { "aria-label": `progress of ${name}` } });
    root.insertBefore(bar, about);
    head.append(studio.element("button", { type: "button", className: "small", textContent: "Cancel", on: { click: () => cancel(name) } }));
  }
  const update = (now) => {
    if (bar) studio.attributes(bar, { value: now.total ? now.done / now.total : null });
    about.classList.toggle("failed", now.state === "failed");
    const size = now.bytes === null ? "" : `, ${studio.bytes(now.bytes)}`;
    studio.write(about, now.state === "failed" ? now.error.message
      : now.state === "done" ? `${now.path}${size}${expected(now.expected)}` : now.state === "writing" ? now.phase ?? "starting" : STATES[now.state]);
  };
  return { root, state, update };
};

/** The accuracy to expect of a written model, and of base and last checkpoint with heads of their own. */
const expected = ({ tailored, base, last }) => {
  if (!tailored) return "";
  const rivals = [["base", base], ["last checkpoint", last]].filter(([, found]) => found).map(([name, found]) => `${name} ${studio.percent(found[0])}`);
  return `; expected accuracy there ${studio.percent(tailored[0])} (${studio.range(tailored.slice(1))}), ${rivals.join(", ")}`;
};

const cancel = async (name) => {
  try {
    await studio.send("DELETE", `/api/models/${encodeURIComponent(name)}`);
  } catch (error) {
    say("model-message", error.message, true);
  }
};

const savePreference = async () => {
  try {
    const saved = await studio.post("/api/preferences", { name: studio.find("preference-name").value, point: studio.request() });
    say("preference-message", `Written: ${saved.path}`);
    studio.announce(`${saved.file} is written`);
  } catch (error) {
    say("preference-message", error.message, true);
  }
};
}
