// Draws the curve: stacked memory against its limit, file pages as a line beside it, events above and below.
// Everything is drawn anew when the width changes, so that texts keep their size on a small screen.

let data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const LAYERS = [
  { key: "anon", label: "anonymous" },
  { key: "shmem", label: "shared" },
  { key: "swap", label: "swap" },
];
let byProcess = false;

// What is stacked: the kinds of memory, or the largest processes, each as if it shared nothing.
function layersNow() {
  if (!byProcess) return LAYERS.map((layer) => ({ ...layer, values: data[layer.key] }));
  return data.processes.map((process, i) => ({ key: `p${i}`, label: `${process.name} (${process.pid})`, values: heldBy(process) }));
}

// A process is listed now and then: in between it holds what it held.
function heldBy(process) {
  if (!process.values) {
    let next = 0, held = 0;
    process.values = data.x.map((x) => {
      while (next < process.points.length && process.points[next][0] <= x + 1e-3) {
        held = process.points[next][1];
        next += 1;
      }
      return held;
    });
  }
  return process.values;
}

const NARROW = 560;
const MANY = 40; // events: more lines than that would hide the curve
const WEIGHTS = ["quiet", "mark", "warn", "grave"];
const highest = (values) => values.reduce((most, value) => Math.max(most, value), 0);
let filePeak = data ? highest(data.file) : 0;

function load(fresh) {
  data = fresh;
  filePeak = highest(data.file);
}

function make(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

function label(parent, text, x, y, attributes) {
  const element = make("text", { x, y, ...attributes }, parent);
  element.textContent = text;
  return element;
}

// What the top of the axis may be: a limit far above the memory, or a large mapped file, would flatten the curve.
function scales() {
  const memory = Math.max(data.peak ? data.peak.bytes : 0, highest(data.total), 1);
  const thresholds = data.thresholds.map((threshold) => threshold.bytes);
  const line = Math.max(memory, data.limit || 0, ...thresholds);
  const files = Math.max(line, filePeak);
  const choices = [{ label: "memory", top: memory * 1.15 }];
  if (line > memory * 1.05) choices.push({ label: "limit", top: line * 1.08 });
  if (files > line * 1.05) choices.push({ label: "file pages", top: files * 1.08 });
  return choices;
}

function firstScale(choices) {
  const memory = choices[0].top;
  const fitting = choices.filter((choice) => choice.top <= memory * 6);
  const withFiles = fitting.length === 3 && fitting[2].top > fitting[1].top * 2.5;
  return fitting[fitting.length - (withFiles ? 2 : 1)];
}

// Pieces between gaps, as [first, last] of the samples' numbers.
function pieces() {
  const breaks = new Set(data.gaps.map((gap) => gap[1].toFixed(3)));
  const found = [];
  let begin = 0;
  for (let i = 1; i <= data.x.length; i += 1) {
    if (i === data.x.length || breaks.has(data.x[i].toFixed(3))) {
      found.push([begin, i - 1]);
      begin = i;
    }
  }
  return found;
}

function drawChart(holder, scale) {
  const width = Math.max(holder.clientWidth, 280), narrow = width < NARROW;
  const height = Math.round(Math.min(400, Math.max(260, width * 0.42)));
  const box = { left: narrow ? 56 : 64, right: width - (narrow ? 12 : 108), top: 30, bottom: height - 34 };
  const seen = Math.max(data.seconds, data.x[data.x.length - 1] || 0, 1e-3);
  const span = data.outlook ? seen + Math.min(data.outlook[1] * 1.3, seen / 3) : seen;
  const xOf = (x) => box.left + (x / span) * (box.right - box.left);
  const yOf = (bytes) => box.bottom - (bytes / scale.top) * (box.bottom - box.top);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, class: "curve", "aria-hidden": "true" });
  const clip = make("clipPath", { id: "inside" }, make("defs", {}, svg));
  make("rect", { x: box.left, y: box.top - 2, width: box.right - box.left, height: box.bottom - box.top + 3 }, clip);
  const chart = { svg, box, span, xOf, yOf, width, height, narrow, scale, placed: [] };
  drawAxes(chart);
  const inside = make("g", { "clip-path": "url(#inside)" }, svg);
  drawLayers(chart, inside);
  drawOutlook(chart, inside);
  drawLines(chart, inside);
  drawEvents(chart);
  drawPeak(chart);
  holder.querySelectorAll("svg, noscript").forEach((old) => old.remove());
  holder.prepend(svg);
  return chart;
}

