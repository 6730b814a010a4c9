// What every page has: the choice of a run, light or dark, and a line that says how things are.

import { h } from "./dom.js";
import { get, put } from "./state.js";
import { isExport, runs, wasNearest } from "./source.js";

const status = document.getElementById("status");

/** The element that a page draws into. */
export const page = document.getElementById("page");

/** Say something about the state of the page; an empty text takes the line away. */
export function say(given, kind = "") {
  const text = given === "" && wasNearest() ? "These files hold answers to some questions only: the nearest is shown." : given;
  status.textContent = text;
  status.className = kind;
  status.hidden = text === "";
}

/** Show an error. */
export function fail(error) {
  say(error instanceof Error ? error.message : String(error), "error");
}

/** Begin a page: show its tools, then call `draw`, and show its error if it throws. */
export async function begin(draw) {
  theme();
  try {
    await chooseRun();
    await draw();
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    fail(error);
    document.documentElement.dataset.ready = "failed";
  }
}

/** Call a function when none of its calls came for a while. */
export function settled(action, milliseconds = 150) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), milliseconds);
  };
}

/** Return a line for each notice. */
export function notices(texts) {
  return (texts ?? []).map((text) => h("p", { class: "notice" }, text));
}

function theme() {
  const root = document.documentElement;
  let chosen = "";
  try {
    chosen = localStorage.getItem("theme") ?? "";
  } catch {
    // A page without storage follows the system.
  }
  const isDark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  if (chosen) root.dataset.theme = chosen;
  const button = h("button", { type: "button", class: "quiet", id: "theme" });
  const name = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
  };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    name();
    try {
      localStorage.setItem("theme", root.dataset.theme);
    } catch {
      // It lasts until the page is left.
    }
  });
  name();
  document.getElementById("tools").append(button);
}

async function chooseRun() {
  document.querySelector("nav a[aria-current]")?.scrollIntoView({ inline: "center", block: "nearest" });
  const run = get("run");
  for (const link of document.querySelectorAll("nav a")) {
    if (run && !isExport) link.search = new URLSearchParams({ run }).toString();
  }
  if (isExport || document.documentElement.dataset.needsRun !== "yes") return;
  const names = await runs();
  if (names.length < 2) return;
  const select = h("select", { id: "run" }, names.map((name) => h("option", { value: name }, name)));
  select.value = names.includes(run) ? run : names[0];
  select.addEventListener("change", () => {
    put({ run: select.value, step: null, from: null, to: null });
    location.reload();
  });
  document.getElementById("tools").prepend(h("label", { class: "run" }, "Run ", select));
}
