// Time against budget: the plan or the sweep, the bound below it, and other policies.

const DASHES = [[6, 4], [2, 3], [10, 3, 2, 3], [1, 4], [12, 5], []];

function drawCurve() {
  const { curve, budget } = DATA;
  const holder = byId("curve");
  const namesOf = ({ times }) => Object.keys(times).filter((name) => times[name] !== null);
  const names = [...new Set(curve.flatMap(namesOf))];
  const lines = names.map((name) => curve.map(({ times }) => times[name] ?? null));
  const all = lines.flat().filter((ns) => ns !== null).map((ns) => Math.max(1, ns));
  const [least, most] = [Math.min(...all), Math.max(...all)];
  const series = names.map((label, i) => {
    const own = ["penstock", "this plan"].includes(label);
    const alone = lines[i].filter((ns) => ns !== null).length === 1;
    const paint = () => colour(own ? "compute" : label === "no plan is faster" ? "ink" : `policy-${(i % 6) + 1}`);
    return {
      label, spanGaps: true, stroke: paint, width: own ? 2.5 : 1.5, dash: own ? [] : DASHES[i % 6],
      points: { show: own || alone, size: 8, fill: paint },
      value: (u, ns) => (ns === null ? "\u2013" : formatTime(ns)),
    };
  });
  const rule = ({ g, height, x }) => {
    g.fillStyle = colour("muted");
    for (let at = 0; at < height; at += 5) g.fillRect(Math.round(x(budget)), at, 1, 2);
  };
  const home = curve.findIndex((one) => one.budget === budget);
  const show = (index) => {
    const at = curve[clamp(index, 0, curve.length - 1)];
    chart.setCursor({ left: chart.valToPos(at.budget, "x"), top: 1 });
  };
  const logarithmic = most / least > 12;
  byId("curve-title").textContent = `Time against budget${logarithmic ? ", on a logarithmic scale" : ""}`;
  const chart = new uPlot({
    width: holder.clientWidth, height: 300, padding: [16, 32, 0, 0],
    cursor: { y: false, drag: { x: false } },
    scales: {
      x: { time: false, range: (u, low, high) => [low, high + (high === low)] },
      y: logarithmic ? { distr: 3, range: uPlot.rangeLog(least, most, 10, false) } : { range: [0, most * 1.06] },
    },
    axes: [axisOf(BYTES, { space: 80, size: 36, grid: { show: false } }), axisOf(TIME, { size: 70 })],
    series: [{ label: "budget", value: (u, nbytes) => (nbytes === null ? "" : formatBytes(nbytes)) }, ...series],
    hooks: { draw: [painted(rule)], ready: [() => queueMicrotask(() => show(home))] },
  }, [curve.map((one) => one.budget), ...lines], holder);
  holder.onpointerleave = () => setTimeout(() => show(home));
  holder.onkeydown = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    show((chart.cursor.idx ?? home) + by);
  };
  return chart;
}
