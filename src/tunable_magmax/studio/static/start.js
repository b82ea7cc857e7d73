"use strict";
// Starts the page: reads the state and the address, builds the parts, listens to events.
{
let wasConnected = false;

/** Begins with the estimate, judged by it; the address overrides. */
const begin = () => {
  const { facts } = studio.state;
  const { weights, preset, scale, method } = facts.start;
  const estimated = studio.preset(preset)?.intervals;
  studio.state.now = { weights, preset, scale, method, data: facts.start.data ?? facts.data[0]?.id ?? null, judge: estimated ? preset : "weights" };
  fromAddress();
};

const fromAddress = () => {
  const { values, locked } = studio.readAddress();
  Object.assign(studio.state.now, values);
  studio.state.locked = locked;
};

const drawHead = () => {
  const { facts, connected } = studio.state, { run } = facts;
  studio.write(studio.find("run-name"), run.name);
  document.title = `${run.name} · tmx studio`;
  const parts = [studio.count(run.tasks.length, "task"), run.elements === null ? null : `${run.elements.toLocaleString("en")} elements`, run.path];
  studio.write(studio.find("run-about"), parts.filter(Boolean).join(" · "));
  studio.find("offline").hidden = connected || !wasConnected;
  studio.find("warnings").replaceChildren(...facts.warnings.map((text) => studio.element("li", { textContent: text })));
  studio.find("warnings-box").hidden = !facts.warnings.length;
};

/** Gets the state again; what is set stays, as far as it still exists. */
studio.refresh = async () => {
  const { state } = studio;
  state.facts = await studio.get("/api/state");
  state.now.data = studio.data()?.id ?? state.facts.data[0]?.id ?? null;
  if (state.now.judge !== "weights" && !studio.preset(state.now.judge)) state.now.judge = "weights";
  if (state.now.preset && !studio.preset(state.now.preset)) state.now.preset = null;
  const preset = state.now.preset && studio.preset(state.now.preset);
  if (preset && !studio.sameWeights(preset.weights, state.now.weights)) state.now.preset = null;
  studio.changed("facts", "now", "samples", "models");
};

const EVENTS = {
  measured: (data) => studio.measuring.take("measured", data),
  superseded: (data) => studio.measuring.take("superseded", data),
  failed: (data) => {
    if (data.request !== undefined) studio.measuring.take("failed", data);
    else if (data.upload) studio.uploads.failed(data.error);
    else { studio.showError(data.error); studio.refresh(); } // what was under way is not any more
  },
  progress: (data) => {
    if (data.what === "lines") Object.assign(studio.state.facts.lines, { done: data.done, total: data.total });
    if (data.what === "samples") studio.uploads.progress(data);
    studio.changed("busy");
  },
  lines: async () => { await studio.refresh(); studio.measuring.again(); },
  state: async () => { await studio.refresh(); await studio.getPoints(); },
  samples: async (data) => {
    studio.uploads.done();
    await studio.refresh();
    await studio.getPoints();
    const { weights, preset, scale, method } = studio.state.facts.start; // as the command would take them
    studio.set({ weights, preset, scale, method, judge: preset });
    studio.announce(`${studio.count(data.samples, "sample")} estimated`);
  },
  model: (data) => studio.takeModel(data),
};

const connected = async (whether) => {
  studio.state.connected = whether;
  wasConnected ||= whether;
  if (whether) { // what happened before is not told again
    await studio.refresh();
    await studio.getPoints();
    studio.measuring.reset();
  }
  studio.changed("facts");
};

const build = () => {
  studio.watch((topics) => { if (topics.has("facts")) drawHead(); });
  for (const part of ["Tasks", "Controls", "Result", "Tradeoff", "Uploads", "Samples", "Save"]) studio[`build${part}`]();
  const keepAddress = studio.later(studio.writeAddress, 150);
  studio.watch((topics) => {
    if (topics.has("now")) keepAddress();
    if (topics.has("now") || topics.has("facts") || topics.has("points")) studio.measuring.ask();
  });
  window.addEventListener("hashchange", () => { studio.takeToken(); fromAddress(); studio.changed("now"); });
  document.body.classList.remove("loading");
  studio.changed("facts", "now", "points", "busy", "samples", "models");
};

const start = async () => {
  studio.takeToken();
  try {
    studio.state.facts = await studio.get("/api/state");
  } catch (error) {
    if (error.status === 401) studio.askForAddress();
    else studio.showError(error);
    return;
  }
  begin();
  build();
  studio.listen((name, data) => EVENTS[name]?.(data), connected);
};

start();
}
