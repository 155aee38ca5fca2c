// Line charts and sparklines as inline SVG. A value of null is a gap.

import { el, svg } from "./dom.js";

const HEIGHT = 170;
const NARROW = 420;
const EDGE = { top: 8, right: 8, bottom: 20, left: 52 };

/** series: [{ name, value: (point) => number | null }], at most four. */
export class LineChart {
  constructor(title, series, format) {
    this.title = title;
    this.series = series;
    this.format = format;
    this.points = [];
    this.at = null;
    this.svg = svg("svg", { role: "img" });
    this.legend = el("div", { class: "legend" });
    // beside the title, where there is room: the chart must not move while somebody points at it
    this.when = el("span", { class: "hint when" });
    this.figure = el("figure", {}, el("figcaption", {}, el("div", {}, el("strong", {}, title), this.when), this.legend), this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.at = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  update(points, from, to) {
    this.points = points;
    this.from = from;
    this.to = to;
    this.draw();
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - EDGE.left) / (box.width - EDGE.left - EDGE.right);
    const wanted = this.from + share * (this.to - this.from);
    const shown = this.points.filter((point) => point.at >= this.from);
    this.at = shown.reduce(
      (best, point) => (!best || Math.abs(point.at - wanted) < Math.abs(best.at - wanted) ? point : best), null);
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width || this.from === undefined) return;
    const shown = this.points.filter((point) => point.at >= this.from);
    const values = shown.flatMap((point) => this.series.map((line) => line.value(point))).filter((v) => v !== null);
    const top = niceTop(Math.max(0, ...values));
    const x = (at) => EDGE.left + ((at - this.from) / (this.to - this.from)) * (width - EDGE.left - EDGE.right);
    const y = (value) => EDGE.top + (1 - value / top) * (HEIGHT - EDGE.top - EDGE.bottom);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...this.axes(width, top, x, y));
    if (!values.length) {
      this.svg.append(svg("text", { class: "empty", x: width / 2, y: HEIGHT / 2 - 6, "text-anchor": "middle" }, "nothing measured yet"));
    }
    this.series.forEach((line, number) => {
      const d = path(shown.map((point) => [x(point.at), line.value(point)]), y);
      this.svg.append(svg("path", { class: `series c${number + 1}`, d }));
    });
    if (this.at) {
      this.svg.append(svg("line", { class: "cross", x1: x(this.at.at), x2: x(this.at.at), y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
    }
    this.tell(this.at ?? shown.at(-1));
  }

  axes(width, top, x, y) {
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = y(share * top);
      parts.push(svg("line", { class: "axis", x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at }));
      parts.push(svg("text", { class: "tick", x: EDGE.left - 6, y: at + 4, "text-anchor": "end" }, this.format(share * top)));
    }
    // five steps are whole minutes in every range
    const steps = width < NARROW ? 1 : 5;
    for (let step = 0; step <= steps; step += 1) {
      const at = this.from + ((this.to - this.from) * step) / steps;
      const minutes = Math.round((this.to - at) / 60);
      const anchor = step === 0 ? "start" : step === steps ? "end" : "middle";
      parts.push(svg("text", { class: "tick", x: x(at), y: HEIGHT - 5, "text-anchor": anchor }, minutes ? `−${minutes} min` : "now"));
    }
    return parts;
  }

  /** The values of one point, in the legend and for those who cannot see the lines. */
  tell(point) {
    const told = this.series.map((line) => `${line.name} ${this.format(point ? line.value(point) : null)}`);
    this.svg.setAttribute("aria-label", `${this.title}: ${told.join(", ")}`);
    this.legend.replaceChildren(...this.series.map((line, number) =>
      el("span", { class: "key" }, el("span", { class: `swatch c${number + 1}` }), line.name,
        el("b", {}, this.format(point ? line.value(point) : null)))));
    this.when.textContent = this.at ? new Date(this.at.at * 1000).toLocaleTimeString() : "";
  }
}

export function sparkline(values) {
  const made = svg("svg", { viewBox: "0 0 100 26", preserveAspectRatio: "none", "aria-hidden": "true" });
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return made;
  const top = Math.max(...known) || 1;
  const points = values.map((value, number) => [(number / (values.length - 1)) * 100, value]);
  const y = (value) => 24 - (value / top) * 20;
  const area = stretches(points).map((known) => `${path(known, y)}V26H${known[0][0].toFixed(1)}Z`).join("");
  made.append(svg("path", { class: "spark-area", d: area }), svg("path", { class: "spark", d: path(points, y) }));
  return made;
}

/** The points between gaps. */
function stretches(points) {
  const found = [[]];
  for (const point of points) {
    if (point[1] === null) found.push([]);
    else found.at(-1).push(point);
  }
  return found.filter((known) => known.length);
}

function path(points, y) {
  const line = (known) => `M${known.map(([x, value]) => `${x.toFixed(1)},${y(value).toFixed(1)}`).join("L")}`;
  // a point alone is a line of no length, which its round ends make a dot
  return stretches(points).map((known) => (known.length > 1 ? line(known) : `${line(known)}h0`)).join("");
}

function niceTop(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((top) => top >= value);
}
