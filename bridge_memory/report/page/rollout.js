// The phases of a post-training step as a timeline: a column a phase, trainer and inference engine stacked.
//
// Plain ES module. Data is JSON as Python writes it (report/rollout.py: rollout_chart); text of it becomes text nodes only.
import { html, responsive, svg, ticks, tooltip } from "./charts.js";

const PARTS = [
  ["trainer", "trainer, allocated"], ["cache", "its allocator's cache"], ["outside", "its context, NCCL, libraries"],
  ["engine", "engine: process, graphs, NCCL"], ["weights", "engine's weights"], ["kv", "KV cache"],
];
const TONE = { fits: "good", tight: "warn", "does not fit": "bad" };

/** Words in lines of at most `most` letters; a longer word is a line of its own. */
function lines(text, most) {
  const out = [];
  for (const word of text.split(/(?<=-)|\s+/)) {
    const last = out.at(-1), joined = last === undefined ? word : `${last}${last.endsWith("-") ? "" : " "}${word}`;
    if (last !== undefined && joined.length <= most) out[out.length - 1] = joined;
    else out.push(word);
  }
  return out;
}

/** data: {gpu, capacity_bytes, capacity, unit, unit_bytes, binds, phases: [{name, verdict, room, driver, parts, driver_bytes, cells, largest}]}. */
export function rolloutTimeline(element, data) {
  const { phases, capacity_bytes: capacity, unit, unit_bytes: size } = data;
  const most = Math.max(capacity, ...phases.map((phase) => phase.driver_bytes[1])) * 1.07;
  const used = PARTS.filter(([name]) => phases.some((phase) => phase.parts[name] > 0));
  const plot = html("div", { class: "bm-plot" }), status = html("p", { class: "bm-status", "aria-live": "off" });
  const words = (phase) => phase.cells.map(([title, cell]) => `${title} ${cell}`).join(", ");
  let at = data.binds;
  element.replaceChildren(html("div", { class: "bm-chart" },
    html("ul", { class: "bm-legend", "aria-hidden": "true" },
      used.map(([name, title]) => html("li", {}, html("span", { class: `bm-swatch bm-rl-${name}` }), title)),
      html("li", {}, html("span", { class: "bm-swatch bm-range" }), "up to the most")), plot, status));
  element.classList.add("bm-host");
  const made = responsive(plot, (width) => {
    const margin = { left: 38, right: 6, top: 26 };
    const column = Math.max(8, (width - margin.left - margin.right) / phases.length), bar = Math.max(6, Math.min(96, column - Math.max(3, column * 0.16)));
    const slanted = column < 58;
    const names = phases.map((phase) => (slanted ? [phase.name] : lines(phase.name, Math.floor(column / 6.4))));
    const below = slanted ? 16 + 5.1 * Math.max(...names.map(([name]) => name.length)) : 8 + 14 * Math.max(...names.map((one) => one.length));
    const tall = Math.max(220, Math.min(340, Math.round(width * 0.42))), height = margin.top + tall + below;
    const y = (bytes) => margin.top + tall * (1 - bytes / most), middle = (i) => margin.left + column * (i + 0.5);
    const root = svg("svg", { width, height, class: "bm-svg", tabindex: 0, role: "slider", "aria-label": `Memory of a ${data.gpu} in each phase of a step`,
      "aria-valuemin": 0, "aria-valuemax": phases.length - 1 });
    const hatch = `bm-hatch-${Math.random().toString(36).slice(2)}`;
    root.append(svg("defs", {}, svg("pattern", { id: hatch, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svg("rect", { class: "bm-rl-hatch", width: 2, height: 6 }))));
    for (const tick of ticks(most / size, 5)) {
      if (tick * size > most) continue;
      root.append(svg("line", { class: "bm-grid", x1: margin.left, x2: width - margin.right, y1: y(tick * size), y2: y(tick * size) }),
        svg("text", { class: "bm-axis", x: margin.left - 5, y: y(tick * size) + 4, "text-anchor": "end" }, tick.toLocaleString("en-US")));
    }
    const mark = svg("rect", { class: "bm-rl-at", y: margin.top, width: column, height: tall });
    root.append(svg("text", { class: "bm-axis", x: 2, y: 12 }, unit), mark);
    phases.forEach((phase, i) => {
      const left = middle(i) - bar / 2, [least, top] = phase.driver_bytes;
      let base = 0;
      const group = svg("g", { class: "bm-rl-column" });
      for (const [name] of PARTS) {
        const bytes = phase.parts[name];
        if (bytes > 0) group.append(svg("rect", { class: `bm-rl-part bm-rl-${name}`, x: left, width: bar, y: y(base + bytes), height: Math.max(0, y(base) - y(base + bytes)) }));
        base += bytes;
      }
      group.append(svg("rect", { class: "bm-rl-range", x: left, width: bar, y: y(top), height: Math.max(0, y(least) - y(top)), fill: `url(#${hatch})` }));
      const tone = phase.verdict === "fits" ? "" : ` bm-rl-${TONE[phase.verdict] ?? "warn"}`;
      const number = column > 66 ? phase.driver : phase.driver.split("-").at(-1);
      group.append(svg("text", { class: `bm-rl-number${tone}`, x: middle(i), y: Math.max(margin.top - 2, y(top) - 4), "text-anchor": "middle" }, number));
      const text = { class: `bm-rl-name${i === data.binds ? " bm-rl-binds" : ""}${tone}` };
      if (slanted) group.append(svg("text", { ...text, "text-anchor": "end", transform: `translate(${middle(i) + 4} ${margin.top + tall + 12}) rotate(-55)` }, names[i][0]));
      else names[i].forEach((line, n) => group.append(svg("text", { ...text, x: middle(i), y: margin.top + tall + 15 + 14 * n, "text-anchor": "middle" }, line)));
      root.append(group);
    });
    root.append(svg("line", { class: "bm-limit", x1: margin.left, x2: width - margin.right, y1: y(capacity), y2: y(capacity) }),
      svg("text", { class: "bm-peak-text bm-rl-card", x: width - margin.right, y: 12, "text-anchor": "end" }, `dashed: ${data.gpu}, ${data.capacity}`));
    plot.replaceChildren(root);
    const tip = tooltip(plot);
    const choose = (i, told) => {
      at = i;
      const phase = phases[i];
      mark.setAttribute("x", middle(i) - column / 2);
      root.setAttribute("aria-valuenow", i);
      root.setAttribute("aria-valuetext", `${phase.name}: ${words(phase)} ${unit}; ${phase.room}${i === data.binds ? "; this phase binds" : ""}`);
      status.replaceChildren(html("b", {}, phase.name), `: ${words(phase)}; ${phase.room}`);
      if (told) tip.show(middle(i), margin.top + 10, [html("b", {}, `${phase.name}: ${phase.room}`),
        ...phase.cells.map(([title, cell]) => html("div", {}, `${title} ${cell}${title === "stage" ? "" : ` ${unit}`}`)), html("ul", {}, phase.largest.map((one) => html("li", {}, one)))]);
    };
    root.addEventListener("pointermove", (event) => {
      const x = event.clientX - root.getBoundingClientRect().left - margin.left;
      choose(Math.max(0, Math.min(phases.length - 1, Math.floor(x / column))), true);
    });
    for (const away of ["pointerleave", "blur"]) root.addEventListener(away, () => tip.hide());
    root.addEventListener("keydown", (event) => {
      const to = { ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1, Home: 0, End: phases.length - 1 }[event.key];
      if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      choose(Math.max(0, Math.min(phases.length - 1, to)), true);
    });
    choose(at, false);
  });
  return { destroy: () => { made.destroy(); element.replaceChildren(); } };
}
