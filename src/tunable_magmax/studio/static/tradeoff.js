"use strict";
// The trade-off: accuracy on what matters against accuracy on the rest, for all measured points, and the front.
// Samples without the rest have none: there the points stand in the order in which they were measured.
{
const MARGIN = { left: 46, right: 14, top: 12, bottom: 40 };
const HEIGHT = 300, INSET = 12, MANY = 10;

let drawing = null; // { root, axes, front, points, lines, now, circles }
let frame = null;

studio.buildTradeoff = () => {
  drawing = makeDrawing();
  studio.find("tradeoff").replaceChildren(drawing.root);
  frame = studio.keepWidth(studio.find("tradeoff"));
  studio.watch(draw);
};

const makeDrawing = () => {
  const parts = { axes: "axes", front: "front", points: "measured-points", lines: "fixed", now: "now" };
  const groups = Object.fromEntries(Object.entries(parts).map(([name, className]) => [name, studio.shape("g", { class: className })]));
  const root = studio.shape("svg", { class: "chart", height: HEIGHT, role: "group" },
    ...Object.values(groups));
  groups.points.addEventListener("keydown", walk);
  return { root, ...groups, circles: new Map() };
};

const ACROSS = {
  rest: { axis: "accuracy on the rest, % →", about: "Right: better on tasks below an equal share." },
  worst: { axis: "accuracy on the worst task, % →", about: "All tasks count alike, so to the right is the worst task’s accuracy." },
  order: { axis: "in the order of measuring →", about: "These samples hold none of the other tasks, so there is nothing to trade: to the right are later points." },
};

/** What the picture shows from left to right. Where all tasks count alike there is no rest: then the worst task. */
const acrossOf = (rest) => {
  const held = studio.data()?.tasks;
  if (!held || (rest && !rest.some((share, t) => share > 0 && held[t] > 0))) return "order";
  return rest ? "rest" : "worst";
};

/** What a point or line is on both axes; `number`: its place in the order of measuring. */
const place = (across, tasks, rest, top, number) => {
  if (top === null || top === undefined) return null;
  if (across === "order") return { x: number, y: top };
  if (!tasks) return null;
  const known = tasks.filter((accuracy) => accuracy !== null && accuracy !== undefined);
  const x = across === "rest" ? studio.mean(tasks, rest) : known.length ? Math.min(...known) : null;
  return x === null ? null : { x, y: top };
};

const draw = () => {
  const { width } = frame;
  const rest = studio.restOf(studio.mix());
  const across = acrossOf(rest), known = studio.pointsHere(), tops = studio.allOnMix(known);
  const points = known.map((point, k) => ({ point, ...place(across, point.accuracies, rest, tops[k], k + 1) })).filter((item) => item.x !== undefined);
  const lines = studio.view.lines.filter((line) => line.name !== "old").map((line) => ({ line, ...place(across, line.tasks, rest, studio.lineOnMix(line), 0) }))
    .filter((item) => item.x !== undefined);
  const { point, tasks, mix } = studio.view;
  const now = place(across, tasks?.map((task) => task.accuracy), rest, mix?.accuracy, point ? known.indexOf(point) + 1 : known.length + 1);
  const all = [...points, ...lines, ...(now ? [now] : [])];
  describe(all.length > 0, across, points.length);
  if (!all.length || !width) return;
  const [left, right] = [MARGIN.left, width - MARGIN.right];
  const scales = { x: across === "order" ? steps(known.length + 1, left, right) : axis(all.map((item) => item.x), left, right),
    y: axis(all.map((item) => item.y), HEIGHT - MARGIN.bottom, MARGIN.top) };
  studio.attributes(drawing.root, { width });
  drawAxes(width, scales, across);
  drawFront(across === "order" ? [] : points, scales);
  drawPoints(points, scales);
  drawLines(lines, points, scales, now, width);
  drawNow(now, scales);
};

/** Says what the picture shows, or what it lacks; an empty one takes no room. */
const describe = (any, across, points) => {
  const { facts } = studio.state, none = studio.find("tradeoff-none"), about = studio.find("tradeoff-about");
  studio.find("tradeoff").hidden = about.hidden = !any;
  none.hidden = any;
  studio.write(none, facts.data.length ? "The first point is not measured yet."
    : facts.ready === false ? "The run’s checkpoints are being read."
      : "Points appear here once there are samples with labels to measure on: add some below, or start with --data.");
  studio.write(about, `Each dot is a measured preference; choose one to go there. Up: better on what matters. ${ACROSS[across].about}${points < MANY ? ""
    : ` The best of ${points} on the same samples has been lucky, too: expect a little less elsewhere.`}`);
  studio.attributes(drawing.root, { "aria-label": `Accuracy on what matters, by ${ACROSS[across].axis.replace(/(, %)? →/, "")}` });
};

/** A scale from 0 to a number of points, without ticks. */
const steps = (last, from, to) => ({ at: (value) => from + INSET + (value / last) * (to - from - 2 * INSET), ticks: [] });

/** A scale over some shares, from round number to round number. */
const axis = (values, from, to) => {
  let low = Math.min(...values), high = Math.max(...values);
  const gap = Math.max(high - low, 0.1);
  const step = [0.02, 0.05, 0.1, 0.2, 0.25].find((size) => gap / size <= 5) ?? 0.25;
  low = Math.max(0, Math.floor((low - 0.06 * gap) / step) * step);
  high = Math.min(1, Math.ceil((high + 0.06 * gap) / step) * step);
  const ticks = [];
  for (let value = low; value <= high + 1e-9; value += step) ticks.push(value);
  const inset = from < to ? INSET : -INSET; // so that no mark lies on the frame
  const at = (value) => from + inset + ((value - low) / (high - low)) * (to - from - 2 * inset);
  return { at, ticks };
};

const drawAxes = (width, { x, y }, across) => {
  const bottom = HEIGHT - MARGIN.bottom, right = width - MARGIN.right;
  const label = (text, attributes) => studio.shape("text", attributes, text);
  const whole = (value) => `${Math.round(100 * value)}`;
  drawing.axes.replaceChildren(
    ...y.ticks.map((value) => studio.shape("line", { x1: MARGIN.left, x2: right, y1: y.at(value), y2: y.at(value) })),
    ...x.ticks.map((value) => studio.shape("line", { x1: x.at(value), x2: x.at(value), y1: MARGIN.top, y2: bottom })),
    ...y.ticks.map((value) => label(whole(value), { x: MARGIN.left - 7, y: y.at(value) + 4, "text-anchor": "end" })),
    ...x.ticks.map((value) => label(whole(value), { x: x.at(value), y: bottom + 16, "text-anchor": "middle" })),
    label(ACROSS[across].axis, { x: right, y: HEIGHT - 6, "text-anchor": "end", class: "title" }),
    label("on what matters, % →", { transform: `translate(12 ${MARGIN.top}) rotate(-90)`, "text-anchor": "end", class: "title" }),
  );
};

const drawFront = (points, { x, y }) => {
  const front = studio.front(points);
  const path = front.map((item, k) => {
    const [left, top] = [x.at(item.x).toFixed(1), y.at(item.y).toFixed(1)];
    return k ? `V${top}H${left}` : `M${left} ${top}`; // no straight lines: nobody measured a point between two
  }).join("");
  drawing.front.replaceChildren(studio.shape("path", { d: path }));
  for (const item of points) item.first = front.includes(item);
};

const drawPoints = (points, { x, y }) => {
  const { now } = studio.state, seen = new Set();
  for (const item of points) {
    const { point } = item;
    seen.add(point.id);
    let circle = drawing.circles.get(point.id);
    if (!circle) {
      circle = studio.shape("circle", { r: 5, role: "button", tabindex: -1 }, studio.shape("title"));
      circle.addEventListener("click", () => studio.goTo(point.id));
      drawing.circles.set(point.id, circle);
      drawing.points.append(circle);
    }
    studio.attributes(circle, { cx: x.at(item.x).toFixed(1), cy: y.at(item.y).toFixed(1),
      class: `${point.method === now.method ? "alike" : "other"}${item.first ? " first" : ""}` });
    circle.place = item;
  }
  for (const [id, circle] of drawing.circles) {
    if (seen.has(id)) continue;
    circle.remove();
    drawing.circles.delete(id);
  }
  const stops = [...drawing.circles.values()];
  if (stops.length && !stops.some((circle) => circle.getAttribute("tabindex") === "0")) studio.attributes(stops[0], { tabindex: 0 });
  describePoints();
};

/** Names of points change with the mix; they are worked out when somebody looks. */
const describePoints = studio.later(() => {
  for (const circle of drawing.circles.values()) {
    const text = studio.describePoint(circle.place.point);
    studio.attributes(circle, { "aria-label": text });
    studio.write(circle.firstChild, text);
  }
}, 150);

studio.describePoint = (point) => {
  const parts = studio.thousandths(point.weights);
  const largest = parts.map((part, t) => ({ part, t })).filter(({ part }) => part > 0).sort((a, b) => b.part - a.part);
  const equal = largest.length === parts.length && largest[0].part - largest[largest.length - 1].part <= 1;
  const named = largest.slice(0, 3).map(({ part, t }) => `${studio.tasks()[t]} ${studio.percent(part / studio.WHOLE, 0)}`);
  const weights = equal && parts.length > 1 ? "equal weights" : named.join(", ") + (largest.length > 3 ? ", …" : "");
  const accuracy = studio.percent(studio.onMix(point)?.accuracy);
  return `${accuracy}: ${weights}; ${studio.methodName(point.method)}, scale ${studio.scaleText(point.scale)}`;
};

/** Arrows go from point to point, from left to right; Enter and Space choose one. */
const walk = (event) => {
  const circle = event.target.closest("circle");
  const order = [...drawing.circles.values()].sort((a, b) => a.place.x - b.place.x || a.place.y - b.place.y);
  const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
  if (step) {
    const next = order[order.indexOf(circle) + step];
    if (next) {
      studio.attributes(circle, { tabindex: -1 });
      studio.attributes(next, { tabindex: 0 });
      next.focus();
    }
  } else if (event.key === "Enter" || event.key === " ") {
    studio.goTo(circle.place.point.id);
  } else return;
  event.preventDefault();
};

const SYMBOLS = { base: "M-5 -5H5V5H-5Z", last: "M0 -6L6 5H-6Z", best: "M0 6L6 -5H-6Z", magmax: "M0 -7L7 0L0 7L-7 0Z" };

/** Draws the fixed lines as symbols with names, each name where it covers no other. */
const drawLines = (lines, points, { x, y }, now, width) => {
  const taken = now ? [box(x.at(now.x) - 9, y.at(now.y) - 9, 18, 18)] : [];
  const dots = points.map((item) => box(x.at(item.x) - 5, y.at(item.y) - 5, 10, 10));
  for (const item of lines) taken.push(box(x.at(item.x) - 7, y.at(item.y) - 7, 14, 14));
  const made = [];
  for (const { line, ...at } of lines) {
    const left = x.at(at.x), top = y.at(at.y);
    made.push(studio.shape("path", { d: SYMBOLS[line.name], transform: `translate(${left} ${top})`, class: `symbol line-${line.name}` }));
    const same = lines.filter((other) => Math.hypot(x.at(other.x) - left, y.at(other.y) - top) < 4);
    if (same[0].line !== line) continue; // one text for lines at the same place
    const text = same.map((other) => studio.lineName(other.line)).join(", "), size = 6.4 * text.length;
    const places = [[10, 4, "start", left + 10, top - 7], [-10, 4, "end", left - 10 - size, top - 7],
      [0, -11, "middle", left - size / 2, top - 22], [0, 20, "middle", left - size / 2, top + 9],
      [10, -10, "start", left + 10, top - 21], [10, 18, "start", left + 10, top + 7]];
    const fits = (avoided) => places.find(([, , , l, t]) => l > MARGIN.left && l + size < width - 2 && t > 0
      && !avoided.some((other) => crosses(other, box(l, t, size, 14))));
    const spot = fits([...taken, ...dots]) ?? fits(taken); // rather over a dot than nowhere
    if (!spot) continue;
    const [dx, dy, anchor, l, t] = spot;
    taken.push(box(l, t, size, 14));
    made.push(studio.shape("text", { x: left + dx, y: top + dy, "text-anchor": anchor }, text));
  }
  drawing.lines.replaceChildren(...made);
};

const box = (left, top, width, height) => ({ left, top, right: left + width, bottom: top + height });
const crosses = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

const drawNow = (now, { x, y }) => {
  const ring = now && studio.shape("circle", { cx: x.at(now.x), cy: y.at(now.y), r: 9, class: studio.view.kind });
  drawing.now.replaceChildren(...(ring ? [ring] : []));
};
}
