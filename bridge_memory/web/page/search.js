// Layouts that fit: start, progress, cancel, and a click to use one.

import { plot } from "./report/plots.js";
import { get, Gone, post, Refusal } from "./api.js";
import { $, button, count, fill, gib, h, seconds } from "./dom.js";

const MEGATRON = {
  tp: "TP", pp: "PP", split: "layer split", vpp: "VPP", cp: "CP", ep: "EP", etp: "ETP", mbs: "micro batch", recompute: "recomputation",
  dispatcher: "token dispatcher",
};
const TORCH = {
  engine: "other engines", mbs: "micro batch", checkpointing: "checkpointing", reshard: "resharding", shard: "ranks that share", accumulation: "accumulation",
  overlap: "overlap", offload: "offloading", attention: "attention", liger: "Liger kernels",
};

export class Search {
  constructor(page) {
    this.page = page;
    this.vary = [...new Set([...page.facts.varied.megatron, ...page.facts.varied.torch])]; // what the command varies
    this.job = null;
    this.asked = null;
    this.turn = 0;
  }

  // Whether the engine of a question is one of PyTorch or DeepSpeed, which has configurations instead of layouts.
  ofTorch(question) {
    return !this.page.facts.megatron_engines.includes(question.options.engine ?? "megatron_ddp");
  }

