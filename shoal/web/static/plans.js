// The page of Plans.

import { h, replace } from "./dom.js";
import { bytes, count, percent, seconds, whole } from "./format.js";
import { all } from "./state.js";
import { load } from "./source.js";
import { begin, fail, page, say } from "./frame.js";
import { figure, legend, numbers } from "./figure.js";
import { asking, partsOf, shares } from "./asking.js";
import { stacked } from "./bars.js";

const place = h("div");
let turn = 0;

begin(async () => {
  say("Searching all legal Plans.");
  const data = await load("plans", all("model", "cluster", "devices", "batch", "sequence"));
  replace(page, asking(data, () => show().catch(fail)), place);
  draw(data);
});

async function show() {
  const mine = (turn += 1);
  say("Searching all legal Plans.");
  replace(place);
  const data = await load("plans", all("model", "cluster", "devices", "batch", "sequence"));
  if (mine === turn) draw(data);
}

function draw(data) {
  say("");
  const best = data.plans[0];
  const { asked } = data;
  const quicker = data.plans.filter((each) => each.seconds < best.seconds).length;
  replace(place,
    h("section", { class: "panel" },
      h("h2", {}, "The best Plan"),
      h("p", {}, h("code", {}, best.plan)),
      h("p", { class: "lead" }, `A step of ${seconds(best.seconds)}, ${count(best.tokens_per_second)} tokens/s, MFU ${percent(best.mfu)}. `
        + `${whole(data.legal)} legal Plans; ${whole(data.played)} were played, and bounds leave out the others. Predicted.`
        + (quicker ? ` The difference to ${quicker === 1 ? "the quicker one" : "quicker ones"} below is smaller than the model can tell, and this Plan is simpler.` : "")),
      h("p", {}, "The same in a terminal: ", h("code", {}, `shoal plan --model ${asked.model} --cluster ${asked.cluster}:${asked.devices} `
        + `--batch ${asked.batch} --sequence ${asked.sequence}`))),
    table(data), split(data).element, bought(data).element,
    h("section", { class: "panel" }, h("h2", {}, "Why"), h("ul", { class: "sentences" }, data.sentences.map((each) => h("li", {}, each)))));
}

function table(data) {
  const rows = data.plans.map((each) => [
    each.degrees, seconds(each.seconds), signed(each.seconds / data.plans[0].seconds - 1), count(each.tokens_per_second), percent(each.mfu),
    percent(each.communication), percent(each.bubble), bytes(each.memory), each.dollars ? `$${whole(each.dollars)}` : "-", h("code", {}, each.plan),
  ]);
  return h("section", { class: "panel" }, h("h2", {}, "The best Plan for each set of degrees"),
    numbers({ head: ["degrees", "step", "to the best", "tokens/s", "MFU", "communication", "bubble", "memory", "a billion tokens", "Plan"], rows }, "Plans"));
}

function split(data) {
  return figure({
    title: "Where their steps go",
    note: "Seconds of a step on the rank that waits least.",
    draw: (width) => h("div", {}, stacked({
      width, format: seconds,
      rows: data.plans.map((each, at) => ({ name: `${at + 1}`, parts: partsOf(each.parts) })),
    }), legend(shares(data.plans))),
    describe: () => `Numbered as in the table. ${data.plans.slice(0, 3).map((each, at) => `${at + 1} is ${each.degrees}`).join(", ")}.`,
    table: () => ({ head: ["degrees", "compute", "communication", "bubble"], rows: data.plans.map((each) => [each.degrees, seconds(each.parts.compute), percent(each.communication), percent(each.bubble)]) }),
  });
}

function bought(data) {
  const best = data.plans[0].seconds;
  const rows = data.degrees.filter((each) => each.seconds !== null).map((each) => ({
    name: `${each.degree}=${each.value}`, parts: [[each.seconds < best ? "backward" : "collective", each.seconds, `${each.plan.split(",shard")[0]}: ${change(each.seconds, best)},`]],
  }));
  rows.unshift({ name: "best", parts: [["forward", best, data.plans[0].degrees]] });
  return figure({
    title: "What each degree buys",
    note: "The best Plan with half and with twice each degree, played.",
    draw: (width) => stacked({ width, rows, format: seconds }),
    describe: () => data.degrees.map((each) => each.seconds === null
      ? `${each.degree}=${each.value} does not fit.`
      : `${each.degree}=${each.value} instead of ${each.from} is ${change(each.seconds, best)}.`).join(" "),
    table: () => ({
      head: ["degree", "from", "to", "step", "Plan"],
      rows: data.degrees.map((each) => [each.degree, String(each.from), String(each.value), seconds(each.seconds), each.plan ?? "does not fit"]),
    }),
  });
}

function signed(share) {
  return `${share >= 0 ? "+" : ""}${percent(share)}`;
}

function change(seconds, best) {
  const error = seconds / best - 1;
  return Math.abs(error) < 0.0005 ? "as quick" : `${percent(Math.abs(error))} ${error > 0 ? "slower" : "faster"}`;
}
