"use strict";
const $ = id => document.getElementById(id);
let token = sessionStorage.getItem("paceline-token") || "";
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  token = given;
  sessionStorage.setItem("paceline-token", token);
  history.replaceState(null, "", location.pathname);
}
function el(tag, text) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  return made;
}
function resolve(schema, all, depth) {
  if (!schema) return schema;
  const name = schema.$ref?.split("/").pop();
  if (name) return depth > 2 ? name : resolve(all[name], all, depth + 1);
  if (schema.items) return [resolve(schema.items, all, depth + 1)];
  if (schema.anyOf) return [...new Set(schema.anyOf.map(each => resolve(each, all, 9)))].join(" | ");
  if (schema.properties && depth < 4) {
    const shown = {};
    for (const [name, value] of Object.entries(schema.properties)) {
      shown[name + ((schema.required || []).includes(name) ? "" : "?")] = resolve(value, all, depth + 1);
    }
    return shown;
  }
  return schema.enum ? schema.enum.join(" | ") : schema.type;
}
async function show() {
  const answer = await fetch("/openapi.json", {headers: {Authorization: "Bearer " + token}});
  if (!answer.ok) { if (token) $("state").textContent = "That token was not accepted."; return; }
  const api = await answer.json(), schemas = api.components.schemas, groups = new Map();
  $("ask").hidden = true;
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, call] of Object.entries(methods)) {
      const group = (call.tags || ["other"])[0];
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push([method.toUpperCase(), path, call]);
    }
  for (const [group, calls] of groups) {
    $("calls").append(el("h2", group));
    for (const [method, path, call] of calls) {
      const box = el("details"), line = el("summary");
      line.append(el("b", method), el("code", path), el("span", (call.description || "").replaceAll("`", "")));
      box.append(line);
      const content = part => part && part.content && Object.values(part.content)[0].schema;
      const body = content(call.requestBody), good = Object.entries(call.responses).find(([code]) => code < "300");
      const given = (call.parameters || []).map(each => each.name + " (" + each.in + ")");
      const lines = [];
      if (given.length) lines.push("parameters: " + given.join(", "));
      if (body) lines.push("body: " + JSON.stringify(resolve(body, schemas, 0), null, 2));
      if (good) lines.push(good[0] + ": " + JSON.stringify(resolve(content(good[1]), schemas, 0) || "bytes", null, 2));
      box.append(el("pre", lines.join("\n\n")));
      $("calls").append(box);
    }
  }
}
$("ask").onsubmit = event => {
  event.preventDefault();
  token = $("token").value.trim();
  sessionStorage.setItem("paceline-token", token);
  show();
};
if (token) show();