  async start() {
    await this.cancel(true);
    const turn = ++this.turn;
    const question = structuredClone(this.page.state.question());
    this.asked = question;
    this.job = { state: "running", progress: {}, seconds: 0 };
    this.show();
    $("search").scrollIntoView({ block: "nearest", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    try {
      let job = await post("/api/search", { question, vary: this.vary.filter((axis) => axis in (this.ofTorch(question) ? TORCH : MEGATRON)), top: 20 });
      while (turn === this.turn) {
        this.job = job;
        this.show();
        if (job.state !== "running") return;
        await new Promise((resolve) => setTimeout(resolve, 250));
        job = await get(`/api/search/${job.id}`);
      }
    } catch (error) {
      if (turn !== this.turn) return;
      const message = error instanceof Refusal || error instanceof Gone ? error.message : String(error);
      this.job = { state: "refused", refused: error.document ?? { message }, progress: {} };
      this.show();
    }
  }

  async cancel(quietly = false) {
    if (this.job?.state !== "running" || !this.job.id) return;
    if (quietly) this.turn++;
    try {
      await post(`/api/search/${this.job.id}/cancel`, {}); // the next poll reports how it ended
    } catch { /* the next poll reports it */ }
  }

  close() {
    this.cancel(true);
    this.job = null;
    $("search").hidden = true;
    document.querySelector('[data-focus="find"]')?.focus();
  }

  show() {
    const { job, page } = this;
    if (!job) return; // the verdict's button starts a search
    const torch = this.ofTorch(this.asked);
    const what = torch ? "configurations" : "layouts", What = torch ? "Configurations" : "Layouts";
    const boxes = h("details", { class: "vary" }, h("summary", {}, "Search over"), h("div", { class: "boxes" },
      ...Object.entries(torch ? TORCH : MEGATRON).map(([axis, name]) => h("label", {}, h("input", { type: "checkbox", checked: this.vary.includes(axis),
        onchange: (event) => {
          this.vary = this.vary.filter((one) => one !== axis).concat(event.target.checked ? [axis] : []);
        } }), ` ${name}`))));
    boxes.open = $("search").querySelector(".vary")?.open ?? false;
    const open = job?.result?.not_modelled ?? [];
    const head = open.length
      ? h("h2", {}, `${What} that may fit`, h("small", {}, `unknown: not modelled: ${open.join(", ")}`))
      : h("h2", {}, `${What} that fit`, h("small", {}, "fastest first, by predicted step time"));
    const again = h("div", { class: "buttons" }, button("Search again", () => this.start(), { "data-focus": "search" }),
      button("Close", () => this.close(), { class: "quiet" }));
    const about = this.asked.model ?? this.asked.name ?? "the pasted model";
    const on = `${about} on ${this.asked.options["num-gpus"] ?? "?"} \u00d7 ${this.asked.gpu}`;
    if (job.state === "running") {
      const { looked_at: looked = 0, fit = 0 } = job.progress;
      return fill($("search"), head, h("div", { class: "progress", role: "status" },
        h("progress", { "aria-label": "Searching" }),
        h("span", {}, `${count(looked)} ${what} evaluated, ${count(fit)} fit \u00b7 ${Math.round(job.seconds)} s`)),
      h("div", { class: "buttons" }, button(`Stop and show the ${what} found`, () => this.cancel(), { "data-focus": "search" })));
    }
    if (job.refused) {
      return fill($("search"), head, h("p", { class: "error" }, job.refused.message), boxes, again);
    }
    const found = job.result;
    if (!found) return fill($("search"), head, h("p", { class: "hint" }, `Stopped before the first of the ${what}.`), boxes, again);
    const kept = Object.entries(torch ? TORCH : MEGATRON).filter(([axis]) => !this.vary.includes(axis)).map(([, name]) => name);
    const others = kept.length ? ` Not varied: ${kept.join(", ")} (see "Search over").` : "";
    if (!found.rows.length) {
      return fill($("search"), head,
        h("p", { class: "answer" }, found.stopped
          ? `Stopped: none of the ${count(found.looked_at)} ${what} of ${on} evaluated so far fits.`
          : `None of the ${what} of ${on} fits (${count(found.looked_at)} evaluated). Try more or larger GPUs, a shorter sequence, or another engine or optimizer.${others}`),
        boxes, again);
    }
    const experts = found.rows.some((row) => row.ep > 1 || row.etp > 1);
    const some = (name) => found.rows.some((row) => row[name] && row[name] !== "none");
    const sizes = torch
      ? [new Set(found.rows.map((row) => row.engine)).size > 1 && ["Engine", (r) => page.facts.engines[r.engine] ?? r.engine, "text"], ["Micro batch", (r) => r.mbs], ["Microbatches", (r) => r.microbatches],
        some("recompute") && ["Checkpointing", (r) => r.recompute, "text"], ["Sharded", (r) => r.sharded, "text"], some("overlap") && ["Options", (r) => r.overlap, "text"],
        some("offload") && ["Offload", (r) => r.offload, "text"]]
      : [["TP", (r) => r.tp], ["PP", (r) => r.pp], found.rows.some((r) => r.vpp > 1) && ["VPP", (r) => r.vpp],
        found.rows.some((r) => r.cp > 1) && ["CP", (r) => r.cp], experts && ["EP", (r) => r.ep], experts && ["ETP", (r) => r.etp],
        ["Micro batch", (r) => r.mbs], ["Recompute", (r) => r.recompute, "text"],
        found.rows.some((r) => !["alltoall", "none"].includes(r.dispatcher)) && ["Dispatcher", (r) => r.dispatcher, "text"]];
    const columns = [
      ...sizes, ["Peak, GiB", (r) => gib(r.peak_bytes)], ["Free, GiB", (r) => gib(r.headroom_bytes)], ["Step", (r) => seconds(r.step_seconds)],
      ["Tokens/s/GPU", (r) => count(r.tokens_per_second_per_gpu)],
    ].filter(Boolean);
    const same = (row) => Object.entries(row.options).every(([name, value]) => {
      const now = page.state.now.options[name];
      return JSON.stringify(now ?? null) === JSON.stringify(value) || (now === undefined && value === 1);
    });
    // Among the layouts tied for fastest, the one with the most free memory.
    const tied = found.rows.slice(0, Math.max(1, found.ties));
    const best = tied.reduce((a, b) => (b.headroom_bytes > a.headroom_bytes ? b : a));
    const chart = h("div", { class: "chart" });
    const words = (r) => torch ? `${r.engine}, micro batch ${r.mbs}, checkpointing ${r.recompute}, sharded ${r.sharded}` : `TP ${r.tp}, PP ${r.pp}, EP ${r.ep}, micro batch ${r.mbs}, recompute ${r.recompute}`;
    const points = (rows) => rows.map((r) => [r.step_seconds, r.peak_bytes / 2 ** 30, words(r)]);
    const front = found.front ?? [];
    fill($("search"), head,
      h("p", { class: "hint" }, `${on}, ${count(found.global_batch_size)} sequences per step${found.global_batch_size_given ? "" : " (assumed; set a global batch to change it)"}: `
        + `${count(found.looked_at)} ${what} evaluated, ${count(found.fit)} fit${found.stopped ? "; stopped early" : ""}.`
        + (torch ? " Step times of these engines are for ranking only: their rates were fitted on Megatron's runs." : "")
        + (found.ties > 1 ? ` The first ${found.ties} are tied: their predicted times differ by less than the error of the time model.` : "")
        + (found.rows.some((row, i) => i && row.step_seconds < found.rows[i - 1].step_seconds)
          ? ` First come ${what} with room for the upper end of the peak's band, and of those about as fast as the fastest the simplest.` : "")
        + others),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${What} that fit` }, h("table", {},
        h("thead", {}, h("tr", {}, h("td", {}), ...columns.map(([t, , text]) => h("th", { scope: "col", class: text ? "" : "number" }, t)))),
        h("tbody", {}, ...found.rows.map((row, i) => h("tr", { class: same(row) ? "same" : "" },
          h("td", {}, button(same(row) ? "In use" : "Use", () => page.apply(row.options), { "aria-label": `Use ${torch ? "configuration" : "layout"} ${i + 1}`, "data-focus": `use-${i}`,
            class: row === best && !same(row) ? "primary" : "" }),
          row === best && tied.length > 1 && h("small", { class: "best" }, " most free")),
          ...columns.map(([, of, text]) => h("td", { class: text ? "" : "number" }, of(row)))))))),
      front.length > 1 && h("h2", { class: "second" }, "Memory against time", h("small", {}, `${what} that no other beats in both; choose one to use it`)),
      front.length > 1 && chart, boxes, again);
    if (front.length < 2) return;
    plot(chart, {
      x: { title: "predicted step time", unit: "s" }, y: { title: `peak on ${this.asked.gpu}`, unit: "GiB" },
      series: [{ name: "rows of the table", tone: "some", points: points(found.rows) },
        { name: "least memory at its step time", tone: "predicted", line: "steps", dots: true, points: points(front) }],
    }, { onSelect: (series, p) => page.apply([...front, ...found.rows].find((r) => r.step_seconds === p.x && r.peak_bytes / 2 ** 30 === p.y).options) });
  }
}
