// The page's question and its form in the address: #model=Qwen/Qwen3-8B&gpu=H100&tp=2 (the command line's flags).

export const FIRST = { model: "meta-llama/Llama-3.1-8B", gpu: "H100", options: { "num-gpus": 8, tp: 2 } };
export const MOST_OTHERS = 5;
const OWN = ["model", "config", "name", "gpu", "vs"];

export class State {
  constructor(kinds) {
    this.kinds = Object.assign(Object.create(null), kinds); // option -> kind
    this.now = structuredClone(FIRST);
    this.vs = []; // addresses of other configurations, to compare with
  }

  question() {
    return this.now;
  }

  // ---- the address ----

  address() {
    const words = State.words(this.now, this.kinds);
    for (const other of this.vs) words.push(["vs", other]);
    return "#" + words.map(([key, value]) => `${encode(key)}=${encode(value)}`).join("&");
  }

  static words(question, kinds) {
    const words = [];
    for (const key of ["model", "name", "gpu"]) if (question[key]) words.push([key, question[key]]);
    for (const [name, value] of Object.entries(question.options)) {
      if (kinds[name] === undefined) continue;
      words.push([name, Array.isArray(value) ? value.join(",") : String(value)]);
    }
    if (question.stage !== undefined) words.push(["stage", String(question.stage)]);
    if (question.config) words.push(["config", packed(question.config)]);
    return words;
  }

  read(address) {
    const text = address.replace(/^#/, "");
    this.vs = [];
    if (!text) {
      this.now = structuredClone(FIRST);
      return;
    }
    const question = { gpu: "H100", options: {} };
    for (const pair of text.split("&")) {
      const at = pair.indexOf("=");
      if (at < 1) continue;
      const key = decode(pair.slice(0, at));
      const value = decode(pair.slice(at + 1));
      if (key === "vs") { if (this.vs.length < MOST_OTHERS) this.vs.push(value); }
      else if (key === "stage") { if (/^\d{1,6}$/.test(value)) question.stage = Number(value); }
      else if (key === "config") question.config = unpacked(value);
      else if (OWN.includes(key)) question[key] = value;
      else if (this.kinds[key] !== undefined) question.options[key] = typed(value, this.kinds[key]);
    }
    if (question.config) delete question.model;
    else if (!question.model) question.model = FIRST.model;
    this.now = question;
  }

  // The address without other configurations.
  alone() {
    const alone = new State(this.kinds);
    alone.now = this.now;
    return alone.address();
  }

  // ---- changes ----

  change(options) {
    const next = { ...this.now.options };
    for (const [name, value] of Object.entries(options)) {
      if (value === null || value === undefined || value === "") delete next[name];
      else next[name] = value;
    }
    this.now = { ...this.now, options: next };
  }
}

export function typed(text, kind) {
  if (kind === "integer" && /^-?\d{1,15}$/.test(text)) return Number(text);
  if (kind === "number" && text.trim() !== "" && Number.isFinite(Number(text))) return Number(text);
  if (kind === "switch" && (text === "true" || text === "false")) return text === "true";
  if (kind === "names") return text.split(",").filter(Boolean);
  return text;
}

const encode = (text) => encodeURIComponent(text).replaceAll("%2F", "/").replaceAll("%2C", ",").replaceAll("%3A", ":");

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function packed(text) {
  let short = text;
  try {
    short = JSON.stringify(JSON.parse(text));
  } catch { /* as pasted, valid or not */ }
  const bytes = new TextEncoder().encode(short);
  let binary = "";
  for (let i = 0; i < bytes.length; i += 8192) binary += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

function unpacked(text) {
  try {
    const binary = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    return new TextDecoder().decode(Uint8Array.from(binary, (c) => c.charCodeAt(0)));
  } catch {
    return text;
  }
}
