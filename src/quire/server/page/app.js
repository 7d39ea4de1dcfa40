// The page: its views, the server's models and health, and the API key.

import { askForKey, getJson } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { loadLimits } from "./parameters.js";
import "./chat.js";
import "./dashboard.js";
import "./similarity.js";

const HEALTH_INTERVAL = 10_000; // milliseconds
const links = [...document.querySelectorAll("nav a")]; // one for each view

/** Shows the view that the address names, if a model has it. */
function showView() {
  const offered = links.filter((link) => !link.hidden);
  const shown = offered.find(({ hash }) => hash === location.hash) ?? offered[0];
  for (const link of links) {
    byId(link.hash.slice(1)).hidden = link !== shown;
    if (link === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  byId(shown.hash.slice(1)).dispatchEvent(new Event("show"));
}

/** Offers the views of what the server's models do. */
function offerViews(generating, embedding) {
  const wasShown = links.map(({ hidden }) => hidden);
  links.find(({ hash }) => hash === "#chat").hidden = !generating;
  links.find(({ hash }) => hash === "#similarity").hidden = !embedding;
  if (embedding) byId("similarity").dataset.model = embedding.id;
  if (links.some(({ hidden }, index) => hidden !== wasShown[index])) showView();
}

/** Gets the models' names, and the limits of the parameters of one that generates. */
async function load() {
  const problem = byId("load-problem");
  problem?.remove();
  try {
    const { data: models } = await getJson("v1/models");
    const generating = models.find(({ task }) => task === "generate");
    const model = generating ?? models[0];
    byId("model").dataset.name = model.id;
    setText(byId("model"), model.id);
    document.title = `${model.id} - Quire`;
    offerViews(generating, models.find(({ task }) => task === "embed"));
    if (generating && !byId("sampling").querySelector("label")) await loadLimits(model.max_model_len);
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
