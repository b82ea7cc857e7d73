"use strict";
// Asks the server to measure what is set: one request at a time, the newest next.
{
let asked = null; // { number, text }: the request under way; number null until the server answered
let refused = null; // a request that failed, or came without lines: it is not asked again until something changes

const wanted = () => {
  const { facts, now, connected } = studio.state;
  if (!connected || !facts.data.length || !now.data || facts.ready === false) return null;
  const point = studio.measuredNow();
  if (point && studio.isComplete(point)) return null;
  const text = JSON.stringify(studio.request());
  return text === refused ? null : text;
};

const ask = async () => {
  const text = wanted();
  if (asked || !text) return;
  asked = { number: null, text };
  showBusy();
  try {
    asked.number = (await studio.post("/api/measure", JSON.parse(text))).request;
    if (answers.has(asked.number)) finish(asked.number, ...answers.get(asked.number));
  } catch (error) {
    finish(null, error);
  }
};

const answers = new Map(); // events that came before the answer to their request

const finish = (number, error = null, complete = true) => {
  if (asked && asked.number !== number) {
    if (asked.number === null && number !== null) answers.set(number, [error, complete]);
    return;
  }
  if (!asked) return;
  const { text } = asked;
  asked = null;
  answers.clear();
  const failed = error && error !== "superseded";
  refused = failed || !complete ? text : null;
  studio.state.failed = failed ? error : null;
  showBusy();
  ask();
};

const showBusy = () => {
  studio.state.busy = asked !== null;
  studio.changed("busy");
};

const askSoon = studio.later(ask, 60);

studio.measuring = {
  /** Asks for what is set, unless it is known or being measured. */
  ask: askSoon,
  /** Takes the events measured, superseded and failed; those of other windows' requests bring points, too. */
  take(name, data) {
    if (name === "measured") studio.addPoint(data);
    finish(data.request, name === "measured" ? null : name === "superseded" ? "superseded" : data.error, name !== "measured" || data.lines.length > 0);
  },
  /** Asks again for what came without lines, now that they are measured. */
  again() {
    refused = null;
    askSoon();
  },
  /** Forgets the request under way, after the connection was lost. */
  reset() {
    asked = refused = null;
    answers.clear();
    showBusy();
    askSoon();
  },
};
}
