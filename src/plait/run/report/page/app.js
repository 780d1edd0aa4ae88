"use strict";
const reports = JSON.parse(document.getElementById("data").textContent);

const Table = ({ head, rows }) => html`<div class="scroll"><table><thead><tr>${head.map(one => html`<th>${one}</th>`)}</tr></thead>
  <tbody>${rows.map(row => html`<tr class=${row.mark || ""}>${(row.cells || row).map(cell => html`<td>${cell}</td>`)}</tr>`)}</tbody></table></div>`;

const Section = ({ name, children }) => html`<section><h2>${name}</h2>${children}</section>`;

function Layout({ layout }) {
  const kinds = Object.keys(layout.cells), axes = Object.keys(layout.axes);
  return html`<p>mesh ${layout.mesh}, ${layout.size.toLocaleString("en")} ranks; row ${layout.row}${layout.crossing.length ? `; ${layout.crossing.join(", ")} between hosts` : ""}.${
    layout.ranks.length < layout.size ? ` Here are ${layout.ranks.length} ranks, the first along each axis.` : ""}</p>
    <div class="scroll low" tabindex="0"><table class="ranks"><thead><tr><th>rank</th>${axes.map(axis => html`<th>${axis}</th>`)}
      ${kinds.map(kind => html`<th>${kind}: ${layout.cells[kind]}</th>`)}</tr></thead><tbody>
    ${layout.ranks.map(one => html`<tr><td>${one.rank}</td>${axes.map(axis => html`<td>${one.at[axis]}</td>`)}
      ${kinds.map((kind, i) => { const [index, parts] = one.parts[kind]; return html`<td><div class="track" title=${parts > 1 ? `part ${index + 1} of ${parts}` : "all of it"}>
        <i style=${{ marginLeft: `${100 * index / parts}%`, width: `${Math.max(100 / parts, 0.8)}%`, background: COLOURS[i] }}></i></div></td>`; })}</tr>`)}
    </tbody></table></div><p>A bar is the model, or this rank's part of it where pipe or tensor cut it. The filled piece is on the rank.</p>`;
}

function Memory({ memory }) {
  const measured = memory.ranks.some(one => one.kinds.some(kind => kind[2] !== null));
  const rows = memory.ranks.flatMap(one => [
    { name: `rank ${one.rank}${measured ? " predicted" : ""}`, parts: one.kinds.filter(kind => kind[1] !== null).map(kind => [kind[0], kind[1]]) },
    ...(measured ? [{ name: "measured", parts: one.kinds.filter(kind => kind[2] !== null).map(kind => [kind[0], kind[2]]) }] : [])]);
  const kinds = [...new Set(memory.ranks.flatMap(one => one.kinds.map(kind => kind[0])))];
  return html`<${Bars} rows=${rows} kinds=${kinds} show=${bytes} most=${memory.capacity} mark=${memory.capacity} />
    ${memory.capacity && html`<p>The line is what a device may use: ${bytes(memory.capacity)}.</p>`}`;
}

function Messages({ messages }) {
  const measured = messages.some(one => one.measured !== null);
  const keys = [...new Set(messages.map(one => `${one.axes.join(", ")}, ${one.link}`))];
  const bars = column => messages.filter(one => one[column]).map(one => [`${one.axes.join(", ")}, ${one.link}`, one[column]]);
  const rows = [{ name: "predicted", parts: bars("predicted") }, ...(measured ? [{ name: "measured", parts: bars("measured") }] : [])];
  return html`<${Bars} rows=${rows} kinds=${keys} show=${bytes} />
    <${Table} head=${["phase", "messages", "over", "link", "predicted", ...(measured ? ["measured"] : ["seconds"])]}
      rows=${messages.map(one => [one.phase, `${one.times.toLocaleString("en")} ${one.kind}`, one.axes.join(", "), one.link, bytes(one.predicted),
        measured ? bytes(one.measured) : seconds(one.seconds)])} />`;
}

function Seconds({ parts }) {
  const measured = parts.some(part => part[2] !== null), kinds = parts.map(part => part[0]);
  const rows = [["predicted", 1], ...(measured ? [["measured", 2]] : [])].map(([name, column]) =>
    ({ name, parts: parts.filter(part => part[column]).map(part => [part[0], part[column]]) }));
  return html`<${Bars} rows=${rows.filter(row => row.parts.length)} kinds=${kinds} show=${seconds} />`;
}

