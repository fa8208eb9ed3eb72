"use strict";
// An error leaves a mark that a test, or a person, can find.
window.onerror = (message) => { document.documentElement.dataset.error = message; };

const data = JSON.parse(document.getElementById("data").textContent);
const section = (id) => document.getElementById(id);
const drop = (...ids) => ids.forEach((id) => { section(id).remove(); document.querySelector(`nav a[href="#${id}"]`).remove(); });

// --- building elements: text always goes in as text, never as markup ---

function element(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "line", "path", "circle", "text", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

const MINUS = "\u2212";
function number(value, digits = 4) {
  if (value === null || value === undefined) return "\u2013";
  const size = Math.abs(value);
  let text;
  if (Number.isInteger(value) && size < 1e7) text = value.toLocaleString("en-US");
  else if (size !== 0 && (size < 1e-4 || size >= 1e7)) text = Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  else text = String(Number(value.toPrecision(digits)));
  return text.replace(/-/g, MINUS);
}
const signed = (value, text) => (value > 0 ? "+" : "") + text;
const fixed = (value, digits) => value.toFixed(digits).replace(/^-(0(\.0*)?)$/, "$1").replace("-", MINUS);

function duration(seconds) {
  if (seconds < 1) return `${Number((1000 * seconds).toPrecision(3))} ms`;
  if (seconds < 59.95) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  const two = (part) => String(part).padStart(2, "0");
  return hours ? `${hours} h ${two(minutes)} min` : `${minutes} min ${two(whole % 60)} s`;
}

function plural(count, noun) { return `${number(count)} ${noun}${count === 1 ? "" : "s"}`; }

function mark(cell, y, kind, place) {
  return cell && element("g", { class: kind },
    cell.low === null || cell.high === null ? null : element("line", { x1: place(cell.low), x2: place(cell.high), y1: y, y2: y }),
    element("circle", { cx: place(cell.mean), cy: y, r: 3.5 }));
}

/** A mean with its interval and count. */
function estimate(cell, percent = true) {
  if (!cell) return [element("span", { class: "none" }, "not measured")];
  const bound = (value) => (percent ? fixed(100 * value, 1) : number(value));
  const interval = cell.low === null || cell.high === null ? "" : `[${bound(cell.low)}, ${bound(cell.high)}]`;
  const count = cell.k === null ? `n = ${number(cell.n)}` : `${number(cell.k)}/${number(cell.n)}`;
  return [element("b", {}, percent ? `${bound(cell.mean)}%` : bound(cell.mean)), element("small", {}, interval), element("small", {}, count)];
}

/** A difference with its interval, colored only where that leaves out zero. */
function changed(cell, percent = true) {
  if (!cell) return [element("span", { class: "none" }, "\u2013")];
  const change = (value) => signed(value, percent ? fixed(100 * value, 1) : number(value, 3));
  const kind = cell.low > 0 ? "up" : cell.high < 0 && cell.high !== null ? "down" : "";
  const interval = cell.low === null ? "" : `[${change(cell.low)}, ${change(cell.high)}]`;
  return [element("b", { class: kind }, change(cell.mean)), element("small", {}, interval), percent ? element("small", {}, "points") : ""];
}

// --- summary, held-out table, timing, config, notes ---

function drawSummary() {
  for (const [label, value] of Object.entries(data.summary)) {
    const text = label === "seconds" ? duration(value) : String(value);
    section("summary").append(element("span", {}, element("i", {}, label === "seconds" ? "time" : label), text));
  }
}

function drawHeldOut() {
  const held = data.held_out, into = section("held-out");
  if (!held) return into.append(element("p", { class: "empty" }, "This run has no evaluation yet."));
  if (!held.rows.length) return into.append(element("p", { class: "empty" }, "The evaluations hold no finite value."));
  const single = held.steps.length === 1, percent = held.percent;
  const show = (value) => (percent ? `${fixed(100 * value, 1)}%` : number(value));
  const cells = held.rows.flatMap((row) => [single ? null : row.before, row.after]).filter(Boolean);
  const ends = cells.flatMap((cell) => [cell.mean, cell.low, cell.high]).filter((value) => value !== null);
  const low = percent ? 0 : Math.min(...ends), high = percent ? 1 : Math.max(...ends);
  const place = (value) => `${3 + 94 * (high > low ? (value - low) / (high - low) : 0.5)}%`;

  const estimated = (cell) => estimate(cell, percent), difference = (cell) => changed(cell, percent);
  const heads = single ? [`step ${number(held.steps[0])}`]
    : [`before (step ${number(held.steps[0])})`, `after (step ${number(held.steps[1])})`, "difference"];
  const rows = held.rows.map((row, i) => element("tr", { class: i ? null : "whole" },
    element("th", { scope: "row" }, row.name),
    single ? null : element("td", { class: "num", "data-label": "before" }, ...estimated(row.before)),
    element("td", { class: "num", "data-label": single ? heads[0] : "after" }, ...estimated(row.after)),
    single ? null : element("td", { class: "num", "data-label": "difference" }, ...difference(row.difference)),
    element("td", { class: "plot" }, element("svg", { width: "100%", height: 26, "aria-hidden": "true" },
      ...[low, high].map((edge) => element("line", { class: "edge", x1: place(edge), x2: place(edge), y1: 0, y2: 26 })),
      single ? mark(row.after, 13, "after", place) : mark(row.before, 8, "before", place),
      single ? null : mark(row.after, 18, "after", place)))));
  const scale = element("div", { class: "scale" }, element("span", {}, show(low)), element("span", {}, show(high)));
  into.append(
    element("p", {}, element("b", {}, held.metric), ` on the ${held.split} split, with 95% intervals.`,
      single ? "" : " In the plot, open marks are before training and filled marks after."),
    element("table", { class: "held-out stack" },
      element("thead", {}, element("tr", {}, element("th", {}, "domain"),
        ...heads.map((text) => element("th", { class: "num" }, text)), element("th", { class: "plot" }, scale))),
      element("tbody", {}, ...rows)));
  if (!single) into.append(element("p", { class: "fine" },
    "The interval of a difference treats the two evaluations as independent (Newcombe). " +
    "On the same tasks they usually agree more than that, so it errs on the wide side."));
}

// --- rollouts ---

function drawRollouts() {
  if (!data.rollouts.length) return drop("rollouts");
  const into = section("rollouts");
  if (data.rollouts.some((set) => set.rows.length)) into.append(element("p", {}, "Successful episodes, with 95% intervals."));
  for (const set of data.rollouts) {
    if (set.name) into.append(element("h3", {}, set.name));
    into.append(element("p", { class: "facts" }, ...Object.entries(set.facts).map(([label, value]) =>
      element("span", {}, element("i", {}, label), String(value)))));
    if (set.rows.length) into.append(successTable(set.rows));
    if (set.notices.length) into.append(element("p", { class: "fine" }, set.notices.join(" ")));
    if (set.comparison) into.append(...comparisonTable(set.comparison));
    if (set.variants) into.append(...variantTable(set.variants));
    if (set.sweep) into.append(
      element("p", { class: "between" }, element("b", {}, `Success over ${set.sweep.axes}`), ", with counts and 95% intervals."),
      element("div", { class: "wide" }, element("img", { class: "sweep", src: data.media[set.sweep.path], alt: `success over ${set.sweep.axes}` })));
    if (set.videos.length) into.append(element("div", { class: "media" }, ...set.videos.map(medium)));
    if (set.protocol) into.append(element("details", {}, element("summary", {}, "Protocol"), element("pre", { tabindex: 0 }, set.protocol)));
  }
}

const WHOLE = "all episodes";

function successTable(rows) {
  const place = (share) => `${3 + 94 * share}%`;
  const scale = element("div", { class: "scale" }, element("span", {}, "0%"), element("span", {}, "100%"));
  const body = rows.map((row) => element("tr", { class: row.name === WHOLE ? "whole" : null },
    element("th", { scope: "row" }, row.name),
    element("td", { class: "num", "data-label": "episodes" }, row.k === null ? "\u2013" : `${number(row.k)}/${number(row.n)}`),
    element("td", { class: "num", "data-label": "success" }, element("b", {}, `${fixed(100 * row.mean, 1)}%`)),
    element("td", { class: "num", "data-label": "interval" }, `[${fixed(100 * row.low, 1)}, ${fixed(100 * row.high, 1)}]`),
    element("td", { class: "plot" }, element("svg", { width: "100%", height: 20, "aria-hidden": "true" },
      ...[0, 1].map((edge) => element("line", { class: "edge", x1: place(edge), x2: place(edge), y1: 0, y2: 20 })),
      mark(row, 10, "after", place)))));
  return element("table", { class: "held-out stack" },
    element("thead", {}, element("tr", {}, element("th", {}, "task"),
      ...["episodes", "success", "interval"].map((text) => element("th", { class: "num" }, text)), element("th", { class: "plot" }, scale))),
    element("tbody", {}, ...body));
}

/** A table whose cells may be several lines; `rows` are lists of the name and one cell (its children) per head. */
function plainTable(heads, rows) {
  return element("table", { class: "held-out stack" },
    element("thead", {}, element("tr", {}, element("th", {}, "task"), ...heads.map((text) => element("th", { class: "num" }, text)))),
    element("tbody", {}, ...rows.map(([name, ...cells]) => element("tr", { class: name === WHOLE ? "whole" : null }, element("th", { scope: "row" }, name),
      ...cells.map((cell, i) => element("td", { class: "num", "data-label": heads[i] }, cell))))));
}

const chance = (p) => (p < 0.0001 ? "<0.0001" : number(p, 2));

function comparisonTable({ name, rows }) {
  const heads = [name, "this policy", "difference", "solved by this only", "by the other only", "p"];
  return [element("p", { class: "between" }, element("b", {}, `Against ${name}`), " on the same episodes (exact McNemar test)."),
    plainTable(heads, rows.map((row) => [row.name, estimate(row.before), estimate(row.after), changed(row.difference),
      number(row.b), number(row.c), chance(row.p)]))];
}

function variantTable({ names, rows, against }) {
  const tests = against.map((test) =>
    `${test.name}: ${number(test.b)} solved only with ${names[0]} words, ${number(test.c)} only with these, p ${chance(test.p).replace(/^(?!<)/, "= ")}`);
  return [element("p", { class: "between" }, element("b", {}, "Does it listen?"), " Success by the words of the instruction, on the same episodes."),
    plainTable(names, rows.map((row) => [row.name, ...row.cells.map((cell) => estimate(cell))])),
    tests.length ? element("p", { class: "fine" }, `${tests.join("; ")} (exact McNemar test).`) : ""];
}

function drawTiming() {
  const into = section("timing");
  if (!data.timing.length) return into.append(element("p", { class: "empty" }, "This run has no timing."));
  const heads = { mean: "mean", median: "median", late: "95th percentile", total: "total" };
  const cells = (row) => Object.entries(heads).map(([key, label]) => (row[key] === undefined ? element("td", { class: "num" })
    : element("td", { class: "num", "data-label": label }, duration(row[key]))));
  const rows = data.timing.map((row) => element("tr", { class: row.name === "whole step" ? "total" : null },
    element("th", { scope: "row" }, row.name), ...cells(row),
    element("td", { class: "num share", "data-label": "share" }, row.name === "whole step" ? null
      : element("span", { class: "bar", style: `width: calc(${(100 * Math.min(row.share, 1)).toFixed(1)}% * 0.55)` }),
      element("span", {}, `${row.share < 0.001 ? "<0.1" : fixed(100 * row.share, row.share < 0.095 ? 1 : 0)}%`))));
  into.append(element("table", { class: "timing stack" },
    element("thead", {}, element("tr", {}, element("th", {}, "per train step"),
      ...[...Object.values(heads), "share"].map((text) => element("th", { class: "num" }, text)))),
    element("tbody", {}, ...rows)));
}

function drawConfig() {
  if (!data.config && data.kind !== "training") return drop("config");
  if (!data.config) return section("config").append(element("p", { class: "empty" }, "This run has no config.yaml."));
  section("config").append(element("details", {},
    element("summary", {}, `Resolved config, ${plural(data.config.trimEnd().split("\n").length, "line")}`),
    element("pre", { tabindex: 0 }, data.config)));
}

function drawNotes() {
  section("notes").hidden = !data.notes.length;
  section("notes").append(element("ul", {}, ...data.notes.map((note) => element("li", {}, note))));
}

// --- curves ---

const charts = [];
let pointed = null; // the train step under the pointer
const familyOf = (curve) => curve.family ?? (prefixOf(curve.key) || "optimization");
const prefixOf = (key) => (key.includes("/") ? key.slice(0, key.lastIndexOf("/")) : "");

function drawCurves() {
  const into = section("curves");
  if (!data.curves.length) return into.append(element("p", { class: "empty" }, "This run has no finished train step yet."));
  if (data.curves.some((curve) => curve.smooth)) into.append(element("p", {},
    "Faint lines are the values of each train step, strong ones their centered mean over a twentieth of the run. " +
    "The number beside a name is the newest value; point at a curve to read all of them at one step."));
  const groups = new Map();
  for (const curve of data.curves) {
    const name = familyOf(curve);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(curve);
  }
  const families = element("div", { class: "families" });
  into.append(families);
  for (const [name, curves] of groups) {
    // A held-out curve that stands still has an interval that does not.
    const moving = curves.filter((curve) => curve.low || new Set(curve.values.filter((value) => value !== null)).size > 1);
    const still = curves.filter((curve) => !moving.includes(curve));
    const family = element("div", { class: moving.length ? "family" : "family still", style: `--curves: ${moving.length || 1}` },
      element("h3", {}, name), ...moving.map(figure));
    families.append(family);
    // A flat line says less than its value.
    const flat = still.map((curve) => element("tr", {}, element("th", { scope: "row" }, nameOf(curve)),
      element("td", { class: "num" }, number(curve.values.find((value) => value !== null), 5)),
      element("td", {}, element("small", {}, describeStill(curve)))));
    if (flat.length) family.append(element("table", { class: "flat" }, element("tbody", {}, ...flat)));
  }
  for (const chart of charts) layOut(chart);
  let waiting = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => charts.forEach(layOut));
  });
}

