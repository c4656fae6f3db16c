// A log, a journal or a memory snapshot compared with the prediction.

import { postFile } from "./api.js";
import { $, button, fill, gib, h } from "./dom.js";
import { jobOf, logTable } from "./rollout.js";

const MOST = 256 * 2 ** 20;

export class Measured {
  constructor(page) {
    this.page = page;
    this.file = null;
    this.own = false;
    this.found = null;
    this.stage = 0;
    let depth = 0;
    const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
    addEventListener("dragenter", (event) => { if (carries(event)) { depth++; $("drop").hidden = false; } });
    addEventListener("dragleave", (event) => { if (carries(event) && --depth <= 0) { depth = 0; $("drop").hidden = true; } });
    addEventListener("dragover", (event) => { if (carries(event)) event.preventDefault(); });
    addEventListener("drop", (event) => {
      if (!carries(event)) return;
      event.preventDefault();
      depth = 0;
      $("drop").hidden = true;
      if (event.dataTransfer.files[0]) this.take(event.dataTransfer.files[0]);
    });
  }

  async take(file) {
    const config = await jobOf(file);
    if (config !== null) return this.page.takeJob(config);
    this.file = file;
    if (file.size > MOST) return this.show({ error: `${file.name} is larger than ${MOST / 2 ** 20} MiB; for a long log, give only its lines about memory` });
    this.show({ busy: true });
    this.found = null;
    try {
      const question = this.own ? null : this.page.state.question();
      const address = this.page.state.address();
      const found = await postFile("/api/compare", { question, name: file.name, stage: this.stage }, file);
      this.found = { address, found };
      this.show({ found });
      if (this.page.shown) this.page.drawStage();
    } catch (error) {
      this.show({ error: error.message });
    }
    $("measured").scrollIntoView({ block: "nearest" });
  }

  /** Measured figures of a stage of this configuration, drawn over its step; null for another configuration. */
  of(stage, address) {
    const same = (one) => one.replace(/&stage=\d+/, "");
    if (!this.found || same(this.found.address) !== same(address)) return null;
    const { stages, snapshot } = this.found.found;
    if (snapshot) return stage === this.stage ? { peak_bytes: snapshot.peak_bytes } : null;
    const one = stages?.find((s) => s.stage === stage);
    return one?.max_allocated_bytes ? { peak_bytes: one.max_allocated_bytes, static_bytes: one.allocated_bytes } : null;
  }

  show({ busy, error, found } = {}) {
    const input = h("input", { type: "file", id: "f-file", class: "unseen", onchange: () => input.files[0] && this.take(input.files[0]) });
    const own = h("input", { type: "checkbox", checked: this.own, onchange: () => { this.own = own.checked; if (this.file) this.take(this.file); } });
    fill($("measured"), h("h2", {}, "Compare with a measured run, or ask why it failed", h("small", {}, "a log, an out-of-memory error, a journal or a torch memory snapshot: drop it anywhere")),
      h("div", { class: "buttons" }, h("label", { for: "f-file", class: "button" }, "Choose a file"), input,
        this.file && !busy && button(`Compare ${this.file.name} again`, () => this.take(this.file)),
        h("label", { class: "inline" }, own, " predict the run described in the file")),
      busy && h("p", { role: "status" }, `Reading ${this.file.name} ...`),
      error && h("p", { class: "error", role: "alert" }, error),
      found?.why && this.why(found.why), found?.log && logTable(found.log),
      found?.stages?.length > 0 && this.table(found), found?.phases && this.phases(found.phases),
      found?.snapshot && this.snapshot(found.snapshot));
  }

  why(found) {
    const fits = { true: "; the step then fits", false: "; not enough alone", null: "" };
    const where = [found.failure.rank !== null && `rank ${found.failure.rank}`, found.failure.place, found.failure.step !== null && `after step ${found.failure.step}`].filter(Boolean).join(", ");
    return h("div", { class: "why", role: "region", "aria-label": "Why it failed" },
      h("h3", {}, `Why it failed: ${found.cause}${found.sure ? "" : " (likely)"}`),
      where && h("p", { class: "hint" }, where),
      h("p", { class: "hint" }, this.own ? "Predicted: the run described in the file." : "Predicted: the configuration of this page. Set it to that of the run that failed."),
      h("ul", {}, ...found.findings.map((one) => h("li", {}, h("b", {}, `${one.cause}${one.sure ? "" : " (likely)"}: `), one.words))),
      found.remedies.length > 0 && h("h4", {}, `Do first, in the words of ${found.run.trainer}`),
      h("ol", {}, ...found.remedies.map((one) => h("li", {}, h("code", {}, one.do), ` frees ${one.frees}, costs ${one.costs}${fits[one.fits]}`))),
      ...found.notes.map((note) => h("p", { class: "hint" }, note)));
  }

