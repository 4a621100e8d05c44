"use strict";
// The data is what `gemmsmith layout --json` prints. Bytes are looked up in its units, never computed here.
const data = unpacked(JSON.parse(document.getElementById("data").textContent));
const { tile, boxes, atom, rows, columns, units, fragment, access, descriptor } = data;
const byId = (id) => document.getElementById(id);
const perUnit = 16 / tile.element_bytes, unitsOfBox = boxes.row_bytes / 16;
const UNITS_OF_LINE = 8, LEFT = 44; // pixels for the bytes at which lines begin
const canvases = [...document.querySelectorAll("canvas")];
if (!atom) {
  canvases.pop().closest("figure").remove();
  document.querySelector("figcaption").textContent = "No swizzle";
}
let mark = { row: Math.min(3, rows.count - 1), column: 0 };

const dark = matchMedia("(prefers-color-scheme: dark)");
const hue = (i, count) => `hsl(${Math.round((i * 360) / count)} ${dark.matches ? "45% 58%" : "70% 78%"})`;
const heat = (ways) => (ways === 1 ? "#8fd694" : `hsl(${Math.max(0, 48 - 10 * Math.log2(ways))} 95% 66%)`);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

/** Arrays of numbers, which are written as steps from row to row, restored; see _packed in layout.py. */
function unpacked(x) {
  if (x === null || typeof x !== "object") return x;
  if (Array.isArray(x)) return x.map(unpacked);
  if (!x.steps) return Object.fromEntries(Object.entries(x).map(([name, value]) => [name, unpacked(value)]));
  const { shape, steps } = x, width = shape.length > 1 ? shape[shape.length - 1] : 1;
  for (let i = width; i < steps.length; i++) steps[i] += steps[i - width];
  const nested = (array, [size, ...inner]) => {
    const count = array.length / size;
    return inner.length ? Array.from({ length: size }, (_, i) => nested(array.slice(i * count, (i + 1) * count), inner)) : array;
  };
  return nested(steps, shape);
}

/** The byte of an element in a layout, "without" or "with" the swizzle. */
const byteOf = (layout, row, column) =>
  units[layout][row][Math.floor(column / perUnit)] + (column % perUnit) * tile.element_bytes;

/** [thread, register, part] that hold an element in its instruction's fragment, which repeats through the tile. */
function holderOf(row, column) {
  const [mn, k] = tile.major === "K" ? [row, column] : [column, row];
  return fragment.holders[mn % fragment.rows][k % fragment.columns];
}

/** Geometry of a canvas: CSS pixels of a unit, and of a line. */
function geometry(canvas) {
  const lines = Math.ceil(tile.bytes / 128);
  return { width: (canvas.clientWidth - LEFT) / UNITS_OF_LINE, height: Math.max(6, Math.min(20, 14000 / lines)), lines };
}

/** The rectangle of `bytes` bytes from `byte` on, within a unit. */
function rectangle(g, byte, bytes) {
  const left = Math.round(LEFT + ((byte % 128) / 16) * g.width);
  const right = Math.round(LEFT + (((byte % 128) + bytes) / 16) * g.width);
  return [left, Math.floor(byte / 128) * g.height, right - left, g.height];
}

function drawUnits(c, g, layout, paint) {
  units[layout].forEach((line, row) => line.forEach((byte, unit) => paint(row, unit, byte)));
}

const PAINTERS = {
  unit(c, g, layout) {
    drawUnits(c, g, layout, (row, unit, byte) => {
      const [x, y, w, h] = rectangle(g, byte, 16);
      c.fillStyle = hue(unit % unitsOfBox, Math.min(unitsOfBox, 8));
      c.fillRect(x, y, w - 1, h - 1);
      label(c, `${row}.${unit}`, x, y, w, h);
    });
  },
  lane(c, g, layout) {
    drawUnits(c, g, layout, (row, unit, byte) => {
      const threads = Array.from({ length: perUnit }, (_, i) => holderOf(row, unit * perUnit + i)[0]);
      for (let i = 0, end; i < perUnit; i = end) { // neighbors of one thread together
        for (end = i + 1; threads[end] === threads[i]; ) end++;
        const [x, y, w, h] = rectangle(g, byte + i * tile.element_bytes, (end - i) * tile.element_bytes);
        const lane = threads[i] % 32;
        c.fillStyle = hue(lane, 32);
        c.fillRect(x, y, w, h - 1);
        label(c, lane, x, y, w, h, "31");
      }
    });
  },
  access(c, g, layout) {
    c.fillStyle = style("--panel");
    drawUnits(c, g, layout, (row, unit, byte) => {
      const [x, y, w, h] = rectangle(g, byte, 16);
      c.fillRect(x, y, w - 1, h - 1);
    });
    const instruction = access.instructions[byId("instruction").value];
    instruction.rows.forEach((row, lane) => {
      const [x, y, w, h] = rectangle(g, byteOf(layout, row, instruction.columns[lane]), instruction.bytes);
      c.fillStyle = heat(instruction[layout].ways[lane]);
      c.fillRect(x, y, w - 1, h - 1);
      label(c, lane, x, y, w, h, "31");
    });
  },
};

