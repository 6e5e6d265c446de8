// What uPlot does not draw: bars in lanes, the map of the arena, and the passes that stand back.

/** A hook of uPlot that paints inside the plot, in CSS pixels from its corner. */
const painted = (paint) => (chart) => {
  const { ctx: g, bbox } = chart;
  const scale = devicePixelRatio;
  const [width, height] = [bbox.width / scale, bbox.height / scale];
  g.save();
  g.translate(bbox.left, bbox.top);
  g.scale(scale, scale);
  g.clip(new Path2D(`M0 0H${width}V${height}H0`));
  Object.assign(g, { font: "12px system-ui, sans-serif", textBaseline: "middle", textAlign: "left" });
  Object.assign(g, { strokeStyle: colour("ink"), lineWidth: 1.5 });
  paint({ g, width, height, x: (ns) => chart.valToPos(ns, "x"), y: (value) => chart.valToPos(value, "y") });
  g.restore();
};

/** What each colour means; items are drawn from the bottom up in this order where they share a pixel. */
const PAINTS = {
  compute: "compute that reads weights",
  lead: "compute that reads none",
  stall: "stall: waits for a copy",
  line: "between two calls",
  copy: "being copied",
  disk: "copied from the disk",
  held: "in memory until it is read",
  resident: "stays in memory",
};

/** Slanted lines, so that a stall shows without its colour. */
function stripes() {
  const tile = element("canvas", { width: 6, height: 6 });
  const t = tile.getContext("2d");
  t.fillStyle = t.strokeStyle = colour("stall");
  t.globalAlpha = 0.13;
  t.fillRect(0, 0, 6, 6);
  t.globalAlpha = 0.85;
  t.stroke(new Path2D("M-3 3 3 -3M-1 7 7 -1M3 9 9 3"));
  return t.createPattern(tile, "repeat");
}

const inSight = ({ start, end }) => end > figure.time[0] && start < figure.time[1];
const isFollowed = (weight) => weight === figure.chosen || Boolean(figure.hit?.weights.includes(weight));

/** A name in the first gap that has room for it, within the pass if it can; each pair of `edges` is one. */
function drawName({ g, width, x }, name, edges, paint, middle) {
  const room = g.measureText(name).width + 12;
  const [begin, over] = [x(0), x(figure.view.period)];
  g.fillStyle = paint;
  for (const [from, to] of [[Math.max(0, begin), Math.min(over, width)], [0, begin], [over, width]]) {
    const fits = (edge, i) => i % 2 === 0 && Math.min(to, edges[i + 1]) - Math.max(from, edge) >= room;
    const gap = edges.find(fits);
    if (gap !== undefined) return g.fillText(name, Math.max(from, gap) + 6, middle + 0.5);
  }
}

/** Bars; where there are many, how much of every pixel's time each kind takes, from the bottom up. */
function drawLanes(canvas) {
  const { g, width, x, y } = canvas;
  figure.view.lanes.forEach(({ items: all }, lane) => {
    const placed = (item) => [item, ...[item.start, item.end].map((time) => clamp(x(time), 0, width))];
    const items = all.filter(inSight).map(placed);
    const [top, height] = [y(lane) + 4, y(lane + 1) - y(lane) - 8];
    const many = items.length > width / 4;
    const base = new Float32Array(Math.ceil(width) + 1);
    for (const paint of Object.keys(PAINTS)) {
      const shares = new Float32Array(base.length);
      g.fillStyle = paint === "stall" ? stripes() : colour(paint);
      for (const [, left, right] of items.filter(([one]) => one.paint === paint)) {
        if (!many) g.fillRect(left, top, Math.max(0.5, right - left - (right - left > 5)), height);
        else for (let i = Math.floor(left); i < right; i += 1) {
          shares[i] += Math.min(right, i + 1) - Math.max(left, i);
        }
      }
      if (many) shares.forEach((share, i) => {
        if (share) g.fillRect(i, top + height * (1 - base[i] - share), 1, height * share);
        base[i] += share;
      });
    }
    for (const [{ name, weights }, left, right] of items) {
      if (!many && name) drawName(canvas, name, [left, right], colour("surface"), top + height / 2);
      if (weights.some(isFollowed)) g.strokeRect(left, top - 2, Math.max(2, right - left), height + 4);
    }
  });
}

/** The arena as address against time: what stays, what is being copied, what waits and what is read. */
function drawArena(canvas) {
  const { g, width, height, x, y } = canvas;
  const { reads, boxes } = figure.view;
  const names = [];
  const outlines = new Path2D();

  /** Fills a range of addresses; in whole pixels, if it has any, so that neighbours meet without a seam. */
  const fill = ({ address, nbytes, weight }, left, right, paint, edges, ink) => {
    const [low, high] = [y(address), y(address + nbytes)];
    const [top, bottom] = high - low < 2 ? [low, high] : [Math.round(low), Math.round(high) - (high - low > 5)];
    g.fillStyle = paint;
    if (bottom > 0 && top < height) g.fillRect(left, top, right - left, bottom - top);
    if (bottom - top >= 15) names.push([DATA.weights[weight].name, edges(), ink, (top + bottom) / 2]);
    return [top, bottom];
  };

  for (const box of boxes.filter(inSight)) {
    const { start, ready, end, weight, paint } = box;
    const [left, right] = [Math.max(-9, x(start)), Math.min(width + 9, Math.max(x(end), x(ready)))];
    // Reads are drawn over it: its name goes where there are none.
    const edges = () => {
      const mine = reads.filter((read) => inSight(read) && read.weights.includes(weight));
      const times = mine.flatMap((read) => [read.start, read.end]);
      return [left, ...times.map((time) => clamp(x(time), left, right)), right];
    };
    const [top, bottom] = fill(box, left, right, colour(paint), edges, colour("ink"));
    if (ready > start) drawArrival(g, x(start), x(ready), top, bottom);
    if (isFollowed(weight)) outlines.rect(left, top, Math.max(3, right - left), Math.max(3, bottom - top));
  }
  for (const { start, end, weights } of reads.filter(inSight)) {
    const edges = [x(start), Math.max(x(end), x(start) + 1)];
    for (const weight of weights.filter((index) => DATA.weights[index].address >= 0)) {
      fill({ ...DATA.weights[weight], weight }, ...edges, colour("compute"), () => edges, colour("surface"));
    }
  }
  for (const name of names) drawName(canvas, ...name);
  g.stroke(outlines);
}

/** Bytes arrive from low to high addresses: a slanted edge, and behind it the room that waits for them. */
function drawArrival(g, start, ready, top, bottom) {
  g.fillStyle = colour("copy");
  if (bottom - top < 4) return g.fillRect(start, top, Math.max(1, ready - start), bottom - top);
  g.globalAlpha = 0.4;
  g.fill(new Path2D(`M${start} ${bottom}V${top}L${ready} ${bottom}`));
  g.globalAlpha = 1;
  g.fill(new Path2D(`M${start} ${top}h1L${ready + 1} ${bottom}h-1`));
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
