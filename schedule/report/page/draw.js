// What uPlot does not draw: bars in lanes, the map of the arena, and the passes that stand back.

/** A hook of uPlot that paints inside the plot, in CSS pixels from its corner. */
const painted = (paint) => (chart) => {
  const { ctx: g, bbox } = chart;
  const [width, height] = [bbox.width / devicePixelRatio, bbox.height / devicePixelRatio];
  g.save();
  g.translate(bbox.left, bbox.top);
  g.scale(devicePixelRatio, devicePixelRatio);
  g.clip(new Path2D(`M0 0H${width}V${height}H0`));
  const text = { font: "12px system-ui, sans-serif", textBaseline: "middle", textAlign: "left" };
  Object.assign(g, { ...text, strokeStyle: colour("ink"), lineWidth: 1.5 });
  paint({ g, width, height, x: (ns) => chart.valToPos(ns, "x"), y: (value) => chart.valToPos(value, "y") });
  g.restore();
};

/** The colours of the legend; bars are drawn from the bottom up in this order where they share a pixel. */
const PAINTS = Array.from(byId("legend").children, (sign) => sign.dataset.paint);

/** Slanted lines, so that a stall shows without its colour. */
function stripes() {
  const tile = element("canvas", { width: 6, height: 6 });
  const t = tile.getContext("2d");
  t.strokeStyle = colour("stall");
  t.stroke(new Path2D("M-3 3 3 -3M-1 7 7 -1M3 9 9 3"));
  return t.createPattern(tile, "repeat");
}

const inSight = ({ start, end }) => end > figure.x[0] && start < figure.x[1];
const isFollowed = (weight) => weight === figure.chosen || Boolean(figure.hit?.weights.includes(weight));

/** A name in the first gap that has room for it within the pass; each pair of `edges` is a gap. */
function drawName({ g, width, x }, name, edges, paint, middle) {
  const [from, to] = [Math.max(0, x(0)), Math.min(x(figure.view.period), width)];
  const least = g.measureText(name).width + 12;
  const room = (edge, i) => (i % 2 ? 0 : Math.min(to, edges[i + 1]) - Math.max(from, edge));
  const gap = edges.find((edge, i) => room(edge, i) >= least);
  g.fillStyle = paint;
  if (gap !== undefined) g.fillText(name, Math.max(from, gap) + 6, middle + 0.5);
}

/** How much of every pixel's time each kind of bar takes, from the bottom up; a long bar is one rectangle. */
function drawLanes(canvas) {
  const { g, width, x, y } = canvas;
  const placed = figure.view.bars.filter(inSight).map((bar) => {
    const [left, right] = [bar.start, bar.end].map((time) => clamp(x(time), 0, width));
    return right - left > 12 ? [bar, Math.round(left), Math.round(right) - 1] : [bar, left, right];
  });
  figure.view.lanes.forEach((_, lane) => {
    const [top, height] = [y(lane) + 4, y(lane + 1) - y(lane) - 8];
    const bars = placed.filter(([{ low }]) => low === lane);
    const filled = new Float32Array(Math.ceil(width) + 1);
    for (const paint of PAINTS) {
      const shares = new Float32Array(filled.length);
      for (const [, left, right] of bars.filter(([bar]) => bar.paint === paint)) {
        for (let i = left | 0; i < right; i += 1) shares[i] += Math.min(right, i + 1) - Math.max(left, i);
      }
      g.fillStyle = paint === "stall" ? stripes() : colour(paint);
      for (let from = 0, to = 1; from < shares.length; from = to) {
        for (to = from + 1; shares[to] === shares[from] && filled[to] === filled[from];) to += 1;
        g.fillRect(from, top + height * (1 - filled[from] - shares[from]), to - from, height * shares[from]);
      }
      shares.forEach((share, i) => { filled[i] += share; });
    }
    for (const [{ name, weights }, left, right] of bars) {
      if (right - left > 15) drawName(canvas, name, [left, right], colour("surface"), top + height / 2);
      if (weights.some(isFollowed)) g.strokeRect(left, top - 2, Math.max(2, right - left), height + 4);
    }
  });
}

/** The arena as address against time: what stays, what is being copied, what waits and what is read. */
function drawArena(canvas) {
  const { g, width, height, x, y } = canvas;
  const names = [];
  const outlines = new Path2D();
  for (const box of figure.view.map.filter(inSight)) {
    const { paint, start, ready, end, low, high, title, weights: [weight] } = box;
    const left = Math.max(-9, x(start));
    const right = Math.min(width + 9, Math.max(x(end), x(ready), x(start) + 1));
    let [top, bottom] = [y(low), y(high)];
    if (bottom <= 0 || top >= height) continue;
    // In whole pixels, if it has any, so that neighbours meet without a seam.
    if (bottom - top >= 2) [top, bottom] = [Math.round(top), Math.round(bottom) - (bottom - top > 5)];
    g.fillStyle = colour(paint);
    g.fillRect(left, top, right - left, bottom - top);
    if (ready > start) drawArrival(g, x(start), x(ready), top, bottom);
    const [size, middle] = [bottom - top, (Math.max(0, top) + Math.min(height, bottom)) / 2];
    const isRead = paint === "compute";
    if (isFollowed(weight) && !isRead) outlines.rect(left, top, Math.max(3, right - left), Math.max(3, size));
    if (size < 15) continue;
    // Reads are drawn over what is read: its name goes where there are none.
    const reads = isRead ? [] : figure.view.reads.filter(({ weights }) => weights.includes(weight));
    const times = reads.flatMap((read) => [read.start, read.end]);
    const edges = [left, ...times.map((time) => clamp(x(time), left, right)), right];
    names.push([title, edges, colour(isRead || paint === "out" ? "surface" : "ink"), middle]);
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

/** The passes beside the one that is looked at stand back, behind lines where it begins and ends. */
function drawPasses({ g, width, height, x }) {
  const edges = [x(0), x(figure.view.period)];
  g.globalAlpha = 0.62;
  g.fillStyle = colour("surface");
  g.fillRect(0, 0, edges[0], height);
  g.fillRect(edges[1], 0, Math.max(0, width - edges[1]), height);
  g.globalAlpha = 1;
  g.strokeRect(edges[0], -9, edges[1] - edges[0], height + 18);
}
