// The answer: verdict, stages, one stage over a step and at its peak, changes that free memory.

import { post } from "./api.js";
import { bar, legend, partsOf, ROLES, scaleOf } from "./bars.js";
import { peakTreemap, phaseStrip, stepTimeline } from "./report/charts.js";
import { $, button, count, fill, gib, h, seconds, toast } from "./dom.js";

const WORDS = {
  fits: ["yes", "Fits"], "does not fit": ["no", "Does not fit"], unknown: ["perhaps", "Unknown"], tight: ["perhaps", "Tight"],
};

// ---- the verdict ----

export function verdict(answer, page) {
  const { fit, estimate, step } = answer;
  const whole = answer.rollout ? null : answer.whole; // the job's answer, where it is worse than the step's
  const fits = fit.fits && !["does not fit", "unknown"].includes(whole?.verdict);
  const worst = estimate.stages[fit.peak_stage];
  const section = $("verdict");
  const room = roomOf(fit);
  fill(section,
    h("h2", {}),
    h("p", { class: "answer" }),
    changed(answer, page),
    !fits && !fit.lacks && page.facts.megatron_engines.includes(page.shown.question.options.engine ?? "megatron_ddp")
      && estimate.parallelism.world_size > 1 && h("p", { class: "hint" }, `This is one layout of many (${layoutWords(answer.effective)}): another may fit the same GPUs.`),
    ...[answer.evidence, answer.band].map((words) => h("p", { class: "hint evidence" }, sentence(words))),
    answer.rollout && h("p", { class: "hint evidence" }, "Bar and figures here, and stages and steps below, are those of the update alone."),
    decides(estimate),
    worst && bar(worst, scaleOf([worst], fit), fit, `The GPU with the highest peak: ${partsOf(worst)}, of ${gib(fit.capacity_bytes)} GiB`),
    h("dl", { class: "facts" },
      ...fact("Peak", `${room.peak} GiB`, `stage ${fit.peak_stage}, ${estimate.peak.phase}`),
      ...fact("Margin", `${room.margin} GiB`, "CUDA, NCCL, fragmentation"),
      ...fact("Usable", `${room.usable} GiB`, `of one ${fit.gpu}`),
      ...fact(room.over ? "Over by" : "Free", `${room.free} GiB`,
        room.over ? "peak + margin \u2212 usable" : "usable \u2212 peak \u2212 margin"),
      ...(step ? fact("Step", seconds(step.seconds), "predicted") : []),
      ...(step ? fact("Speed", `${count(step.tokens_per_second_per_gpu)}`, "tokens/s/GPU, predicted") : [])),
    h("p", { class: "hint", id: "others" }),
    h("div", { class: "buttons" },
      button(fits ? `Find faster ${searched(page, true)}` : `Find a ${searched(page)} that fits`, () => page.search(),
        { class: fits ? "" : "primary", "data-focus": "find" }),
      !fit.fits && !fit.lacks && page.facts.megatron_engines.includes(page.shown.question.options.engine ?? "megatron_ddp")
        && button("Make this layout fit", () => page.makeFit(), { "data-focus": "make-fit", title: "recompute and offload what costs least time" }),
      h("span", { id: "cheapest" }), h("p", { class: "hint", id: "fitting", role: "status" }),
      button("Compare with another", () => page.pin(), { class: "quiet", "data-focus": "pin" })));
  if (whole) head(answer, whole.verdict, whole.brief, `${whole.words}; the step alone: ${answer.answer}`);
  else head(answer, fit.verdict, `${room.free} GiB ${room.over ? "over" : "free"}`, answer.answer);
}

// What a search of this engine finds.
function searched(page, several = false) {
  const torch = !page.facts.megatron_engines.includes(page.state.now.options.engine ?? "megatron_ddp");
  return (torch ? "configuration" : "layout") + (several ? "s" : "");
}

/** The answer of a post-training job, of which `answer` is the update. */
export function ofTheJob(answer, job) {
  head(answer, job.rollout.verdict, job.brief, job.words.join(". "));
}

