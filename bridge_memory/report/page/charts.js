// Charts of an estimate: stages as stacked bars, a stage over one training step, the peak as a treemap.
//
// Plain ES module, no dependencies. Each function draws into a given element, takes parts of page_data() (schema
// bridge-memory/page/2) and returns {destroy()}. Text from the data becomes text nodes only.

const UNITS = { GiB: 2 ** 30, MiB: 2 ** 20, GB: 1e9, MB: 1e6 };
export const ROLES = ["weights", "gradients", "optimizer", "buffers", "activation", "transient"];
export const ROLE_TITLES = {
  weights: "weights", gradients: "gradients", optimizer: "optimizer", buffers: "buffers",
  activation: "activations", transient: "temporaries", pipeline: "pipeline", carried_over: "carried over",
};
const PHASES = ["forward", "backward", "overlapped"];
const SVG = "http://www.w3.org/2000/svg";

// ---- small things ----

// Creating a format takes longer than a hundred uses.
const FORMATS = [0, 1, 2].map((digits) => new Intl.NumberFormat("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }));

export function formatBytes(bytes, unit = "GiB") {
  const size = UNITS[unit] ?? UNITS.GiB;
  const small = bytes !== 0 && Math.abs(bytes) < size / 100;
  if (small && unit === "GiB") return formatBytes(bytes, "MiB");
  const digits = unit === "MiB" || unit === "MB" ? 1 : 2;
  return `${FORMATS[digits].format(bytes / size)} ${unit}`;
}

/** An HTML element with attributes, and children that are elements or text. */
export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
  return element;
}

// Kind of chart -> the width of such a chart in this window: to ask an element lays the whole page out.
const widths = new Map();
globalThis.addEventListener?.("resize", () => widths.clear());

/** Draws again when the width changes. */
export function responsive(element, draw) {
  let width = 0;
  const observer = new ResizeObserver(() => {
    const now = Math.floor(element.clientWidth);
    if (!now || now === width) return;
    widths.set(element.className, now);
    draw((width = now));
  });
  observer.observe(element);
  if (!widths.has(element.className)) widths.set(element.className, Math.floor(element.clientWidth) || 720);
  draw((width = widths.get(element.className)));
  return { destroy: () => { observer.disconnect(); element.replaceChildren(); } };
}

/** One tooltip of a chart, kept inside the chart's width. */
export function tooltip(container) {
  const tip = html("div", { class: "bm-tip", hidden: true, "aria-hidden": "true" });
  container.append(tip);
  return {
    show(x, y, lines) {
      tip.replaceChildren(...lines);
      tip.hidden = false;
      const room = container.clientWidth - tip.offsetWidth - 4;
      tip.style.left = `${Math.max(0, Math.min(x + 12, room))}px`;
      tip.style.top = `${Math.max(0, y + 14)}px`;
    },
    hide() { tip.hidden = true; },
  };
}

function legend(roles) {
  return html("ul", { class: "bm-legend", "aria-hidden": "true" },
    roles.map((role) => html("li", {}, html("span", { class: `bm-swatch bm-${role}` }), ROLE_TITLES[role])));
}

export function ticks(most, count) {
  const rough = most / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const out = [];
  for (let n = 0; n <= most + step * 1e-9; n += step) out.push(n);
  return out;
}

// ---- stages as stacked bars ----

/** stages: page.stages; options: {gpus: page.gpus, unit, selected, onSelect(stage), measured: {stage: {peak_bytes}}}. */
export function stageBars(element, stages, options = {}) {
  const { gpus = [], unit = "GiB", onSelect = null, measured = {} } = options;
  const found = (stage) => measured[stage.stage]?.peak_bytes ?? null;
  const highest = Math.max(...stages.map((s) => Math.max(s.peak_bytes, found(s) ?? 0)));
  const near = gpus.filter((g) => g.capacity_bytes < 2.2 * highest);
  const cards = near.length ? near : gpus.slice(0, 1).filter((g) => g.capacity_bytes < 4 * highest);
  const most = Math.max(highest, ...cards.map((g) => g.capacity_bytes)) * 1.02;
  const tip = { current: null };
  const rows = stages.map((stage) => {
    const words = ROLES.filter((r) => stage.parts[r]).map((r) => `${ROLE_TITLES[r]} ${formatBytes(stage.parts[r], unit)}`);
    const name = stages.length > 1 || stage.number > 1 ? `stage ${stage.label}` : "the GPU";
    const beside = found(stage) === null ? "" : `; measured ${formatBytes(found(stage), unit)}`;
    const bar = html("span", { class: "bm-bar" },
      ROLES.filter((r) => stage.parts[r]).map((role) => html("span", {
        class: `bm-part bm-${role}`, style: `width:${(100 * stage.parts[role]) / most}%`,
        onpointermove: (event) => {
          const box = element.getBoundingClientRect();
          tip.current.show(event.clientX - box.left, event.clientY - box.top, [
            html("b", {}, name), html("div", {}, `${ROLE_TITLES[role]}: ${formatBytes(stage.parts[role], unit)}`),
            html("div", {}, `peak: ${formatBytes(stage.peak_bytes, unit)}${stage.peak_phase ? `, in ${stage.peak_phase}` : ""}${beside}`),
          ]);
        },
        onpointerleave: () => tip.current.hide(),
      })),
      cards.map((g) => html("span", { class: "bm-capacity", style: `left:${(100 * g.capacity_bytes) / most}%` })),
      found(stage) === null ? null : html("span", { class: "bm-found", style: `left:${(100 * found(stage)) / most}%` }));
    return html("li", {}, html(onSelect ? "button" : "div", {
      class: "bm-row", type: onSelect ? "button" : null, "data-stage": stage.stage,
      "aria-pressed": onSelect ? String(stage.stage === options.selected) : null,
      "aria-label": `${name} ${formatBytes(stage.peak_bytes, unit)} at its peak${stage.peak_phase ? `, in ${stage.peak_phase}` : ""}: ${words.join(", ")}${beside}`,
      onclick: onSelect ? () => { select(stage.stage); onSelect(stage.stage); } : null,
    }, html("span", { class: "bm-name" }, name), " ", bar, " ",
      html("span", { class: "bm-value" }, formatBytes(stage.peak_bytes, unit))));
  });
  const list = html("ul", { class: "bm-bars" }, rows);
  function select(number) {
    for (const row of list.querySelectorAll("button")) row.setAttribute("aria-pressed", String(+row.dataset.stage === number));
  }
  const scale = html("div", { class: "bm-cards", "aria-hidden": "true" }, html("span", { class: "bm-name" }),
    html("span", { class: "bm-scale" }, cards.map((g) =>
      html("span", { class: "bm-card", style: `left:${(100 * g.capacity_bytes) / most}%` }, g.gpu))),
    html("span", { class: "bm-value" }));
  const key = legend(ROLES.filter((r) => stages.some((s) => s.parts[r])));
  if (stages.some((s) => found(s) !== null)) key.append(html("li", {}, html("span", { class: "bm-swatch bm-found-swatch" }), "measured peak"));
  const chart = html("div", { class: "bm-chart" }, key, scale, list);
  element.replaceChildren(chart);
  element.classList.add("bm-host");
  tip.current = tooltip(element);
  return { select, destroy: () => element.replaceChildren() };
}

// ---- the phases of a job ----

/** job: page.job. A bar a phase: its parts at the least, and the range up to the most. */
export function phaseStrip(element, job) {
  const { phases, capacity_bytes: capacity } = job;
  const most = Math.max(capacity, ...phases.map((phase) => phase.driver_bytes[1])) * 1.02;
  const at = (bytes) => `${(100 * bytes) / most}%`;
  const unit = job.capacity.split(" ")[1];
  const tip = { current: null };
  const rows = phases.map((phase, i) => {
    const reserved = phase.reserved_bytes[0], allocated = Math.min(phase.allocated_bytes[0], reserved);
    const [least, driver] = phase.driver_bytes;
    const parts = [["allocated", allocated], ["reserved", reserved - allocated], ["outside", least - reserved], ["range", driver - least]];
    const numbers = phase.cells.slice(1, -1).map((cell, c) => `${job.columns[c + 1]} ${cell}`);
    const words = `${phase.name}: ${numbers.join(", ")} ${unit}; ${phase.verdict}, ${phase.room}`;
    const bar = html("span", {
      class: "bm-bar", role: "img", "aria-label": i === job.decides ? `${words}; the highest driver peak` : words,
      onpointermove: (event) => {
        const box = element.getBoundingClientRect();
        tip.current.show(event.clientX - box.left, event.clientY - box.top, [
          html("b", {}, phase.name), ...numbers.map((one) => html("div", {}, one)),
          html("ul", {}, phase.largest.map((one) => html("li", {}, one)))]);
      },
      onpointerleave: () => tip.current.hide(),
    }, parts.filter(([, bytes]) => bytes > 0).map(([name, bytes]) => html("span", { class: `bm-part bm-${name}`, style: `width:${at(bytes)}` })),
    html("span", { class: "bm-capacity", style: `left:${at(capacity)}` }));
    return html("li", { class: i === job.decides ? "bm-decides" : null }, html("span", { class: "bm-phase" }, phase.name), " ", bar, " ",
      html("span", { class: `bm-room bm-${TONES[phase.verdict]}` }, html("b", {}, phase.verdict), `, ${phase.room}`));
  });
  const keys = [["allocated", "allocated"], ["reserved", "reserved beyond it"], ["outside", "outside of torch"], ["range", "up to the most"]];
  element.replaceChildren(html("div", { class: "bm-chart" },
    html("ul", { class: "bm-legend", "aria-hidden": "true" },
      keys.map(([name, title]) => html("li", {}, html("span", { class: `bm-swatch bm-${name}` }), title))),
    html("ul", { class: "bm-phases" },
      html("li", { class: "bm-of", "aria-hidden": "true" }, html("span", { class: "bm-scale" },
        html("span", { class: "bm-card", style: capacity > most / 2 ? `right:${at(most - capacity)}` : `left:${at(capacity)}` }, `${job.gpu}: ${job.capacity}`))),
      rows)));
  element.classList.add("bm-host");
  tip.current = tooltip(element);
  return { destroy: () => element.replaceChildren() };
}

const TONES = { fits: "tone-good", tight: "tone-warn", "does not fit": "tone-bad" };

// ---- a stage over one step ----

/** The points of a timeline, as bridge_memory.timeline.Timeline.points gives them, with a place on the axis. */
export function expand(timeline) {
  const floor = Object.values(timeline.persistent).reduce((a, b) => a + b, 0);
  const { chunks, passes, words } = timeline;
  const alive = chunks.map(() => 0);
  const points = [], spans = [];
  let x = 0;
  const add = (pass, step, width, activations, pipeline, passing, carried_over = 0, held = null, gradients = 0) => {
    points.push({ x: x + width / 2, pass, step, activations, pipeline, gradients, passing, carried_over,
      total: floor + activations + pipeline + gradients + passing + carried_over, alive: held });
    x += width;
  };
  add(-1, -1, 0, 0, 0, 0, timeline.carried_over);
  x += 1;
  passes.forEach((one, number) => {
    const [phase, , chunkNumber, hidden, carried] = one;
    const begin = x, chunk = chunks[chunkNumber], held = hidden * timeline.hidden_state;
    if (phase === 0) alive[chunkNumber] += 1;
    if (phase === 2) alive[one[6]] += 1;
    const now = alive.slice();
    const kept = now.reduce((sum, n, i) => sum + n * chunks[i].saved, 0);
    if (phase === 2) {
      const both = chunk.saved + chunks[one[6]].saved, less = Math.min(chunk.saved, chunks[one[6]].saved);
      add(number, 0, 3 * Math.max(1, chunk.steps.length), kept - less, held, kept - both + one[7] - (kept - less) + carried + timeline.always, 0, now);
      alive[chunkNumber] -= 1;
      spans.push({ begin, end: x, pass: number });
      return;
    }
    const others = kept - chunk.saved, beside = carried + timeline.always, back = phase === 1;
    if (back) add(number, -1, 0, kept, held, beside, 0, now);
    for (let n = 0; n < chunk.steps.length; n++) {
      const i = back ? chunk.steps.length - 1 - n : n, step = chunk.steps[i];
      const own = step[8] + step[2] + (back ? chunk.sent : 0);
      const made = back ? step[7] : 0;
      add(number, i, back ? 2 : 1, others + own, held, step[back ? 4 : 3] - own - made + beside, 0, now, made);
    }
    if (!chunk.steps.length) x += back ? 2 : 1;
    if (back) alive[chunkNumber] -= 1;
    else add(number, -1, 0, kept, held, beside, 0, now);
    spans.push({ begin, end: x, pass: number });
  });
  add(passes.length, -1, 1, 0, 0, 0, 0, null, timeline.fresh);
  add(passes.length, 0, 1, 0, 0, timeline.in_step, timeline.carried_over, null, timeline.fresh);
  const describe = (point) => {
    if (point.pass < 0) return ["start of the step", "with what is carried over from the last step"];
    if (point.pass === passes.length) return point.step < 0 ? ["end of the passes", ""] : ["optimizer step", ""];
    const one = passes[point.pass], phase = PHASES[one[0]];
    const where = (chunk) => (chunks.length > 1 ? `, ${chunks[chunk].name}` : "");
    if (one[0] === 2) {
      return [`forward of microbatch ${one[5]}${where(one[6])}, overlapped with backward of ${one[1]}${where(one[2])}`, "layer by layer"];
    }
    const pass = `${phase} of microbatch ${one[1]}${where(one[2])}`;
    if (point.step < 0) return [pass, one[0] ? "before its first layer" : "after its last layer"];
    const step = chunks[one[2]].steps[point.step];
    const kind = words[step[1]] ? ` (${words[step[1]]})` : "";
    return [pass, `${words[step[0]]}${kind}: ${words[step[one[0] ? 6 : 5]]}`];
  };
  return { points, spans, width: x, floor, describe };
}

const SERIES = ["weights", "gradients", "optimizer", "buffers", "carried_over", "activation", "pipeline", "transient"];

/** timeline: page.timelines[stage]; options: {gpus, unit, height, measured: {peak_bytes, static_bytes}}. */
export function stepTimeline(element, timeline, options = {}) {
  const { unit = "GiB", gpus = [], measured = null } = options;
  const found = [["measured peak", measured?.peak_bytes], ["measured between steps", measured?.static_bytes]].filter(([, bytes]) => bytes);
  const all = expand(timeline);
  const { points } = all;
  let peakAt = 1;
  points.forEach((p, i) => { if (i && p.total > points[peakAt].total) peakAt = i; });
  const state = { from: 0, to: all.width, at: peakAt };
  const value = (point, series) => ({
    activation: point.activations, pipeline: point.pipeline, transient: point.passing, carried_over: point.carried_over,
    gradients: (timeline.persistent.gradients ?? 0) + point.gradients,
  })[series] ?? timeline.persistent[series] ?? 0;
  const used = SERIES.filter((series) => points.some((p) => value(p, series)));
  const status = html("p", { class: "bm-status", "aria-live": "off" });
  const plot = html("div", { class: "bm-plot" });
  const zoomed = (from, to) => {
    const span = Math.max(Math.min(to - from, all.width), Math.min(all.width, 4));
    state.from = Math.max(0, Math.min(from, all.width - span));
    state.to = state.from + span;
    redraw();
  };
  const around = (x, span) => zoomed(x - span / 2, x + span / 2);
  const tool = (label, action, title) => html("button", { type: "button", class: "bm-tool", title, onclick: action }, label);
  const tools = html("div", { class: "bm-tools" },
    tool("whole step", () => zoomed(0, all.width), "show the whole step"),
    tool("around the peak", () => { state.at = peakAt; around(points[peakAt].x, Math.max(24, all.width / 12)); }, "show the passes around the peak"),
    tool("+", () => around(points[state.at].x, (state.to - state.from) / 2), "zoom in at the marked moment"),
    tool("\u2212", () => around(points[state.at].x, (state.to - state.from) * 2), "zoom out"));
  const words = (point) => {
    const [pass, operation] = all.describe(point);
    const parts = used.filter((s) => value(point, s)).map((s) => `${ROLE_TITLES[s]} ${formatBytes(value(point, s), unit)}`);
    return { pass, operation, parts, total: formatBytes(point.total, unit) };
  };
  const aliveWords = (point) => {
    if (!point.alive) return "";
    const some = point.alive.map((n, i) => [n, i]).filter(([n]) => n);
    if (timeline.chunks.length === 1) return `${point.alive[0]} microbatch${point.alive[0] === 1 ? "" : "es"} alive`;
    return `alive: ${some.map(([n, i]) => `${n} in ${timeline.chunks[i].name}`).join(", ")}`;
  };
  let redraw = () => {};
  element.replaceChildren(html("div", { class: "bm-chart" }, legend(used), tools, plot, status));
  element.classList.add("bm-host");
  if (timeline.followed < timeline.microbatches) {
    element.firstChild.append(html("p", { class: "bm-note" },
      `${timeline.followed} of ${timeline.microbatches} microbatches are drawn; those left out repeat the middle ones.`));
  }
  element.firstChild.append(html("p", { class: "bm-note" },
    "Operations are in the order of the pipeline schedule. Widths are layers (backward is twice as wide), not seconds. Arrow keys: next operation; P: peak; + and \u2212: zoom."));

  const made = responsive(plot, (width) => {
    const height = options.height ?? Math.max(220, Math.min(360, Math.round(width * 0.42)));
    const margin = { left: 58, right: 10, top: 22, bottom: 34 };
    const inner = { width: Math.max(60, width - margin.left - margin.right), height: height - margin.top - margin.bottom };
    const card = gpus.filter((g) => g.capacity_bytes < 1.6 * points[peakAt].total)
      .sort((a, b) => b.capacity_bytes - a.capacity_bytes)[0];
    const most = Math.max(points[peakAt].total, card?.capacity_bytes ?? 0, ...found.map(([, bytes]) => bytes)) * 1.04;
    const y = (bytes) => margin.top + inner.height * (1 - bytes / most);
    const size = UNITS[unit] ?? UNITS.GiB;

    redraw = () => {
      const { from, to } = state;
      const x = (at) => margin.left + (inner.width * (at - from)) / (to - from);
      // In each column of pixels the highest point is drawn.
      let shown = points.filter((p, i) => p.x >= from && p.x <= to || (points[i + 1]?.x >= from && p.x < from) || (points[i - 1]?.x <= to && p.x > to));
      if (shown.length > 2 * inner.width) {
        const columns = new Map();
        for (const p of shown) {
          const column = Math.floor(x(p.x) * 1.5), best = columns.get(column);
          if (!best || p.total > best.total) columns.set(column, p);
        }
        shown = [...columns.values()];
      }
      const root = svg("svg", {
        width, height, class: "bm-svg", tabindex: 0, role: "slider",
        "aria-label": "Memory of the stage over one training step", "aria-valuemin": 0, "aria-valuemax": points.length - 1,
      });
      const clip = `bm-clip-${Math.random().toString(36).slice(2)}`;
      root.append(svg("clipPath", { id: clip }, svg("rect", { x: margin.left, y: 0, width: inner.width, height })));
      for (const tick of ticks(most / size, 5)) {
        root.append(svg("line", { class: "bm-grid", x1: margin.left, x2: margin.left + inner.width, y1: y(tick * size), y2: y(tick * size) }),
          svg("text", { class: "bm-axis", x: margin.left - 6, y: y(tick * size) + 4, "text-anchor": "end" }, tick.toLocaleString("en-US")));
      }
      root.append(svg("text", { class: "bm-axis", x: 4, y: 12 }, unit));
      const areas = svg("g", { "clip-path": `url(#${clip})` });
      const base = shown.map(() => 0);
      for (const series of used) {
        const up = [], down = [];
        shown.forEach((p, i) => {
          const at = x(p.x).toFixed(1);
          down.push(`${at},${y(base[i]).toFixed(1)}`);
          base[i] += value(p, series);
          up.push(`${at},${y(base[i]).toFixed(1)}`);
        });
        areas.append(svg("polygon", { class: `bm-area bm-${series}`, points: [...up, ...down.reverse()].join(" ") }));
      }
      root.append(areas);
      // The passes below: forward and backward of which microbatch.
      const strip = svg("g", { "clip-path": `url(#${clip})` });
      const top = margin.top + inner.height + 5;
      let drawnTo = -1;
      for (const span of all.spans) {
        if (span.end < from || span.begin > to) continue;
        const left = x(span.begin), wide = x(span.end) - left, one = timeline.passes[span.pass];
        if (wide < 0.5 && left < drawnTo) continue; // One of several passes on half a pixel is drawn.
        drawnTo = left + 0.5;
        strip.append(svg("rect", { class: `bm-pass bm-pass-${PHASES[one[0]]}`, x: left, y: top, width: Math.max(0.5, wide - (wide > 3 ? 1 : 0)), height: 14 }));
        if (wide > 8 * String(one[1]).length + 6) strip.append(svg("text", { class: "bm-pass-text", x: left + wide / 2, y: top + 11, "text-anchor": "middle" }, one[1]));
      }
      root.append(strip, svg("text", { class: "bm-axis", x: margin.left - 6, y: top + 11, "text-anchor": "end" }, "passes"));
      if (card) {
        root.append(svg("line", { class: "bm-limit", x1: margin.left, x2: margin.left + inner.width, y1: y(card.capacity_bytes), y2: y(card.capacity_bytes) }),
          svg("text", { class: "bm-axis bm-limit-text", x: margin.left + 4, y: y(card.capacity_bytes) - 4 }, `${card.gpu}: ${formatBytes(card.capacity_bytes, unit)}`));
      }
      for (const [name, bytes] of found) {
        root.append(svg("line", { class: "bm-measured", x1: margin.left, x2: margin.left + inner.width, y1: y(bytes), y2: y(bytes) }),
          svg("text", { class: "bm-peak-text bm-measured-text", x: margin.left + inner.width - 4, y: y(bytes) + 13, "text-anchor": "end" }, `${name} ${formatBytes(bytes, unit)}`));
      }
      const peak = points[peakAt];
      if (peak.x >= from && peak.x <= to) {
        const px = x(peak.x), left = px > width * 0.6;
        root.append(svg("circle", { class: "bm-peak", cx: px, cy: y(peak.total), r: 4 }),
          svg("text", { class: "bm-peak-text", x: px + (left ? -8 : 8), y: Math.max(11, y(peak.total) - 7), "text-anchor": left ? "end" : "start" }, `peak ${formatBytes(peak.total, unit)}`));
      }
      const cursor = svg("line", { class: "bm-cursor", y1: margin.top, y2: margin.top + inner.height + 20 });
      root.append(cursor);
      const mark = (withTip) => {
        const p = points[state.at], w = words(p);
        cursor.setAttribute("x1", x(p.x)); cursor.setAttribute("x2", x(p.x));
        cursor.style.display = p.x < from || p.x > to ? "none" : "";
        root.setAttribute("aria-valuenow", state.at);
        root.setAttribute("aria-valuetext", `${w.total}: ${w.pass}, ${w.operation}; ${aliveWords(p)}; ${w.parts.join(", ")}`);
        status.replaceChildren(html("b", {}, w.total), ` ${w.pass}${w.operation ? `: ${w.operation}` : ""}`);
        if (withTip) {
          tip.show(x(p.x), Math.min(y(p.total), margin.top + inner.height - 40), [
            html("b", {}, w.total), html("div", {}, w.pass), html("div", {}, w.operation),
            aliveWords(p) ? html("div", {}, aliveWords(p)) : null,
            html("ul", {}, used.slice().reverse().filter((s) => value(p, s)).map((s) =>
              html("li", {}, html("span", { class: `bm-swatch bm-${s}` }), `${ROLE_TITLES[s]} ${formatBytes(value(p, s), unit)}`))),
          ].filter(Boolean));
        }
      };
      plot.replaceChildren(root);
      const tip = tooltip(plot);
      root.addEventListener("pointermove", (event) => {
        const at = from + ((event.clientX - root.getBoundingClientRect().left - margin.left) / inner.width) * (to - from);
        let low = 0, high = points.length - 1;
        while (low < high) { const middle = (low + high) >> 1; if (points[middle].x < at) low = middle + 1; else high = middle; }
        // The highest moment under the pixel.
        const near = (to - from) / inner.width;
        let best = low > 0 && at - points[low - 1].x < points[low].x - at ? low - 1 : low;
        for (let i = best; i >= 0 && points[i].x > at - near; i--) if (points[i].total > points[best].total) best = i;
        for (let i = best; i < points.length && points[i].x < at + near; i++) if (points[i].total > points[best].total) best = i;
        state.at = best;
        mark(true);
      });
      root.addEventListener("pointerleave", () => tip.hide());
      root.addEventListener("blur", () => tip.hide());
      root.addEventListener("keydown", (event) => {
        const moves = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 20, PageDown: -20 };
        if (event.ctrlKey || event.metaKey || event.altKey) return;
        if (event.key in moves) state.at = Math.max(0, Math.min(points.length - 1, state.at + moves[event.key]));
        else if (event.key === "Home") state.at = 0;
        else if (event.key === "End") state.at = points.length - 1;
        else if (event.key === "p" || event.key === "P") state.at = peakAt;
        else if (event.key === "+" || event.key === "-") {
          around(points[state.at].x, (to - from) * (event.key === "+" ? 0.5 : 2));
          plot.querySelector("svg").focus();
          event.preventDefault();
          return;
        } else return;
        event.preventDefault();
        const p = points[state.at];
        if (p.x < from || p.x > to) { around(p.x, to - from); plot.querySelector("svg").focus(); return; }
        mark(true);
      });
      mark(false);
    };
    redraw();
  });
  return { destroy: () => { made.destroy(); element.replaceChildren(); } };
}