function drawAxes({ svg, box, span, xOf, yOf, height, width, scale }) {
  const axes = make("g", { class: "axes" }, svg);
  for (const tick of sizeTicks(scale.top, 5)) {
    const y = yOf(tick.value);
    make("line", { x1: box.left, x2: box.right, y1: y, y2: y, class: tick.value ? "grid" : "base" }, axes);
    label(axes, tick.text, box.left - 6, y + 4, { "text-anchor": "end" });
  }
  const ticks = timeTicks(span, Math.max(2, Math.floor((box.right - box.left) / 90)));
  for (const tick of ticks) {
    const x = xOf(tick.value), last = x > box.right - 24;
    make("line", { x1: x, x2: x, y1: box.bottom, y2: box.bottom + 5, class: "base" }, axes);
    label(axes, tick.text, last ? Math.min(x + 24, width - 2) : x, height - 14, { "text-anchor": last ? "end" : "middle" });
  }
}

function drawLayers({ xOf, yOf, box }, parent) {
  const floor = data.x.map(() => 0);
  const parts = pieces();
  for (const layer of layersNow()) {
    const roof = floor.map((below, i) => below + layer.values[i]);
    if (roof.some((value, i) => value > floor[i])) {
      let path = "";
      for (const [begin, end] of parts) {
        const points = [];
        for (let i = begin; i <= end; i += 1) points.push(`${xOf(data.x[i]).toFixed(1)},${yOf(roof[i]).toFixed(1)}`);
        for (let i = end; i >= begin; i -= 1) points.push(`${xOf(data.x[i]).toFixed(1)},${yOf(floor[i]).toFixed(1)}`);
        path += `M${points.join("L")}Z`;
      }
      make("path", { d: path, class: `layer ${layer.key}` }, parent);
    }
    roof.forEach((value, i) => { floor[i] = value; });
  }
  for (const [begin, end] of data.gaps) {
    const x = xOf(begin);
    make("rect", { x, y: box.top, width: Math.max(xOf(end) - x, 1), height: box.bottom - box.top, class: "gap" }, parent);
  }
  if (filePeak > 0) {
    const lines = parts.map(([begin, end]) => {
      const points = new Map(); // the highest of every three pixels: a line that jumps up and down hides all else
      for (let i = begin; i <= end; i += 1) {
        const x = Math.round(xOf(data.x[i]) / 3) * 3;
        points.set(x, Math.max(points.get(x) || 0, data.file[i]));
      }
      return `M${[...points].map(([x, bytes]) => `${x},${yOf(bytes).toFixed(1)}`).join("L")}`;
    });
    for (const kind of ["file-ground", "file"]) make("path", { d: lines.join(""), class: kind }, parent);
  }
}

// Where it goes at the present rate: a line, and a band of a quarter more and less.
function drawOutlook({ xOf, yOf, span }, parent) {
  if (!data.outlook || !data.limit || !data.x.length) return;
  const last = data.x.length - 1, x = data.x[last], from = data.total[last], end = span - x;
  const at = (share) => `${xOf(x + end).toFixed(1)},${yOf(from + data.outlook[0] * share * end).toFixed(1)}`;
  const begin = `${xOf(x).toFixed(1)},${yOf(from).toFixed(1)}`;
  make("path", { d: `M${begin}L${at(1.25)}L${at(0.75)}Z`, class: "outlook-band" }, parent);
  make("path", { d: `M${begin}L${at(1)}`, class: "outlook" }, parent);
}

