// The verdict on the newest steps: what bounds them, the evidence, and what to do next.

import { h } from "./dom.js";
import { percent, whole } from "./format.js";

/** Return the panel of a verdict; one that abstains says why. */
export function verdict(found) {
  if (!found) return panel("Verdict", ["No verdict yet: no step is in the timeline."]);
  if (!found.bottleneck) return panel("No verdict yet", found.sentences.slice(1));
  const [first, last] = found.steps;
  return panel(
    `Verdict: ${found.bottleneck}, ${percent(found.share, 0)} of the step`,
    found.sentences.slice(1),
    `Steps ${whole(first)} to ${whole(last)}.`,
  );
}

function panel(title, sentences, note = "") {
  return h("section", { class: "panel verdict", "aria-label": "Verdict" }, h("h2", {}, title),
    note ? h("p", { class: "words" }, note) : null,
    h("ul", { class: "sentences" }, sentences.map((each) => h("li", { class: each.startsWith("Next:") ? "next" : null }, coded(each)))));
}

/** Return a sentence whose words between backticks are code. */
function coded(sentence) {
  return sentence.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));
}
