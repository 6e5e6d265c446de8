// What uPlot does not draw: bars in lanes, the map of the arena, and the passes that stand back.

/** A hook of uPlot that paints inside the plot, in CSS pixels from its corner. */
const painted = (paint) => (chart) => {
  const { ctx: g, bbox } = chart;
  const scale = devicePixelRatio;
  const [width, height] = [bbox.width / scale, bbox.height / scale];
  g.save();
  g.translate(bbox.left, bbox.top);
  g.scale(scale, scale);
  g.beginPath();
  g.rect(0, 0, width, height);
  g.clip();
  Object.assign(g, { font: FONT, textBaseline: "middle", textAlign: "left" });
  paint({ g, width, height, x: (ns) => chart.valToPos(ns, "x"), y: (value) => chart.valToPos(value, "y") });
  g.restore();
};

const PAINTS = { read: "compute", lead: "lead", tail: "lead", gap: "line", copy: "copy", disk: "disk" };

function paintOf(g, kind) {
  if (kind !== "stall") return colour(PAINTS[kind]);
  // Slanted lines, so that a stall shows without its colour.
  const tile = element("canvas", { width: 12, height: 12 });
  const t = tile.getContext("2d");
  t.fillStyle = t.strokeStyle = colour("stall");
  t.globalAlpha = 0.13;
  t.fillRect(0, 0, 12, 12);
  t.globalAlpha = 0.85;
  for (const at of [-18, -12, -6, 0, 6]) {
    t.moveTo(at, 12.5);
    t.lineTo(at + 13, -0.5);
  }
  t.stroke();
  return g.createPattern(tile, "repeat");
}

const inSight = ({ start, end }) => end > figure.time[0] && start < figure.time[1];
const isFollowed = (weight) => weight === figure.chosen || Boolean(figure.hit && figure.hit.weights.includes(weight));

/** A name in the first gap that has room for it, within the pass if it can; each pair of `edges` is one. */
function drawName({ g, width, x }, name, edges, paint, middle) {
  const room = g.measureText(name).width + 12;
  const [begin, over] = [x(0), x(figure.view.period)];
  for (const [from, to] of [[Math.max(0, begin), Math.min(over, width)], [0, begin], [over, width]]) {
    const gap = edges.findIndex((edge, i) => i % 2 === 0 && Math.min(to, edges[i + 1]) - Math.max(from, edge) >= room);
    if (gap < 0) continue;
    g.fillStyle = paint;
    g.fillText(name, Math.max(from, edges[gap]) + 6, middle + 0.5);
    return;
  }
}

/** Bars; where there are many, how much of every pixel's time each kind takes, from the bottom up. */
function drawLanes(canvas) {
  const { g, width, x, y } = canvas;
  figure.view.lanes.forEach(({ items: all }, lane) => {
    const items = all.filter(inSight);
    const [top, height] = [y(lane) + 4, y(lane + 1) - y(lane) - 8];
    const many = items.length > width / 4;
    const base = new Float32Array(Math.ceil(width) + 1);
    for (const kind of ["read", "lead", "tail", "gap", "copy", "disk", "stall"]) {
      const shares = new Float32Array(base.length);
      g.fillStyle = paintOf(g, kind);
      for (const item of items.filter((one) => one.kind === kind)) {
        const [left, right] = [clamp(x(item.start), 0, width), clamp(x(item.end), 0, width)];
        if (!many) g.fillRect(left, top, Math.max(0.5, right - left - (right - left > 5)), height);
        else for (let i = Math.floor(left); i < right; i += 1) shares[i] += Math.min(right, i + 1) - Math.max(left, i);
      }
      if (many) shares.forEach((share, i) => {
        if (share) g.fillRect(i, top + height * (1 - base[i] - share), 1, height * share);
        base[i] += share;
      });
    }
    for (const item of items) {
      const [left, right] = [Math.max(0, x(item.start)), Math.min(width, x(item.end))];
      if (!many && item.about.name) drawName(canvas, item.about.name, [left, right], colour("surface"), top + height / 2);
      if (!item.about.weights.some(isFollowed)) continue;
      g.fillStyle = colour("ink");
      for (const edge of [top - 3, top + height + 1]) g.fillRect(left, edge, Math.max(2, right - left), 2);
    }
  });
}

