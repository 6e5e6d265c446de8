// Puts the page together: the facts, the picture of a pass, the curve and the table.

const methods = DATA.methods.map(buildMethod);
const state = { method: 0, view: "steady" };

function headline() {
  const { plan } = DATA;
  const names = methods.map((method) => method.name).join(" and ");
  const each = methods.length > 1 ? "for a pass of each" : "a pass";
  return `${names || "Nothing to run"}: ${formatTime(plan.predicted_ns)} ${each} within ${formatBytes(plan.budget)}`;
}

function boundSentence() {
  const { plan } = DATA;
  if (plan.lower_bound_ns === null) return "No bound was found in time, so it is not known how much faster a plan could be.";
  const away = plan.predicted_ns / Math.max(1, plan.lower_bound_ns) - 1;
  if (away < 0.00005) return "No plan for this budget can be faster.";
  return `No plan for this budget can be more than ${(away * 100).toPrecision(2)} % faster.`;
}

/** What is known at a glance: title, value, and a line of detail. */
function facts() {
  const { plan } = DATA;
  const total = WEIGHTS.some((weight) => weight.nbytes === null) ? null : WEIGHTS.reduce((sum, weight) => sum + weight.nbytes, 0);
  const transfers = methods.reduce((sum, method) => sum + method.transfers, 0);
  const copying = methods.reduce((sum, method) => sum + method.copying_ns, 0);
  const arena = `${plan.arena}, ${plan.backing}, granule ${formatBytes(plan.granule)}`;
  const outside = plan.outside_bytes === null ? `${DATA.weights.outside.length} storages` : formatBytes(plan.outside_bytes);
  const found = [
    ["Predicted", formatTime(plan.predicted_ns), `a pass; compute alone takes ${formatTime(plan.compute_ns)}`],
    ["Lower bound", plan.lower_bound_ns === null ? "not found" : formatTime(plan.lower_bound_ns), plan.lower_bound_ns ? `predicted is ${(plan.predicted_ns / plan.lower_bound_ns).toFixed(4)} times that` : "the solver gave none in time"],
    ["What limits it", LIMITS[plan.limit][0], plan.streamed_bytes ? LIMITS[plan.limit][1](copying, plan) : "nothing streams"],
    ["Budget", formatBytes(plan.budget), budgetLine(plan.budget, total)],
    ["Arena", formatBytes(plan.arena_bytes), plan.arena_bytes ? arena : "none is needed"],
    ["Stays in memory", formatBytes(plan.resident_bytes), `in the arena; ${outside} outside it`],
    ["Streamed a pass", formatBytes(plan.streamed_bytes), `in ${count(transfers, "transfer")}`],
    ["Hardware", plan.hardware.name, hardwareLine(plan.hardware)],
  ];
  return found.map(([title, value, more]) => element(
    "div", {}, element("dt", {}, title), element("dd", { class: "value" }, value), element("dd", { class: "more" }, more),
  ));
}

function budgetLine(budget, total) {
  if (total === null) return "sizes of some weights are unknown";
  return total ? `${formatShare(budget / total)} of ${formatBytes(total)} of weights` : "there are no weights";
}

const LIMITS = {
  compute: ["Compute", () => "copies hide behind it"],
  link: ["The link", (copying, plan) => `busy ${formatShare(copying / Math.max(1, plan.predicted_ns))} of the time`],
  disk: ["The disk", () => "the host does not hold all that streams"],
  memory: ["Memory", () => "too little room to copy ahead"],
};

function hardwareLine(hardware) {
  const rate = `${digits(hardware.link_bytes_per_s / 1e9)} GB/s to the arena`;
  return hardware.note ? `${rate}; ${hardware.note}` : rate;
}

function passNote(view) {
  const { method } = view;
  const stall = view.stall > 0 ? `compute waits ${formatTime(view.stall)} of it` : "compute never waits";
  const shape = method.shape ? ` at ${method.shape}` : "";
  if (view.key === "first") {
    const held = view.boxes.reduce((sum, box) => sum + (box.pass < 0 ? box.stay.nbytes : 0), DATA.plan.resident_bytes);
    const there = held ? ` The ${formatBytes(held)} that stay between passes are in memory when it begins.` : "";
    return `The first pass of ${method.name}${shape} takes ${formatTime(view.period)}; ${stall}.${there}`;
  }
  return `One pass of many of ${method.name}${shape}, ${method.times} times: ${formatTime(view.period)}; ${stall}. ${wrapSentence(method)}`;
}

