// Training jobs: the queue, and one job with its progress, ranks, checkpoints, history and log.
import {$, action, ago, api, bar, el, facts, fill, humane, jobLink, link, may, more, number, pill, short,
  table, when, workerLink} from "./common.js";

const JOBS = "/v1/training-jobs", ENDED = ["needs_review", "succeeded", "failed", "cancelled"];
const LIMIT = 100, LOG_LINES = 400, PAGES = 20; // of jobs in the list, lines that are kept, answers at once
const PAGE_NAMES = {prefect: "Flow run in Prefect", mlflow: "Run in MLflow", data: "Data in MLflow",
  evaluation: "Evaluation in MLflow", version: "Registered version in MLflow"};
let first = 0, latest = null; // of the list: the job that it begins with, and the newest question
let log = {id: null, attempt: 0, after: 0, lines: []};

const looks = state => ({needs_review: "stalled", succeeded: "complete"})[state] || state;
const named = (given, unset = "") => { // "ranks=8, within=rack" of what was submitted
  const set = Object.entries(given || {}).filter(([key, value]) => !["", null, unset].includes(value));
  return set.slice(0, 12).map(([key, value]) => (key + "=" + (Object(value) === value ? JSON.stringify(value) : value)).slice(0, 100))
    .join(", ") + (set.length > 12 ? " and " + (set.length - 12) + " more" : "");
};
const figures = given => Object.fromEntries(Object.entries(given || {}).map(([key, value]) =>
  [key, value && typeof value === "number" ? humane(key, value) : value]));
const requested = gang => named(figures({...gang, within: gang.within === "fleet" ? "" : gang.within}), 0);
const progress = report => {
  if (!report?.steps) return "";
  const loss = report.metrics.loss;
  return "step " + number(report.step) + " of " + number(report.steps) +
    (loss === undefined ? "" : ", loss " + humane("loss", loss));
};
const meter = job => !job.report?.steps ? "" : bar(job.report.step / job.report.steps, progress(job.report));

export async function pollJobs() {
  const asked = latest = new URLSearchParams({limit: String(LIMIT), offset: String(first)});
  for (const each of document.querySelectorAll("#job-filters [name]")) {
    each.onchange = () => { first = 0; pollJobs(); };
    if (each.value) asked.append(each.name, each.value);
  }
  try {
    const answer = await api(JOBS + "?" + asked), rows = answer.jobs.map(row);
    if (asked !== latest) return; // of another page or filter
    if (first && !rows.length) { first = 0; return pollJobs(); } // fewer than there were
    fill($("job-list"), rows.length ? table([["Job", ""], ["State", ""], ["Progress", ""], ["Team", "wide"],
      ["Priority", "rate wide"], ["Model", "wide"], ["Submitted", "wide"]], rows) : el("p", "quiet", "No job matches."),
      pager(rows.length, answer.total));
  } catch (error) { if (asked === latest) fill($("job-list"), el("p", "reason", error.message)); }
}
function pager(shown, total) {
  const turn = (label, by) => {
    const made = el("button", "", label);
    made.type = "button";
    made.dataset.key = label;
    made.onclick = async () => {
      first = Math.max(0, first + by);
      await pollJobs();
      $("job-filters").scrollIntoView();
    };
    return made;
  };
  if (!first && shown === total) return "";
  return el("div", "acts", first ? turn("Newer", -LIMIT) : "", first + shown < total ? turn("Older", LIMIT) : "",
    el("span", "quiet", number(first + 1) + " to " + number(first + shown) + " of " + number(total)));
}
function row(job) {
  const why = el("small", "finding", short(job.reason));
  return el("tr", "", el("td", "", jobLink(job.job_id, job.spec.name || job.job_id), job.spec.name ? el("small", "", job.job_id) : ""),
    el("td", "", pill(job.state, looks(job.state)), why), el("td", "meter", meter(job), el("small", "", progress(job.report))),
    el("td", "wide", job.spec.team), el("td", "rate wide", number(job.spec.priority)),
    el("td", "wide", job.spec.model_id + " " + job.spec.version),
    el("td", "wide", job.submitted_by, el("small", "", ago(job.created_at))));
}

// --- one job ----------------------------------------------------------------------------------

