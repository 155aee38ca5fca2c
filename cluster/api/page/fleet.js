// The fleet view: polls the overview while the page is in sight and keeps the recent past.

import { getJson, hasKey } from "./api.js";
import { LineChart, sparkline } from "./chart.js";
import { byId, count, el, percent, seconds } from "./dom.js";
import { showPlacements } from "./placements.js";
import { showChanges, showWorkers, sleeping } from "./workers.js";

const POLL_MS = 2000;
// of sparklines and what tiles count
const RECENT_S = 300;
const KEEP_S = 1860;
const KEEP_PLACEMENTS = 20;
const KEEP_CHANGES = 50;

const name = (placement) => `${placement.request_id} ${placement.attempt}`;
const at = (list, number) => (list ? list[number] : null);
const CHARTS = [
  ["Time to first token", seconds, ["p50", "p95", "p99"].map((name, i) => ({ name, value: (p) => at(p.ttft_s, i) }))],
  ["Between tokens", seconds, ["p50", "p95", "p99"].map((name, i) => ({ name, value: (p) => at(p.itl_s, i) }))],
  ["Tokens per second", count, [
    { name: "generated", value: (p) => p.generated_tokens }, { name: "prompt", value: (p) => p.prompt_tokens }]],
  ["Sequences", count, [
    { name: "running", value: (p) => p.running }, { name: "waiting", value: (p) => p.waiting },
    { name: "queued", value: (p) => p.queued }]],
];

const serving = (seen) => seen.workers.filter((worker) => worker.state === "serving").length;

/** Those that went without a word within the last minutes, and are not back. */
function missing(changes, now) {
  const last = new Map(changes.map((change) => [change.worker_id, change]));
  return [...last.values()].filter((change) => change.what === "lost" && change.at > now - RECENT_S).map((change) => change.worker_id);
}

/** The state of the fleet, and words for it. */
function health(seen, changes) {
  const models = seen.models.map((model) => model.name).join(", ") || "no model yet";
  const [able, all] = [serving(seen), seen.workers.length];
  const lost = missing(changes, seen.at);
  if (able < all && able) return ["warn", `${models} · ${able} of ${all} workers serve`];
  if (able) return lost.length ? ["warn", `${models} · live, lost ${lost.join(", ")}`] : ["good", `${models} · live`];
  if (!sleeping(seen)) return ["bad", `${models}: no worker serves`];
  return seen.queue.length ? ["warn", `${models} · waking, ${seen.queue.length} queued`] : ["idle", `${models} · asleep, a request wakes it`];
}

