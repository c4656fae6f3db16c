// Charts of measured figures and of layouts: points and lines over two axes, and bars in pairs.
//
// Plain ES module. Data is JSON as Python writes it (report/document.py: Chart); text of it becomes text nodes only.
import { formatBytes, html, responsive, stageBars, svg, ticks, tooltip } from "./charts.js";
import { rolloutTimeline } from "./rollout.js";

const NUMBERS = [0, 2, 3].map((digits) => new Intl.NumberFormat("en-US", { maximumFractionDigits: digits }));
const number = (value) => NUMBERS[Math.abs(value) < 10 ? 2 : Math.abs(value) < 1000 ? 1 : 0].format(value);

/** Ticks of an axis from `low` to `high`; of a logarithmic one 1, 2 and 5 times powers of ten. */
function marks(low, high, log, count) {
  if (!log) {
    const steps = ticks(high - low || 1, count), step = steps[1] - steps[0], first = Math.ceil(low / step - 1e-9) * step;
    return [...steps, 0].map((_, i) => first + i * step).filter((t) => t <= high);
  }
  const out = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
    for (const n of [1, 2, 5]) if (n * power >= low && n * power <= high) out.push(n * power);
  }
  return out.length > 2 * count ? out.filter((t) => Number.isInteger(Math.round(Math.log10(t) * 1e6) / 1e6)) : out;
}

/** The ends of an axis that holds `values`. */
function range(values, { log = false, zero = false }) {
  const sound = values.filter((v) => Number.isFinite(v) && (!log || v > 0));
  let low = Math.min(...sound), high = Math.max(...sound);
  if (!sound.length) [low, high] = log ? [1, 10] : [0, 1];
  if (log) return [low / 1.15, high * 1.15];
  if (zero) return [0, (high || 1) * 1.06];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - room, high + room];
}

/**
 * Points and lines. data: {x: {title, unit, log, zero}, y: {title, unit, log, zero}, diagonal, series: [{name, tone, line, dots,
 * points: [[x, y, words]]}]}; options: {height, onSelect(series, point)}. `line`: "solid", "dashed" or "steps".
 */
