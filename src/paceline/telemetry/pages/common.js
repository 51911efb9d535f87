// What the views of the fleet page share: the fleet's state, calls, figures, and elements. Everything
// that comes from the coordinator is set as text, never as markup.
export const fleet = {workers: new Map(), deployments: new Map(), parts: new Map(), rates: new Map(),
  leader: {}, events: [], missed: 0};
export const session = {token: "", who: null}; // who: the answer of GET /installation
export const FINAL = new Set(["complete", "failed", "cancelled"]);
export const ROWS = 200; // most rows of a table; a filter finds the others
export const $ = id => document.getElementById(id);

// Between press and release nothing is replaced: the click would be lost.
export const press = {held: false, waiting: []};
for (const name of ["pointerdown", "pointermove", "pointerup", "pointercancel"]) window.addEventListener(name, event => {
  press.held = name !== "pointercancel" && event.buttons > 0;
  if (!press.held && press.waiting.length) setTimeout(() => press.waiting.splice(0).forEach(each => each())); // after the click
});

export function el(tag, className, ...content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content.filter(each => each !== undefined && each !== null && each !== ""));
  return made;
}
export function fill(target, ...children) {
  // An element that has the focus keeps it, by its data-key; what is shown already is left alone.
  const before = target.cloneNode(false), key = document.activeElement?.dataset?.key;
  before.append(...children);
  if (before.isEqualNode(target)) return;
  const kept = key !== undefined && target.contains(document.activeElement);
  target.replaceChildren(...before.childNodes);
  if (kept) target.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({preventScroll: true});
}
export function link(href, ...content) {
  const made = el("a", "", ...content), outside = /^https?:\/\//.test(href);
  if (!outside && !href.startsWith("#")) return el("span", "", ...content); // never javascript:
  made.href = made.dataset.key = href;
  if (outside) { made.target = "_blank"; made.rel = "noreferrer"; }
  return made;
}
export const workerLink = id => link("#" + new URLSearchParams({worker: id}), id);
export const jobLink = (id, text = id) => link("#" + new URLSearchParams({job: id}), text);
export const pill = (status, as = status) => el("span", "pill " + as, status.replaceAll("_", " "));
export function bar(fraction, label) {
  const made = el("div", "bar"), done = el("i"), share = Math.min(1, Math.max(0, fraction || 0));
  done.style.width = (share * 100).toFixed(1) + "%";
  made.append(done);
  made.setAttribute("role", "progressbar");
  made.setAttribute("aria-label", label);
  made.setAttribute("aria-valuenow", String(Math.floor(share * 100)));
  return made;
}
export function table(heads, rows) {
  const made = el("table"), head = el("tr");
  for (const [name, kind] of heads) head.append(el("th", kind, name));
  made.append(el("thead", "", head), el("tbody", "", ...rows));
  return made;
}
export function facts(pairs) {
  const made = el("dl");
  for (const [name, value] of pairs) if (value !== "" && value !== undefined && value !== null)
    made.append(el("dt", "", name), el("dd", "", value));
  return made;
}

// --- figures ----------------------------------------------------------------------------------

export function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (n >= 1000 && at < 5) { n /= 1000; at++; }
  return (at && n < 10 ? n.toFixed(1) : Math.round(n)) + " " + units[at];
}
export const rate = n => n ? bytes(n) + "/s" : "–";
export const bits = mbit => mbit < 1000 ? number(mbit) + " Mbit/s" : number(mbit / 1000) + " Gbit/s";
export function seconds(s) {
  if (s < 90) return (s < 9.95 ? s.toFixed(1) : Math.round(s)) + " s";
  if (s < 5400) return Math.round(s / 60) + " min";
  return s < 129600 ? (s / 3600).toFixed(1) + " h" : Math.round(s / 86400) + " d";
}
export const number = n => Number.isInteger(n) && Math.abs(n) < 10000 ? String(n)
  : n.toLocaleString(undefined, Math.abs(n) < 1000 ? {maximumSignificantDigits: 3} : {maximumFractionDigits: 0});