function nameOf(curve) {
  if (curve.name) return curve.name;
  return prefixOf(curve.key) ? curve.key.slice(prefixOf(curve.key).length + 1) : curve.key;
}

function describeStill(curve) {
  if (curve.values.every((value) => value === null)) return "no finite value";
  return curve.steps.length === 1 ? `at step ${number(curve.steps[0])}, the only one` : "at every step";
}

function figure(curve) {
  const svg = element("svg", { class: "curve", "data-key": curve.key, role: "img", tabindex: 0 });
  const now = element("span", { class: "now" });
  const chart = { curve, svg, now };
  const move = (event) => {
    const box = svg.getBoundingClientRect();
    pointAt(chart.stepAt(event.clientX - box.left));
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", () => pointAt(null));
  svg.addEventListener("blur", () => pointAt(null));
  svg.addEventListener("keydown", (event) => {
    const turn = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!turn) return;
    event.preventDefault();
    const last = curve.steps.length - 1;
    chart.index = Math.max(0, Math.min(last, (chart.index ?? (turn < 0 ? last + 1 : -1)) + turn));
    pointAt(curve.steps[chart.index]);
  });
  charts.push(chart);
  return element("figure", {}, element("figcaption", {}, element("span", { class: "key", title: curve.key }, nameOf(curve)), now), svg);
}