// ---- the peak as a treemap ----

/** Rectangles of [value, ...] in a box, squarish (Bruls, Huizing, van Wijk); values in falling order. */
export function squarify(values, x, y, width, height) {
  const out = [], total = values.reduce((a, b) => a + b, 0);
  if (!(total > 0) || width <= 0 || height <= 0) return values.map(() => ({ x, y, width: 0, height: 0 }));
  const scale = (width * height) / total;
  let at = 0;
  while (at < values.length) {
    const side = Math.min(width, height);
    let sum = 0, worst = Infinity, end = at;
    while (end < values.length) {
      const next = sum + values[end] * scale;
      const strip = next / side;
      const largest = values[at] * scale, smallest = values[end] * scale;
      const ratio = Math.max(largest / strip / strip, smallest > 0 ? strip * strip / smallest : Infinity);
      if (end > at && ratio > worst) break;
      worst = ratio; sum = next; end += 1;
    }
    const strip = side > 0 ? sum / side : 0;
    let along = 0;
    for (let i = at; i < end; i++) {
      const length = strip > 0 ? (values[i] * scale) / strip : 0;
      out.push(width >= height ? { x, y: y + along, width: strip, height: length } : { x: x + along, y, width: length, height: strip });
      along += length;
    }
    if (width >= height) { x += strip; width -= strip; } else { y += strip; height -= strip; }
    at = end;
  }
  return out;
}

