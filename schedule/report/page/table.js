// Every weight: where it lives, what it costs and why; searched, sorted and narrowed down. Then all begins.

const LIVES = ["resident", "in part", "streamed", "outside", "not read"];
const table = { rows: [], order: "step", down: false, lives: "all" };
const collator = new Intl.Collator("en", { numeric: true });

/** A name that may be broken behind its dots and underscores, and nowhere else if possible. */
const breakable = (name) => name.split(/(?<=[._])/).flatMap((part, i) => (i ? [element("wbr"), part] : [part]));

/** What the table says of a weight, what it is ordered by, and its line. */
function rowOf(weight, index) {
  const { steps, uses } = figure.method;
  const { lives, first, streamed, why } = uses[index];
  const share = weight.nbytes ? Math.min(1, weight.resident / weight.nbytes) : 0;
  const step = first < 0 ? "\u2013" : `${first} ${steps[first]}`;
  const name = element("button", { type: "button", title: "Show in the picture" }, ...breakable(weight.name));
  name.onclick = () => follow(index, true);
  const bar = element("span", { class: share || streamed ? "share" : "share none" }, element("i", { style: `width: ${share * 100}%` }));
  const line = element("tr", {}, ...[
    ["name", name],
    ["number", weight.nbytes === null ? "unknown" : formatBytes(weight.nbytes)],
    ["where", bar, lives === "in part" ? `${formatShare(share)} stays` : lives],
    ["number", streamed ? formatBytes(streamed) : "\u2013"],
    ["step", ...breakable(step)],
    ["why", why],
  ].map(([kind, ...content]) => element("td", { class: kind }, ...content)));
  const text = `${weight.name} ${lives} ${why} ${step}`.toLowerCase();
  const orders = { name: weight.name, nbytes: weight.nbytes ?? -1, where: LIVES.indexOf(lives) * 2 - share, streamed, why };
  return { ...orders, step: first < 0 ? Infinity : first, index, lives, line, text };
}

/** Orders the rows, and shows those that are searched for. */
function showTable() {
  const { rows, order, down, lives } = table;
  const compared = (a, b) => (typeof a === "string" ? collator.compare(a, b) : a === b ? 0 : a - b);
  rows.sort((a, b) => compared(a[order], b[order]) * (down ? -1 : 1) || a.index - b.index);
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = rows.filter((row) => ["all", row.lives].includes(lives) && words.every((word) => row.text.includes(word)));
  byId("weights").tBodies[0].replaceChildren(...shown.map((row) => row.line));
  each("[data-order]", (button, key) => {
    button.parentElement.setAttribute("aria-sort", key !== order ? "none" : down ? "descending" : "ascending");
  });
  each("[data-lives]", (button, key) => button.setAttribute("aria-pressed", key === lives));
  const nbytes = formatBytes(shown.reduce((sum, row) => sum + Math.max(0, row.nbytes), 0));
  const of = shown.length < rows.length ? `${shown.length.toLocaleString("en")} of ` : "";
  byId("count").textContent = `${of}${rows.length.toLocaleString("en")} weight${rows.length === 1 ? "" : "s"}, ${nbytes}`;
}

/** The rows of the method; search and order stay. */
function fillTable() {
  table.rows = DATA.weights.map(rowOf);
  const kinds = LIVES.map((lives) => [lives, table.rows.filter((row) => row.lives === lives).length]).filter(([, n]) => n);
  if (!kinds.some(([lives]) => lives === table.lives)) table.lives = "all";
  const shown = [["all", table.rows.length], ...(kinds.length > 1 ? kinds : [])];
  byId("lives").replaceChildren(...shown.map(([lives, n]) => element(
    "button", { type: "button", "data-lives": lives }, lives, element("small", {}, n.toLocaleString("en")),
  )));
  onClick("lives", (lives) => { table.lives = lives; showTable(); });
  showTable();
}

/** Marks a weight in picture and table, or none; from the table the picture scrolls into sight. */
function follow(index, fromTable = false) {
  figure.chosen = index === figure.chosen && !fromTable ? null : index;
  for (const row of table.rows) row.line.classList.toggle("chosen", row.index === figure.chosen);
  redraw();
  if (!fromTable) return;
  const { address, nbytes } = DATA.weights[index];
  const [low, high] = figure.address;
  if (address >= 0 && (address < low || address > high)) move("address", (address + nbytes / 2 - low) / (high - low) - 0.5);
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  figure.root.scrollIntoView({ block: "center", behavior: still ? "auto" : "smooth" });
  figure.root.focus({ preventScroll: true });
}

function showPass() {
  const { method, key } = figure;
  const kinds = new Set(method[key].lanes.flatMap(({ items }) => items.map(({ kind }) => kind)));
  if (DATA.resident_bytes) kinds.add("resident");
  byId("pass-note").textContent = method[key].note;
  each("[data-kinds]", (item, some) => { item.hidden = !some.split(" ").some((kind) => kinds.has(kind)); });
  each("[data-view]", (button, view) => button.setAttribute("aria-pressed", view === key));
  each("[data-key=f]", (button) => { button.hidden = method.steps.length <= MANY; });
  each("[data-key=s]", (button) => { button.hidden = !method.streamed.length || !DATA.addresses; });
  showView();
}

let curve = null;
function drawAll() {
  colours.clear();
  for (const chart of Object.values(figure.charts)) chart.setSize({ width: figure.root.clientWidth, height: chart.height });
  if (curve) curve.destroy();
  curve = drawCurve();
}

function start() {
  const select = byId("method");
  select.parentElement.hidden = DATA.methods.length < 2;
  select.replaceChildren(...DATA.methods.map(({ name }, index) => element("option", { value: index }, name)));
  select.onchange = () => { figure.method = DATA.methods[select.value]; showPass(); fillTable(); };
  onClick("view", (key) => { figure.key = key; showPass(); });
  onClick("key", (key) => KEYS[key]());
  onClick("order", (order, button) => {
    Object.assign(table, { order, down: order === table.order ? !table.down : button.closest(".number") !== null });
    showTable();
  });
  byId("search").oninput = showTable;
  each(".addresses", (part) => { part.hidden = !DATA.addresses; });
  DATA.methods.forEach(link);
  listen();
  if (figure.method) { showPass(); fillTable(); }
  new ResizeObserver(drawAll).observe(byId("curve-title"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  document.documentElement.dataset.ready = "";
}

start();
