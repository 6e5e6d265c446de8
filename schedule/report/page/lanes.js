// Compute and links as lanes, and the bytes held over time.

const COMPUTE_KINDS = ["read", "lead", "tail", "gap", "stall"];

/** The colour of a kind of compute; what calls wait for between passes is no work. */
function computeColour(kind) {
  if (kind === "read") return colours.compute;
  if (kind === "gap") return colours.line;
  return colours.lead;
}

/** Slanted lines, so that a stall shows without its colour. */
function hatch(g, x, y, width, height) {
  if (width <= 0) return;
  g.save();
  g.beginPath();
  g.rect(x, y, width, height);
  g.clip();
  g.fillStyle = colours.stall;
  g.globalAlpha = 0.13;
  g.fillRect(x, y, width, height);
  g.globalAlpha = 0.85;
  g.strokeStyle = colours.stall;
  g.lineWidth = 1;
  g.beginPath();
  const first = Math.floor((x - height - GUTTER) / 6) * 6 + GUTTER;
  for (let at = first; at < x + width; at += 6) {
    g.moveTo(at, y + height);
    g.lineTo(at + height, y);
  }
  g.stroke();
  g.restore();
}

const itemsOf = (region) => (region.kind === "compute" ? figure.view.compute : figure.view.links.get(region.link) || []);

/** The items that reach into what is shown; they are in time order. */
function visibleItems(items) {
  const first = Math.max(0, lastAtMost(items, figure.time[0], (one) => one.start));
  const last = lastAtMost(items, figure.time[1], (one) => one.start);
  return items.slice(first, last + 1);
}

function drawLane(g, region) {
  const items = visibleItems(itemsOf(region));
  if (items.length > plotWidth() / 4) drawFilled(g, region, items);
  else for (const item of items) drawItem(g, region, item);
  drawFollowed(g, region, items);
}

function drawItem(g, region, item) {
  const left = Math.max(timeToX(item.start), GUTTER - 4);
  const right = Math.min(timeToX(item.end), figure.width + 4);
  const apart = right - left > 5 ? 1 : 0;
  const y = region.y + 3;
  const height = region.height - 6;
  if (item.kind === "stall") {
    hatch(g, left, y, right - left - apart, height);
    return;
  }
  g.fillStyle = region.kind === "compute" ? computeColour(item.kind) : linkColour(region.link);
  g.fillRect(left, y, Math.max(0.5, right - left - apart), height);
  const name = itemName(item);
  if (name) drawName(g, name, left, right - apart, y + height / 2);
}

function itemName(item) {
  if (item.copy) return copyName(item.copy);
  return item.kind === "read" ? item.step.name : "";
}

/** A name inside a bar, where there is room for it. */
function drawName(g, name, left, right, y) {
  const room = right - left - 10;
  if (room < 18 || g.measureText(name).width > room) return;
  g.fillStyle = colours.surface;
  g.textAlign = "left";
  g.fillText(name, left + 5, y + 0.5);
}

/** Many items: how much of every pixel's time each kind takes, from the bottom up. */
function drawFilled(g, region, items) {
  const kinds = region.kind === "compute" ? COMPUTE_KINDS : ["copy"];
  const columns = Math.ceil(plotWidth());
  const shares = Object.fromEntries(kinds.map((kind) => [kind, new Float32Array(columns)]));
  for (const item of items) {
    const into = shares[item.kind || "copy"];
    const left = clamp(timeToX(item.start) - GUTTER, 0, columns);
    const right = clamp(timeToX(item.end) - GUTTER, 0, columns);
    for (let column = Math.floor(left); column < right; column += 1) {
      into[column] += Math.min(right, column + 1) - Math.max(left, column);
    }
  }
  const full = region.height - 6;
  const base = new Float32Array(columns);
  for (const kind of kinds) {
    const path = new Path2D();
    for (let column = 0; column < columns; column += 1) {
      const share = Math.min(shares[kind][column], 1 - base[column]);
      if (share > 0) path.rect(GUTTER + column, region.y + 3 + full * (1 - base[column] - share), 1, full * share);
      base[column] += share;
    }
    if (kind === "stall") {
      g.save();
      g.clip(path);
      hatch(g, GUTTER, region.y + 3, columns, full);
      g.restore();
    } else {
      g.fillStyle = kind === "copy" ? linkColour(region.link) : computeColour(kind);
      g.fill(path);
    }
  }
}

/** Bars over and under what the followed weight, or the one under the pointer, takes part in. */
function drawFollowed(g, region, items) {
  const followed = followedWeights();
  if (!followed.size) return;
  g.fillStyle = colours.ink;
  for (const item of items) {
    if (!weightsOf(item).some((weight) => followed.has(weight))) continue;
    const left = timeToX(item.start);
    const width = Math.max(2, timeToX(item.end) - left);
    g.fillRect(left, region.y, width, 2);
    g.fillRect(left, region.y + region.height - 2, width, 2);
  }
}

function weightsOf(item) {
  if (item.copy) return item.copy.weights;
  return item.kind === "read" ? item.step.reads : [];
}

function followedWeights() {
  const followed = new Set(figure.hit ? figure.hit.weights : []);
  if (figure.chosen !== null) followed.add(figure.chosen);
  return followed;
}

const memoryTop = () => Math.max(DATA.plan.arena_bytes, figure.view.memory.peak, 1);

function drawMemory(g, region) {
  const { times, values } = figure.view.memory;
  const top = memoryTop();
  const y = (value) => region.y + region.height - (value / top) * (region.height - 4);
  const first = Math.max(0, lastAtMost(times, figure.time[0]));
  const last = Math.min(times.length - 1, lastAtMost(times, figure.time[1]) + 1);
  g.beginPath();
  g.moveTo(timeToX(times[first]), region.y + region.height);
  for (let i = first; i <= last; i += 1) g.lineTo(timeToX(times[i]), y(values[i]));
  g.lineTo(timeToX(times[last]), region.y + region.height);
  g.closePath();
  g.fillStyle = colours.held;
  g.fill();
  g.fillStyle = colours.resident;
  const resident = y(DATA.plan.resident_bytes);
  g.fillRect(GUTTER, resident, plotWidth(), region.y + region.height - resident);
  g.strokeStyle = colours.muted;
  g.beginPath();
  g.moveTo(GUTTER, Math.round(y(DATA.plan.arena_bytes)) + 0.5);
  g.lineTo(figure.width, Math.round(y(DATA.plan.arena_bytes)) + 0.5);
  g.stroke();
}

/** The lane item nearest to a time: the one that covers it, or one within two pixels. */
function itemAt(items, time) {
  const slack = (2 / plotWidth()) * (figure.time[1] - figure.time[0]);
  const i = lastAtMost(items, time, (one) => one.start);
  if (i >= 0 && items[i].end >= time) return items[i];
  const near = [items[i], items[i + 1]].filter((one) => one && one.start - slack <= time && one.end + slack >= time);
  return near[0] || null;
}