/** Words of the names of components, and what readers know them by. */
const SHORTER = [[/\bactivations: /, ""], [/\btemporaries: /, ""], [/ \(over [^)]*\)/, ""], [/\bparameters\b/g, "params"], [/\bgradients\b/g, "grads"],
  [/\bembeddings?\b/g, "embed."], [/ \(routed experts\)/g, " experts"], [/\battention\b/g, "attn"], [/\boptimizer\b/g, "optim."], [/\bweights\b/g, "wts"], [/\bworkspaces?\b/g, "worksp."], [/\bdispatch\b/g, "disp."]];

/** A name and a size in at most `rows` lines of `most` characters: whole, else wrapped, else abbreviated, else cut. */
export function labelLines(name, size, most, rows) {
  if (most < 3 || rows < 1) return [];
  const wrap = (text) => {
    const lines = [];
    for (const word of text.split(/(?<=[-_])|\s+/)) {
      const last = lines.at(-1);
      const joined = last === undefined ? word : `${last}${/[-_]$/.test(last) ? "" : " "}${word}`;
      if (last !== undefined && joined.length <= most) lines[lines.length - 1] = joined;
      else lines.push(word);
    }
    return lines;
  };
  const fits = (lines) => lines.length <= rows && lines.every((line) => line.length <= most);
  const short = SHORTER.reduce((text, [from, to]) => text.replace(from, to), name).trim() || name;
  const number = size.split(" ")[0];
  for (const text of [`${name}  ${size}`, `${short}  ${number}`, name, short]) {
    if (text.length <= most) return [text];
  }
  for (const text of [`${name} ${size}`, `${short} ${number}`, short]) if (fits(wrap(text))) return wrap(text);
  const cut = (line) => (line.length <= most ? line : most > 4 ? `${line.slice(0, most - 1)}\u2026` : "");
  return wrap(short).slice(0, rows).map(cut).filter(Boolean);
}

