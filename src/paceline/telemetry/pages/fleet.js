"use strict";
// Everything that comes from the coordinator is set as text, never as markup.
// The items of the stream are described in docs/schemas/event-stream.json; `paceline watch` reads the
// same ones.
const $ = id => document.getElementById(id);
const FINAL = new Set(["complete", "failed", "cancelled"]);
const SHOWN_DEPLOYMENTS = 12, SHOWN_EVENTS = 40, KEPT_EVENTS = 400, DRAW_MS = 400, SILENCE_MS = 12000;
const ROWS = 120, NEEDY = 25; // beyond ROWS workers: one picture, and NEEDY workers with problems
let token = sessionStorage.getItem("paceline-token") || "";
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  token = given;
  sessionStorage.setItem("paceline-token", token);
  history.replaceState(null, "", location.pathname); // out of the address bar and the history
}
let chosen = null, running = false, heard = null, dirty = false, drawnAt = 0, missed = 0;
let leader = {}, events = [];
const workers = new Map(), deployments = new Map(), parts = new Map();

class Denied extends Error {}
function el(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (n >= 1000 && at < 4) { n /= 1000; at++; }
  return (at && n < 10 ? n.toFixed(1) : Math.round(n)) + " " + units[at];
}
const rate = n => n ? bytes(n) + "/s" : "–";
const seconds = s => s < 90 ? (s < 9.95 ? s.toFixed(1) : Math.round(s)) + " s" : Math.round(s / 60) + " min";
const pill = status => el("span", "pill " + status, status.replaceAll("_", " "));
const natural = (a, b) => a.localeCompare(b, undefined, {numeric: true});
const rackOf = name => {
  const worker = workers.get(name);
  return worker ? [worker.zone, worker.rack].filter(Boolean).join(" / ") || "no rack" : "not registered";
};

// --- the stream -------------------------------------------------------------------------------

function take(item) {
  if (item.kind === "moment") {
    if (item.full) { workers.clear(); deployments.clear(); parts.clear(); }
    leader = item.leader;
    for (const each of item.workers) workers.set(each.worker_id, each);
    for (const each of item.deployments) {
      const id = each.deployment_id;
      if (!parts.has(id)) parts.set(id, new Map());
      for (const part of each.parts) parts.get(id).set(part.worker_id, part);
      deployments.set(id, each);
    }
    for (const id of item.gone) { deployments.delete(id); parts.delete(id); }
  } else if (item.kind === "event") {
    if (heard !== null && item.event.seq <= heard) return; // repeated by a replica that was behind
    heard = item.event.seq;
    events.push(item.event);
    if (events.length > KEPT_EVENTS) events = events.filter(each => each.name !== "worker.registered").slice(-SHOWN_EVENTS);
  } else if (item.kind === "missed") {
    missed += item.first - item.after - 1;
  }
  dirty = true;
}
async function listen() {
  const headers = {Authorization: "Bearer " + token, Accept: "text/event-stream"};
  if (heard !== null) headers["Last-Event-ID"] = String(heard);
  const control = new AbortController();
  let silence = setTimeout(() => control.abort(), SILENCE_MS);
  try {
    const path = "/events/stream" + (heard === null ? "?after=0" : "");
    const answer = await fetch(path, {headers, cache: "no-store", signal: control.signal});
    if (answer.status === 401 || answer.status === 403) throw new Denied();
    if (!answer.ok) throw new Error("the stream answered " + answer.status);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const {done, value} = await reader.read();
      if (done) return;
      clearTimeout(silence);
      silence = setTimeout(() => control.abort(), SILENCE_MS);
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks)
        for (const line of block.split("\n"))
          if (line.startsWith("data: ")) take(JSON.parse(line.slice(6)));
      connected();
    }
  } finally { clearTimeout(silence); }
}
function connected() {
  $("ask").hidden = true; $("main").hidden = false;
  $("live").className = "ok";
  $("live").textContent = "live, " + new Date().toLocaleTimeString();
  if (dirty && performance.now() - drawnAt > DRAW_MS) draw();
}
async function run() {
  if (running) return;
  running = true;
  for (let pause = 300;; pause = Math.min(3000, pause * 2)) {
    try {
      await listen();
      pause = 300;
    } catch (error) {
      if (error instanceof Denied) {
        $("live").className = "bad";
        $("live").textContent = "token needed";
        $("refused").hidden = !token;
        $("main").hidden = true; $("ask").hidden = false;
        running = false;
        return;
      }
    }
    $("live").className = "bad";
    $("live").textContent = "the coordinator does not answer; trying again";
    await new Promise(done => setTimeout(done, pause));
  }
}