function head(answer, verdict, room, words) {
  const [tone, word] = WORDS[verdict] ?? WORDS.unknown;
  const of = `${word} ${count(answer.estimate.parallelism.world_size)} \u00d7 ${answer.fit.gpu}`;
  const section = $("verdict");
  section.className = tone;
  fill(section.querySelector("h2"),
    h("span", { class: "mark", "aria-hidden": "true" }, verdict === "tight" ? "!" : { yes: "\u2713", no: "\u2715", perhaps: "?" }[tone]), of);
  fill(section.querySelector(".answer"), sentence(words.replace(/^[A-Z ]+ (on |for )?[\w-]+: /, ""))); // the heading names verdict and GPU
  brief(tone, `${of} \u00b7 ${room}`);
  document.title = `${verdict}: ${answer.estimate.model.name.split("/").pop()} \u00b7 bridge-memory`;
}

// Peak, margin, usable and free memory as they are printed: the margin takes the rounding, so that they add up.
function roomOf(fit) {
  const digits = Math.abs(fit.headroom_bytes) < 2 ** 30 ? 2 : 1;
  const scale = 10 ** digits, rounded = (bytes) => Math.round((bytes / 2 ** 30) * scale);
  const [usable, peak, free] = [fit.capacity_bytes, fit.peak_bytes, fit.headroom_bytes].map(rounded);
  const text = (number) => (number / scale).toFixed(digits);
  return { usable: text(usable), peak: text(peak), margin: text(usable - peak - free), free: text(Math.abs(free)), over: fit.headroom_bytes < 0 };
}

const NAMES = { tp: "TP", pp: "PP", vpp: "VPP", cp: "CP", ep: "EP", etp: "ETP", "num-gpus": "GPUs", "micro-batch-size": "micro batch",
  "global-batch-size": "global batch", "recompute-modules": "recompute", "recompute-granularity": "recompute", "recompute-num-layers": "recompute layers",
  "account-for-embedding-in-pipeline-split": "embedding counts as a layer", "account-for-loss-in-pipeline-split": "loss counts as a layer" };
const shown = (value) => (value === null || value === undefined || value === "" || (Array.isArray(value) && !value.length) ? "none"
  : Array.isArray(value) ? value.join(" + ") : typeof value === "boolean" ? (value ? "on" : "off") : String(value));

function layoutWords(now) {
  const sizes = ["tp", "pp", "cp", "ep"].map((name) => `${NAMES[name]} ${now[name] ?? 1}`);
  return [...sizes, `data parallel ${now.dp}`].join(" \u00b7 ");
}

/** The options changed by the last click on a layout or a suggested change. */
function changed(answer, page) {
  const taken = page.taken;
  if (!taken || taken.address !== page.shown.address) return null;
  // The list of recomputed modules makes "selective" redundant.
  const one = (name) => name !== "recompute-granularity" || !taken.names.includes("recompute-modules") || answer.effective[name] !== "selective";
  const words = taken.names.filter((name) => JSON.stringify(taken.before[name] ?? null) !== JSON.stringify(answer.effective[name] ?? null))
    .filter((name) => !(name === "recompute-modules" && answer.effective["recompute-granularity"] !== "selective") && one(name))
    .map((name) => `${NAMES[name] ?? name} ${shown(name === "recompute-modules" && taken.before["recompute-granularity"] !== "selective" ? null : taken.before[name])} \u2192 ${shown(answer.effective[name])}`);
  if (!words.length) return null;
  return h("p", { class: "changed" }, h("b", {}, "Changed: "), words.join(" \u00b7 "), " ",
    button("Undo", () => page.untake(), { class: "quiet", "data-focus": "untake" }));
}