/** Write a label in a rectangle if `widest` fits. */
function label(c, text, x, y, w, h, widest = text) {
  if (h < 12 || c.measureText(widest).width > w - 2) return;
  c.fillStyle = "#10151c";
  c.fillText(text, x + w / 2, y + h / 2);
}

function draw() {
  for (const canvas of canvases) {
    const g = geometry(canvas), ratio = Math.min(devicePixelRatio || 1, g.lines > 400 ? 1 : 2);
    const height = g.lines * g.height + 2;
    canvas.style.height = `${height}px`;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = height * ratio;
    const c = canvas.getContext("2d"), layout = canvas.dataset.layout;
    c.scale(ratio, ratio);
    c.font = "10.5px system-ui, sans-serif";
    c.textBaseline = "middle";
    c.textAlign = "center";
    PAINTERS[byId("color").value](c, g, layout);
    c.fillStyle = style("--quiet");
    c.textAlign = "right";
    for (let i = 0; i < g.lines; i += g.height < 12 ? 8 : 1) c.fillText(i * 128, LEFT - 6, (i + 0.5) * g.height);
    c.strokeStyle = style("--mark");
    c.lineWidth = 2;
    const byte = byteOf(layout, mark.row, mark.column);
    for (const [start, bytes, grow] of [[byte, tile.element_bytes, 0], [byte - (byte % 16), 16, 1]]) {
      const [x, y, w, h] = rectangle(g, start, bytes);
      c.strokeRect(x - grow, y - grow, w + 2 * grow - 1, h + 2 * grow - 1);
    }
  }
}

/** Show the marked element in words, and draw. */
function show() {
  const { row, column } = mark, unit = Math.floor(column / perUnit), box = Math.floor(unit / unitsOfBox);
  const place = (layout) => {
    const byte = byteOf(layout, row, column);
    return `<b id="byte-${layout}">${byte}</b>, bank <b id="bank-${layout}">${Math.floor(byte / 4) % 32}</b>`;
  };
  let text = `row <b id="row">${row}</b> (${rows.of}), column <b id="column">${column}</b> (${columns.of}${column >= columns.count - columns.padding ? ", padding" : ""}): unit ${unit}, box ${box}`;
  if (atom) text += `, atom ${Math.floor((box * boxes.bytes + row * boxes.row_bytes) / atom.bytes)}`;
  if (fragment) {
    const [thread, register, part] = holderOf(row, column);
    const half = fragment.elements_per_register > 1 ? `, part ${part}` : "";
    text += `; ${fragment.kind}: thread ${thread}, register ${register}${half}`;
  }
  byId("readout").innerHTML =
    `<p>${text}</p><p>without the swizzle: byte ${place("without")}; with it: byte ${place("with")}</p>`;
  draw();
}

function moveTo(row, column) {
  const clamp = (x, count) => Math.max(0, Math.min(count - 1, x));
  mark = { row: clamp(row, rows.count), column: clamp(column, columns.count) };
  show();
}

/** The element at a point of a canvas, or undefined. */
function elementAt(canvas, x, y) {
  const g = geometry(canvas), slot = Math.floor((x - LEFT) / g.width), line = Math.floor(y / g.height);
  const byte = line * 128 + slot * 16;
  if (slot < 0 || slot >= UNITS_OF_LINE) return undefined;
  const table = units[canvas.dataset.layout], row = table.findIndex((bytes) => bytes.includes(byte));
  if (row < 0) return undefined;
  const inUnit = Math.floor((((x - LEFT) / g.width) % 1) * perUnit);
  return [row, table[row].indexOf(byte) * perUnit + inUnit];
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
for (const canvas of canvases) {
  const point = (event) => {
    const found = elementAt(canvas, event.offsetX, event.offsetY);
    if (found && (found[0] !== mark.row || found[1] !== mark.column)) moveTo(...found);
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    moveTo(mark.row + step[0], mark.column + step[1]);
    const g = geometry(canvas), [, y] = rectangle(g, byteOf(canvas.dataset.layout, mark.row, mark.column), 1);
    const scroll = canvas.parentElement, visible = scroll.clientHeight - canvas.offsetTop - g.height;
    scroll.scrollTop = Math.max(y - visible, Math.min(scroll.scrollTop, y));
  });
  canvas.previousElementSibling.innerHTML = Array.from({ length: UNITS_OF_LINE }, (_, i) =>
    `<span>${i ? "" : "bank "}${i * 4}</span>`).join("");
  canvas.parentElement.addEventListener("scroll", () => {
    for (const other of canvases) other.parentElement.scrollTop = canvas.parentElement.scrollTop;
  });
}

