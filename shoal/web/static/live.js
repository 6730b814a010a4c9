// The page of a run.

import { h, replace } from "./dom.js";
import { count, digits, moment, percent, seconds, whole, words } from "./format.js";
import { all, get, put } from "./state.js";
import { follow, isExport, load } from "./source.js";
import { begin, fail, notices, page, say } from "./frame.js";
import { figure, legend } from "./figure.js";
import { chart } from "./chart.js";
import { pairs, stacked } from "./bars.js";
import { heatMap } from "./heat.js";
import { verdict } from "./verdict.js";
import { accountFigure } from "./account.js";

const PARTS = [
  "compute", "launch", "exposed_communication", "bubble", "data_wait", "file_wait", "straggler_wait", "other",
];
const PURPOSES = ["tensor", "context", "expert", "data", "pipeline", "control"];
const MOST_BARS = 8;
const MEASURES = {
  late: "comes late to collectives",
  compute: "computes",
  data_wait: "waits for data",
  file_wait: "waits for files",
  straggler_wait: "waits for late ranks",
  exposed_communication: "exposed communication",
  bubble: "bubble",
  other: "other",
};

let data = null;
let built = null;

begin(async () => {
  if (isExport) return take(await load("live"));
  take(await load("live", all("run", "measure")));
  watch();
});

let leave = () => {};

function watch() {
  leave();
  leave = follow(all("run", "measure"), take, (isThere) => {
    if (!isThere) say("The server does not answer. This is what it last said.", "error");
    else say("");
  });
}

function take(found) {
  if (found.error) return fail(found.error);
  data = found;
  document.documentElement.dataset.step = data.now.step ?? "";
  say("");
  if (built === null) {
    built = build();
    replace(page, built.element);
  }
  built.update();
}

function build() {
  const top = h("div");
  const figures = [lossFigure(), speedFigure(), partsFigure(), accountFigure(() => data.account), heatFigure(), comparedFigure()];
  const told = h("div");
  const element = h("div", {}, top, told,
    h("div", { class: "pair" }, figures[0].element, figures[1].element),
    figures.slice(2).map((each) => each.element));
  return {
    element,
    update: () => {
      replace(top, notices(data.notices), facts(), cards());
      replace(told, verdict(data.verdict));
      for (const each of figures) each.update();
    },
  };
}

function facts() {
  const { run } = data;
  const isDone = run.steps && data.now.step >= run.steps;
  const isOn = !isExport && !isDone && run.age < 15;
  const state = isDone ? "all steps done" : isExport ? "as it was exported" : `last written ${seconds(run.age)} ago`;
  const known = [
    run.model && [h("b", {}, run.model), run.parameters ? `, ${count(run.parameters)} parameters` : ""],
    run.plan && ["Plan ", h("code", {}, run.plan)],
    run.ranks && `${run.ranks} ranks on ${run.device ?? "unknown devices"}`,
    run.created && `begun ${moment(Date.parse(run.created) / 1000)}`,
  ].filter(Boolean);
  return h("p", { class: "facts" },
    h("span", { class: `live ${isOn ? "on" : ""}`, "aria-hidden": "true" }),
    h("b", {}, run.name), `: ${state}`, known.map((each) => [" · ", each]));
}

function cards() {
  const { now, run } = data;
  const left = run.steps && now.step_seconds ? (run.steps - now.step) * now.step_seconds : null;
  const entries = [
    ["step", now.step === null ? "-" : whole(now.step), run.steps ? `of ${whole(run.steps)}` : ""],
    ["loss", digits(now.loss, 4), now.validation_loss === null ? "" : `validation ${digits(now.validation_loss, 4)}`],
    ["tokens/s", count(now.tokens_per_second), `${count(now.tokens_per_second_per_device)} a device`],
    ["MFU", percent(now.mfu), now.mfu === null ? "the device's peak is not known" : "of the devices' peak"],
    ["goodput", percent(data.account?.goodput), data.account ? `of ${seconds(data.account.wall_seconds)}` : "not recorded"],
    ["step time", seconds(data.parts ? data.parts.wall : now.step_seconds), left > 0 ? `${seconds(left)} left` : ""],
  ];
  return h("ul", { class: "cards" }, entries.map(([name, value, small]) =>
    h("li", {}, h("span", {}, name), h("strong", {}, value), h("small", {}, small))));
}

function lossFigure() {
  const lines = () => [
    { name: "training loss", color: "forward", points: data.series.loss },
    { name: "validation loss", color: "collective", points: data.series.validation_loss, dots: true },
  ].filter((each) => each.points.length);
  return figure({
    title: "Loss",
    draw: (width) => h("div", {}, chart({
      width, series: lines(), label: "Loss against steps",
      x: { label: "step", format: whole }, y: { format: (each) => digits(each, 4) },
    }), legend(lines().map((each) => [each.color, each.name]))),
    describe: () => ends("The loss", data.series.loss, (each) => digits(each, 4)),
    table: () => ({ head: ["step", "loss"], rows: data.series.loss.map(([a, b]) => [whole(a), digits(b, 5)]) }),
  });
}

function speedFigure() {
  const points = () => data.series.tokens_per_second;
  return figure({
    title: "Tokens per second",
    draw: (width) => chart({
      width, series: [{ name: "tokens/s", color: "backward", points: points() }], label: "Tokens per second",
      x: { label: "step", format: whole }, y: { format: count },
    }),
    describe: () => ends("The speed", points(), (each) => `${count(each)} tokens/s`),
    table: () => ({ head: ["step", "tokens/s"], rows: points().map(([a, b]) => [whole(a), whole(b)]) }),
  });
}