/** Two to five round numbers inside [low, high]. */
function ticks(low, high) {
  const rough = (high - low) / 4, unit = 10 ** Math.floor(Math.log10(rough));
  const gap = unit * [1, 2, 2.5, 5, 10].find((factor) => factor * unit >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / gap - 1e-9); k * gap <= high + gap * 1e-9; k++) found.push(Number((k * gap).toPrecision(12)));
  return found;
}

function layOut(chart) {
  const { curve, svg } = chart, { steps, values } = curve;
  const width = svg.clientWidth || 260, height = svg.clientHeight || 120;
  const drawn = [values, curve.low, curve.high].flatMap((list) => list || []).filter((value) => value !== null);
  let low = Infinity, high = -Infinity;
  for (const value of drawn) { low = Math.min(low, value); high = Math.max(high, value); }
  if (curve.range) [low, high] = curve.range;
  if (high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high))) { low -= Math.abs(low) || 1; high += Math.abs(high) || 1; }
  const marks = ticks(low, high);
  const labels = marks.map((value) => (Math.abs(value) < 1e4 ? number(value, 3)
    : value.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 3 }).replace("-", MINUS)));
  const left = Math.max(...labels.map((text) => text.length)) * 6 + 8, right = width - 6, top = 8, bottom = height - 18;
  const first = steps[0], span = steps[steps.length - 1] - first || 1;
  const x = (step) => left + ((step - first) / span) * (right - left);
  const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
  const path = (list) => {
    let text = "", open = false;
    list.forEach((value, i) => {
      if (value === null) { open = false; return; }
      // "h0" makes a value between two gaps a dot.
      text += `${open ? "L" : "M"}${x(steps[i]).toFixed(1)} ${y(value).toFixed(1)}${open ? "" : "h0"}`;
      open = true;
    });
    return text;
  };
  const parts = [];
  marks.forEach((value, i) => parts.push(
    element("line", { class: "axis", x1: left, x2: right, y1: y(value), y2: y(value) }),
    element("text", { x: left - 6, y: y(value) + 3.5, "text-anchor": "end" }, labels[i])));
  parts.push(element("text", { x: left, y: height - 4 }, number(first)),
    element("text", { x: right, y: height - 4, "text-anchor": "end" }, number(steps[steps.length - 1])));
  if (curve.low) {
    const known = steps.map((_, i) => i).filter((i) => curve.low[i] !== null && curve.high[i] !== null);
    const edge = (list, order) => order.map((i) => `${x(steps[i]).toFixed(1)} ${y(list[i]).toFixed(1)}`).join("L");
    if (known.length) parts.push(element("path", { class: "band", d: `M${edge(curve.high, known)}L${edge(curve.low, [...known].reverse())}Z` }));
  }
  if (curve.smooth) parts.push(element("path", { class: "raw", d: path(values) }), element("path", { class: "main", d: path(curve.smooth) }));
  else parts.push(element("path", { class: "main", d: path(values) }));
  if (steps.length <= 24) values.forEach((value, i) => value !== null && parts.push(element("circle", { cx: x(steps[i]), cy: y(value), r: 2.2 })));
  chart.cursor = element("g", { class: "cursor", visibility: "hidden" }, element("line", { y1: top, y2: bottom }), element("circle", { r: 3 }));
  chart.stepAt = (pixels) => first + ((pixels - left) / (right - left)) * span;
  chart.place = { x, y };
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", `${curve.key}: from ${number(drawn[0])} to ${number(lastOf(values)[0])}, ` +
    `lowest ${number(low)}, highest ${number(high)}`);
  svg.replaceChildren(...parts, chart.cursor);
  read(chart, pointed);
}

