// The charts of a pass, one above the other, share their time; zoom and moving.

const GUTTER = 86; // pixels before the time axis
const TOP = 28; // pixels of the time axis
const LANE = 38;
const MANY = 40; // steps: with more, a single one is too narrow to see until it is zoomed in on

const figure = {
  root: byId("figure"),
  charts: {}, // of uPlot: "lanes", and where there is an arena "memory" and "arena"
  method: DATA.methods[0],
  key: "steady", // or "first": which of its views is shown
  view: null,
  time: [0, 1], // what is shown, in ns
  address: [0, 1], // what is shown, in bytes
  step: -1, // the step that the keyboard is at
  hit: null, // what the pointer or the keyboard is at
  chosen: null, // the weight that is followed
};
const limitsOf = { time: () => figure.view.limits, address: () => [0, Math.max(1, DATA.addresses)] };

function makeChart(name, height, { data, series = [{}], y, axis, paint, title }) {
  const top = name === "lanes" ? TOP : 0;
  const time = axisOf(TIME, { side: 0, size: top, space: 110, ...(top ? {} : { values: () => [] }) });
  figure.charts[name] = new uPlot({
    title, class: name, width: figure.root.clientWidth, height: height + top, legend: { show: false },
    padding: name === "arena" ? [8, 0, 8, 0] : [0, 0, 0, 0],
    cursor: { y: false, drag: { x: false }, points: { show: false }, sync: { key: "pass" } },
    scales: { x: { time: false, range: () => figure.time }, y },
    axes: [time, { ...axis, size: GUTTER, grid: { show: false } }],
    series: [{}, ...series],
    hooks: { drawAxes: paint ? [painted(paint)] : [], draw: [painted(drawPasses)] },
  }, data || [figure.view.limits, [null, null]], figure.root);
  listen(name, figure.charts[name].over);
}

/** Makes the charts of a view anew: lanes for compute and every link, what is held, and the arena. */
function showView() {
  for (const chart of Object.values(figure.charts)) chart.destroy();
  const view = figure.method[figure.key];
  const { lanes, boxes, period, held: [times, held] } = view;
  const known = [...lanes.flatMap(({ items }) => items), ...boxes];
  for (const one of known) Object.assign(one, figure.method.about[one.about]);
  view.streamed = boxes.filter(({ paint }) => paint === "held");
  view.reads = lanes[0].items.filter(({ paint }) => paint === "compute");
  view.steps = view.reads.filter(({ start }) => start >= 0 && start < period);
  view.top = held.reduce((top, nbytes) => Math.max(top, nbytes), Math.max(1, DATA.arena_bytes));
  Object.assign(figure, { charts: {}, view, step: -1 });
  showHit(null);
  fit();
  const named = (at, names) => axisOf(TIME, { stroke: () => colour("ink"), splits: () => at, values: () => names });
  makeChart("lanes", LANE * lanes.length, {
    y: { range: () => [0, lanes.length], dir: -1 },
    axis: named(lanes.map((_, i) => i + 0.5), lanes.map(({ name }) => name)),
    paint: drawLanes,
  });
  if (!DATA.addresses) return;
  const area = (name) => ({ fill: () => colour(name), points: { show: false } });
  makeChart("memory", 52, {
    data: [times, held, ...["resident_bytes", "arena_bytes"].map((name) => times.map(() => DATA[name]))],
    series: [area("held"), area("resident"), { stroke: () => colour("muted"), points: { show: false } }],
    y: { range: () => [0, view.top * 1.06] },
    axis: named([view.top / 2], ["in memory"]),
  });
  makeChart("arena", clamp(Math.round(window.innerHeight * 0.5), 260, 520), {
    title: DATA.arena === "paged" ? "Arena, by layout offset" : "Arena, by address",
    y: { range: () => figure.address, dir: -1 },
    axis: axisOf(BYTES, { space: 44 }),
    paint: drawArena,
  });
}

/** Draws when the running task is over, once, however often it is asked for. */
function redraw() {
  for (const chart of Object.values(figure.charts)) chart.redraw();
}

/** Shows an axis from `start` to `end`, or as far as there is something. */
function show(axis, start, end) {
  const [least, most] = limitsOf[axis]();
  const span = clamp(end - start, Math.max(1, (most - least) * 1e-6), Math.max(1, most - least));
  const low = clamp(start, least, Math.max(least, most - span));
  figure[axis] = [low, low + span];
  redraw();
}

function zoom(axis, factor, at = (figure[axis][0] + figure[axis][1]) / 2) {
  const [low, high] = figure[axis];
  show(axis, at - (at - low) * factor, at + (high - at) * factor);
}

function move(axis, share, [low, high] = figure[axis]) {
  show(axis, low + share * (high - low), high + share * (high - low));
}

/** The pass that is looked at, with a little of its neighbours, and all addresses. */
function fit() {
  const { limits: [low, high], period } = figure.view;
  show("time", Math.max(low, -period * 0.05), Math.min(high, period * 1.05));
  show("address", ...limitsOf.address());
}

/** Shows the addresses of some ranges, from the first to the last. */
function showRanges(ranges) {
  const edges = ranges.flatMap(({ address, nbytes }) => [address, address + nbytes]);
  if (edges.length) show("address", Math.min(...edges), Math.max(...edges));
}

/** The steps around one, and the addresses that they stream through. */
function showSteps(step, around = 6) {
  const { steps, streamed } = figure.view;
  const low = clamp(step - around, 0, Math.max(0, steps.length - 1 - 2 * around));
  show("time", steps[low].start, steps[Math.min(steps.length - 1, low + 2 * around)].end);
  showRanges(streamed.filter(inSight));
}

/** Shows a step of the pass that is looked at, and says what it is. */
function goToStep(step) {
  const { steps, period } = figure.view;
  if (!steps.length) return;
  figure.step = (step + steps.length) % steps.length;
  const hit = steps[figure.step];
  const { start, end } = hit;
  const span = figure.time[1] - figure.time[0];
  if (steps.length > MANY && span > period / 4) showSteps(figure.step);
  else if (start < figure.time[0] || end > figure.time[1]) show("time", start - span / 2, start + span / 2);
  const share = ((start + end) / 2 - figure.time[0]) / (figure.time[1] - figure.time[0]);
  showHit(hitOf(hit), "lanes", { left: share * figure.charts.lanes.over.clientWidth, top: LANE });
  byId("announce").textContent = `${hit.title}: ${figure.hit.lines.map((line) => line.join(" ")).join("; ")}`;
}