function ends(what, points, format) {
  if (!points.length) return "";
  const [first, last] = [points[0], points[points.length - 1]];
  return `${what} goes from ${format(first[1])} at step ${whole(first[0])} to ${format(last[1])} at step ${whole(last[0])}.`;
}

function partsFigure() {
  const named = (part) => [part, words(part)];
  const present = () => PARTS.filter((part) => part in data.parts.seconds);
  const busiest = () => [...data.parts.ranks]
    .sort((a, b) => a.seconds.straggler_wait - b.seconds.straggler_wait).slice(0, MOST_BARS).sort((a, b) => a.rank - b.rank);
  const row = (name, parts) => ({ name, parts: present().map((part) => [part, parts[part], words(part)]) });
  return figure({
    title: "Where a step's time goes",
    note: `The mean over the newest steps. The parts are disjoint and sum to the step. Of more than ${MOST_BARS} ranks, those are shown that wait least for others.`,
    draw: (width) => {
      if (!data.parts) return h("p", { class: "missing" }, "No step is in the timeline yet.");
      const rows = [row("all ranks", data.parts.seconds)];
      if (data.parts.ranks.length > 1) for (const each of busiest()) rows.push(row(`rank ${each.rank}`, each.seconds));
      return h("div", {}, stacked({ width, rows, format: seconds }), legend(present().map(named)));
    },
    describe: () => {
      if (!data.parts) return "";
      const { seconds: parts, wall, overlapped, communication } = data.parts;
      const sorted = present().sort((a, b) => parts[b] - parts[a]).filter((part) => parts[part] / wall >= 0.005);
      const told = sorted.map((part) => `${words(part)} ${percent(parts[part] / wall)}`).join(", ");
      const hidden = communication > 0 ? ` ${percent(overlapped / communication)} of communication is hidden.` : "";
      return `A step takes ${seconds(wall)}: ${told}.${hidden}`;
    },
    table: () => ({
      head: ["rank", ...present().map(words)],
      rows: (data.parts?.ranks ?? []).map((each) => [`rank ${each.rank}`, ...present().map((part) => seconds(each.seconds[part]))]),
    }),
  });
}

function heatFigure() {
  const select = h("select", { id: "measure" },
    Object.entries(MEASURES).map(([value, text]) => h("option", { value }, text)));
  select.value = get("measure", "late");
  if (!(select.value in MEASURES)) select.value = "late";
  const values = () => data.heat.values;
  const most = () => Math.max(...values().flat().filter((each) => each !== null), 0);
  const made = figure({
    title: "Ranks",
    note: "Late is the time by which a rank comes to a collective after the middle rank, where it is most. "
      + "An all-reduce equalises the time of the backward; it does not equalise arrivals.",
    tools: [h("label", { for: "measure" }, "Seconds in which a rank "), select],
    draw: (width) => {
      if (!data.heat) return h("p", { class: "missing" }, "No step is in the timeline yet.");
      return heatMap({
        width, rows: data.heat.ranks.map((rank) => `rank ${rank}`), columns: data.heat.steps, values: values(),
        format: seconds, most: most(),
      });
    },
    describe: () => {
      if (!data.heat) return "";
      const means = values().map((row) => mean(row.filter((each) => each !== null)));
      const worst = means.indexOf(Math.max(...means));
      return `Rank ${data.heat.ranks[worst]} has most: ${seconds(means[worst])} a step in the mean of `
        + `${data.heat.steps.length} steps; the mean of all ranks is ${seconds(mean(means))}.`;
    },
    table: () => ({
      head: ["rank", ...(data.heat?.steps ?? []).map(String)],
      rows: (data.heat?.ranks ?? []).map((rank, at) => [`rank ${rank}`, ...values()[at].map(seconds)]),
    }),
  });
  select.addEventListener("change", () => {
    put({ measure: select.value });
    load("live", all("run", "measure")).then(take).catch(fail);
    if (!isExport) watch();
  });
  return made;
}

function mean(values) {
  return values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : 0;
}

function comparedFigure() {
  const kinds = () => data.predicted.kinds ?? [];
  const error = (each) => (each.error === null ? "-" : `${each.error > 0 ? "+" : ""}${percent(each.error, 0)}`);
  const name = (each) => (PURPOSES.includes(each.kind) ? `for ${words(each.kind)}` : words(each.kind));
  return figure({
    title: "Predicted beside measured",
    note: "Seconds of a step by kind of span. Rows that begin with \"for\" say what exposed communication is for.",
    draw: (width) => {
      if (data.predicted.missing) return h("p", { class: "missing" }, data.predicted.missing);
      const rows = kinds().filter((each) => each.kind !== "collective").map((each) => ({
        name: name(each), values: [each.predicted, each.measured], more: error(each),
      }));
      return h("div", {}, pairs({ width, format: seconds, rows }), legend([["other", "predicted"], ["forward", "measured"]]));
    },
    describe: () => {
      const step = kinds().find((each) => each.kind === "step");
      return step ? `On ${data.predicted.cluster} a step of ${seconds(step.predicted)} is predicted, and ${seconds(step.measured)} is measured: ${error(step)}.` : "";
    },
    table: () => ({
      head: ["kind of span", "predicted", "measured", "error"],
      rows: kinds().map((each) => [name(each), seconds(each.predicted), seconds(each.measured), error(each)]),
    }),
  });
}
