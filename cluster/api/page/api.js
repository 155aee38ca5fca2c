// What the page asks the server: JSON, and streams of server-sent events. The key lives here and nowhere else.

let key = "";

export const setKey = (value) => { key = value.trim(); };
export const hasKey = () => key !== "";

/** status: 0 where no answer came. */
export class Failure extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export async function getJson(path, signal) {
  const response = await ask(path, { signal });
  return response.json();
}

/** The `data` of each event of a POST's answer, parsed. Throws Failure for an error inside, or no [DONE] at the end. */
export async function* stream(path, body, signal) {
  const response = await ask(path, {
    method: "POST", signal, body: JSON.stringify(body), headers: { "content-type": "application/json" },
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const parsed = JSON.parse(data);
    if (parsed.error) throw new Failure(parsed.error.message, response.status);
    yield parsed;
  }
  throw new Failure("the stream broke off", response.status);
}

async function ask(path, options) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("the server does not answer", 0);
  }
  if (!response.ok) throw new Failure(await reason(response), response.status);
  return response;
}

async function reason(response) {
  const wait = response.headers.get("retry-after");
  const later = wait ? `; try again in ${wait} s` : "";
  try {
    return (await response.json()).error.message + later;
  } catch {
    return `the server answered ${response.status}${later}`;
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").filter((line) => line.startsWith("data: "));
      if (lines.length) yield lines.map((line) => line.slice(6)).join("\n");
    }
  }
}
