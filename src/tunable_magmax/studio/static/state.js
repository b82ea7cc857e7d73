"use strict";
// What is set on the page and what is known of it. Views listen; they are called once a frame, with what changed.
{
studio.state = {
  facts: null, // the server's state
  now: null, // { weights, preset, scale, method, data, judge }
  locked: new Set(),
  points: new Map(), // by id
  busy: false, // whether a measurement is under way
  failed: null, // why the last measurement failed
  connected: false,
};

const listeners = [];
let changed = new Set();

/** Calls `listener(topics)` in the frame after a change. Topics: facts, now, points, busy, samples, models. */
studio.watch = (listener) => listeners.push(listener);

studio.changed = (...topics) => {
  if (!changed.size) requestAnimationFrame(tellListeners);
  for (const topic of topics) changed.add(topic);
};

const tellListeners = () => {
  const topics = changed, began = performance.now();
  changed = new Set();
  studio.view = studio.shown();
  for (const listener of listeners) listener(topics);
  studio.frame = performance.now() - began; // milliseconds of the last frame's work
};

studio.tasks = () => studio.state.facts.run.tasks;
studio.preset = (id) => studio.state.facts.presets.find((preset) => preset.id === id);
studio.method = (name) => studio.state.facts.methods.find((method) => method.name === name);
studio.data = () => studio.state.facts.data.find((data) => data.id === studio.state.now.data);

/** Changes what is set: `{ scale: 1 }`, `{ weights, preset: null }`. */
studio.set = (values) => {
  Object.assign(studio.state.now, values);
  studio.changed("now");
};

/** Sets weights by hand, in thousandths. */
studio.setParts = (parts) => studio.set({ weights: parts.map((part) => part / studio.WHOLE), preset: null });

studio.usePreset = (id) => {
  const preset = studio.preset(id);
  studio.set({ weights: preset.weights, preset: id, ...(preset.scale === null ? {} : { scale: preset.scale }) });
};

/** The estimate that bands show: the chosen preset's, else that of the samples, else any that has intervals. */
studio.estimate = () => {
  const { facts, now } = studio.state;
  const known = [studio.preset(now.preset), studio.preset("samples"), ...facts.presets];
  return known.find((preset) => preset?.intervals) ?? null;
};

// -- what counts ------------------------------------------------------------------------------------------------------

/** What each task counts in the result: the weights themselves, or a preset's. */
studio.mix = () => {
  const { now } = studio.state;
  return studio.preset(now.judge)?.weights ?? now.weights;
};

/** A point's accuracy on the present mix: by its tasks, or of all samples where these are the mix. */
studio.onMix = (point) => {
  if (!point.tasks || studio.data()?.mixed) return point.overall;
  if (studio.sameWeights(point.mix, studio.mix())) return point.share;
  return studio.mixed(point.tasks, studio.mix());
};

/** A line's accuracy on the present mix. */
studio.lineOnMix = (line) =>
  !line.tasks || studio.data()?.mixed ? line.mix.accuracy : studio.mean(line.tasks, studio.mix());

/** The same of all points at once, without intervals. */
studio.allOnMix = (points) => {
  const mix = studio.mix(), mixed = studio.data()?.mixed;
  return points.map((point) => (mixed || !point.accuracies ? point.overall.accuracy : studio.mean(point.accuracies, mix)));
};

// -- points -----------------------------------------------------------------------------------------------------------

/** Whether a point is the one that is set now. A preset's prior may be its own, so the preset counts. */
studio.isNow = (point) => {
  const { now } = studio.state;
  return point.method === now.method && point.data === now.data && point.scale === now.scale
    && ownPrior(point.preset) === ownPrior(now.preset) && studio.sameWeights(point.weights, now.weights);
};

// Presets of weights alone (equal, only X) mean the same by hand; those that samples gave have a prior of their own.
const ownPrior = (id) => (["given", "samples"].includes(id) ? id : null);

studio.addPoint = (point) => {
  point.accuracies = point.tasks?.map((task) => task.accuracy) ?? null; // asked for in every frame
  studio.state.points.set(point.id, point);
  studio.changed("points");
};

/** Gets all points of this session; those of samples that are gone are not among them. */
studio.getPoints = async () => {
  const { points } = await studio.get("/api/points");
  studio.state.points = new Map();
  points.forEach(studio.addPoint);
  studio.changed("points");
};

/** Sets the page to a measured point. */
studio.goTo = (id) => {
  const point = studio.state.points.get(id);
  const preset = studio.preset(point.preset);
  const same = preset && studio.sameWeights(preset.weights, point.weights);
  studio.set({ weights: point.weights, preset: same ? preset.id : null, scale: point.scale, method: point.method });
};

/** All points on the present data, oldest first. */
studio.pointsHere = () => [...studio.state.points.values()].filter((point) => point.data === studio.state.now.data);

/** The point that is set now, if it was measured. */
studio.measuredNow = () => {
  let found = null;
  for (const point of studio.state.points.values()) if (studio.isNow(point)) found = point;
  return found;
};

/** Whether a point says all that the page shows of it: the lines, compared on the present mix. */
studio.isComplete = (point) =>
  point.lines.length > 0 && (studio.data()?.mixed || studio.sameWeights(point.mix, studio.mix()));

/** The fixed lines beside the present point: its own, or those of the nearest, which are `stale`: heads follow weights. */
const linesFor = (point, all) => {
  if (point?.lines.length) return { lines: point.lines, stale: false };
  const { now } = studio.state;
  let best = null, least = Infinity;
  for (const other of all) {
    const distance = other.lines.length ? studio.halfDistance(now.weights, other.weights) : Infinity;
    if (distance < least) [best, least] = [other, distance];
  }
  return { lines: best?.lines ?? [], stale: true };
};

/** What is shown (`studio.view`, once a frame): measured if it is, else interpolated; and the lines. */
studio.shown = () => {
  const { now, facts } = studio.state;
  const point = studio.measuredNow();
  const all = studio.pointsHere();
  const fixed = linesFor(point, all);
  if (point) return { kind: "measured", point, tasks: point.tasks, mix: studio.onMix(point), ...fixed };
  const found = studio.interpolate(all, now, facts.scale.matched);
  if (!found) return { kind: "none", point: null, tasks: null, mix: null, ...fixed };
  const mix = studio.data()?.mixed || !found.tasks ? { accuracy: found.overall } : studio.mixed(found.tasks, studio.mix());
  return { kind: "interpolated", point: null, tasks: found.tasks, mix: mix && { accuracy: mix.accuracy, interval: null },
    from: found.from, ...fixed };
};

/** The setting as a request, for the server. */
studio.request = () => {
  const { now } = studio.state;
  return { weights: now.weights, preset: now.preset, scale: now.scale, method: now.method, data: now.data, mix: studio.mix() };
};

// -- the address ------------------------------------------------------------------------------------------------------

/** Writes the setting into the address, so that it can be kept and opened again. */
studio.writeAddress = () => {
  const { now, locked } = studio.state;
  const parts = new URLSearchParams();
  parts.set("w", now.weights.map((weight) => Number(weight.toFixed(6))).join(","));
  if (now.preset) parts.set("preset", now.preset);
  parts.set("scale", now.scale);
  parts.set("method", now.method);
  if (now.data) parts.set("data", now.data);
  if (now.judge !== "weights") parts.set("judge", now.judge);
  if (locked.size) parts.set("lock", [...locked].join(","));
  const text = `#${parts.toString().replaceAll("%2C", ",")}`;
  if (text !== location.hash) history.replaceState(null, "", text);
};

/** Reads a setting from the address; what does not fit this run is left at its start. */
studio.readAddress = () => {
  const { facts } = studio.state;
  const parts = new URLSearchParams(location.hash.slice(1));
  const read = {};
  const weights = (parts.get("w") ?? "").split(",").map(Number);
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  if (weights.length === studio.tasks().length && weights.every((weight) => weight >= 0) && total > 0) {
    const preset = studio.preset(parts.get("preset"));
    const same = preset && studio.sameWeights(preset.weights, weights, 2e-6);
    read.weights = same ? preset.weights : studio.thousandths(weights).map((part) => part / studio.WHOLE);
    read.preset = same ? preset.id : null;
  }
  const scale = parts.get("scale");
  if (scale === "matched") read.scale = scale;
  else if (scale && Number(scale) >= 0 && Number(scale) <= facts.scale.most) read.scale = Number(scale);
  if (studio.method(parts.get("method"))) read.method = parts.get("method");
  if (facts.data.some((data) => data.id === parts.get("data"))) read.data = parts.get("data");
  if (parts.get("judge") === "weights" || studio.preset(parts.get("judge"))) read.judge = parts.get("judge");
  const locked = (parts.get("lock") ?? "").split(",").filter(Boolean).map(Number);
  return { values: read, locked: new Set(locked.filter((t) => t in studio.tasks())) };
};
}
