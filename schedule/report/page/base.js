// The data of the page, how values are written, and how elements are made.

const DATA = JSON.parse(document.getElementById("plan-data").textContent);

const byId = (id) => document.getElementById(id);

/** Differences back into values. */
function sums(deltas) {
  const values = new Float64Array(deltas.length);
  let at = 0;
  for (let i = 0; i < deltas.length; i += 1) {
    at += deltas[i];
    values[i] = at;
  }
  return values;
}

/** An element with attributes and children; text is always text. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** A name that may be broken behind its dots and underscores, and nowhere else if possible. */
const breakable = (name) => name.split(/(?<=[._])/).flatMap((part, i) => (i ? [element("wbr"), part] : [part]));

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const TIME_UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "\u00b5s"], [1, "ns"]];
const BYTE_UNITS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];

const unitFor = (units, value) => units.find(([size]) => Math.abs(value) >= size) || units[units.length - 1];

/** Three digits that count, and all before the point. */
function digits(value) {
  const places = clamp(2 - Math.floor(Math.log10(Math.max(1e-9, Math.abs(value)))), 0, 2);
  return value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
}

function written(value, units) {
  const [size, name] = unitFor(units, value);
  return `${size === 1 ? Math.round(value).toLocaleString("en") : digits(value / size)} ${name}`;
}

const formatTime = (ns) => written(ns, TIME_UNITS);
const formatBytes = (nbytes) => written(nbytes, BYTE_UNITS);

function formatShare(share) {
  if (share > 0 && share < 0.01) return "<1 %";
  if (share < 1 && share > 0.99) return ">99 %";
  return `${Math.round(share * 100)} %`;
}

const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

/** Round positions from low to high, about `most`, in steps of 1, 2 or 5 times a power of ten. */
function ticks(low, high, most) {
  return multiples(low, high, decimalStep((high - low) / Math.max(1, most)));
}

/** The same for bytes: in the unit of the largest, whole steps are powers of two. */
function byteTicks(low, high, most) {
  const [unit] = unitFor(BYTE_UNITS, high);
  const rough = Math.max((high - low) / Math.max(1, most) / unit, 1 / unit);
  const step = rough > 0.5 ? 2 ** Math.ceil(Math.log2(rough)) : decimalStep(rough);
  return multiples(low, high, step * unit);
}

function decimalStep(rough) {
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1e-9)));
  return [1, 2, 5, 10].find((times) => times * power >= rough) * power;
}

function multiples(low, high, step) {
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high; i += 1) found.push(i * step);
  return { values: found, step };
}

/** The labels of such positions, in one unit, with as many decimals as the step needs. */
function tickLabels({ values, step }, units) {
  const largest = Math.max(step, ...values.map(Math.abs));
  const [size, name] = unitFor(units, largest);
  const places = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step / size) - 1e-9)));
  return values.map((value) => (value === 0 ? "0" : `${(value / size).toFixed(places)} ${name}`));
}

/** The index of the last of ascending values that is at most `value`; -1 if none is. */
function lastAtMost(values, value, key = (one) => one) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(values[middle]) <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/** The colours of the style, read again when light turns to dark. */
const colours = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["surface", "ink", "muted", "line", "soft", "focus", "compute", "lead", "copy", "disk", "stall", "held", "resident"]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
}
readColours();

const linkName = (link) => ["link", "disk"][link] || `link ${link}`;
const linkColour = (link) => (link % 2 ? colours.disk : colours.copy);