// On a narrow screen: the answer in a line that stays visible.
function brief(tone, words) {
  $("brief").className = tone;
  fill($("brief"), h("b", {}, words));
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;
const fact = (name, value, more) => [h("div", {}, h("dt", {}, name), h("dd", {}, h("b", {}, value), h("small", {}, more)))];

// `field`: {label, input} where the form shows the message; it is said once.
export function refused(refusal, fixes, page, field) {
  const section = $("verdict");
  section.className = "no";
  brief("no", "This cannot run");
  fill(section,
    h("h2", {}, h("span", { class: "mark", "aria-hidden": "true" }, "!"), "This cannot run"),
    field ? h("p", { class: "answer" }, "The form says why, at ", button(field.label, () => field.input.focus(), { class: "inline", "data-focus": "at-field" }), ".")
      : h("p", { class: "answer" }, refusal.message),
    page.shown && h("p", { class: "hint" }, "Below is the last answer, of the configuration before."),
    h("div", { class: "buttons" }, ...fixes,
      button(`Find a ${searched(page)} that fits`, () => page.search(), { class: "quiet", "data-focus": "find" })));
}

// Dims the parts of the last answer, which are of another configuration; `on` false: they are of this one again.
export function stale(on) {
  $("results").classList.toggle("stale", on);
  for (const id of ["versus", "rollout", "phases", "stages", "stage", "whatif", "notes"]) $(id).inert = on;
}

// ---- the phases of the job ----

const JOB = "The whole job";
let shownOf = null; // the question of the phases that are shown

/** Whether the phases of `question` are shown; those of another are marked as busy. */
export function phasesOf(question) {
  const section = $("phases"), same = shownOf === question;
  if (!shownOf) fill(section, h("h2", {}, JOB, h("small", {}, "from build to resume")), h("div", { class: "coming" }));
  section.hidden = false;
  if (same) section.removeAttribute("aria-busy");
  else section.setAttribute("aria-busy", "true");
  return same;
}

export function phases(found, question) {
  const section = $("phases"), [tone] = WORDS[found.verdict];
  const open = section.querySelector("details")?.open ?? false;
  const strip = h("div", { class: "chart" });
  const numbers = (i) => (i > 0 && i < found.columns.length - 1 ? "number" : "");
  fill(section,
    h("h2", {}, JOB, h("small", {}, "GiB of the GPU with most in each phase, as torch and the driver count it")),
    h("p", { class: `line ${tone}` }, found.words), strip,
    h("details", { open }, h("summary", {}, "As a table"),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": found.title }, h("table", {},
        h("thead", {}, h("tr", {}, ...found.columns.map((title, i) => h("th", { scope: "col", class: numbers(i) }, title)))),
        h("tbody", {}, ...found.phases.map((phase, row) => h("tr", { class: row === found.decides ? "same" : "" },
          ...phase.cells.map((cell, i) => h(i ? "td" : "th", { scope: i ? null : "row", class: numbers(i) }, cell)))))))),
    ...found.notes.map((note) => h("p", { class: "hint" }, sentence(note))));
  section.removeAttribute("aria-busy");
  phaseStrip(strip, found);
  shownOf = question;
}

export function noPhases(message) {
  fill($("phases"), h("h2", {}, JOB), h("p", { class: "error" }, message));
  $("phases").removeAttribute("aria-busy");
  shownOf = null;
}

// ---- stages ----

export function stages(answer, page) {
  const { fit, estimate } = answer;
  const all = estimate.stages;
  const scale = scaleOf(all, fit);
  const rows = all.map((stage) => {
    const over = stage.peak_bytes + Math.round(stage.peak_bytes * (fit.margin_bytes / fit.peak_bytes)) > fit.capacity_bytes;
    return h("button", { type: "button", class: "row", role: "radio", "aria-checked": String(stage.stage === answer.drawn.stage),
      tabindex: stage.stage === answer.drawn.stage ? "0" : "-1", "data-focus": `stage-${stage.stage}`, "data-stage": stage.stage,
      "aria-label": `Stage ${stage.stage}, ${stage.num_layers} layers, peak ${gib(stage.peak_bytes)} GiB: ${partsOf(stage)}`,
      onclick: () => page.choose(stage.stage) },
    h("span", { class: "name" }, `Stage ${stage.stage}`, h("small", {}, ` ${stage.num_layers} layers`)),
    bar(stage, scale, fit, ""), h("span", { class: `value${over ? " over" : ""}` }, gib(stage.peak_bytes)));
  });
  const group = h("div", { class: "stages", role: "radiogroup", "aria-label": "Pipeline stages" }, ...rows);
  group.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = (answer.drawn.stage + by + all.length) % all.length;
    page.choose(next);
    group.parentNode.querySelector(`[data-stage="${next}"]`)?.focus();
  });
  fill($("stages"), h("h2", {}, "Pipeline stages", h("small", {}, "GiB of one GPU at the peak")), group, legend(fit));
}

