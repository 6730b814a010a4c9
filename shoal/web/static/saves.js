// The page of checkpoints and failures.

import { h, replace } from "./dom.js";
import { bytes, digits, moment, seconds, whole } from "./format.js";
import { all } from "./state.js";
import { load } from "./source.js";
import { begin, notices, page, say } from "./frame.js";
import { figure, numbers } from "./figure.js";
import { chart } from "./chart.js";
import { accountFigure } from "./account.js";

begin(async () => {
  const data = await load("saves", all("run"));
  say("");
  replace(page, notices(data.notices), accountFigure(() => data.account).element, saved(data), data.pauses.length ? pauses(data).element : null, interval(data.interval), restarts(data), members(data), decisions(data), trouble(data));
});

function saved(data) {
  const rows = data.checkpoints.map((each) => [each.name, whole(each.step), bytes(each.bytes), whole(each.files), moment(each.written), each.state]);
  return h("section", { class: "panel" }, h("h2", {}, "Checkpoints"),
    rows.length
      ? numbers({ head: ["checkpoint", "step", "size", "files", "written", "state"], rows }, "Checkpoints")
      : h("p", { class: "missing" }, "The run has saved none, or keeps them elsewhere."),
    h("p", { class: "words" }, "A complete checkpoint has its manifest. Whether its bytes are sound says shoal checkpoint verify."));
}

function pauses(data) {
  const points = data.pauses.map((each) => [each.at, each.seconds]);
  const total = points.reduce((sum, each) => sum + each[1], 0);
  return figure({
    title: "What saving cost",
    note: "The time for which each save stopped the training, on the first rank.",
    draw: (width) => chart({
      width, height: 190, label: "Pauses for saving", series: [{ name: "pause", color: "checkpoint", points, bare: true }],
      x: { label: "time since the run began", format: seconds, zero: true }, y: { format: seconds, zero: true },
    }),
    describe: () => (points.length === 1 ? `One save stopped training for ${seconds(total)}.`
      : `${points.length} saves stopped training for ${seconds(total)} in all, ${seconds(Math.max(...points.map((each) => each[1])))} at most.`),
    table: () => ({ head: ["at", "pause"], rows: data.pauses.map((each) => [seconds(each.at), seconds(each.seconds)]) }),
  });
}

function interval(found) {
  if (!found) return null;
  return h("section", { class: "panel" }, h("h2", {}, "How often to save"),
    h("p", {}, `This run saves every ${found.every === "auto" ? "so many steps as it measures to be best" : `${found.every} steps`}. `
      + `With a pause of ${seconds(found.pause)}, steps of ${seconds(found.step)} and a failure every ${digits(found.mtbf_hours)} hours `
      + `(expected ${digits(found.expected_hours)} by checkpoint.mtbf, seen ${whole(found.failures)} in ${digits(found.hours)} hours), it loses least with a save every ${whole(found.best_steps)} steps, which is ${seconds(found.best_seconds)} (Young, 1974).`));
}

function restarts(data) {
  const rows = data.restarts.map((each) => [each.number ? `start ${each.number + 1}` : "first start", moment(each.unix), `${each.ranks} ranks`]);
  return h("section", { class: "panel" }, h("h2", {}, "Starts of the ranks"),
    rows.length
      ? [numbers({ head: ["start", "when", "ranks"], rows }, "Starts"), h("p", { class: "words" }, data.restarts.length > 1
        ? `The ranks began ${data.restarts.length} times: each time but the first follows a stop or a failure.`
        : "The ranks began once: no failure and no stop is in the timeline.")]
      : h("p", { class: "missing" }, "The run has no timeline."));
}

function members(data) {
  if (!data.members.length) return null;
  const rows = data.members.map((each) => [moment(each.unix), `${each.event}: ${each.members.join(", ")}`, whole(each.present.length), each.reason || "-"]);
  return h("section", { class: "panel left" }, h("h2", {}, "Ranks that were lost and came back"),
    numbers({ head: ["when", "ranks", "present", "reason"], rows }, "Ranks that were lost and came back"));
}

function decisions(data) {
  if (!data.decisions.length) return null;
  return h("section", { class: "panel left" }, h("h2", {}, "Decisions"),
    numbers({ head: ["step", "exchange", "reason"], rows: data.decisions.map((each) => [whole(each.step), each.exchange, each.reason]) }, "Decisions"));
}

function trouble(data) {
  return h("section", { class: "panel left" }, h("h2", {}, "Lines of the logs that tell of trouble"),
    data.trouble.length
      ? numbers({ head: ["log", "line"], rows: data.trouble.map((each) => [each.log, each.line]) }, "Trouble")
      : h("p", { class: "missing" }, "There are none."));
}
