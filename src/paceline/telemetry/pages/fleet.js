// The fleet page: login, the coordinator's stream, and which view is shown. The items of the stream are
// described in docs/schemas/event-stream.json; `paceline watch` reads the same ones.
import {$, FINAL, api, bytes, el, fill, fleet, link, press, rate, session} from "./common.js";
import {pollApproval, pollApprovals} from "./approvals.js";
import {choose, drawDeployments} from "./deployments.js";
import {drawEvents, keep} from "./events.js";
import {pollJob, pollJobs} from "./jobs.js";
import {drawWorker, drawWorkers, pollWorker, rated} from "./workers.js";

const DRAW_MS = 400, POLL_MS = 2000, COUNT_MS = 10000, SILENCE_MS = 12000;
const STORED = "paceline-token";
const VIEWS = { // what a view draws of the stream, and what it asks for by itself
  overview: {draw: () => { drawTiles(); drawDeployments(); drawEvents(); }},
  workers: {draw: drawWorkers},
  worker: {draw: id => drawWorker(id), poll: pollWorker},
  jobs: {poll: pollJobs},
  job: {poll: pollJob},
  approvals: {poll: pollApprovals},
  approval: {poll: pollApproval},
};
let view = "overview", subject = "", running = false, heard = null, dirty = false, drawnAt = 0, asking = false;

class Denied extends Error {}

// --- the stream -------------------------------------------------------------------------------

function take(item) {
  if (item.kind === "moment") {
    if (item.full) { fleet.workers.clear(); fleet.deployments.clear(); fleet.parts.clear(); }
    fleet.leader = item.leader;
    for (const each of item.workers) { fleet.workers.set(each.worker_id, each); rated(each, item.at); }
    for (const each of item.deployments) {
      const id = each.deployment_id;
      if (!fleet.parts.has(id)) fleet.parts.set(id, new Map());
      for (const part of each.parts) fleet.parts.get(id).set(part.worker_id, part);
      fleet.deployments.set(id, each);
    }
    for (const id of item.gone) { fleet.deployments.delete(id); fleet.parts.delete(id); }
  } else if (item.kind === "event") {
    if (heard !== null && item.event.seq <= heard) return; // repeated by a replica that was behind
    heard = item.event.seq;
    keep(item.event);
  } else if (item.kind === "missed") {
    fleet.missed += item.first - item.after - 1;
  }
  dirty = true;
}
async function listen() {
  const headers = {Authorization: "Bearer " + session.token, Accept: "text/event-stream"};
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
  $("ask").hidden = true; $("main").hidden = $("bar").hidden = false;
  $("live").className = "ok";
  $("live").textContent = "live, " + new Date().toLocaleTimeString();
  if (!session.who && !asking) identify();
  if (dirty && !press.held && performance.now() - drawnAt > DRAW_MS) draw();
}
async function identify() {
  asking = true;
  try { session.who = await api("/installation"); draw(); poll(); count(); } catch { /* asked again with the next message */ }
  asking = false;
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
        $("refused").hidden = !session.token;
        $("main").hidden = $("bar").hidden = true; $("ask").hidden = false;
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
  drawLeader();
  VIEWS[view].draw?.(subject);
}
async function poll() {
  if (document.hidden || $("main").hidden || poll.busy) return;
  poll.busy = true;
  try { await VIEWS[view].poll?.(subject); } finally { poll.busy = false; }
}
async function count() {
  if (document.hidden || $("main").hidden || !session.who) return;
  const waiting = await api("/approvals").then(found => found.approvals.length, () => 0); // its view says why
  $("to-approvals").textContent = "Approvals" + (waiting ? " (" + waiting + ")" : "");
}
function show() {
  const asked = new URLSearchParams(location.hash.slice(1)), token = asked.get("token");
  if (token) {
    session.token = token;
    sessionStorage.setItem(STORED, token);
    asked.delete("token"); // out of the address bar and the history
    history.replaceState(null, "", location.pathname + (asked.size ? "#" + asked : ""));
  }
  const one = ["worker", "job", "approval"].find(name => asked.get(name));
  view = one || (Object.hasOwn(VIEWS, asked.get("view")) ? asked.get("view") : "overview");
  subject = one ? asked.get(one) : "";
  if (asked.get("deployment")) choose(asked.get("deployment"));
  for (const each of document.querySelectorAll("[data-view]")) each.hidden = each.dataset.view !== view;
  for (const each of document.querySelectorAll("nav a")) {
    const leads = each.hash === "#view=" + view || one && each.hash === "#view=" + one + "s";
    if (leads) each.setAttribute("aria-current", "page"); else each.removeAttribute("aria-current");
  }
  $("approval").replaceChildren(); // no buttons of another one
  if (view === "job") for (const id of ["job-head", "job-more", "job-log"]) $(id).replaceChildren();
  if (session.who) { draw(); poll.busy = false; poll(); }
}
function drawLeader() {
  const {leads, leader_url, epoch} = fleet.leader, who = session.who;
  const where = leader_url ? ["this replica stands by; act on ", link(leader_url + "/fleet" + location.hash, "the leader's page")]
    : ["this replica stands by; no leader is known"];
  fill($("leader"), ...(leads ? ["this replica leads"] : where), ", epoch " + epoch);
  if (!who) return;
  const bound = ["team", "project"].map(each => who["token_" + each] && each + " " + who["token_" + each]);
  $("who").textContent = who.token_name + " (" + [...who.token_scopes, ...bound].filter(Boolean).join(", ") + ") · Paceline " + who.version;
  fill($("pages"), ...Object.entries({prefect: "Prefect", mlflow: "MLflow"}).filter(([name]) => who.pages[name])
    .flatMap(([name, shown]) => [link(who.pages[name], shown), " "]));
}
function drawTiles() {
  const flying = [...fleet.deployments.values()].filter(d => !FINAL.has(d.status));
  const every = [...fleet.workers.values()], alive = every.filter(w => w.alive);
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
$("ask").onsubmit = event => {
  event.preventDefault();
  session.token = $("token").value.trim();
  sessionStorage.setItem(STORED, session.token);
  run();
};
$("leave").onclick = () => { sessionStorage.removeItem(STORED); location.replace(location.pathname); };
$("sure-no").onclick = () => $("sure").close();
window.onhashchange = show;
window.onresize = () => { if (!$("main").hidden) draw(); };
window.addEventListener("acted", () => { poll(); count(); });
setInterval(poll, POLL_MS);
setInterval(count, COUNT_MS);
session.token = sessionStorage.getItem(STORED) || "";
show();
if (session.token) run();
else { $("ask").hidden = false; $("live").textContent = "token needed"; }
