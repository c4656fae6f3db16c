// Requests to the server. Throws Refusal for a refusal, Gone where the server does not answer.

export class Refusal extends Error {
  constructor(document) {
    super(document.message);
    this.document = document;
  }
}

export class Gone extends Error {}

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", credentials: "omit", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Gone("the server does not answer");
  }
  let document;
  try {
    document = await answer.json();
  } catch {
    throw new Gone("the server's answer was cut off");
  }
  if (!answer.ok) throw new Refusal(document);
  return document;
}

export const get = (path, options) => ask(path, options);

export const post = (path, body, options = {}) => ask(path, {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), ...options,
});

export function postFile(path, head, file) {
  const body = new Blob([JSON.stringify(head), "\n", file]);
  return ask(path, { method: "POST", headers: { "Content-Type": "application/octet-stream" }, body });
}

// One request at a time; of those that arrive meanwhile only the last is sent, so the last answer shown is for the last question.
export class Latest {
  constructor(answer) {
    this.answer = answer;
    this.busy = false;
    this.next = null;
  }

  async ask(question) {
    this.next = { question };
    if (this.busy) return;
    this.busy = true;
    while (this.next) {
      const { question: now } = this.next;
      this.next = null;
      await this.answer(now, () => this.next !== null);
    }
    this.busy = false;
  }
}
