"use strict";
// Samples from this machine to the studio: drag and drop, file pickers, pasted texts.
{
let abort = null; // of the upload under way

studio.buildUploads = () => {
  const zone = studio.find("drop");
  for (const [button, field] of [["choose-files", "files"], ["choose-folder", "folder"]]) {
    studio.find(button).addEventListener("click", () => studio.find(field).click());
    studio.find(field).addEventListener("change", (event) => {
      upload([...event.target.files].map((file) => ({ file, name: file.webkitRelativePath || file.name })));
      event.target.value = "";
    });
  }
  let depth = 0; // enter and leave come for children, too
  zone.addEventListener("dragenter", (event) => { event.preventDefault(); depth += 1; zone.classList.add("over"); });
  zone.addEventListener("dragleave", () => { depth -= 1; if (depth < 1) zone.classList.remove("over"); });
  zone.addEventListener("drop", async (event) => {
    event.preventDefault();
    depth = 0;
    zone.classList.remove("over");
    upload(await droppedFiles(event.dataTransfer));
  });
  // A file that misses the zone must not replace the page.
  for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());
  studio.find("paste-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = studio.find("paste").value.trim();
    if (text) upload([{ file: new File([`${text}\n`], "pasted.txt"), name: "pasted.txt" }]);
  });
  studio.find("upload-cancel").addEventListener("click", () => abort?.abort());
  studio.find("samples-remove").addEventListener("click", removeSamples);
};

/** All files of what was dropped, folders included, with their paths. */
const droppedFiles = async (transfer) => {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return [...transfer.files].map((file) => ({ file, name: file.name }));
  const found = [];
  const visit = async (entry) => {
    if (entry.isFile) {
      const file = await new Promise((take, fail) => entry.file(take, fail));
      found.push({ file, name: entry.fullPath.replace(/^\//, "") });
      return;
    }
    const reader = entry.createReader();
    for (;;) { // a reader gives a hundred at a time
      const some = await new Promise((take, fail) => reader.readEntries(take, fail));
      if (!some.length) return;
      for (const child of some) await visit(child);
    }
  };
  for (const entry of entries) await visit(entry);
  return found;
};

/** Sends files and asks for their estimate. Files of other kinds are left out, and said. */
const upload = async (files) => {
  const { limits } = studio.state.facts;
  const known = files.filter(({ name }) => limits.suffixes.some((suffix) => name.toLowerCase().endsWith(suffix)));
  const left = files.length - known.length;
  if (!known.length) {
    say(`Nothing there that the studio reads: it takes ${limits.suffixes.join(", ")}.`, true);
    return;
  }
  if (known.length > limits.files) {
    say(`These are ${studio.count(known.length, "file")}; the studio takes ${limits.files.toLocaleString("en")} at most.`, true);
    return;
  }
  known.sort((a, b) => (a.name < b.name ? -1 : 1));
  abort = new AbortController();
  const note = left ? ` (${studio.count(left, "file")} of other kinds left out)` : "";
  let name = null;
  try {
    name = (await studio.post("/api/uploads")).upload;
    await sendAll(name, known, (done) => progress(`Sending ${done} of ${studio.count(known.length, "file")}${note}`, done, known.length));
    progress(`Estimating${note}`, 0, 0);
    await studio.post(`/api/uploads/${name}/estimate`, { labels: studio.find("use-labels").checked });
  } catch (error) {
    if (name) studio.send("DELETE", `/api/uploads/${name}`).catch(() => {});
    say(error.name === "AbortError" ? "Cancelled; nothing was kept." : error.message, error.name !== "AbortError");
  }
};

/** Sends files one by one: their order is that of their names. */
const sendAll = async (upload, files, tell) => {
  for (const [k, { file, name }] of files.entries()) {
    await studio.sendFile(`/api/uploads/${upload}/files?name=${encodeURIComponent(name)}`, file, abort.signal);
    tell(k + 1);
  }
};

const progress = (text, done, total) => {
  studio.find("upload-progress").hidden = false;
  const bar = studio.find("upload-bar");
  studio.attributes(bar, { value: total ? done : null, max: total || 1 });
  studio.find("upload-cancel").hidden = !total;
  studio.write(studio.find("upload-text"), text);
  studio.write(studio.find("upload-message"), "");
};

const say = (text, wrong = false) => {
  studio.find("upload-progress").hidden = true;
  const message = studio.find("upload-message");
  studio.write(message, text);
  message.classList.toggle("failed", wrong);
};

studio.uploads = {
  progress: (event) => progress(`Estimating: ${event.phase}`, 0, 0),
  done: () => say(""),
  failed: (error) => say(error.message, true),
};

const removeSamples = async () => {
  try {
    await studio.send("DELETE", `/api/uploads/${studio.state.facts.samples.upload}`);
    await studio.refresh();
  } catch (error) {
    say(error.message, true);
  }
};
}
