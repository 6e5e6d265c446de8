// The picture of a pass: one canvas whose regions share the time axis, with zoom and moving.

const GUTTER = 86;
const AXIS = 34;
const LANE = { compute: 38, link: 30, memory: 46 };
const GAP = 10;
const MARGIN = 0.05;
const MANY = 40; // steps: with more, a single one is too narrow to see until it is zoomed in on

const figure = {
  canvas: byId("figure"),
  context: byId("figure").getContext("2d"),
  width: 0,
  height: 0,
  regions: [],
  view: null,
  time: [0, 1], // what is shown, in ns
  address: [0, 1], // what is shown, in bytes
  pointer: null, // where the pointer is, in pixels
  step: -1, // the step that the keyboard is at
  hit: null, // what the pointer or the keyboard is at
  chosen: null, // the weight that is followed
  queued: false,
};

const timeToX = (ns) => GUTTER + ((ns - figure.time[0]) / (figure.time[1] - figure.time[0])) * plotWidth();
const xToTime = (x) => figure.time[0] + ((x - GUTTER) / plotWidth()) * (figure.time[1] - figure.time[0]);
const plotWidth = () => Math.max(1, figure.width - GUTTER - 1);

/** Lanes for compute, every link and memory, and the arena below. */
function layRegions() {
  const { view } = figure;
  const links = [...view.links.keys()].sort((a, b) => a - b);
  let y = AXIS;
  figure.regions = [];
  const add = (kind, height, more) => {
    figure.regions.push({ kind, y, height, ...more });
    y += height + GAP;
  };
  add("compute", LANE.compute);
  for (const link of links) add("link", LANE.link, { link });
  if (DATA.plan.addresses > 0) {
    add("memory", LANE.memory);
    y += 24;
    add("arena", clamp(Math.round(window.innerHeight * 0.5), 260, 520));
  }
  figure.height = y - GAP + 1;
}

function showView(view) {
  const keepAddress = Boolean(figure.view) && figure.view.method === view.method;
  figure.view = view;
  figure.step = -1;
  figure.hit = null;
  layRegions();
  fit({ keepAddress });
  resize();
}

function fit({ keepAddress = false } = {}) {
  const { begins, focus, period, limits } = figure.view;
  const margin = period * MARGIN;
  figure.time = [Math.max(limits[0], begins[focus] - margin), Math.min(limits[1], begins[focus + 1] + margin)];
  if (figure.time[1] <= figure.time[0]) figure.time[1] = figure.time[0] + 1;
  if (!keepAddress) figure.address = [0, Math.max(1, DATA.plan.addresses)];
  redraw();
}

/** The addresses through which weights stream, where they are less than most of the arena; else null. */
function streamedAddresses(view) {
  const { stays } = view.method;
  const low = stays.reduce((least, stay) => Math.min(least, stay.address), Infinity);
  const high = stays.reduce((most, stay) => Math.max(most, stay.address + stay.nbytes), 0);
  return stays.length && high - low < 0.6 * DATA.plan.addresses ? [low, high] : null;
}

function fitStreamed() {
  figure.address = streamedAddresses(figure.view) || figure.address;
  redraw();
}

/** The steps around one, and the addresses that they stream through. */
function showSteps(step, around = 6) {
  const { view } = figure;
  const reads = view.reads[view.focus];
  const low = Math.max(0, Math.min(step - around, reads.length - 1 - 2 * around));
  const high = Math.min(reads.length - 1, low + 2 * around);
  const end = reads[high] + view.method.steps[high].read;
  figure.time = [reads[low], Math.max(end, reads[low] + 1)];
  const near = view.boxes.filter((box) => box.end > figure.time[0] && box.start < figure.time[1]);
  if (near.length) {
    const first = near.reduce((least, box) => Math.min(least, box.stay.address), Infinity);
    const last = near.reduce((most, box) => Math.max(most, box.stay.address + box.stay.nbytes), 0);
    figure.address = [first, last];
  }
  redraw();
}

function resize() {
  const { canvas } = figure;
  figure.width = canvas.clientWidth;
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(figure.width * scale);
  canvas.height = Math.round(figure.height * scale);
  canvas.style.height = `${figure.height}px`;
  figure.context.setTransform(scale, 0, 0, scale, 0, 0);
  redraw();
}

/** Draws once before the next frame, however often it is asked for. */
function redraw() {
  if (figure.queued || !figure.view) return;
  figure.queued = true;
  requestAnimationFrame(() => {
    figure.queued = false;
    draw();
  });
}

