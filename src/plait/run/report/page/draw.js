"use strict";
// Numbers as text, bars, curves and the timeline. All text enters as text nodes: nothing of a run's name can run here.
const { html, render, useState, useEffect, useRef } = htmPreact;

const COLOURS = ["#4c8bc9", "#d9822b", "#e0a94e", "#6aa860", "#8f6bb8", "#3aa6a0", "#c75d6b", "#9a9a9a", "#b08968", "#6c7a89"];
const BOXES = ["forward", "backward", "input part", "weight part", "update", "gather", "reduction", "other"];

const digits = (value, n = 3) => (value === null || value === undefined ? "" : Number(value.toPrecision(n)).toLocaleString("en"));
function bytes(value) {
  if (value === null || value === undefined) return "";
  const power = value >= 1e9 ? 9 : value >= 1e6 ? 6 : value >= 1e3 ? 3 : 0;
  return `${digits(value / 10 ** power)} ${{ 9: "GB", 6: "MB", 3: "kB", 0: "B" }[power]}`;
}
function seconds(value) {
  if (value === null || value === undefined) return "";
  return value >= 1 ? `${digits(value)} s` : value >= 1e-3 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
}
const amount = (value, unit) => (value === null || value === undefined ? "" : unit === "B" ? bytes(value) : unit === "s" ? seconds(value) : `${digits(value, 4)} ${unit === "%" ? unit : ""}`);

// Bars of [name, parts], parts being [kind, size]; all on one scale, which ends at `most`.
function Bars({ rows, kinds, show, most, mark }) {
  const whole = Math.max(most || 0, ...rows.map(row => row.parts.reduce((sum, part) => sum + part[1], 0))) || 1;
  const used = kinds.filter(kind => rows.some(row => row.parts.some(part => part[0] === kind && part[1])));
  return html`<div class="bars">
    ${rows.map(row => html`<div class="bar">
      <span>${row.name}</span>
      <div class="track">
        ${row.parts.map(([kind, size]) => html`<i title=${`${kind}: ${show(size)}`}
          style=${{ width: `${100 * size / whole}%`, background: COLOURS[kinds.indexOf(kind) % COLOURS.length] }}></i>`)}
        ${mark && html`<b style=${{ left: `${100 * mark / whole}%` }} title=${`may be used: ${show(mark)}`}></b>`}
      </div>
      <span>${show(row.parts.reduce((sum, part) => sum + part[1], 0))}</span></div>`)}
    <p class="legend">${used.map(kind => html`<span><i style=${{ background: COLOURS[kinds.indexOf(kind) % COLOURS.length] }}></i>${kind}</span>`)}</p>
  </div>`;
}

// Curves over the steps, one for each report.
function Curve({ name, sets }) {
  const place = useRef(null);
  useEffect(() => {
    const tables = sets.map(set => [set.steps, set.values]);
    const scheme = matchMedia("(prefers-color-scheme: dark)").matches ? "#ccc" : "#333";
    const axis = { stroke: scheme, grid: { stroke: "#8883" }, ticks: { stroke: "#8883" } };
    const plot = new uPlot({
      width: Math.max(260, place.current.clientWidth), height: 200, scales: { x: { time: false } },
      axes: [axis, { ...axis, size: 70, values: (_, ticks) => ticks.map(tick => digits(tick)) }],
      series: [{ label: "step" }, ...sets.map((set, i) => ({
        label: sets.length > 1 ? `${name}, ${set.name}` : name, stroke: COLOURS[i], width: 1.5,
        spanGaps: true, points: { show: set.steps.length < 60 } }))],
    }, tables.length > 1 ? uPlot.join(tables) : tables[0], place.current);
    return () => plot.destroy();
  }, []);
  return html`<figure><figcaption>${name}</figcaption><div ref=${place}></div></figure>`;
}

const TALL = 13, LOW = 6, LEFT = 128;

