// The data of the page, how values are written, and how elements are made.

const byId = (id) => document.getElementById(id);
const packed = Uint8Array.from(atob(byId("plan-data").textContent), (one) => one.charCodeAt(0));
const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
const DATA = await new Response(unpacked).json();
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/** An element with properties and children. Names of weights are not to be trusted: text is always text. */
function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const TIME = [[1e9, "s"], [1e6, "ms"], [1e3, "us"], [1, "ns"]];
const BYTES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];

/** A value in the largest unit that it reaches, with as many digits that count, and all before the point. */
function written(value, units, maximumSignificantDigits = 3) {
  const [size, name] = units.find(([least]) => Math.abs(value) >= least) ?? units.at(-1);
  const most = { maximumSignificantDigits, maximumFractionDigits: 0, roundingPriority: "morePrecision" };
  return `${(value / size).toLocaleString("en", most)} ${name}`;
}

const formatTime = (ns) => written(ns, TIME);
const formatBytes = (nbytes) => written(nbytes, BYTES);

/** The colours of the style as a canvas takes them; forgotten when light turns to dark. */
let colours = {};
function colour(name) {
  const probe = document.querySelector(".mark");
  probe.style.color = `var(--${name})`;
  return (colours[name] ??= getComputedStyle(probe).color);
}

/** An axis of uPlot whose labels are in the units. */
const axisOf = (units, options) => ({
  stroke: () => colour("muted"),
  grid: { stroke: () => colour("line"), width: 1 },
  ticks: { show: false },
  incrs: units === BYTES ? Array.from({ length: 48 }, (_, i) => 2 ** i) : undefined,
  values: (chart, values) => values.map((value) => value && written(value, units, 9)),
  ...options,
});