export const ago = at => seconds(Math.max(0, Date.now() / 1000 - at)) + " ago";
export function when(at) {
  const date = new Date(at * 1000), today = date.toDateString() === new Date().toDateString();
  return today ? date.toLocaleTimeString() : date.toLocaleString();
}
export const short = text => String(text).replace(/\b([0-9a-f]{8})[0-9a-f]{24,}\b/g, "$1…");
export function humane(key, value) {
  if (typeof value === "number") {
    if (/bytes(_s|_per_second)?$/.test(key)) return /bytes$/.test(key) ? bytes(value) : rate(value);
    if (/(_s|seconds)$/.test(key)) return seconds(value);
    return /(^|_)at$/.test(key) ? when(value) : number(value);
  }
  if (Array.isArray(value)) return value.slice(0, 10).map(each => humane(key, each)).join(", ");
  if (value && typeof value === "object")
    return Object.entries(value).slice(0, 20).map(([name, each]) => name + " " + humane(name, each)).join(", ");
  return short(value);
}

// --- calls ------------------------------------------------------------------------------------

export async function api(path, method = "GET", body = undefined) {
  const headers = {Authorization: "Bearer " + session.token};
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {method, headers, cache: "no-store", redirect: "manual",
    body: body && JSON.stringify(body)});
  if (answer.type === "opaqueredirect") throw new Error("This replica does not lead. Act on the leader's page.");
  const content = await answer.json().catch(() => ({}));
  if (press.held) await new Promise(done => press.waiting.push(done));
  if (answer.ok) return content;
  const said = [content.detail || "the coordinator answered " + answer.status,
    content.got && "got: " + content.got, content.wanted && "wanted: " + content.wanted, content.do];
  throw new Error(said.filter(Boolean).join("; "));
}
export const may = (...scopes) =>
  Boolean(fleet.leader.leads && session.who?.token_scopes.some(each => scopes.includes(each)));

export function action(label, what, consequence, path, method = "POST", body = undefined, asked = "") {
  // A button that asks first, in a dialog that says what follows, and for the "reason" or "budget" of the call.
  const button = el("button", "act", label);
  button.type = "button";
  button.dataset.key = label + path + method;
  button.onclick = () => {
    const sure = $("sure"), yes = $("sure-yes"), field = asked && $("sure-" + asked);
    $("sure-what").textContent = what;
    $("sure-why").textContent = consequence;
    $("sure-error").hidden = true;
    for (const each of sure.querySelectorAll("input")) {
      each.value = "";
      each.parentElement.hidden = each !== field;
    }
    yes.textContent = label;
    yes.disabled = false;
    yes.onclick = async () => {
      if (field && !field.reportValidity()) return; // a budget that is no number
      yes.disabled = true;
      const given = asked === "reason" ? {...body, reason: field.value.trim()}
        : asked && field.value ? {...body, [asked]: Number(field.value)} : body;
      try {
        await api(path, method, given);
        sure.close();
        window.dispatchEvent(new Event("acted"));
      } catch (error) {
        $("sure-error").textContent = error.message;
        $("sure-error").hidden = yes.disabled = false;
      }
    };
    sure.showModal();
    $("sure-no").focus();
  };
  return button;
}

export function filter(id, redraw) {
  // Returns a test of texts and of a state, by the boxes ID and ID-state.
  const text = $(id), state = $(id + "-state");
  if (!text.oninput) text.oninput = state.onchange = redraw;
  const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
  return (states, ...texts) => (!state.value || states.includes(state.value)) &&
    words.every(word => texts.some(each => String(each ?? "").toLowerCase().includes(word)));
}
export const more = (shown, total) => total > shown
  ? el("p", "quiet", number(total - shown) + " more: narrow the filter.") : "";
export const colours = () => {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(["held", "coming", "empty", "bad", "card", "soft", "ink"].map(name =>
    [name, style.getPropertyValue("--" + name)]));
};
