// The arena as address against time: what is resident, what is being copied, what waits and what is read.

const addressToY = (region, address) =>
  region.y + ((address - figure.address[0]) / (figure.address[1] - figure.address[0])) * region.height;
const yToAddress = (region, y) =>
  figure.address[0] + ((y - region.y) / region.height) * (figure.address[1] - figure.address[0]);

function drawAddressAxis(g, region) {
  const found = byteTicks(figure.address[0], figure.address[1], region.height / 44);
  const labels = tickLabels(found, BYTE_UNITS);
  g.textAlign = "right";
  g.fillStyle = colours.muted;
  found.values.forEach((value, i) => {
    const y = addressToY(region, value);
    g.fillRect(GUTTER - 4, Math.round(y), 4, 1);
    g.fillText(labels[i], GUTTER - 8, clamp(y, region.y + 6, region.y + region.height - 6));
  });
}

/**
 * Top and height of a range, null outside: in whole device pixels, so that neighbours meet without a seam,
 * but what is smaller than a pixel keeps its share of one.
 */
function rows(region, address, nbytes) {
  if (address > figure.address[1] || address + nbytes < figure.address[0]) return null;
  const scale = window.devicePixelRatio || 1;
  const exact = addressToY(region, address);
  const high = addressToY(region, address + nbytes) - exact;
  if (high * scale < 2) return { top: exact, height: high };
  const snap = (y) => Math.round(clamp(y, region.y - 2, region.y + region.height + 2) * scale) / scale;
  const top = snap(exact);
  const height = snap(exact + high) - top;
  return height > 0 ? { top, height: height > 5 ? height - 1 : height } : null;
}

function drawArena(g, region) {
  g.fillStyle = colours.resident;
  for (const range of RESIDENT) {
    const at = rows(region, range.address, range.nbytes);
    if (at) g.fillRect(GUTTER, at.top, plotWidth(), at.height);
  }
  const boxes = figure.view.boxes.filter((box) => box.end > figure.time[0] && box.start < figure.time[1]);
  for (const box of boxes) drawBox(g, region, box);
  drawReads(g, region);
  const begin = timeToX(figure.view.begins[figure.view.focus]);
  for (const box of boxes) {
    const [left, right] = [timeToX(box.start), timeToX(firstRead(box))];
    drawRangeName(g, region, box.stay, left < begin && begin < right ? begin : left, right);
  }
  for (const range of RESIDENT) drawResidentName(g, region, range, begin);
  drawFollowedRanges(g, region, boxes);
}

/** Bytes arrive from low to high addresses: a slanted edge, and behind it the room that waits for them. */
function drawBox(g, region, box) {
  const at = rows(region, box.stay.address, box.stay.nbytes);
  if (!at) return;
  const start = timeToX(box.start);
  const ready = timeToX(box.ready);
  const end = Math.max(timeToX(box.end), ready);
  const bottom = at.top + at.height;
  if (at.height < 4 || ready - start < 3) {
    g.fillStyle = colours.held;
    g.fillRect(ready, at.top, end - ready, at.height);
    g.fillStyle = linkColour(linkOf(box));
    g.fillRect(start, at.top, Math.max(ready - start, box.pass < 0 ? 0 : 1), at.height);
    return;
  }
  g.fillStyle = colours.held;
  shape(g, [[start, at.top], [end, at.top], [end, bottom], [ready, bottom]]);
  g.fillStyle = linkColour(linkOf(box));
  g.globalAlpha = 0.4;
  shape(g, [[start, at.top], [ready, bottom], [start, bottom]]);
  g.globalAlpha = 1;
  const edge = Math.min(2.5, (ready - start) / 2);
  shape(g, [[start, at.top], [start + edge, at.top], [ready, bottom], [ready - edge, bottom]]);
}

const linkOf = (box) => figure.view.method.copies[box.stay.copy].link;

