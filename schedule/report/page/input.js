// Wheel, pointer and keys over the charts of a pass, and what is at a place of them, in words.

const KEYS = {
  "+": () => zoom("x", 0.6), "=": () => zoom("x", 0.6), "-": () => zoom("x", 1 / 0.6),
  PageUp: () => zoom("y", 0.6), PageDown: () => zoom("y", 1 / 0.6),
  ArrowLeft: () => move("x", -0.1), ArrowRight: () => move("x", 0.1),
  ArrowUp: () => move("y", -0.1), ArrowDown: () => move("y", 0.1),
  n: () => goToStep(figure.step + 1), p: () => goToStep(figure.step - 1),
  f: () => showSteps(figure.step < 0 ? figure.view.steps.length >> 1 : figure.step),
  s: () => showStreamed(),
  0: fit, Home: fit,
  Escape: () => { showHit(null); follow(null); },
};

figure.root.onkeydown = (event) => {
  if (!(event.key in KEYS) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  KEYS[event.key]();
};

/** Wheel and pointer over the plot of a chart. */
function listen(name, chart) {
  const plot = chart.over;
  let grip = null; // where the pointer that is down was last, and whether it was moved
  const on = (kind, act) => plot.addEventListener(kind, act, { passive: false });
  const look = (event) => showHit(findHit(name, chart, event), event);
  const zoomTime = (event, factor) => zoom("x", factor, chart.posToVal(event.offsetX, "x"));
  const zoomAddress = (event, factor) => {
    if (name === "arena") zoom("y", factor, chart.posToVal(event.offsetY, "y"));
  };
  on("wheel", (event) => {
    const { deltaX, deltaY, altKey, ctrlKey, metaKey, shiftKey } = event;
    if (altKey) zoomAddress(event, 1.0015 ** deltaY);
    else if (ctrlKey || metaKey) zoomTime(event, 1.002 ** deltaY);
    else if (shiftKey) move("x", (deltaX || deltaY) / plot.clientWidth);
    else if (Math.abs(deltaX) > Math.abs(deltaY)) move("x", deltaX / plot.clientWidth);
    else return;
    event.preventDefault();
  });
  on("pointerdown", (event) => {
    grip = { x: event.offsetX, y: event.offsetY, moved: false };
    plot.setPointerCapture(event.pointerId);
    look(event);
  });
  on("pointermove", (event) => {
    if (!grip) return look(event);
    const [x, y] = [grip.x - event.offsetX, grip.y - event.offsetY];
    if (!grip.moved && Math.hypot(x, y) < 5) return;
    grip = { x: event.offsetX, y: event.offsetY, moved: true };
    showHit(null);
    move("x", x / plot.clientWidth);
    if (name === "arena") move("y", y / plot.clientHeight);
  });
  on("pointerup", () => {
    if (grip && !grip.moved) follow(figure.hit?.weights[0] ?? null);
    grip = null;
  });
  on("pointercancel", () => { grip = null; });
  on("pointerleave", ({ pointerType }) => { if (pointerType === "mouse") showHit(null); });
  on("dblclick", (event) => { zoomTime(event, 0.2); zoomAddress(event, 0.2); });
}

/** What is known of a piece of a picture, and when it happens. */
function saidOf({ paint, start, ready, end, title, weights, lines }) {
  const spanOf = (until) => `${formatTime(until - start)}, from ${formatTime(Math.max(0, start))} on`;
  const verb = { stall: "waits", held: "here for" }[paint] ?? "takes";
  const times = paint === "resident" ? [] : [[verb, spanOf(end)]];
  if (ready > start) times.push(["arrives", spanOf(ready)]);
  return { title, weights, lines: [...times, ...lines] };
}

/** What lies uppermost at a place of a chart, or nearest within two pixels of it; else null. */
function findHit(name, chart, { offsetX, offsetY }) {
  const { bars, map } = figure.view;
  if (name === "memory") {
    const [time, held, resident] = chart.data.map((values) => values[chart.posToIdx(offsetX)]);
    const share = `${formatBytes(held)}, ${Math.round((held / DATA.arena_bytes) * 100)} % of the arena`;
    const lines = [["at", formatTime(time)], ["held", share], ["resident", formatBytes(resident)]];
    return { title: "In memory", weights: [], lines };
  }
  const away = (axis, at, from, to) => (
    Math.max(chart.valToPos(from, axis) - at, 0, at - chart.valToPos(to, axis))
  );
  let [nearest, least] = [null, 2];
  for (const one of name === "lanes" ? bars : map) {
    const far = away("x", offsetX, one.start, one.end) + away("y", offsetY, one.low, one.high);
    if (far <= least) [nearest, least] = [one, far];
  }
  return nearest && saidOf(nearest);
}

/** Says beside a place of the window what is there, or nothing. */
function showHit(hit, { clientX: x, clientY: y } = {}) {
  const tip = byId("tip");
  figure.hit = hit;
  redraw();
  if (!hit) return tip.replaceChildren();
  const lines = hit.lines.flat().map((text) => element("span", {}, text));
  tip.replaceChildren(element("strong", {}, hit.title), ...lines);
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = clamp(x + 16, 0, document.documentElement.clientWidth - width);
  const top = y + 18 + height < window.innerHeight ? y + 18 : y - 12 - height;
  tip.style.translate = `${left + window.scrollX}px ${top + window.scrollY}px`;
}
