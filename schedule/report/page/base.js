// The data of the page, how values are written, and how elements are made.

const byId = (id) => document.getElementById(id);
const packed = Uint8Array.from(atob(byId("plan-data").textContent), (one) => one.charCodeAt(0));
const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
const DATA = await new Response(unpacked).json();
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/** An element with attributes and children. Names of weights are not to be trusted: text is always text. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Calls `act` with every such element, and what its data attribute says. */
function each(selector, act) {
  for (const one of document.querySelectorAll(selector)) act(one, Object.values(one.dataset)[0]);
}

function onClick(name, act) {
  each(`[data-${name}]`, (button, value) => { button.onclick = () => act(value, button); });
}

const TIME = [[1e9, "s"], [1e6, "ms"], [1e3, "\u00b5s"], [1, "ns"]];
const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
const unitOf = (value, units) => units.find(([size]) => Math.abs(value) >= size) || units[units.length - 1];

/** Three digits that count, and all before the point. */
function written(value, units) {
  const [size, name] = unitOf(value, units);
  const whole = size === 1 || value / size >= 100;
  return `${whole ? Math.round(value / size).toLocaleString("en") : (value / size).toPrecision(3)} ${name}`;
}

const formatTime = (ns) => written(ns, TIME);
const formatBytes = (nbytes) => written(nbytes, BYTES);

/** The colours of the style, which are read again when light turns to dark. */
let colours = {};
const colour = (name) => (colours[name] ??= getComputedStyle(document.body).getPropertyValue(`--${name}`));

/** An axis of uPlot whose labels are in the units. */
const axisOf = (units, options) => ({
  stroke: () => colour("muted"),
  grid: { stroke: () => colour("line"), width: 1 },
  ticks: { show: false },
  ...(units === BYTES ? { incrs: Array.from({ length: 48 }, (_, i) => 2 ** i) } : {}),
  values: (chart, values) => values.map((value) => {
    const [size, name] = unitOf(value, units);
    return value === null ? null : value === 0 ? "0" : `${Number((value / size).toPrecision(9))} ${name}`;
  }),
  ...options,
});
