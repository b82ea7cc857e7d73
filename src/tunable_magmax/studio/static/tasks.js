"use strict";
// One row for each task: lock, name, slider with the estimate's band, share, and accuracy against the fixed lines.
{
const LINES = ["base", "last", "best", "magmax"];
const MANY = 16;

let rows = [];
let drag = null; // { moving, basis }: shares when the present slider was first moved

studio.buildTasks = () => {
  const names = studio.tasks();
  rows = names.map(makeRow);
  const list = studio.find("tasks");
  list.replaceChildren(...rows.map((row) => row.root));
  list.classList.toggle("compact", names.length > MANY);
  for (const button of document.querySelectorAll("[data-sort]")) {
    button.addEventListener("click", () => sortRows(button));
  }
  studio.watch((topics) => {
    if (topics.has("facts")) drawBands();
    drawWeights();
    drawAccuracies(topics);
  });
};

const makeRow = (name, t) => {
  const id = `weight-${t}`;
  const slider = studio.element("input", { type: "range", id, min: 0, max: studio.WHOLE, step: 1 });
  const number = studio.element("input", {
    type: "number", className: "share", min: 0, max: 100, step: 0.1, inputMode: "decimal",
    attributes: { "aria-label": `share of ${name} in percent` },
  });
  const lock = studio.element("button", {
    type: "button", className: "lock", title: "Lock this share",
    attributes: { "aria-pressed": "false", "aria-label": `lock ${name}` },
    on: { click: () => toggleLock(t) },
  });
  lock.append(lockPicture());
  const band = studio.element("span", { className: "band" });
  const mark = studio.element("span", { className: "mark" });
  const fill = studio.element("span", { className: "fill" });
  const track = studio.element("div", { className: "track" }, band, mark, fill);
  const bar = makeBar();
  const accuracy = studio.element("output", { className: "accuracy" });
  const classes = studio.state.facts.run.classes?.[t];
  const label = studio.element("label", { htmlFor: id, className: "name", textContent: name });
  label.title = classes ? `${name}: ${classes.slice(0, 12).join(", ")}${classes.length > 12 ? " …" : ""}` : name;
  slider.addEventListener("input", () => move(t, Number(slider.value)));
  slider.addEventListener("keydown", (event) => stepByKey(event, t));
  slider.addEventListener("blur", () => { drag = null; });
  slider.addEventListener("pointerdown", () => { drag = null; });
  number.addEventListener("change", () => { drag = null; move(t, Math.round(10 * Number(number.value))); });
  const root = studio.element("li", { className: "task" }, lock, label,
    studio.element("div", { className: "slider" }, track, slider),
    studio.element("span", { className: "share-box" }, number, studio.element("span", { textContent: "%", attributes: { "aria-hidden": "true" } })),
    bar.root, accuracy);
  return { t, root, slider, number, lock, band, mark, fill, bar, accuracy };
};

const lockPicture = () => studio.shape("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" },
  studio.shape("path", { class: "shackle", d: "M5 7V5a3 3 0 0 1 6 0v2", fill: "none", stroke: "currentColor", "stroke-width": 1.5 }),
  studio.shape("rect", { class: "body", x: 3.5, y: 7, width: 9, height: 6.5, rx: 1.2, stroke: "currentColor", "stroke-width": 1.2 }));

/** A bar in parts of its width: fill, whisker, and a tick for each fixed line. */
const makeBar = () => {
  const fill = studio.shape("rect", { class: "bar-fill", x: 0, y: "26%", height: "48%", width: 0, rx: 2 });
  const whisker = studio.shape("line", { class: "whisker", y1: "50%", y2: "50%" });
  const ticks = Object.fromEntries(LINES.map((name) =>
    [name, studio.shape("line", { class: `tick line-${name}`, ...TICKS[name] })]));
  const root = studio.shape("svg", { class: "bar", role: "img" },
    studio.shape("rect", { class: "bar-ground", x: 0, y: "26%", height: "48%", width: "100%", rx: 2 }),
    fill, whisker, ...Object.values(ticks));
  return { root, fill, whisker, ticks };
};

// Ticks of lines at the same place stay apart: whole, upper and lower halves.
const TICKS = {
  base: { y1: "4%", y2: "96%" }, last: { y1: "4%", y2: "50%" }, best: { y1: "50%", y2: "96%" },
  magmax: { y1: "4%", y2: "96%" },
};

/** Draws a bar. `lines`: accuracy by name. */
studio.drawBar = (bar, accuracy, interval, kind, lines, digits = 2) => {
  const place = (share) => `${(100 * share).toFixed(digits)}%`;
  studio.attributes(bar.fill, { width: place(accuracy ?? 0), class: `bar-fill ${kind}` });
  const whisker = interval && accuracy !== null ? { x1: place(interval[0]), x2: place(interval[1]) } : { x1: 0, x2: 0 };
  studio.attributes(bar.whisker, whisker);
  for (const name of LINES) {
    const value = lines[name], known = value !== null && value !== undefined;
    studio.attributes(bar.ticks[name], { x1: place(value ?? 0), x2: place(value ?? 0), visibility: known ? null : "hidden" });
  }
};

