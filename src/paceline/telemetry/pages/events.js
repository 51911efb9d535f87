// What happened, grouped by run: of a run its stages, deployments and jobs, else of the fleet.
import {$, el, fill, fleet, humane, jobLink, short, when} from "./common.js";

const BAD = /lost|failed|corrupt|slow|quarantined|delayed|stalled|cancelled|late|refused|recovering/;
const KEPT = 600, GROUPS = 12, OPEN = 2, EACH = 12;
const runs = new Map(), toggled = new Map(); // deployment or job → run; group → whether it is open

export function keep(event) {
  const {run_id, job_id} = event.data;
  if (run_id && (event.deployment_id || job_id)) runs.set(event.deployment_id || job_id, run_id);
  fleet.events.push(event);
  if (fleet.events.length > KEPT) // hundreds of registrations would hide the others
    fleet.events = fleet.events.filter(each => each.name !== "worker.registered").slice(-KEPT / 2);
}
function groupOf(event) {
  const own = event.deployment_id || event.data.job_id;
  return runs.get(own) || own || event.data.run_id || "";
}
function titleOf(key, members) {
  const found = members.map(each => fleet.deployments.get(each.deployment_id)).find(Boolean);
  if (found) return found.model_id + " " + found.version;
  return key === "" ? "Fleet" : short(key);
}
function line(event, key) {
  const {from, to, source, state, job_id, run_id, ...rest} = event.data, made = el("li");
  const target = to || state, change = target ? (from ? " " + from : "") + " → " + target : "";
  const text = [event.name.replace(/^(deployment|job|run)\./, ""), event.worker_id, source].filter(Boolean).join(" ");
  made.append(el("time", "mono", when(event.at)),
    el("span", BAD.test(event.name + target) ? "bad" : "", text.replaceAll("_", " ") + change.replaceAll("_", " ")));
  if (job_id) made.append(" ", jobLink(job_id));
  const detail = Object.entries(rest).filter(([, value]) => value !== "" && value !== null)
    .map(([name, value]) => (name.replace(/_(seconds|bytes|bytes_s|bytes_per_second|s)$|^(seconds|bytes)$/, "").replaceAll("_", " ") + " " + humane(name, value)).trim());
  if (run_id && run_id !== key) detail.push("run " + run_id);
  if (detail.length) made.append(el("small", "", detail.join(", ")));
  return made;
}
export function drawEvents() {
  const groups = new Map();
  for (const event of [...fleet.events].reverse()) {
    if (event.name === "worker.registered") continue; // counted in the tiles
    const key = groupOf(event);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(event);
  }
  const shown = [...groups].slice(0, GROUPS).map(([key, members], at) => {
    const box = el("details"), heading = el("summary", "", el("b", "", titleOf(key, members)),
      el("small", "", members.length + (members.length === 1 ? " event, " : " events, ") + when(members[0].at)));
    heading.dataset.key = "events of " + key;
    box.open = toggled.get(key) ?? at < OPEN;
    heading.onclick = () => toggled.set(key, !box.open);
    box.append(heading, el("ul", "", ...members.slice(0, EACH).map(each => line(each, key))));
    if (members.length > EACH) box.append(el("small", "", members.length - EACH + " earlier"));
    return box;
  });
  if (fleet.missed) shown.push(el("p", "quiet", fleet.missed + " earlier events are in the audit history only."));
  if (!shown.length) shown.push(el("p", "quiet", "Nothing yet."));
  fill($("events"), ...shown);
}
