"use strict";
// The page's namespace, and how it makes elements and writes numbers. Text from files goes into text nodes alone.
// Classic scripts share their names: every other file is a block, and shares what it puts into `studio`.

const studio = {};

/** Makes an element: properties, attributes (in `attributes`), children. Strings become text. */
studio.element = (name, properties = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "attributes") studio.attributes(made, value);
    else if (key === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else made[key] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
};

/** Makes an element of a drawing. */
studio.shape = (name, attributes = {}, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  studio.attributes(made, attributes);
  made.append(...children);
  return made;
};

/** Sets attributes that differ from what is there; null removes one. */
studio.attributes = (target, attributes) => {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) target.removeAttribute(key);
    else if (target.getAttribute(key) !== String(value)) target.setAttribute(key, value);
  }
  return target;
};

/** Sets an element's text if it differs: an equal text must not be announced again. */
studio.write = (target, text) => {
  if (target.textContent !== text) target.textContent = text;
};

studio.find = (id) => document.getElementById(id);

/** 0.5649 -> "56.5%". */
studio.percent = (share, digits = 1) =>
  share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)}%`;

/** 0.07 -> "+7.0", in points of percent; a true minus sign. */
studio.points = (difference) => {
  const text = Math.abs(100 * difference).toFixed(1);
  const sign = Number(text) === 0 ? "±" : difference > 0 ? "+" : "−";
  return `${sign}${text}`;
};

studio.range = ([low, high], digits = 0) => `${(100 * low).toFixed(digits)} to ${studio.percent(high, digits)}`;

studio.count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

studio.bytes = (number) => {
  const units = ["bytes", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) { number /= 1000; unit += 1; }
  return `${number.toFixed(unit && number < 10 ? 1 : 0)} ${units[unit]}`;
};

studio.scaleText = (scale) => (scale === "matched" ? "matched" : String(Number(Number(scale).toPrecision(4))));

/** Runs `work` when it was not called for `wait` milliseconds. */
studio.later = (work, wait) => {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...values), wait);
  };
};

/** Copies a text; says so on the button for a moment. */
studio.copyButton = (label, text) => {
  const button = studio.element("button", { type: "button", className: "small", textContent: label });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select it and copy";
    }
    studio.announce(button.textContent);
    setTimeout(() => { button.textContent = label; }, 1600);
  });
  return button;
};

/** Keeps the width of an element, as asking for it within a frame makes the browser lay out the page again. */
studio.keepWidth = (target) => {
  const kept = { width: target.clientWidth };
  new ResizeObserver(() => {
    if (kept.width === target.clientWidth) return;
    kept.width = target.clientWidth;
    studio.changed("size");
  }).observe(target);
  return kept;
};

/** Says something to screen readers. */
studio.announce = (text) => studio.write(studio.find("announcement"), text);

/** Shows what went wrong at the top of the page, or clears it. */
studio.showError = (error) => {
  const box = studio.find("problem");
  box.hidden = !error;
  if (!error) return;
  studio.write(studio.find("problem-text"), error.message ?? String(error));
  studio.find("problem-list").replaceChildren(
    ...(error.problems ?? []).slice(0, 8).map((text) => studio.element("li", { textContent: text })),
  );
};
