// Requests to the gateway that served this page, and the event streams that it answers.

const KEY = "pelton-api-key";

export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function keepKey(value) {
  // Of this tab alone, and gone with it.
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

export class Failure extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export async function request(path, body, signal) {
  const headers = {};
  if (key()) headers.Authorization = `Bearer ${key()}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server does not answer.", 0);
  }
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // A proxy may have answered with something else: the status says what there is to say.
  }
  throw new Failure(message, response.status);
}

// The parsed data of each event, until [DONE]. A stream that ends without it, or with an error, throws.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Failure("The connection was lost before the answer was whole.", 0);
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue;
      const data = block.slice(6);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Failure(event.error.message, 0);
      yield event;
    }
  }
}
