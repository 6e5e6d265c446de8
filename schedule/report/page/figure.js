// The charts of a pass, one above the other, share their time; zoom and moving.

const LANE = 38; // pixels
const FEW = 13; // steps

const figure = {
  root: byId("figure"),
  charts: {}, // of uPlot: "lanes", and where there is an arena "memory" and "arena"
  method: DATA.methods[0],
  key: "steady", // or "first": which of its views is shown
  view: null, // what is known of that view
  x: [0, 1], y: [0, 1], // what is shown, in ns, and of the arena in bytes
  limits: { x: [0, 1], y: [0, Math.max(1, DATA.addresses)] }, // what there is to show
  step: -1, // the step that the keyboard is at
  hit: null, // what the pointer or the keyboard is at
  chosen: null, // the weight that is followed
};

function makeChart(name, height, { data, series = [{}], range, dir = -1, axis, paint, title }) {
  const top = name === "lanes" ? 28 : 0;
  const time = axisOf(TIME, { side: 0, size: top, space: 110, ...(top ? {} : { values: () => [] }) });
  const chart = new uPlot({
    title, class: name, width: figure.root.clientWidth, height: height + top, legend: { show: false },
    padding: name === "arena" ? [8, 28, 8, 0] : [0, 28, 0, 0],
    cursor: { y: false, drag: { x: false }, points: { show: false }, sync: { key: "pass" } },
    scales: { x: { time: false, range: () => figure.x }, y: { range, dir } },
    axes: [time, { ...axis, size: 86, grid: { show: false } }],
    series: [{}, ...series],
    hooks: { drawAxes: paint ? [painted(paint)] : [], draw: [painted(drawPasses)] },
  }, data || [figure.limits.x, [null, null]], figure.root);
  figure.charts[name] = chart;
  listen(name, chart);
}

/** Makes the charts of a view anew: lanes for compute and every link, what is held, and the arena. */
function showView() {
  for (const chart of Object.values(figure.charts)) chart.destroy();
  const { about, [figure.key]: view } = figure.method;
  const { lanes, period, held: [times, held] } = view;
  const [bars, boxes] = [view.bars, view.boxes].map((pieces) => pieces.map(
    ([paint, at, start, ready, end, low, high]) => ({ ...about[at], paint, start, ready, end, low, high }),
  ));
  const reads = bars.filter(({ paint }) => paint === "compute");
  const steps = reads.filter(({ start }) => start >= 0 && start < period);
  const map = [...boxes, ...reads.flatMap((read) => read.weights.map((index) => {
    const { name, address, nbytes } = DATA.weights[index];
    return { ...read, title: name, low: address, high: address + nbytes, weights: [index] };
  })).filter(({ low }) => low >= 0)]; // and over what lies there, what is read of it
  Object.assign(figure, { charts: {}, view: { ...view, bars, map, reads, steps }, step: -1 });
  figure.limits.x = view.limits;
  showHit(null);
  fit();
  showStreamed();
  const ink = { stroke: () => colour("ink") };
  makeChart("lanes", LANE * lanes.length, {
    range: () => [0, lanes.length],
    axis: axisOf(TIME, { ...ink, splits: () => lanes.map((_, i) => i + 0.5), values: () => lanes }),
    paint: drawLanes,
  });
  if (!DATA.addresses) return;
  const top = Math.max(1, DATA.arena_bytes);
  const area = (name) => ({ fill: () => colour(name), points: { show: false } });
  makeChart("memory", 52, {
    data: [times, held, times.map(() => DATA.resident_bytes)],
    series: [area("held"), area("resident")],
    range: () => [0, top],
    dir: 1,
    axis: axisOf(BYTES, { ...ink, splits: () => [top / 2], values: () => ["in memory"] }),
  });
  makeChart("arena", clamp(Math.round(window.innerHeight * 0.5), 260, 520), {
    title: DATA.arena === "paged" ? "Arena, where each weight has a place" : "Arena, where weights take turns",
    range: () => figure.y,
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
  const [least, most] = figure.limits[axis];
  const span = clamp(end - start, Math.max(1, (most - least) * 1e-6), Math.max(1, most - least));
  const low = clamp(start, least, Math.max(least, most - span));
  figure[axis] = [low, low + span];
  redraw();
}

/** Shows so much less or more of an axis, around a value of it or its middle. */
function zoom(axis, factor, at = (figure[axis][0] + figure[axis][1]) / 2) {
  show(axis, ...figure[axis].map((edge) => at + (edge - at) * factor));
}

/** Moves by a share of what is shown. */
function move(axis, share) {
  const [low, high] = figure[axis];
  show(axis, low + share * (high - low), high + share * (high - low));
}

/** The pass that is looked at, with a little of its neighbours, and all addresses. */
function fit() {
  const { period } = figure.view;
  show("x", -0.05 * period, 1.05 * period);
  show("y", ...figure.limits.y);
}

/** The addresses of what streams, from the first to the last, or of those boxes that `sees` picks. */
function showStreamed(sees = () => true) {
  const boxes = figure.view.map.filter((box) => box.paint === "held" && sees(box));
  const [lows, highs] = [boxes.map(({ low }) => low), boxes.map(({ high }) => high)];
  if (boxes.length) show("y", Math.min(...lows), Math.max(...highs));
}

/** The steps around one, if there are more, and the addresses that they stream through. */
function showSteps(step) {
  const { steps } = figure.view;
  if (steps.length <= FEW) return;
  const first = clamp(step - (FEW >> 1), 0, steps.length - FEW);
  show("x", steps[first].start, steps[first + FEW - 1].end);
  showStreamed(inSight);
}

/** Says what a step of the pass is, and shows it with those around it. */
function goToStep(step) {
  const { steps } = figure.view;
  if (!steps.length) return;
  figure.step = (step + steps.length) % steps.length;
  showSteps(figure.step);
  const hit = steps[figure.step];
  const { left, top, width } = figure.charts.lanes.over.getBoundingClientRect();
  const middle = ((hit.start + hit.end) / 2 - figure.x[0]) / (figure.x[1] - figure.x[0]);
  showHit(saidOf(hit), { clientX: left + middle * width, clientY: top + LANE });
}
