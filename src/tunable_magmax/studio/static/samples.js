"use strict";
// The site's samples: what they are worth (the trust box), and each of them under the task that it is like.
{
const FIRST = 24, MORE = 60;
let shownFor = null; // which samples are on the page, so that the same ones are not fetched again
let generation = 0;

studio.buildSamples = () => {
  studio.watch((topics) => {
    const { samples, limits } = studio.state.facts;
    if (topics.has("facts")) {
      studio.write(studio.find("drop-kinds"), `${limits.suffixes.join(" ")} · up to ${limits.files.toLocaleString("en")} files`);
      studio.find("trust").hidden = studio.find("groups").hidden = !samples;
      studio.find("samples-remove").hidden = !samples?.upload;
      if (samples) drawTrust(samples);
    }
    if (topics.has("facts") || topics.has("samples")) drawGroups(samples);
  });
};

// -- trust ------------------------------------------------------------------------------------------------------------

const drawTrust = (facts) => {
  const rows = [
    ["samples", facts.samples.toLocaleString("en"), facts.unreadable ? `${facts.unreadable} unreadable` : ""],
    ["distinct", facts.distinct.toLocaleString("en"), facts.copies ? `${studio.count(facts.copies, "duplicate")}: count once` : "no duplicates"],
    ["with labels", facts.labelled.toLocaleString("en"), facts.unknown_labels ? `${facts.unknown_labels} of no class of this run` : ""],
  ];
  if (facts.outside !== null) {
    const usual = `usual: ${studio.percent(facts.usual_outside, 0)}`;
    rows.push(["outside every task", studio.percent(facts.outside, 0), facts.outside > 2 * facts.usual_outside ? `much; ${usual}` : usual]);
  }
  if (facts.expected_error !== null) rows.push(["expected error of the weights", studio.percent(facts.expected_error, 0), "share of weight in the wrong place"]);
  studio.find("trust-facts").replaceChildren(...rows.map(([name, value, note]) => studio.element("div", {},
    studio.element("dt", { textContent: name }), studio.element("dd", {}, studio.element("strong", { textContent: value }), note ? studio.element("small", { textContent: note }) : null))));
  studio.find("trust-warnings").replaceChildren(...facts.warnings.map((text) => studio.element("li", { textContent: text })));
};

// -- groups -----------------------------------------------------------------------------------------------------------

const drawGroups = (facts) => {
  const key = facts && JSON.stringify([facts.upload, facts.samples, facts.tasks]);
  if (key === shownFor) return;
  shownFor = key;
  generation += 1;
  if (!facts) { studio.find("groups").replaceChildren(); return; }
  const groups = [];
  if (facts.outside > 0) groups.push(makeGroup("outside", "Outside every task", studio.percent(facts.outside, 0)));
  const tasks = Object.entries(facts.tasks).map(([t, count]) => ({ count, t: Number(t) })).sort((a, b) => b.count - a.count);
  const total = tasks.reduce((sum, { count }) => sum + count, 0);
  for (const { count, t } of tasks) groups.push(makeGroup(`task-${t}`, studio.tasks()[t], `${count}, ${studio.percent(count / total, 0)}`));
  if (!tasks.length) groups.push(makeGroup("all", "All samples", String(facts.samples)));
  studio.find("groups").replaceChildren(...groups.map((group) => group.root));
  fillInTurn(groups, generation);
};

const fillInTurn = async (groups, mine) => {
  for (const group of groups) {
    if (mine !== generation) return;
    await group.fill(FIRST);
  }
};

const makeGroup = (show, title, facts) => {
  const list = studio.element("ul", { className: studio.state.facts.samples.kind === "text" ? "lines" : "pictures" });
  const more = studio.element("button", { type: "button", className: "small", hidden: true, on: { click: () => fill(MORE) } });
  const root = studio.element("section", { className: "group", attributes: { "data-show": show } },
    studio.element("h4", {}, title, " ", studio.element("small", { textContent: facts })), list, more);
  const fill = async (number) => {
    const start = list.querySelectorAll(".sample").length;
    try {
      const answer = await studio.get(`/api/samples?start=${start}&count=${number}&show=${show}`);
      list.append(...answer.samples.map(makeSample));
      const left = answer.shown - list.querySelectorAll(".sample").length;
      more.hidden = left <= 0;
      studio.write(more, `${left} more`);
    } catch (error) {
      list.replaceChildren(studio.element("li", { className: "none", textContent: error.message }));
    }
  };
  return { root, fill };
};

const makeSample = (sample) => {
  const facts = [
    sample.label, sample.task === null ? null : `most like ${studio.tasks()[sample.task]} (${studio.percent(sample.share, 0)})`,
    sample.outside ? "outside every task" : null,
  ].filter(Boolean).join("\n");
  const item = studio.element("li", { className: "sample", title: facts });
  item.classList.toggle("outside", Boolean(sample.outside));
  if (sample.picture) item.append(studio.element("img", { src: sample.picture, alt: sample.label ?? `sample ${sample.id + 1}`, width: 56, height: 56 }));
  else item.append(studio.element("span", { className: "text", textContent: sample.text ?? "unreadable" }));
  return item;
};
}
