// The page: its views, the server's name and health, and the API key.

import { askForKey, getJson } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { loadLimits } from "./parameters.js";
import "./chat.js";
import "./dashboard.js";

const HEALTH_INTERVAL = 10_000; // milliseconds
const VIEWS = ["chat", "dashboard"];

/** Shows the view that the address names. */
function showView() {
  const name = VIEWS.find((one) => location.hash === `#${one}`) ?? VIEWS[0];
  for (const one of VIEWS) byId(one).hidden = one !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  byId(name).dispatchEvent(new Event("show"));
}

/** Gets the model's name and the limits of its parameters. */
async function load() {
  const problem = byId("load-problem");
  problem?.remove();
  try {
    const { data: [model] } = await getJson("v1/models");
    byId("model").dataset.name = model.id;
    setText(byId("model"), model.id);
    document.title = `${model.id} - Quire`;
    if (!byId("sampling").querySelector("label")) await loadLimits(model.max_model_len);
  } catch (error) {
    byId("messages").append(element("p", { class: "notice", id: "load-problem", role: "alert" }, error.message));
  }
}

async function showHealth() {
  if (!document.hidden) {
    const dot = byId("health");
    try {
      const { status, reason } = await (await fetch("health")).json();
      dot.className = `dot ${status}`;
      dot.title = reason ?? "The server is ready.";
    } catch {
      dot.className = "dot unavailable";
      dot.title = "The server does not answer.";
    }
  }
  setTimeout(showHealth, HEALTH_INTERVAL);
}

addEventListener("hashchange", showView);
byId("change-key").addEventListener("click", async () => {
  if (await askForKey()) load();
});
if (matchMedia("(max-width: 52rem)").matches) byId("settings").open = false;
showView();
showHealth();
load();