// The limit and the thresholds below it. Their names stand beside the plot and make room for each other.
function drawLines({ svg, box, span, yOf, narrow, scale, placed }, parent) {
  const lines = data.thresholds.map((threshold) => ({ ...threshold, kind: "threshold" }));
  if (data.limit) lines.push({ name: "limit", bytes: data.limit, kind: "limit" });
  lines.sort((a, b) => b.bytes - a.bytes || (a.kind === "limit" ? -1 : 1));
  let free = box.top - 8;
  for (const line of lines) {
    const far = line.bytes > scale.top;
    if (far && line.kind !== "limit") continue;
    const y = far ? box.top : yOf(line.bytes);
    const size = sizeText(line.bytes);
    if (!far) make("line", { x1: box.left, x2: box.right, y1: y, y2: y, class: line.kind }, parent);
    if (narrow) {
      if (line.kind !== "limit") continue;
      const above = y - 5 > box.top + 8;
      const left = data.peak && data.peak.x > span / 2; // away from the peak's name
      const at = { x: left ? box.left + 3 : box.right - 3, y: above ? y - 5 : y + 13, left: !left };
      placed.push({ ...at, text: `limit ${size}${far ? " ↑" : ""}` });
      label(svg, placed[0].text, at.x, at.y, { class: "name limit-name halo", "text-anchor": left ? "start" : "end" });
      continue;
    }
    const at = Math.max(y + 4, free + 13);
    const name = line.kind === "limit" ? `limit ${size}${far ? " ↑" : ""}` : line.name;
    label(svg, name, box.right + 6, at, { class: `name ${line.kind}-name` });
    free = at;
  }
}

function drawPeak({ svg, box, xOf, yOf, scale, placed }) {
  if (!data.peak || data.peak.bytes > scale.top) return;
  const x = xOf(data.peak.x), y = yOf(data.peak.bytes);
  make("circle", { cx: x, cy: y, r: 4, class: "peak" }, svg);
  const text = `peak ${sizeText(data.peak.bytes)}`;
  const left = x > (box.left + box.right) / 2;
  const places = [y - 8, y + 16, y + 32].filter((at) => at > box.top + 6).map((at) => ({ x: left ? x - 8 : x + 8, y: at, left, text }));
  const place = places.find((one) => placed.every((other) => apart(one, other))) || places[0];
  label(svg, text, place.x, place.y, { class: "name peak-name halo", "text-anchor": left ? "end" : "start" });
}

// Whether two names do not touch; `left` is one that ends at its x.
function apart(one, other) {
  const [a, b] = [one, other].map(({ x, left, text }) => {
    const width = text.length * 7.5;
    return left ? [x - width, x] : [x, x + width];
  });
  return Math.abs(one.y - other.y) > 13 || a[1] < b[0] || b[1] < a[0];
}

// Grave events, warnings and marks stand above the plot, neighbours together; the others are ticks on the axis.
function drawEvents({ svg, box, xOf }) {
  const group = make("g", { class: "events" }, svg);
  let cluster = null;
  const clusters = [];
  const loud = data.events.filter((event) => event.weight !== "quiet").length;
  for (const event of data.events) {
    const x = xOf(event.x);
    if (event.weight === "quiet") {
      make("line", { x1: x, x2: x, y1: box.bottom, y2: box.bottom - 7, class: "tick" }, group);
      continue;
    }
    const foot = loud <= MANY || event.weight === "grave" ? box.bottom : box.top;
    make("line", { x1: x, x2: x, y1: box.top - 6, y2: foot, class: `at ${event.weight}` }, group);
    if (cluster && x - cluster.first < 32) {
      cluster.events.push(event);
      cluster.last = x;
    } else {
      cluster = { first: x, last: x, events: [event] };
      clusters.push(cluster);
    }
  }
  for (const { first, last, events } of clusters) {
    const worst = events.reduce((a, b) => (WEIGHTS.indexOf(b.weight) > WEIGHTS.indexOf(a.weight) ? b : a)).weight;
    const x = first, y = box.top - 14;
    if (last - first > 2) make("line", { x1: first, x2: last, y1: box.top - 6, y2: box.top - 6, class: `at ${worst}` }, group);
    make("path", { d: glyph(worst, x, y), class: `glyph ${worst}` }, group);
    if (events.length > 1) label(group, String(events.length), x + 9, y + 4, { class: "name count" });
  }
}

// A shape for each weight, so that colour is not all that tells them apart.
function glyph(weight, x, y) {
  if (weight === "grave") return `M${x - 6},${y - 6}h12v12h-12Z`;
  if (weight === "warn") return `M${x},${y - 7}l7,13h-14Z`;
  return `M${x},${y - 6}l6,6l-6,6l-6,-6Z`;
}
