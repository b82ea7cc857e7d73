"use strict";
// Presets, scale, method, the samples to measure on and the mix to judge by.
{
const METHOD_NAMES = {
  tunable_magmax: "Tunable MAGMAX", tsv: "singular vectors (tsv)", magmax: "MAGMAX", average: "weighted average",
  random_mix: "random mix",
};
const WITHOUT = "Needs samples: drop them under “Your samples”.";

studio.methodName = (name) => METHOD_NAMES[name] ?? name;

studio.buildControls = () => {
  buildPresets();
  studio.find("only").addEventListener("change", (event) => {
    if (event.target.value) studio.usePreset(event.target.value);
  });
  buildScale();
  const method = studio.find("method");
  method.addEventListener("change", () => { // the usual scale follows; one that was chosen stays
    const { now } = studio.state, usual = (name) => studio.method(name).default_scale;
    studio.set({ method: method.value, scale: now.scale === usual(now.method) ? usual(method.value) : now.scale });
  });
  studio.find("data").addEventListener("change", (event) => studio.set({ data: event.target.value }));
  studio.find("judge").addEventListener("change", (event) => studio.set({ judge: event.target.value }));
  studio.watch((topics) => {
    if (topics.has("facts")) { buildPresets(); buildChoices(); }
    if (topics.has("now") || topics.has("facts") || topics.has("points")) drawControls();
  });
};

// -- presets ----------------------------------------------------------------------------------------------------------

const buildPresets = () => {
  const { presets } = studio.state.facts;
  const plain = presets.filter((preset) => !preset.id.startsWith("only-"));
  const buttons = plain.map((preset) => presetButton(preset.id, preset.title, presetFacts(preset), false));
  if (!studio.preset("samples")) buttons.push(presetButton("samples", "from samples", WITHOUT, true));
  studio.find("presets").replaceChildren(...buttons);
  const only = presets.filter((preset) => preset.id.startsWith("only-"));
  studio.find("only").replaceChildren(option("", "only …"), ...only.map((preset) => option(preset.id, preset.title)));
};

const presetFacts = (preset) => {
  if (preset.samples === null && preset.expected_error === null) return preset.title;
  const parts = [preset.samples === null ? "" : studio.count(preset.samples, "sample"),
    preset.expected_error === null ? "" : `expected error ${studio.percent(preset.expected_error, 0)}`];
  return `${preset.method}: ${parts.filter(Boolean).join(", ")}`;
};

/** A preset; one that is `missing` leads to the samples, or waits for those that were given at the start. */
const presetButton = (id, title, facts, missing) => {
  const waits = missing && studio.state.facts.reading;
  return studio.element("button", {
    type: "button", textContent: waits ? `${title}: reading …` : title, title: facts, disabled: waits,
    className: missing ? "missing" : "", attributes: { "data-preset": id },
    on: { click: () => (missing ? studio.pointToSamples(facts) : studio.usePreset(id)) },
  });
};

/** Leads to the samples, for a preset that needs some. */
studio.pointToSamples = (why) => {
  studio.find("samples-title").scrollIntoView({ block: "start" });
  studio.find("choose-files").focus({ preventScroll: true });
  studio.announce(why);
};

const option = (value, text) => studio.element("option", { value, textContent: text });

const buildChoices = () => {
  const { facts, now } = studio.state;
  studio.find("choices").hidden = !facts.data.length;
  studio.find("data").replaceChildren(...facts.data.map((data) =>
    option(data.id, `${data.title}, ${data.samples.toLocaleString("en")}${data.of > data.samples ? ` of ${data.of.toLocaleString("en")}` : ""} samples`)));
  studio.find("data").value = now.data ?? "";
  const presets = facts.presets.filter((preset) => preset.id === "equal" || preset.intervals || preset.id === "given");
  studio.find("judge").replaceChildren(option("weights", "the weights as set"),
    ...presets.map((preset) => option(preset.id, preset.id === "equal" ? "all tasks alike" : `the estimate ${preset.title}`)));
  const methods = facts.methods.map((method) => {
    const made = option(method.name, studio.methodName(method.name));
    made.disabled = method.why_not !== null;
    made.title = method.why_not ?? "";
    return made;
  });
  studio.find("method").replaceChildren(...methods);
};

// -- scale ------------------------------------------------------------------------------------------------------------

let mostScale = 2;

const buildScale = () => {
  const { matched } = studio.state.facts.scale;
  mostScale = Math.max(2, Math.ceil(2 * (matched ?? 1) * 1.2) / 2);
  const slider = studio.find("scale");
  slider.max = mostScale;
  slider.addEventListener("input", () => studio.set({ scale: Number(slider.value) }));
  const marks = [["0.5", 0.5], ["1", 1], ["matched", "matched"]];
  studio.find("scale-marks").replaceChildren(...marks.map(([text, value]) => studio.element("button", {
    type: "button", textContent: text,
    attributes: { "data-scale": value, "aria-label": `scale ${text}` },
    on: { click: () => studio.set({ scale: value }) },
  })));
};

/** What `matched` is for the present weights, as far as it was measured. */
const matchedNow = () => {
  const { point } = studio.view;
  return point && point.scale === "matched" ? point.scale_used : studio.state.facts.scale.matched;
};

const drawScale = () => {
  const { scale } = studio.state.now;
  const slider = studio.find("scale"), matched = matchedNow();
  const number = scale === "matched" ? matched : scale;
  if (number !== null && number > mostScale) { mostScale = Math.ceil(number); slider.max = mostScale; }
  if (number !== null && Math.abs(Number(slider.value) - number) > 1e-9) slider.value = number;
  const measured = studio.view.point?.scale === "matched";
  const shown = scale !== "matched" ? studio.scaleText(scale)
    : matched === null ? "matched" : `matched${measured ? ": " : " ≈ "}${matched.toFixed(2)}`;
  studio.write(studio.find("scale-value"), shown);
  studio.attributes(slider, { "aria-valuetext": shown });
  for (const mark of studio.find("scale-marks").children) {
    const value = mark.dataset.scale === "matched" ? matched : Number(mark.dataset.scale);
    mark.hidden = value === null;
    mark.style.setProperty("--at", value / mostScale);
    studio.attributes(mark, { "aria-pressed": String(scale) === mark.dataset.scale });
  }
};

// -- the rest ---------------------------------------------------------------------------------------------------------

const drawControls = () => {
  const { now } = studio.state;
  for (const button of studio.find("presets").children) {
    studio.attributes(button, { "aria-pressed": button.dataset.preset === now.preset });
  }
  studio.find("only").value = now.preset?.startsWith("only-") ? now.preset : "";
  studio.find("method").value = now.method;
  const data = studio.find("data");
  data.value = now.data ?? "";
  data.title = data.selectedOptions[0]?.textContent ?? ""; // a long path is cut
  const mixed = Boolean(studio.data()?.mixed);
  studio.find("judge").value = now.judge;
  studio.find("judge").disabled = mixed;
  studio.write(studio.find("judge-why"), mixed ? "These samples are the site’s mix themselves." : "");
  const refused = studio.method(now.method)?.weights === "refused";
  studio.write(studio.find("method-why"), refused
    ? `${studio.methodName(now.method)} takes no weights: here they set the head and what counts.` : "");
  drawScale();
};
}
