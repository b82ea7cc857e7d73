"use strict";
// Numbers that the page works out itself: accuracy on a mix, its interval, and interpolation between measured points.
{
const Z = 1.959964;
const NEAREST = 8;
const SCALE_DISTANCE = 0.5; // a step of 1 in scale is as far as moving half of all weight

/** Wilson's interval of a share, as the server's. */
studio.wilson = (share, samples) => {
  if (!(samples > 0)) return [0, 1];
  const centre = (share * samples + (Z * Z) / 2) / (samples + Z * Z);
  const half = (Z / (samples + Z * Z)) * Math.sqrt(samples * share * (1 - share) + (Z * Z) / 4);
  return [share <= 0 ? 0 : Math.max(0, centre - half), share >= 1 ? 1 : Math.min(1, centre + half)];
};

/** The mean over tasks by `mix`, of the tasks that have a value; null where none does. */
studio.mean = (values, mix) => {
  let sum = 0, total = 0;
  for (let t = 0; t < mix.length; t += 1) {
    if (values[t] === null || values[t] === undefined || !(mix[t] > 0)) continue;
    sum += mix[t] * values[t];
    total += mix[t];
  }
  return total > 0 ? sum / total : null;
};

/** Accuracy on a mix with its interval, from each task's accuracy and number of samples. */
studio.mixed = (tasks, mix) => {
  const accuracy = studio.mean(tasks.map((task) => task.accuracy), mix);
  if (accuracy === null) return null;
  let total = 0, squares = 0;
  tasks.forEach((task, t) => {
    if (!(mix[t] > 0) || !task.samples) return;
    total += mix[t];
    squares += (mix[t] * mix[t]) / task.samples;
  });
  const samples = (total * total) / squares; // of equal weight, that would say as much
  return { accuracy, interval: studio.wilson(accuracy, samples), samples };
};

/** What tasks count among "the rest": those below an equal share, by how much they are below it; null if there is none. */
studio.restOf = (mix) => {
  const equal = 1 / mix.length;
  const rest = mix.map((share) => Math.max(0, equal - share));
  const total = rest.reduce((sum, part) => sum + part, 0);
  return total > 1e-6 ? rest.map((part) => part / total) : null;
};

/** Half of the L1 distance: the share of weight that differs. */
studio.halfDistance = (one, other) => {
  let sum = 0;
  for (let t = 0; t < one.length; t += 1) sum += Math.abs(one[t] - other[t]);
  return sum / 2;
};

/** How far apart two scales are; `matched` has a number only once it is measured. */
const scaleDistance = (now, point, matched) => {
  if (now.scale === point.scale) return 0;
  const number = now.scale === "matched" ? matched : now.scale;
  return Math.abs((number ?? point.scale_used) - point.scale_used);
};

/**
 * Interpolates each task's accuracy at a setting from the nearest points of the same method and data.
 *
 * Points count by the inverse square of their distance; a point at distance 0 is itself. Null if there are none.
 */
studio.interpolate = (points, now, matched) => {
  const near = [];
  for (const point of points) {
    if (point.method !== now.method || point.data !== now.data) continue;
    const distance = studio.halfDistance(now.weights, point.weights) + SCALE_DISTANCE * scaleDistance(now, point, matched);
    if (near.length < NEAREST || distance < near[near.length - 1].distance) {
      let place = near.length;
      while (place > 0 && near[place - 1].distance > distance) place -= 1;
      near.splice(place, 0, { point, distance });
      if (near.length > NEAREST) near.pop();
    }
  }
  if (!near.length) return null;
  const used = near[0].distance < 1e-9 ? [near[0]] : near;
  const parts = used.map(({ distance }) => (distance < 1e-9 ? 1 : 1 / (distance * distance)));
  const values = (value) => studio.mean(used.map(({ point }) => value(point)), parts);
  const tasks = near[0].point.tasks && now.weights.map((_, t) => ({
    accuracy: values((point) => point.accuracies?.[t]),
    samples: near[0].point.tasks[t].samples,
  }));
  return { tasks, overall: values((point) => point.overall.accuracy), from: used.length, nearest: near[0].distance };
};

/** Points that no other point beats on both counts, from left to right. */
studio.front = (points) => {
  const sorted = [...points].sort((a, b) => b.x - a.x || b.y - a.y);
  const front = [];
  for (const point of sorted) if (!front.length || point.y > front[front.length - 1].y) front.push(point);
  return front.reverse();
};
}
