// The form: one field per option, from /api/options.

import { $, button, fill, h, parameters, set } from "./dom.js";
import { typed } from "./state.js";

// Labels of the options in the form itself; all others are under "More options".
const MAIN = {
  "num-gpus": "Number of GPUs",
  tp: "Tensor", pp: "Pipeline", vpp: "Virtual stages", cp: "Context", ep: "Expert", etp: "Expert tensor",
  "seq-length": "Sequence length", "micro-batch-size": "Micro batch", "global-batch-size": "Global batch",
  "images-per-sample": "Images per sample", "image-size": "Image size", "video-frames": "Video frames", "audio-seconds": "Audio, seconds",
  precision: "Parameters", fp8: "FP8 compute", "fp8-recipe": "FP8 recipe",
  "recompute-granularity": "Recompute", "recompute-modules": "Modules", "recompute-method": "Method",
  "recompute-num-layers": "Layers",
  engine: "Engine", "data-parallel-sharding-strategy": "Sharding", optimizer: "Optimizer",
  "gradient-checkpointing": "Gradient checkpointing", "attn-implementation": "Attention", "liger-kernel": "Liger kernels", peft: "Adapters", "lora-dim": "LoRA rank",
  "fsdp-sharding-strategy": "Sharding", "fsdp-reshard-after-forward": "Reshard after forward", "fsdp-offload-params": "Offload parameters",
  "fsdp-param-dtype": "Compute dtype", "offload-optimizer-device": "Optimizer offload", "offload-param-device": "Parameter offload",
};
// What a sample gives each kind of encoder.
const OF_ENCODERS = { vision: ["images-per-sample", "image-size", "video-frames"], audio: ["audio-seconds"] };
// What engines outside of Megatron have in the form itself: name -> the engines.
const OF_TORCH = {
  "gradient-checkpointing": null, "attn-implementation": null, "liger-kernel": null, "lora-dim": null,
  "fsdp-sharding-strategy": ["fsdp1"], "fsdp-reshard-after-forward": ["fsdp2"], "fsdp-offload-params": ["fsdp1", "fsdp2"], "fsdp-param-dtype": ["fsdp1", "fsdp2"],
  "offload-optimizer-device": ["zero1", "zero2", "zero3", "megatron_deepspeed"], "offload-param-device": ["zero3"],
};
// Groups of "More options" that only some engines have.
const GROUPS = { parallel: "megatron", recompute: "megatron", transformers: "torch", ddp: "ddp", fsdp: "fsdp", deepspeed: "deepspeed" };
const SHORT = { tp: "TP", pp: "PP", vpp: "VPP", cp: "CP", ep: "EP", etp: "ETP" };
const FOR_EXPERTS = ["ep", "etp"];
const DOUBLES = ["num-gpus", "tp", "pp", "vpp", "cp", "ep", "etp", "seq-length", "micro-batch-size", "global-batch-size"];
const TITLES = {
  model: "Model", parallel: "Parallelism", batch: "Batch", precision: "Precision", optimizer: "Optimizer",
  data_parallel: "Gradients and data parallelism", peft: "Adapters", recompute: "Recomputation",
  implementation: "Implementation", transformers: "Hugging Face transformers", ddp: "PyTorch DDP", fsdp: "PyTorch FSDP",
  deepspeed: "DeepSpeed",
};
// What a field means while it is empty, where the answer has no value of it.
const EMPTY = { "images-per-sample": "1", "image-size": "WxH, the largest", "audio-seconds": "30" };
const OTHER = "\u0000other";
const PASTED = "\u0000pasted";

// A change of options in a few words: short names of sizes, else the server's flags.
export function changeWords(change) {
  const names = Object.keys(change.options);
  const [name] = names;
  const value = change.options[name];
  if (names.length !== 1 || value === null) return change.label;
  if (SHORT[name]) return `${SHORT[name]} ${value}`;
  return name === "num-gpus" ? `${value} GPUs` : change.label;
}

export class Form {
  // `change(question parts, what)`: called with what the user changed.
  constructor(facts, models, state, change) {
    Object.assign(this, { facts, models, state, change });
    this.options = Object.fromEntries(facts.options.map((option) => [option.name, option]));
    this.fields = {}; // name -> {input, row, error, read}
    this.effective = {};
    $("form").addEventListener("submit", (event) => event.preventDefault());
    this.build();
  }

