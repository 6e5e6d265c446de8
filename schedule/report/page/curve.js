// Time against budget: the plan or the sweep, the bound below it, and other policies above.

const CURVE = { height: 320, left: 68, right: 190, top: 16, bottom: 44 };
const DASHES = ["", "6 4", "2 3", "10 3 2 3", "1 4", "12 5"];

/** The points of the sweep in order of budget; without one the plan's own. */
function curvePoints() {
  const { plan } = DATA;
  const own = { budget: plan.budget, predicted_ns: plan.predicted_ns, lower_bound_ns: plan.lower_bound_ns, policies: {} };
  const swept = DATA.sweep.some((point) => point.budget === plan.budget);
  return [...DATA.sweep, ...(swept ? [] : [own])].sort((a, b) => a.budget - b.budget);
}

/** The bytes of everything that is read, where all sizes are known; else null. */
function readBytes() {
  const used = new Set(DATA.methods.flatMap((method) => method.steps.reads.flat()));
  const sizes = [...used].map((index) => WEIGHTS[index].nbytes);
  return sizes.includes(null) ? null : sizes.reduce((sum, nbytes) => sum + nbytes, 0);
}

/** What link and compute allow at best with so much memory: what does not fit is copied in every pass. */
function leastTime(budget, total) {
  const { plan } = DATA;
  const copied = Math.max(0, total - budget);
  return Math.max(plan.compute_ns, (copied * 1e9) / plan.hardware.link_bytes_per_s);
}

function curveSeries(points) {
  const names = [...new Set(points.flatMap((point) => Object.keys(point.policies)))];
  const line = (value) => points.map((point) => [point.budget, value(point)]).filter(([, ns]) => ns !== null && ns !== undefined);
  const series = names.map((name, i) => ({
    name, colour: `var(--policy-${(i % 6) + 1})`, dash: DASHES[(i + 1) % DASHES.length], width: 1.5,
    points: line((point) => point.policies[name]),
  }));
  series.push({ name: "no plan is faster", colour: "var(--bound)", dash: "3 3", width: 1.5, points: line((point) => point.lower_bound_ns) });
  series.push({ name: DATA.sweep.length ? "penstock" : "this plan", colour: "var(--compute)", dash: "", width: 2.5, points: line((point) => point.predicted_ns), dots: true });
  const total = readBytes();
  if (!DATA.sweep.length && DATA.methods.length === 1 && total) {
    const budgets = Array.from({ length: 301 }, (_, i) => (total * 1.05 * i) / 300);
    series.unshift({
      name: "link and compute at best", colour: "var(--muted)", dash: "", width: 1.25,
      points: budgets.map((budget) => [budget, leastTime(budget, total)]),
    });
  }
  return series.filter((one) => one.points.length);
}

function curveScales(series, width) {
  const all = series.flatMap((one) => one.points);
  const budgets = all.map(([budget]) => budget);
  const values = all.map(([, ns]) => Math.max(1, ns));
  const { plan } = DATA;
  const total = DATA.sweep.length ? null : readBytes();
  const low = total ? 0 : Math.min(...budgets, plan.budget);
  const high = Math.max(...budgets, plan.budget, total || 0);
  const pad = high > low ? (high - low) * 0.02 : Math.max(1, high * 0.1);
  const [x0, x1] = [Math.max(0, low - pad), high + pad];
  const most = Math.max(...values);
  const least = Math.min(...values);
  const logarithmic = most / least > 12;
  const inner = CURVE.height - CURVE.top - CURVE.bottom;
  const x = (budget) => CURVE.left + ((budget - x0) / (x1 - x0)) * (width - CURVE.left - CURVE.right);
  const bottom = CURVE.height - CURVE.bottom;
  const y = logarithmic
    ? (ns) => bottom - ((Math.log(Math.max(1, ns)) - Math.log(least * 0.8)) / Math.log((most * 1.1) / (least * 0.8))) * inner
    : (ns) => bottom - (ns / (most * 1.06)) * inner;
  return { x, y, x0, x1, logarithmic, values: logarithmic ? logTicks(least * 0.8, most * 1.1) : ticks(0, most * 1.06, 6).values };
}

