// The verdict on the newest steps: what bounds them, the evidence, and what to do next.

import { h } from "./dom.js";

/** Return the panel of a verdict; nothing if the server gives none. */
export function verdict(found) {
  if (!found) return null;
  return h("section", { class: "panel", "aria-label": "Verdict" },
    h("h2", {}, found.title),
    h("ul", { class: "sentences" }, found.sentences.map((each) => h("li", {}, each))));
}