/** tree: page.treemaps[stage]; options: {unit, height}. */
export function peakTreemap(element, tree, options = {}) {
  const { unit = "GiB" } = options;
  let path = [tree];
  let redraw = () => {};
  const crumbs = html("nav", { class: "bm-crumbs", "aria-label": "place in the treemap" });
  const plot = html("div", { class: "bm-plot" });
  const go = (to, focus) => { path = to; redraw(); if (focus) (plot.querySelector("[tabindex]") ?? crumbs.querySelector("button"))?.focus(); };
  const children = (node) => [...(node.children ?? [])].sort((a, b) => b.bytes - a.bytes);
  element.replaceChildren(html("div", { class: "bm-chart" }, crumbs, plot));
  element.classList.add("bm-host");
  const made = responsive(plot, (width) => {
    const height = options.height ?? Math.max(280, Math.min(460, Math.round(width * 0.5)));
    redraw = () => {
      crumbs.replaceChildren(...path.flatMap((node, i) => [
        i ? " \u203a " : "",
        i < path.length - 1
          ? html("button", { type: "button", class: "bm-tool", onclick: () => go(path.slice(0, i + 1), true) }, node.name)
          : html("span", {}, `${node.name}, ${formatBytes(node.bytes, unit)}`),
      ]));
      const here = path[path.length - 1];
      const whole = tree.bytes;
      const root = svg("svg", { width, height, class: "bm-svg", role: "group", "aria-label": `Parts of ${here.name}` });
      const labels = svg("g", { class: "bm-labels", "aria-hidden": "true" });
      const tip = { current: null };
      const label = (node, trail) => `${[...trail, node].map((n) => n.name).join(", ")}: ${formatBytes(node.bytes, unit)}, ${((100 * node.bytes) / whole).toFixed(1)} % of the peak${node.provenance ? `, ${node.provenance}` : ""}`;
      const draw = (node, box, depth, role, trail) => {
        if (box.width < 1 || box.height < 1) return;
        const opens = children(node).length > 0;
        const cell = svg("g", {
          class: `bm-cell bm-depth-${depth}`, ...(depth === 0
            ? { tabindex: 0, role: opens ? "button" : "img", "aria-label": label(node, trail) } : { "aria-hidden": "true" }),
        }, svg("rect", { class: `bm-${role}`, x: box.x, y: box.y, width: Math.max(0, box.width - 1), height: Math.max(0, box.height - 1) }));
        root.append(cell);
        const size = formatBytes(node.bytes, unit);
        const leaf = !opens || depth >= 2 || box.height < 34 || box.width < 40;
        if (box.height > 15 && box.width > 24) {
          const rows = leaf ? Math.floor((box.height - 3) / 13) : 1;
          labelLines(node.name, size, Math.floor((box.width - 8) / (depth ? 6.3 : 7.4)), rows).forEach((line, i) =>
            labels.append(svg("text", { x: box.x + 4, y: box.y + 12 + 13 * i, class: depth ? "bm-small" : "bm-label" }, line)));
        }
        const enter = (event) => { event.stopPropagation(); const to = opens ? [...path, ...(depth ? trail.slice(-depth) : []), node] : null; if (to) go(to, event.type === "keydown"); };
        cell.addEventListener("click", enter);
        cell.addEventListener("keydown", (event) => { if (opens && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); enter(event); } });
        cell.addEventListener("pointermove", (event) => {
          const from = plot.getBoundingClientRect();
          tip.current.show(event.clientX - from.left, event.clientY - from.top, [
            ...[...trail, node].map((n, i, list) => html(i === list.length - 1 ? "b" : "div", {}, n.name)),
            html("div", {}, `${size}, ${((100 * node.bytes) / whole).toFixed(1)} % of the peak`),
            node.provenance ? html("div", {}, `basis: ${node.provenance}${node.shard ? `; sharded over ${node.shard}` : ""}`) : null,
            [...trail, node].some((n) => n.shares) ? html("div", {}, "sharded over data-parallel ranks: each tensor is shown with its share") : null,
          ].filter(Boolean));
        });
        cell.addEventListener("pointerleave", () => tip.current.hide());
        if (leaf) return;
        const inner = { x: box.x + 2, y: box.y + 16, width: box.width - 5, height: box.height - 19 };
        const inside = children(node);
        squarify(inside.map((n) => n.bytes), inner.x, inner.y, inner.width, inner.height)
          .forEach((b, i) => draw(inside[i], b, depth + 1, role, [...trail, node]));
      };
      const inside = children(here);
      const shownRole = path.map((n) => n.role).filter(Boolean).pop();
      squarify(inside.map((n) => n.bytes), 0, 0, width, height)
        .forEach((b, i) => draw(inside[i], b, 0, inside[i].role ?? shownRole ?? "buffers", path.slice(1)));
      root.append(labels);
      root.addEventListener("keydown", (event) => { if (event.key === "Escape" && path.length > 1) go(path.slice(0, -1), true); });
      plot.replaceChildren(root);
      tip.current = tooltip(plot);
    };
    redraw();
  });
  return { destroy: () => { made.destroy(); element.replaceChildren(); } };
}
