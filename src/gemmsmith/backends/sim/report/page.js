// Steps through a simulated kernel. The data, see page.py, are columns: a list for each field of the events and so on.
// The state at a step is looked up: the last event of each barrier and of each group of threads up to the step.
"use strict";

const BARRIER_EVENTS = ["init", "arrive", "expect_tx", "complete_tx"];
const BUCKET = 512; // steps between two lists of live operations
const LANE = 24, AXIS = 20, FIRST_CYCLES = 4000;
const MAX_ROWS = 14; // of the table of operations

const $ = (id) => document.getElementById(id);
let data, events, operations, spans, fills;
let step = 0, cta = 0, timer = null, addressTimer = null, fromCycle = 0, toCycle = 1, marked = [];

// -- data ----------------------------------------------------------------------------------------
async function load() {
  const packed = Uint8Array.from(atob($("data").textContent.trim()), (x) => x.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function prepare(loaded) {
  data = loaded;
  ({ events, operations, spans, fills } = data);
  for (const part of [events, operations, spans, data.idle]) {
    for (const name of data.differences.filter((x) => x in part)) {
      let sum = 0;
      part[name] = part[name].map((x) => (sum += x));
    }
  }
  data.count = events.kind.length;
  data.kindOf = (i) => data.kinds[events.kind[i]];
  data.laneOfAgent = data.agents.map(([c, name]) => data.lanes.findIndex((x) => x[0] === c && x[1] === name));
  data.eventsOfAgent = data.agents.map(() => []);
  data.eventsOfBarrier = data.objects.map(() => []);
  data.steps = Array.from({ length: Math.ceil(data.grid / data.cluster[0]) }, () => []); // of each cluster
  for (let i = 0; i < data.count; ++i) {
    data.eventsOfAgent[events.agent[i]].push(i);
    data.steps[clusterOf(data.agents[events.agent[i]][0])].push(i);
    if (BARRIER_EVENTS.includes(data.kindOf(i))) data.eventsOfBarrier[events.object[i]].push(i);
  }
  // Hazards that were found in an event that is shown, in the order of the steps.
  data.found = data.hazards.map((x, i) => ({ ...x, i })).filter((x) => x.event !== null && x.event >= 0
    && x.event < data.count).sort((x, y) => x.event - y.event);
  data.spansOfLane = data.lanes.map(() => []);
  spans.lane.forEach((lane, i) => data.spansOfLane[lane].push(i));
  data.fillsOfSlot = new Map();
  fills.cta.forEach((c, i) => {
    const key = `${c} ${data.buffers[fills.buffer[i]]}`;
    if (!data.fillsOfSlot.has(key)) data.fillsOfSlot.set(key, []);
    data.fillsOfSlot.get(key).push(i);
  });
  prepareOperations();
}

// An operation is live from its issue to its completion or, if threads wait for it, to the end of the wait.
function prepareOperations() {
  const issues = operations.issue;
  data.liveUntil = issues.map((_, i) => {
    const complete = operations.complete[i] < 0 ? Infinity : operations.complete[i];
    if (operations.wait[i] >= 0) return Math.max(complete, operations.wait[i]);
    return data.routes[operations.route[i]].registers.length ? Infinity : complete;
  });
  data.operationOf = new Map(issues.flatMap((x, i) => [[x, i], [operations.complete[i], i]])); // by event
  data.lastOfWait = new Map(); // the last completion of the operations that a wait is for
  operations.wait.forEach((wait, i) => {
    data.lastOfWait.set(wait, Math.max(data.lastOfWait.get(wait) ?? -1, operations.complete[i]));
  });
  data.buckets = [];
  let live = [], next = 0;
  for (let start = 0; start < data.count; start += BUCKET) {
    live = live.filter((i) => data.liveUntil[i] > start);
    for (; next < issues.length && issues[next] <= start; ++next) if (data.liveUntil[next] > start) live.push(next);
    data.buckets.push({ live: live.slice(), next });
  }
}

const clusterOf = (c) => Math.floor(c / data.cluster[0]);

// Returns the last number in a sorted list that is not above x; -1 if there is none.
function lastUpTo(list, x) {
  const i = indexUpTo(list, x);
  return i < 0 ? -1 : list[i];
}

function indexUpTo(list, x, value = (y) => y) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (value(list[middle]) <= x) low = middle + 1; else high = middle;
  }
  return low - 1;
}