  table(found) {
    const cell = (value, sign = false) => h("td", { class: "number" }, value === null ? "\u2013" : `${sign && value > 0 ? "+" : ""}${gib(value, 2)}`);
    return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Predicted and measured" }, h("table", {},
      h("caption", {}, `${found.measured}: predicted and measured, GiB; difference: measured \u2212 predicted, error: in % of measured`),
      h("thead", {}, h("tr", {}, ...["Stage", "Predicted static", "Allocated", "Difference", "Predicted peak", "Max allocated", "Difference", "Error"].map((t) => h("th", { scope: "col", class: "number" }, t)))),
      h("tbody", {}, ...found.stages.map((s) => h("tr", {}, h("th", { scope: "row", class: "number" }, s.stage),
        cell(s.predicted_static_bytes), cell(s.allocated_bytes), cell(s.static_residual_bytes, true),
        cell(s.predicted_peak_bytes), cell(s.max_allocated_bytes), cell(s.residual_bytes, true),
        h("td", { class: "number" }, s.error === null ? "\u2013" : `${s.error > 0 ? "+" : ""}${(100 * s.error).toFixed(1)} %`))))));
  }

  /** The phases of a journal's job: of each the stage that is furthest off. */
  phases(found) {
    const error = (row) => row.driver.error ?? row.allocated.error;
    const worst = new Map();
    for (const row of found.rows) {
      const name = row.phases.join(" + "), known = worst.get(name);
      if (!known || Math.abs(error(row) ?? 0) > Math.abs(error(known) ?? 0)) worst.set(name, row);
    }
    const range = (bytes) => !bytes ? "\u2013" : bytes[1] === null ? `${gib(bytes[0], 2)} or more`
      : gib(bytes[0], 2) === gib(bytes[1], 2) ? gib(bytes[0], 2) : `${gib(bytes[0], 2)}\u2013${gib(bytes[1], 2)}`;
    const cells = (row) => ["allocated", "driver"].flatMap((name) => [row[name].measured_bytes, row[name].predicted_bytes].map((b) => h("td", { class: "number" }, range(b))));
    return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Phases of the job" }, h("table", {},
      h("caption", {}, `Phases of the job${found.gpu ? `, predicted on ${found.gpu}` : ""}, GiB; error 0 where the ranges meet${found.notes.length ? `; ${found.notes.join("; ")}` : ""}`),
      h("thead", {}, h("tr", {}, ...["Phase", "Stage", "Allocated", "Predicted", "Driver peak", "Predicted", "Error"].map((t, i) => h("th", { scope: "col", class: i ? "number" : "" }, t)))),
      h("tbody", {}, ...[...worst].map(([name, row]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "number" }, row.stage), ...cells(row),
        h("td", { class: "number" }, error(row) === null ? "\u2013" : `${error(row) > 0 ? "+" : ""}${(100 * error(row)).toFixed(1)} %`))))));
  }

  snapshot(found) {
    return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The snapshot" }, h("table", {},
      h("caption", {}, `Peak ${gib(found.peak_bytes, 2)} GiB${found.predicted_peak_bytes === null ? "" : `, predicted ${gib(found.predicted_peak_bytes, 2)} GiB`}; ${(100 * found.attributed_share).toFixed(0)} % attributed`),
      h("thead", {}, h("tr", {}, ...["Alive at the peak", "Measured, GiB", "Predicted, GiB", "Blocks"].map((t, i) => h("th", { scope: "col", class: i ? "number" : "" }, t)))),
      h("tbody", {}, ...found.groups.map((g) => h("tr", {}, h("th", { scope: "row" }, g.group),
        h("td", { class: "number" }, gib(g.measured_bytes, 2)),
        h("td", { class: "number" }, g.predicted_bytes === null ? "\u2013" : gib(g.predicted_bytes, 2)),
        h("td", { class: "number" }, g.blocks))))));
  }
}