let charts = { text: "", drawn: [] };
let next;

// Charts are drawn after the answer, and only for the last of several quick changes.
export function stage(answer, measured = null) {
  clearTimeout(next);
  next = setTimeout(() => draw(answer, measured), 25);
}

function draw(answer, measured) {
  const { drawn, fit } = answer;
  const one = answer.estimate.stages[drawn.stage];
  const text = JSON.stringify([drawn, fit.capacity_bytes, measured]);
  if (text === charts.text) {
    $("stage").hidden = false;
    return;
  }
  charts.drawn.forEach((chart) => chart.destroy());
  const largest = Math.max(...one.components.map((c) => c.bytes));
  const parts = [...one.components].sort((a, b) => b.bytes - a.bytes);
  const timeline = h("div", { class: "chart" });
  const treemap = h("div", { class: "chart" });
  const open = $("stage").querySelector("details")?.open ?? false;
  const name = answer.estimate.stages.length > 1 ? `Stage ${one.stage}` : "The GPU";
  fill($("stage"),
    h("h2", {}, `${name} over one step`, h("small", {}, `${gib(one.peak_bytes)} GiB at the peak, in ${one.peak_phase}${one.peak_operation ? `: ${one.peak_operation}` : ""}`)),
    timeline,
    h("h2", { class: "second" }, `${name} at its peak`, h("small", {}, "area: size; choose a component to open it")),
    treemap,
    h("details", { open }, h("summary", {}, "As a table"),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Components of ${name}` },
        h("table", {},
          h("thead", {}, h("tr", {}, ...["Component", "Kind", "GiB", "Basis"].map((t, i) =>
            h("th", { scope: "col", class: i === 2 ? "number" : "" }, t)))),
          h("tbody", {}, ...parts.map((c) => h("tr", {},
            h("th", { scope: "row" }, c.name), h("td", {}, h("i", { class: `dot role-${c.role}` }), roleName(c.role)),
            h("td", { class: "number meter" }, h("span", { style: { width: `${(100 * c.bytes) / largest}%` } }), gib(c.bytes, 2)),
            h("td", {}, c.provenance))))))));
  charts = { text, drawn: [
    stepTimeline(timeline, drawn.timeline, { gpus: [fit], measured }), peakTreemap(treemap, drawn.treemap, {}),
  ] };
}

const roleName = (role) => ROLES.find(([name]) => name === role)?.[2] ?? role;

// ---- changes that free memory ----

export function whatif(found, page) {
  const cheapest = $("cheapest");
  if (cheapest) {
    const one = page.fits ? null : found.cheapest;
    if (one) {
      fill(cheapest, button(one.title, () => page.apply(one.options), { class: "primary", "data-focus": "cheapest",
        title: "the change that makes it fit at the least cost in time" }),
      h("small", {}, ` makes it fit${factor(one.step_time_factor, ", ")}`));
    } else cheapest.replaceChildren();
  }
  const others = found.other_gpus.map((fit) => `${fit.gpu} ${{ fits: "\u2713", "does not fit": "\u2715" }[fit.verdict] ?? `(${fit.verdict})`}`);
  if ($("others")) $("others").textContent = `On other GPUs: ${others.join(" \u00b7 ")}`;
  const section = $("whatif");
  const head = h("h2", {}, "What one change frees", h("small", {}, "of the highest peak; predicted step time"));
  if (!found.changes.length) {
    fill(section, head, h("p", { class: "hint" }, "No single change lowers the highest peak."));
    return;
  }
  const most = Math.max(...found.changes.map((c) => c.freed_bytes));
  const row = (change, i) => h("tr", {},
    h("th", { scope: "row" }, change.title, h("small", { class: "flags" }, change.words)),
    h("td", { class: "number meter" }, h("span", { style: { width: `${(100 * change.freed_bytes) / most}%` } }), gib(change.freed_bytes)),
    h("td", { class: "number wide" }, gib(change.peak_bytes)),
    h("td", { class: "number" }, percent(change.step_time_factor)),
    h("td", { class: "wide" }, change.fits ? h("span", { class: "tag yes" }, "fits") : h("span", { class: "tag" }, "not yet")),
    h("td", {}, button("Apply", () => page.apply(change.options), { "aria-label": `Apply: ${change.title}`, "data-focus": `what-${i}` })));
  const table = (rows) => h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Changes" }, h("table", {},
    h("thead", {}, h("tr", {}, ...["Change", "Frees, GiB", "Peak, GiB", "Step time", "", ""].map((t, i) =>
      t ? h("th", { scope: "col", class: `${i ? "number" : ""}${i === 2 ? " wide" : ""}` }, t) : h("td", { class: i === 4 ? "wide" : "" })))),
    h("tbody", {}, ...rows)));
  fill(section, head, table(found.changes.slice(0, page.moreChanges ? 100 : 8).map(row)),
    found.changes.length > 8 && !page.moreChanges && button(`All ${found.changes.length} changes`, () => {
      page.moreChanges = true;
      whatif(found, page);
    }, { class: "quiet" }));
}

const percent = (f) => (f === null ? "?" : `${f >= 1 ? "+" : "\u2212"}${Math.abs((f - 1) * 100).toFixed(1)} %`);
const factor = (f, before) => (f === null ? "" : Math.abs(f - 1) < 0.0005 ? `${before}same step time` : `${before}${percent(f)} step time`);

// ---- several configurations ----

// `others`: the pinned ones, A, B, ...; the page's own is the last column.
export function versus(others, now, page) {
  const section = $("versus");
  if (!others.length) {
    section.hidden = true;
    return;
  }
  const all = [...others, now];
  const letter = (i) => String.fromCharCode(65 + i);
  const differs = (get) => new Set(all.map((one) => JSON.stringify(get(one) ?? null))).size > 1;
  const differ = [...new Set(all.flatMap((one) => Object.keys(one.question.options)))].filter((name) => differs((one) => one.question.options[name]));
  const model = (one) => one.question.model ?? one.question.name ?? "pasted";
  const option = (one, name) => {
    const value = one.question.options[name] ?? one.answer?.effective[name];
    return value === undefined || value === null ? "\u2013" : String(value);
  };
  const scale = Math.max(...all.map((one) => (one.answer ? scaleOf([one.answer.estimate.stages[one.answer.fit.peak_stage]], one.answer.fit) : 1)));
  const worst = (one) => one.answer.estimate.stages[one.answer.fit.peak_stage];
  const of = (get) => (one) => (one.answer ? get(one) : "\u2013");
  const more = (one) => (one === all[0] ? "" : `${one.answer.fit.peak_bytes >= all[0].answer.fit.peak_bytes ? "+" : "\u2212"}${gib(Math.abs(one.answer.fit.peak_bytes - all[0].answer.fit.peak_bytes), 2)}`);
  const rows = [
    ["The step alone", (one) => (one.answer ? h("span", { class: `tag ${WORDS[one.answer.fit.verdict]?.[0]}` }, one.answer.fit.verdict) : one.refusal?.message ?? "\u2013")],
    ["Peak, GiB", of((one) => gib(one.answer.fit.peak_bytes, 2))],
    all[0].answer && ["More than A, GiB", of(more)],
    ["Stage with the highest peak", of((one) => bar(worst(one), scale, one.answer.fit))],
    ...ROLES.map(([, key, name]) => [`${name}, GiB`, of((one) => gib(worst(one)[key], 2))]),
    ["Step", of((one) => (one.answer.step ? seconds(one.answer.step.seconds) : "\u2013"))],
    differs(model) && ["Model", model],
    differs((one) => one.question.gpu) && ["GPU", (one) => one.question.gpu],
    ...differ.map((name) => [`--${name}`, (one) => option(one, name)]),
  ].filter(Boolean);
  const title = others.length === 1 ? "Two configurations" : `${all.length} configurations`;
  const pinned = others.map((_, i) => letter(i)).join(", ");
  const markdown = () => {
    const text = rows.filter(([name]) => name !== "Stage with the highest peak").map(([name, get]) => {
      const cells = all.map((one) => { const cell = get(one); return typeof cell === "string" ? cell : cell.textContent; });
      return `| ${[name, ...cells].map((cell) => cell.replaceAll("|", "\\|")).join(" | ")} |`;
    });
    return [`|  | ${all.map((_, i) => letter(i)).join(" | ")} |`, `| --- |${" ---: |".repeat(all.length)}`, ...text, "", location.href.replace(/#.*|$/, page.state.address())].join("\n");
  };
  fill(section, h("h2", {}, title, h("small", {}, `${pinned}: pinned; ${letter(others.length)}: this page`)),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, h("table", { class: "two" },
      h("thead", {}, h("tr", {}, h("td", {}), ...all.map((_, i) => h("th", { scope: "col" }, letter(i))))),
      h("tbody", {}, ...rows.map(([name, get]) => h("tr", {}, h("th", { scope: "row" }, name), ...all.map((one) => h("td", {}, get(one)))))))),
    h("div", { class: "buttons" },
      ...others.flatMap((one, i) => [
        button(others.length === 1 ? "Swap" : `Swap with ${letter(i)}`, () => page.swap(one.address), { "data-focus": `swap-${i}` }),
        button(`Unpin ${letter(i)}`, () => page.unpin(one.address), { class: "quiet", "data-focus": `unpin-${i}` })]),
      button("Copy as Markdown", async () => {
        try {
          await navigator.clipboard.writeText(markdown());
          toast("The table is copied");
        } catch {
          page.showText(markdown(), "The table");
        }
      }, { class: "quiet", "data-focus": "as-markdown" })));
}

// ---- assumptions ----

export function notes(answer) {
  const { estimate } = answer;
  const list = (title, lines) => lines.length > 0 && h("details", {}, h("summary", {}, `${title} `, h("span", { class: "count" }, lines.length)),
    h("ul", {}, ...lines.map((line) => h("li", {}, line))));
  const open = list("Not modelled", estimate.not_modelled);
  if (open && answer.fit.verdict === "unknown") open.open = true;
  fill($("notes"), h("h2", {}, "Assumptions and unmodelled features"), open, list("Assumed", estimate.assumptions),
    list("Not in the time model", answer.step?.not_timed ?? []),
    ...answer.margin.map((line) => h("p", { class: "hint" }, line)));
}

// What the number is for, and what decides it: words of the same source as the text's.
function decides(estimate) {
  const { precision, releases } = estimate.run;
  return h("div", { class: "hint" }, h("p", {}, `${precision}; ${releases}`),
    estimate.decisive.length > 0 && h("ul", { "aria-label": "What decides the peak" },
      ...estimate.decisive.map((one) => h("li", {}, one.text))));
}

// ---- exports ----

export function exportsOf(answer, page) {
  const copy = async (text, what, note = "") => {
    try {
      await navigator.clipboard.writeText(text);
      toast(`${what} copied${note && `: ${note}`}`);
    } catch {
      page.showText(text, what);
    }
  };
  const { command, texts } = answer.exports;
  fill($("export-items"),
    command && button("Copy the command", () => copy(command, "The command")),
    ...texts.map(({ title, text, note }) => button(`Copy ${title}`, () => copy(text, title, note))),
    button("Copy Markdown for a pull request", async () => {
      try {
        const { markdown } = await post("/api/report", page.state.question());
        const link = location.href.replace(/#.*|$/, page.state.address());
        copy([markdown, command && `    ${command}\n`, `[This configuration](${link})\n`].filter(Boolean).join("\n"), "Markdown");
      } catch (error) {
        toast(error.message);
      }
    }),
    button("Download JSON", () => save("estimate.json", JSON.stringify(answer.estimate, null, 2), "application/json")),
    button("Download HTML report", async () => {
      try {
        const name = answer.estimate.model.name.split("/").pop().replace(/[^\w.-]+/g, "-");
        save(`${name}.html`, (await post("/api/report", page.state.question())).html, "text/html");
      } catch (error) {
        toast(error.message);
      }
    }));
}

export function save(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