// -- the state at a step -----------------------------------------------------------------------------
// Of each barrier: its phase, and the arrivals and bytes that the phase misses. `event`: the last that changed it.
function barriersAt(at) {
  const waiting = new Map();
  for (const x of threadsAt(at)) if (x.object >= 0) waiting.set(x.object, [...(waiting.get(x.object) ?? []), x]);
  return data.objects.flatMap(([c, name], object) => {
    const own = data.eventsOfBarrier[object], event = lastUpTo(own, at);
    if (!own.length) return [];
    const state = { cta: c, name, event, waits: waiting.get(object) ?? [] };
    if (event < 0) return [state];
    const count = data.kindOf(own[0]) === "init" ? events.amount[own[0]] : null;
    const [phase, pending, bytes] = [events.phase, events.pending, events.bytes].map((x) => x[event]);
    return [{ ...state, count, phase, pending, bytes }];
  });
}

// Of each group of threads: the last event, and the object and phase for which it waits, or object -1.
function threadsAt(at) {
  return data.agents.flatMap((agent, i) => {
    const event = lastUpTo(data.eventsOfAgent[i], at);
    if (event < 0 || isEngine(i)) return [];
    const blocked = data.kindOf(event) === "block";
    return [{ cta: agent[0], name: agent[1], agent: i, event, object: blocked ? events.object[event] : -1,
      phase: blocked ? events.phase[event] : -1, exited: data.kindOf(event) === "exit" }];
  });
}

// Of each slot of a buffer: empty, loading, full or read, and what it holds. It is empty once all that read it have.
function stagesAt(at) {
  return [...data.fillsOfSlot].map(([key, own]) => {
    const [c, ...name] = key.split(" ");
    const position = indexUpTo(own, at, (i) => fills.load[i]);
    const result = { cta: +c, name: name.join(" "), state: "empty", holds: "", event: -1 };
    if (position < 0) return result;
    const i = own[position], happened = (x) => x >= 0 && x <= at;
    const last = Math.max(...[fills.load, fills.full, fills.read, fills.free].map((x) => x[i]).filter(happened));
    const state = !happened(fills.full[i]) ? "loading" : happened(fills.free[i]) ? "empty"
      : happened(fills.read[i]) ? "read" : "full";
    return { ...result, state, holds: state === "empty" ? "" : data.holds[fills.holds[i]], event: last };
  });
}

// The live operations: those in flight, and those for which threads still have to wait.
function operationsAt(at) {
  const bucket = data.buckets[Math.floor(at / BUCKET)];
  if (!bucket) return [];
  const result = bucket.live.filter((i) => data.liveUntil[i] > at);
  for (let i = bucket.next; i < operations.issue.length && operations.issue[i] <= at; ++i) {
    if (data.liveUntil[i] > at) result.push(i);
  }
  return result;
}

// Returns the event that ended the wait of a resume: the completion of the phase, or of the last operation; or -1.
function causeOf(i) {
  if (data.kindOf(i) !== "resume") return -1;
  const own = data.eventsOfBarrier[events.object[i]], phase = events.phase[i];
  if (!own.length) return data.lastOfWait.get(i) ?? -1;
  let at = indexUpTo(own, i);
  while (at > 0 && events.phase[own[at - 1]] > phase) --at;
  return phase >= 0 && at >= 0 && events.phase[own[at]] > phase ? own[at] : -1;
}

const isEngine = (agent) => engines().has(data.agents[agent][1]);
function engines() {
  return (data.engineNames ??= new Set(data.routes.map((x) => x.engine)));
}

// -- text --------------------------------------------------------------------------------------------
function element(tag, text = "", className = "") {
  const result = document.createElement(tag);
  result.textContent = text;
  if (className) result.className = className;
  return result;
}

function stepLink(i) {
  const link = element("a", `step ${i}`);
  link.href = `#step=${i}`;
  return link;
}

const number = (x) => x.toLocaleString("en-US");
const plural = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;

function loopsText(event) {
  const [nest, ...indices] = data.loops[events.loops[event]] ?? [-1];
  return (data.nests[nest] ?? []).map((name, i) => `${name} ${indices[i]}`).join(", ");
}