function option(select, value, text) {
  select.append(new Option(text, value));
}

function showLegend() {
  const mode = byId("color").value;
  byId("instruction-label").hidden = mode !== "access";
  if (mode === "unit") byId("legend").textContent = "A color is a unit of a row; a label is row.unit.";
  if (mode === "lane") byId("legend").textContent = `A color is a lane of ${fragment.kind}, a number too, if it fits.${fragment.note && ` ${fragment.note}.`}`;
  if (mode === "access") {
    const { without, with: swizzled, name } = access.instructions[byId("instruction").value];
    const ways = [...new Set([...without.ways, ...swizzled.ways])].sort((a, b) => a - b);
    byId("legend").innerHTML =
      ways.map((n) => `<b style="background:${heat(n)}">${n === 1 ? "no conflict" : `${n}-way`}</b>`).join("") +
      ` ${name}, by lane; wavefronts: ${without.wavefronts} without the swizzle` +
      (atom ? `, ${swizzled.wavefronts} with it` : "") + `, ideal ${without.ideal}`;
  }
  draw();
}

/** Show the fields of the descriptor of a k-step. */
function showDescriptor() {
  const value = BigInt(descriptor.k_steps[byId("step").value]);
  byId("value").textContent = descriptor.k_steps[byId("step").value];
  const color = (i) => hue(i, descriptor.fields.length);
  byId("bits").setAttribute("aria-label", `bits 63 to 0: ${value.toString(2).padStart(64, "0")}`);
  byId("bits").replaceChildren(...Array.from({ length: 64 }, (_, i) => {
    const bit = 63 - i, cell = document.createElement("span");
    const field = descriptor.fields.findIndex((x) => bit >= x.first_bit && bit < x.first_bit + x.bits);
    cell.textContent = (value >> BigInt(bit)) & 1n;
    cell.title = `bit ${bit}: ${field < 0 ? "not used" : descriptor.fields[field].name}`;
    if (field < 0) cell.className = "unused";
    else cell.style.background = color(field);
    cell.dataset.field = field;
    return cell;
  }));
  byId("fields").replaceChildren(...descriptor.fields.map((x, i) => {
    const line = document.createElement("tr"), field = (value >> BigInt(x.first_bit)) & ((1n << BigInt(x.bits)) - 1n);
    const cells = [x.name, `${x.first_bit + x.bits - 1}-${x.first_bit}`, field, field.toString(2).padStart(x.bits, "0"), x.meaning];
    line.innerHTML = cells.map((text) => `<td>${text}</td>`).join("");
    line.firstChild.insertAdjacentHTML("afterbegin", `<i style="background:${color(i)}"></i>`);
    line.tabIndex = 0;
    const light = (on) => () =>
      document.querySelectorAll(`#bits [data-field="${i}"]`).forEach((cell) => cell.classList.toggle("lit", on));
    for (const [event, on] of [["pointerenter", true], ["focus", true], ["pointerleave", false], ["blur", false]])
      line.addEventListener(event, light(on));
    return line;
  }));
}

byId("title").textContent = `${tile.mn} x ${tile.k} ${tile.dtype}, ${tile.major}-major`;
byId("summary").textContent =
  `${tile.bytes} bytes, ` + (atom ? `swizzle ${tile.swizzle} (atoms of 8 x ${atom.row_bytes} bytes)` : "no swizzle") +
  `; TMA boxes: ${boxes.count} of ${boxes.rows} x ${boxes.columns} elements`;
option(byId("color"), "unit", "units of a row");
if (fragment) option(byId("color"), "lane", `lanes of ${fragment.kind}`);
if (access) {
  option(byId("color"), "access", "bank conflicts");
  access.instructions.forEach((x, i) => option(byId("instruction"), i, x.name));
}
byId("color").value = access ? "access" : fragment ? "lane" : "unit";
byId("source").textContent = descriptor.reason ? `None: ${descriptor.reason}.` : descriptor.source;
if (descriptor.reason) {
  for (const part of document.querySelectorAll("#descriptor table, #step-label, #bits")) part.remove();
} else {
  descriptor.k_steps.forEach((_, i) => option(byId("step"), i, i));
  byId("step").addEventListener("change", showDescriptor);
  showDescriptor();
}
byId("color").addEventListener("change", showLegend);
byId("instruction").addEventListener("change", showLegend);
new ResizeObserver(draw).observe(byId("grids"));
dark.addEventListener("change", () => { draw(); if (!descriptor.reason) showDescriptor(); });
show();
showLegend();
