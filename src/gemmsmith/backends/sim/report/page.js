// Steps through a simulated kernel. The data, see page.py, are columns: a list for each field of the events and so on.
// The state at a step is looked up: the last event of each barrier and of each group of threads up to the step. A step
// is an event's place in the columns; the user sees its number in the record, which differs if the first are cut.
"use strict";

const BARRIER_EVENTS = ["init", "arrive", "expect_tx", "complete_tx"];
const BUCKET = 512; // steps between two lists of live operations
const LANE = 24, AXIS = 20, FIRST_CYCLES = 4000;
const MAX_ROWS = 14; // of the table of operations
const COUNTS = { multiplies: "instructions of warps that multiply", macs: "multiply-adds",
  wavefronts: "wavefronts of shared memory", ideal_wavefronts: "the same without bank conflicts",
  sectors: "sectors of global memory (32 bytes)", ideal_sectors: "the same if coalesced",
  loaded: "bytes that asynchronous copies have loaded" };

const $ = (id) => document.getElementById(id);
let data, events, operations, spans, fills;
let step = 0, cta = 0, timer = null, addressTimer = null, fromCycle = 0, toCycle = 1, marked = [];
let size = null, colors = {}, shownLine = null; // of the canvas; the line of CUDA
let picked = null, related = null; // what was clicked, as "kind key", and what it has to do with, by kind
let pictures = { count: 0, time: 0 }; // that were drawn while it played, and the milliseconds that they took

// -- data ----------------------------------------------------------------------------------------
// The first schedule has all fields, the others those that differ.
async function load(schedule) {
  const parts = $("data").textContent.trim().split("\n");
  const texts = [...new Set([0, schedule])].map((i) => {
    const packed = Uint8Array.from(atob(parts[i]), (x) => x.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  });
  return Object.assign({ schedule }, ...(await Promise.all(texts)).map((x) => JSON.parse(x)));
}

const numberOf = (i) => (i < data.begin ? data.before[i] : i - data.begin + data.first);
const stepOf = (number) => number - data.first + data.begin;
const isShown = (i) => i >= data.begin && i < data.count;

function prepare(loaded) {
  data = loaded;
  data.begin = data.before.length;
  ({ events, operations, spans, fills } = data);
  for (const part of [events, operations, spans, data.idle, data.counted]) {
    for (const name of data.differences.filter((x) => x in part)) {
      let sum = 0;
      part[name] = part[name].map((x) => (sum += x));
    }
  }
  data.count = events.kind.length;
  data.kindOf = (i) => data.kinds[events.kind[i]];
  data.laneOfAgent = data.agents.map(([c, name]) => data.lanes.findIndex((x) => x[0] === c && x[1] === name));
  data.agentOfLane = data.lanes.map((_, lane) => data.laneOfAgent.indexOf(lane));
  data.threads = [...data.agents.keys()].filter((i) => !data.engines.includes(data.agents[i][1]))
    .sort((x, y) => data.laneOfAgent[x] - data.laneOfAgent[y] || data.agents[x][1].localeCompare(data.agents[y][1]));
  data.eventsOfAgent = data.agents.map(() => []);
  data.eventsOfBarrier = data.objects.map(() => []);
  data.resumesOfObject = data.objects.map(() => []);
  data.steps = Array.from({ length: Math.ceil(data.grid / data.cluster[0]) }, () => []); // of each cluster
  for (let i = 0; i < data.count; ++i) {
    data.eventsOfAgent[events.agent[i]].push(i);
    if (isShown(i)) data.steps[clusterOf(data.agents[events.agent[i]][0])].push(i);
    if (BARRIER_EVENTS.includes(data.kindOf(i))) data.eventsOfBarrier[events.object[i]].push(i);
    if (data.kindOf(i) === "resume") data.resumesOfObject[events.object[i]].push(i);
  }
  // Hazards that were found in an event that is shown, in the order of the steps.
  const toStep = (x) => ({ ...x, event: x.event === null ? undefined : stepOf(x.event) });
  data.found = data.hazards.map((x, i) => ({ ...toStep(x), i, places: x.places.map(toStep) }))
    .filter((x) => isShown(x.event)).sort((x, y) => x.event - y.event);
  data.spansOfLane = data.lanes.map(() => []);
  spans.lane.forEach((lane, i) => data.spansOfLane[lane].push(i));
  data.fillsOfSlot = new Map();
  fills.cta.forEach((c, i) => {
    const key = `${c} ${data.buffers[fills.buffer[i]]}`;
    if (!data.fillsOfSlot.has(key)) data.fillsOfSlot.set(key, []);
    data.fillsOfSlot.get(key).push(i);
  });
  prepareOperations();
  prepareCounts();
}

// Of each CTA: the events that count, and the sums up to each.
function prepareCounts() {
  data.sumsOfCta = Array.from({ length: data.grid }, () => ({ events: [], sums: [] }));
  data.counted.event.forEach((event, i) => {
    const own = data.sumsOfCta[data.counted.cta[i]], last = own.sums.at(-1);
    own.events.push(event);
    own.sums.push(data.counts[data.counted.counts[i]].map((x, j) => x + (last?.[j] ?? 0)));
  });
}

// An operation is live from its issue to its completion or, if threads wait for it, to the end of the wait.
function prepareOperations() {
  const issues = operations.issue;
  data.liveUntil = issues.map((_, i) => {
    const complete = operations.complete[i] < 0 ? Infinity : operations.complete[i];
    if (operations.wait[i] >= 0) return Math.max(complete, operations.wait[i]);
    return data.routes[operations.route[i]].registers.length ? Infinity : complete;
  });
  const numbers = new Map(data.lanes.map((x, i) => [x.join(" "), i]));
  data.operationsOfLane = data.lanes.map(() => []);
  issues.forEach((x, i) => {
    const lane = `${data.agents[events.agent[x]][0]} ${data.routes[operations.route[i]].engine}`;
    data.operationsOfLane[numbers.get(lane)]?.push(i);
  });
  data.operationOf = new Map(issues.flatMap((x, i) => [[x, i], [operations.complete[i], i]])); // by event
  data.lastOfWait = new Map(); // the last completion of the operations that a wait is for
  operations.wait.forEach((wait, i) => {
    data.lastOfWait.set(wait, Math.max(data.lastOfWait.get(wait) ?? -1, operations.complete[i]));
  });
  data.waitOfLast = new Map([...data.lastOfWait].map(([wait, last]) => [last, wait]));
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
    const state = { cta: c, name, object, event, waits: waiting.get(object) ?? [] };
    if (event < 0) return [state];
    const count = data.kindOf(own[0]) === "init" ? events.amount[own[0]] : null;
    const [phase, pending, bytes] = [events.phase, events.pending, events.bytes].map((x) => x[event]);
    return [{ ...state, count, phase, pending, bytes }];
  });
}

