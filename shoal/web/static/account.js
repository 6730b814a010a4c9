// Where the wall clock of a run went: steps that count, and what the rest was lost by.

import { h } from "./dom.js";
import { digits, percent, seconds, whole, words } from "./format.js";
import { figure, legend } from "./figure.js";
import { stacked } from "./bars.js";

const COLORS = {
  steps: "forward", start: "launch", compile: "optimizer", load: "data_wait", save: "checkpoint", validation: "backward",
  detection: "collective", recovery: "wait", repeated: "straggler_wait", waiting: "bubble", other: "other",
};

/** Return a figure; `read` returns the account, or null. */
export function accountFigure(read) {
  return figure({
    title: "Goodput",
    note: "The wall clock since the first start, over all restarts. The parts are disjoint and sum to it. The second bar shows what is lost to a scale of its own.",
    draw: (width) => {
      const found = read();
      if (!found) return h("p", { class: "missing" }, "The run has no record of its starts and failures.");
      const lost = losses(found).map(([name, value]) => [COLORS[name], value, words(name)]);
      const steps = [COLORS.steps, found.step_seconds, "steps that count"];
      return h("div", {},
        stacked({ width, format: seconds, rows: [{ name: "all", parts: [steps, ...lost] }] }),
        lost.length ? stacked({ width, format: seconds, rows: [{ name: "lost", parts: lost }] }) : null,
        legend([steps, ...lost].map(([color, , name]) => [color, name])));
    },
    describe: () => {
      const found = read();
      if (!found) return "";
      const left = found.steps_left && found.seconds_left !== null
        ? ` ${whole(found.steps_left)} steps are to go, in ${seconds(found.seconds_left)}: ${cost(found.device_hours_left, found.dollars_left)}.` : "";
      return `Goodput ${percent(found.goodput)}: ${seconds(found.step_seconds)} of ${seconds(found.wall_seconds)} are steps that count. `
        + `Starts: ${whole(found.launches)}. Failures: ${whole(found.failures)}. So far it cost ${cost(found.device_hours, found.dollars)}.${left}`;
    },
    table: () => {
      const found = read();
      const row = (name, value) => [name, seconds(value), percent(value / found.wall_seconds, 2)];
      return {
        head: ["cause", "seconds", "of the wall clock"],
        rows: found ? [row("steps that count", found.step_seconds), ...losses(found).map(([name, value]) => row(words(name), value))] : [],
      };
    },
  });
}

function losses(found) {
  return Object.entries(found.lost_seconds).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
}

function cost(hours, dollars) {
  return `${digits(hours)} device hours${dollars === null ? "" : `, $${digits(dollars)}`}`;
}
