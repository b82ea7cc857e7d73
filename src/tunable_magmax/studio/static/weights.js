"use strict";
// Weights as shares in thousandths: they always sum to 1000, so that what is shown, sent and printed is the same.
{
studio.WHOLE = 1000;

/** Rounds shares to thousandths that sum to 1000: the largest remainders are rounded up. */
studio.thousandths = (weights, whole = studio.WHOLE) => {
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  if (!(total > 0)) return weights.map(() => 0);
  const exact = weights.map((weight) => (whole * weight) / total);
  const parts = exact.map((value) => Math.floor(value + 1e-9));
  const left = whole - parts.reduce((sum, part) => sum + part, 0);
  const order = exact.map((value, t) => t).sort((a, b) => exact[b] - parts[b] - (exact[a] - parts[a]) || a - b);
  for (const t of order.slice(0, left)) parts[t] += 1;
  return parts;
};

/**
 * Sets one share; those that are not locked give way in proportion to `basis`, what they were when the drag began.
 *
 * Where all others are 0, they share alike. What is locked stays, so the share cannot exceed what that leaves.
 */
studio.moved = (basis, locked, moving, wanted) => {
  const free = basis.map((_, t) => t).filter((t) => t !== moving && !locked.has(t));
  const held = basis.reduce((sum, part, t) => sum + (t !== moving && locked.has(t) ? part : 0), 0);
  const room = studio.WHOLE - held;
  const parts = [...basis];
  parts[moving] = free.length ? Math.round(Math.min(Math.max(wanted, 0), room)) : room;
  const given = free.map((t) => basis[t]);
  const shares = given.some((part) => part > 0) ? given : given.map(() => 1);
  studio.thousandths(shares, room - parts[moving]).forEach((part, k) => { parts[free[k]] = part; });
  return parts;
};

studio.sameWeights = (one, other, within = 1e-6) =>
  one.length === other.length && one.every((weight, t) => Math.abs(weight - other[t]) <= within);
}