function curveTime(ns) {
  const [size, name] = unitFor(TIME_UNITS, ns);
  return ns === 0 ? "0" : `${Number((ns / size).toPrecision(3))} ${name}`;
}

/** 1, 2 and 5 times powers of ten; only the powers where there would be many. */
function logTicks(low, high) {
  const found = [];
  const times = high / low > 300 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) {
    for (const one of times) if (one * 10 ** power >= low && one * 10 ** power <= high) found.push(one * 10 ** power);
  }
  return found;
}

function drawCurve() {
  const holder = byId("curve");
  const width = Math.max(300, holder.clientWidth);
  CURVE.right = width < 640 ? 14 : 190;
  CURVE.top = DATA.sweep.length ? 16 : 46;
  const series = curveSeries(curvePoints());
  const scales = curveScales(series, width);
  const picture = svg("svg", { height: CURVE.height, viewBox: `0 0 ${width} ${CURVE.height}`, role: "img", tabindex: "0", "aria-label": curveSummary(series) });
  drawCurveAxes(picture, scales, width);
  for (const one of series) drawSeries(picture, one, scales);
  drawCurveLabels(picture, series.filter((one) => one.points.length > 1), scales, width);
  if (!DATA.sweep.length) drawPointLabels(picture, scales, width);
  const mark = svg("line", { class: "rule", y1: CURVE.top, y2: CURVE.height - CURVE.bottom, visibility: "hidden" });
  const tip = element("div", { class: "tip", hidden: true });
  picture.append(mark);
  holder.replaceChildren(picture, tip, ...(width < 640 ? [curveLegend(series)] : []));
  if (DATA.sweep.length) followCurve(picture, tip, mark, series, scales, width);
}

function drawCurveAxes(picture, scales, width) {
  const bottom = CURVE.height - CURVE.bottom;
  const right = width - CURVE.right;
  for (const value of scales.values) {
    picture.append(svg("line", { class: "grid", x1: CURVE.left, x2: right, y1: scales.y(value), y2: scales.y(value) }));
    picture.append(svg("text", { x: CURVE.left - 8, y: scales.y(value) + 4, "text-anchor": "end" }, curveTime(value)));
  }
  const found = byteTicks(scales.x0, scales.x1, (right - CURVE.left) / 75);
  tickLabels(found, BYTE_UNITS).forEach((label, i) => {
    const x = scales.x(found.values[i]);
    picture.append(svg("line", { class: "grid", x1: x, x2: x, y1: bottom, y2: bottom + 5 }));
    picture.append(svg("text", { x, y: bottom + 19, "text-anchor": "middle" }, label));
  });
  const title = scales.logarithmic ? "budget (time on a logarithmic scale)" : "budget";
  picture.append(svg("text", { x: right, y: bottom + 38, "text-anchor": "end" }, title));
  const here = scales.x(DATA.plan.budget);
  picture.append(svg("line", { class: "rule", x1: here, x2: here, y1: CURVE.top, y2: bottom }));
}

function drawSeries(picture, one, { x, y }) {
  const path = one.points.map(([budget, ns], i) => `${i ? "L" : "M"}${x(budget).toFixed(1)} ${y(ns).toFixed(1)}`).join("");
  if (one.points.length > 1) {
    picture.append(svg("path", { d: path, fill: "none", stroke: one.colour, "stroke-width": one.width, "stroke-dasharray": one.dash || "none", "stroke-linejoin": "round" }));
  }
  const dots = one.dots || one.points.length === 1 ? one.points : [];
  for (const [budget, ns] of dots) {
    const at = { cx: x(budget), cy: y(ns) };
    if (one.dots) picture.append(svg("circle", { ...at, r: budget === DATA.plan.budget ? 5.5 : 3, fill: one.colour, stroke: "var(--surface)", "stroke-width": 1.5 }));
    else picture.append(svg("line", { x1: at.cx - 11, x2: at.cx + 11, y1: at.cy, y2: at.cy, stroke: one.colour, "stroke-width": 2 }));
  }
}

