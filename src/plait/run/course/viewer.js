"use strict";
// One frame of the page is one step index per rank. All text enters by textContent: nothing of a program can run here.
const data = JSON.parse(document.getElementById("data").textContent);
const [source, columns, slider, count, messages, predictions] =
  ["source", "ranks", "slider", "count", "messages", "predictions"].map(id => document.getElementById(id));
const last = data.frames.length - 1;
document.getElementById("title").textContent = document.title;
document.body.classList.toggle("many", data.ranks.length > 4);
const SVG = "http://www.w3.org/2000/svg";

function make(tag, text, parent, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  if (parent) parent.append(element);
  return element;
}

function size(bytes) {
  if (bytes < 1000) return `${bytes} bytes`;
  const power = Math.min(4, Math.floor(Math.log10(bytes) / 3));
  return `${Number((bytes / 1000 ** power).toPrecision(3))} ${["", "kB", "MB", "GB", "TB"][power]}`;
}

const lines = data.source.map((text, i) => {
  const line = make("div", undefined, source);
  make("span", String(i + 1), line, "who");
  const written = make("span", undefined, line, /^\s*#/.test(text) ? "comment" : "");
  let from = 0;
  for (const number of data.numbers.filter(one => one.line === i + 1)) {
    written.append(text.slice(from, number.start));
    from = number.start + number.text.length;
    make("span", number.text, written, `number ${number.label}`).title = number.label;
  }
  written.append(text.slice(from));
  return line;
});

// The n-th operation of a kind among the same ranks is the same operation on each of them.
const most = { sent: 1, held: 1 };
for (const rank of data.ranks) {
  const seen = {};
  let sent = 0;
  for (const one of rank.operations) {
    const what = `${["send", "recv"].includes(one.kind) ? one.kind : one.kind + one.axes} ${one.ranks}`;
    seen[what] = (seen[what] || 0) + 1;
    one.key = `${what.replace(/^(send|recv)/, "message")} ${seen[what]}`;
    one.total = sent += one.sent;
  }
  most.sent = Math.max(most.sent, sent);
  most.held = Math.max(most.held, rank.peak);
}

// The variables of a rank's current function after its step `end`: the sum of the changes of that frame.
function variables(rank, end) {
  const now = rank.steps[end];
  let values = {};
  for (let i = 0; i <= end; i++) {
    const step = rank.steps[i];
    if (step.frame !== now.frame) { if (step.frame < now.frame) values = {}; continue; }
    if (step.function !== now.function) { values = {}; continue; }
    for (const [name, value] of Object.entries(step.changed)) {
      if (value === null) delete values[name]; else values[name] = value;
    }
    if (step.ends && i < end) values = {};
  }
  return values;
}

function color(value, largest) {
  const share = largest ? Math.max(-1, Math.min(1, value / largest)) : 0;
  return share < 0 ? `hsl(215 90% ${95 + 40 * share}%)` : `hsl(25 90% ${95 - 40 * share}%)`;
}

function tensor(value, parent) {
  if (value.layout) make("div", value.layout, parent, "small");
  const numbers = value.rows.flat(), largest = Math.max(...numbers.map(Math.abs).filter(Number.isFinite), 0);
  const map = make("div", undefined, parent, "map");
  map.setAttribute("role", "img");
  map.setAttribute("aria-label", `a corner of the values: ${numbers.slice(0, 8).join(", ")}; sum of all ${value.sum}`);
  for (const row of value.rows) {
    const line = make("div", undefined, map, "row");
    for (const number of row) {
      const text = typeof number === "number" ? String(Number(number.toPrecision(numbers.length > 1 ? 2 : 6))) : number;
      const cell = make("span", text, line);
      cell.style.backgroundColor = color(number, largest);
      cell.title = String(number);
    }
  }
}

function bar(column, words, value, largest, title) {
  make("p", words, column);
  const meter = make("meter", undefined, column);
  meter.max = largest;
  meter.value = value;
  meter.setAttribute("aria-label", title);
}

// The operations that each rank has asked for between two frames.
function fresh(frame) {
  return data.ranks.map((rank, r) => {
    const [before, now] = [frame - 1, frame].map(f => f < 0 ? undefined : rank.steps[data.frames[f][r]]);
    return now ? rank.operations.slice(before ? before.operations : 0, now.operations) : [];
  });
}

function news(frame) {
  const found = new Map();
  fresh(frame).forEach((operations, r) => operations.forEach(one => {
    const here = found.get(one.key) || { one, asked: new Set(), kinds: new Set(), sent: 0 };
    here.asked.add(r); here.kinds.add(one.kind); here.sent += one.sent;
    found.set(one.key, here);
  }));
  return [...found.values()];
}

function words({ one, asked, kinds, sent }) {
  if (["send", "recv"].includes(one.kind)) {
    const done = kinds.has("recv") ? "received" : "sent";
    return `rank ${one.ranks[0]} → rank ${one.ranks[1]}: ${size(one.bytes)} ${done}`;
  }
  const root = one.root === null ? "" : `, root ${one.root}`;
  return `${one.kind} over ${one.axes.join(", ")} of ${size(one.bytes)}${root}: ranks ${one.ranks.join(", ")}` +
    `; sent together ${size(sent)}` + (asked.size < one.ranks.length ? "; not all are there yet" : "");
}

function shape(tag, attributes, parent) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (parent) parent.append(element);
  return element;
}