/** Whether the passes before and after, which stand back at the sides, have a part in this one. */
function wrapSentence(method) {
  if (!method.copies.length) return "Nothing is copied.";
  if (!method.copies.some((copy) => copy.after < 0)) {
    const held = method.stays.some((stay) => stay.until >= method.steps.length);
    return held ? "The next begins with what it holds at its end." : "Nothing is on its way when a call begins or ends.";
  }
  if (DATA.plan.wrap === "barrier") return "What is on its way for the next pass joins at the end of a call.";
  return "Its end copies for the beginning of the next, which stands back at the right.";
}

function legend(view) {
  const item = (style, text, kind = null) => element("span", {}, element("i", { style, class: kind }), text);
  const links = [...view.links.keys()].sort();
  return [
    item("background: var(--compute)", "compute that reads weights"),
    ...(view.compute.some((one) => one.kind === "lead" || one.kind === "tail") ? [item("background: var(--lead)", "compute that reads none")] : []),
    ...(view.compute.some((one) => one.kind === "stall") ? [item("", "stall: waits for a copy", "hatch")] : []),
    ...(view.compute.some((one) => one.kind === "gap") ? [item("background: var(--line)", "between two calls")] : []),
    ...links.map((link) => item(`background: var(--${link % 2 ? "disk" : "copy"})`, link % 2 ? "copied from the disk" : "being copied")),
    ...(links.length ? [item("background: var(--held)", "in memory until it is read")] : []),
    ...(RESIDENT.length ? [item("background: var(--resident)", "stays in memory")] : []),
  ];
}

function showPass() {
  const method = methods[state.method];
  const view = buildView(method, state.view);
  byId("pass-note").textContent = passNote(view);
  byId("legend").replaceChildren(...legend(view));
  for (const key of ["steady", "first"]) byId(`view-${key}`).setAttribute("aria-pressed", String(key === state.view));
  clearHit();
  byId("steps").hidden = method.steps.length <= MANY;
  byId("streamed").hidden = !streamedAddresses(view);
  showView(view);
}

function showMethods() {
  const select = byId("method");
  byId("method-label").hidden = methods.length < 2;
  select.replaceChildren(...methods.map((method, i) => element("option", { value: String(i) }, method.shape ? `${method.name}, ${method.shape}` : method.name)));
  select.addEventListener("change", () => {
    state.method = Number(select.value);
    showPass();
    showTable(methods[state.method]);
  });
}

const ACTS = {
  "time-in": () => zoomTime(0.6),
  "time-out": () => zoomTime(1 / 0.6),
  "address-in": () => zoomAddress(0.6),
  "address-out": () => zoomAddress(1 / 0.6),
  steps: () => showSteps(figure.step < 0 ? methods[state.method].steps.length >> 1 : figure.step),
  streamed: () => fitStreamed(),
  fit: () => fit(),
};

function follow() {
  for (const key of ["steady", "first"]) {
    byId(`view-${key}`).addEventListener("click", () => {
      state.view = key;
      showPass();
    });
  }
  for (const button of document.querySelectorAll("[data-act]")) button.addEventListener("click", () => ACTS[button.dataset.act]());
  byId("search").addEventListener("input", filterTable);
  followPointer();
  followKeys();
  let width = 0;
  new ResizeObserver(() => {
    if (figure.canvas.clientWidth === width) return;
    width = figure.canvas.clientWidth;
    resize();
    drawCurve();
  }).observe(figure.canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColours();
    redraw();
  });
}

function start() {
  byId("headline").textContent = headline();
  byId("verdict").textContent = [boundSentence(), ...DATA.plan.verdict].join(" ");
  byId("facts").replaceChildren(...facts());
  byId("curve-note").textContent = DATA.sweep.length
    ? "Each dot is a plan for that budget; the large one is this plan's. Other policies get the same memory, link and step times."
    : `This plan, and what no plan for its budget can beat.${methods.length === 1 ? " The line is what link and compute allow at best with so much memory." : ""}`;
  showMethods();
  if (methods.length) {
    showPass();
    showTable(methods[0]);
  }
  drawCurve();
  for (const part of document.querySelectorAll(".addresses")) part.hidden = !DATA.plan.addresses;
  follow();
}

start();