// The phase that an event of a barrier completes, and what the phase in progress misses.
function barrierText(i) {
  const before = lastUpTo(data.eventsOfBarrier[events.object[i]] ?? [], i - 1), phase = events.phase[i];
  const completes = phase > (before < 0 ? 0 : events.phase[before]) ? ` and completes phase ${phase - 1}` : "";
  const bytes = events.bytes[i] ? ` and ${plural(events.bytes[i], "byte")}` : "";
  return `${completes}: phase ${phase} misses ${plural(events.pending[i], "arrival")}${bytes}`;
}

function eventText(i) {
  const [c, name] = data.agents[events.agent[i]], [owner, object] = data.objects[events.object[i]] ?? [c, ""];
  const of = owner !== c ? ` of CTA ${owner}` : "";
  const amount = events.amount[i];
  const operation = data.operationOf.get(i);
  const what = {
    instruction: () => `executes ${data.statements[events.statement[i]]?.instruction ?? "an instruction"}`,
    issue: () => `issues ${operationText(operation)}`,
    complete: () => `completes ${operationText(operation)}`,
    commit: () => `commits ${plural(amount, "operation")} as a ${object}`,
    init: () => `initializes ${object} for ${plural(amount, "arrival")} a phase`,
    arrive: () => `arrives (${amount}) at ${object}${of}${barrierText(i)}`,
    expect_tx: () => `expects ${plural(amount, "byte")} at ${object}${of}${barrierText(i)}`,
    complete_tx: () => `brings ${plural(amount, "byte")} to ${object}${of}${barrierText(i)}`,
    block: () => `waits for ${object}${of}` + waitText(i),
    resume: () => `goes on: ${object}${of}` + waitText(i)
      + (events.time[i] > amount ? `, after ${plural(events.time[i] - amount, "cycle")}` : ""),
    exit: () => "exits",
  }[data.kindOf(i)]();
  const loops = loopsText(i);
  return [`CTA ${c}`, name, what + (loops ? ` [${loops}]` : "")].join(" ");
}

function waitText(i) {
  if (data.eventsOfBarrier[events.object[i]]?.length) {
    const phase = events.phase[i];
    return ` phase ${phase} (${phase < 0 ? "complete at the start" : `parity ${phase % 2}`})`;
  }
  return events.pending[i] >= 0 ? `, ${events.pending[i]} may stay pending` : "";
}

function operationText(i) {
  const route = data.routes[operations.route[i]], at = operations.coordinates[i];
  const bytes = operations.bytes[i] ? `, ${plural(operations.bytes[i], "byte")}` : "";
  return route.label + (at.length ? ` at (${at.join(", ")})` : "") + bytes;
}

function routeText(route) {
  const place = ([c, name]) => (c < 0 ? `global ${name}` : `CTA ${c} ${name}`);
  const to = route.writes.length ? route.writes.map(place) : route.registers;
  return [route.reads.map(place).join(", "), to.join(", ")].filter((x) => x).join(" → ");
}

// -- panels --------------------------------------------------------------------------------------------
function showStages() {
  const slots = stagesAt(step).filter((x) => x.cta === cta);
  const names = { read: "being read" }, readers = fills.read.some((x) => x >= 0);
  showRows("stages", slots, "No asynchronous copy loads shared memory of this CTA.", (x, slot) => {
    const cell = element("div", "", `slot ${x.state}${x.event === step ? " now" : ""}`);
    cell.append(element("span", `${slot} ${names[x.state] ?? x.state}`), element("span", x.holds || "\u00a0"));
    return cell;
  });
  const note = "The record has no reads by threads: a stage is full until its next load.";
  if (slots.length && !readers) $("stages").append(element("p", note, "muted"));
}

function showBarriers() {
  const own = barriersAt(step).filter((x) => clusterOf(x.cta) === clusterOf(cta)
    && (x.cta === cta || x.name === "cluster barrier"));
  showRows("barriers", own, "This CTA uses no barrier.", (x, slot) => {
    const card = element("div", "", `card${x.event === step ? " now" : ""}`);
    card.dataset.barrier = x.name;
    if (x.event < 0) {
      card.append(element("span", `${slot} not used yet`));
    } else {
      const arrivals = x.count === null ? number(x.pending) : `${x.pending} of ${x.count}`;
      card.append(element("span", `${slot} phase ${x.phase}${x.count === null ? "" : `, parity ${x.phase % 2}`}`));
      card.append(element("span", `pending ${x.count === null ? "threads" : "arrivals"}: ${arrivals}`));
      if (x.bytes) card.append(element("span", `awaited bytes: ${number(x.bytes)}`));
    }
    for (const y of x.waits) {
      const who = `${y.cta === cta ? "" : `CTA ${y.cta} `}${y.name}`;
      const what = x.phase > y.phase ? `may go on: phase ${y.phase} is complete` : `waits for phase ${y.phase}`;
      card.append(element("span", `${who} ${what}`, "waits"));
    }
    return card;
  });
}

