// What the pointer is at, in words, beside the pointer.

function copyName(copy) {
  const names = copy.weights.map((index) => WEIGHTS[index].name);
  return names.length > 2 ? `${names[0]} and ${names.length - 1} more` : names.join(", ");
}

const span = (start, end) => `${formatTime(end - start)}, from ${formatTime(Math.max(0, start))} on`;

function weightLine(index) {
  const { name, nbytes, resident } = WEIGHTS[index];
  if (nbytes === null) return name;
  const stays = resident > 0 && resident < nbytes ? `, ${formatShare(resident / nbytes)} stays` : resident ? ", stays" : "";
  return `${name} (${formatBytes(nbytes)}${stays})`;
}

/** At most `most` lines, and how many there are more. */
function listed(indices, most = 4) {
  const lines = indices.slice(0, most).map(weightLine);
  if (indices.length > most) lines.push(`and ${indices.length - most} more`);
  return lines.join("\n");
}

const COMPUTE_TITLES = { lead: "Compute before", tail: "Compute after the last step", gap: "Between two calls" };

function hitOfCompute(item) {
  if (item.kind === "stall") return hitOfStall(item);
  if (item.kind !== "read") {
    const title = item.step ? `${COMPUTE_TITLES.lead} ${item.step.name}` : COMPUTE_TITLES[item.kind];
    return { title, lines: [["takes", span(item.start, item.end)]], weights: [] };
  }
  const stall = figure.view.compute.find(
    (one) => one.kind === "stall" && one.pass === item.pass && one.step === item.step,
  );
  const lines = [["step", `${item.step.index} (0 to ${figure.view.method.steps.length - 1})`], ["takes", span(item.start, item.end)]];
  if (stall) lines.push(["waited", formatTime(stall.end - stall.start)]);
  lines.push(["reads", listed(item.step.reads)]);
  return { title: item.step.name, lines, weights: item.step.reads };
}

function hitOfStall(item) {
  if (!item.step) return { title: "Stall", lines: [["waits", span(item.start, item.end)], ["for", "copies under way"]], weights: [] };
  const late = figure.view.method.copies.filter((copy) => copy.step === item.step.index);
  const weights = [...new Set(late.flatMap((copy) => copy.weights))].filter((index) => item.step.reads.includes(index));
  const waits = weights.length ? weights : item.step.reads;
  return {
    title: `Stall before ${item.step.name}`,
    lines: [["waits", span(item.start, item.end)], ["for", listed(waits)]],
    weights: waits,
  };
}

function hitOfCopy({ copy, start, end }) {
  const { steps } = figure.view.method;
  const after = copy.after < 0 ? copy.after + steps.length : copy.after;
  const lines = [
    ["copies", `${formatBytes(copy.nbytes)} in ${count(copy.count, "transfer")}`],
    ["takes", span(start, end)],
    ["for step", `${steps[copy.step].name} (${copy.step})`],
    ["may start", `after ${steps[after].name} (${after})${copy.after < 0 ? " of the pass before" : ""}`],
  ];
  if (copy.weights.length > 1) lines.push(["brings", listed(copy.weights)]);
  return { title: copyName(copy), lines, weights: copy.weights };
}

function hitOfRange({ range, box }) {
  const weight = WEIGHTS[range.weight];
  const lines = [["bytes", `${formatBytes(range.nbytes)} of ${formatBytes(weight.nbytes)}`]];
  if (!box) {
    lines.push(["here", "always: it never leaves"]);
  } else {
    const { steps } = figure.view.method;
    const last = steps[box.stay.until % steps.length];
    if (box.pass >= 0) lines.push(["arrives", span(box.start, box.ready)]);
    lines.push(["leaves", `when ${last.name} ends${box.stay.until >= steps.length ? " in the pass after" : ""}`]);
    lines.push(["here for", formatTime(box.end - box.start)]);
  }
  return { title: weight.name, lines, weights: [range.weight] };
}

function hitOfMemory(time) {
  const held = heldAt(figure.view.memory, time);
  const lines = [
    ["at", formatTime(Math.max(0, time))],
    ["held", `${formatBytes(held)}, ${formatShare(held / memoryTop())} of the arena`],
    ["resident", formatBytes(DATA.plan.resident_bytes)],
  ];
  return { title: "In memory", lines, weights: [] };
}

function findHit({ x, y }) {
  const region = regionAt(y);
  if (!region || x < GUTTER) return null;
  const time = xToTime(x);
  if (region.kind === "memory") return hitOfMemory(time);
  if (region.kind === "arena") {
    const found = rangeAt(region, time, yToAddress(region, y));
    return found && hitOfRange(found);
  }
  const item = itemAt(itemsOf(region), time);
  if (!item) return null;
  return item.copy ? hitOfCopy(item) : hitOfCompute(item);
}

function pointAt(point) {
  const hit = findHit(point);
  if (hit) showHit(hit, point);
  else clearHit();
}

function showHit(hit, { x, y }, { aloud = false } = {}) {
  figure.hit = hit;
  const tip = byId("tip");
  const rows = hit.lines.map(([name, value]) => {
    const cell = element("td");
    value.split("\n").forEach((line, i) => cell.append(...(i ? [element("br"), line] : [line])));
    return element("tr", {}, element("th", { scope: "row" }, name), cell);
  });
  tip.replaceChildren(element("strong", {}, hit.title), element("table", {}, ...rows));
  tip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tip;
  const right = x + 16 + width > figure.width;
  tip.style.left = `${Math.max(0, right ? x - 16 - width : x + 16)}px`;
  const below = y + 18;
  tip.style.top = `${below + height > figure.height + 40 ? Math.max(0, y - height - 12) : below}px`;
  if (aloud) byId("announce").textContent = `${hit.title}: ${hit.lines.map((line) => line.join(" ")).join("; ")}`;
}

function clearHit() {
  figure.hit = null;
  byId("tip").hidden = true;
}