// What has changed a barrier in its phase, from the event on that completed the phase before.
function eventsOfPhase(x) {
  const own = data.eventsOfBarrier[x.object], end = indexUpTo(own, x.event);
  let first = end;
  while (first > 0 && events.phase[own[first - 1]] === x.phase) --first;
  return own.slice(first, end + 1);
}

// Of each group of threads: the last event, and the object and phase for which it waits, or object -1.
function threadsAt(at) {
  return data.threads.flatMap((i) => {
    const agent = data.agents[i], event = lastUpTo(data.eventsOfAgent[i], at);
    if (event < 0) return [];
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
    const result = { cta: +c, name: name.join(" "), state: "empty", holds: "", event: -1, load: -1 };
    if (position < 0) return result;
    const i = own[position], happened = (x) => x >= 0 && x <= at;
    const last = Math.max(...[fills.load, fills.full, fills.read, fills.free].map((x) => x[i]).filter(happened));
    const state = !happened(fills.full[i]) ? "loading" : happened(fills.free[i]) ? "empty"
      : happened(fills.read[i]) ? "read" : "full";
    return { ...result, state, holds: state === "empty" ? "" : data.holds[fills.holds[i]], event: last,
      load: fills.load[i] };
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

// What a slot's state does not tell of live operations: reads unless it is read, and loads that its last load overtook.
function othersInSlot(x, at) {
  const groups = new Map(), uses = (part) => part.some(([c, name]) => c === x.cta && name === x.name);
  for (const i of operationsAt(at)) {
    const route = data.routes[operations.route[i]], issue = operations.issue[i], isOld = issue < x.load;
    const complete = operations.complete[i] >= 0 && operations.complete[i] <= at;
    const access = x.state !== "read" && uses(route.reads) ? "read"
      : isOld && !complete && uses(route.writes) ? "loaded" : "";
    const key = `${isOld && !complete ? "still " : ""}${access} by ${route.label}|${complete ? ", not waited for" : ""}`;
    if (access) groups.set(key, [...(groups.get(key) ?? []), numberOf(issue)]);
  }
  return [...groups].map(([key, steps]) => {
    const [what, state] = key.split("|"), count = steps.length;
    return what + (count > 1 ? ` × ${count}, steps ${steps[0]} to ${steps.at(-1)}` : `, step ${steps[0]}`) + state;
  });
}

// Of each CTA: the counts up to a step, in the order of data.count_names.
function countsAt(at) {
  return data.sumsOfCta.map(({ events: own, sums }) => sums[indexUpTo(own, at)] ?? data.count_names.map(() => 0));
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

// Returns the ends of waits that an event brings about.
function effectsOf(i) {
  const isOfBarrier = BARRIER_EVENTS.includes(data.kindOf(i));
  const waits = isOfBarrier ? data.resumesOfObject[events.object[i]] : [data.waitOfLast.get(i)];
  return waits.filter((x) => x > i && (!isOfBarrier || events.phase[x] === events.phase[i] - 1) && causeOf(x) === i);
}


// -- text --------------------------------------------------------------------------------------------
function element(tag, text = "", className = "") {
  const result = document.createElement(tag);
  result.textContent = text;
  if (className) result.className = className;
  return result;
}

function stepLink(i) {
  const link = element(isShown(i) ? "a" : "span", `step ${numberOf(i)}`);
  if (isShown(i)) link.href = hashOf(i);
  return link;
}

const hashOf = (i) => `#step=${numberOf(i)}${data.schedules ? `&seed=${data.seed}` : ""}`;
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

// -- what was clicked ------------------------------------------------------------------------------------
// Returns a button that shows only what a lane, barrier, slot or route has to do with.
function pickable(kind, key, className = "") {
  const result = element("button", "", className);
  result.dataset.pick = `${kind} ${key}`;
  result.setAttribute("aria-pressed", picked === result.dataset.pick);
  result.classList.toggle("dim", isDim(kind, key));
  return result;
}

const isDim = (kind, key) => related !== null && !related[kind].has(key);

function pick(what) {
  picked = picked === what ? null : what;
  related = picked && relatedTo(picked);
  $("picked").textContent = picked ? "What is unrelated is pale. Escape, or a second click, shows all." : "";
  keepFocus(buildLanes);
  show();
}

// Builds buttons anew, and focuses the one that takes the place of the focused one.
function keepFocus(build) {
  const focused = document.activeElement?.dataset.pick;
  build();
  if (focused) document.querySelector(`[data-pick="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

// What takes part in an operation, or in an event of a barrier, is related.
function relatedTo(what) {
  const result = { lane: new Set(), barrier: new Set(), slot: new Set(), route: new Set() };
  const [, kind, name] = what.match(/^(\S+) (.*)$/), key = kind === "slot" ? name : +name;
  const relate = (parts) => {
    if (!parts[kind]?.includes(key)) return;
    for (const [x, keys] of Object.entries(parts)) for (const y of keys) result[x].add(y);
  };
  result[kind].add(key);
  for (let i = 0; i < data.count; ++i) {
    if (events.object[i] < 0 || !data.eventsOfBarrier[events.object[i]].length || data.kindOf(i) === "init") continue;
    relate({ lane: [data.laneOfAgent[events.agent[i]]], barrier: [events.object[i]] });
  }
  for (let i = 0; i < operations.issue.length; ++i) relate(partsOf(i));
  return result;
}

function partsOf(operation) {
  const route = data.routes[operations.route[operation]], issuer = data.agents[events.agent[operations.issue[operation]]];
  const lanes = [issuer, [issuer[0], route.engine]];
  const barriers = [], first = operations.complete[operation];
  for (let i = first; i >= 0 && events.agent[i] === events.agent[first] && events.object[i] >= 0; ++i) {
    barriers.push(events.object[i]);
    if (data.operationOf.has(i + 1)) break;
  }
  return { lane: lanes.map(([c, name]) => data.lanes.findIndex((x) => x[0] === c && x[1] === name)), barrier: barriers,
    slot: [...route.reads, ...route.writes].filter(([c]) => c >= 0).map((x) => x.join(" ")),
    route: [operations.route[operation]] };
}

// -- panels --------------------------------------------------------------------------------------------
function showStages() {
  const slots = stagesAt(step).filter((x) => x.cta === cta);
  const names = { read: "being read" }, readers = fills.read.some((x) => x >= 0);
  showRows("stages", slots, "No asynchronous copy loads shared memory of this CTA.", (x, slot) => {
    const cell = pickable("slot", `${x.cta} ${x.name}`, `slot ${x.state}${x.event === step ? " now" : ""}`);
    const others = othersInSlot(x, step).map((y) => element("span", y, "other"));
    cell.append(element("span", `${slot} ${names[x.state] ?? x.state}`), element("span", x.holds || "\u00a0"),
      ...others);
    return cell;
  });
  const note = "The record has no reads by threads: a stage is full until its next load.";
  if (slots.length && !readers) $("stages").append(element("p", note, "muted"));
}

function showBarriers() {
  const own = barriersAt(step).filter((x) => clusterOf(x.cta) === clusterOf(cta)
    && (x.cta === cta || x.name === "cluster barrier"));
  showRows("barriers", own, "This CTA uses no barrier.", (x, slot) => {
    const card = element("div", "", `card${x.event === step ? " now" : ""}`), state = pickable("barrier", x.object);
    card.dataset.barrier = x.name;
    card.classList.toggle("dim", isDim("barrier", x.object));
    card.append(state);
    if (x.event < 0) {
      state.append(element("span", `${slot} not used yet`));
    } else {
      const arrivals = x.count === null ? number(x.pending) : `${x.pending} of ${x.count}`;
      state.append(element("span", `${slot} phase ${x.phase}${x.count === null ? "" : `, parity ${x.phase % 2}`}`));
      state.append(element("span", `pending ${x.count === null ? "threads" : "arrivals"}: ${arrivals}`));
      if (x.bytes) state.append(element("span", `awaited bytes: ${number(x.bytes)}`));
      eventsOfPhase(x).forEach((i, position) => {
        const [owner, by] = data.agents[events.agent[i]], { python } = data.statements[events.statement[i]] ?? {};
        const kind = data.kindOf(i), amount = plural(events.amount[i], kind === "arrive" ? "arrival" : "byte");
        const what = { init: "init", expect_tx: `expects ${amount}` }[kind] ?? amount;
        const completes = position || x.phase < 1 ? "" : `, completes phase ${x.phase - 1}`;
        const line = element("div", `← ${owner === cta ? "" : `CTA ${owner} `}${by}: ${what}${completes}, `, "muted");
        line.append(stepLink(i), python ? `, ${python.file}:${python.line}` : "");
        card.append(line);
      });
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
    for (const x of row) {
      const cell = element(i ? "td" : "th", x instanceof Node ? "" : x);
      if (x instanceof Node) cell.append(x);
      line.append(cell);
    }
    line.classList.toggle("dim", row.isDim === true);
  }
  $(id).replaceChildren(table);
}

function showThreads() {
  const own = threadsAt(step).filter((x) => x.cta === cta), exited = own.filter((x) => x.exited);
  const rows = own.filter((x) => !x.exited).map((x) => {
    const at = data.statements[events.statement[x.event]]?.instruction ?? "";
    const state = x.object >= 0 ? `waits for ${data.objects[x.object][1]}${waitText(x.event)}` : "runs";
    const row = [x.name, state, `${at} ${loopsText(x.event)}`, number(events.time[x.event])];
    return Object.assign(row, { isDim: isDim("lane", data.laneOfAgent[x.agent]) });
  });
  if (exited.length) {
    rows.push(Object.assign([exited.map((x) => x.name).join(", "), "exited", "", ""], { isDim: related !== null }));
  }
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
    const group = committed ? `group of step ${numberOf(commit)}` : commit >= 0 ? "not committed" : "";
    // wgmmas of a group read different parts of one slot.
    const key = [route.label, routeText(route), group, state, issuer[1]].join("|");
    const entry = groups.get(key) ?? { count: 0, bytes: 0, route, group, state, issuer: issuer[1],
      number: operations.route[i] };
    entry.count += 1;
    entry.bytes += operations.bytes[i];
    groups.set(key, entry);
  }
  const rows = [...groups.values()].map((x) => {
    const label = pickable("route", x.number, "plain");
    label.textContent = `${x.route.label}${x.count > 1 ? ` × ${x.count}` : ""}`;
    const state = [x.state, x.group].filter((y) => y).join(", ");
    const row = [label, routeText(x.route), x.bytes ? number(x.bytes) : "", state, x.issuer];
    return Object.assign(row, { isDim: isDim("route", x.number) });
  });
  const shown = rows.slice(0, MAX_ROWS);
  if (rows.length > MAX_ROWS) shown.push([`and ${rows.length - MAX_ROWS} more`, "", "", "", ""]);
  showTable("operations", ["operation", "from → to", "bytes", "state", "issued by"], shown,
    "This CTA has no operation in flight, and none to wait for.");
}

function showCounts() {
  const all = countsAt(step), own = all[cta] ?? [];
  const rows = data.count_names.map((name, i) => [COUNTS[name], number(own[i]),
    number(all.reduce((sum, x) => sum + x[i], 0))]);
  showTable("counts", ["up to this step", `CTA ${cta}`, "launch"], rows, "");
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
  if (line === shownLine) return;
  shownLine = line;
  const top = line.offsetTop - box.offsetTop, height = box.clientHeight;
  if (top < box.scrollTop + 20 || top > box.scrollTop + height - 60) box.scrollTop = top - height / 3;
}

const isAt = (place, lane) => place.agent?.startsWith(`CTA ${data.lanes[lane].join(" ")}`);
const laneOfHazard = (found) => shownLanes().find((lane) => found.places.length && isAt(found.places[0], lane))
  ?? data.laneOfAgent[events.agent[found.event]];
const hazardsHere = () => data.found.filter((x) => x.event === step);

function buildHazards() {
  $("hazards").replaceChildren(...data.hazards.map((x, i) => {
    const box = element("div", "", "found"), found = data.found.find((y) => y.i === i);
    box.dataset.hazard = i;
    if (found) {
      const jump = element("button", `Step ${x.event}`);
      jump.addEventListener("click", () => goTo(found.event, true));
      box.append(jump);
    } else if (x.event !== null) {
      box.append(element("div", `Found at step ${x.event}, which is cut.`, "muted"));
    }
    box.append(element("b", x.kind), element("div", x.message));
    const places = document.createElement("ol");
    for (const y of (found ?? x).places) {
      const who = y.agent ? `${y.access || "executed"} by ${y.agent} ` : "";
      const loops = Object.entries(y.loops ?? {}).map(([name, index]) => `${name} ${index}`).join(", ");
      const item = element("li", `${who}${loops ? `[${loops}] ` : ""}at `);
      const cuda = y.cuda ? `; CUDA line ${y.cuda.line}` : "";
      item.append(element("code", `${y.python.file}:${y.python.line} ${y.python.text}${cuda}`));
      if (found && isShown(y.event) && y.event !== found.event) {
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
    const [c, name] = data.lanes[i], button = pickable("lane", i);
    button.textContent = many ? `${c} ${name}` : name;
    button.title = `CTA ${c} ${name}: its next step, and what it has to do with`;
    button.dataset.lane = i;
    return button;
  }));
  $("canvas").style.height = `${shownLanes().length * LANE + AXIS}px`;
  size = null;
}

// Takes what the layout and the style decide; neither is asked for in each picture, which would compute them anew.
function resize() {
  const canvas = $("canvas"), scale = devicePixelRatio || 1, style = getComputedStyle(document.documentElement);
  size = { width: canvas.clientWidth, height: canvas.clientHeight, scale };
  canvas.width = size.width * scale;
  canvas.height = size.height * scale;
  colors = {};
  for (const name of ["line", "muted", "danger", "accent"]) colors[name] = style.getPropertyValue(`--${name}`).trim();
}

// Returns the cycle up to which what a lane shows has happened at a step; -1 if nothing has.
function reachedAt(at, lane) {
  const now = events.time[at] ?? 0, agent = data.agentOfLane[lane], issued = data.operationsOfLane[lane];
  // Threads that multiply synchronously are the only ones that a tensor core works for.
  if (agent < 0 && !issued.length) {
    const own = data.threads.filter((i) => data.agents[i][0] === data.lanes[lane][0]).map((i) => data.laneOfAgent[i]);
    return Math.max(-1, ...own.filter((x) => x >= 0).map((x) => reachedAt(at, x)));
  }
  const own = data.eventsOfAgent[agent] ?? [], i = indexUpTo(own, at), time = events.time[own[i]] ?? -1;
  const goesOn = i >= 0 && data.kindOf(own[i]) === "block" ? events.time[own[i + 1]] ?? now : -1;
  const ends = operations.end[issued[indexUpTo(issued, at, (x) => operations.issue[x])]] ?? -1;
  return Math.max(time, Math.min(now, Math.max(goesOn, ends)));
}

function draw() {
  if (!size) resize();
  const pen = $("canvas").getContext("2d"), { width, height, scale } = size, color = (name) => colors[name];
  const x = (cycle) => ((cycle - fromCycle) / (toCycle - fromCycle)) * width;
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  const lanes = shownLanes(), now = events.time[step] ?? 0;
  drawAxis(pen, x, lanes.length * LANE, width, color);
  lanes.forEach((lane, row) => {
    const top = row * LANE, until = reachedAt(step, lane); // what follows is pale
    const strength = isDim("lane", lane) ? 0.25 : 1;
    for (const [alpha, from, to] of [[1, fromCycle, until], [0.3, Math.max(fromCycle, until), toCycle]]) {
      pen.globalAlpha = alpha * strength;
      if (from < to) drawSpans(pen, lane, top, x, from, Math.min(to, toCycle));
    }
    pen.globalAlpha = 1;
    pen.fillStyle = color("line");
    pen.fillRect(0, top + LANE - 1, width, 1);
  });
  for (const found of data.found) {
    const row = lanes.indexOf(laneOfHazard(found)), at = x(events.time[found.event]);
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

// Draws arrows: from the event that ended a wait to this step, from this step to the waits that it ends and, at a
// hazard, dashed ones from each earlier access to the one that is not ordered after it.
function drawCauses(pen, x, lanes, color) {
  const row = (i) => lanes.indexOf(data.laneOfAgent[events.agent[i]]);
  const place = (i) => [x(events.time[i]), (row(i) + 0.5) * LANE];
  const missing = hazardsHere().flatMap((found) => found.places.slice(1).map((y) => y.event ?? -1));
  const arrows = [[causeOf(step), step, "accent", []], ...effectsOf(step).map((i) => [step, i, "accent", []]),
    ...missing.map((i) => [i, step, "danger", [5, 4]])];
  for (const [from, to, name, dash] of arrows) {
    if (from < 0 || row(from) < 0 || row(to) < 0) continue;
    const [left, top] = place(from), [right, bottom] = place(to), turn = Math.atan2(bottom - top, right - left);
    pen.strokeStyle = pen.fillStyle = color(name);
    pen.lineWidth = 2;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(left, top);
    pen.lineTo(right, bottom);
    pen.stroke();
    pen.beginPath();
    pen.arc(left, top, 4, 0, 2 * Math.PI);
    pen.moveTo(right, bottom);
    for (const side of [0.4, -0.4]) pen.lineTo(right - 10 * Math.cos(turn + side), bottom - 10 * Math.sin(turn + side));
    pen.fill();
  }
  pen.setLineDash([]);
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
  const end = data.cycles * 1.02, length = Math.min(Math.max(to - from, 20), end - data.start);
  fromCycle = Math.min(Math.max(data.start, from), end - length);
  toCycle = fromCycle + length;
  draw();
}

function zoom(factor, center = events.time[step] ?? 0) {
  setView(center - (center - fromCycle) * factor, center + (toCycle - center) * factor);
}

// -- steps -----------------------------------------------------------------------------------------------
// Goes to a step; `follow` shows the CTA of its event.
function goTo(to, follow = false) {
  step = Math.min(Math.max(data.begin, Math.round(to) || 0), Math.max(0, data.count - 1));
  const own = data.count ? data.agents[events.agent[step]][0] : 0;
  if (follow || clusterOf(own) !== clusterOf(cta)) setCta(own);
  const now = events.time[step] ?? 0;
  if (now < fromCycle || now > toCycle) {
    const length = toCycle - fromCycle;
    setView(now - length / 4, now + (3 * length) / 4);
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
  if (isShown(next)) goTo(next);
}

function nextHazard() {
  const next = data.found.find((x) => x.event > step) ?? data.found[0];
  if (!next) return;
  goTo(next.event, true);
  $("event-section").scrollIntoView({ block: "nearest" });
}

function play(on = timer === null) {
  cancelAnimationFrame(timer);
  timer = null;
  if (on) {
    let last = performance.now(), owed = 0, wasDrawn = false;
    const next = (now) => {
      timer = requestAnimationFrame(next);
      pictures = wasDrawn ? { count: pictures.count + 1, time: pictures.time + now - last } : pictures;
      owed += (Math.max(0, now - last) * +$("speed").value) / 1000;
      last = now;
      wasDrawn = owed >= 1;
      if (!wasDrawn) return;
      const before = step;
      move(Math.floor(owed));
      owed %= 1;
      if (step === before) play(false);
    };
    timer = requestAnimationFrame(next);
  } else if (pictures.count) {
    $("pictures").textContent = `While playing: ${Math.round((1000 * pictures.count) / pictures.time)} pictures a second.`;
  }
  $("play").setAttribute("aria-pressed", on);
  $("event").setAttribute("aria-live", on ? "off" : "polite");
  $("play").textContent = on ? "Pause" : "Play";
}

function show() {
  if (!data.count) return;
  $("number").value = $("slider").value = numberOf(step);
  const ends = step === data.steps[clusterOf(cta)].at(-1) && step < data.count - 1;
  const last = data.all_events - 1, which = numberOf(data.count - 1) < last ? "last shown" : "last";
  $("total").textContent = `of ${number(last)}${ends ? `, the ${which} of this cluster` : ""}`;
  $("clock").textContent = `cycle ${number(events.time[step])}`;
  $("event").textContent = eventText(step);
  const cause = causeOf(step);
  if (cause >= 0) $("event").append("; ended by ", stepLink(cause), ` of ${data.agents[events.agent[cause]][1]}`);
  $("link").href = hashOf(step);
  clearTimeout(addressTimer); // browsers limit how often an address may change
  addressTimer = setTimeout(() => history.replaceState(null, "", hashOf(step)), 300);
  keepFocus(() => {
    showStages();
    showBarriers();
    showOperations();
  });
  showThreads();
  showCounts();
  showSource();
  const here = hazardsHere();
  for (const x of $("hazards").children) x.classList.toggle("now", here.some((y) => y.i === +x.dataset.hazard));
  $("here").replaceChildren(...[...$("hazards").querySelectorAll(".now")].map((x) => x.cloneNode(true)));
  for (const x of $("here").querySelectorAll("button")) x.remove();
  for (const x of $("names").children) {
    x.classList.toggle("now", data.laneOfAgent[events.agent[step]] === +x.dataset.lane);
    x.classList.toggle("hazard", here.some((y) => y.places.some((z) => isAt(z, x.dataset.lane))));
  }
  draw();
}

// -- the page --------------------------------------------------------------------------------------------
function buildPage() {
  data.cycles = Math.max(1, lastTime());
  $("summary").textContent = `${plural(data.grid, "CTA")}, clusters of ${data.cluster[0]}, schedule of seed `
    + `${data.seed}: ${plural(data.all_events, "event")} in ${plural(data.all_cycles, "cycle")} of the cost model. `
    + `${data.hazards.length ? plural(data.hazards.length, "hazard") : "No hazards"}; verdict: ${data.verdict}.`;
  const shown = data.count - data.begin, last = numberOf(Math.max(data.begin, data.count - 1));
  buildSchedules();
  $("notice").hidden = data.all_events === shown;
  if (data.all_events > shown) {
    const which = data.first ? `${plural(shown, "event")} from step ${number(data.first)} on` : `first ${plural(shown, "event")}`;
    notice(`Only the ${which} are shown, cycles ${number(data.start)} to ${number(data.cycles)}; `
      + `${number(data.all_events - shown)} are cut. To see others, choose the first step: gemmsmith simulate --html FILE `
      + "--first-step NUMBER, or Simulation.to_html(path, first_step=NUMBER).", data.first ? "status" : "alert");
  }
  $("number").min = $("slider").min = data.first;
  $("number").max = $("slider").max = last;
  $("cta").replaceChildren(...Array.from({ length: data.grid }, (_, i) => new Option(i, i)));
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
  buildLanes();
  setCta(Math.min(cta, data.grid - 1));
  fromCycle = data.start;
  toCycle = Math.min(fromCycle + FIRST_CYCLES, data.cycles * 1.02);
}

const lastTime = () => events.time.reduce((x, y) => Math.max(x, y), 0);

function notice(text, role = "alert") {
  $("notice").setAttribute("role", role);
  $("notice").textContent = text;
  $("notice").hidden = false;
}

function listen() {
  $("schedule").addEventListener("input", () => setSchedule(+$("schedule").value, () => goTo(step)));
  const click = { "next-seed": nextSeed, back: () => move(-1), forward: () => move(1), play: () => play(), hazard: nextHazard,
    in: () => zoom(0.5), out: () => zoom(2), fit: () => setView(0, Infinity) };
  for (const [id, action] of Object.entries(click)) $(id).addEventListener("click", action);
  $("number").addEventListener("change", () => goTo(stepOf(+$("number").value)));
  $("slider").addEventListener("input", () => goTo(stepOf(+$("slider").value)));
  document.addEventListener("click", (e) => {
    const button = e.target.closest?.("[data-pick]");
    if (!button) return;
    if (button.dataset.lane && button.dataset.pick !== picked) stepInLane(+button.dataset.lane, 1);
    pick(button.dataset.pick);
  });
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
  const drawAnew = () => {
    size = null;
    draw();
  };
  new ResizeObserver(drawAnew).observe($("canvas"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAnew);
  listenToCanvas($("canvas"));
}

function onKey(e) {
  if (e.ctrlKey || e.metaKey || e.altKey || e.target.matches?.("select, input")) return;
  const lane = data.laneOfAgent[events.agent[step]];
  const arrow = (count) => (e.shiftKey ? stepInLane(lane, count) : move(count));
  const action = { ArrowRight: () => arrow(1), ArrowLeft: () => arrow(-1), h: nextHazard, H: nextHazard,
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => setView(0, Infinity),
    Home: () => move(-Infinity), End: () => move(Infinity),
    Escape: picked ? () => pick(picked) : null,
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
    const own = (data.eventsOfAgent[data.laneOfAgent.indexOf(lane)] ?? []).filter(isShown), at = cycleAt(e);
    const distance = (i) => Math.abs(events.time[i] - at);
    if (own.length) goTo(own.reduce((x, y) => (distance(y) < distance(x) ? y : x)));
  });
}

function goToHash() {
  const [, number, seed] = location.hash.match(/^#step=(\d+)(?:&seed=(\d+))?$/) ?? [];
  const schedule = data.schedules?.findIndex((x) => x.seed === +seed) ?? -1;
  if (schedule >= 0 && schedule !== data.schedule) return setSchedule(schedule, () => goTo(stepOf(+number)));
  goTo(number === undefined ? step : stepOf(+number));
}

// Shows another schedule, and then calls `goOn`; of calls in quick succession, the last one counts.
async function setSchedule(schedule, goOn) {
  play(false);
  $("schedule").value = schedule;
  const loaded = await load(schedule);
  if (+$("schedule").value !== schedule) return;
  picked = related = null;
  $("picked").textContent = "";
  prepare(loaded);
  buildPage();
  goOn();
}

function nextSeed() {
  const all = data.schedules.map((x, i) => i), after = [...all.slice(data.schedule + 1), ...all.slice(0, data.schedule + 1)];
  setSchedule(after.find((i) => data.schedules[i].hazards), () => (data.found.length ? goTo(data.found[0].event, true) : goTo(step)));
}

function buildSchedules() {
  $("schedules").hidden = !data.schedules;
  if (!data.schedules) return;
  const bad = data.schedules.filter((x) => x.hazards), { seed, hazards } = data.schedules[data.schedule];
  $("schedule").max = data.schedules.length - 1;
  $("schedule").value = data.schedule;
  $("first-seed").textContent = data.schedules[0].seed;
  $("last-seed").textContent = data.schedules.at(-1).seed;
  $("schedule").setAttribute("aria-valuetext", `seed ${seed}`);
  $("seed").textContent = `seed ${seed}: ${hazards ? plural(hazards, "hazard") : "no hazards"}. `
    + `${bad.length} of ${data.schedules.length} seeds have hazards${bad.length ? `: ${bad.map((x) => x.seed).join(", ")}` : ""}.`;
  $("next-seed").disabled = !bad.length;
}

async function start() {
  if (typeof DecompressionStream === "undefined") {
    return notice("This browser has no DecompressionStream, which reads the page's data. Any of 2023 or later has it.");
  }
  prepare(await load(0));
  buildPage();
  listen();
  goToHash();
  if (!data.count) notice("The simulation has no events.");
  requestAnimationFrame((now) => {
    performance.measure("first picture", { start: 0, end: now });
    $("first").textContent = `First picture of this page after ${(now / 1000).toFixed(2)} s.`;
  });
}

start().catch((e) => {
  notice(`The page cannot be shown: ${e.message}`);
  throw e;
});