// Shows items, whose names are as "name[slot]", in a row for each name.
function showRows(id, items, none, build) {
  const rows = new Map();
  for (const x of items) {
    const [, name, slot] = x.name.match(/^(.*?)(\[\d+\])?$/);
    if (!rows.has(name)) rows.set(name, []);
    rows.get(name).push(build(x, slot ?? ""));
  }
  const sorted = [...rows].sort(([x], [y]) => x.localeCompare(y, "en", { numeric: true }));
  $(id).replaceChildren(...sorted.map(([name, cells]) => {
    const row = element("div", "", "row");
    row.append(element("b", name), ...cells);
    return row;
  }));
  if (!rows.size) $(id).append(element("p", none, "muted"));
}

function showTable(id, header, rows, none) {
  if (!rows.length) return $(id).replaceChildren(element("p", none, "muted"));
  const table = document.createElement("table");
  for (const [i, row] of [header, ...rows].entries()) {
    const line = table.insertRow();
    for (const x of row) line.append(element(i ? "td" : "th", x));
  }
  $(id).replaceChildren(table);
}

function showThreads() {
  const own = threadsAt(step).filter((x) => x.cta === cta), exited = own.filter((x) => x.exited);
  const rows = own.filter((x) => !x.exited).map((x) => {
    const at = data.statements[events.statement[x.event]]?.instruction ?? "";
    const state = x.object >= 0 ? `waits for ${data.objects[x.object][1]}${waitText(x.event)}` : "runs";
    return [x.name, state, `${at} ${loopsText(x.event)}`, number(events.time[x.event])];
  });
  if (exited.length) rows.push([exited.map((x) => x.name).join(", "), "exited", "", ""]);
  showTable("threads", ["threads", "state", "at", "cycle"], rows, "No thread has begun.");
}

function showOperations() {
  const groups = new Map();
  for (const i of operationsAt(step)) {
    const issuer = data.agents[events.agent[operations.issue[i]]];
    if (issuer[0] !== cta) continue;
    const complete = operations.complete[i] >= 0 && operations.complete[i] <= step;
    const commit = operations.commit[i], committed = commit >= 0 && commit <= step;
    const state = complete ? "complete, not waited for" : "in flight";
    const route = data.routes[operations.route[i]];
    const group = committed ? `group of step ${commit}` : commit >= 0 ? "not committed" : "";
    // wgmmas of a group read different parts of one slot.
    const key = [route.label, routeText(route), group, state, issuer[1]].join("|");
    const entry = groups.get(key) ?? { count: 0, bytes: 0, route, group, state, issuer: issuer[1] };
    entry.count += 1;
    entry.bytes += operations.bytes[i];
    groups.set(key, entry);
  }
  const rows = [...groups.values()].map((x) => [`${x.route.label}${x.count > 1 ? ` × ${x.count}` : ""}`,
    routeText(x.route), x.bytes ? number(x.bytes) : "", [x.state, x.group].filter((y) => y).join(", "), x.issuer]);
  const shown = rows.slice(0, MAX_ROWS);
  if (rows.length > MAX_ROWS) shown.push([`and ${rows.length - MAX_ROWS} more`, "", "", "", ""]);
  showTable("operations", ["operation", "from → to", "bytes", "state", "issued by"], shown,
    "This CTA has no operation in flight, and none to wait for.");
}

function showSource() {
  const statement = data.statements[events.statement[step]];
  const lines = statement ? [`${statement.python.file}:${statement.python.line} ${statement.python.text}`,
    ...statement.stack.map((x) => `in ${x}`)] : ["no statement"];
  $("python").replaceChildren(...lines.map((x) => element("li", x)));
  for (const x of marked) x.classList.remove("now", "hazard");
  const box = $("cuda"), lineOf = (x) => box.children[(x ?? 0) - 1], line = lineOf(statement?.cuda);
  marked = hazardsHere().flatMap((x) => x.places.map((y) => lineOf(y.cuda?.line))).filter((x) => x);
  for (const x of marked) x.classList.add("hazard");
  if (!line) return;
  line.classList.add("now");
  marked.push(line);
  const top = line.offsetTop - box.offsetTop, height = box.clientHeight;
  if (top < box.scrollTop + 20 || top > box.scrollTop + height - 60) box.scrollTop = top - height / 3;
}

