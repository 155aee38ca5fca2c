// The table of workers.

import { ago, bar, byId, bytes, count, el, percent, seconds } from "./dom.js";

const STATES = { serving: "good", draining: "warn" };
const SHOWN_CHANGES = 5;
const SHOWN_S = 1800;
// workers speak several times a second
const LATE_S = 1;

/** Whether there are no workers because none is needed. One that never had any has not started yet. */
export const sleeping = (seen) => Boolean(seen.sleeps && seen.models.length && !seen.workers.length);

export function showWorkers(seen, rates) {
  byId("kv-legend").replaceChildren(
    el("span", { class: "key" }, el("span", { class: "swatch block b1" }), "in use"),
    el("span", { class: "key" }, el("span", { class: "swatch block cached" }), "cached"));
  const rows = seen.workers.map((worker) => row(worker, rates.get(worker.id)));
  byId("workers").tBodies[0].replaceChildren(
    ...(rows.length ? rows : [el("tr", {}, el("td", { class: "none", colspan: 10 }, sleeping(seen) ? "No worker runs: a request starts one." : "No worker has registered yet."))]));
}

/** Who came and went of late, the latest first: a worker that is gone has no row to say so. */
export function showChanges(changes, now) {
  const recent = changes.filter((change) => change.at > now - SHOWN_S).slice(-SHOWN_CHANGES).reverse();
  byId("changes").hidden = !recent.length;
  byId("changes").replaceChildren(...recent.map((change) =>
    el("li", { class: change.what === "lost" ? "refused" : null }, `${change.worker_id} ${change.what} ${ago(now - change.at)}`)));
}

function row(worker, rate) {
  const { kv } = worker;
  const share = (blocks) => (kv.total ? blocks / kv.total : 0);
  const most = worker.max_running;
  const hits = worker.query_tokens ? worker.hit_tokens / worker.query_tokens : null;
  const running = most
    ? el("span", { class: "meter" }, bar([[worker.running / most, "b1"]], `${worker.running} of ${most}`), `${worker.running}/${most}`)
    : String(worker.running);
  return el("tr", {},
    el("td", {}, el("div", { class: "mono" }, worker.id), el("div", { class: "hint" }, worker.model)),
    el("td", { class: "state" }, state(worker)),
    el("td", {}, running),
    el("td", { class: "num" }, count(worker.waiting)),
    el("td", { class: "num" }, worker.prefill_tokens ? `${count(worker.prefill_tokens)} tokens` : "–"),
    el("td", {}, el("span", { class: "meter" },
      bar([[share(kv.used), "b1"], [share(kv.cached), "cached"]], `${percent(share(kv.used))} in use, ${percent(share(kv.cached))} cached`),
      percent(share(kv.used)))),
    el("td", {}, ...tiers(worker.tiers)),
    el("td", { class: "num" }, count(rate)),
    el("td", { class: "num" }, percent(hits)),
    el("td", { class: worker.heard_s > LATE_S ? "num late" : "num" }, `${seconds(worker.heard_s)} ago`));
}

function state(worker) {
  const mark = el("span", { class: "mark", "data-state": STATES[worker.state] ?? "bad" },
    el("span", { class: "dot", "aria-hidden": "true" }), worker.state);
  return worker.busy_for_s > 5 ? el("span", {}, mark, el("div", { class: "hint" }, `step since ${seconds(worker.busy_for_s)}`)) : mark;
}

function tiers(found) {
  const named = Object.entries(found);
  if (!named.length) return [el("span", { class: "dim" }, "–")];
  return named.map(([name, tier]) => el("div", { class: "tier" }, el("span", {}, name),
    tier.total
      ? bar([[tier.used / tier.total, "b4"]], `${name}: ${percent(tier.used / tier.total)} full`)
      : el("span", { class: "refused" }, "off"),
    el("span", { class: "dim" }, tier.total ? `${count(tier.restored)} back, ${bytes(tier.bytes_per_s)}/s` : "")));
}