const SHOWN = 6;

function drawMessages(frame) {
  const found = news(frame), left = messages.getBoundingClientRect().left;
  const middles = [...columns.children].map(column => {
    const box = column.getBoundingClientRect();
    return box.left + box.width / 2 - left;
  });
  messages.replaceChildren();
  make("p", found.length ? found.slice(0, SHOWN).map(words).join("\n") : "no message in this step", messages, "said");
  if (found.length > SHOWN) make("p", `and ${found.length - SHOWN} more in this step`, messages, "small");
  const svg = shape("svg", { height: 8 + 18 * Math.min(found.length, SHOWN), "aria-hidden": "true" }, messages);
  found.slice(0, SHOWN).forEach((message, i) => {
    const { one, kinds, asked } = message, y = 12 + 18 * i, xs = one.ranks.map(r => middles[r]);
    if (["send", "recv"].includes(one.kind)) {
      const way = Math.sign(xs[1] - xs[0]), name = kinds.has("recv") ? "arrow" : "arrow leaving";
      shape("line", { x1: xs[0], y1: y, x2: xs[1] - 9 * way, y2: y, class: name }, svg);
      shape("path", { d: `M${xs[1]},${y} l${-10 * way},-5 v10 z`, class: "head" }, svg);
      shape("circle", { cx: xs[0], cy: y, r: 4 }, svg);
      return;
    }
    shape("line", { x1: Math.min(...xs), y1: y, x2: Math.max(...xs), y2: y, class: "together" }, svg);
    one.ranks.forEach((r, k) => {
      const open = asked.has(r) ? "" : "waiting";
      shape("circle", { cx: xs[k], cy: y, r: r === one.root ? 8 : 5, class: open }, svg);
    });
  });
}

// Names ranks in ascending order: r0-3 r6.
function ranksIn(ranks) {
  const runs = [];
  for (const r of ranks) {
    if (runs.length && runs.at(-1)[1] === r - 1) runs.at(-1)[1] = r; else runs.push([r, r]);
  }
  return runs.map(([a, b]) => a === b ? `r${a}` : `r${a}-${b}`).join(" ");
}