const hazardsHere = () => data.found.filter((x) => x.event === step);

function buildHazards() {
  $("hazards").replaceChildren(...data.hazards.map((x, i) => {
    const box = element("div", "", "found"), found = data.found.find((y) => y.i === i);
    box.dataset.hazard = i;
    if (found) {
      const jump = element("button", `Step ${found.event}`);
      jump.addEventListener("click", () => goTo(found.event, true));
      box.append(jump);
    } else if (x.event !== null) {
      box.append(element("div", `Found at step ${x.event}, which is cut.`, "muted"));
    }
    box.append(element("b", x.kind), element("div", x.message));
    const places = document.createElement("ol");
    for (const y of x.places) {
      const who = y.agent ? `${y.access || "executed"} by ${y.agent} ` : "";
      const loops = Object.entries(y.loops ?? {}).map(([name, index]) => `${name} ${index}`).join(", ");
      const item = element("li", `${who}${loops ? `[${loops}] ` : ""}at `);
      const cuda = y.cuda ? `; CUDA line ${y.cuda.line}` : "";
      item.append(element("code", `${y.python.file}:${y.python.line} ${y.python.text}${cuda}`));
      if (found && y.event !== null && y.event !== undefined && y.event !== found.event) {
        item.append(", ", stepLink(y.event));
      }
      places.append(item);
    }
    box.append(places);
    if (x.hint) box.append(element("div", `Hint: ${x.hint}`));
    return box;
  }));
  if (!data.hazards.length) $("hazards").append(element("p", "none", "muted"));
  $("hazard").disabled = !data.found.length;
}

function showIdle() {
  const sums = new Map(), { cause, start, end } = data.idle;
  let total = 0;
  for (let i = 0; i < cause.length; ++i) {
    if (data.idle.cta[i] !== cta) continue;
    total += end[i] - start[i];
    sums.set(cause[i], (sums.get(cause[i]) ?? 0) + end[i] - start[i]);
  }
  const shares = element("div", "", "share");
  for (const [x, cycles] of [...sums].sort((a, b) => b[1] - a[1])) {
    const bar = element("i"), percent = (100 * cycles) / total;
    bar.style.width = `${percent}%`;
    const share = `${percent.toFixed(1)}%, ${plural(cycles, "cycle")}`;
    shares.append(element("span", data.causes[x]), bar, element("span", share));
  }
  const title = total ? `${plural(total, "cycle")} of the tensor core of CTA ${cta}, by what its next wgmma waits for`
    : "No wgmma is issued in this CTA.";
  $("idle").replaceChildren(element("p", title, "muted"), shares);
}

// -- lanes ---------------------------------------------------------------------------------------------
const shownLanes = () => data.lanes.map((x, i) => i).filter((i) => clusterOf(data.lanes[i][0]) === clusterOf(cta));

function buildLanes() {
  const many = data.cluster[0] > 1;
  $("names").replaceChildren(...shownLanes().map((i) => {
    const [c, name] = data.lanes[i], button = element("button", many ? `${c} ${name}` : name);
    button.title = `CTA ${c} ${name}: step in this lane`;
    button.dataset.lane = i;
    button.addEventListener("click", () => stepInLane(i, 1));
    return button;
  }));
  $("canvas").style.height = `${shownLanes().length * LANE + AXIS}px`;
}

