// Promotions that wait for a person: the list, and one of them with its figures, the gate's checks, and the
// decision. `paceline approve --show` prints the same.
import {$, ROWS, action, api, el, facts, fill, link, may, more, number, pill, seconds, session, short, table,
  when} from "./common.js";

const APPROVALS = "/approvals", LOOKS = {approved: "complete", rejected: "failed", expired: "cancelled"};
let record = null, seen = "", shown = ""; // GET /approvals/RUN of the one that is shown, and what it was requested for

const askers = names => names?.join(", ") || "the installation";
const until = at => when(at) + (at * 1000 > Date.now() ? ", in " + seconds(at - Date.now() / 1000) : "");
const fixed = n => n.toFixed(4), signed = n => (n > 0 ? "+" : "") + fixed(n);
const figure = (each, text, ...more) => el("td", "rate", text(each.value), el("small", "", text(each.low) + " to " + text(each.high)), ...more);
const verdict = gain => gain.low <= 0 && gain.high >= 0 ? "no difference shown" : gain.high < 0 ? "better" : "worse";

export async function pollApprovals() {
  try {
    const {approvals, submitters} = await api(APPROVALS), rows = approvals.slice(0, ROWS).map(each => el("tr", "",
      el("td", "", link("#" + new URLSearchParams({approval: each.run_id}), each.model_id + " " + each.version),
        el("small", "", each.run_id)), el("td", "", askers(submitters?.[each.run_id])), el("td", "", until(each.expires_at))));
    fill($("approval-list"), rows.length ? table([["Promotion", ""], ["Asked by", ""], ["Expires", ""]], rows)
      : el("p", "quiet", "No promotion waits for a person."), more(ROWS, approvals.length));
  } catch (error) { fill($("approval-list"), el("p", "reason", error.message)); }
}
export async function pollApproval(run) {
  shown = run;
  const path = APPROVALS + "/" + encodeURIComponent(run);
  try {
    const waiting = await api(APPROVALS);
    if (run !== shown) return; // another one is looked at meanwhile
    const request = waiting.approvals.find(each => each.run_id === run);
    const asked = run + (request?.evidence_digest || "");
    if (asked !== seen || !record?.evidence) { // the evidence is read again where something else waits, or nothing
      const found = await api(path).catch(error => {
        if (!request) throw error;
        return {status: "waiting", request, submitters: waiting.submitters?.[run], no_evidence: error.message, refused: true};
      });
      if (run !== shown) return;
      record = found;
      seen = asked;
    }
    draw(record, path);
  } catch (error) {
    if (run !== shown) return;
    seen = "";
    fill($("approval"), el("h2", "", "Promotion of ", el("span", "as-is", run)), el("p", "reason", error.message));
  }
}
function draw({status, request, approval, submitters, evidence, no_evidence, refused}, path) {
  const name = request.model_id + " " + request.version;
  fill($("approval"), el("h2", "", "Promotion of ", el("span", "as-is", name), " ", pill(status, LOOKS[status])),
    el("div", "acts", ...(status === "waiting" ? decisions(name, request, refused, path) : []), request.page && link(request.page, "Flow run in Prefect")),
    facts([["Decided", approval && "by " + approval.approver + ", " + when(approval.at) + (approval.reason ? ": " + approval.reason : "")],
      ["Asked by", askers(submitters)], ["Expires", until(request.expires_at)], ["Run", request.run_id],
      ["Base", evidence && evidence.model_id + " " + evidence.base_version],
      ["Training", evidence && short(evidence.job_id + (evidence.training_snapshot_url ?
        ", on " + evidence.training_snapshot_url + " (snapshot " + evidence.training_snapshot_digest + ")" : ""))],
      ["Weights", evidence && short(evidence.weights_digest + ", manifest " + evidence.manifest_digest)],
      ["Reviewed", evidence?.reviewed?.join("; ")],
      ["Evidence", short(request.evidence_digest + ", report " + request.report_digest + ", policy " + request.policy_digest)]]),
    ...(evidence ? judgement(evidence) : [el("p", "reason", "No figures: " + no_evidence)]));
}
function decisions(name, request, refused, path) {
  if (!may("approve")) return [el("span", "quiet", "A token of scope approve decides it.")];
  const decision = approved => ({evidence_digest: request.evidence_digest, approved});
  const recorded = " The decision is recorded as that of " + session.who.token_name + ".";
  const made = [action("Reject", "Reject the promotion of " + name + "?", "Nothing is published or promoted, and the run ends."
    + recorded, path, "POST", decision(false), "reason")];
  if (!refused) made.unshift(action("Approve", "Approve the promotion of " + name + "?",
    "It goes on by itself: the version is published and becomes champion." + recorded, path, "POST", decision(true), "reason"));
  return made;
}
function judgement({evaluation: report, gate}) {
  const of = name => report.scores.find(each => each.name === name), candidate = of("candidate");
  const gains = candidate?.difference_to || candidate?.gain_over || {}, ranked = [...report.scores];
  ranked.sort((a, b) => a.bits_per_byte.value - b.bits_per_byte.value);
  const scores = ranked.map(each => el("tr", "", el("td", "", each.name), figure(each.bits_per_byte, fixed),
    gains[each.name] ? figure(gains[each.name], signed, el("small", "", verdict(gains[each.name]))) : el("td")));
  const means = [...(report.tasks || []).map(each => ["task " + each.task + "/" + each.metric + ", higher", each]),
    ...(report.metrics || []).map(each => ["metric " + each.metric + ", " + (each.higher_is_better ? "higher" : "lower"), each])];
  const other = of("champion") ? "champion" : "base", compared = candidate && of(other);
  const worse = report.slices.filter(each => each.bits_per_byte.candidate > each.bits_per_byte[other]);
  const said = report.of_assistants ? "what assistants say in " + number(report.documents) + " conversations" : number(report.documents) + " documents";
  return [el("h3", "", "Figures"),
    el("p", "quiet", short(said + ", " + number(report.bytes) + " bytes, of snapshot " + report.snapshot_digest)),
    table([["Model", ""], ["Bits per byte", "rate"], ["Candidate − model", "rate"]], scores),
    ...Object.entries(report.failures).map(([name, why]) => el("p", "reason", name + ": no score, " + why)),
    ...means.map(([name, each]) => el("p", "", name + " is better: " +
      Object.entries(each.scores).map(([model, its]) => model + " " + fixed(its.value)).join(", "))),
    el("h3", "", "Gate: " + (gate.passed ? "passed" : "refused") + ", " + gate.checks.filter(each => each.passed).length +
      " of " + gate.checks.length + " checks"),
    table([["Check", ""], ["Got", ""], ["Wanted", "wide"], ["", ""]], gate.checks.map(each => el("tr", "",
      el("td", "finding", short(each.name)), el("td", "finding", short(each.got)), el("td", "wide finding", short(each.wanted)),
      el("td", "", pill(each.passed ? "passed" : "failed", each.passed ? "complete" : "failed"))))),
    el("h3", "", "Slices worse than " + other + (compared ? ": " + number(worse.length) : "")),
    !compared ? el("p", "quiet", "Not compared: " + other + " or candidate has no score.") : !worse.length ? "" :
      table([["Slice", ""], [other, "rate"], ["Candidate", "rate"]], worse.slice(0, ROWS).map(each => el("tr", "",
        el("td", "finding", each.slice + ": " + each.name), el("td", "rate", fixed(each.bits_per_byte[other])),
        el("td", "rate", fixed(each.bits_per_byte.candidate))))), more(ROWS, worse.length)];
}