// -- weights ----------------------------------------------------------------------------------------------------------

const shares = () => studio.thousandths(studio.state.now.weights);

const move = (t, wanted) => {
  if (drag?.moving !== t) drag = { moving: t, basis: shares() };
  studio.setParts(studio.moved(drag.basis, studio.state.locked, t, wanted));
};

const STEPS = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 };

/** Arrows move by one percent, with shift by a tenth. */
const stepByKey = (event, t) => {
  const step = STEPS[event.key];
  if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  move(t, shares()[t] + step * (event.shiftKey ? 1 : 10));
};

const toggleLock = (t) => {
  const { locked } = studio.state;
  if (!locked.delete(t)) locked.add(t);
  drag = null;
  studio.changed("now");
};

const drawWeights = () => {
  const { locked } = studio.state;
  const parts = shares();
  const free = parts.length - locked.size;
  for (const row of rows) {
    const part = parts[row.t], held = locked.has(row.t);
    if (Number(row.slider.value) !== part) row.slider.value = part;
    if (document.activeElement !== row.number || drag) row.number.value = (part / 10).toFixed(1);
    row.fill.style.width = `${part / 10}%`;
    row.slider.disabled = row.number.disabled = held || free < 2;
    row.root.classList.toggle("zero", part === 0);
    studio.attributes(row.slider, { "aria-valuetext": `${(part / 10).toFixed(1)} percent${row.bandText ?? ""}` });
    studio.attributes(row.lock, { "aria-pressed": held, title: held ? "Unlock this share" : "Lock this share" });
  }
};

const drawBands = () => {
  const estimate = studio.estimate();
  studio.find("band-key").hidden = !estimate;
  for (const row of rows) {
    row.band.hidden = row.mark.hidden = !estimate;
    row.bandText = "";
    if (!estimate) continue;
    const [low, high] = estimate.intervals[row.t];
    row.band.style.left = `${100 * low}%`;
    row.band.style.width = `${100 * (high - low)}%`;
    row.mark.style.left = `${100 * estimate.weights[row.t]}%`;
    row.bandText = `, estimated ${studio.range([low, high])}`;
  }
};

// -- accuracy ---------------------------------------------------------------------------------------------------------

const drawAccuracies = (topics) => {
  const { kind, tasks, lines } = studio.view;
  for (const row of rows) {
    const task = tasks?.[row.t];
    const own = Object.fromEntries(lines.map((line) => [line.name, line.tasks?.[row.t]]));
    const accuracy = task?.accuracy ?? null;
    studio.drawBar(row.bar, accuracy, task?.interval, kind, own);
    const about = kind === "interpolated" && accuracy !== null ? "≈ " : "";
    studio.write(row.accuracy, `${about}${studio.percent(accuracy, 0)}`);
    row.accuracy.className = `accuracy ${kind}`;
    if (kind === "measured" && (topics.has("points") || topics.has("now") || topics.has("facts"))) describe(row, task, own);
  }
};

const describe = (row, task, own) => {
  if (!task?.samples) {
    studio.attributes(row.bar.root, { "aria-label": "no samples of this task" });
    row.accuracy.title = "no samples of this task";
    return;
  }
  const others = LINES.filter((name) => own[name] !== undefined && own[name] !== null)
    .map((name) => `${studio.lineNames[name]} ${studio.percent(own[name], 0)}`);
  const text = `${task.right} of ${studio.count(task.samples, "sample")} right, 95% interval ${studio.range(task.interval)}`;
  studio.attributes(row.bar.root, { "aria-label": [`accuracy ${studio.percent(task.accuracy, 0)}`, text, ...others].join(", ") });
  row.accuracy.title = text;
};

/** What a line is called. */
studio.lineName = (line) => {
  if (line.name !== "best") return studio.lineNames[line.name];
  const task = studio.tasks()[line.task - 1];
  const short = task.length > 16 ? `${task.slice(0, 15)}…` : task;
  return `best single: ${short}`;
};

studio.lineNames = { old: "its old head", base: "base", last: "last task", best: "best single task", magmax: "MAGMAX" };

// -- order ------------------------------------------------------------------------------------------------------------

const ORDERS = {
  order: (t) => t,
  share: (t) => -studio.state.now.weights[t],
  accuracy: (t) => -(studio.view.tasks?.[t].accuracy ?? -1),
};

/** Sorts rows now; they stay where they are while weights change. */
const sortRows = (button) => {
  const value = ORDERS[button.dataset.sort];
  for (const other of document.querySelectorAll("[data-sort]")) studio.attributes(other, { "aria-pressed": other === button });
  const sorted = [...rows].sort((a, b) => value(a.t) - value(b.t) || a.t - b.t);
  studio.find("tasks").append(...sorted.map((row) => row.root));
};
}
