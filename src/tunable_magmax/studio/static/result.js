"use strict";
// Accuracy on what matters: the number, how sure it is, and beside it the same merge with its old head and the fixed lines.
{
studio.buildResult = () => {
  const rows = ["this", ...LINES].map(makeComparison);
  studio.find("comparison").replaceChildren(...rows.map((row) => row.root));
  studio.watch(() => {
    studio.find("bench").classList.toggle("stale", studio.view.lines.length > 0 && studio.view.stale);
    drawHeadline();
    for (const row of rows) drawComparison(row);
    drawSentence();
  });
};

const LINES = ["old", "base", "last", "best", "magmax"];

const TITLES = {
  old: "the same merge with the head that it had before one was fitted", base: "the base, with a head of its own",
  last: "the last checkpoint, with a head of its own", magmax: "MAGMAX, with a head of its own",
};

const makeComparison = (name) => {
  const label = studio.element("span", { className: "name" });
  if (name !== "this" && name !== "old") label.append(studio.element("span", { className: `key line-${name}`, attributes: { "aria-hidden": "true" } }));
  const text = studio.element("span", { className: "text", textContent: name === "this" ? "this preference" : studio.lineNames[name] });
  label.append(text);
  const fill = studio.shape("rect", { x: 0, y: "22%", height: "56%", width: 0, rx: 2, class: `bar-fill line-fill-${name}` });
  const whisker = studio.shape("line", { class: "whisker", y1: "50%", y2: "50%" });
  const bar = studio.shape("svg", { class: "bar", "aria-hidden": "true" },
    studio.shape("rect", { class: "bar-ground", x: 0, y: "22%", height: "56%", width: "100%", rx: 2 }), fill, whisker);
  const number = studio.element("span", { className: "accuracy" });
  const verdict = studio.element("span", { className: "verdict" });
  return { name, text, fill, whisker, number, verdict, root: studio.element("li", {}, label, bar, number, verdict) };
};

const drawHeadline = () => {
  const { kind, mix, point, from } = studio.view;
  const { busy, facts } = studio.state;
  const big = studio.find("accuracy");
  studio.write(big, mix ? `${kind === "interpolated" ? "≈ " : ""}${studio.percent(mix.accuracy)}` : "–");
  big.className = `headline ${kind}`;
  const badge = studio.find("badge");
  studio.write(badge, { measured: "measured", interpolated: "interpolated", none: "not measured" }[kind]);
  badge.className = `badge ${kind}`;
  studio.find("busy").hidden = !busy;
  studio.write(studio.find("accuracy-about"), about(kind, mix, point, from, facts));
};

const about = (kind, mix, point, from, facts) => {
  if (!facts.data.length) {
    return facts.ready === false ? "The run’s checkpoints are being read."
      : "Nothing to measure on: add samples with labels below, or start with --data.";
  }
  if (kind === "measured" && mix.interval) {
    const samples = point.overall.samples;
    const worth = studio.data()?.mixed || !point.tasks ? samples : Math.round(studio.mixed(point.tasks, studio.mix()).samples);
    const note = worth < samples ? `, worth ${worth.toLocaleString("en")} on this mix` : "";
    const head = point.head === "fitted" ? "; head fitted to this merge" : "";
    return `95% interval ${studio.range(mix.interval)}, on ${studio.count(samples, "sample")}${note}${head}`;
  }
  if (kind === "interpolated") {
    return `Between ${studio.count(from, "measured point")}, not measured itself.`;
  }
  return "No point was measured yet with this method.";
};

const drawComparison = (row) => {
  const { kind, mix, lines, point, stale } = studio.view;
  const line = lines.find((other) => other.name === row.name);
  const own = row.name === "this";
  const accuracy = own ? mix?.accuracy ?? null : line ? studio.lineOnMix(line) : null;
  const interval = own ? mix?.interval : line && studio.sameWeights(point?.mix ?? [], studio.mix()) ? line.mix.interval : null;
  const place = (share) => `${(100 * share).toFixed(2)}%`;
  studio.attributes(row.fill, { width: place(accuracy ?? 0), class: `bar-fill line-fill-${row.name} ${own ? kind : ""}` });
  studio.attributes(row.whisker, interval ? { x1: place(interval[0]), x2: place(interval[1]) } : { x1: 0, x2: 0 });
  studio.write(row.number, `${accuracy !== null && (own ? kind === "interpolated" : stale) ? "≈ " : ""}${studio.percent(accuracy)}`);
  row.root.classList.toggle("unknown", accuracy === null);
  if (own) return;
  studio.write(row.text, line ? studio.lineName(line) : studio.lineNames[row.name]);
  row.text.title = !line ? "" : row.name === "best" ? `${studio.tasks()[line.task - 1]}: the best of all tasks on these very samples, which flatters it` : TITLES[row.name];
  // Known sample by sample, for the present mix.
  const compared = kind === "measured" && line && !stale && studio.isComplete(point) ? line : null;
  studio.write(row.verdict, compared ? studio.points(compared.difference) : "");
  row.verdict.className = `verdict ${compared ? compared.verdict.replaceAll(" ", "-") : ""}`;
  row.verdict.title = !compared ? "" : `points; ${compared.verdict === "cannot tell" ? "not distinguishable with these samples" : `this preference is ${compared.verdict}`}`;
};

// -- in words ---------------------------------------------------------------------------------------------------------

const WORDS = { old: "its old head", base: "the base", last: "the last checkpoint", best: "the best single task here", magmax: "MAGMAX" };

const listed = (lines) => new Intl.ListFormat("en-GB").format(lines.map((line) => WORDS[line.name]));

/** More samples than anybody has are no advice. */
const MOST_TOLD = 10_000;

/** Says which lines a point is clearly better or worse than, and which it cannot be told from with these samples. */
const verdicts = ({ lines, overall }) => {
  const parts = ["clearly better", "clearly worse"].map((verdict) => [verdict, lines.filter((line) => line.verdict === verdict)])
    .filter(([, some]) => some.length).map(([verdict, some]) => `${verdict} than ${listed(some)}`);
  const alike = lines.filter((line) => line.verdict === "cannot tell").sort((a, b) => b.mix.accuracy - a.mix.accuracy);
  if (alike.length) {
    const [first] = alike, would = first.needed !== null && first.needed > overall.samples && first.needed <= MOST_TOLD;
    parts.push(`not distinguishable from ${listed(alike)} with ${studio.count(overall.samples, "sample")}${would
      ? `; about ${first.needed.toLocaleString("en")} would tell it from ${WORDS[first.name]}, if the difference is real` : ""}`);
  }
  const text = parts.join("; ");
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
};

const drawSentence = () => {
  const { kind, point } = studio.view;
  const { failed, facts } = studio.state;
  let text = "";
  if (failed) text = `Could not be measured: ${failed.message}`;
  else if (kind === "measured" && studio.isComplete(point)) text = verdicts(point);
  else if (kind === "measured" && facts.lines.total && !facts.lines.ready) {
    text = `Measuring what this is compared with: ${facts.lines.done} of ${facts.lines.total} models.`;
  }
  else if (kind === "interpolated") text = "Comparisons follow once it is measured.";
  const box = studio.find("sentence");
  studio.write(box, text);
  box.classList.toggle("failed", Boolean(failed));
};
}
