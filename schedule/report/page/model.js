// From the columns of the data to what is drawn: intervals of compute and links, boxes of the arena.

const WEIGHTS = DATA.weights.name.map((name, index) => ({
  index,
  name,
  nbytes: DATA.weights.nbytes[index],
  address: DATA.weights.address[index],
  resident: DATA.weights.resident[index],
  outside: false,
}));
for (const index of DATA.weights.outside) WEIGHTS[index].outside = true;

function rangesOf(raw) {
  const address = sums(raw.address);
  const start = sums(raw.start);
  return raw.weight.map((weight, i) => ({ weight, start: start[i], address: address[i], nbytes: raw.nbytes[i] }));
}

const RESIDENT = rangesOf(DATA.resident);

/** A method with its columns undone; its views are built when they are looked at. */
function buildMethod(raw) {
  const copyStart = sums(raw.copies.start);
  const step = sums(raw.copies.step);
  const after = sums(raw.copies.after);
  const copies = raw.copies.nbytes.map((nbytes, i) => ({
    index: i, start: copyStart[i], nbytes, step: step[i], after: after[i],
    link: raw.copies.link[i], count: raw.copies.count[i], ns: raw.copies.ns[i], weights: [],
  }));
  const which = sums(raw.stays.copy);
  const until = sums(raw.stays.until);
  const stays = rangesOf(raw.stays).map((range, i) => ({ ...range, copy: which[i], until: until[i] }));
  for (const stay of stays) {
    const { weights } = copies[stay.copy];
    if (!weights.includes(stay.weight)) weights.push(stay.weight);
  }
  const steps = raw.steps.name.map((name, i) => ({
    index: i, name, reads: raw.steps.reads[i], lead: raw.steps.lead[i], read: raw.steps.read[i],
  }));
  return { ...raw, steps, copies, stays, built: {} };
}

/** The lane of what the disk reads for a host that does not hold it. */
const DISK = 1;

/** Everything that happens in the passes of one view, in time order. */
function buildView(method, key) {
  if (method.built[key]) return method.built[key];
  const raw = method.views[key];
  const passes = raw.reads.length;
  const reads = raw.reads.map(sums);
  const starts = raw.copies.map(sums);
  const reading = raw.stages.map(sums);
  const view = {
    key, method, focus: raw.focus, begins: raw.begins, reads,
    limits: [raw.begins[0], raw.begins[passes]],
    period: raw.begins[raw.focus + 1] - raw.begins[raw.focus],
    compute: [], links: new Map(), boxes: [], stall: 0,
  };
  for (let pass = 0; pass < passes; pass += 1) {
    addCompute(view, pass);
    for (const copy of method.copies) {
      const start = starts[pass][copy.index];
      if (!view.links.has(copy.link)) view.links.set(copy.link, []);
      view.links.get(copy.link).push({ start, end: start + copy.ns, copy, pass });
    }
    method.stages.copy.forEach((index, read) => {
      const start = reading[pass][read];
      if (!view.links.has(DISK)) view.links.set(DISK, []);
      view.links.get(DISK).push({ start, end: start + method.stages.ns[read], copy: method.copies[index], pass });
    });
  }
  view.stall = view.compute
    .filter((one) => one.kind === "stall" && one.pass === view.focus)
    .reduce((sum, one) => sum + one.end - one.start, 0);
  addBoxes(view, starts);
  view.memory = heldOverTime(view);
  method.built[key] = view;
  return view;
}

function addCompute(view, pass) {
  const { method } = view;
  let at = view.begins[pass];
  const add = (kind, end, step) => {
    if (end > at) view.compute.push({ kind, start: at, end, step, pass });
    at = Math.max(at, end);
  };
  for (const step of method.steps) {
    const start = view.reads[pass][step.index];
    add("lead", at + step.lead, step);
    add("stall", start, step);
    add("read", start + step.read, step);
  }
  const next = view.begins[pass + 1];
  add("tail", at + method.tail_ns, null);
  add("stall", next - method.gap_ns, null);
  add("gap", next, null);
}

/** When step number `until` ends, counted from the start of a pass; the view's end where that is later. */
function endOf(view, pass, until) {
  const { steps } = view.method;
  const later = pass + Math.floor(until / steps.length);
  if (later >= view.reads.length) return view.limits[1];
  const k = until % steps.length;
  return view.reads[later][k] + steps[k].read;
}

function addBoxes(view, starts) {
  const { method } = view;
  const n = method.steps.length;
  for (const stay of method.stays) {
    const copy = method.copies[stay.copy];
    // What the pass before the first one brought is there from the start.
    if (stay.until >= n) {
      const [start] = view.limits;
      view.boxes.push({ start, ready: start, end: endOf(view, 0, stay.until - n), stay, pass: -1 });
    }
    for (let pass = 0; pass < starts.length; pass += 1) {
      const begin = starts[pass][stay.copy];
      const start = begin + (copy.ns * (stay.start - copy.start)) / copy.nbytes;
      const ready = start + (copy.ns * stay.nbytes) / copy.nbytes;
      view.boxes.push({ start, ready, end: endOf(view, pass, stay.until), stay, pass });
    }
  }
}

/** Bytes on the device over time, as a line through (times[i], values[i]). */
function heldOverTime(view) {
  const [low, high] = view.limits;
  const events = [];
  for (const { start, ready, end, stay } of view.boxes) {
    if (end <= low || start >= high) continue;
    const rate = ready > start ? stay.nbytes / (ready - start) : 0;
    // What had arrived before the view begins is there when it begins.
    if (start < low || !rate) events.push([Math.max(start, low), rate ? Math.min(stay.nbytes, rate * (low - start)) : stay.nbytes, 0]);
    if (rate && ready > low) events.push([Math.max(start, low), 0, rate], [ready, 0, -rate]);
    if (end < high) events.push([end, -stay.nbytes, 0]);
  }
  events.sort((a, b) => a[0] - b[0]);
  let value = DATA.plan.resident_bytes;
  let rate = 0;
  let at = low;
  const line = { times: [at], values: [value], peak: value };
  const push = () => {
    line.times.push(at);
    line.values.push(value);
    line.peak = Math.max(line.peak, value);
  };
  for (const [time, jump, change] of events) {
    if (time > high) break;
    if (time > at) {
      value += rate * (time - at);
      at = time;
      push();
    }
    if (jump) {
      value += jump;
      push();
    }
    rate += change;
  }
  value += rate * Math.max(0, high - at);
  at = high;
  push();
  return line;
}

/** Bytes on the device at one moment. */
function heldAt({ times, values }, time) {
  const i = lastAtMost(times, time);
  if (i < 0) return values[0];
  if (i + 1 >= times.length) return values[i];
  const span = times[i + 1] - times[i];
  return span > 0 ? values[i] + ((values[i + 1] - values[i]) * (time - times[i])) / span : values[i];
}