// --- the page ---------------------------------------------------------------------------------

function draw() {
  dirty = false; drawnAt = performance.now();
  const known = [...deployments.values()].sort((a, b) => a.started_at - b.started_at);
  const flying = known.filter(d => !FINAL.has(d.status));
  if (!deployments.has(chosen)) chosen = known.length ? (flying.at(-1) || known.at(-1)).deployment_id : null;
  drawLeader();
  drawTiles(flying);
  drawDeployments(known);
  drawMap(deployments.get(chosen));
  drawEvents();
}
function drawLeader() {
  const here = leader.leads ? "this replica leads" :
    "this replica stands by; " + (leader.leader_url ? "the leader is " + leader.leader_url : "nobody is known to lead");
  $("leader").textContent = here + ", epoch " + leader.epoch;
}
function drawTiles(flying) {
  const every = [...workers.values()], alive = every.filter(w => w.alive);
  const sum = key => alive.reduce((total, w) => total + w[key], 0);
  const lost = every.length - alive.length;
  const failed = flying.reduce((total, d) => total + d.workers_failed.length, 0);
  const tiles = [
    [alive.length + (lost ? " / " + every.length : ""), "workers alive"],
    [new Set(every.map(w => w.zone + "/" + w.rack)).size, "racks"],
    [flying.length, "deployments in flight"],
    [rate(sum("bandwidth_in")), "received by all workers"],
    [bytes(flying.reduce((total, d) => total + d.origin_bytes, 0)), "read from origins, in flight"],
    [failed, "failed parts, in flight"],
  ];
  $("tiles").replaceChildren(...tiles.map(([value, label]) => {
    const tile = el("div");
    tile.append(el("b", "number", String(value)), el("span", "", label));
    return tile;
  }));
}
function drawDeployments(known) {
  const newest = known.slice(-SHOWN_DEPLOYMENTS).reverse(), focused = document.activeElement?.dataset?.id;
  if (!newest.length) {
    $("deployments").replaceChildren(el("p", "quiet", "None yet. `paceline distribute` makes one."));
    return;
  }
  $("deployments").replaceChildren(...newest.map(d => {
    const row = el("button", "deployment");
    row.type = "button";
    row.dataset.id = d.deployment_id;
    row.setAttribute("aria-pressed", String(d.deployment_id === chosen));
    row.onclick = () => { chosen = d.deployment_id; draw(); };
    const name = el("span", "name", d.model_id + " " + d.version);
    name.title = d.deployment_id;
    const facts = [bytes(d.total_bytes), d.workers_complete + " of " + d.workers + " workers", d.topology];
    if (d.epoch > 1) facts.push("plan " + d.epoch);
    if (d.workers_failed.length) facts.push(d.workers_failed.length + " failed");
    facts.push(bytes(d.origin_bytes) + " from the origin");
    if (d.seconds !== null) facts.push("took " + seconds(d.seconds) + " (bound " + seconds(d.bound_seconds) + ")");
    else if (!FINAL.has(d.status)) {
      facts.push(Math.floor(d.progress * 100) + " %");
      if (d.rate_bytes_s) facts.push(rate(d.rate_bytes_s));
      facts.push(d.eta_s !== null ? "about " + seconds(d.eta_s) + " left" : "expected " + seconds(d.predicted_seconds));
    }
    const bar = el("div", "bar"), fill = el("i"), marks = el("span");
    fill.style.width = (d.progress * 100).toFixed(1) + "%";
    bar.append(fill);
    if (d.activation !== "none") marks.append(pill(d.activation), " ");
    marks.append(pill(d.status));
    row.append(name, marks, el("span", "facts number", facts.join("  ·  ")), el("span"), bar);
    if (d.failure) {
      const reason = el("div", "reason", d.failure.code + ": " + d.failure.message);
      reason.style.gridColumn = "1 / -1";
      row.append(reason);
    }
    return row;
  }));
  if (focused) [...$("deployments").children].find(row => row.dataset.id === focused)?.focus();
}
const colours = () => {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(["held", "coming", "empty", "bad"].map(name => [name, style.getPropertyValue("--" + name)]));
};
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
  const more = part.bytes_held / deployment.total_bytes * deployment.total_chunks - chunksOf(part);
  if (more > 0 && !dead) {
    pen.fillStyle = colour.coming;
    pen.fillRect(x(next), top, Math.max(1, x(Math.min(next + more, deployment.total_chunks)) - x(next)), height);
  }
  if (gap) {
    pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--card");
    for (let chunk = 1; chunk < deployment.total_chunks; chunk++) pen.fillRect(x(chunk) - gap, top, gap, height);
  }
}
function paint(canvas, deployment, part, colour) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth || 400;
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
  if (!deployment) {
    $("maptitle").textContent = "Workers";
    drawFleet();
    return;
  }
  $("maptitle").replaceChildren("Workers × chunks of ", el("span", "as-is", deployment.model_id + " " + deployment.version));
  const every = [...parts.get(deployment.deployment_id).values()];
  const where = new Map(every.map(part => [part.worker_id, rackOf(part.worker_id)]));
  every.sort((a, b) => natural(where.get(a.worker_id), where.get(b.worker_id)) || natural(a.worker_id, b.worker_id));
  const colour = colours(), painted = [];
  if (every.length <= ROWS) {
    $("map").replaceChildren(table(deployment, every, where, painted), legend());
  } else {
    const needy = every.filter(part => !part.verified).sort((a, b) =>
      (a.status === "failed" ? 0 : 1) - (b.status === "failed" ? 0 : 1) || a.bytes_held - b.bytes_held).slice(0, NEEDY);
    const all = picture(deployment, every, where, colour);
    $("map").replaceChildren(all, el("p", "", ""), table(deployment, needy, where, painted), legend());
    all.nextSibling.id = "under";
    all.nextSibling.textContent = every.length + " workers, by rack; below, who is furthest behind";
  }
  for (const [canvas, part] of painted) paint(canvas, deployment, part, colour);
}
function picture(deployment, every, where, colour) {
  // One row per worker, as high as the space allows: the whole fleet in one picture.
  const canvas = el("canvas"), row = Math.max(1, Math.floor(600 / every.length));
  canvas.id = "all";
  canvas.width = 1200;
  canvas.height = every.length * row;
  const pen = canvas.getContext("2d");
  every.forEach((part, at) => strip(pen, part, deployment, at * row, Math.max(1, row > 3 ? row - 1 : row), 1200, 0, colour));
  canvas.onmousemove = event => {
    const part = every[Math.min(every.length - 1, Math.floor(event.offsetY / canvas.clientHeight * every.length))];
    $("under").textContent = part.worker_id + " (" + where.get(part.worker_id) + "): " + part.status + ", " +
      chunksOf(part) + " of " + deployment.total_chunks + " chunks, " + rate(part.rate_bytes_s);
  };
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", every.length + " workers and the chunks they hold");
  return canvas;
}
function table(deployment, shown, where, painted) {
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
    const worker = workers.get(part.worker_id), row = el("tr", part.alive ? "" : "dead"), map = el("td", "map");
    const canvas = el("canvas"), state = el("td");
    map.append(canvas);
    const from = part.verified ? "" : (part.upstream_worker || "").replace(/^origin:.*/, "the origin");
    const mark = pill(part.alive || part.verified ? part.activated ? "active" : part.status : "lost");
    if (part.failure) mark.title = part.failure.code + ": " + part.failure.message;
    state.append(mark);
    if (part.standing !== "line" && !part.verified) state.append(" ", pill(part.standing));
    row.append(el("td", "", part.worker_id), map, el("td", "rate", rate(part.rate_bytes_s)),
      el("td", "rate wide", rate(worker && worker.alive ? worker.bandwidth_out : 0)), el("td", "from wide", from), state);
    body.append(row);
    painted.push([canvas, part]);
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
function machine(has) {
  if (!has) return "";
  const gpus = has.accelerators.map(each => each.count + " × " + each.kind + " " + bytes(each.memory_bytes));
  const parts = [...gpus, has.cores + " cores", bytes(has.memory_bytes)];
  if (has.interface_mbit) parts.push(has.interface + " " + has.interface_mbit + " Mbit/s");
  if (has.disk_bytes_s) parts.push("disk " + bytes(has.disk_bytes_s) + "/s");
  return parts.join(", ");
}
function drawFleet() {
  if (!workers.size) { $("map").replaceChildren(el("p", "quiet", "No worker has registered yet.")); return; }
  const made = el("table");
  for (const worker of [...workers.values()].sort((a, b) => natural(a.worker_id, b.worker_id)).slice(0, 1000)) {
    const row = el("tr", worker.alive ? "" : "dead"), state = el("td");
    state.append(pill(worker.alive ? "idle" : "lost"));
    for (const found of worker.findings || []) {
      const [what, ...fix] = found.split(" → "), line = el("div", "finding", what);
      if (fix.length) line.append(el("small", "", "→ " + fix.join(" → ")));
      state.append(line);
    }
    const host = el("td", "", worker.hostname);
    host.append(el("small", "", machine(worker.inventory)));
    row.append(el("td", "", worker.worker_id), el("td", "", rackOf(worker.worker_id)), host,
      el("td", "rate", bytes(worker.available_storage)), state);
    made.append(row);
  }
  $("map").replaceChildren(made);
}
function shownValue(value) {
  if (typeof value === "number" && !Number.isInteger(value)) return value.toPrecision(3);
  return typeof value === "object" ? JSON.stringify(value) : value;
}
function drawEvents() {
  const BAD = /lost|failed|corrupt|slow|quarantined|delayed|stalled|cancelled/;
  // Registrations are counted above; hundreds of such events would hide the others.
  const shown = events.filter(event => event.name !== "worker.registered").slice(-SHOWN_EVENTS).reverse().map(event => {
    const line = el("li"), time = el("time", "mono", new Date(event.at * 1000).toLocaleTimeString());
    const {from, to, source, ...rest} = event.data;
    const change = to ? (from ? " " + from : "") + " → " + to : "";
    const text = [event.name.replace("deployment.", ""), event.worker_id, source].filter(Boolean).join(" ");
    line.append(time, el("span", BAD.test(event.name + to) ? "bad" : "", text.replaceAll("_", " ") + change));
    const detail = Object.entries(rest).map(([key, value]) => key.replaceAll("_", " ") + " " + shownValue(value));
    if (detail.length) line.append(el("small", "", detail.join(", ")));
    return line;
  });
  if (missed) shown.push(el("li", "quiet", missed + " earlier events are in the audit history only."));
  if (!shown.length) shown.push(el("li", "quiet", "Nothing yet."));
  $("events").replaceChildren(...shown);
}
$("ask").onsubmit = event => {
  event.preventDefault();
  token = $("token").value.trim();
  sessionStorage.setItem("paceline-token", token);
  run();
};
window.onresize = () => { if (!$("main").hidden) draw(); };
if (token) run();
else { $("ask").hidden = false; $("live").textContent = "token needed"; }