function draw() {
  const { context: g, view } = figure;
  g.clearRect(0, 0, figure.width, figure.height);
  g.font = '12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
  g.textBaseline = "middle";
  drawTimeAxis(g);
  for (const region of figure.regions) {
    g.fillStyle = colours.soft;
    g.fillRect(GUTTER, region.y, plotWidth(), region.height);
    g.save();
    g.beginPath();
    g.rect(GUTTER, region.y, plotWidth(), region.height);
    g.clip();
    if (region.kind === "arena") drawArena(g, region);
    else if (region.kind === "memory") drawMemory(g, region);
    else drawLane(g, region);
    dimNeighbours(g, region);
    g.restore();
  }
  drawBoundaries(g, view);
  for (const region of figure.regions) drawLabel(g, region);
  drawCursor(g);
}

function drawTimeAxis(g) {
  const found = ticks(figure.time[0], figure.time[1], plotWidth() / 110);
  const labels = tickLabels(found, TIME_UNITS);
  const bottom = figure.height - 1;
  const { view } = figure;
  const end = timeToX(view.begins[view.focus + 1]);
  found.values.forEach((value, i) => {
    const x = Math.round(timeToX(value)) + 0.5;
    if (x < GUTTER || Math.abs(x - end) < 64) return;
    g.strokeStyle = colours.line;
    g.beginPath();
    g.moveTo(x, AXIS - 6);
    g.lineTo(x, bottom);
    g.stroke();
    const width = g.measureText(labels[i]).width;
    g.fillStyle = colours.muted;
    g.textAlign = "left";
    g.fillText(labels[i], clamp(x - width / 2, GUTTER, figure.width - width - 1), AXIS - 14);
  });
}

/** The passes before and after the one that is looked at stand back. */
function dimNeighbours(g, region) {
  const { begins, focus } = figure.view;
  const left = timeToX(begins[focus]);
  const right = timeToX(begins[focus + 1]);
  g.globalAlpha = 0.62;
  g.fillStyle = colours.surface;
  if (left > GUTTER) g.fillRect(GUTTER, region.y, left - GUTTER, region.height);
  if (right < figure.width) g.fillRect(right, region.y, figure.width - right, region.height);
  g.globalAlpha = 1;
}

function drawBoundaries(g, view) {
  const top = AXIS - 6;
  for (const begin of [view.begins[view.focus], view.begins[view.focus + 1]]) {
    const x = Math.round(timeToX(begin)) + 0.5;
    if (x < GUTTER - 1 || x > figure.width) continue;
    g.strokeStyle = colours.ink;
    g.beginPath();
    g.moveTo(x, top);
    g.lineTo(x, figure.height);
    g.stroke();
    if (begin > 0) {
      const label = formatTime(begin);
      g.fillStyle = colours.ink;
      g.textAlign = "left";
      g.fillText(label, Math.min(x - g.measureText(label).width / 2, figure.width - g.measureText(label).width - 1), AXIS - 14);
    }
  }
}

const LABELS = { compute: "compute", memory: "in memory" };

function drawLabel(g, region) {
  g.fillStyle = colours.ink;
  g.textAlign = "left";
  if (region.kind === "arena") {
    const title = DATA.plan.arena === "paged" ? "Arena, by layout offset" : "Arena, by address";
    g.fillStyle = colours.surface;
    g.fillRect(0, region.y - 23, g.measureText(title).width + 6, 18);
    g.fillStyle = colours.ink;
    g.fillText(title, 0, region.y - 14);
    drawAddressAxis(g, region);
    return;
  }
  g.fillText(LABELS[region.kind] || linkName(region.link), 0, region.y + region.height / 2);
}

function drawCursor(g) {
  const at = figure.pointer ? figure.pointer.x : null;
  if (at === null || at < GUTTER) return;
  g.strokeStyle = colours.muted;
  g.setLineDash([2, 3]);
  g.beginPath();
  g.moveTo(Math.round(at) + 0.5, AXIS - 6);
  g.lineTo(Math.round(at) + 0.5, figure.height);
  g.stroke();
  g.setLineDash([]);
}

/** Zooms a window [low, high] by `factor` around `at`, within limits. */
function zoomed([low, high], factor, at, [least, most]) {
  const narrowest = Math.max(1, (most - least) * 1e-6);
  const span = clamp((high - low) * factor, narrowest, most - least);
  const start = clamp(at - ((at - low) / (high - low)) * span, least, most - span);
  return [start, start + span];
}

function moved([low, high], by, [least, most]) {
  const shift = clamp(by, least - low, most - high);
  return [low + shift, high + shift];
}

function zoomTime(factor, at = (figure.time[0] + figure.time[1]) / 2) {
  figure.time = zoomed(figure.time, factor, at, figure.view.limits);
  redraw();
}

function zoomAddress(factor, at = (figure.address[0] + figure.address[1]) / 2) {
  figure.address = zoomed(figure.address, factor, at, [0, Math.max(1, DATA.plan.addresses)]);
  redraw();
}

function moveTime(by) {
  figure.time = moved(figure.time, by, figure.view.limits);
  redraw();
}

function moveAddress(by) {
  figure.address = moved(figure.address, by, [0, Math.max(1, DATA.plan.addresses)]);
  redraw();
}