function draw() {
  const canvas = $("canvas"), width = canvas.clientWidth, height = canvas.clientHeight, scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const x = (cycle) => ((cycle - fromCycle) / (toCycle - fromCycle)) * width;
  pen.scale(scale, scale);
  pen.font = "11px system-ui, sans-serif";
  const lanes = shownLanes(), now = events.time[step] ?? 0;
  drawAxis(pen, x, lanes.length * LANE, width, color);
  const blocked = new Map(threadsAt(step).map((y) => [data.laneOfAgent[y.agent], y]));
  lanes.forEach((lane, row) => {
    const top = row * LANE, threads = blocked.get(lane);
    // Up to here the lane has got; what follows is pale.
    const until = threads && threads.object < 0 ? events.time[threads.event] : now;
    for (const [alpha, from, to] of [[1, fromCycle, until], [0.3, Math.max(fromCycle, until), toCycle]]) {
      pen.globalAlpha = alpha;
      drawSpans(pen, lane, top, x, from, Math.min(to, toCycle));
    }
    pen.globalAlpha = 1;
    pen.fillStyle = color("line");
    pen.fillRect(0, top + LANE - 1, width, 1);
  });
  for (const found of data.found) {
    const row = lanes.indexOf(data.laneOfAgent[events.agent[found.event]]), at = x(events.time[found.event]);
    if (row < 0) continue;
    pen.fillStyle = color("danger");
    pen.beginPath();
    pen.moveTo(at, row * LANE + 9);
    pen.lineTo(at - 6, row * LANE);
    pen.lineTo(at + 6, row * LANE);
    pen.fill();
  }
  drawCauses(pen, x, lanes, color);
  pen.fillStyle = color("accent");
  pen.fillRect(x(now) - 1, 0, 2, lanes.length * LANE);
}

// Draws what leads to this step: a line from the event that ended a wait and, at a hazard, a dashed one from each
// earlier access to the one that is not ordered after it.
function drawCauses(pen, x, lanes, color) {
  const place = (i) => [x(events.time[i]), (lanes.indexOf(data.laneOfAgent[events.agent[i]]) + 0.5) * LANE];
  const missing = hazardsHere().flatMap((found) => found.places.slice(1).map((y) => y.event ?? -1));
  for (const [from, name, dash] of [[causeOf(step), "accent", []], ...missing.map((i) => [i, "danger", [5, 4]])]) {
    if (from < 0 || place(from)[1] < 0) continue;
    pen.strokeStyle = pen.fillStyle = color(name);
    pen.lineWidth = 2;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(...place(from));
    pen.lineTo(...place(step));
    pen.stroke();
    pen.beginPath();
    pen.arc(...place(from), 4, 0, 2 * Math.PI);
    pen.fill();
  }
}

// Draws what lies between two cycles of the spans of a lane; one that ends within a drawn pixel is left out.
function drawSpans(pen, lane, top, x, from, to) {
  const own = data.spansOfLane[lane], full = LANE - 4;
  let drawn = -1;
  for (let n = Math.max(0, indexUpTo(own, from, (i) => spans.start[i]) - 8); n < own.length; ++n) {
    const i = own[n], left = x(Math.max(from, spans.start[i])), right = x(Math.min(to, spans.end[i]));
    if (spans.start[i] >= to) break;
    if (spans.end[i] <= from || right < drawn + 0.5) continue;
    drawn = right;
    const [, color, height] = data.legend[spans.entry[i]], thick = Math.max(2, height * full);
    const gap = right - left > 3 && spans.end[i] <= to ? 1 : 0;
    pen.fillStyle = color;
    pen.fillRect(left, top + 1 + (full - thick) / 2, Math.max(0.5, right - left - gap), thick);
  }
}

function drawAxis(pen, x, bottom, width, color) {
  const rough = ((toCycle - fromCycle) * 90) / width, power = 10 ** Math.floor(Math.log10(rough));
  const tick = Math.max(1, [1, 2, 5, 10].find((m) => m * power >= rough) * power);
  for (let cycle = Math.ceil(fromCycle / tick) * tick; cycle <= toCycle; cycle += tick) {
    pen.fillStyle = color("line");
    pen.fillRect(x(cycle), 0, 1, bottom + 4);
    pen.fillStyle = color("muted");
    const text = number(cycle), left = x(cycle) + 3;
    if (left + pen.measureText(text).width < width) pen.fillText(text, left, bottom + 14);
  }
}

function setView(from, to) {
  const length = Math.min(Math.max(to - from, 20), data.cycles * 1.02);
  fromCycle = Math.min(Math.max(0, from), data.cycles * 1.02 - length);
  toCycle = fromCycle + length;
  draw();
}

function zoom(factor, center = events.time[step] ?? 0) {
  setView(center - (center - fromCycle) * factor, center + (toCycle - center) * factor);
}

