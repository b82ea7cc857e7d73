"use strict";
// A table of all measured points.
{
studio.buildPoints = () => {
  const table = studio.find("all-points");
  const soon = studio.later(() => { if (table.open) drawPoints(); }, 150);
  table.addEventListener("toggle", soon);
  studio.watch((topics) => {
    if (topics.has("points") || topics.has("now")) soon();
    studio.write(studio.find("points-count"), counted(studio.pointsHere()));
  });
};

/** How many points there are; with and without the prior are two points of the same weights. */
const counted = (points) => {
  const informed = points.filter((point) => point.prior).length, plain = points.length - informed;
  return informed && plain ? `${informed.toLocaleString("en")} with the prior, ${plain.toLocaleString("en")} without` : points.length.toLocaleString("en");
};

const cell = (name, text, className = "") => studio.element(name, { textContent: text, className });

const HEADS = ["on what matters", "all samples", "weights, method, scale", ""];

const drawPoints = () => {
  const points = studio.pointsHere().map((point) => ({ point, accuracy: studio.onMix(point)?.accuracy ?? 0 })).sort((a, b) => b.accuracy - a.accuracy);
  const head = HEADS.map((name, k) => studio.element("th", { textContent: name, scope: "col", className: k < 2 ? "number" : "" }));
  const rows = points.map(({ point, accuracy }) => {
    const current = studio.isNow(point);
    const go = studio.element("button", { type: "button", className: "small", textContent: current ? "shown" : "show", disabled: current, on: { click: () => studio.goTo(point.id) } });
    return studio.element("tr", { className: current ? "current" : "" }, cell("td", studio.percent(accuracy), "number"), cell("td", studio.percent(point.overall.accuracy), "number"),
      cell("td", studio.describePoint(point).replace(/^[^:]*: /, "")), studio.element("td", {}, go));
  });
  studio.find("points-table").replaceChildren(studio.element("thead", {}, studio.element("tr", {}, ...head)), studio.element("tbody", {}, ...rows));
};

/** Sets the page to a measured point. */
studio.goTo = (id) => {
  const point = studio.state.points.get(id);
  const preset = studio.preset(point.preset);
  const same = preset && studio.sameWeights(preset.weights, point.weights);
  studio.set({ weights: point.weights, preset: same ? preset.id : null, scale: point.scale, prior: point.prior, method: point.method });
};
}