export function plot(element, data, options = {}) {
  const every = data.series.flatMap((series, s) => series.points.map((point) => ({ x: point[0], y: point[1], words: point[2] ?? "", s })))
    .filter((p) => Number.isFinite(p.x) && Number.isFinite(p.y) && !(data.x.log && p.x <= 0) && !(data.y.log && p.y <= 0))
    .sort((a, b) => a.x - b.x || a.s - b.s);
  const figure = (axis, value) => `${axis.title} ${number(value)}${axis.unit ? ` ${axis.unit}` : ""}`;
  const head = (axis) => `${axis.title}${axis.unit ? `, ${axis.unit}` : ""}`;
  const label = (p) => `${figure(data.y, p.y)}, ${figure(data.x, p.x)}${p.words ? `; ${p.words}` : ""}`;
  const plotted = html("div", { class: "bm-plot" });
  const status = html("p", { class: "bm-status", "aria-live": "off" });
  const keys = html("ul", { class: "bm-legend", "aria-hidden": "true" }, data.series.filter((s) => s.points.length).map((series) =>
    html("li", {}, html("span", { class: `bm-key bm-tone-${series.tone}${series.line === "dashed" ? " bm-key-dashed" : ""}${series.line ? "" : " bm-key-dots"}` }), series.name)));
  element.replaceChildren(html("div", { class: "bm-chart" }, keys, plotted, status));
  element.classList.add("bm-host");
  if (!every.length) {
    plotted.append(html("p", { class: "bm-note" }, "nothing to draw"));
    return { destroy: () => element.replaceChildren() };
  }
  let at = every.findLastIndex((p) => p.s === every.reduce((least, q) => Math.min(least, q.s), p.s));
  const made = responsive(plotted, (width) => {
    const height = options.height ?? Math.max(220, Math.min(380, Math.round(width * 0.5)));
    const margin = { left: 62, right: 14, top: 22, bottom: 40 };
    const inner = { width: Math.max(60, width - margin.left - margin.right), height: height - margin.top - margin.bottom };
    const xs = range(every.map((p) => p.x), data.x), ys = range(every.map((p) => p.y), data.y);
    if (data.diagonal) {
      xs[0] = ys[0] = Math.min(xs[0], ys[0]);
      xs[1] = ys[1] = Math.max(xs[1], ys[1]);
    }
    const scaled = ([low, high], log) => (v) => (log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low || 1));
    const sx = scaled(xs, data.x.log), sy = scaled(ys, data.y.log);
    const x = (v) => margin.left + inner.width * sx(v), y = (v) => margin.top + inner.height * (1 - sy(v));
    const root = svg("svg", { width, height, class: "bm-svg", tabindex: 0, role: "slider", "aria-label": `${data.y.title} over ${data.x.title}`,
      "aria-valuemin": 0, "aria-valuemax": every.length - 1 });
    for (const tick of marks(...ys, data.y.log, 5)) {
      root.append(svg("line", { class: "bm-grid", x1: margin.left, x2: margin.left + inner.width, y1: y(tick), y2: y(tick) }),
        svg("text", { class: "bm-axis", x: margin.left - 6, y: y(tick) + 4, "text-anchor": "end" }, number(tick)));
    }
    for (const tick of marks(...xs, data.x.log, Math.max(2, Math.floor(inner.width / 90)))) {
      root.append(svg("line", { class: "bm-grid", x1: x(tick), x2: x(tick), y1: margin.top, y2: margin.top + inner.height }),
        svg("text", { class: "bm-axis", x: x(tick), y: margin.top + inner.height + 15, "text-anchor": "middle" }, number(tick)));
    }
    root.append(svg("text", { class: "bm-axis", x: 4, y: 12 }, head(data.y)),
      svg("text", { class: "bm-axis", x: margin.left + inner.width, y: height - 6, "text-anchor": "end" }, head(data.x)));
    if (data.diagonal) root.append(svg("line", { class: "bm-limit", x1: x(xs[0]), y1: y(ys[0]), x2: x(xs[1]), y2: y(ys[1]) }));
    data.series.forEach((series, s) => {
      const own = every.filter((p) => p.s === s);
      const group = svg("g", { class: `bm-tone-${series.tone}` });
      if (series.line) {
        const path = own.map((p, i) => (i && series.line === "steps" ? `H${x(p.x).toFixed(1)}V${y(p.y).toFixed(1)}` : `${i ? "L" : "M"}${x(p.x).toFixed(1)} ${y(p.y).toFixed(1)}`)).join("");
        group.append(svg("path", { class: `bm-line${series.line === "dashed" ? " bm-dashed" : ""}`, d: path }));
      }
      if (series.dots ?? !series.line) for (const p of own) group.append(svg("circle", { class: "bm-dot", cx: x(p.x).toFixed(1), cy: y(p.y).toFixed(1), r: 4 }));
      root.append(group);
    });
    const ring = svg("circle", { class: "bm-at", r: 7, visibility: "hidden" });
    root.append(ring);
    plotted.replaceChildren(root);
    const tip = tooltip(plotted);
    const mark = (tell) => {
      const p = every[at];
      root.setAttribute("aria-valuenow", at);
      root.setAttribute("aria-valuetext", `${data.series[p.s].name}: ${label(p)}`);
      status.replaceChildren(html("b", {}, data.series[p.s].name), `: ${label(p)}`);
      if (!tell) return;
      ring.setAttribute("cx", x(p.x));
      ring.setAttribute("cy", y(p.y));
      ring.setAttribute("visibility", "visible");
      tip.show(x(p.x), Math.min(y(p.y), height - 90), [
        html("b", {}, data.series[p.s].name), html("div", {}, figure(data.y, p.y)),
        html("div", {}, figure(data.x, p.x)), p.words ? html("div", {}, p.words) : null].filter(Boolean));
    };
    const hide = () => { tip.hide(); ring.setAttribute("visibility", "hidden"); };
    root.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
      let best = -1, near = 40 ** 2;
      every.forEach((p, i) => {
        const away = (x(p.x) - px) ** 2 + (y(p.y) - py) ** 2;
        if (away < near) { near = away; best = i; }
      });
      if (best < 0) return hide();
      at = best;
      mark(true);
    });
    const choose = () => options.onSelect?.(data.series[every[at].s], every[at]);
    root.addEventListener("pointerleave", hide);
    root.addEventListener("blur", hide);
    root.addEventListener("click", () => { if (ring.getAttribute("visibility") === "visible") choose(); });
    root.addEventListener("keydown", (event) => {
      const moves = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 20, PageDown: -20 };
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key in moves) at = Math.max(0, Math.min(every.length - 1, at + moves[event.key]));
      else if (event.key === "Home") at = 0;
      else if (event.key === "End") at = every.length - 1;
      else if (event.key === "Enter") choose();
      else return;
      event.preventDefault();
      mark(true);
    });
    mark(false);
  });
  return { destroy: () => { made.destroy(); element.replaceChildren(); } };
}

/** Bars in pairs, predicted above measured. data: {rows: [{name, predicted, measured}]}, bytes; measured may be null. */
export function pairBars(element, data) {
  const most = Math.max(1, ...data.rows.flatMap((row) => [row.predicted ?? 0, row.measured ?? 0]));
  const one = (bytes, tone) => (bytes === null ? null : html("span", { class: `bm-pair-bar bm-tone-${tone}` },
    html("i", { style: `width:${(80 * bytes) / most}%` }), html("span", {}, formatBytes(bytes))));
  const has = (key) => data.rows.some((row) => row[key] !== null);
  element.replaceChildren(html("div", { class: "bm-chart" },
    html("ul", { class: "bm-legend", "aria-hidden": "true" }, ["predicted", "measured"].filter(has).map((tone) =>
      html("li", {}, html("span", { class: `bm-key bm-tone-${tone}` }), tone))),
    html("ul", { class: "bm-pairs" }, data.rows.map((row) => html("li", { class: "bm-pair" }, html("span", {}, row.name),
      html("span", {}, one(row.predicted, "predicted"), one(row.measured, "measured")))))));
  element.classList.add("bm-host");
  return { destroy: () => element.replaceChildren() };
}

const KINDS = {
  plot, pairs: pairBars, rollout: rolloutTimeline, stages: (element, data) => stageBars(element, data.stages, { gpus: data.gpus ?? [], measured: data.measured }),
};

/** Every chart of a page: what is in #charts, a list, in the elements of the class bm-here, one by one. */
export function drawAll() {
  const held = document.getElementById("charts");
  if (!held) return;
  const places = document.querySelectorAll(".bm-here");
  JSON.parse(held.textContent).forEach((chart, i) => KINDS[chart.kind](places[i], chart.data));
}