function lastOf(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return [values[i], i];
  return [null, 0];
}

/** Show the value nearest to `step` in one chart, or the newest value for null. */
function read(chart, step) {
  const { steps, values } = chart.curve;
  chart.cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
  if (step === null) { chart.index = undefined; return chart.now.replaceChildren(number(lastOf(values)[0])); }
  let a = 0, b = steps.length - 1;
  while (b - a > 1) { const middle = (a + b) >> 1; if (steps[middle] <= step) a = middle; else b = middle; }
  const index = step - steps[a] < steps[b] - step ? a : b, value = values[index];
  chart.now.replaceChildren(element("i", {}, `step ${number(steps[index])}\u2002`), number(value));
  const [line, dot] = chart.cursor.children, at = chart.place.x(steps[index]);
  line.setAttribute("x1", at); line.setAttribute("x2", at);
  dot.setAttribute("cx", at);
  dot.setAttribute("cy", value === null ? -10 : chart.place.y(value));
}

function pointAt(step) { pointed = step; for (const chart of charts) read(chart, step); }

// --- samples ---

function drawSamples() {
  const into = section("samples"), steps = data.samples;
  if (!steps.length) return into.append(element("p", { class: "empty" }, "This run has written no samples yet."));
  const list = element("div", { id: "sample-list" });
  const stepBox = element("select", { id: "sample-step", onchange: chooseStep },
    ...steps.map((entry, i) => element("option", { value: i }, number(entry.step))));
  const groupBox = element("select", { id: "sample-group", onchange: show });
  const turn = (by) => () => { stepBox.value = Number(stepBox.value) + by; chooseStep(); };
  const previous = element("button", { type: "button", onclick: turn(-1), "aria-label": "previous sampled step" }, "\u2190");
  const next = element("button", { type: "button", onclick: turn(1), "aria-label": "next sampled step" }, "\u2192");
  into.append(
    element("div", { class: "controls" }, element("label", {}, "train step", stepBox), previous, next, element("label", {}, "group", groupBox)),
    list);

  function chooseStep() {
    const groups = groupsOf(steps[Number(stepBox.value)].rows);
    groupBox.replaceChildren(element("option", { value: "" }, groups.length === 1 ? "the only one" : `all ${groups.length}`),
      ...groups.map((rows, i) => element("option", { value: i }, `${rows[0].task_id || `group ${rows[0].group}`} (${meanReward(rows)})`)));
    previous.disabled = Number(stepBox.value) === 0;
    next.disabled = Number(stepBox.value) === steps.length - 1;
    show();
  }
  function show() {
    const groups = groupsOf(steps[Number(stepBox.value)].rows);
    const chosen = groupBox.value === "" ? groups : [groups[Number(groupBox.value)]];
    list.replaceChildren(...chosen.map(groupCard));
    list.querySelectorAll(".text").forEach(shorten);
  }
  stepBox.value = steps.length - 1;
  chooseStep();
}

