// The page of a data-parallel step, bucket by bucket.

import { h, replace } from "./dom.js";
import { bytes, percent, rate, seconds, whole, words } from "./format.js";
import { all, get, put } from "./state.js";
import { load } from "./source.js";
import { begin, fail, page, say } from "./frame.js";
import { figure, legend, numbers } from "./figure.js";
import { tracks } from "./tracks.js";
import { button } from "./controls.js";

const KINDS = [
  ["forward", "forward"], ["backward", "backward"], ["optimizer", "optimizer"], ["data_wait", "waits for data"],
  ["wait", "blocked by a bucket"], ["bubble", "ready here, not on every rank or behind another bucket"], ["collective", "on its way"],
];

let data = null;
let moment = 0;
const controls = h("div", { class: "controls" });
const place = h("div");

begin(async () => {
  replace(page, controls, place);
  await show();
});

async function show() {
  const found = await load("ddp", all("run", "step"));
  if (found.missing) return say(found.missing);
  say("");
  data = found;
  moment = Number(get("at")) || data.buckets[0].all_ready;
  tools();
  const drawing = life();
  const cursor = scrubber(drawing);
  replace(place, drawing.element, table());
  drawing.element.insertBefore(cursor, drawing.element.children[1]);
}

function tools() {
  const step = h("input", { type: "number", id: "c-step", min: data.first, max: data.last, value: data.step });
  const go = (wanted) => {
    put({ step: Math.max(data.first, Math.min(data.last, wanted || data.last)), at: null });
    show().catch(fail);
  };
  step.addEventListener("change", () => go(Number(step.value)));
  replace(controls,
    h("div", { class: "control" }, h("label", { for: "c-step" }, `Step, ${whole(data.first)} to ${whole(data.last)}`), step),
    button("Before", () => go(data.step - 1), { "aria-label": "Step before" }),
    button("After", () => go(data.step + 1), { "aria-label": "Step after" }));
}

function stop() {
  return Math.max(...data.ranks.map((rank) => rank.stop));
}

function shortName(bucket) {
  return bucket.name.includes(":") ? bucket.name.slice(bucket.name.indexOf(":") + 1) : bucket.name;
}

function life() {
  return figure({
    title: `Step ${whole(data.step)}, ${seconds(stop())}: ${data.buckets.length} of ${data.all_buckets} exchanges`,
    note: "Above, what each rank computes and where a bucket blocks it. Below, the life of each bucket: grey from the "
      + "moment it is ready on the first rank, red while it is on its way.",
    draw: (width) => h("div", {}, tracks({
      width, from: 0, to: stop(), format: seconds, rows: [...rankRows(), ...bucketRows()],
      marks: [{ at: moment, text: "" }],
    }), legend(KINDS)),
    describe: () => told(),
  });
}

function rankRows() {
  return data.ranks.map((rank) => ({
    name: `rank ${rank.rank}`, height: 26, boxes: [
      ...rank.work.map(([kind, name, start, end]) => ({
        start, stop: end, color: kind, text: name || words(kind), title: `rank ${rank.rank}: ${words(kind)} ${name}, ${seconds(end - start)}`,
      })),
      ...rank.waits.map(([name, start, end]) => ({
        start, stop: end, color: "wait", top: 13, height: 13, title: `rank ${rank.rank}: blocked by ${name}, ${seconds(end - start)}`,
      })),
    ],
  }));
}

function bucketRows() {
  return data.buckets.map((bucket) => {
    const ready = Math.min(...Object.values(bucket.ready));
    const end = Math.max(...Object.values(bucket.stops));
    return {
      name: shortName(bucket).slice(0, 10), height: 14, boxes: [
        { start: ready, stop: bucket.begins, color: "bubble", title: `${bucket.name}: ready on the first rank at ${seconds(ready)}` },
        { start: bucket.begins, stop: end, color: "collective", text: "", title: `${bucket.name}: ${bytes(bucket.bytes)} on its way for ${seconds(end - bucket.begins)}` },
      ],
    };
  });
}