export async function pollJob(id) {
  const path = JOBS + "/" + encodeURIComponent(id);
  try {
    const view = await api(path);
    drawJob(view, path);
    await readLog(view.job, path);
  } catch (error) { fill($("job-head"), el("h2", "", "Job ", el("span", "as-is", id)), el("p", "reason", error.message)); }
}
function attemptOf(job) { // whose log is shown: the one that is chosen, else the newest that has a flow run
  const pick = $("job-attempt"), chosen = log.id === job.job_id ? pick.value : "";
  const ran = [...new Set(job.usage.filter(each => each.flow_run_id).map(each => each.attempt).concat(job.flow_run_id ? [job.attempt] : []))];
  fill(pick, ...ran.reverse().map((number, at) => Object.assign(el("option", "", "attempt " + number), {value: at ? number : ""})));
  pick.value = chosen;
  pick.hidden = ran.length < 2;
  pick.onchange = () => pollJob(job.job_id);
  return Number(pick.value) || Math.max(0, ...ran);
}
async function readLog(job, path) {
  const attempt = attemptOf(job);
  if (log.id !== job.job_id || log.attempt !== attempt) log = {id: job.job_id, attempt, after: 0, lines: []};
  const mine = log, box = $("job-log"), atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
  try {
    for (let page = 0; page < PAGES; page++) {
      const answer = await api(path + "/logs?after=" + mine.after + "&attempt=" + attempt);
      mine.after = answer.after;
      mine.lines = mine.lines.concat(answer.lines).slice(-LOG_LINES);
      if (!answer.lines.length) break;
    }
  } catch (error) { mine.lines = ["The log cannot be read now: " + error.message]; mine.after = 0; }
  const text = mine.lines.join("\n") || "Nothing yet.";
  if (mine !== log || text === box.textContent) return;
  box.textContent = text;
  if (atEnd) box.scrollTop = box.scrollHeight;
}
function drawJob({job, same_submission, pages, spent, currency, estimate, hours}, path) {
  const spec = job.spec, report = job.report, place = job.placement, held = job.allocation;
  const metrics = Object.entries(report?.metrics || {}).filter(([name]) => name !== "loss")
    .map(([name, value]) => name.replaceAll("_", " ") + " " + humane(name, value)).join(", ");
  const money = amount => amount.toFixed(2), budget = spec.budget ? " of " + money(spec.budget) : "";
  const cost = spent !== null || budget ? (job.usage.length ? spent === null ? "not known" : money(spent) : money(0)) + budget + " " + currency : "";
  const links = Object.keys(PAGE_NAMES).filter(name => pages[name]).map(name => link(pages[name], PAGE_NAMES[name]));
  fill($("job-head"), el("h2", "", "Job ", el("span", "as-is", spec.name || job.job_id), " ", pill(job.state, looks(job.state))),
    job.reason && el("p", ENDED.includes(job.state) ? "reason" : "quiet", short(job.reason)),
    report?.steps ? el("p", "meter", meter(job), el("b", "number", progress(report))) : "",
    el("div", "acts", ...actions(job, path, cost), ...links),
    facts([["Job", job.job_id], ["Model", spec.model_id + " " + spec.version], ["Data", short(spec.data_snapshot)],
      ["Team", spec.team + (spec.project ? ", project " + spec.project : "")], ["Priority", number(spec.priority)],
      ["Requested", requested(spec.resources)], ["Parameters", short(named(spec.parameters))],
      ["Seed", spec.seed === null ? "" : String(spec.seed)], ["Checkpoints", named(figures(spec.checkpoint_policy))],
      ["Labels", spec.labels === "true" ? "" : spec.labels], ["Purpose", spec.purpose], ["Code", short(spec.code_ref)],
      ["Optimiser", short(spec.optimizer_ref || "")],
      ["Continues", spec.continue_from], ["Judged on", short(spec.evaluate_on || "")], ["Sweep", spec.sweep],
      ["Submitted", "by " + job.submitted_by + ", " + when(job.created_at)],
      ["Run", job.run_id + (job.attempt > 1 ? ", flow run " + job.attempt : "")], ["Training", report?.training_id],
      ["Lost", job.losses ? number(job.losses) + " flow runs" : ""], ["Preempted", job.preemptions ? number(job.preemptions) + " times" : ""],
      [held?.engine === "slurm" ? "Slurm" : "Kubernetes", held && [held.id, held.state, held.reason].filter(Boolean).join(", ")],
      ["Nodes", place && el("span", "", ...Object.keys(place.hosts).sort().slice(0, 50).flatMap(host => [workerLink(host), " "]),
        place.level === "fleet" ? "over the fleet" : "in one " + place.level, ", score " + place.score.toFixed(2))],
      ["Cost", cost],
      ["Estimated", estimate && money(estimate.hours.value) + " hours" + (estimate.price ? ", " + money(estimate.price.value) + " " + currency : "") + "; " + money(hours) + " hours so far"],
      ["Figures", metrics], ["Same as", same_submission.length ? el("span", "", ...same_submission.flatMap(id =>
        [jobLink(id), " "]), "(identical jobs share one training)") : ""]]));
  fill($("job-more"),
    el("h3", "", "Ranks"), report?.workers.length ? table([["Rank", ""], ["Node", ""], ["State", ""], ["Heartbeat", ""]],
      report.workers.slice(0, 64).map(each => el("tr", "", el("td", "", number(each.rank)), el("td", "", workerLink(each.host)),
        el("td", "", pill(each.state)), el("td", "", ago(each.last_heartbeat))))) : el("p", "quiet", "None runs."),
    more(64, report?.workers.length || 0),
    ...(Object.keys(report?.failures || {}).length ? [el("h3", "", "Early ends"), table([["Node", ""], ["Ended its gang", ""]],
      Object.entries(report.failures).sort().slice(0, 64).map(([host, kinds]) => el("tr", "", el("td", "", workerLink(host)),
        el("td", "", Object.entries(kinds).sort().map(([kind, times]) => kind + " × " + number(times)).join(", "))))),
      more(64, Object.keys(report.failures).length)] : []),
    el("h3", "", "Checkpoints"), report?.checkpoints.length ? table([["Step", ""], ["Loss", ""], ["Saved", ""], ["Place", "wide"]],
      [...report.checkpoints].reverse().map(each => el("tr", "", el("td", "", number(each.step)),
        el("td", "", each.metrics.loss === undefined ? "" : humane("loss", each.metrics.loss)), el("td", "", when(each.created_at)),
        el("td", "wide finding", short(each.object_ref))))) : el("p", "quiet", "None yet."),
    el("h3", "", "History"), el("ol", "events", ...[...job.history].reverse().map(each => el("li", "",
      el("time", "mono", when(each.at)), el("b", "", each.state.replaceAll("_", " ")), each.by ? " by " + each.by : "",
      each.reason ? el("small", "", short(each.reason)) : ""))),
    job.history[0]?.earlier ? el("p", "quiet", number(job.history[0].earlier) + " earlier changes: paceline audit --name job.state_changed") : "",
    ...(report?.notes.length ? [el("h3", "", "Notes"), el("ul", "", ...report.notes.map(each => el("li", "", short(each))))] : []));
}
function actions(job, path, cost) {
  const made = [], name = job.spec.name || job.job_id;
  if (may("train", "deploy") && !ENDED.includes(job.state)) {
    if (job.state === "paused") made.push(action("Resume", "Resume " + name + "?",
      "It waits in the queue again, with its first place, and goes on from its newest checkpoint." +
      (job.spec.budget ? " Its cost so far: " + cost + "." : ""), path + "/resume", "POST", undefined, job.spec.budget ? "budget" : ""));
    else if (!["pausing", "cancelling"].includes(job.state)) made.push(action("Pause", "Pause " + name + "?",
      "Every rank saves its state and ends. The job keeps its place until it is resumed.", path + "/pause"));
    if (job.state !== "cancelling") made.push(action("Cancel", "Cancel " + name + "?",
      "The job ends for good. Its checkpoints stay.", path + "/cancel"));
  }
  if (may("approve") && job.state === "needs_review") made.push(
    action("Accept", "Accept " + name + "?", "The job counts as succeeded: " + short(job.reason) + ".", path + "/review", "POST", {accepted: true}, "reason"),
    action("Reject", "Reject " + name + "?", "The job counts as failed.", path + "/review", "POST", {accepted: false}, "reason"));
  return made;
}