// The sliders choose a line of the tables. The setting that was moved is kept; of the lines that have it the nearest is taken.
function Explorer({ explorer }) {
  const [at, go] = useState(explorer.at), { fields, kinds, parts, lines } = explorer;
  const values = fields.map((_, f) => [...new Set(lines.map(line => line[f]))].sort((a, b) => (typeof a === "number" ? a - b : 0)));
  const total = line => line.slice(fields.length + kinds.length).reduce((a, b) => a + b, 0);
  const held = line => line.slice(fields.length, fields.length + kinds.length).reduce((a, b) => a + b, 0);
  const line = lines[at];
  function move(f, place) {
    const wanted = values[f][place];
    const far = other => fields.reduce((sum, _, g) => {
      const steps = Math.abs(values[g].indexOf(other[g]) - values[g].indexOf(line[g]));
      return g === f ? sum : sum + (steps ? 1 + 0.01 * steps : 0);
    }, 0);
    const near = lines.map((other, i) => [i, other]).filter(([, other]) => other[f] === wanted).sort((a, b) => far(a[1]) - far(b[1]));
    if (near.length) go(near[0][0]);
  }
  const same = lines.map((other, i) => [i, other]).filter(([, other]) => other[0] === line[0] && held(other) <= explorer.capacity);
  same.sort((a, b) => total(a[1]) - total(b[1]));
  const place = same.findIndex(([i]) => i === at), took = total(line), fits = held(line) <= explorer.capacity;
  return html`<div class="sliders">${fields.map((field, f) => html`<label>${field}<input type="range" min="0" max=${values[f].length - 1}
      value=${values[f].indexOf(line[f])} onInput=${event => move(f, Number(event.target.value))} aria-valuetext=${String(line[f])} />
      <output>${String(line[f])}</output></label>`)}</div>
    <p class="answer">${seconds(took)} a step, ${digits(explorer.tokens / took, 4)} tokens/s, MFU ${digits(100 * explorer.flops / took / line[0])} %, ${
      bytes(1e6 * held(line))} on the fullest rank: ${fits ? "fits" : `${bytes(1e6 * (held(line) - explorer.capacity))} too many`}.
      ${place >= 0 ? ` Number ${place + 1} of ${same.length} that fit on ${line[0]} devices.` : ` ${same.length} layouts fit on ${line[0]} devices.`}
      ${same.length ? html` <button onClick=${() => go(same[0][0])}>take the fastest that fits</button>` : ""}</p>
    <${Bars} rows=${[{ name: "bytes", parts: kinds.map((kind, k) => [kind, 1e6 * line[fields.length + k]]) }]} kinds=${kinds} show=${bytes} most=${1e6 * explorer.capacity} mark=${1e6 * explorer.capacity} />
    <${Bars} rows=${[{ name: "seconds", parts: parts.map((part, k) => [part, line[fields.length + kinds.length + k]]) }]} kinds=${parts} show=${seconds} />`;
}

const Numbers = ({ all }) => {
  const names = [...new Set(all.flatMap(one => one.numbers.map(row => row[0])))];
  const value = (one, name) => one.numbers.find(row => row[0] === name);
  const best = row => (row && row[2] !== null ? row[2] : row ? row[1] : null);
  const columns = ["predicted", "measured"].filter((_, i) => all.some(one => one.numbers.some(row => row[i + 1] !== null)));
  const cells = row => columns.map(column => (row ? amount(row[column === "predicted" ? 1 : 2], row[3]) : ""));
  return html`<${Table} head=${["", ...all.flatMap(one => columns.map(column => (all.length > 1 ? `${one.name}: ${column}` : column))), ...(all.length === 2 ? ["difference"] : [])]}
    rows=${names.map(name => {
      const rows = all.map(one => value(one, name)), [a, b] = rows.map(best);
      const change = all.length === 2 ? [a && b ? `${b > a ? "+" : ""}${digits(100 * (b / a - 1))} %` : ""] : [];
      return [name, ...rows.flatMap(cells), ...change];
    })} />`;
};

const Report = ({ one, several }) => html`<article>
  ${several && html`<h1>${one.name}</h1>`}
  ${one.notes.map(note => html`<p class="note">${note}</p>`)}
  ${one.limit && html`<${Section} name="What limits it"><p>${one.limit}</p>${one.change && html`<p>The one change that the planner would make: ${one.change}</p>`}<//>`}
  ${one.explorer && html`<${Section} name="Explore"><${Explorer} explorer=${one.explorer} /><//>`}
  ${one.layout && html`<${Section} name="Who holds what"><${Layout} layout=${one.layout} /><//>`}
  ${one.memory && html`<${Section} name="Memory"><${Memory} memory=${one.memory} /><//>`}
  ${one.seconds && one.seconds.length > 0 && html`<${Section} name="Seconds of a step"><${Seconds} parts=${one.seconds} /><//>`}
  ${one.timelines && Object.values(one.timelines).some(Boolean) && html`<${Section} name="A step over time"><${Timeline} steps=${one.timelines} /><//>`}
  ${one.messages && one.messages.length > 0 && html`<${Section} name="Messages"><${Messages} messages=${one.messages} /><//>`}
  ${one.others && one.others.length > 0 && html`<${Section} name="Layouts"><${Table} head=${["mesh", "row", "order", "microbatches", "recompute", "a step", "MFU", "fullest rank", "loses"]}
    rows=${one.others.map(row => ({ mark: row.fits ? "" : "bad", cells: [row.mesh, row.row, row.order, row.microbatches, row.recompute, seconds(row.seconds), `${digits(row.mfu)} %`,
      bytes(row.bytes), row.fits ? row.loses : "does not fit"] }))} /><//>`}</article>`;

function App() {
  const several = reports.length > 1, drawn = reports.filter(one => one.curves);
  const names = [...new Set(drawn.flatMap(one => Object.keys(one.curves.values)))];
  return html`<header><h1>${reports.map(one => one.name).join(" and ")}</h1></header>
    <${Numbers} all=${reports} />
    <div class="curves">${names.map(name => html`<${Curve} name=${name} sets=${drawn.filter(one => one.curves.values[name])
      .map(one => ({ name: one.name, steps: one.curves.steps, values: one.curves.values[name] }))} />`)}</div>
    <div class=${several ? "beside" : ""}>${reports.map(one => html`<${Report} one=${one} several=${several} />`)}</div>`;
}

render(html`<${App} />`, document.getElementById("app"));