/** A name at the right end of each line, moved apart where they would overlap. */
function drawCurveLabels(picture, series, { x, y }, width) {
  if (width < 640) return;
  const labels = series.map((one) => {
    const [budget, ns] = one.points[one.points.length - 1];
    return { one, x: x(budget), at: y(ns), y: y(ns) };
  });
  labels.sort((a, b) => a.y - b.y);
  const bottom = CURVE.height - CURVE.bottom;
  labels.forEach((label, i) => { if (i) label.y = Math.max(label.y, labels[i - 1].y + 16); });
  for (let i = labels.length - 1; i >= 0; i -= 1) {
    labels[i].y = Math.min(labels[i].y, i + 1 < labels.length ? labels[i + 1].y - 16 : bottom);
  }
  const left = width - CURVE.right + 22;
  for (const { one, x: from, at, y: to } of labels) {
    picture.append(svg("path", { d: `M${(from + 8).toFixed(1)} ${at.toFixed(1)}L${left - 14} ${at.toFixed(1)}L${left - 4} ${to.toFixed(1)}`, fill: "none", stroke: one.colour, "stroke-width": 1, opacity: 0.55 }));
    picture.append(svg("text", { x: left, y: to + 4, class: one.dots ? "strong" : "", style: `fill: ${one.colour}` }, one.name));
  }
}

/** The plan's own time and the bound's above its point, where the line, which falls, never comes. */
function drawPointLabels(picture, { x, y }, width) {
  const { plan } = DATA;
  const point = x(plan.budget);
  const left = point > width - CURVE.right - 180;
  const write = (text, up, kind) => {
    const at = { x: left ? point - 10 : point + 10, "text-anchor": left ? "end" : "start" };
    picture.append(svg("text", { ...at, y: y(plan.predicted_ns) - up, class: kind }, text));
  };
  write(`this plan: ${formatTime(plan.predicted_ns)}`, plan.lower_bound_ns === null ? 11 : 28, "strong");
  if (plan.lower_bound_ns !== null) write(`no plan is faster than ${formatTime(plan.lower_bound_ns)}`, 11, "");
}

function curveLegend(series) {
  const items = series.map((one) => element("span", {}, element("i", { style: `background: ${one.colour}; height: 3px` }), one.name));
  return element("div", { class: "legend" }, ...items);
}

function curveSummary(series) {
  return series.map((one) => {
    const [budget, ns] = one.points[one.points.length - 1];
    return `${one.name}: ${formatTime(ns)} at ${formatBytes(budget)}`;
  }).join("; ");
}

/** The times at the budget nearest to the pointer, or at the one the arrow keys have reached. */
function followCurve(picture, tip, mark, series, { x }, width) {
  const points = curvePoints();
  let at = Math.max(0, points.findIndex((point) => point.budget === DATA.plan.budget));
  const show = (index) => {
    at = clamp(index, 0, points.length - 1);
    const { budget } = points[at];
    const rows = series.flatMap((one) => {
      const found = one.points.find(([other]) => other === budget);
      return found ? [[one, found[1]]] : [];
    });
    rows.sort((a, b) => a[1] - b[1]);
    tip.replaceChildren(element("strong", {}, formatBytes(budget)), element("table", {}, ...rows.map(([one, ns]) => element(
      "tr", {}, element("th", { scope: "row" }, one.name), element("td", {}, formatTime(ns)),
    ))));
    tip.hidden = false;
    const left = x(budget);
    mark.setAttribute("x1", left);
    mark.setAttribute("x2", left);
    mark.setAttribute("visibility", "visible");
    tip.style.left = `${left + 14 + tip.offsetWidth > width ? left - 14 - tip.offsetWidth : left + 14}px`;
    tip.style.top = `${CURVE.top}px`;
  };
  const hide = () => {
    tip.hidden = true;
    mark.setAttribute("visibility", "hidden");
  };
  picture.addEventListener("pointermove", (event) => {
    const here = event.clientX - picture.getBoundingClientRect().left;
    let nearest = 0;
    points.forEach((point, i) => { if (Math.abs(x(point.budget) - here) < Math.abs(x(points[nearest].budget) - here)) nearest = i; });
    show(nearest);
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("focus", () => { if (picture.matches(":focus-visible")) show(at); });
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    show(at + by);
  });
}