function groupsOf(rows) {
  const groups = new Map();
  rows.forEach((row, i) => {
    const key = row.group ?? `row ${i}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  });
  return [...groups.values()];
}

function meanReward(rows) {
  const known = rows.map((row) => row.reward).filter((value) => value !== null);
  return known.length ? `mean reward ${number(known.reduce((a, b) => a + b, 0) / known.length, 3)}` : "no reward";
}

function groupCard(rows) {
  const first = rows[0];
  const paths = (row) => row.media.map((item) => item.path).join("\n");
  const shared = rows.every((row) => paths(row) === paths(first));
  const facts = [first.domain && first.domain !== "default" ? first.domain : "", plural(rows.length, "rollout"), meanReward(rows)].filter(Boolean);
  const words = element("div", { class: "words" },
    element("p", { class: "label" }, "prompt"), element("div", { class: "text" }, first.prompt || "\u2013"),
    first.reference ? [element("p", { class: "label" }, "reference"), element("div", { class: "text" }, first.reference)] : null);
  return element("article", { class: "group" },
    element("h3", {}, first.task_id || `group ${first.group}`, element("small", {}, facts.join(", "))),
    element("div", { class: "task" }, words, shared && first.media.length ? element("div", { class: "media" }, ...first.media.map(medium)) : null),
    rolloutTable(rows, shared),
    first.judging ? rubricTable(rows, first.judging) : null);
}

/** Criteria of a group: weight, and which rollouts meet each. Rollouts stand in the order of the table above, best first. */
function rubricTable(rows, judging) {
  const best = [...rows.keys()].sort((a, b) => (rows[b].reward ?? -Infinity) - (rows[a].reward ?? -Infinity) || a - b);
  const order = [...best, ...judging.scores.keys()].filter((i, at, all) => all.indexOf(i) === at); // the file may hold fewer rows
  const mark = (bit, i) => element("td", { class: `bit ${bit ? "yes" : "no"}`, "data-label": `${order.indexOf(i) + 1}`, title: bit ? "met" : "not met" }, bit ? "\u25cf" : "\u25cb");
  const body = judging.rubrics.map((rubric) => element("tr", {},
    element("th", {}, element("b", {}, `${rubric.id} `), rubric.title, rubric.polarity === "negative" ? element("small", {}, " (avoided)") : null),
    element("td", { class: "num", "data-label": "weight" }, rubric.weight === null ? "\u2013" : fixed(rubric.weight, 2)),
    ...order.map((i) => (rubric.bits[i] === undefined ? element("td", { class: "bit none" }, "\u2013") : mark(rubric.bits[i], i)))));
  const scores = element("tr", { class: "whole" }, element("th", {}, "score"), element("td", {}),
    ...order.map((i) => element("td", { class: "bit", "data-label": `${order.indexOf(i) + 1}` }, judging.scores[i] === null || judging.scores[i] === undefined ? "\u2013" : fixed(judging.scores[i], 2))));
  return element("div", { class: "wide" }, element("table", { class: "rubrics" },
    element("thead", {}, element("tr", {}, element("th", {}, `criteria of the judge${judging.mode ? ` (${judging.mode})` : ""}`), element("th", { class: "num" }, "weight"),
      ...order.map((_, at) => element("th", { class: "bit" }, at + 1)))),
    element("tbody", {}, ...body, scores)));
}

function rolloutTable(unsorted, shared) {
  const rows = [...unsorted].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity) || 0);
  const terms = [...new Set(rows.flatMap((row) => Object.keys(row.terms)))];
  const strongest = Math.max(1e-9, ...rows.map((row) => Math.abs(row.advantage ?? 0)));
  const cell = (label, value, title) => element("td", { class: "num", "data-label": label, title: title ?? null },
    value === null || value === undefined ? element("span", { class: "none", title: "does not apply" }, "\u2013") : value);
  const tint = (value) => (value ? `background: rgb(var(--${value > 0 ? "up" : "down"}-fill) / ${(0.08 + 0.34 * Math.abs(value) / strongest).toFixed(2)})` : "");
  // Many terms leave a column too narrow to read in; the completion then has a line of its own.
  const below = terms.length > 4;
  const columns = terms.length + 4;
  const completion = (row) => element("td", { class: "completion", colspan: below ? columns : null }, element("div", { class: "task" },
    element("div", { class: "words" }, element("div", { class: "text" }, row.completion || element("span", { class: "none" }, "(empty)"))),
    shared || !row.media.length ? null : element("div", { class: "media" }, ...row.media.map(medium))));
  const body = rows.map((row) => {
    const numbers = element("tr", {},
      element("td", { class: "num advantage", "data-label": "advantage" }, row.advantage === null ? element("span", { class: "none" }, "\u2013")
        : element("span", { style: tint(row.advantage) }, signed(row.advantage, fixed(row.advantage, 2)))),
      cell("reward", row.reward === null ? null : element("b", {}, number(row.reward))),
      ...terms.map((name) => cell(name, row.terms[name] === null || row.terms[name] === undefined ? null : number(row.terms[name]))),
      cell("decisions", row.num_decisions === null ? null : number(row.num_decisions), row.seed === null ? null : `seed ${row.seed}`),
      element("td", { "data-label": "stop" }, row.stop_reason || "\u2013"),
      below ? null : completion(row));
    return element("tbody", {}, numbers, below ? element("tr", {}, completion(row)) : null,
      row.decisions ? element("tr", {}, element("td", { colspan: columns + (below ? 0 : 1) }, decisionTable(row.decisions))) : null);
  });
  const heads = ["advantage", "reward", ...terms, "decisions"].map((name) => element("th", { class: "num" }, name));
  return element("div", { class: "wide" }, element("table", { class: `rollouts stack${below ? " below" : ""}` },
    element("thead", {}, element("tr", {}, ...heads, element("th", {}, "stop"), below ? null : element("th", {}, "completion"))),
    ...body));
}

/** Each decision of a rollout as it was recorded; drawn when it is opened, since there may be thousands. */
function decisionTable(decisions) {
  const { names, rows } = decisions, mask = names.indexOf("mask"), clip = names.indexOf("clip");
  const wide = (name) => (name === "written" || name === "clip" ? null : "num");
  const shown = (value, name) => (value === null || value === undefined ? "\u2013" : name === "written" ? JSON.stringify(value)
    : typeof value === "number" ? number(value, 6) : value);
  const box = element("details", { class: "decisions" }, element("summary", {}, `decisions of rollout ${decisions.rollout ?? "?"}`));
  box.addEventListener("toggle", () => {
    if (!box.open || box.children.length > 1) return;
    box.append(element("p", {}, decisions.note), element("div", { class: "wide" }, element("table", {},
      element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { class: wide(name) }, name)))),
      element("tbody", {}, ...rows.map((cells) => element("tr", { class: cells[mask] === 0 ? "out" : cells[clip] ? "clip" : null },
        ...cells.map((value, i) => element("td", { class: wide(names[i]) }, shown(value, names[i])))))))));
  });
  return box;
}

function medium(item) {
  const source = data.media[item.path];
  const caption = item.caption ? element("figcaption", {}, item.caption) : null;
  if (!source) return element("figure", {}, element("div", { class: "none" }, `${item.kind} not in this page: ${item.path}`), caption);
  if (item.kind === "audio") {
    const picture = data.media[`${item.path}.svg`];
    return element("figure", {}, picture ? element("img", { class: "sound", src: picture, alt: "waveform and mel spectrogram" }) : null,
      element("audio", { controls: true, preload: "metadata", src: source }), caption);
  }
  if (item.kind === "video") return element("figure", {}, film(source), caption);
  const image = element("img", { src: source, alt: item.caption || "input image", onclick: () => image.classList.toggle("large") });
  image.addEventListener("load", () => {
    // A 28-pixel digit is shown large enough to see, in whole pixels.
    if (image.naturalWidth >= 120) return;
    image.classList.add("pixels");
    image.width = image.naturalWidth * Math.max(1, Math.floor(168 / image.naturalWidth));
  });
  return element("figure", {}, image, caption);
}

/** A video that plays while it is in view, unless the reader wants less motion. */
function film(source) {
  const video = element("video", { controls: true, loop: true, playsinline: true, preload: "metadata", src: source });
  video.muted = true;
  if (!matchMedia("(prefers-reduced-motion: reduce)").matches) inView.observe(video);
  return video;
}
const inView = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
  if (!isIntersecting) target.pause();
  else target.play().catch(() => {}); // a browser may keep it still; its controls remain
}));

/** Long text shows its beginning, and a button for the rest. */
function shorten(node) {
  node.classList.add("short");
  if (node.scrollHeight <= node.clientHeight + 24) return node.classList.remove("short");
  const button = element("button", { type: "button", class: "more", onclick: () => {
    button.textContent = node.classList.toggle("short") ? label : "show less";
  } });
  const label = button.textContent = `show all ${number(node.textContent.length)} characters`;
  node.after(button);
}

drawSummary();
drawRollouts();
if (data.kind === "training") {
  drawHeldOut();
  drawCurves();
  drawSamples();
  drawTiming();
} else drop("held-out", "curves", "samples", "timing");
drawConfig();
drawNotes();
document.documentElement.dataset.ready = "yes";
