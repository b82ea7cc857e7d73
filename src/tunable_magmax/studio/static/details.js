"use strict";
// What each task gives to the merge, by layer; and a table of all measured points.
{
studio.buildDetails = () => {
  const box = studio.find("details");
  const soon = studio.later(() => { if (box.open) drawDetails(); }, 250);
  box.addEventListener("toggle", soon);
  const table = studio.find("all-points");
  const tableSoon = studio.later(() => { if (table.open) drawPoints(); }, 150);
  table.addEventListener("toggle", tableSoon);
  studio.watch((topics) => {
    if (!studio.embedded && (topics.has("now") || topics.has("facts"))) soon();
    if (topics.has("points") || topics.has("now")) tableSoon();
    studio.write(studio.find("points-count"), counted(studio.pointsHere()));
  });
};

/** How many points there are; with and without the prior are two points of the same weights. */
const counted = (points) => {
  const informed = points.filter((point) => point.prior).length, plain = points.length - informed;
  return informed && plain ? `${informed.toLocaleString("en")} with the prior, ${plain.toLocaleString("en")} without` : points.length.toLocaleString("en");
};

const cell = (name, text, className = "") => studio.element(name, { textContent: text, className });

// -- elements ---------------------------------------------------------------------------------------------------------

const drawDetails = async () => {
  const about = studio.find("details-about");
  let found;
  try {
    found = await studio.post("/api/details", studio.request());
  } catch (error) {
    studio.write(about, error.message);
    return;
  }
  const whole = found.elements.toLocaleString("en");
  const left = found.leftovers === null ? "" : ` ${found.leftovers.toLocaleString("en")} of them (${studio.percent(found.leftovers / found.elements)}) are leftovers, which the lottery gave away.`;
  studio.write(about, `${whole} elements are merged at scale ${studio.scaleText(found.scale)}.${left}`);
  studio.find("layers").hidden = found.counts === null;
  if (found.counts === null) {
    about.append(` ${studio.methodName(studio.state.now.method)} gives no element to one task alone.`);
    return;
  }
  const head = ["layer", "elements", ...studio.tasks()].map((name, k) => studio.element("th", { textContent: name, scope: "col", className: k ? "number" : "" }));
  const rows = [{ name: "all", elements: found.elements, counts: found.counts }, ...found.layers].map(layerRow);
  studio.find("layers-table").replaceChildren(studio.element("thead", {}, studio.element("tr", {}, ...head)), studio.element("tbody", {}, ...rows));
};

const layerRow = ({ name, elements, counts }) => {
  const shares = counts.map((count) => {
    const made = cell("td", studio.percent(count / elements), "number heat");
    made.style.setProperty("--heat", `${Math.round((70 * count) / elements)}%`);
    made.title = count.toLocaleString("en");
    return made;
  });
  return studio.element("tr", {}, studio.element("th", { scope: "row", textContent: name }), cell("td", elements.toLocaleString("en"), "number"), ...shares);
};

// -- measured points --------------------------------------------------------------------------------------------------

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
