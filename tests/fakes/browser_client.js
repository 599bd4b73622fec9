// Functions of a web page that uses the API: `read` reads the events of a POST request, `follow` follows a stored stream.

window.read = async (url, {key, seen = () => {}, signal, ...more} = {}) => {
  const headers = {"Content-Type": "application/json", "X-Client-Request-Id": "page-1"};
  if (key) headers.Authorization = `Bearer ${key}`;
  const body = {model: "fake-model", messages: [{role: "user", content: "hi"}], stream: true, ...more};
  const response = await fetch(url + "/v1/chat/completions",
    {method: "POST", headers, body: JSON.stringify(body), signal});
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const found = {status: response.status, id: response.headers.get("x-request-id"), text: "", done: false};
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return found;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").find(line => line.startsWith("data: ")).slice(6);
      if (data === "[DONE]") { found.done = true; continue; }
      const event = JSON.parse(data);
      found.stream ??= event.id;
      found.text += event.choices[0]?.delta.content ?? "";
      seen(found);
    }
  }
};

// Resolves when the browser no longer reconnects.
window.follow = url => new Promise(resolve => {
  const found = {text: "", ids: [], errors: 0, done: false};
  const source = new EventSource(url);
  source.onmessage = ({data, lastEventId}) => {
    found.ids.push(Number(lastEventId));
    if (data === "[DONE]") found.done = true;
    else found.text += JSON.parse(data).choices[0]?.delta.content ?? "";
  };
  source.onerror = () => {
    found.errors += 1;
    if (source.readyState === EventSource.CLOSED) resolve(found);
  };
});
