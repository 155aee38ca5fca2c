// The latest placements: where each request went, and what each candidate would have cost.

import { ago, bar, byId, count, el, seconds } from "./dom.js";

const TERMS = [["start", "b5", "until it starts"], ["restore", "b4", "bring back"], ["compute", "b1", "compute"], ["slowdown", "b2", "slow-down of others"], ["evict", "b3", "cache that it fills"]];

export function showPlacements(placements, now) {
  byId("cost-legend").replaceChildren(...TERMS.map(([, name, words]) =>
    el("span", { class: "key" }, el("span", { class: `swatch block ${name}` }), words)));
  const rows = placements.map((placement) => row(placement, now));
  byId("placements").replaceChildren(...(rows.length ? rows : [el("li", { class: "dim" }, "Nothing has been placed yet.")]));
}

function row(placement, now) {
  const cached = placement.hit_tokens ? `, ${count(placement.hit_tokens)} of them cached` : "";
  const waited = placement.waited_s > 0.001 ? `, waited ${seconds(placement.waited_s)}` : "";
  const again = placement.attempt ? `, attempt ${placement.attempt + 1}` : "";
  const words = placement.refused
    ? el("span", { class: "refused" }, `refused: ${placement.refused.replaceAll("_", " ")}`)
    : el("span", {}, "to ", el("strong", {}, placement.worker_id));
  return el("li", {},
    el("div", { class: "what" }, el("div", {}, words, ` · ${ago(now - placement.at)}`),
      el("div", { class: "dim" }, `${count(placement.prompt_tokens)} prompt tokens${cached}${waited}${again}`),
      el("span", { class: "mono" }, placement.request_id)),
    el("div", {}, ...candidates(placement)));
}

function candidates(placement) {
  const most = Math.max(...placement.considered.map((one) => one.cost_s.total), 1e-9);
  const shown = placement.considered.map((one) => {
    const told = TERMS.map(([term, , words]) => `${words} ${seconds(one.cost_s[term] ?? 0)}`).join(", ");
    const parts = TERMS.map(([term, name]) => [(one.cost_s[term] ?? 0) / most, name]);
    const chosen = one.worker_id === placement.worker_id;
    return el("div", { class: `candidate${chosen ? " chosen" : ""}`, title: told },
      el("span", { class: "who" }, one.worker_id), bar(parts, `${one.worker_id}: ${told}`),
      el("span", { class: "num" }, seconds(one.cost_s.total)));
  });
  const rest = placement.candidates - placement.considered.length;
  return rest > 0 ? [...shown, el("div", { class: "hint" }, `and ${rest} more, dearer`)] : shown;
}
