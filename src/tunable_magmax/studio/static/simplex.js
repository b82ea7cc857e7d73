"use strict";
// All preferences of two tasks on a line, or of three in a triangle: accuracy on the mix, measured and interpolated.
{
const LINE_HEIGHT = 240, GRID = 24;
const MARGIN = { left: 46, right: 14, top: 14, bottom: 40 };

studio.buildSimplex = () => {
  const box = studio.find("simplex");
  const draw = { 2: drawLine, 3: drawTriangle }[studio.tasks().length];
  box.hidden = !draw;
  if (!draw) return;
  const root = studio.shape("svg", { class: "chart simplex", role: "img" });
  studio.find("simplex-picture").replaceChildren(root);
  const frame = studio.keepWidth(studio.find("simplex-picture"));
  let place = null; // from a position on the picture to weights
  studio.watch(() => { place = draw(root, frame.width) ?? place; });
  const take = (event) => {
    if (!place || studio.state.locked.size) return;
    const frame = root.getBoundingClientRect();
    studio.setParts(studio.thousandths(place(event.clientX - frame.left, event.clientY - frame.top)));
  };
  root.addEventListener("pointerdown", (event) => { root.setPointerCapture(event.pointerId); take(event); });
  root.addEventListener("pointermove", (event) => { if (root.hasPointerCapture(event.pointerId)) take(event); });
};

/** Accuracy of some weights on the present mix, with everything else as it is set. */
const accuracyAt = (weights, points) => {
  const { now, facts } = studio.state;
  const found = studio.interpolate(points, { ...now, weights }, facts.scale.matched);
  if (!found) return null;
  const tasks = found.tasks?.map((task) => task.accuracy) ?? null;
  const mix = studio.data()?.mixed || !tasks ? found.overall : studio.mean(tasks, studio.mix());
  return { tasks, mix };
};

const alike = () => {
  const { now } = studio.state;
  return studio.pointsHere().filter((point) => point.method === now.method && point.prior === now.prior && point.scale === now.scale);
};

// -- two tasks --------------------------------------------------------------------------------------------------------

const drawLine = (root, width) => {
  const points = studio.pointsHere(), names = studio.tasks();
  const right = width - MARGIN.right, bottom = LINE_HEIGHT - MARGIN.bottom;
  const x = (share) => MARGIN.left + share * (right - MARGIN.left);
  const y = (accuracy) => bottom - accuracy * (bottom - MARGIN.top);
  const steps = Array.from({ length: 41 }, (_, k) => k / 40);
  const values = steps.map((share) => accuracyAt([1 - share, share], points));
  const known = values.every(Boolean);
  const path = (value) => steps.map((share, k) => `${k ? "L" : "M"}${x(share).toFixed(1)} ${y(value(values[k])).toFixed(1)}`).join("");
  const curve = (value, className) => studio.shape("path", { d: path(value), class: `curve ${className}` });
  const dots = alike().flatMap((point) => {
    const at = x(point.weights[1]);
    const dot = (accuracy, className) => studio.shape("circle", { cx: at, cy: y(accuracy), r: 3.5, class: `dot ${className}` });
    return [...(point.tasks ?? []).map((task, t) => dot(task.accuracy ?? 0, `task-${t}`)), dot(studio.onMix(point).accuracy, "mix")];
  });
  const text = (content, attributes) => studio.shape("text", attributes, content);
  const now = studio.state.now.weights[1];
  studio.attributes(root, { width, height: LINE_HEIGHT, "aria-label": `Accuracy from ${names[0]} alone to ${names[1]} alone` });
  root.replaceChildren(
    studio.shape("g", { class: "axes" },
      ...[0, 0.25, 0.5, 0.75, 1].flatMap((value) => [
        studio.shape("line", { x1: MARGIN.left, x2: right, y1: y(value), y2: y(value) }),
        text(`${100 * value}`, { x: MARGIN.left - 7, y: y(value) + 4, "text-anchor": "end" })]),
      text(`only ${names[0]}`, { x: MARGIN.left, y: bottom + 18 }), text(`only ${names[1]}`, { x: right, y: bottom + 18, "text-anchor": "end" }),
      studio.shape("line", { class: "here", x1: x(now), x2: x(now), y1: MARGIN.top, y2: bottom })),
    ...(known ? [...(values[0].tasks ? [curve((v) => v.tasks[0] ?? 0, "task-0"), curve((v) => v.tasks[1] ?? 0, "task-1")] : []),
      curve((v) => v.mix, "mix")] : []),
    ...dots);
  studio.find("simplex-key").replaceChildren(...[["mix", "what matters"], ["task-0", names[0]], ["task-1", names[1]]].map(([className, name]) =>
    studio.element("span", {}, studio.element("span", { className: `swatch ${className}` }), name)));
  return (left) => { const share = Math.min(1, Math.max(0, (left - MARGIN.left) / (right - MARGIN.left))); return [1 - share, share]; };
};

// -- three tasks ------------------------------------------------------------------------------------------------------

const drawTriangle = (root, width) => {
  const side = Math.min(width - 20, 400), height = side * 0.866, left = (width - side) / 2, top = 24;
  const corners = [[left, top + height], [left + side, top + height], [left + side / 2, top]];
  const at = (weights) => [0, 1].map((axis) => weights.reduce((sum, weight, t) => sum + weight * corners[t][axis], 0));
  const points = studio.pointsHere(), cells = cellsOf(root, width, at);
  for (const cell of cells) cell.value = accuracyAt(cell.middle, points)?.mix ?? null;
  const values = cells.map((cell) => cell.value).filter((value) => value !== null);
  const low = Math.min(...values), high = Math.max(...values);
  for (const { shape, value } of cells) {
    const share = value === null ? 0 : Math.round((100 * (value - low)) / (high - low || 1));
    shape.style.fill = shape.style.stroke = value === null ? "none" : `color-mix(in oklab, var(--high) ${share}%, var(--low))`;
  }
  const names = studio.tasks().map((name, t) => studio.shape("text", {
    x: corners[t][0], y: corners[t][1] + (t === 2 ? -9 : 18), "text-anchor": ["start", "end", "middle"][t] }, name));
  const dots = alike().map((point) => {
    const [cx, cy] = at(point.weights);
    return studio.shape("circle", { cx, cy, r: 3.5, class: "dot" }, studio.shape("title", {}, studio.describePoint(point)));
  });
  const [cx, cy] = at(studio.state.now.weights);
  studio.attributes(root, { width, height: height + top + 28, "aria-label": `Accuracy of all preferences of ${studio.tasks().join(", ")}` });
  root.lastChild.replaceChildren(...names, ...dots, ...["halo", "here"].map((className) => studio.shape("circle", { cx, cy, r: 8, class: className })));
  studio.find("simplex-key").replaceChildren(...(values.length ? [studio.percent(low, 0), studio.element("span", { className: "ramp" }), studio.percent(high, 0), " on what matters, interpolated between the dots"] : []));
  return (px, py) => barycentric(px, py, corners);
};

let drawn = null; // { width, cells }: the small triangles, made once for each width

const cellsOf = (root, width, at) => {
  if (drawn?.width === width) return drawn.cells;
  const cells = triangles().map((cell) => ({
    middle: cell[0].map((_, t) => (cell[0][t] + cell[1][t] + cell[2][t]) / 3),
    shape: studio.shape("polygon", { points: cell.map((corner) => at(corner).map((c) => c.toFixed(1)).join(",")).join(" ") }),
  }));
  root.replaceChildren(studio.shape("g", {}, ...cells.map((cell) => cell.shape)), studio.shape("g"));
  drawn = { width, cells };
  return cells;
};

/** The triangle in small ones, each by the weights of its corners. */
const triangles = () => {
  const cells = [];
  const corner = (a, b) => [a / GRID, b / GRID, (GRID - a - b) / GRID];
  for (let a = 0; a < GRID; a += 1) {
    for (let b = 0; a + b < GRID; b += 1) {
      cells.push([corner(a, b), corner(a + 1, b), corner(a, b + 1)]);
      if (a + b + 1 < GRID) cells.push([corner(a + 1, b), corner(a, b + 1), corner(a + 1, b + 1)]);
    }
  }
  return cells;
};

const barycentric = (x, y, [[x0, y0], [x1, y1], [x2, y2]]) => {
  const whole = (y1 - y2) * (x0 - x2) + (x2 - x1) * (y0 - y2);
  const first = ((y1 - y2) * (x - x2) + (x2 - x1) * (y - y2)) / whole;
  const second = ((y2 - y0) * (x - x2) + (x0 - x2) * (y - y2)) / whole;
  const weights = [first, second, 1 - first - second].map((weight) => Math.max(0, weight));
  return weights.some((weight) => weight > 0) ? weights : [1, 1, 1];
};
}
