// Every weight: where it lives, what it costs and why; searched, sorted and narrowed down. Then all begins.

const table = { rows: [], order: "step", down: false, lives: "all" };
const HEADS = Array.from(document.getElementsByName("order"), (head) => head.textContent);
const collator = new Intl.Collator("en", { numeric: true });

/** A name that may be broken behind its dots and underscores, and nowhere else if possible. */
const breakable = (name) => name.split(/(?<=[._])/).flatMap((part) => [part, element("wbr")]);

/** The line of a weight in the table, what it is ordered by, and what it is found by. */
function rowOf(weight, index) {
  const { method } = figure;
  const { name, nbytes, resident, value, lives, where, first, streamed, why } = { ...weight, ...method.uses[index] };
  const share = nbytes ? Math.min(1, resident / nbytes) : 0;
  const bar = `--stays: ${share * 100}%; --rest: var(--${share || streamed ? "held" : "soft"})`;
  const named = { name: "weight", value: index, title: "Show in the picture" };
  const line = element("tr", {}, ...[
    [element("button", named, ...breakable(name))],
    [nbytes === null ? "unknown" : formatBytes(nbytes)],
    [element("span", { className: "share", style: bar }), where],
    [streamed ? formatBytes(streamed) : "nothing"],
    breakable(first < 0 ? "none" : `${first} ${method.steps[first]}`),
    [why],
  ].map((content) => element("td", {}, ...content)));
  for (const cell of line.cells) cell.dataset.of = HEADS[cell.cellIndex]; // which a narrow window shows
  const orders = { name, nbytes, where, streamed, why };
  const text = `${line.textContent} ${lives}`.toLowerCase();
  return { ...orders, step: first < 0 ? Infinity : first, line, index, lives, text, value };
}

/** Orders the rows, and shows those that are searched for. */
function showTable() {
  const { rows, order, down, lives } = table;
  const compare = (a, b) => collator.compare(a[order], b[order]) * (down ? -1 : 1) || a.index - b.index;
  const words = byId("search").value.toLowerCase().split(/\s+/);
  const shown = rows.sort(compare).filter((row) => (
    ["all", row.lives].includes(lives) && words.every((word) => row.text.includes(word))
  ));
  byId("weights").tBodies[0].replaceChildren(...shown.map((row) => row.line));
  for (const { value, parentElement: head } of document.getElementsByName("order")) {
    head.ariaSort = value !== order ? "none" : down ? "descending" : "ascending";
  }
  press("lives", lives);
  const counts = [["weights", false], ["kept values", true]].map(([kind, value]) => {
    const [some, all] = [shown, rows].map((list) => list.filter((row) => row.value === value));
    const nbytes = formatBytes(some.reduce((sum, row) => sum + row.nbytes, 0));
    return all.length ? `${some.length} of ${all.length} ${kind}, ${nbytes}` : "";
  });
  byId("count").textContent = counts.filter(Boolean).join("; ");
}

/** The rows of the method; search and order stay. */
function fillTable() {
  table.rows = DATA.weights.map(rowOf);
  const countOf = (kind) => table.rows.filter(({ lives }) => ["all", lives].includes(kind)).length;
  const kinds = ["all", ...new Set(table.rows.map(({ lives }) => lives))];
  if (!kinds.includes(table.lives)) table.lives = "all";
  byId("lives").hidden = kinds.length < 3;
  byId("lives").replaceChildren(...kinds.map((kind) => (
    element("button", { name: "lives", value: kind }, kind, element("small", {}, countOf(kind)))
  )));
  showTable();
}

/** Marks a weight in picture and table, or none; from the table the picture scrolls into sight. */
function follow(index, fromTable = false) {
  figure.chosen = index === figure.chosen && !fromTable ? null : index;
  for (const row of table.rows) row.line.classList.toggle("chosen", row.index === figure.chosen);
  redraw();
  if (!fromTable) return;
  const { address, nbytes } = DATA.weights[index];
  const [low, high] = figure.y;
  if (address >= 0 && (address < low || address > high)) {
    show("y", address + (nbytes - high + low) / 2, address + (nbytes + high - low) / 2);
  }
  figure.root.focus();
}

/** Shows a pass of a method, and what the colours in it mean. */
function showPass() {
  showView();
  const { bars, map, note } = figure.view;
  const drawn = new Set([...bars, ...map].map(({ paint }) => paint));
  for (const sign of byId("legend").children) sign.hidden = !drawn.has(sign.dataset.paint);
  byId("pass-note").textContent = note;
  press("view", figure.key);
}

/** Marks which of several buttons holds. */
function press(name, value) {
  for (const button of document.getElementsByName(name)) button.ariaPressed = button.value === value;
}

const CLICKS = {
  key: (key) => KEYS[key](),
  view: (key) => { figure.key = key; showPass(); },
  order: (order) => {
    Object.assign(table, { order, down: order === table.order && !table.down });
    showTable();
  },
  lives: (lives) => { table.lives = lives; showTable(); },
  weight: (index) => follow(Number(index), true),
};

let curve = null;
function drawAll() {
  colours = {};
  const width = figure.root.clientWidth;
  for (const chart of Object.values(figure.charts)) chart.setSize({ width, height: chart.height });
  curve?.destroy();
  curve = drawCurve();
}

const select = byId("method");
select.parentElement.hidden = DATA.methods.length < 2;
select.replaceChildren(...DATA.methods.map(({ name }, index) => element("option", { value: index }, name)));
select.onchange = () => { figure.method = DATA.methods[select.value]; showPass(); fillTable(); };
document.onclick = ({ target }) => {
  const button = target.closest("button");
  if (button) CLICKS[button.name](button.value);
};
byId("search").oninput = showTable;
document.body.classList.toggle("flat", !DATA.addresses);
if (figure.method) select.onchange();
new ResizeObserver(drawAll).observe(byId("pass-note"));
matchMedia("(prefers-color-scheme: dark)").onchange = drawAll;
for (const [event, paper] of [["beforeprint", true], ["afterprint", false]]) {
  window.addEventListener(event, () => { document.body.classList.toggle("paper", paper); drawAll(); });
}
document.documentElement.dataset.ready = "";
