// Time against budget: the plan or the sweep, the bound below it, and other policies.

const OWN = { "this plan": "compute", "plans by penstock": "compute", "best possible": "ink" };
const OTHERS = ["disk", "green", "gold", "stall", "muted", "indigo"];
const NONE = { "best possible": "not found" };
const DASHES = { solid: [], dashed: [8, 4], dotted: [2, 3] };

function drawCurve() {
  const { budget, curve: { budgets, lines, logarithmic, swept } } = DATA;
  const holder = byId("curve");
  const others = Object.keys(lines).filter((label) => !(label in OWN));
  const series = Object.entries(lines).map(([label, times]) => {
    const at = others.indexOf(label);
    const paint = () => colour(OWN[label] ?? OTHERS[at % OTHERS.length]);
    const thick = OWN[label] === "compute";
    const style = thick ? "solid" : at % 2 ? "dotted" : "dashed";
    const alone = times.filter((ns) => ns !== null).length === 1;
    return {
      label, style, spanGaps: true, stroke: paint, width: thick ? 2.5 : 1.5, dash: DASHES[style],
      points: { show: thick || alone, size: alone ? 11 : 7, fill: paint },
      value: (u, ns) => (ns === null ? (swept ? NONE[label] ?? "does not fit" : "") : formatTime(ns)),
    };
  });
  const home = budgets.indexOf(budget);
  const show = (index) => {
    chart.setCursor({ left: chart.valToPos(budgets[clamp(index, 0, budgets.length - 1)], "x"), top: 1 });
  };
  const chart = new uPlot({
    width: holder.clientWidth, height: 300, padding: [16, 32, 0, 0],
    cursor: { y: false, drag: { x: false } },
    legend: { markers: { dash: (u, index) => u.series[index].style ?? "solid" } },
    scales: {
      x: { time: false, range: (u, low, high) => [low, high + (high === low)] },
      y: logarithmic ? { distr: 3 } : { range: (u, low, high) => [0, Math.max(1, high) * 1.06] },
    },
    axes: [axisOf(BYTES, { space: 80, size: 36, grid: { show: false } }), axisOf(TIME, { size: 70 })],
    series: [{ label: "budget", value: (u, nbytes) => nbytes && formatBytes(nbytes) }, ...series],
    hooks: { ready: [() => queueMicrotask(() => show(home))] },
  }, [budgets, ...Object.values(lines)], holder);
  holder.onpointerleave = () => setTimeout(() => show(home));
  const by = { ArrowLeft: -1, ArrowRight: 1 };
  holder.onkeydown = ({ key }) => key in by && show((chart.cursor.idx ?? home) + by[key]);
  return chart;
}
