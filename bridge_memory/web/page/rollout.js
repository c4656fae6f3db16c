// A post-training job (verl, NeMo-RL, slime, TRL, ms-swift) that was pasted or dropped: its phases, and what fits.

import { post } from "./api.js";
import { $, fill, h } from "./dom.js";
import { rolloutTimeline } from "./report/rollout.js";

// As bridge_memory/rollout/reading.py tells them apart; the server has the last word.
const STATE_GPUS = [/\bactor_rollout_ref["']?[.:]|\bverl\.trainer\.main_ppo/, /^policy:[^]*?^[ \t]+generation:/m, /--rollout-(?:max-response-len|batch-size|num-gpus)/];
const OTHERS = [/\bswift[ \t]+rlhf\b|--rlhf_type\b|\brlhf_type["']?:/, /\b(?:use_vllm|vllm_mode|num_generations)["']?:/];
const FILES = /\.(?:ya?ml|json|sh|bash|slurm)$/i, MOST = 2 ** 19;

export const statesGpus = (text) => STATE_GPUS.some((mark) => mark.test(text));
export const isJob = (text) => statesGpus(text) || OTHERS.some((mark) => mark.test(text));

/** The text of a dropped file that is such a job's configuration; null for any other file. */
export async function jobOf(file) {
  if (!FILES.test(file.name) || file.size > MOST) return null;
  const text = await file.text();
  return isJob(text) ? text : null;
}

let shownOf = null, chart = null;

/** Whether the phases of `question` are shown; those of another are marked as busy. `has`: it is such a job. */
export function rolloutOf(has, question) {
  const section = $("rollout"), same = has && shownOf === question;
  if (has && !shownOf) fill(section, h("h2", {}, TITLE), h("div", { class: "coming" }));
  section.hidden = !has;
  if (has) $("phases").hidden = true;
  if (same || !has) section.removeAttribute("aria-busy");
  else section.setAttribute("aria-busy", "true");
  return same;
}

const TITLE = "A step, phase by phase";

export async function askRollout(question) {
  return post("/api/rollout", { ...question, stage: undefined });
}

export function rollout(found, question) {
  const section = $("rollout"), { table } = found, strip = h("div", { class: "chart" });
  const open = section.querySelector("details")?.open ?? false;
  const number = (i) => (i > 0 && i < table.columns.length - 1 ? "number" : "");
  const list = (title, items) => items.length > 0 && [h("h3", {}, title), h("ul", {}, ...items.map((one) => h("li", {}, one)))];
  chart?.destroy();
  fill(section,
    h("h2", {}, TITLE, h("small", {}, `${table.title.split(", ").at(-1)} of the GPU with most in each phase; columns are of equal width, not of equal time`)),
    strip,
    h("details", { open }, h("summary", {}, "As a table"),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": table.title }, h("table", {},
        h("thead", {}, h("tr", {}, ...table.columns.map((title, i) => h("th", { scope: "col", class: number(i) }, title)))),
        h("tbody", {}, ...table.rows.map((row, r) => h("tr", { class: r === table.emphasis ? "same" : "" },
          ...row.map((cell, i) => h(i ? "td" : "th", { scope: i ? null : "row", class: number(i) }, cell))))))),
      ...table.notes.map((note) => h("p", { class: "hint" }, note))),
    ...list("What fits", found.limits) || [],
    h("details", {}, h("summary", {}, "What the numbers rest on"), h("ul", {}, ...found.notes.map((one) => h("li", {}, one)))));
  section.removeAttribute("aria-busy");
  chart = rolloutTimeline(strip, found.chart);
  shownOf = question;
}

export function noRollout(message) {
  fill($("rollout"), h("h2", {}, TITLE), h("p", { class: "error" }, message));
  $("rollout").removeAttribute("aria-busy");
  shownOf = null;
}

/** Memory lines of a log beside what is predicted of their moments. */
export function logTable(found) {
  const number = (i) => (i > 1 ? "number" : "");
  return h("div", {}, h("h3", {}, found.title),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": found.title }, h("table", {},
      h("thead", {}, h("tr", {}, ...found.columns.map((title, i) => h("th", { scope: "col", class: number(i) }, title)))),
      h("tbody", {}, ...found.rows.map((row) => h("tr", {}, ...row.map((cell, i) => h(i ? "td" : "th", { scope: i ? null : "row", class: number(i) }, cell))))))),
    ...found.notes.map((note) => h("p", { class: "hint" }, note)));
}