export class Fleet {
  /** tell(state, words, notice): what the page's head shows. */
  constructor(tell) {
    this.tell = tell;
    this.points = [];
    this.placements = [];
    this.changes = [];
    this.epoch = null;
    this.rates = new Map();
    this.charts = CHARTS.map(([title, format, series]) => new LineChart(title, series, format));
    byId("charts").append(...this.charts.map((chart) => chart.figure));
    byId("range").addEventListener("change", () => this.drawCharts());
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.poll(); });
  }

  start() {
    this.poll();
  }

  /** At once, whatever the timer says. */
  async poll() {
    clearTimeout(this.timer);
    this.asking?.abort();
    const asking = this.asking = new AbortController();
    try {
      const since = this.points.at(-1)?.at ?? 0;
      const timeout = AbortSignal.timeout(10000);
      this.take(await getJson(`debug/fleet?since=${since}`, AbortSignal.any([asking.signal, timeout])));
    } catch (error) {
      if (asking.signal.aborted) return;
      this.fail(error);
    }
    if (asking === this.asking && !document.hidden) this.timer = setTimeout(() => this.poll(), POLL_MS);
  }

  take(seen) {
    if (seen.epoch !== this.epoch) {
      this.epoch = seen.epoch;
      this.rates.clear();
    }
    const last = this.points.at(-1)?.at ?? 0;
    this.points.push(...seen.history.points.filter((point) => point.at > last));
    this.points = this.points.filter((point) => point.at > seen.at - KEEP_S);
    const known = new Set(this.placements.map(name));
    this.placements.unshift(...seen.placements.filter((placement) => !known.has(name(placement))));
    this.placements.length = Math.min(this.placements.length, KEEP_PLACEMENTS);
    this.changes = [...this.changes, ...(seen.changes ?? [])].slice(-KEEP_CHANGES);
    // a fleet that has just started has no quarter of an hour to show
    if (this.now === undefined && seen.at - (this.points[0]?.at ?? seen.at) < 300) byId("range").value = "300";
    this.now = seen.at;
    byId("fleet").classList.remove("stale");
    const rates = this.tokenRates(seen);
    this.drawTiles(seen);
    this.drawCharts();
    // drawing anew would take away what somebody is marking to copy
    if (getSelection().isCollapsed) {
      showWorkers(seen, rates);
      showChanges(this.changes, seen.at);
      showPlacements(this.placements, seen.at);
    }
    this.tell(...health(seen, this.changes), null);
  }

  fail(error) {
    byId("fleet").classList.add("stale");
    if (error.status === 401) {
      if (hasKey()) this.tell("warn", "key refused", "This server does not know the key: give another with the button above.");
      else this.tell("warn", "needs an API key", "This server wants an API key: give one with the button above.");
    } else if (error.status === 403) {
      this.tell("warn", "needs an admin key", "This key may not see the fleet; use an admin key. The playground works with it all the same.");
    } else {
      const old = this.now ? ` What is shown is from ${new Date(this.now * 1000).toLocaleTimeString()}.` : "";
      const what = error.name === "TimeoutError" ? "the server takes too long" : error.message;
      this.tell("bad", "no answer", `Cannot read the fleet: ${what}.${old}`);
    }
  }

  drawTiles(seen) {
    const { workers, queue } = seen;
    const sum = (value) => workers.reduce((total, worker) => total + value(worker), 0);
    const recent = this.points.filter((point) => point.at > seen.at - RECENT_S);
    const last = recent.at(-1);
    const failed = Math.round(recent.reduce((total, point) => total + point.failures, 0) * seen.history.step_s);
    const used = sum((worker) => worker.kv.used);
    const total = sum((worker) => worker.kv.total);
    const waiting = sum((worker) => worker.waiting) + queue.length;
    const longest = queue.length ? `, ${seconds(Math.round(queue.oldest_s))}` : "";
    const tiles = [
      ["Workers", `${serving(seen)} of ${workers.length}`, `${seen.routers} ${seen.routers === 1 ? "router" : "routers"}`, (p) => p.workers],
      ["Requests/s", count(last?.requests), failed ? `${count(failed)} failed in 5 min` : "none failed", (p) => p.requests, failed && "bad"],
      ["Running", count(sum((worker) => worker.running)), `${count(waiting)} waiting${longest}`, (p) => p.running, queue.length && "warn"],
      ["Tokens/s", count(last?.generated_tokens), last ? `${count(last.prompt_tokens)} of prompts` : "", (p) => p.generated_tokens],
      ["KV in use", percent(total ? used / total : null), `${count(total)} blocks`, (p) => p.kv_usage],
      ["Hit rate", percent(last?.hit_rate), seen.prefix_index.directory_up ? `${count(seen.prefix_index.blocks)} indexed` : "directory away", (p) => p.hit_rate, !seen.prefix_index.directory_up && "warn"],
      ["First token p95", seconds(at(last?.ttft_s, 1)), last?.ttft_s ? `p50 ${seconds(last.ttft_s[0])}` : "", (p) => at(p.ttft_s, 1)],
      ["Token gap p95", seconds(at(last?.itl_s, 1)), last?.itl_s ? `p50 ${seconds(last.itl_s[0])}` : "", (p) => at(p.itl_s, 1)],
    ];
    byId("tiles").replaceChildren(...tiles.map(([name, value, more, history, state]) =>
      el("div", { class: "tile" }, el("div", { class: "name" }, name), el("div", { class: "value" }, value),
        el("div", { class: state ? `more ${state}` : "more", title: more }, more), sparkline(recent.map(history)))));
  }

  drawCharts() {
    if (this.now === undefined) return;
    const range = Number(byId("range").value);
    for (const chart of this.charts) chart.update(this.points, this.now - range, this.now);
  }

  /** Tokens per second of each worker, from what it had generated at the poll before. */
  tokenRates(seen) {
    const rates = new Map();
    for (const worker of seen.workers) {
      const key = `${worker.id} ${worker.incarnation}`;
      const before = this.rates.get(key);
      if (before && seen.at > before.at) {
        rates.set(worker.id, Math.max(0, worker.generated_tokens - before.tokens) / (seen.at - before.at));
      }
      this.rates.set(key, { at: seen.at, tokens: worker.generated_tokens });
    }
    return rates;
  }
}