  build() {
    const has = (name) => this.options[name] !== undefined;
    const fields = (...names) => names.filter(has).map((name) => this.field(name));
    fill(
      $("form"),
      this.modelFields(),
      h("fieldset", {}, h("legend", {}, "Engine and GPUs"), ...fields("engine"),
        h("div", { class: "pair" }, ...fields("data-parallel-sharding-strategy"), this.gpuField(), ...fields("num-gpus"))),
      this.ofTorch = h("fieldset", {}, h("legend", {}, "Of this engine"),
        h("div", { class: "pair" }, ...fields("gradient-checkpointing", "attn-implementation", "fsdp-sharding-strategy", "fsdp-reshard-after-forward",
          "fsdp-param-dtype", "fsdp-offload-params", "offload-optimizer-device", "offload-param-device")), ...fields("liger-kernel"),
        h("p", { class: "hint", id: "replicas" })),
      this.sizes = h("fieldset", {}, h("legend", {}, "Parallel sizes"),
        h("div", { class: "sizes" }, ...fields("tp", "pp", "cp", "ep", "etp", "vpp")),
        h("p", { class: "hint", id: "derived" })),
      h("fieldset", {}, h("legend", {}, "Batch"),
        h("div", { class: "sizes" }, ...fields("seq-length", "micro-batch-size", "global-batch-size"))),
      this.media = h("fieldset", {}, h("legend", {}, "Images, video and audio of a sample"),
        h("div", { class: "sizes" }, ...fields(...Object.values(OF_ENCODERS).flat())),
        h("p", { class: "hint", id: "media" })),
      this.again = h("fieldset", {}, h("legend", {}, "Activation recomputation"),
        h("div", { class: "pair" }, ...fields("recompute-granularity", "recompute-method", "recompute-num-layers")),
        ...fields("recompute-modules")),
      h("fieldset", {}, h("legend", {}, "Precision, optimizer and adapters"),
        h("div", { class: "pair" }, ...fields("precision", "fp8", "fp8-recipe", "optimizer", "peft", "lora-dim"))),
      this.moreFields(),
    );
  }

  // ---- the model and the GPU ----

  modelFields() {
    const byOrg = {};
    for (const model of this.models) (byOrg[model.name.split("/")[0]] ??= []).push(model);
    this.preset = h("select", { id: "f-model", onchange: () => this.chosen() },
      h("optgroup", { label: "Another model" },
        h("option", { value: PASTED }, "Paste a configuration"),
        this.facts.hub && h("option", { value: OTHER }, "Hugging Face Hub id")),
      ...Object.entries(byOrg).map(([org, models]) => h("optgroup", { label: org }, ...models.map((model) =>
        h("option", { value: model.name }, `${model.name.split("/")[1]} \u00b7 ${parameters(model.parameters)}`)))));
    this.find = h("input", { type: "search", id: "f-find", placeholder: "Find a model or an organisation", "aria-label": "Find a model",
      oninput: () => this.found(), onkeydown: (event) => {
        if (event.key === "Enter" && this.find.value.trim() && this.first) { this.preset.value = this.first.value; this.chosen(); }
      } });
    this.groups = [...this.preset.children].map((group) => [group, [...group.children]]);
    this.hubId = h("input", { id: "f-hub", placeholder: "org/name", spellcheck: "false", maxlength: 200,
      onchange: () => this.change({ model: this.hubId.value.trim(), config: undefined, name: undefined }, "model") });
    this.hubRow = h("div", { class: "field", hidden: true }, h("label", { for: "f-hub" }, "Hub id"), this.hubId);
    this.config = h("textarea", { id: "f-config", rows: 6, spellcheck: "false", "aria-describedby": "e-config",
      placeholder: '{"model_type": "qwen3_moe", ...}, or a run_config.yaml of Megatron Bridge, a configuration of verl, NeMo-RL, slime, TRL or ms-swift, or Megatron-LM\'s arguments', oninput: () => this.pasted() });
    this.configName = h("input", { id: "f-name", placeholder: "name of the model", maxlength: 100, oninput: () => this.pasted() });
    this.configRow = h("div", { hidden: true },
      h("div", { class: "field" }, h("label", { for: "f-config" }, "config.json, or a run's configuration"), this.config, this.errorOf("config")),
      h("div", { class: "field" }, h("label", { for: "f-name" }, "Name"), this.configName));
    const another = (value, words) => button(words, () => { this.preset.value = value; this.chosen(); }, { class: "quiet" });
    const row = h("div", { class: "field" }, h("label", { for: "f-model" }, "Model"), this.find, this.preset,
      h("p", { class: "hint", id: "found", role: "status" }), this.errorOf("model"),
      h("div", { class: "buttons" }, another(PASTED, "Paste a configuration"), this.facts.hub && another(OTHER, "Hugging Face Hub id")));
    this.fields.model = { input: this.preset, row };
    this.fields.config = { input: this.config, row: this.configRow };
    return h("fieldset", { class: "first" }, h("legend", { class: "unseen" }, "Model"), row, this.hubRow, this.configRow,
      h("p", { class: "hint", id: "model-facts" }));
  }

