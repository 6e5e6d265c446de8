// Every weight: where it lives, what it costs and why; searched, sorted and narrowed down. Then all begins.

const LIVES = ["resident", "in part", "streamed", "outside", "not read"];
const table = { rows: [], order: "step", down: false, lives: "all" };
const collator = new Intl.Collator("en", { numeric: true });

/** A name that may be broken behind its dots and underscores, and nowhere else if possible. */
const breakable = (name) => name.split(/(?<=[._])/).flatMap((part, i) => (i ? [element("wbr"), part] : [part]));

/** The line of a weight in the table, and what it is ordered by. */
function rowOf(weight, index) {
  const { name, nbytes, resident, lives, where, first, streamed, why } = { ...weight, ...figure.method.uses[index] };
  const share = nbytes ? Math.min(1, resident / nbytes) : 0;
  const button = element("button", { type: "button", title: "Show in the picture" }, ...breakable(name));
  button.onclick = () => follow(index, true);
  const rest = share || streamed ? "held" : "soft";
  const paint = `background: linear-gradient(90deg, var(--muted) ${share * 100}%, var(--${rest}) 0)`;
  const line = element("tr", {}, ...[
    ["name", button],
    ["number", nbytes === null ? "unknown" : formatBytes(nbytes)],
    ["where", element("span", { class: "share", style: paint }), where],
    ["number", streamed ? formatBytes(streamed) : "\u2013"],
    ["step", ...breakable(first < 0 ? "\u2013" : `${first} ${figure.method.steps[first]}`)],
    ["why", why],
  ].map(([kind, ...content]) => element("td", { class: kind }, ...content)));
  const orders = { name, nbytes: nbytes ?? -1, where: LIVES.indexOf(lives) * 2 - share, streamed, why };
  return { ...orders, step: first < 0 ? Infinity : first, line, index, lives };
}

/** Orders the rows, and shows those that are searched for. */
function showTable() {
  const { rows, order, down, lives } = table;
  const compared = (a, b) => (typeof a === "string" ? collator.compare(a, b) : a === b ? 0 : a - b);
  rows.sort((a, b) => compared(a[order], b[order]) * (down ? -1 : 1) || a.index - b.index);
  const words = byId("search").value.toLowerCase().split(/\s+/);
  const found = ({ line }) => words.every((word) => line.textContent.toLowerCase().includes(word));
  const shown = rows.filter((row) => ["all", row.lives].includes(lives) && found(row));
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
  const of = (lives) => [lives, table.rows.filter((row) => row.lives === lives).length];
  const kinds = LIVES.map(of).filter(([, count]) => count);
  if (!kinds.some(([lives]) => lives === table.lives)) table.lives = "all";
  const shown = [["all", table.rows.length], ...(kinds.length > 1 ? kinds : [])];
  byId("lives").replaceChildren(...shown.map(([lives, count]) => element(
    "button", { type: "button", "data-lives": lives }, lives, element("small", {}, count.toLocaleString("en")),
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

/** Shows a pass of a method, what the colours in it mean, and the buttons that do something in it. */
function showPass() {
  const { method, key } = figure;
  showView();
  const { lanes, boxes, streamed, note } = figure.view;
  const drawn = new Set([...lanes.flatMap(({ items }) => items), ...boxes].map(({ paint }) => paint));
  const meanings = Object.entries(PAINTS).filter(([paint]) => drawn.has(paint));
  const styleOf = (paint) => ({ style: `--paint: var(--${paint})`, "data-paint": paint });
  const signOf = ([paint, text]) => element("span", styleOf(paint), text);
  byId("legend").replaceChildren(...meanings.map(signOf));
  byId("pass-note").textContent = note;
  each("[data-view]", (button, view) => button.setAttribute("aria-pressed", view === key));
  each("[data-key=f]", (button) => { button.hidden = method.steps.length <= MANY; });
  each("[data-key=s]", (button) => { button.hidden = !streamed.length || !DATA.addresses; });
}

let curve = null;
function drawAll() {
  colours = {};
  for (const chart of Object.values(figure.charts)) chart.setSize({ width: figure.root.clientWidth, height: chart.height });
  curve?.destroy();
  curve = drawCurve();
}

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
figure.root.onkeydown = onKey;
if (figure.method) select.onchange();
new ResizeObserver(drawAll).observe(byId("curve-title"));
matchMedia("(prefers-color-scheme: dark)").onchange = drawAll;
document.documentElement.dataset.ready = "";
