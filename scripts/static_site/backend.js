// Python in a worker: the estimator's own API (bridge_memory/web/api.py), asked by messages.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const START = `
import json, sys
sys.path.insert(0, "/bridge_memory")
from bridge_memory.spec import SpecError, show
from bridge_memory.web.api import Api, Refused, plain_refusal
from bridge_memory.web.fixes import refusal, untried

api = Api()

def _answer(path, body, file, say):
    if path == "/api/options":
        return api.options()
    if path == "/api/models":
        return api.models()
    if path in ("/api/estimate", "/api/whatif", "/api/phases", "/api/rollout", "/api/report"):
        return getattr(api, path.rpartition("/")[2])(body)
    from bridge_memory.web import worker
    if path == "/api/search":
        return worker._search(body, lambda said: say(json.dumps(said["progress"])))
    if path == "/api/compare":
        with open("/tmp/measured", "wb") as target:
            target.write(file)
        return worker._compare({**body, "path": "/tmp/measured"}, None)
    raise Refused(plain_refusal(f"nothing is asked at {show(path)}"), 404)

def answer(path, body, file, say):
    body = json.loads(body)
    try:
        return 200, json.dumps(_answer(path, body, file, say))
    except Refused as refused:
        return refused.status, json.dumps(refused.document)
    except SpecError as error:
        return 422, json.dumps(refusal(error, (body or {}).get("question") or {}, untried))
    except Exception as error:
        return 500, json.dumps(plain_refusal(f"{type(error).__name__}: {show(str(error))} (a fault of bridge-memory)"))
answer
`;

const ready = (async () => {
  const [python, files] = await Promise.all([
    loadPyodide({ indexURL: new URL("pyodide/", import.meta.url).href }),
    fetch("bridge_memory.zip").then((answer) => answer.arrayBuffer()),
  ]);
  python.unpackArchive(files, "zip", { extractDir: "/bridge_memory" });
  const answer = python.runPython(START);
  return (path, body, file) => {
    const reply = answer(path, JSON.stringify(body), file && python.toPy(new Uint8Array(file)), (progress) => postMessage({ progress: JSON.parse(progress) }));
    const [status, text] = reply.toJs();
    reply.destroy();
    return { status, document: JSON.parse(text) };
  };
})();

onmessage = async ({ data: { number, path, body, file } }) => {
  try {
    postMessage({ number, ...(await ready)(path, body, file) });
  } catch (error) {
    postMessage({ number, status: 500, document: { message: String(error), field: null, fields: [], fix: "", changes: [] } });
  }
};
