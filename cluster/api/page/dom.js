// Elements and numbers. Text from anywhere else becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with a class, attributes and children; strings and numbers become text. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(name, attributes = {}, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export function count(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(value >= 1e5 ? 0 : 1)}k`;
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value >= 600) return `${Math.round(value / 60)} min`;
  return Number.isInteger(value) || value >= 100 ? `${Math.round(value)} s` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

/** age: in seconds. */
export function ago(age) {
  const whole = Math.round(age);
  return whole > 0 ? `${seconds(whole)} ago` : "just now";
}

export function percent(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return `${(value * 100).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

/** A bar whose parts are shares of the whole, 0 to 1: [[share, class], …]. */
export function bar(parts, label) {
  const made = el("span", { class: "bar", role: "img", "aria-label": label });
  for (const [share, name] of parts) {
    const part = el("i", { class: name });
    part.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
    made.append(part);
  }
  return made;
}