function scrubber(drawing) {
  const input = h("input", { type: "range", min: 0, max: 1000, value: (moment / stop()) * 1000, "aria-label": "Moment of the step" });
  const label = h("output", {}, seconds(moment));
  const to = (time) => {
    moment = Math.max(0, Math.min(stop(), time));
    input.value = (moment / stop()) * 1000;
    input.setAttribute("aria-valuetext", seconds(moment));
    label.textContent = seconds(moment);
    put({ at: moment.toPrecision(5) });
    drawing.update();
  };
  input.addEventListener("input", () => to((Number(input.value) / 1000) * stop()));
  const moments = [...new Set(data.buckets.flatMap((each) => [each.all_ready, each.begins, Math.max(...Object.values(each.stops))]))].sort((a, b) => a - b);
  const next = () => to(moments.find((each) => each > moment + 1e-9) ?? stop());
  const before = () => to([...moments].reverse().find((each) => each < moment - 1e-9) ?? 0);
  return h("div", { class: "controls" }, button("Event before", before), button("Next event", next), input, label);
}

function told() {
  const sentences = [`At ${seconds(moment)}:`];
  for (const rank of data.ranks.slice(0, 4)) {
    const wait = rank.waits.find(([, start, end]) => start <= moment && moment < end);
    const work = rank.work.find(([, , start, end]) => start <= moment && moment < end);
    sentences.push(`rank ${rank.rank} ${wait ? `is blocked by ${wait[0]}` : work ? `is in ${words(work[0])} ${work[1]}`.trim() : "does nothing"};`);
  }
  const moving = data.buckets.filter((each) => each.begins <= moment && moment < Math.max(...Object.values(each.stops)));
  const done = data.buckets.filter((each) => Math.max(...Object.values(each.stops)) <= moment).length;
  const waiting = data.buckets.filter((each) => Math.min(...Object.values(each.ready)) <= moment && moment < each.begins);
  sentences.push(moving.length
    ? `${moving.map((each) => `${each.name} (${bytes(each.bytes)}${each.algorithm ? `, ${each.algorithm}` : ""})`).join(" and ")} on its way;`
    : "nothing is on its way;");
  if (waiting.length) {
    const first = waiting[0];
    const late = moment < first.all_ready ? `, and rank ${first.last} has not got it ready yet` : "";
    sentences.push(`${waiting.length} ready and waiting, ${first.name} first${late};`);
  }
  sentences.push(`${done} of ${data.buckets.length} done.`);
  return sentences.join(" ");
}

function table() {
  const rows = data.buckets.map((bucket) => {
    const end = Math.max(...Object.values(bucket.stops));
    const spread = bucket.all_ready - Math.min(...Object.values(bucket.ready));
    const blocked = Math.max(...Object.values(bucket.blocked));
    const way = end - bucket.begins;
    return [bucket.name, bytes(bucket.bytes), bucket.algorithm || "-", seconds(bucket.all_ready), `rank ${bucket.last}`, seconds(spread),
      seconds(way), way > 0 ? rate(bucket.bytes / way) : "-", blocked > 1e-6 ? `${seconds(blocked)}` : "hidden"];
  });
  const worst = data.ranks.reduce((most, each) => (each.blocked > most.blocked ? each : most));
  return h("section", { class: "panel" }, h("h2", {}, "Each exchange"),
    h("p", { class: "lead" }, `Rank ${worst.rank} is blocked longest: ${seconds(worst.blocked)}, `
      + `${percent(worst.blocked / (worst.stop - worst.start))} of its step. A bucket is hidden if no rank is blocked by it.`),
    numbers({ head: ["exchange", "bytes", "algorithm", "ready on all", "last rank", "after the first", "on its way", "algbw", "blocked"], rows }, "Each exchange"));
}
