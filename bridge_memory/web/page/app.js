// The page: one state, kept in the address too. Every change asks the server; the last answer is shown.

import { get, Gone, Latest, post, Refusal } from "./api.js";
import { $, button, fill, h, toast } from "./dom.js";
import { changeWords, Form } from "./form.js";
import { Measured } from "./measured.js";
import * as results from "./results.js";
import { askRollout, isJob, noRollout, rollout, rolloutOf, statesGpus } from "./rollout.js";
import { Search } from "./search.js";
import { MOST_OTHERS, State } from "./state.js";

// Milliseconds: changes of one field within ONE_STEP are one history entry; the what-if is asked after QUIET.
const ONE_STEP = 900;
const QUIET = 120;
// Milliseconds between two answers that are drawn while changes come faster than answers.
const WHILE = 250;
// Milliseconds after the last key until the address says what was typed.
const TYPED = 150;
// Milliseconds after which a pending answer is marked as busy.
const SLOW = 300;
// Options outside of the groups of layouts that only engines with Megatron's layers take.
const OF_MEGATRON = ["fp8", "fp8-recipe", "fp8-param-gather", "use-precision-aware-optimizer", "exp-avg-dtype", "exp-avg-sq-dtype", "main-grads-dtype",
  "main-params-dtype", "use-distributed-optimizer", "grad-reduce-in-fp32", "overlap-grad-reduce", "overlap-param-gather", "optimizer-cpu-offload",
  "optimizer-offload-fraction", "cross-entropy-loss-fusion", "cross-entropy-fusion-impl", "moe-token-dispatcher-type", "moe-permute-fusion", "offload-modules",
  "mtp-num-layers", "transformer-impl", "attention-backend", "cuda-graph-impl"];

// What a sample gives the encoders of a model.
const MEDIA = ["images-per-sample", "image-size", "patches", "video-frames", "audio-seconds"];

class Page {
  constructor(facts, models) {
    this.facts = facts;
    this.state = new State(Object.fromEntries(facts.options.map((option) => [option.name, option.kind])));
    this.shown = null; // the last answer with its question
    this.others = new Map(); // address -> {address, question, answer or refusal}
    this.last = null; // the field that changed last
    this.pushed = { field: null, at: 0 };
    this.drawn = 0; // when an answer was drawn last
    this.late = null; // an address that is not written yet
    this.answers = 0;
    this.form = new Form(facts, models, this.state, (parts, field) => this.changed(parts, field));
    this.estimates = new Latest((question, more) => this.estimate(question, more));
    this.jobs = new Latest((question) => this.phases(question));
    this.rollouts = new Latest((question) => this.rollout(question));
    this.whatifs = new Latest((question) => this.whatif(question));
    this.searching = new Search(this);
    this.measured = new Measured(this);
    addEventListener("popstate", () => this.fromAddress());
    $("share").addEventListener("click", () => this.share());
    for (const id of ["skip", "brief"]) {
      $(id).addEventListener("click", (event) => {
        event.preventDefault(); // the fragment is the state's
        $("results").focus();
        $("results").scrollIntoView();
      });
    }
    this.fromAddress();
  }

  // ---- changes ----

  fromAddress() {
    clearTimeout(this.typing);
    this.late = null;
    this.state.read(location.hash);
    this.last = null;
    this.pushed = { field: null, at: 0 };
    this.form.show();
    this.ask();
  }

