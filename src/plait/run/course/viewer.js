"use strict";
// One frame of the page is one step index per rank. All text enters by textContent: nothing of a program can run here.
const data = JSON.parse(document.getElementById("data").textContent);
const source = document.getElementById("source"), columns = document.getElementById("ranks");
const slider = document.getElementById("slider"), count = document.getElementById("count");
const last = data.frames.length - 1;
document.getElementById("title").textContent = document.title;

function make(tag, text, parent, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  if (parent) parent.append(element);
  return element;
}

const lines = data.source.map((text, i) => {
  const line = make("div", undefined, source);
  make("span", String(i + 1), line, "who");
  make("span", text, line);
  return line;
});

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
  const largest = Math.max(...value.rows.flat().map(Math.abs).filter(Number.isFinite), 0);
  for (const row of value.rows) {
    const line = make("div", undefined, parent, "row");
    for (const number of row) {
      const cell = make("span", typeof number === "number" ? String(Number(number.toPrecision(2))) : number, line);
      cell.style.backgroundColor = color(number, largest);
      cell.title = String(number);
    }
  }
}

const mostSent = Math.max(1, ...data.ranks.map(rank => rank.sent.at(-1) || 0));

function draw(frame) {
  lines.forEach((line, i) => { line.className = ""; line.firstChild.textContent = String(i + 1); });
  columns.replaceChildren();
  data.ranks.forEach((rank, r) => {
    const at = data.frames[frame][r], step = rank.steps[at];
    const column = make("section", undefined, columns);
    make("h2", `rank ${r}`, column);
    if (!step) { make("p", "no steps in this file", column); return; }
    const line = lines[step.line - 1];
    line.className = "at";
    line.firstChild.textContent = `${line.firstChild.textContent.replace(/^\d+$/, "")} r${r}`.trim();
    const n = step.operations;
    make("p", `${step.function}, line ${step.line}${step.ends ? ", returns" : ""}`, column);
    make("p", n ? `operation ${n}: ${rank.operations[n - 1]}` : "nothing sent yet", column);
    const bar = make("meter", undefined, column);
    bar.max = mostSent;
    bar.value = n ? rank.sent[n - 1] : 0;
    bar.title = `${bar.value} bytes sent`;
    const list = make("dl", undefined, column);
    for (const [name, value] of Object.entries(variables(rank, at))) {
      const changed = name in step.changed && (frame === 0 || data.frames[frame - 1][r] !== at);
      make("dt", name, list);
      const entry = make("dd", value.text, list, changed ? "new" : "");
      if (value.rows) tensor(value, entry);
    }
  });
  const first = source.querySelector(".at");
  if (first) first.scrollIntoView({ block: "center" });
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

slider.max = last;
slider.addEventListener("input", () => go(Number(slider.value)));
window.addEventListener("hashchange", show);
window.addEventListener("keydown", event => {
  const here = Number(slider.value);
  const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: last }[event.key];
  if (to !== undefined) { event.preventDefault(); go(to); }
});
show();
