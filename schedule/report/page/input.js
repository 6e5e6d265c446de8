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
  s: () => showRanges(figure.method.streamed),
  Escape: () => { showHit(null); follow(null); },
};

/** Which chart the pointer is in, and at which time and value; null outside their plots. */
function placeOf({ target, clientX, clientY }) {
  const [name, chart] = Object.entries(figure.charts).find(([, { over }]) => over === target) || [];
  if (!chart) return null;
  const { left, top, width, height } = chart.over.getBoundingClientRect();
  const [time, value] = [chart.posToVal(clientX - left, "x"), chart.posToVal(clientY - top, "y")];
  return { name, width, height, time, value, x: clientX, y: clientY };
}

function onWheel(event) {
  const at = placeOf(event);
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
  if (at && event.altKey && at.name === "arena") zoom("address", 1.0015 ** event.deltaY, at.value);
  else if (at && (event.ctrlKey || event.metaKey)) zoom("time", 1.002 ** event.deltaY, at.time);
  else if (at && Math.abs(sideways) > (event.shiftKey ? 0 : Math.abs(event.deltaY))) move("time", sideways / at.width);
  else return;
  event.preventDefault();
}

function listen({ root } = figure) {
  let drag = null;
  const on = (kind, handle) => root.addEventListener(kind, handle, { passive: false });
  on("wheel", onWheel);
  on("pointerdown", (event) => {
    const at = placeOf(event);
    drag = at && { ...at, far: false, begin: figure.time, low: figure.address };
  });
  on("pointermove", (event) => {
    const [x, y] = drag ? [drag.x - event.clientX, drag.y - event.clientY] : [0, 0];
    if (drag && (drag.far || Math.hypot(x, y) > 4)) {
      if (!drag.far) root.setPointerCapture(event.pointerId);
      drag.far = true;
      showHit(null);
      move("time", x / drag.width, drag.begin);
      if (drag.name === "arena") move("address", y / drag.height, drag.low);
    } else {
      const { left, top } = root.getBoundingClientRect();
      showHit(findHit(placeOf(event)), event.clientX - left, event.clientY - top);
    }
  });
  on("pointerup", () => {
    if (drag && !drag.far) follow(figure.hit && figure.hit.weights.length ? figure.hit.weights[0] : null);
    drag = null;
  });
  on("pointercancel", () => { drag = null; });
  on("pointerleave", () => { if (!drag) showHit(null); });
  on("dblclick", (event) => {
    const at = placeOf(event);
    if (at) zoom("time", 0.2, at.time);
    if (at && at.name === "arena") zoom("address", 0.2, at.value);
  });
  on("keydown", (event) => {
    if (!(event.key in KEYS) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    KEYS[event.key]();
  });
}

const spanOf = (start, end) => `${formatTime(end - start)}, from ${formatTime(Math.max(0, start))} on`;

/** What an item of a lane is: a title, lines of a name and a value, and the weights that it is about. */
function hitOf({ kind, start, end, about }) {
  const lines = [[kind === "stall" ? "waits" : "takes", spanOf(start, end)], ...about.lines];
  const stall = kind === "read" && figure.view.lanes[0].items.find((one) => one.kind === "stall" && one.end === start);
  if (stall) lines.push(["waited", formatTime(stall.end - stall.start)]);
  return { ...about, lines };
}

/** What a range of the arena is, and how long it stays. */
function hitOfBox({ start, ready, end, stay: { weight, nbytes, until } }) {
  const { steps } = figure.method;
  const { name, nbytes: all } = DATA.weights[weight];
  const lines = [["bytes", formatBytes(nbytes) + (all === null ? "" : ` of ${formatBytes(all)}`)]];
  if (ready > start) lines.push(["arrives", spanOf(start, ready)]);
  if (until === null) lines.push(["here", "always: it never leaves"]);
  else {
    lines.push(["leaves", `when ${steps[until % steps.length]} ends${until < steps.length ? "" : " in the pass after"}`]);
    lines.push(["here for", formatTime(end - start)]);
  }
  return { title: name, weights: [weight], lines };
}

/** What is held at a time, between two corners of the line. */
function hitOfMemory(time) {
  const { held: [times, values], top } = figure.view;
  const next = Math.max(1, times.findIndex((one) => one > time));
  const share = clamp((time - times[next - 1]) / Math.max(1, times[next] - times[next - 1]), 0, 1);
  const held = values[next - 1] + (values[next] - values[next - 1]) * share;
  return { title: "In memory", weights: [], lines: [
    ["at", formatTime(Math.max(0, time))],
    ["held", `${formatBytes(held)}, ${formatShare(held / top)} of the arena`],
    ["resident", formatBytes(DATA.resident_bytes)],
  ] };
}

/** What lies at a place, or within two pixels of it; else null. */
function findHit(at) {
  if (!at || at.name === "memory") return at && hitOfMemory(at.time);
  const { view, time, address } = figure;
  for (const pixels of [0, 2]) {
    const [late, far] = [(pixels / at.width) * (time[1] - time[0]), (pixels / at.height) * (address[1] - address[0])];
    const now = ({ start, end }) => start - late <= at.time && at.time <= end + late;
    const here = ({ stay }) => stay.address - far <= at.value && at.value <= stay.address + stay.nbytes + far;
    const lane = view.lanes[clamp(Math.floor(at.value), 0, view.lanes.length - 1)];
    const found = at.name === "lanes" ? lane.items.find(now) : view.boxes.find((one) => now(one) && here(one));
    if (found) return found.stay ? hitOfBox(found) : hitOf(found);
  }
  return null;
}

/** Says beside a place of the picture what is there; no hit hides it. */
function showHit(hit, x, y) {
  const [tip, { clientWidth, clientHeight }] = [byId("tip"), figure.root];
  figure.hit = hit;
  tip.hidden = !hit;
  redraw();
  if (!hit) return;
  const rowOf = ([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value));
  tip.replaceChildren(element("strong", {}, hit.title), element("table", {}, ...hit.lines.map(rowOf)));
  const { offsetWidth: width, offsetHeight: height } = tip;
  tip.style.left = `${Math.max(0, x + 16 + width > clientWidth ? x - 16 - width : x + 16)}px`;
  tip.style.top = `${y + 18 + height > clientHeight + 40 ? Math.max(0, y - height - 12) : y + 18}px`;
}
