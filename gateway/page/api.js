// Requests to the gateway that served this page, and parsing of its event streams.

const KEY = "pelton-api-key";

export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function keepKey(value) {
  // Kept for this tab only, until it is closed.
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
    throw new Failure("The server does not respond.", 0);
  }
  if (response.ok) return response;
  let message = `The server returned status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // The body is not an error object, for example because a proxy answered; report the status.
  }
  throw new Failure(message, response.status);
}

// Yield the parsed data of each event until [DONE]. Throw if the stream ends without it or with an error.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Failure("The connection was lost before the response was complete.", 0);
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