// -- steps -----------------------------------------------------------------------------------------------
// Goes to a step; `follow` shows the CTA of its event.
function goTo(to, follow = false) {
  step = Math.min(Math.max(0, Math.round(to) || 0), Math.max(0, data.count - 1));
  const own = data.count ? data.agents[events.agent[step]][0] : 0;
  if (follow || clusterOf(own) !== clusterOf(cta)) setCta(own);
  const now = events.time[step] ?? 0;
  if (now < fromCycle || now > toCycle) {
    const length = toCycle - fromCycle;
    fromCycle = Math.max(0, now - length / 4);
    toCycle = fromCycle + length;
  }
  show();
}

function setCta(to) {
  const before = clusterOf(cta);
  cta = to;
  $("cta").value = to;
  showIdle();
  if (before !== clusterOf(to) || !$("names").children.length) buildLanes();
}

function move(count) {
  const steps = data.steps[clusterOf(cta)], at = indexUpTo(steps, step);
  const on = count < 0 && steps[at] !== step ? at + 1 : at; // the step may be of another cluster
  const next = steps[Math.min(Math.max(0, on + count), steps.length - 1)];
  if (next !== undefined) goTo(next);
}

function stepInLane(lane, count) {
  const own = data.eventsOfAgent[data.laneOfAgent.indexOf(lane)] ?? [];
  const next = count > 0 ? own[indexUpTo(own, step) + 1] : lastUpTo(own, step - 1);
  if (next >= 0) goTo(next);
}

function nextHazard() {
  const next = data.found.find((x) => x.event > step) ?? data.found[0];
  if (next) goTo(next.event, true);
}

function play(on = timer === null) {
  clearInterval(timer);
  timer = null;
  if (on) {
    const speed = +$("speed").value, each = Math.max(1, speed / 50);
    timer = setInterval(() => {
      const before = step;
      move(each);
      if (step === before) play(false);
    }, 1000 * each / speed);
  }
  $("play").setAttribute("aria-pressed", on);
  $("event").setAttribute("aria-live", on ? "off" : "polite");
  $("play").textContent = on ? "Pause" : "Play";
}

function show() {
  if (!data.count) return;
  $("number").value = $("slider").value = step;
  $("clock").textContent = `cycle ${number(events.time[step])}`;
  $("event").textContent = eventText(step);
  const cause = causeOf(step);
  if (cause >= 0) $("event").append("; ended by ", stepLink(cause), ` of ${data.agents[events.agent[cause]][1]}`);
  $("link").href = `#step=${step}`;
  clearTimeout(addressTimer); // browsers limit how often an address may change
  addressTimer = setTimeout(() => history.replaceState(null, "", `#step=${step}`), 300);
  showStages();
  showBarriers();
  showThreads();
  showOperations();
  showSource();
  const here = hazardsHere();
  for (const x of $("hazards").children) x.classList.toggle("now", here.some((y) => y.i === +x.dataset.hazard));
  for (const x of $("names").children) {
    const [c, name] = data.lanes[x.dataset.lane];
    x.classList.toggle("now", data.laneOfAgent[events.agent[step]] === +x.dataset.lane);
    x.classList.toggle("hazard", here.some((y) => y.places.some((z) => z.agent?.startsWith(`CTA ${c} ${name}`))));
  }
  draw();
}

// -- the page --------------------------------------------------------------------------------------------
function buildPage() {
  data.cycles = Math.max(1, lastTime());
  $("summary").textContent = `${plural(data.grid, "CTA")}, clusters of ${data.cluster[0]}, schedule of seed `
    + `${data.seed}: ${plural(data.all_events, "event")} in ${plural(data.all_cycles, "cycle")} of the cost model. `
    + `${data.hazards.length ? plural(data.hazards.length, "hazard") : "No hazards"}; verdict: ${data.verdict}.`;
  if (data.all_events > data.count) {
    notice(`Only the first ${plural(data.count, "event")} are shown, up to cycle ${number(lastTime())}; `
      + `${number(data.all_events - data.count)} are cut. Simulate fewer tiles or a smaller K to see all.`);
  }
  $("total").textContent = `of ${number(Math.max(0, data.count - 1))}`;
  $("number").max = $("slider").max = Math.max(0, data.count - 1);
  for (let i = 0; i < data.grid; ++i) $("cta").append(new Option(i, i));
  $("cuda").replaceChildren(...data.cuda.split("\n").map((text, i) => {
    const line = element("div", text || " ");
    line.dataset.line = i + 1;
    line.title = "Step to the next event of this line";
    return line;
  }));
  buildHazards();
  $("legend").replaceChildren(...data.legend.map(([name, color]) => {
    const entry = element("span"), box = element("i");
    box.style.background = color;
    entry.append(box, name);
    return entry;
  }));
  $("main").hidden = false;
  setCta(0);
  toCycle = Math.min(FIRST_CYCLES, data.cycles * 1.02);
}

