// The page's head: tabs, key, colours, and the line that says how things are.

import { hasKey, setKey } from "./api.js";
import { byId } from "./dom.js";
import { Fleet } from "./fleet.js";
import { Playground } from "./playground.js";

const VIEWS = ["fleet", "playground"];
const dark = matchMedia("(prefers-color-scheme: dark)");

function colours() {
  const chosen = byId("theme").value;
  document.documentElement.dataset.theme = chosen === "auto" ? (dark.matches ? "dark" : "light") : chosen;
}

function tell(state, words, notice) {
  const status = byId("status");
  if (status.dataset.state !== state || status.lastElementChild.textContent !== words) {
    status.dataset.state = state;
    status.lastElementChild.textContent = words;
  }
  const place = byId("notice");
  place.hidden = notice === null;
  if (notice !== null && place.textContent !== notice) place.textContent = notice;
}

const fleet = new Fleet(tell);
const playground = new Playground();

function show(view) {
  for (const name of VIEWS) {
    const tab = byId(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === view));
    tab.tabIndex = name === view ? 0 : -1;
    byId(name).hidden = name !== view;
  }
  if (view === "playground") playground.loadModels();
  else fleet.drawCharts();
}

const wanted = () => (location.hash === "#playground" ? "playground" : "fleet");

for (const [number, name] of VIEWS.entries()) {
  const tab = byId(`tab-${name}`);
  tab.addEventListener("click", () => { location.hash = name; });
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const other = VIEWS[(number + step + VIEWS.length) % VIEWS.length];
    location.hash = other;
    byId(`tab-${other}`).focus();
  });
}
addEventListener("hashchange", () => show(wanted()));

byId("key-button").addEventListener("click", () => byId("key-dialog").showModal());
byId("key-clear").addEventListener("click", () => { byId("key-input").value = ""; byId("key-dialog").close("use"); });
byId("key-dialog").addEventListener("close", (event) => {
  if (event.target.returnValue !== "use") return;
  setKey(byId("key-input").value);
  byId("key-input").value = "";
  byId("key-button").textContent = hasKey() ? "API key set" : "API key";
  fleet.poll();
  playground.loadModels();
});

byId("theme").addEventListener("change", colours);
dark.addEventListener("change", colours);
colours();
show(wanted());
fleet.start();
