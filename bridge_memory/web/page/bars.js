// Bars of memory by role, and their legend.

import { gib, h } from "./dom.js";

export const ROLES = [
  ["weights", "weights_bytes", "Weights"], ["gradients", "gradients_bytes", "Gradients"],
  ["optimizer", "optimizer_bytes", "Optimizer"], ["buffers", "buffers_bytes", "Buffers"],
  ["activation", "activation_bytes", "Activations"], ["transient", "transient_bytes", "Temporaries"],
];

export function bar(stage, scale, fit, title) {
  const part = (role, bytes, name) => bytes > 0 && h("span", { class: `part role-${role}`,
    style: { width: `${(100 * bytes) / scale}%` }, title: `${name}: ${gib(bytes, 2)} GiB` });
  const margin = fit ? Math.round(stage.peak_bytes * (fit.margin_bytes / fit.peak_bytes)) : 0;
  // An empty title: the text beside the bar says the same.
  const spoken = title === "" ? { "aria-hidden": "true" } : { role: "img", "aria-label": title ?? partsOf(stage) };
  return h("span", { class: "bar", ...spoken },
    ...ROLES.map(([role, key, name]) => part(role, stage[key], name)),
    fit && part("margin", margin, "Margin: CUDA context, NCCL, fragmentation"),
    fit && h("span", { class: "line", style: { left: `${(100 * fit.capacity_bytes) / scale}%` } }));
}

export const partsOf = (stage) => ROLES.filter(([, key]) => stage[key] > 0)
  .map(([, key, name]) => `${name} ${gib(stage[key])} GiB`).join(", ");

export const legend = (fit) => h("ul", { class: "legend", "aria-hidden": "true" },
  ...ROLES.map(([role, , name]) => h("li", {}, h("i", { class: `role-${role}` }), name)),
  h("li", {}, h("i", { class: "role-margin" }), "Margin"),
  h("li", {}, h("i", { class: "line" }), `${fit.gpu}: ${gib(fit.capacity_bytes)} GiB`));

export const scaleOf = (stages, fit) =>
  1.02 * Math.max(fit.capacity_bytes, ...stages.map((s) => s.peak_bytes * (1 + fit.margin_bytes / fit.peak_bytes)));