function shape(g, points) {
  g.beginPath();
  points.forEach(([x, y], i) => (i ? g.lineTo(x, y) : g.moveTo(x, y)));
  g.closePath();
  g.fill();
}

function drawReads(g, region) {
  for (const item of visibleItems(figure.view.compute)) {
    if (item.kind !== "read") continue;
    const left = timeToX(item.start);
    const width = Math.max(1, timeToX(item.end) - left);
    for (const index of item.step.reads) {
      const weight = WEIGHTS[index];
      const at = weight.address < 0 || weight.outside ? null : rows(region, weight.address, weight.nbytes);
      if (!at) continue;
      g.fillStyle = colours.compute;
      g.fillRect(left, at.top, width, at.height);
      const range = { address: weight.address, nbytes: weight.nbytes, weight: index };
      drawRangeName(g, region, range, left, left + width, colours.surface);
    }
  }
}

/** When what a box holds is read for the first time. */
function firstRead(box) {
  const { view } = figure;
  const { steps } = view.method;
  const from = box.pass < 0 ? 0 : view.method.copies[box.stay.copy].step;
  for (let k = from; k < from + steps.length; k += 1) {
    const pass = Math.max(0, box.pass) + Math.floor(k / steps.length);
    if (pass >= view.reads.length) break;
    if (steps[k % steps.length].reads.includes(box.stay.weight)) return view.reads[pass][k % steps.length];
  }
  return box.end;
}

/** The name of a weight in its range, where there is room. */
function drawRangeName(g, region, range, left, right, colour = colours.ink) {
  const at = rows(region, range.address, range.nbytes);
  if (!at || at.height < 15) return;
  const from = Math.max(left, GUTTER) + 6;
  const { name } = WEIGHTS[range.weight];
  if (g.measureText(name).width > Math.min(right, figure.width) - from - 6) return;
  g.fillStyle = colour;
  g.textAlign = "left";
  g.fillText(name, from, at.top + at.height / 2 + 0.5);
}

/** The name of what stays, between two reads of it. */
function drawResidentName(g, region, range, begin) {
  if (!rows(region, range.address, range.nbytes) || rows(region, range.address, range.nbytes).height < 15) return;
  const width = g.measureText(WEIGHTS[range.weight].name).width + 14;
  let left = Math.max(begin, GUTTER);
  for (const item of visibleItems(figure.view.compute)) {
    if (item.kind !== "read" || !item.step.reads.includes(range.weight)) continue;
    const from = timeToX(item.start);
    if (from >= left + width) break;
    left = Math.max(left, timeToX(item.end));
  }
  drawRangeName(g, region, range, left, figure.width);
}

function drawFollowedRanges(g, region, boxes) {
  const followed = followedWeights();
  if (!followed.size) return;
  g.strokeStyle = colours.ink;
  g.lineWidth = 1.5;
  const outline = (range, left, right) => {
    const top = addressToY(region, range.address);
    const height = Math.max(3, addressToY(region, range.address + range.nbytes) - top);
    g.strokeRect(left, top, Math.max(3, right - left), height);
  };
  for (const box of boxes) if (followed.has(box.stay.weight)) outline(box.stay, timeToX(box.start), timeToX(box.end));
  for (const range of RESIDENT) if (followed.has(range.weight)) outline(range, GUTTER + 1, figure.width - 1);
  g.lineWidth = 1;
}

/** What lies at a time and an address: a stay on its way or there, or a resident range; else null. */
function rangeAt(region, time, address) {
  const slack = (2 / region.height) * (figure.address[1] - figure.address[0]);
  let best = null;
  const consider = (range, box) => {
    const away = Math.max(range.address - address, address - range.address - range.nbytes, 0);
    if (away <= slack && (!best || away < best.away)) best = { away, range, box };
  };
  for (const box of figure.view.boxes) if (box.start <= time && time <= box.end) consider(box.stay, box);
  if (!best || best.away > 0) for (const range of RESIDENT) consider(range, null);
  return best;
}
