// Every weight: where it lives, what it costs and why; searched, sorted and narrowed down.

const COLUMNS = [
  { key: "name", title: "Weight", value: (row) => row.name },
  { key: "nbytes", title: "Bytes", number: true, value: (row) => row.nbytes ?? -1 },
  { key: "lives", title: "Where", value: (row) => LIVES.indexOf(row.lives) * 2 - row.share },
  { key: "streamed", title: "Copied a pass", number: true, value: (row) => row.streamed },
  { key: "first", title: "First read", value: (row) => (row.first < 0 ? Infinity : row.first) },
  { key: "why", title: "Why", value: (row) => row.why },
];
const LIVES = ["resident", "in part", "streamed", "outside", "not read"];

const table = { rows: [], order: "first", down: false, lives: null };

function livesOf(weight, first, streamed) {
  if (weight.outside) return "outside";
  if (first < 0) return "not read";
  if (!streamed) return "resident";
  return weight.resident > 0 ? "in part" : "streamed";
}

/** The rows of one method; the table is made anew, search and order stay. */
function showTable(method) {
  table.rows = WEIGHTS.map((weight) => {
    const first = method.rows.first[weight.index];
    const streamed = method.rows.streamed[weight.index];
    const why = method.rows.why[weight.index];
    const lives = livesOf(weight, first, streamed);
    const share = weight.nbytes ? Math.min(1, weight.resident / weight.nbytes) : 0;
    const step = first < 0 ? "" : method.steps[first].name;
    const text = `${weight.name} ${lives} ${why} ${step}`.toLowerCase();
    return { ...weight, first, step, streamed, why, lives, share, text, line: null };
  });
  if (!table.rows.some((row) => row.lives === table.lives)) table.lives = null;
  showLives();
  fillTable();
}

function showLives() {
  const kinds = LIVES.filter((lives) => table.rows.some((row) => row.lives === lives));
  const button = (label, lives, n) => {
    const made = element("button", { type: "button", "aria-pressed": String(table.lives === lives) }, label, element("span", { class: "n" }, n.toLocaleString("en")));
    made.addEventListener("click", () => {
      table.lives = lives;
      showLives();
      filterTable();
    });
    return made;
  };
  byId("lives").replaceChildren(
    button("all", null, table.rows.length),
    ...(kinds.length > 1 ? kinds.map((lives) => button(lives, lives, table.rows.filter((row) => row.lives === lives).length)) : []),
  );
}

function makeLine(row) {
  const name = element("button", { type: "button", title: "Show in the picture" }, ...breakable(row.name));
  name.addEventListener("click", () => followWeight(row.index));
  const bar = element("span", { class: row.share || row.streamed ? "share" : "share none", "aria-hidden": "true" }, element("i", { style: `width: ${(row.share * 100).toFixed(1)}%` }));
  const lives = row.lives === "in part" ? `${formatShare(row.share)} stays` : row.lives;
  const line = element(
    "tr", {},
    element("td", { class: "name" }, name),
    element("td", { class: "number" }, row.nbytes === null ? "unknown" : formatBytes(row.nbytes)),
    element("td", { class: "where" }, bar, lives),
    element("td", { class: "number" }, row.streamed ? formatBytes(row.streamed) : "\u2013"),
    element("td", { class: "first" }, ...(row.first < 0 ? ["\u2013"] : [`${row.first} `, ...breakable(row.step)])),
    element("td", { class: "why" }, row.why),
  );
  line.classList.toggle("chosen", row.index === figure.chosen);
  return line;
}

function fillTable() {
  const { value } = COLUMNS.find((column) => column.key === table.order);
  const text = new Intl.Collator("en", { numeric: true });
  const sign = table.down ? -1 : 1;
  table.rows.sort((a, b) => {
    const [one, other] = [value(a), value(b)];
    const compared = typeof one === "string" ? text.compare(one, other) : one === other ? 0 : one - other;
    return sign * compared || a.index - b.index;
  });
  for (const row of table.rows) row.line = row.line || makeLine(row);
  byId("weights").tBodies[0].replaceChildren(...table.rows.map((row) => row.line));
  showOrder();
  filterTable();
}

function filterTable() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  let nbytes = 0;
  for (const row of table.rows) {
    const fits = (table.lives === null || row.lives === table.lives) && words.every((word) => row.text.includes(word));
    row.line.hidden = !fits;
    shown += fits;
    nbytes += fits ? row.nbytes ?? 0 : 0;
  }
  const all = table.rows.length;
  byId("count").textContent = shown === all
    ? `${count(all, "weight")}, ${formatBytes(nbytes)}`
    : `${shown.toLocaleString("en")} of ${count(all, "weight")}, ${formatBytes(nbytes)}`;
}

function showOrder() {
  const head = byId("weights").tHead.rows[0];
  if (!head.cells.length) makeHead(head);
  COLUMNS.forEach((column, i) => {
    const mine = column.key === table.order;
    head.cells[i].setAttribute("aria-sort", mine ? (table.down ? "descending" : "ascending") : "none");
    head.cells[i].querySelector(".arrow").textContent = mine ? (table.down ? "\u2193" : "\u2191") : "";
  });
}

function makeHead(head) {
  for (const column of COLUMNS) {
    const button = element("button", { type: "button" }, column.title, element("span", { class: "arrow", "aria-hidden": "true" }));
    button.addEventListener("click", () => {
      table.down = table.order === column.key ? !table.down : Boolean(column.number);
      table.order = column.key;
      fillTable();
    });
    head.append(element("th", { scope: "col", class: column.number ? "number" : null }, button));
  }
}

/** Marks a weight in picture and table; null follows none. */
function chooseWeight(index) {
  figure.chosen = index === figure.chosen ? null : index;
  for (const row of table.rows) row.line.classList.toggle("chosen", row.index === figure.chosen);
  redraw();
}

/** From the table to the picture: the weight is marked, and the picture scrolls into sight. */
function followWeight(index) {
  figure.chosen = null;
  chooseWeight(index);
  const weight = WEIGHTS[index];
  const [low, high] = figure.address;
  if (weight.address >= 0 && (weight.address < low || weight.address > high)) {
    moveAddress(weight.address + weight.nbytes / 2 - (low + high) / 2);
  }
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  byId("figure").scrollIntoView({ block: "center", behavior: still ? "auto" : "smooth" });
  byId("figure").focus({ preventScroll: true });
}