// Steps over time: a lane for computing and a lower one for messages of each rank and step, on one scale.
function Timeline({ steps }) {
  const canvas = useRef(null), [said, say] = useState("");
  const names = Object.keys(steps).filter(name => steps[name]);
  const ranks = Math.max(...names.map(name => steps[name].length));
  const end = Math.max(...names.flatMap(name => steps[name].flatMap(one => [...one.compute, ...one.messages].map(box => box[4]))));
  const lanes = [];
  for (let rank = 0; rank < ranks; rank++) {
    for (const name of names) {
      const one = steps[name][rank];
      if (one) lanes.push({ name: `${one.name} ${name}`, boxes: one.compute, tall: TALL }, { name: "", boxes: one.messages, tall: LOW });
    }
  }
  let y = 4;
  for (const one of lanes) { one.y = y; y += one.tall + (one.tall === LOW ? 5 : 1); }
  const height = y + 18;
  const view = useRef([0, end]);

  function draw() {
    const element = canvas.current, ratio = devicePixelRatio || 1, width = element.clientWidth;
    element.width = width * ratio;
    element.height = height * ratio;
    const pen = element.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "10px sans-serif";
    const text = getComputedStyle(element).color, [from, to] = view.current, scale = (width - LEFT) / (to - from);
    for (const one of lanes) {
      pen.fillStyle = text;
      if (one.name) pen.fillText(one.name, 2, one.y + 10);
      pen.fillStyle = "#8881";
      pen.fillRect(LEFT, one.y, width - LEFT, one.tall);
      for (const [kind, stage, microbatch, start, stop] of one.boxes) {
        if (stop < from || start > to) continue;
        const left = Math.max(LEFT, LEFT + (start - from) * scale), wide = LEFT + (Math.min(stop, to) - from) * scale - left;
        pen.fillStyle = COLOURS[kind];
        pen.fillRect(left, one.y, Math.max(wide - (wide > 3 ? 0.7 : 0), 0.4), one.tall);
        if (one.tall === TALL && microbatch >= 0 && wide > 8 + 6 * String(microbatch).length) {
          pen.fillStyle = "#111";
          pen.fillText(String(microbatch), left + wide / 2 - 3 * String(microbatch).length, one.y + 10);
        }
      }
    }
    pen.fillStyle = text;
    for (let i = 0; i <= 4; i++) {
      pen.fillText(seconds(from + (to - from) * i / 4), Math.min(LEFT + (width - LEFT) * i / 4, width - 50), height - 4);
    }
  }

  function look(from, to) {
    const span = Math.min(Math.max(to - from, end / 1e5), end), start = Math.min(Math.max(from, 0), end - span);
    view.current = [start, start + span];
    draw();
  }
  const time = event => {
    const [from, to] = view.current, area = canvas.current.getBoundingClientRect();
    return from + (event.clientX - area.left - LEFT) / (area.width - LEFT) * (to - from);
  };
  const zoom = (factor, at) => { const [from, to] = view.current; look(at - (at - from) * factor, at + (to - at) * factor); };
  const pan = share => { const [from, to] = view.current; look(from + share * (to - from), to + share * (to - from)); };
  function key(event) {
    const [from, to] = view.current, middle = (from + to) / 2;
    const moves = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.6, middle), "=": () => zoom(0.6, middle),
      "-": () => zoom(1 / 0.6, middle), Home: () => look(0, end), 0: () => look(0, end) };
    if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
  }
  function hover(event) {
    if (event.buttons & 1 && event.movementX) return pan(-event.movementX / (canvas.current.clientWidth - LEFT));
    const at = time(event), row = event.clientY - canvas.current.getBoundingClientRect().top;
    const one = lanes.find(each => row >= each.y && row <= each.y + each.tall);
    const box = one && one.boxes.find(each => each[3] <= at && at <= each[4]);
    say(box ? `${BOXES[box[0]]} of stage ${box[1]}${box[2] >= 0 ? `, microbatch ${box[2]}` : ""}: ${seconds(box[4] - box[3])} from ${seconds(box[3])}` : "");
  }
  useEffect(() => {
    const wheel = event => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, time(event)); };
    canvas.current.addEventListener("wheel", wheel, { passive: false });
    addEventListener("resize", draw);
    draw();
    return () => removeEventListener("resize", draw);
  }, []);
  return html`<div>
    <canvas ref=${canvas} tabindex="0" role="img" style=${{ height: `${height}px` }} onKeyDown=${key} onMouseMove=${hover}
      onDblClick=${() => look(0, end)} aria-label=${`a step over time on ${ranks} ranks: arrows move, plus and minus zoom, 0 shows all`}></canvas>
    <p class="legend">${BOXES.map((name, i) => html`<span><i style=${{ background: COLOURS[i] }}></i>${name}</span>`)}</p>
    <output>${said || "wheel or + and - zoom, arrows or dragging move, 0 shows all; the lower lane has gathers, reductions and waits"}</output></div>`;
}
