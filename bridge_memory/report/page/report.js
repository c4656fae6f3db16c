// The one-file report: draws charts into a page written by Python, from the JSON in #data.
import { formatBytes, html, peakTreemap, phaseStrip, stageBars, stepTimeline } from "./charts.js";
import { drawAll } from "./plots.js";

const data = JSON.parse(document.getElementById("data").textContent);
const place = (id) => document.getElementById(id);
let drawn = [];

function show(stage) {
  drawn.forEach((chart) => chart.destroy());
  drawn = [];
  const group = data.stages.find((s) => s.stage === stage) ?? data.stages[0];
  const name = data.stages.length > 1 || group.number > 1 ? `stage ${group.label}` : "the GPU";
  for (const heading of document.querySelectorAll(".of-stage")) heading.textContent = name;
  const timeline = data.timelines[stage], tree = data.treemaps[stage];
  const missing = "left out to keep this file small; the command below with --stage makes a report of this stage";
  if (timeline) drawn.push(stepTimeline(place("timeline"), timeline, { gpus: data.gpus, measured: data.measured?.[group.stage] }));
  else place("timeline").replaceChildren(html("p", {}, missing));
  if (tree) drawn.push(peakTreemap(place("treemap"), tree, {}));
  else place("treemap").replaceChildren(html("p", {}, missing));
  components(group);
}

function components(group) {
  const rows = group.components.filter((c) => c.bytes);
  const tree = data.treemaps[group.stage];
  const tensors = [];
  for (const c of tree?.children ?? []) for (const kind of c.children ?? []) for (const t of kind.children ?? []) {
    tensors.push({ ...t, role: c.role, provenance: c.provenance, shard: c.shard, name: `${c.name} \u203a ${kind.name} \u203a ${t.name}` });
  }
  const body = place("components");
  const search = place("search");
  const list = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const every = words.length ? [...rows, ...tensors] : rows;
    const found = every.filter((c) => words.every((w) => `${c.name} ${c.role} ${c.provenance}`.toLowerCase().includes(w)));
    const most = 200;
    body.replaceChildren(...found.slice(0, most).map((c) => html("tr", {},
      html("td", {}, html("span", { class: `bm-swatch bm-${c.role}` }), c.name),
      html("td", { class: "number" }, formatBytes(c.bytes)),
      html("td", { class: "number" }, `${((100 * c.bytes) / group.peak_bytes).toFixed(1)} %`),
      html("td", {}, html("span", { class: `known known-${c.provenance}` }, c.provenance)),
      html("td", {}, c.shard))));
    const sum = found.filter((c) => words.length === 0 || rows.includes(c)).reduce((n, c) => n + c.bytes, 0);
    place("found").textContent = words.length
      ? `${found.length} of ${every.length} components and tensors${found.length > most ? `, the first ${most} shown` : ""}`
      : `${rows.length} components, ${formatBytes(sum)} in total; the search covers their tensors too`;
  };
  search.oninput = list;
  list();
}

if (data.stages?.length) {
  stageBars(place("stages"), data.stages, { gpus: data.gpus, selected: data.shown, onSelect: show, measured: data.measured });
  place("static-stages").open = false;
  show(data.shown);
}
if (data.job) {
  phaseStrip(place("phases"), data.job);
  place("static-phases").open = false;
}
drawAll();
const copy = place("copy");
copy?.addEventListener("click", async () => {
  try { await navigator.clipboard.writeText(place("flags").textContent); copy.textContent = "copied"; } catch { getSelection().selectAllChildren(place("flags")); }
});
// Folded sections are printed too.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