const lastTime = () => events.time.reduce((x, y) => Math.max(x, y), 0);

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = false;
}

function listen() {
  const click = { back: () => move(-1), forward: () => move(1), play: () => play(), hazard: nextHazard,
    in: () => zoom(0.5), out: () => zoom(2), fit: () => setView(0, Infinity) };
  for (const [id, action] of Object.entries(click)) $(id).addEventListener("click", action);
  $("number").addEventListener("change", () => goTo(+$("number").value));
  $("slider").addEventListener("input", () => goTo(+$("slider").value));
  $("speed").addEventListener("change", () => timer !== null && play(true));
  $("cta").addEventListener("change", () => {
    setCta(+$("cta").value);
    const steps = data.steps[clusterOf(cta)];
    goTo(steps.length && !steps.includes(step) ? Math.max(steps[0], lastUpTo(steps, step)) : step);
  });
  $("cuda").addEventListener("click", (e) => {
    const line = +e.target.dataset.line, steps = data.steps[clusterOf(cta)], at = indexUpTo(steps, step);
    const others = [...steps.slice(at + 1), ...steps.slice(0, at + 1)];
    const next = others.find((i) => data.statements[events.statement[i]]?.cuda === line);
    if (next !== undefined) goTo(next);
  });
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", goToHash);
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  listenToCanvas($("canvas"));
}

function onKey(e) {
  if (e.ctrlKey || e.metaKey || e.altKey || e.target.matches?.("select, input")) return;
  const lane = data.laneOfAgent[events.agent[step]];
  const arrow = (count) => (e.shiftKey ? stepInLane(lane, count) : move(count));
  const action = { ArrowRight: () => arrow(1), ArrowLeft: () => arrow(-1), h: nextHazard, H: nextHazard,
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => setView(0, Infinity),
    Home: () => move(-Infinity), End: () => move(Infinity),
    " ": e.target.matches?.("button, a") ? null : () => play() }[e.key];
  if (!action) return;
  e.preventDefault();
  action();
}

function listenToCanvas(canvas) {
  let held = null;
  const cycleAt = (e) => fromCycle + (e.offsetX / canvas.clientWidth) * (toCycle - fromCycle);
  canvas.addEventListener("wheel", (e) => {
    e.preventDefault();
    const shift = (e.deltaX * (toCycle - fromCycle)) / 1000;
    if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) setView(fromCycle + shift, toCycle + shift);
    else zoom(Math.exp(e.deltaY / 400), cycleAt(e));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (e) => {
    held = { x: e.clientX, from: fromCycle, to: toCycle, moved: false };
    canvas.setPointerCapture(e.pointerId);
  });
  canvas.addEventListener("pointermove", (e) => {
    if (!held) return;
    held.moved ||= Math.abs(e.clientX - held.x) > 4;
    const shift = ((held.x - e.clientX) / canvas.clientWidth) * (held.to - held.from);
    if (held.moved) setView(held.from + shift, held.to + shift);
  });
  canvas.addEventListener("pointercancel", () => (held = null));
  canvas.addEventListener("pointerup", (e) => {
    const click = held && !held.moved;
    held = null;
    const lane = shownLanes()[Math.floor(e.offsetY / LANE)];
    if (!click || lane === undefined) return;
    const own = data.eventsOfAgent[data.laneOfAgent.indexOf(lane)] ?? [], at = cycleAt(e);
    const distance = (i) => Math.abs(events.time[i] - at);
    if (own.length) goTo(own.reduce((x, y) => (distance(y) < distance(x) ? y : x)));
  });
}

function goToHash() {
  const found = location.hash.match(/^#step=(\d+)$/);
  goTo(found ? +found[1] : step);
}

async function start() {
  if (typeof DecompressionStream === "undefined") {
    return notice("This browser has no DecompressionStream, which reads the page's data. Any of 2023 or later has it.");
  }
  prepare(await load());
  buildPage();
  listen();
  goToHash();
  if (!data.count) notice("The simulation has no events.");
}

start().catch((e) => {
  notice(`The page cannot be shown: ${e.message}`);
  throw e;
});
