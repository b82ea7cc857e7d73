"""Style and script of the report's page. Without the script everything is there; headings just don't sort."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --paper: #fff; --line: #d5dae0; --tint: #f4f6f8;
  --link: #0b5394; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #a3adb8; --paper: #15181c; --line: #3a4149;
  --tint: #1f242a; --link: #8cc2f5; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2rem 0 .5rem; }
a { color: var(--link); }
ul, ol { padding-left: 1.2rem; }
section li { max-width: 46rem; }
.findings { display: grid; gap: 0 2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }
li { margin: .3rem 0; overflow-wrap: anywhere; }
code { font: .92em ui-monospace, monospace; background: var(--tint); padding: 0 .2em; border-radius: 3px; }
.about, .hint, .notes, footer { color: var(--soft); }
.notes, .hint, footer { font-size: .88rem; }
.notes p { margin: .3rem 0; max-width: 46rem; }
summary { cursor: pointer; color: var(--link); }
figure { margin: 1.5rem 0 2.2rem; }
figcaption { font-weight: 600; margin-bottom: .4rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
.scroll:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
thead th { background: var(--tint); vertical-align: bottom; white-space: normal; }
tbody th wbr { display: none; }
dt { margin-top: .4rem; } dd { margin-left: 1.2rem; max-width: 46rem; }
th small { display: block; font-weight: 400; color: var(--soft); }
td small { color: var(--soft); }
.number { text-align: right; }
tbody th { font-weight: 400; position: sticky; left: 0; background: var(--paper); }
tbody th code { background: none; padding: 0; }
tr.group > * { border-top: 2px solid var(--soft); }
table.sorted tr.group > * { border-top: 0; }
thead button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer;
  text-align: inherit; }
thead button:focus-visible { outline: 2px solid var(--link); }
thead button span::after { content: "\\2195"; color: var(--soft); padding-left: .3em; font-weight: 400; }
th[aria-sort=ascending] button span::after { content: "\\2191"; color: inherit; }
th[aria-sort=descending] button span::after { content: "\\2193"; color: inherit; }
.picture .scroll { background: #fff; }
.picture img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; overflow-wrap: anywhere; }
@media (max-width: 40rem) { tbody th { white-space: normal; overflow-wrap: break-word; min-width: 7.5rem; }
  tbody th wbr { display: inline; }
  table { font-size: .84rem; } th, td { padding: .3rem .45rem; } }
@media print { .scroll { overflow: visible; border: 0; } thead button span::after { content: ""; } }
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], original = [...body.rows];
  const key = (row, k) => row.cells[k].dataset.value ?? row.cells[k].textContent.trim();
  [...table.tHead.rows[0].cells].forEach((head, k) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    const numeric = head.classList.contains("number");
    const order = numeric ? ["descending", "ascending", ""] : ["ascending", "descending", ""];
    button.addEventListener("click", () => {
      const now = order[(order.indexOf(head.getAttribute("aria-sort") ?? "") + 1) % 3];
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      if (now) head.setAttribute("aria-sort", now);
      table.classList.toggle("sorted", Boolean(now));
      const sign = now === "descending" ? -1 : 1;
      const compare = (a, b) => {
        const x = key(a, k), y = key(b, k);
        if (!numeric) return sign * x.localeCompare(y, "en", { numeric: true });
        const gap = isNaN(parseFloat(x)) - isNaN(parseFloat(y));
        return gap || sign * (parseFloat(x) - parseFloat(y));
      };
      body.append(...(now ? [...original].sort(compare) : original));
    });
  });
}
for (const hint of document.querySelectorAll(".hint")) hint.hidden = false;
"""
