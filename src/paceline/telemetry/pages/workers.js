// Workers: the list, and one of them with its disk, link, versions, heartbeat, rates and findings.
import {$, ROWS, ago, api, bits, bytes, colours, el, facts, fill, filter, fleet, more, number, pill, rate, short, table,
  workerLink} from "./common.js";

export const natural = new Intl.Collator(undefined, {numeric: true}).compare; // ten times as fast as localeCompare
const RATES_S = 600; // shown of a worker's rates
let record = null; // GET /workers/ID of the one that is shown

export const rackOf = id => {
  const worker = fleet.workers.get(id);
  return worker ? [worker.zone, worker.rack].filter(Boolean).join(" / ") || "no rack" : "not registered";
};
function machine(has) {
  if (!has) return "";
  const gpus = has.accelerators.map(each => each.count + " × " + each.kind + " " + bytes(each.memory_bytes));
  const parts = [...gpus, has.cores + " cores", bytes(has.memory_bytes)];
  if (has.interface_mbit) parts.push(has.interface + " " + bits(has.interface_mbit));
  if (has.disk_bytes_s) parts.push("disk " + bytes(has.disk_bytes_s) + "/s");
  return parts.join(", ");
}
export function rated(worker, at) {
  // Keeps a worker's rates of the last minutes; the stream has each only when it changes.
  const kept = fleet.rates.get(worker.worker_id) || [];
  kept.push([at, worker.bandwidth_in, worker.bandwidth_out]);
  while (kept.length > 2 && kept[1][0] < at - RATES_S) kept.shift();
  fleet.rates.set(worker.worker_id, kept);
}
function found(lines) {
  return lines.map(each => {
    const [what, ...fix] = short(each).split(" → "), line = el("div", "finding", what);
    if (fix.length) line.append(el("small", "", "→ " + fix.join(" → ")));
    return line;
  });
}
export function workersTable(workers) {
  if (!fleet.workers.size) return el("p", "quiet", "No worker has registered yet.");
  const rows = workers.sort((a, b) => natural(a.worker_id, b.worker_id)).slice(0, ROWS).map(worker => el("tr",
    worker.alive ? "" : "dead", el("td", "", workerLink(worker.worker_id)), el("td", "", rackOf(worker.worker_id)),
    el("td", "wide", worker.hostname, el("small", "", machine(worker.inventory))),
    el("td", "rate", bytes(worker.available_storage)), el("td", "rate wide", rate(worker.bandwidth_in)),
    el("td", "rate wide", rate(worker.bandwidth_out)),
    el("td", "", pill(worker.alive ? "alive" : "lost"), ...found(worker.findings))));
  return el("div", "", table([["Worker", ""], ["Rack", ""], ["Host", "wide"], ["Free disk", "rate"], ["In", "rate wide"],
    ["Out", "rate wide"], ["", ""]], rows), more(ROWS, workers.length));
}
export function drawWorkers() {
  const wanted = filter("worker-filter", drawWorkers);
  const chosen = [...fleet.workers.values()].filter(each =>
    wanted([each.alive ? "alive" : "lost", each.findings.length ? "findings" : ""], each.worker_id, each.hostname,
      rackOf(each.worker_id), machine(each.inventory)));
  fill($("worker-list"), chosen.length || !fleet.workers.size ? workersTable(chosen)
    : el("p", "quiet", "None matches the filter."));
}

// --- one worker -------------------------------------------------------------------------------

export async function pollWorker(id) {
  try { record = await api("/workers/" + encodeURIComponent(id)); }
  catch (error) { record = {worker_id: id, error: error.message}; }
  drawWorker(id);
}
export function drawWorker(id) {
  const w = record?.worker_id === id ? record : null, target = $("worker");
  if (!w || w.error) { fill(target, el("h2", "", "Worker ", el("span", "as-is", id)), el("p", "quiet", w?.error || "…")); return; }
  const alive = fleet.workers.get(id)?.alive ?? w.alive, labels = Object.entries(w.labels.others || {});
  const held = [...fleet.deployments.values()].map(d => [d, fleet.parts.get(d.deployment_id).get(id)]).filter(([, part]) => part);
  const versions = held.reverse().map(([d, part]) => el("tr", "", el("td", "", d.model_id + " " + d.version),
    el("td", "rate", bytes(part.verified || part.activated ? d.total_bytes : part.bytes_held)),
    el("td", "", pill(part.activated ? "active" : part.status), part.failure ? el("small", "", short(part.failure.message)) : "")));
  const canvas = el("canvas");
  canvas.id = "rates";
  fill(target, el("h2", "", "Worker ", el("span", "as-is", id), " ", pill(alive ? "alive" : "lost")),
    facts([["Last heartbeat", ago(w.last_heartbeat)], ["Agent", w.version ? "Paceline " + w.version : "version not reported"],
      ["Host", w.hostname], ["Place", rackOf(id)], ["Labels", labels.map(each => each.join("=")).join(", ")],
      ["Address", w.address], ["Machine", machine(w.inventory)], ["Link, as plans expect", bits(w.link_mbit)],
      ["Free disk", bytes(w.available_storage)], ["Started", number(w.incarnation) + (w.incarnation === 1 ? " time" : " times")]]),
    el("h3", "", "Findings"), ...(w.findings.length ? found(w.findings) : [el("p", "quiet", "None.")]),
    el("h3", "", "Versions"), versions.length ? table([["Model", ""], ["Held", "rate"], ["", ""]], versions)
      : el("p", "quiet", "None of the deployments shown."),
    el("h3", "", "Rates"), canvas, el("p", "quiet", "Received: " + rate(w.bandwidth_in) + " (line). Sent: " +
      rate(w.bandwidth_out) + " (dashes). The last minutes, since this page was opened."));
  drawRates($("rates"), fleet.rates.get(id) || []);
}
function drawRates(canvas, kept) {
  const ratio = window.devicePixelRatio || 1, width = canvas.width = Math.round((canvas.clientWidth || 400) * ratio);
  const height = canvas.height = Math.round(90 * ratio), pen = canvas.getContext("2d"), colour = colours();
  const now = Date.now() / 1000, since = Math.max(now - RATES_S, kept[0]?.[0] ?? now), most = Math.max(1, ...kept.flatMap(each => each.slice(1)));
  const x = at => (at - since) / Math.max(1, now - since) * width, y = value => height - 3 - value / most * (height - 8);
  for (const [at, name, dash] of [[1, "held", []], [2, "bad", [6 * ratio, 4 * ratio]]]) {
    pen.beginPath();
    pen.strokeStyle = colour[name];
    pen.lineWidth = 2 * ratio;
    pen.setLineDash(dash);
    kept.forEach((each, n) => { // a value holds until the next one
      pen.lineTo(x(each[0]), y(each[at]));
      pen.lineTo(x(kept[n + 1]?.[0] ?? now), y(each[at]));
    });
    pen.stroke();
  }
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "Rates of the last minutes, at most " + rate(most));
}
