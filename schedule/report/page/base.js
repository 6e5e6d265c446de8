// The data of the page, how values are written, and how elements are made.

const byId = (id) => document.getElementById(id);
const packed = Uint8Array.from(atob(byId("plan-data").textContent), (one) => one.charCodeAt(0));
const DATA = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/** An element with attributes and children. Names of weights are not to be trusted: text is always text. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Calls `act` with every such element, and what its data attribute says. */
const each = (selector, act) => document.querySelectorAll(selector).forEach((one) => act(one, Object.values(one.dataset)[0]));
const onClick = (name, act) => each(`[data-${name}]`, (button, value) => { button.onclick = () => act(value, button); });

const TIME = [[1e9, "s"], [1e6, "ms"], [1e3, "\u00b5s"], [1, "ns"]];
const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
const unitOf = (value, units) => units.find(([size]) => Math.abs(value) >= size) || units[units.length - 1];

/** Three digits that count, and all before the point. */
function written(value, units) {
  const [size, name] = unitOf(value, units);
  const scaled = value / size;
  const whole = size === 1 || scaled >= 100;
  return `${whole ? Math.round(scaled).toLocaleString("en") : scaled.toPrecision(3)} ${name}`;
}

const formatTime = (ns) => written(ns, TIME);
const formatBytes = (nbytes) => written(nbytes, BYTES);

function formatShare(share) {
  if (share > 0 && share < 0.01) return "<1 %";
  return share < 1 && share > 0.99 ? ">99 %" : `${Math.round(share * 100)} %`;
}

/** The colours of the style, which are read again when light turns to dark. */
const colours = new Map();
function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`));
  return colours.get(name);
}

const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';

/** A cursor of uPlot that only shows where it is. */
const STILL = { y: false, drag: { x: false }, bind: { dblclick: () => null } };

/** An axis of uPlot whose labels are in the units. */
const axisOf = (units, options) => ({
  stroke: () => colour("muted"),
  font: FONT,
  grid: { stroke: () => colour("line"), width: 1 },
  ticks: { show: false },
  ...(units === BYTES ? { incrs: Array.from({ length: 48 }, (_, i) => 2 ** i) } : {}),
  values: (chart, values) => values.map((value) => {
    const [size, name] = unitOf(value, units);
    return value === null ? null : value === 0 ? "0" : `${Number((value / size).toPrecision(9))} ${name}`;
  }),
  ...options,
});