/** The arena as address against time: what stays, what is being copied, what waits and what is read. */
function drawArena(canvas) {
  const { g, width, height, x, y } = canvas;
  const { reads, boxes } = figure.view;
  const [names, outlines] = [[], []];

  /** Fills a range of addresses; in whole pixels, if it has any, so that neighbours meet without a seam. */
  const fill = ({ address, nbytes, weight }, left, right, paint, edges, ink) => {
    const [low, high] = [y(address), y(address + nbytes)];
    const [top, bottom] = high - low < 2 ? [low, high] : [Math.round(low), Math.round(high) - (high - low > 5)];
    g.fillStyle = paint;
    if (bottom > 0 && top < height) g.fillRect(left, top, right - left, bottom - top);
    if (bottom - top >= 15) names.push([DATA.weights[weight].name, edges(), ink, (top + bottom) / 2]);
    return [top, bottom];
  };

  for (const { start, ready, end, stay } of boxes.filter(inSight)) {
    const [left, full, right] = [Math.max(-9, x(start)), x(ready), Math.min(width + 9, Math.max(x(end), x(ready)))];
    // Reads are drawn over it: its name goes where there are none.
    const edges = () => {
      const mine = reads.filter((read) => inSight(read) && read.about.weights.includes(stay.weight));
      return [left, ...mine.flatMap((read) => [read.start, read.end].map((time) => clamp(x(time), left, right))), right];
    };
    const paint = colour(stay.until === null ? "resident" : "held");
    const [top, bottom] = fill(stay, left, right, paint, edges, colour("ink"));
    if (ready > start) drawArrival(g, x(start), full, top, bottom);
    if (isFollowed(stay.weight)) outlines.push([left, top, Math.max(3, right - left), Math.max(3, bottom - top)]);
  }
  for (const { start, end, about } of reads.filter(inSight)) {
    for (const weight of about.weights.filter((index) => DATA.weights[index].address >= 0)) {
      const [left, right] = [x(start), Math.max(x(end), x(start) + 1)];
      fill({ ...DATA.weights[weight], weight }, left, right, colour("compute"), () => [left, right], colour("surface"));
    }
  }
  for (const name of names) drawName(canvas, ...name);
  Object.assign(g, { strokeStyle: colour("ink"), lineWidth: 1.5 });
  for (const outline of outlines) g.strokeRect(...outline);
}

/** Bytes arrive from low to high addresses: a slanted edge, and behind it the room that waits for them. */
function drawArrival(g, start, ready, top, bottom) {
  g.fillStyle = g.strokeStyle = colour("copy");
  if (bottom - top < 4 || ready - start < 3) {
    g.fillRect(start, top, Math.max(1, ready - start), bottom - top);
    return;
  }
  g.beginPath();
  for (const corner of [[start, bottom], [start, top], [ready, bottom]]) g.lineTo(...corner);
  g.globalAlpha = 0.4;
  g.fill();
  g.globalAlpha = 1;
  g.beginPath();
  g.moveTo(start, top);
  g.lineTo(ready, bottom);
  g.stroke();
}

/** The passes before and after the one that is looked at stand back, behind lines where it begins and ends. */
function drawPasses({ g, width, height, x }) {
  const [left, right] = [x(0), x(figure.view.period)];
  g.globalAlpha = 0.62;
  g.fillStyle = colour("surface");
  g.fillRect(0, 0, left, height);
  g.fillRect(right, 0, Math.max(0, width - right), height);
  g.globalAlpha = 1;
  g.fillStyle = colour("ink");
  for (const edge of [left, right]) g.fillRect(Math.round(edge), 0, 1, height);
}
