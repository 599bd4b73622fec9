// Start of the page: list of models, API key, and selection of the view.

import { key, keepKey, request } from "./api.js";
import { Chat } from "./chat.js";
import { find, make, notice } from "./dom.js";
import { Status } from "./status.js";

const status = new Status();

async function loadModels() {
  try {
    const { data } = await (await request("/v1/models")).json();
    const before = find("model").value;
    find("model").replaceChildren(...data.map(({ id }) => make("option", { value: id, textContent: id })));
    if (data.some(({ id }) => id === before)) find("model").value = before;
    notice(data.length ? "" : "No model is available yet.");
    if (!data.length) setTimeout(loadModels, 2000);
  } catch (error) {
    const unknown = error.status === 401;
    // The server's message addresses developers of clients.
    notice(unknown ? "The API key is missing or unknown. Enter it above and press Use." : error.message);
    if (unknown) find("key").focus();
  }
}

function show(view) {
  for (const name of ["chat", "status"]) {
    find(name).hidden = name !== view;
    find(`show-${name}`).toggleAttribute("aria-current", name === view);
    if (name === view) find(`show-${name}`).setAttribute("aria-current", "page");
  }
  if (view === "status") status.show();
  else status.hide();
}

find("show-chat").addEventListener("click", () => show("chat"));
find("show-status").addEventListener("click", () => show("status"));
find("parameters").addEventListener("submit", (event) => event.preventDefault());
find("key").value = key();
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(find("key").value.trim());
  loadModels();
});

// Collapse the parameters on narrow screens.
const narrow = matchMedia("(max-width: 50rem)");
const makeRoom = () => (find("parameters-box").open = !narrow.matches);
narrow.addEventListener("change", makeRoom);
makeRoom();
new Chat();
find("prompt").focus();
await loadModels();
find("version").textContent = (await (await request("/version")).json()).version;
