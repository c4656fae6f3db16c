// The page's API without a server: requests go to Python in a worker of this browser. This file replaces the page's api.js,
// which becomes server_api.js (scripts/build_static_site.py).
import { Gone, Latest, Refusal } from "./server_api.js";

export { Gone, Latest, Refusal };

/** One Python in a worker. */
class Backend {
  constructor() {
    this.worker = new Worker("backend.js", { type: "module" });
    this.waiting = new Map();
    this.number = 0;
    this.progress = () => {};
    this.worker.onmessage = ({ data }) => {
      if (data.progress) return this.progress(data.progress);
      const { resolve, reject } = this.waiting.get(data.number);
      this.waiting.delete(data.number);
      if (data.status < 400) resolve(data.document);
      else reject(new Refusal(data.document));
    };
    this.worker.onerror = (event) => this.end(new Gone(`Python did not start: ${event.message}`));
  }

  ask(path, body = null, file = null) {
    return new Promise((resolve, reject) => {
      const number = ++this.number;
      this.waiting.set(number, { resolve, reject });
      this.worker.postMessage({ number, path, body, file }, file ? [file] : []);
    });
  }

  end(error = new Gone("stopped")) {
    this.worker.terminate();
    for (const { reject } of this.waiting.values()) reject(error);
    this.waiting.clear();
  }
}

const main = new Backend();
const jobs = new Map();

/** A search runs in a separate Python worker, so that it can be stopped and other requests are answered meanwhile. */
function search(body) {
  const id = crypto.randomUUID(), backend = new Backend(), started = performance.now();
  const job = { id, state: "running", progress: {}, result: null, refused: null };
  backend.progress = (progress) => { job.progress = progress; };
  backend.ask("/api/search", body)
    .then((result) => Object.assign(job, { state: "done", result }))
    .catch((error) => {
      if (job.state === "running") Object.assign(job, { state: "refused", refused: error.document ?? { message: error.message, changes: [] } });
    })
    .finally(() => { job.took = (performance.now() - started) / 1000; backend.end(); });
  jobs.set(id, { job, backend, started });
  return stateOf(id);
}

const stateOf = (id) => {
  const { job, started } = jobs.get(id);
  return { ...job, seconds: Math.round(10 * (job.took ?? (performance.now() - started) / 1000)) / 10 };
};

export async function get(path) {
  const job = path.match(/^\/api\/search\/([^/]+)$/);
  return job ? stateOf(job[1]) : main.ask(path);
}

export async function post(path, body) {
  const cancelled = path.match(/^\/api\/search\/([^/]+)\/cancel$/);
  if (path === "/api/search") return search(body);
  if (!cancelled) return main.ask(path, body);
  const { job, backend } = jobs.get(cancelled[1]);
  if (job.state === "running") job.state = "cancelled";
  backend.end();
  return stateOf(cancelled[1]);
}

export async function postFile(path, head, file) {
  const backend = new Backend();
  try {
    return await backend.ask(path, head, await file.arrayBuffer());
  } finally {
    backend.end();
  }
}
