// The line that follows the pointer or the arrow keys, what it reads, the legend, and choices about the view.

let figure = null;

function child(parent, name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function valuesAt(i) {
  const rows = [{ key: "total", label: "memory", text: sizeText(data.total[i]) }];
  if (data.limit) rows[0].text += `, ${Math.round((100 * data.total[i]) / data.limit)} % of the limit`;
  for (const layer of layersNow()) rows.push({ key: layer.key, label: layer.label, text: sizeText(layer.values[i]) });
  rows.push({ key: "file", label: "file pages", text: sizeText(data.file[i]) });
  if (data.available[i] !== null) rows.push({ key: "available", label: "machine has left", text: sizeText(data.available[i]) });
  return rows;
}

function nearest(x) {
  let low = 0, high = data.x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (data.x[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - data.x[low - 1] < data.x[low] - x ? low - 1 : low;
}

function start() {
  figure = document.getElementById("chart");
  const plot = figure.querySelector(".plot"), readout = figure.querySelector(".readout");
  let choices = scales();
  let scale = firstScale(choices), chart = null, at = null, line = null;

  function draw() {
    chart = drawChart(plot, scale);
    line = make("line", { class: "cursor", y1: chart.box.top, y2: chart.box.bottom, visibility: "hidden" }, chart.svg);
    if (at !== null) show(at);
  }

  function show(i, x = data.x[i]) {
    at = i;
    const px = chart.xOf(data.x[i]);
    for (const [key, value] of [["x1", px], ["x2", px], ["visibility", "visible"]]) line.setAttribute(key, value);
    readout.replaceChildren();
    const when = `${elapsed(data.x[i], chart.span < 20 ? 0.1 : 1)} in`;
    child(readout, "p", "when", `${when}, ${clockText(data.t[i], data.zone_s)}`);
    const gap = data.gaps.find(([begin, end]) => x > begin && x < end);
    if (gap) child(readout, "p", "", "no samples here");
    const table = child(readout, "table");
    const rows = valuesAt(i);
    for (const row of rows) {
      const tr = child(table, "tr");
      child(child(tr, "td"), "span", `key ${row.key}`);
      child(tr, "td", "", row.label);
      child(tr, "td", "number", row.text);
    }
    const near = data.events.filter((event) => Math.abs(chart.xOf(event.x) - chart.xOf(x)) <= 7);
    near.sort((a, b) => WEIGHTS.indexOf(b.weight) - WEIGHTS.indexOf(a.weight));
    for (const event of near.slice(0, 4)) child(readout, "p", `event ${event.weight}`, `${event.kind}: ${event.text}`);
    if (near.length > 4) child(readout, "p", "event", `and ${near.length - 4} more`);
    readout.hidden = false;
    place(px);
    plot.setAttribute("aria-valuenow", Math.round(data.x[i]));
    const events = near.slice(0, 4).map((event) => `. ${event.kind}: ${event.text}`).join("");
    plot.setAttribute("aria-valuetext", `${when}: ${rows.map((row) => `${row.label} ${row.text}`).join(", ")}${events}`);
  }

  // Beside the cursor, on the side that has room; over the whole width where none has.
  function place(px) {
    const room = plot.clientWidth, width = Math.min(readout.offsetWidth, room);
    const right = px + 14 + width <= room;
    readout.style.left = `${Math.max(0, right ? px + 14 : px - 14 - width)}px`;
    readout.style.top = `${plot.offsetTop + chart.box.top + 6}px`;
  }

  function hide() {
    at = null;
    readout.hidden = true;
    if (line) line.setAttribute("visibility", "hidden");
  }

  function follow(event) {
    const px = event.clientX - plot.getBoundingClientRect().left;
    const x = ((px - chart.box.left) / (chart.box.right - chart.box.left)) * chart.span;
    show(nearest(Math.min(Math.max(x, 0), chart.span)), x);
  }

  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const last = data.x.length - 1, far = Math.max(1, Math.round(last / 20));
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -far, PageUp: far };
    if (event.key === "Escape") return hide();
    const target = { Home: 0, End: last }[event.key] ?? (event.key in steps ? (at ?? 0) + steps[event.key] : null);
    if (target === null) return undefined;
    event.preventDefault();
    return show(Math.min(Math.max(target, 0), last));
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-x]");
    if (!button) return;
    const x = Number(button.dataset.x);
    figure.scrollIntoView({ block: "nearest" });
    plot.focus({ preventScroll: true });
    show(nearest(x), x);
  });
  offer(choices, () => scale, (choice) => { scale = choice; draw(); });
  legend();
  draw();
  new ResizeObserver(() => { if (plot.clientWidth !== chart.width) draw(); }).observe(plot);
  const asked = new URLSearchParams(location.search).get("at");
  if (asked !== null) show(nearest(Number(asked) || 0), Number(asked) || 0);

  // New data: the same choice of scale, if it is still there, and the cursor where it was.
  function renew() {
    const chosen = scale.label;
    choices = scales();
    scale = choices.find((choice) => choice.label === chosen) || firstScale(choices);
    offer(choices, () => scale, (choice) => { scale = choice; draw(); });
    legend();
    draw();
  }
  return { renew };
}

function offer(choices, current, choose) {
  const controls = figure.querySelector(".controls");
  controls.replaceChildren();
  controls.hidden = choices.length < 2 && data.processes.length < 2;
  if (data.processes.length > 1) {
    child(controls, "span", "", "Show");
    for (const [text, wanted] of [["kinds of memory", false], ["processes", true]]) {
      const button = child(controls, "button", "", text);
      button.setAttribute("aria-pressed", String(byProcess === wanted));
      button.addEventListener("click", () => {
        byProcess = wanted;
        offer(choices, current, choose);
        legend();
        choose(current());
      });
    }
  }
  if (choices.length < 2) return;
  child(controls, "span", "", "Scale to");
  const buttons = choices.map((choice) => {
    const button = child(controls, "button", "", choice.label);
    button.addEventListener("click", () => { choose(choice); mark(); });
    return button;
  });
  function mark() {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(choices[i] === current())));
  }
  mark();
}

function legend() {
  const list = figure.querySelector(".legend");
  list.replaceChildren();
  const add = (key, text) => {
    const item = child(list, "li");
    child(item, "span", `key ${key}`);
    item.append(text);
  };
  for (const layer of layersNow()) if (highest(layer.values) > 0) add(layer.key, layer.label);
  if (filePeak > 0) add("file", `file pages: reclaimable, not counted (up to ${sizeText(filePeak)})`);
  if (data.limit) add("limit", `limit ${sizeText(data.limit)}`);
  if (data.thresholds.length) add("threshold", data.thresholds.map((line) => `${line.name} ${sizeText(line.bytes)}`).join(", "));
  if (data.outlook) add("outlook", `at this rate: ${sizeText(60 * data.outlook[0])} a minute, a quarter more or less`);
  if (data.events.some((event) => event.weight === "quiet")) add("tick", "other events");
}

// ?theme=dark or ?theme=light overrules what the system prefers.
const theme = new URLSearchParams(location.search).get("theme");
if (theme === "dark" || theme === "light") document.getElementById("dark").media = theme === "dark" ? "screen" : "not all";
if (document.getElementById("chart") && data && data.x.length) start();
