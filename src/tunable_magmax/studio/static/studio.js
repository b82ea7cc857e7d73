"use strict";
const embedded = document.getElementById("tmx-data");
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem("tmx-token", given);
  history.replaceState(null, "", location.pathname);
}

async function ask(path) {
  const answer = await fetch(path, { headers: { "X-Studio-Token": sessionStorage.getItem("tmx-token") ?? "" } });
  return answer.json();
}

(embedded ? Promise.resolve(JSON.parse(embedded.textContent)) : ask("/api/state")).then((state) => {
  document.getElementById("state").textContent = JSON.stringify(state, null, 1);
});
