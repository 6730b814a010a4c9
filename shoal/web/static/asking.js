// The questions that two pages ask: a model, its machines, and the batch; and the parts of a predicted step.

import { h } from "./dom.js";
import { words } from "./format.js";
import { isExport } from "./source.js";
import { bar, choice, field, slider } from "./controls.js";

const DEVICES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096];
const COLORS = {
  compute: "compute", optimizer: "optimizer", tensor: "collective", data: "wait", pipeline: "straggler_wait",
  context: "launch", expert: "backward", bubble: "bubble", offload: "checkpoint",
};
const COMMUNICATION = ["tensor", "data", "pipeline", "context", "expert"];

/** Return the inputs; an export has one answer, so it has none. */
export function asking(data, change, more = []) {
  const { asked } = data;
  if (isExport) {
    return h("p", { class: "facts" }, `${asked.model} on ${asked.devices} devices of ${asked.cluster}, batch ${asked.batch} `
      + `x ${asked.sequence} tokens. For others run shoal web.`);
  }
  return h("section", { class: "panel", "aria-label": "What is asked" }, bar(
    choice({ name: "model", label: "Model", values: data.models, value: asked.model, change }),
    choice({ name: "cluster", label: "Machines", values: data.clusters, value: asked.cluster, change }),
    slider({ name: "devices", label: "Devices", values: DEVICES, value: asked.devices, change: later(change) }),
    field({ name: "batch", label: "Sequences in a step", least: 1, most: 65536, value: asked.batch, change }),
    field({ name: "sequence", label: "Tokens in a sequence", least: 1, most: 131072, value: asked.sequence, change }),
    ...more));
}

/** Return the parts of a predicted step for bars. */
export function partsOf(parts) {
  return Object.entries(parts).map(([name, seconds]) => [COLORS[name] ?? "other", seconds, words(name)]);
}

/** Return the legend of those parts. */
export function shares(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.parts).filter((name) => row.parts[name] > 0)))];
  return names.map((name) => [COLORS[name] ?? "other", COMMUNICATION.includes(name) ? `exposed: ${words(name)}` : name === "control" ? "agreement of all ranks" : words(name)]);
}

function later(action) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, 600);
  };
}
