// Deployments: the list, what may be done to one, its workers × chunks, and who takes from whom.
import {$, FINAL, action, bar, bytes, colours, el, fill, filter, fleet, link, may, more, pill, rate, seconds, session,
  short, workerLink} from "./common.js";
import {natural, rackOf, workersTable} from "./workers.js";
import {drawTopology} from "./topology.js";

const SHOWN = 12, MAP_ROWS = 120, NEEDY = 25; // beyond MAP_ROWS workers: one picture, and NEEDY with problems
let canvases = new Map(); // of the workers that are shown, and the whole fleet's, "": a new one is dear
const painted = new WeakMap(); // canvas → what was drawn on it
let drawn = []; // parts as the whole fleet's picture has them, row by row
let chosen = null, asked = null, shape = "chunks"; // asked: by the address, perhaps before it is known

export function choose(id) { asked = id; }

export function drawDeployments() {
  const known = [...fleet.deployments.values()].sort((a, b) => a.started_at - b.started_at);
  const running = known.filter(d => !FINAL.has(d.status));
  if (fleet.deployments.has(asked)) { chosen = asked; asked = null; }
  if (!fleet.deployments.has(chosen)) chosen = (running.at(-1) || known.at(-1))?.deployment_id ?? null;
  const wanted = filter("deployment-filter", drawDeployments);
  const found = known.filter(d => wanted([d.status, d.activation, FINAL.has(d.status) ? "" : "running"], d.model_id, d.version, d.deployment_id)).reverse();
  const rows = found.filter((d, at) => at < SHOWN || d.deployment_id === chosen).map(entry);
  if (!known.length) rows.push(el("p", "quiet", "None yet. `paceline distribute` makes one."));
  else if (!found.length) rows.push(el("p", "quiet", "None matches the filter."));
  fill($("deployments"), ...rows, more(rows.length, found.length));
  drawMap(fleet.deployments.get(chosen));
}
function entry(d) {
  const row = el("button", "deployment"), is = d.deployment_id === chosen;
  row.type = "button";
  row.dataset.key = d.deployment_id;
  row.setAttribute("aria-pressed", String(is));
  row.onclick = () => {
    chosen = d.deployment_id;
    history.replaceState(null, "", "#" + new URLSearchParams({deployment: chosen})); // to copy it from
    drawDeployments();
  };
  const name = el("span", "name", d.model_id + " " + d.version), marks = el("span");
  name.title = d.deployment_id;
  const told = [bytes(d.total_bytes), d.workers_complete + " of " + d.workers + " workers", d.topology];
  if (d.epoch > 1) told.push("plan " + d.epoch);
  if (d.workers_failed.length) told.push(d.workers_failed.length + " failed");
  told.push(bytes(d.origin_bytes) + " from the origin");
  if (d.seconds !== null) told.push("took " + seconds(d.seconds) + " (bound " + seconds(d.bound_seconds) + ")");
  else if (!FINAL.has(d.status)) {
    told.push(Math.floor(d.progress * 100) + " %");
    if (d.rate_bytes_s) told.push(rate(d.rate_bytes_s));
    told.push(d.eta_s !== null ? "about " + seconds(d.eta_s) + " left" : "expected " + seconds(d.predicted_seconds));
  }
  if (d.activation !== "none") marks.append(pill(d.activation), " ");
  marks.append(pill(d.status));
  row.append(name, marks, el("span", "facts number", told.map(each => each.replaceAll(" ", "\u00a0")).join("  ·  ")), el("span"),
    bar(d.progress, d.model_id + " " + d.version));
  if (d.failure) row.append(el("div", "reason", short(d.failure.code + ": " + d.failure.message)));
  return is ? el("div", "", row, actions(d)) : row;
}
function actions(d) {
  const made = el("div", "acts"), path = "/deployments/" + encodeURIComponent(d.deployment_id);
  const name = d.model_id + " " + d.version, prefect = session.who?.pages.prefect;
  if (may("deploy")) {
    if (!FINAL.has(d.status)) made.append(action("Cancel", "Cancel the deployment of " + name + "?",
      "Its workers stop receiving and publish nothing of it. What arrived is kept.", path, "DELETE"));
    if (d.status === "complete" && d.activation !== "active") made.append(action("Activate", "Activate " + name + "?",
      "The fleet switches to this version once a quorum of its workers is ready.", path + "/activate"));
    if (d.activation === "active") made.append(action("Roll back", "Roll back " + name + "?",
      "The fleet switches back to the version before this one. Nothing is transferred.", path + "/rollback"));
  }
  if (d.flow_run_id && prefect)
    made.append(link(prefect.replace(/\/+$/, "") + "/runs/flow-run/" + encodeURIComponent(d.flow_run_id), "Flow run in Prefect"));
  return made;
}
function chunksOf(part) { return part.chunks.reduce((total, [first, last]) => total + last - first + 1, 0); }
function strip(pen, part, deployment, top, height, width, gap, colour) {
  // Held chunks are runs; bytes in transit are drawn after the run from the start.
  const step = width / deployment.total_chunks, x = chunk => Math.round(chunk * step);
  const dead = part.status === "failed" || part.status === "verification_failed";
  pen.fillStyle = colour.empty;
  pen.fillRect(0, top, width, height);
  pen.fillStyle = dead ? colour.bad : colour.held;
  pen.globalAlpha = dead ? .45 : 1;
  let next = 0;
  for (const [first, last] of part.chunks) {
    pen.fillRect(x(first), top, Math.max(1, x(last + 1) - x(first)), height);
    if (first <= next) next = last + 1;
  }
  pen.globalAlpha = 1;
  pen.fillStyle = colour.card; // what a dead worker holds is hatched: colour alone does not say it
  if (dead) for (let at = 0; at < x(next); at += 6) pen.fillRect(at, top, 2, height);
  const more = part.bytes_held / deployment.total_bytes * deployment.total_chunks - chunksOf(part);
  if (more > 0 && !dead) {
    pen.fillStyle = colour.coming;
    pen.fillRect(x(next), top, Math.max(1, x(Math.min(next + more, deployment.total_chunks)) - x(next)), height);
  }
  if (gap) {
    pen.fillStyle = colour.card;
    for (let chunk = 1; chunk < deployment.total_chunks; chunk++) pen.fillRect(x(chunk) - gap, top, gap, height);
  }
}
function changed(canvas, ...now) {
  // Returns whether the canvas shows something else than `now`, which it will show from here on.
  const before = painted.get(canvas);
  painted.set(canvas, now);
  return !before || now.some((each, at) => each !== before[at]);
}
function paint(canvas, deployment, part, colour, shown) {
  const ratio = window.devicePixelRatio || 1, width = shown || 400;
  if (!changed(canvas, deployment.deployment_id, part, width, ratio, colour.held)) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(16 * ratio);
  const gap = canvas.width / deployment.total_chunks > 5 * ratio ? Math.max(1, Math.round(ratio)) : 0;
  strip(canvas.getContext("2d"), part, deployment, 0, canvas.height, canvas.width, gap, colour);
  const whole = chunksOf(part) + " of " + deployment.total_chunks + " chunks";
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", part.worker_id + " holds " + whole);
  canvas.title = whole + ", " + bytes(part.bytes_held);
}
function drawMap(deployment) {
  $("shapes").hidden = !deployment;
  if (!deployment) {
    $("maptitle").textContent = "Workers";
    fill($("map"), workersTable([...fleet.workers.values()]));
    return;
  }
  for (const each of $("shapes").children) {
    each.setAttribute("aria-pressed", String(each.value === shape));
    each.onclick = () => { shape = each.value; drawMap(fleet.deployments.get(chosen)); };
  }
  $("maptitle").replaceChildren(shape === "chunks" ? "Workers × chunks of " : "Topology of ",
    el("span", "as-is", deployment.model_id + " " + deployment.version));
  const every = [...fleet.parts.get(deployment.deployment_id).values()], colour = colours();
  if (shape === "tree") { drawTopology($("map"), every, colour); return; }
  const where = new Map(every.map(part => [part.worker_id, rackOf(part.worker_id)])), strips = [];
  every.sort((a, b) => natural(where.get(a.worker_id), where.get(b.worker_id)) || natural(a.worker_id, b.worker_id));
  const known = canvases;
  canvases = new Map();
  const canvas = id => canvases.set(id, known.get(id) || el("canvas")).get(id);
  if (every.length <= MAP_ROWS) {
    fill($("map"), table(deployment, every, where, strips, canvas), legend());
  } else {
    const needy = every.filter(part => !part.verified).sort((a, b) =>
      (a.status === "failed" ? 0 : 1) - (b.status === "failed" ? 0 : 1) || a.bytes_held - b.bytes_held).slice(0, NEEDY);
    const under = el("p", "quiet", every.length + " workers, by rack; below, who is furthest behind");
    under.id = "under";
    fill($("map"), picture(canvas(""), deployment, every, where, colour), under,
      table(deployment, needy, where, strips, canvas), legend());
  }
  const widths = strips.map(([each]) => each.clientWidth); // all at once: each would lay the page out again
  strips.forEach(([each, part], at) => paint(each, deployment, part, colour, widths[at]));
}
function picture(canvas, deployment, every, where, colour) {
  // One row per worker, as high as the space allows: the whole fleet in one picture, of which the rows
  // that changed are drawn.
  const row = Math.max(1, Math.floor(600 / every.length)), pen = canvas.getContext("2d");
  if (changed(canvas, deployment.deployment_id, every.length, colour.held)) {
    canvas.id = "all";
    canvas.width = 1200;
    canvas.height = every.length * row; // clears it, too
    drawn = [];
  }
  every.forEach((part, at) => {
    if (part !== drawn[at])
      strip(pen, part, deployment, at * row, Math.max(1, row > 3 ? row - 1 : row), 1200, 0, colour);
  });
  drawn = every;
  canvas.onmousemove = event => {
    const part = every[Math.min(every.length - 1, Math.floor(event.offsetY / canvas.clientHeight * every.length))];
    $("under").textContent = part.worker_id + " (" + where.get(part.worker_id) + "): " + part.status + ", " +
      chunksOf(part) + " of " + deployment.total_chunks + " chunks, " + rate(part.rate_bytes_s);
  };
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", every.length + " workers and the chunks they hold");
  return canvas;
}
function table(deployment, shown, where, strips, canvasOf) {
  const made = el("table"), head = el("tr"), body = el("tbody");
  for (const [name, kind] of [["Worker", ""], ["Chunks", ""], ["Gains", "rate"], ["Sends", "rate wide"], ["Takes from", "wide"], ["", ""]])
    head.append(el("th", kind, name));
  made.append(el("thead"), body);
  made.tHead.append(head);
  let rack = null;
  for (const part of shown) {
    if (where.get(part.worker_id) !== rack) {
      rack = where.get(part.worker_id);
      const line = el("tr", "rack"), cell = el("td", "", rack);
      cell.colSpan = 6;
      line.append(cell);
      body.append(line);
    }
    const worker = fleet.workers.get(part.worker_id), row = el("tr", part.alive ? "" : "dead"), map = el("td", "map");
    const canvas = canvasOf(part.worker_id), state = el("td");
    map.append(canvas);
    const from = part.verified ? "" : (part.upstream_worker || "").replace(/^origin:.*/, "the origin");
    const mark = pill(part.alive || part.verified ? part.activated ? "active" : part.status : "lost");
    if (part.failure) mark.title = short(part.failure.code + ": " + part.failure.message);
    state.append(mark);
    if (part.standing !== "line" && !part.verified) state.append(" ", pill(part.standing));
    row.append(el("td", "", workerLink(part.worker_id)), map, el("td", "rate", rate(part.rate_bytes_s)),
      el("td", "rate wide", rate(worker && worker.alive ? worker.bandwidth_out : 0)), el("td", "from wide", from), state);
    body.append(row);
    strips.push([canvas, part]);
  }
  return made;
}
function legend() {
  const made = el("div", "legend");
  for (const [name, label] of [["--held", "verified and held"], ["--coming", "arriving"], ["--empty", "not there yet"], ["--bad", "lost"]]) {
    const entry = el("span", "", label), box = el("i");
    box.style.background = "var(" + name + ")";
    entry.prepend(box);
    made.append(entry);
  }
  return made;
}