  // The list without models that have not all words that were typed; the chosen one stays.
  found() {
    const words = this.find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const now = this.preset.value;
    let number = 0;
    this.first = null;
    const meant = (option) => words.every((word) => `${option.value} ${option.textContent}`.toLowerCase().includes(word));
    for (const [group, all] of this.groups) {
      const another = group.label === "Another model";
      const kept = all.filter((option) => another || option.value === now || meant(option));
      const found = another ? [] : kept.filter(meant);
      this.first ??= found[0] ?? null;
      number += found.length;
      group.replaceChildren(...kept);
      group.hidden = !kept.length;
    }
    this.preset.value = now;
    $("found").textContent = words.length ? `${number} model${number === 1 ? "" : "s"}${number ? "; Enter takes the first" : "; paste its config.json"}` : "";
  }

  chosen() {
    const value = this.preset.value;
    this.hubRow.hidden = value !== OTHER;
    this.configRow.hidden = value !== PASTED;
    if (value === OTHER) this.hubId.focus();
    else if (value === PASTED) this.config.focus();
    else this.change({ model: value, config: undefined, name: undefined }, "model");
  }

  pasted() {
    if (this.config.value.trim() === "") return;
    this.change({ model: undefined, config: this.config.value, name: this.configName.value || undefined }, "config");
  }

  gpuField() {
    const of = (common) => this.facts.gpus.filter((gpu) => gpu.common === common).map((gpu) =>
      h("option", { value: gpu.name }, `${gpu.name} \u00b7 ${(gpu.capacity_bytes / 2 ** 30).toFixed(0)} GiB`));
    const input = h("select", { id: "f-gpu", "aria-describedby": "e-gpu",
      onchange: () => this.change({ gpu: input.value }, "gpu") },
    h("optgroup", { label: "Common" }, ...of(true)), h("optgroup", { label: "Others" }, ...of(false)));
    const row = h("div", { class: "field" }, h("label", { for: "f-gpu" }, "GPU"), input, this.errorOf("gpu"));
    this.fields.gpu = { input, row };
    return row;
  }

  // ---- options ----

  field(name, label = MAIN[name] ?? `--${name}`) {
    const option = this.options[name];
    const id = `f-${name}`;
    const common = { id, "aria-describedby": `e-${name}`, title: `--${name}: ${option.help}` };
    const change = (value) => this.change({ options: { [name]: value } }, name);
    let input;
    let show;
    let body;
    if (option.kind === "names") {
      const boxes = option.choices.map((choice) => h("input", { type: "checkbox", value: choice,
        onchange: () => change(boxes.filter((box) => box.checked).map((box) => box.value)) }));
      input = h("div", { ...common, class: "boxes", role: "group", "aria-label": label },
        ...boxes.map((box) => h("label", {}, box, ` ${box.value}`)));
      show = (value) => { for (const box of boxes) box.checked = (value ?? []).includes(box.value); };
      if (!option.choices.length) {
        input = h("input", { ...common, oninput: () => change(typed(input.value, "names")) });
        show = (value) => { if (document.activeElement !== input) input.value = (value ?? []).join(","); };
      }
    } else if (option.kind === "switch") {
      input = h("select", { ...common, onchange: () => change({ on: true, off: false }[input.value] ?? null) },
        h("option", { value: "" }, option.default === null ? "automatic" : option.default ? "on (default)" : "off (default)"),
        option.default !== true && h("option", { value: "on" }, "on"),
        option.default !== false && h("option", { value: "off" }, "off"));
      show = (value) => { input.value = value === true ? "on" : value === false ? "off" : ""; };
    } else if (option.kind === "choice") {
      const titles = name === "engine" ? this.facts.engines : {};
      input = h("select", { ...common, onchange: () => change(input.value === "" ? null : input.value) },
        option.default === null && h("option", { value: "" }, "none"),
        ...option.choices.map((choice) => h("option", { value: choice }, titles[choice] ?? choice)));
      show = (value) => { input.value = value ?? option.default ?? ""; };
    } else {
      input = h("input", { ...common, inputmode: option.kind === "integer" ? "numeric" : null, spellcheck: "false",
        maxlength: 400, placeholder: EMPTY[name] ?? null, oninput: () => change(typed(input.value.trim(), option.kind)) });
      show = (value) => {
        const text = value === undefined ? (this.plain(name) ?? "") : String(value);
        if (document.activeElement !== input || typed(input.value.trim(), option.kind) !== value) input.value = text;
      };
    }
    body = input;
    if (DOUBLES.includes(name)) {
      const step = (factor) => {
        const now = Number(input.value) || Number(this.effective[name]) || 1;
        change(Math.max(1, factor > 1 ? now * 2 : Math.floor(now / 2)));
      };
      body = h("div", { class: "stepper" },
        button("\u2212", () => step(0.5), { "aria-label": `Halve ${label}`, tabindex: "-1" }), input,
        button("+", () => step(2), { "aria-label": `Double ${label}`, tabindex: "-1" }));
      input.addEventListener("keydown", (event) => {
        if (event.key === "ArrowUp" || event.key === "ArrowDown") {
          event.preventDefault();
          step(event.key === "ArrowUp" ? 2 : 0.5);
        }
      });
    }
    const row = h("div", { class: `field kind-${option.kind}`, "data-option": name },
      h("label", { for: option.kind === "names" && option.choices.length ? null : id },
        label, SHORT[name] && h("abbr", {}, ` ${SHORT[name]}`)), body,
      name in MAIN ? null : h("small", { class: "hint" }, option.help), this.errorOf(name));
    this.fields[name] = { input, row, show };
    return row;
  }

