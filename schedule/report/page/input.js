// Wheel, pointer, keys and buttons over the charts of a pass, and what the pointer is at, in words.

const KEYS = {
  "+": () => zoom("time", 0.6),
  "=": () => zoom("time", 0.6),
  "-": () => zoom("time", 1 / 0.6),
  0: fit,
  Home: fit,
  ArrowLeft: () => move("time", -0.1),
  ArrowRight: () => move("time", 0.1),
  ArrowUp: () => move("address", -0.1),
  ArrowDown: () => move("address", 0.1),
  PageUp: () => zoom("address", 0.6),
  PageDown: () => zoom("address", 1 / 0.6),
  n: () => goToStep(figure.step + 1),
  p: () => goToStep(figure.step - 1),
  f: () => showSteps(figure.step < 0 ? figure.method.steps.length >> 1 : figure.step),
  s: () => showRanges(figure.view.streamed),
  Escape: () => { showHit(null); follow(null); },
};

/** Where in a chart an event is, in pixels and in time and value, and what the chart shows of these. */
function placeOf(name, { target, offsetX: left, offsetY: top }) {
  const { clientWidth: width, clientHeight: height } = target;
  const times = figure.time;
  const values = name === "lanes" ? [0, figure.view.lanes.length] : figure.address;
  const at = ([low, high], share) => low + (high - low) * share;
  const [time, value] = [at(times, left / width), at(values, top / height)];
  return { left, top, width, height, times, values, time, value };
}

/** Wheel and pointer over the plot of a chart. */
function listen(name, plot) {
  let grip = null; // where the pointer went down, until it goes up
  const on = (kind, handle) => {
    plot.addEventListener(kind, (event) => handle(placeOf(name, event), event), { passive: false });
  };
  on("wheel", (at, event) => {
    const { deltaX, deltaY, shiftKey } = event;
    const sideways = shiftKey ? deltaY || deltaX : deltaX;
    if (event.altKey && name === "arena") zoom("address", 1.0015 ** deltaY, at.value);
    else if (event.ctrlKey || event.metaKey) zoom("time", 1.002 ** deltaY, at.time);
    else if (Math.abs(sideways) > (shiftKey ? 0 : Math.abs(deltaY))) move("time", sideways / at.width);
    else return;
    event.preventDefault();
  });
  on("pointerdown", (at, { pointerId }) => {
    grip = at;
    plot.setPointerCapture(pointerId);
  });
  on("pointermove", (at) => {
    const [x, y] = grip ? [grip.left - at.left, grip.top - at.top] : [0, 0];
    if (Math.hypot(x, y) > 4) grip.far = true;
    showHit(grip?.far ? null : findHit(name, at), name, at);
    if (!grip?.far) return;
    move("time", x / at.width, grip.times);
    if (name === "arena") move("address", y / at.height, grip.values);
  });
  on("pointerup", () => {
    if (grip && !grip.far) follow(figure.hit?.weights[0] ?? null);
    grip = null;
  });
  on("pointercancel", () => { grip = null; });
  on("pointerleave", () => showHit(null));
  on("dblclick", (at) => {
    zoom("time", 0.2, at.time);
    if (name === "arena") zoom("address", 0.2, at.value);
  });
}

function onKey(event) {
  if (!(event.key in KEYS) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  KEYS[event.key]();
}

const spanOf = (start, end) => `${formatTime(end - start)}, from ${formatTime(Math.max(0, start))} on`;

/** What is known of an item or a box, and when it happens. */
function hitOf({ paint, start, ready = start, end, title, weights, lines }) {
  const verb = { stall: "waits", held: "here for" }[paint] || "takes";
  const times = paint === "resident" ? [] : [[verb, spanOf(start, end)]];
  if (ready > start) times.push(["arrives", spanOf(start, ready)]);
  return { title, weights, lines: [...times, ...lines] };
}

/** What is held at a time, between two corners of the line. */
function hitOfMemory(time) {
  const { held: [times, values], top } = figure.view;
  const next = Math.max(1, times.findIndex((one) => one > time));
  const share = clamp((time - times[next - 1]) / Math.max(1, times[next] - times[next - 1]), 0, 1);
  const held = values[next - 1] + (values[next] - values[next - 1]) * share;
  return { title: "In memory", weights: [], lines: [
    ["at", formatTime(Math.max(0, time))],
    ["held", `${formatBytes(held)}, ${Math.round((held / top) * 100)} % of the arena`],
    ["resident", formatBytes(DATA.resident_bytes)],
  ] };
}

/** What lies at a place, or within two pixels of it; else null. */
function findHit(name, { width, height, times, values, time, value }) {
  if (name === "memory") return hitOfMemory(time);
  const { lanes, boxes } = figure.view;
  for (const pixels of [0, 2]) {
    const late = (pixels / width) * (times[1] - times[0]);
    const far = (pixels / height) * (values[1] - values[0]);
    const now = ({ start, end }) => start - late <= time && time <= end + late;
    const here = ({ address, nbytes }) => address - far <= value && value <= address + nbytes + far;
    const lane = lanes[clamp(Math.floor(value), 0, lanes.length - 1)];
    const found = name === "lanes" ? lane.items.find(now) : boxes.find((one) => now(one) && here(one));
    if (found) return hitOf(found);
  }
  return null;
}

/** Says beside a place of a chart what is there; no hit hides it. */
function showHit(hit, name = "lanes", { left, top } = {}) {
  const tip = byId("tip");
  figure.hit = hit;
  tip.hidden = !hit;
  redraw();
  if (!hit) return;
  const rowOf = ([title, said]) => element("tr", {}, element("th", { scope: "row" }, title), element("td", {}, said));
  tip.replaceChildren(element("strong", {}, hit.title), element("table", {}, ...hit.lines.map(rowOf)));
  const { over } = figure.charts[name];
  const [x, y] = [over.offsetLeft + left, over.parentElement.offsetTop + over.offsetTop + top];
  const [right, below] = [x + 16 + tip.offsetWidth, y + 18 + tip.offsetHeight];
  tip.style.left = `${right > figure.root.clientWidth ? Math.max(0, x - 16 - tip.offsetWidth) : x + 16}px`;
  tip.style.top = `${below > figure.root.clientHeight + 40 ? Math.max(0, y - 12 - tip.offsetHeight) : y + 18}px`;
}
