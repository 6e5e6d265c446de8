// Wheel, pointer and keys over the picture of a pass.

const regionAt = (y) => figure.regions.find((one) => y >= one.y && y < one.y + one.height) || null;

function place(event) {
  const box = figure.canvas.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
}

function onWheel(event) {
  const { x, y } = place(event);
  const region = regionAt(y);
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
  if (event.altKey && region && region.kind === "arena") {
    event.preventDefault();
    zoomAddress(1.0015 ** event.deltaY, yToAddress(region, y));
  } else if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    zoomTime(1.002 ** event.deltaY, xToTime(x));
  } else if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) {
    event.preventDefault();
    moveTime((sideways / plotWidth()) * (figure.time[1] - figure.time[0]));
  }
}

function followPointer() {
  const { canvas } = figure;
  let drag = null;
  canvas.addEventListener("wheel", onWheel, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    const { x, y } = place(event);
    drag = { x, y, time: figure.time, address: figure.address, region: regionAt(y), far: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    figure.pointer = place(event);
    if (drag) {
      const { x, y } = figure.pointer;
      drag.far = drag.far || Math.hypot(x - drag.x, y - drag.y) > 4;
      if (drag.far) dragTo(drag, x, y);
    }
    if (!drag || !drag.far) pointAt(figure.pointer);
    redraw();
  });
  const release = () => {
    canvas.classList.remove("moving");
    drag = null;
  };
  canvas.addEventListener("pointerup", () => {
    if (drag && !drag.far) chooseWeight(figure.hit && figure.hit.weights.length ? figure.hit.weights[0] : null);
    release();
  });
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("dblclick", (event) => {
    const { x, y } = place(event);
    const region = regionAt(y);
    zoomTime(0.2, xToTime(x));
    if (region && region.kind === "arena") zoomAddress(0.2, yToAddress(region, y));
  });
  canvas.addEventListener("pointerleave", () => {
    figure.pointer = null;
    if (!drag) clearHit();
    redraw();
  });
}

function dragTo(drag, x, y) {
  figure.canvas.classList.add("moving");
  clearHit();
  const perPixel = (drag.time[1] - drag.time[0]) / plotWidth();
  figure.time = moved(drag.time, (drag.x - x) * perPixel, figure.view.limits);
  if (drag.region && drag.region.kind === "arena") {
    const bytesPerPixel = (drag.address[1] - drag.address[0]) / drag.region.height;
    figure.address = moved(drag.address, (drag.y - y) * bytesPerPixel, [0, DATA.plan.addresses]);
  }
}

const KEYS = {
  "+": () => zoomTime(0.7),
  "=": () => zoomTime(0.7),
  "-": () => zoomTime(1 / 0.7),
  0: () => fit(),
  Home: () => fit(),
  ArrowLeft: () => moveTime(-(figure.time[1] - figure.time[0]) / 10),
  ArrowRight: () => moveTime((figure.time[1] - figure.time[0]) / 10),
  ArrowUp: () => moveAddress(-(figure.address[1] - figure.address[0]) / 10),
  ArrowDown: () => moveAddress((figure.address[1] - figure.address[0]) / 10),
  PageUp: () => zoomAddress(0.7),
  PageDown: () => zoomAddress(1 / 0.7),
  n: () => goToStep(figure.step + 1),
  p: () => goToStep(figure.step - 1),
  Escape: () => { clearHit(); chooseWeight(null); },
};

function followKeys() {
  figure.canvas.addEventListener("keydown", (event) => {
    const act = KEYS[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
}

/** Shows a step of the pass that is looked at, and says what it is. */
function goToStep(step) {
  const { view } = figure;
  const { steps } = view.method;
  if (!steps.length) return;
  figure.step = (step + steps.length) % steps.length;
  const start = view.reads[view.focus][figure.step];
  const end = start + steps[figure.step].read;
  const span = figure.time[1] - figure.time[0];
  if (steps.length > MANY && span > 0.25 * view.period) showSteps(figure.step);
  else if (start < figure.time[0] || end > figure.time[1]) {
    figure.time = moved(figure.time, start - span / 2 - figure.time[0], view.limits);
  }
  const lane = figure.regions[0];
  const item = view.compute.find((one) => one.kind === "read" && one.pass === view.focus && one.step.index === figure.step)
    || { kind: "read", start, end, step: steps[figure.step], pass: view.focus };
  showHit(hitOfCompute(item), { x: timeToX((start + end) / 2), y: lane.y + lane.height }, { aloud: true });
  redraw();
}