  changed(parts, field) {
    const { options, ...rest } = parts;
    if (options) this.state.change(options);
    for (const [key, value] of Object.entries(rest)) {
      if (value === undefined) delete this.state.now[key];
      else this.state.now[key] = value;
    }
    if (field === "model" || field === "config") this.forget();
    // What is no config.json says the whole run: only the GPUs stay, if it does not say them.
    const config = this.state.now.config ?? "{";
    if (field === "config" && (isJob(config) || !/^\s*[{[]/.test(config))) {
      const { "num-gpus": gpus } = this.state.now.options;
      this.state.now.options = gpus === undefined || statesGpus(config) ? {} : { "num-gpus": gpus };
    }
    if (options) this.follow(options);
    this.last = field;
    this.ask(); // first: an entry of the history takes the browser some milliseconds
    this.push(field);
    this.form.show();
  }

  // Drops options that apply only to the previous model.
  forget() {
    const known = this.form.models.find((one) => one.name === this.state.now.model);
    if (known && !known.experts) this.state.change({ ep: null, etp: null });
    const layout = {};
    for (const name of [...MEDIA, "vpp", "pipeline-model-parallel-layout", "num-layers-in-first-pipeline-stage", "num-layers-in-last-pipeline-stage",
      "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split", "num-layers", "mtp-num-layers"]) layout[name] = null;
    this.state.change(layout);
    delete this.state.now.stage;
  }

  // Sets options that the changed ones require.
  follow(options) {
    const now = this.state.now.options;
    if (options["recompute-granularity"] === "full") {
      this.state.change({ "recompute-method": now["recompute-method"] ?? "uniform", "recompute-num-layers": now["recompute-num-layers"] ?? 1, "recompute-modules": null });
    } else if ("recompute-granularity" in options) {
      this.state.change({ "recompute-method": null, "recompute-num-layers": null });
      if (options["recompute-granularity"] !== "selective") this.state.change({ "recompute-modules": null });
    }
    if ("engine" in options) this.engine(options.engine ?? "megatron_ddp");
    if ("fp8" in options && options.fp8 === null) this.state.change({ "fp8-recipe": null, "fp8-param-gather": null });
  }

  // Another engine: what carries over is kept, in its words; the rest is dropped, so that it runs.
  engine(engine) {
    const now = this.state.now.options;
    const megatron = this.facts.megatron_engines.includes(engine);
    const own = this.facts.engine_options[engine];
    const dropped = {};
    for (const option of this.facts.options) {
      const { name, group } = option;
      if (!(name in now) || ["num-gpus", "engine"].includes(name)) continue;
      const others = ["ddp", "fsdp", "deepspeed"].includes(group) && group !== own;
      const notIts = megatron ? group === "transformers" : ["parallel", "recompute"].includes(group) || OF_MEGATRON.includes(name);
      if (others || notIts) dropped[name] = null;
    }
    const again = now["recompute-granularity"] === "full" || now["gradient-checkpointing"] === true;
    if (!megatron && again) dropped["gradient-checkpointing"] = true;
    if (megatron && now["gradient-checkpointing"] === true) Object.assign(dropped, { "recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1 });
    const sharding = "data-parallel-sharding-strategy";
    dropped[sharding] = engine === "megatron_fsdp" ? now[sharding] ?? "optim_grads_params" : null;
    if (engine === "single") dropped["num-gpus"] = 1;
    this.state.change(dropped);
  }

  apply(options) {
    const before = this.shown && { address: this.shown.address, effective: this.shown.answer.effective };
    this.state.change(options);
    // A refused question has no answer to compare with.
    this.taken = before && { names: Object.keys(options), before: before.effective, back: before.address, address: this.state.address() };
    this.last = null;
    this.push(null);
    this.form.show();
    this.ask();
  }

  push(field) {
    const now = performance.now();
    // Typing, or stepping through the sizes of one field.
    const again = field !== null && this.form.typed(field) && field === this.pushed.field && now - this.pushed.at < ONE_STEP;
    this.pushed = { field, at: now };
    const address = this.state.address();
    if (again) {
      clearTimeout(this.typing);
      this.late = address;
      this.typing = setTimeout(() => this.written(), TYPED);
      return;
    }
    this.written();
    if (address !== location.hash) history.pushState(null, "", address);
  }

  // Writes the address of what was typed: that takes the browser some milliseconds, so not at every key.
  written() {
    clearTimeout(this.typing);
    if (this.late !== null && this.late !== location.hash) history.replaceState(null, "", this.late);
    this.late = null;
  }

  // ---- answers ----

  ask() {
    clearTimeout(this.quiet);
    document.body.dataset.asked = this.state.address();
    this.estimates.ask({ question: structuredClone(this.state.question()), address: this.state.address(), vs: [...this.state.vs] });
  }

  async estimate(asked, more) {
    const late = setTimeout(() => $("results").setAttribute("aria-busy", "true"), SLOW);
    try {
      await this.answer(asked, more);
    } finally {
      clearTimeout(late);
      $("results").removeAttribute("aria-busy");
    }
  }

  async answer(asked, more) {
    try {
      const answer = await post("/api/estimate", asked.question);
      this.alive();
      if (more() && performance.now() - this.drawn < WHILE) return;
      this.shown = { question: asked.question, answer, address: asked.address };
      if (more()) return this.glance();
      this.draw();
      this.form.answered(answer);
      await this.ofTheOther(asked.vs);
      const key = this.question(asked);
      if (rolloutOf(answer.rollout, key)) results.ofTheJob(answer, this.postTraining);
      else if (!answer.rollout) results.phasesOf(key);
      this.quiet = setTimeout(() => {
        (answer.rollout ? this.rollouts : this.jobs).ask(asked);
        this.whatifs.ask(asked);
      }, QUIET);
    } catch (error) {
      if (error instanceof Gone) return this.gone(asked);
      if (!(error instanceof Refusal)) throw error;
      this.alive();
      if (more()) return;
      const refusal = error.document;
      const fixes = () => [
        ...refusal.changes.map((change) => button(changeWords(change), () => this.apply(change.options), { class: "fix" })),
        this.shown && this.shown.address !== asked.address && button("Undo", () => this.undo(), { class: "fix quiet" }),
      ].filter(Boolean);
      const field = this.form.refused(refusal, this.last);
      results.refused(refusal, fixes(), this, field);
      results.stale(true);
      document.title = "cannot run \u00b7 bridge-memory";
    }
    this.written();
    document.body.dataset.answered = asked.address;
    document.body.dataset.answers = String(++this.answers);
  }

  // What is seen of an answer while the next change is on its way: no charts.
  glance() {
    const { answer } = this.shown;
    this.drawn = performance.now();
    results.stale(false);
    this.fits = answer.fit.fits;
    results.verdict(answer, this);
    results.stages(answer, this);
  }

  draw() {
    const { answer } = this.shown;
    this.glance();
    this.drawStage();
    results.notes(answer);
    results.exportsOf(answer, this);
    this.searching.show();
    if (!$("measured").firstChild) this.measured.show();
  }

  drawStage() {
    const { answer } = this.shown;
    results.stage(answer, this.measured.of(answer.drawn.stage, this.shown.address));
  }

  choose(stage) {
    this.state.now.stage = stage;
    this.push("stage");
    this.ask();
  }

  // What the phases are of: they are the same whatever stage is drawn.
  question(asked) {
    return JSON.stringify({ ...asked.question, stage: undefined });
  }

  async phases(asked) {
    const question = this.question(asked);
    if (asked.address !== this.state.address() || results.phasesOf(question)) return;
    const now = () => this.question({ question: this.state.question() }) === question;
    try {
      const found = await post("/api/phases", asked.question);
      if (!now()) return;
      results.phases(found, question);
    } catch (error) {
      if (error instanceof Refusal && now()) results.noPhases(error.message);
      else if (!(error instanceof Gone) && !(error instanceof Refusal)) throw error;
    }
  }

  // The phases of a pasted post-training job, in place of a training job's.
  async rollout(asked) {
    const question = this.question(asked), now = () => this.question({ question: this.state.question() }) === question;
    if (!now() || rolloutOf(true, question)) return;
    try {
      const found = await askRollout(asked.question);
      if (!now()) return;
      rollout(found, question);
      this.postTraining = found;
      results.ofTheJob(this.shown.answer, found);
    } catch (error) {
      if (error instanceof Refusal && now()) noRollout(error.message);
      else if (!(error instanceof Gone) && !(error instanceof Refusal)) throw error;
    }
  }

  async whatif(asked) {
    if (asked.address !== this.state.address()) return;
    try {
      const found = await post("/api/whatif", asked.question);
      if (asked.address === this.state.address()) results.whatif(found, this);
    } catch (error) {
      if (!(error instanceof Gone) && !(error instanceof Refusal)) throw error;
    }
  }

  takeJob(config) {
    this.changed({ model: undefined, config, name: undefined }, "config");
    $("results").scrollIntoView();
    toast("Its phases are shown: what trainer and inference engine hold in each");
  }

  undo() {
    this.state.read(this.shown.address);
    this.last = null;
    this.push(null);
    this.form.show();
    this.ask();
  }

  untake() {
    const vs = this.state.vs;
    this.state.read(this.taken.back);
    this.state.vs = vs;
    this.taken = null;
    this.last = null;
    this.push(null);
    this.form.show();
    this.ask();
  }

  // ---- several configurations ----

  async ofTheOther(vs) {
    for (const known of this.others.keys()) if (!vs.includes(known)) this.others.delete(known);
    for (const address of vs) {
      if (this.others.has(address)) continue;
      const state = new State(this.state.kinds);
      state.read(address);
      const other = { address, question: state.now };
      this.others.set(address, other);
      try {
        other.answer = await post("/api/estimate", other.question);
      } catch (error) {
        if (!(error instanceof Refusal)) throw error;
        other.refusal = error.document;
      }
    }
    results.versus(vs.map((address) => this.others.get(address)), this.shown, this);
  }

  pin() {
    const { state } = this, address = state.alone();
    if (state.vs.includes(address)) return toast("It is pinned already: change something");
    if (state.vs.length >= MOST_OTHERS) return toast(`${MOST_OTHERS} are pinned: unpin one first`);
    state.vs = [...state.vs, address];
    this.push(null);
    this.ask();
    toast(`Pinned as ${String.fromCharCode(64 + state.vs.length)}: change anything to compare`);
  }

  unpin(address) {
    this.state.vs = this.state.vs.filter((one) => one !== address);
    this.push(null);
    this.ask();
  }

  // The pinned configuration becomes the page's, and the page's takes its place.
  swap(address) {
    const now = this.state.alone();
    const vs = this.state.vs.map((one) => (one === address ? now : one));
    this.state.read(address);
    this.state.vs = vs;
    this.push(null);
    this.form.show();
    this.ask();
  }

  // ---- the rest ----

  // What to recompute and offload in the least time, as one change.
  async makeFit() {
    const asked = this.state.address(), said = (text) => { if ($("fitting")) $("fitting").textContent = text; };
    try {
      let job = await post("/api/fit", this.state.question());
      while (job.state === "running" && asked === this.state.address()) {
        said(`${job.progress.looked_at ?? 0} choices evaluated \u2026`);
        await new Promise((resolve) => setTimeout(resolve, 250));
        job = await get(`/api/search/${job.id}`);
      }
      if (asked !== this.state.address()) return;
      if (job.result?.options) this.apply(job.result.options);
      else said(job.result?.words ?? job.refused?.message ?? "stopped");
    } catch (error) {
      if (!(error instanceof Refusal) && !(error instanceof Gone)) throw error;
      said(error.message);
    }
  }

  search() {
    this.searching.start();
  }

  async share() {
    this.written();
    try {
      await navigator.clipboard.writeText(location.href);
      toast(["127.0.0.1", "localhost", "[::1]"].includes(location.hostname)
        ? "Link copied; it opens on this machine. For others: Export, HTML report" : "Link copied");
    } catch {
      this.showText(location.href, "The link");
    }
  }

  showText(text, what) {
    const area = h("textarea", { rows: 5, readonly: true, "aria-label": what }, text);
    const dialog = h("dialog", {}, h("h2", {}, what), area, h("form", { method: "dialog" }, h("button", {}, "Close")));
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
    area.select();
  }

  // The server does not answer: show that, and ask again until it does.
  gone(asked) {
    $("offline").hidden = false;
    $("offline").textContent = "The server does not answer. This page keeps trying.";
    clearTimeout(this.retry);
    this.retry = setTimeout(() => this.ask(), 700);
    return asked;
  }

  alive() {
    $("offline").hidden = true;
  }
}

// ---- colours ----

const dark = matchMedia("(prefers-color-scheme: dark)");
function colours(scheme) {
  const isDark = scheme ? scheme === "dark" : dark.matches;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  $("theme").setAttribute("aria-pressed", String(isDark));
}
const kept = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
dark.addEventListener("change", () => colours(kept()));
$("theme").addEventListener("click", () => {
  const scheme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("theme", scheme); } catch { /* private windows */ }
  colours(scheme);
});
colours(kept());
addEventListener("click", (event) => {
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    if (!menu.contains(event.target) || event.target.closest(".menu-items button")) menu.open = false;
  }
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") for (const menu of document.querySelectorAll("details.menu[open]")) {
    menu.open = false;
    menu.querySelector("summary").focus();
  }
});

async function start() {
  try {
    const [facts, models] = await Promise.all([get("/api/options"), get("/api/models")]);
    globalThis.page = new Page(facts, models);
  } catch (error) {
    fill($("verdict"), h("h2", {}, "The server does not answer"), h("p", {}, `${error.message}. Start bridge-memory serve again.`));
    setTimeout(start, 1500);
  }
}
start();
