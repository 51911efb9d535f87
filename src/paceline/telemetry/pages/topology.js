// Who takes from whom in a deployment, drawn as a tree from the origin; any number of workers.
import {el, fill, rate} from "./common.js";

const SHAPES = ["● has it", "◐ receives", "✕ lost or failed"];
const ABOVE = 8; // pixels of the first row's names
let pointed = null; // the worker under the pointer

function placed(parts) {
  // Returns nodes with depth and row: a worker is right of its source, and its own workers are beside it.
  const below = new Map([["origin", []]]), nodes = new Map();
  for (const part of parts) nodes.set(part.worker_id, {part, id: part.worker_id});
  for (const {part, id} of nodes.values()) {
    if (!part.upstream_worker) continue; // it has all that it needs, or there is no plan yet
    const from = nodes.has(part.upstream_worker) && part.upstream_worker !== id ? part.upstream_worker : "origin";
    if (!below.has(from)) below.set(from, []);
    below.get(from).push(id);
  }
  let rows = 0, depth = 0;
  const origin = {id: "origin", depth: 0, row: 0}, seen = new Set(["origin"]);
  const visit = start => { // without recursion: a chain is as deep as the fleet is large
    const open = [start];
    while (open.length) {
      const at = open.pop(), children = (below.get(at.id) || []).filter(id => !seen.has(id));
      children.forEach((id, n) => {
        seen.add(id);
        Object.assign(nodes.get(id), {from: at, depth: at.depth + 1, first: n === 0});
        depth = Math.max(depth, at.depth + 1);
      });
      if (at !== origin) at.row = at.first ? at.from.row : ++rows;
      open.push(...children.reverse().map(id => nodes.get(id)));
    }
  };
  visit(origin);
  const free = [...nodes.values()].filter(node => !node.part.upstream_worker);
  for (const node of [...free, ...nodes.values()]) if (!seen.has(node.id)) { // a circle: the plan is being replaced
    seen.add(node.id);
    const from = node.part.upstream_worker ? origin : null;
    Object.assign(node, {from, depth: from ? 1 : 0, first: false});
    visit(node);
  }
  return {every: [origin, ...nodes.values()], rows: rows + 1, depth};
}
export function drawTopology(target, parts, colour) {
  const {every, rows, depth} = placed(parts), canvas = el("canvas"), under = el("p", "quiet");
  canvas.id = "tree";
  under.id = "under";
  fill(target, canvas, under, el("p", "legend", ...SHAPES.map(each => el("span", "", each))));
  const ratio = window.devicePixelRatio || 1, height = Math.min(640, Math.max(60, rows * 24 + ABOVE));
  const width = canvas.clientWidth || 400;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d"), across = (width - 40) / Math.max(1, depth + .7), down = (height - ABOVE) / rows;
  const x = node => 20 + node.depth * across, y = node => ABOVE + (node.row + .5) * down;
  const radius = Math.max(1.5, Math.min(6, down / 3, across / 3)), named = down > 13 && across > 60;
  pen.scale(ratio, ratio);
  pen.strokeStyle = colour.soft;
  pen.globalAlpha = every.length > 200 ? .4 : .8;
  pen.beginPath();
  for (const node of every) if (node.from) {
    pen.moveTo(x(node.from), y(node.from));
    pen.bezierCurveTo(x(node.from) + across / 2, y(node.from), x(node) - across / 2, y(node), x(node), y(node));
  }
  pen.stroke();
  pen.globalAlpha = 1;
  pen.font = "12px system-ui, sans-serif";
  for (const node of every) {
    mark(pen, x(node), y(node), radius, node.part, colour);
    pen.fillStyle = colour.ink;
    if (named || node.id === "origin") pen.fillText(node.id, x(node) + radius + 4, y(node) - 4, across - radius - 6);
  }
  const summary = depth === 0 ? "No worker takes from another now." : every.length - 1 + " workers, at most " + depth + (depth === 1 ? " step" : " steps") + " from the origin.";
  const tell = node => under.textContent = !node ? summary + " A click opens a worker's page, as the table of chunks does."
    : node.id + ": " + node.part.status + (!node.from ? ", takes from none" :
      ", takes from " + (node.from.id === "origin" ? "the origin" : node.from.id) + ", " + rate(node.part.rate_bytes_s));
  tell(every.find(node => node.part && node.id === pointed));
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", summary);
  const near = event => every.reduce((best, node) => {
    const far = Math.hypot(x(node) - event.offsetX, y(node) - event.offsetY);
    return far < best[0] ? [far, node] : best;
  }, [Math.max(12, radius * 2), null])[1];
  canvas.onmousemove = event => {
    const node = near(event);
    pointed = node?.part ? node.id : null;
    tell(node?.part ? node : null);
  };
  canvas.onclick = event => {
    const node = near(event);
    if (node?.part) location.hash = new URLSearchParams({worker: node.id});
  };
}
function mark(pen, x, y, radius, part, colour) {
  const bad = part && !part.verified && (!part.alive || part.status === "failed" || part.status === "verification_failed");
  pen.strokeStyle = pen.fillStyle = !part ? colour.ink : bad ? colour.bad : colour.held;
  pen.lineWidth = 1.6;
  pen.beginPath();
  if (!part) pen.rect(x - radius, y - radius, radius * 2, radius * 2);
  else if (bad) {
    pen.moveTo(x - radius, y - radius); pen.lineTo(x + radius, y + radius);
    pen.moveTo(x + radius, y - radius); pen.lineTo(x - radius, y + radius);
  } else pen.arc(x, y, radius, 0, Math.PI * 2);
  pen.stroke();
  if (part && !bad && !part.verified) { pen.beginPath(); pen.arc(x, y, radius, Math.PI / 2, Math.PI * 1.5); }
  if (!bad) pen.fill();
}