  // The default of a size, where it is a plain number.
  plain(name) {
    const option = this.options[name];
    if (this.state.now.config !== undefined) return null; // a pasted configuration says it
    return option.kind === "integer" && option.default !== null && name in MAIN ? option.default : null;
  }

  errorOf(name) {
    return h("div", { class: "error", id: `e-${name}` });
  }

  moreFields() {
    const rest = this.facts.options.filter((option) => !(option.name in MAIN));
    const groups = {};
    for (const option of rest) (groups[option.group] ??= []).push(option.name);
    const filter = h("input", { type: "search", id: "f-filter", placeholder: "Find an option", oninput: () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const option of rest) {
        const text = `${option.name} ${option.called} ${option.help}`.toLowerCase();
        this.fields[option.name].row.hidden = !words.every((word) => text.includes(word));
      }
      for (const part of this.more.querySelectorAll("fieldset")) {
        part.hidden = ![...part.querySelectorAll(".field")].some((row) => !row.hidden) || (!words.length && part.dataset.another === "true");
      }
    } });
    this.filter = filter;
    this.more = h("details", { class: "more" },
      h("summary", {}, `More options `, h("span", { class: "count" }, rest.length)),
      h("div", { class: "field" }, h("label", { for: "f-filter", class: "unseen" }, "Find an option"), filter),
      ...Object.entries(groups).map(([group, names]) =>
        h("fieldset", { "data-group": group }, h("legend", {}, TITLES[group] ?? group), ...names.map((name) => this.field(name)))));
    this.rest = rest.map((option) => option.name);
    this.given = h("ul", { class: "given", "aria-label": "Other options in use", hidden: true });
    return h("div", {}, this.given, this.more);
  }

  // ---- from the state to the fields ----

  show() {
    const { model, config, name, gpu, options } = this.state.now;
    const known = this.models.find((one) => one.name === model);
    const typing = document.activeElement;
    if (config !== undefined) {
      this.preset.value = PASTED;
      if (typing !== this.config) this.config.value = config;
      if (typing !== this.configName) this.configName.value = name ?? "";
    } else if (known) this.preset.value = model;
    else if (this.facts.hub) {
      this.preset.value = OTHER;
      if (typing !== this.hubId) this.hubId.value = model ?? "";
    } else this.preset.value = "";
    this.configRow.hidden = this.preset.value !== PASTED;
    this.hubRow.hidden = this.preset.value !== OTHER;
    this.fields.gpu.input.value = gpu ?? this.facts.default_gpu;
    for (const [option, field] of Object.entries(this.fields)) field.show?.(options[option]);
    const given = this.rest.filter((option) => options[option] !== undefined);
    fill(this.given, ...given.map((option) => h("li", {},
      h("span", {}, `--${option}`, options[option] === true ? "" : h("b", {}, ` ${options[option]}`)),
      button("\u00d7", () => this.change({ options: { [option]: null } }, option), { "aria-label": `Remove --${option}` }))));
    this.given.hidden = given.length === 0;
    this.fit();
  }

  // Hides fields that do not apply to this run.
  fit() {
    const { options, model } = this.state.now;
    const known = this.models.find((one) => one.name === model);
    const experts = known ? known.experts : this.experts ?? true;
    const on = (name, shown) => { if (this.fields[name]) this.fields[name].row.hidden = !shown; };
    for (const name of FOR_EXPERTS) on(name, experts || options[name] !== undefined);
    const encoders = this.encoders ?? [];
    for (const [kind, names] of Object.entries(OF_ENCODERS)) for (const name of names) on(name, encoders.includes(kind) || options[name] !== undefined);
    this.media.hidden = Object.values(OF_ENCODERS).flat().every((name) => this.fields[name]?.row.hidden ?? true);
    on("vpp", (options.pp ?? 1) > 1 || options.vpp !== undefined);
    on("fp8-recipe", options.fp8 !== undefined || options["fp8-recipe"] !== undefined);
    const kind = options["recompute-granularity"];
    on("recompute-modules", kind === "selective");
    for (const name of ["recompute-method", "recompute-num-layers"]) on(name, kind === "full" || options[name] !== undefined);
    const sharding = "data-parallel-sharding-strategy";
    on(sharding, options.engine === "megatron_fsdp" || options[sharding] !== undefined);
    this.ofEngine(options, on);
  }

  // The fields of the engine alone.
  ofEngine(options, on) {
    const pasted = this.state.now.config === undefined ? undefined : this.effective.engine;
    const engine = options.engine ?? pasted ?? "megatron_ddp";
    if (pasted) this.fields.engine.input.value = engine;
    const megatron = this.facts.megatron_engines.includes(engine);
    this.sizes.hidden = this.again.hidden = !megatron;
    this.ofTorch.hidden = megatron && engine !== "megatron_deepspeed";
    for (const [name, engines] of Object.entries(OF_TORCH)) on(name, options[name] !== undefined || (engines ? engines.includes(engine) : !megatron));
    on("lora-dim", options.peft === "lora" || options["lora-dim"] !== undefined);
    on("fp8", megatron || options.fp8 !== undefined);
    const kinds = [megatron ? "megatron" : "torch", this.facts.engine_options[engine]];
    for (const part of this.more.querySelectorAll("[data-group]")) {
      const kind = GROUPS[part.dataset.group];
      part.dataset.another = String(kind !== undefined && !kinds.includes(kind));
      // What is looked for is found, whosever it is.
      if (!this.filter.value.trim()) part.hidden = part.dataset.another === "true";
    }
  }

  // Whether a field takes typed text.
  typed(name) {
    const tag = this.fields[name]?.input.tagName;
    return tag === "INPUT" || tag === "TEXTAREA";
  }

  // Values in use where nothing is given, shown in grey.
  answered(answer) {
    this.effective = answer.effective;
    this.experts = answer.experts;
    this.encoders = answer.encoders;
    $("media").textContent = answer.media;
    for (const [name, field] of Object.entries(this.fields)) {
      const value = answer.effective[name];
      if (field.input.tagName === "INPUT" && value !== undefined && value !== null) field.input.placeholder = String(value);
    }
    const { dp, microbatches } = answer.effective;
    $("derived").textContent = $("replicas").textContent = `Data parallel ${dp} \u00b7 ${microbatches} microbatch${microbatches === 1 ? "" : "es"} per step`;
    const { model } = answer.estimate;
    $("model-facts").textContent = `${parameters(model.parameters)} parameters \u00b7 ${model.num_layers} layers \u00b7 hidden ${model.hidden_size}`;
    this.fit();
    this.refused(null);
  }

  // Shows a refusal at its field; returns {label, input} of it, null where it has none.
  refused(refusal, last) {
    for (const [name, field] of Object.entries(this.fields)) {
      const error = $(`e-${name}`);
      if (error?.firstChild) error.replaceChildren();
      if (field.input.hasAttribute("aria-invalid")) field.input.removeAttribute("aria-invalid");
    }
    if (!refusal) return null;
    const name = refusal.fields.includes(last) ? last : refusal.field;
    const field = this.fields[name];
    if (!field) return null;
    field.row.hidden = false;
    for (let at = field.row.parentElement; at && at.id !== "form"; at = at.parentElement) at.hidden = false;
    if (this.more.contains(field.row)) this.more.open = true;
    set(field.input, { "aria-invalid": "true" });
    fill($(`e-${name}`), h("p", {}, refusal.message));
    return { label: MAIN[name] ?? field.row.querySelector("label")?.textContent ?? name, input: field.input };
  }
}