function drawRank(rank, r, frame) {
  const at = data.frames[frame][r], step = rank.steps[at], column = make("section", undefined, columns);
  column.setAttribute("aria-label", `rank ${r}`);
  make("h2", `rank ${r}`, column);
  if (rank.name) make("span", rank.name, column, "small");
  if (!step) { make("p", "no steps in this file", column); return; }
  const moved = frame === 0 || data.frames[frame - 1][r] !== at;
  const line = lines[step.line - 1];
  line.className = "at";
  line.setAttribute("aria-current", "step");
  line.here.push(r);
  line.firstChild.textContent = ranksIn(line.here);
  make("p", `${step.function}, line ${step.line}${step.ends ? ", returns" : ""}`, column);
  const n = step.operations, total = n ? rank.operations[n - 1].total : 0;
  bar(column, `sent ${size(total)} in ${n} operation${n === 1 ? "" : "s"}`, total, most.sent, "bytes sent");
  bar(column, `holds ${size(step.held)}, at most ${size(rank.peak)}`, step.held, most.held, "bytes held");
  const said = rank.steps.slice(0, at + 1).map(one => one.said || "").join("");
  const list = make("dl", undefined, column);
  for (const [name, value] of Object.entries(variables(rank, at))) {
    const changed = moved && name in step.changed;
    make("dt", name, list);
    const entry = make("dd", value.text, list, changed ? "new" : "");
    if (changed) make("span", " changed", entry, "hidden");
    if (value.rows) tensor(value, entry);
  }
  if (said) {
    make("h3", "printed", column);
    make("pre", said, column, moved && step.said ? "new" : "");
  }
}

function draw(frame) {
  lines.forEach((line, i) => {
    line.className = "";
    line.here = [];
    line.removeAttribute("aria-current");
    line.firstChild.textContent = String(i + 1);
  });
  columns.replaceChildren();
  data.ranks.forEach((rank, r) => drawRank(rank, r, frame));
  const narrow = [...columns.querySelectorAll(".row span")].filter(cell => cell.scrollWidth > cell.clientWidth);
  for (const cell of narrow) cell.textContent = "";  // its colour and its title say the number
  drawMessages(frame);
  const first = source.querySelector(".at");
  if (first) source.scrollTop = first.offsetTop - source.offsetTop - source.clientHeight / 2;
  slider.value = frame;
  count.textContent = `step ${frame + 1} of ${last + 1}`;
}

function show() {
  const asked = Number(location.hash.slice(1));
  draw(Number.isInteger(asked) ? Math.max(0, Math.min(last, asked - 1)) : 0);
}

function go(frame) {
  location.replace(`#${Math.max(0, Math.min(last, frame)) + 1}`);
  show();  // the event of the new address comes later
}

function message(from, way) {
  let frame = from + way;
  while (frame > 0 && frame < last && !news(frame).length) frame += way;
  go(frame);
}

for (const [i, { question, outcome }] of data.predictions.entries()) {
  const box = make("div", undefined, predictions, "prediction"), label = make("label", `${i + 1}. ${question}`, box);
  const mine = make("textarea", undefined, box);
  mine.rows = 1;
  label.htmlFor = mine.id = `prediction-${i + 1}`;
  const answer = make("details", undefined, box);
  make("summary", "the outcome", answer);
  make("p", outcome || "Step to the end, or run the lesson: it prints the outcome and asserts it.", answer);
}
const printed = document.getElementById("run");
for (const { label, text } of data.printed) {
  make("span", label.padEnd(10), printed.querySelector("pre"), "label");
  printed.querySelector("pre").append(text);
}
printed.hidden = !data.printed.length;
predictions.hidden = !data.predictions.length;

const here = () => Number(slider.value);
const moves = {
  ArrowRight: () => go(here() + 1), ArrowLeft: () => go(here() - 1), Home: () => go(0), End: () => go(last),
  n: () => message(here(), 1), p: () => message(here(), -1),
};
slider.max = last;
slider.addEventListener("input", () => go(here()));
for (const [id, key] of Object.entries({ first: "Home", back: "ArrowLeft", next: "ArrowRight", last: "End", message: "n" }))
  document.getElementById(id).addEventListener("click", moves[key]);
window.addEventListener("hashchange", show);
window.addEventListener("resize", () => draw(here()));
columns.addEventListener("scroll", () => drawMessages(here()));
window.addEventListener("keydown", event => {
  const typing = event.target.tagName === "TEXTAREA" || event.altKey || event.ctrlKey || event.metaKey;
  if (typing || !Object.hasOwn(moves, event.key)) return;
  event.preventDefault();
  moves[event.key]();
});
show();
