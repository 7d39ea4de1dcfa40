// The similarity of two texts: the cosine of the angle between their embeddings.

import { getJson } from "./api.js";
import { byId, setText, short } from "./dom.js";

const view = byId("similarity");
const { first, second } = byId("texts").elements;
const button = byId("compare");

/** Embeds both texts, and shows how similar they are. */
async function compare() {
  button.disabled = true;
  setText(byId("similarity-status"), "Computing …");
  byId("similarity-result").hidden = true;
  try {
    const body = { model: view.dataset.model, input: [first.value, second.value] };
    const { data, usage } = await getJson("v1/embeddings", { method: "POST", body });
    show(data.map(({ embedding }) => embedding), usage.prompt_tokens);
    setText(byId("similarity-status"), "");
  } catch (error) {
    setText(byId("similarity-status"), error.message);
  }
  button.disabled = false;
}

function show([one, other], numTokens) {
  const value = dot(one, other) / Math.sqrt(dot(one, one) * dot(other, other));
  setText(byId("cosine"), value.toFixed(3));
  byId("cosine-bar").value = value;
  setText(byId("cosine-of"), `of two rows of ${short(one.length)} numbers, from ${short(numTokens)} tokens`);
  byId("similarity-result").hidden = false;
}

const dot = (one, other) => one.reduce((sum, number, index) => sum + number * other[index], 0);

byId("texts").addEventListener("submit", (event) => {
  event.preventDefault();
  compare();
});
view.addEventListener("show", () => first.focus());
