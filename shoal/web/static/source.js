// Where data comes from: the server, or what an export has inlined.

const inlined = document.getElementById("inlined");
const answers = inlined ? JSON.parse(inlined.textContent) : null;

let isNearest = false;

/** Return whether an export had no answer to what was asked last, but to something near. */
export function wasNearest() {
  return isNearest;
}

/** Whether this page is a file of an export. */
export const isExport = answers !== null;

/** Return the data of a page for some values; throw an Error that can be shown. */
export async function load(page, values = {}) {
  const data = isExport ? exported(values) : await fetched(page, values);
  if (data.error) {
    const more = [data.possible && `Possible: ${data.possible}.`, data.change && `Change: ${data.change}.`];
    throw new Error([`${data.error}.`, ...more.filter(Boolean)].join(" "));
  }
  return data;
}

/** Return the names of the runs, the newest first. */
export async function runs() {
  return isExport ? [] : (await fetched("", {}, "/runs")).runs;
}

/** Call `take` with the data of a run each time that it has grown, and `tell` with whether the server is there.
 *
 * Return a function that ends it. */
export function follow(values, take, tell) {
  let stream = null;
  let isOver = false;
  const open = () => {
    if (stream || document.hidden || isOver) return;
    stream = new EventSource(`/events?${new URLSearchParams(values)}`);
    stream.onopen = () => tell(true);
    stream.onmessage = (event) => take(JSON.parse(event.data));
    stream.onerror = () => {
      tell(false);
      if (stream && stream.readyState === EventSource.CLOSED) {
        stream = null;
        setTimeout(open, 3000);
      }
    };
  };
  // A browser has few connections to one server: a page that nobody sees gives its own back.
  const close = () => {
    stream?.close();
    stream = null;
  };
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  open();
  return () => {
    isOver = true;
    close();
  };
}

async function fetched(page, values, path = `/data/${page}`) {
  let answer;
  try {
    answer = await fetch(`${path}?${new URLSearchParams(values)}`, { credentials: "same-origin" });
  } catch {
    throw new Error("The server does not answer. Is shoal web still running?");
  }
  if (!(answer.headers.get("content-type") ?? "").includes("json")) {
    throw new Error("The server does not know this browser. Open the address that shoal web printed.");
  }
  return answer.json();
}

/** Return the answer to the exported query that is nearest to what is asked. */
function exported(values) {
  const asked = Object.entries(values).filter(([name]) => name !== "run");
  const usual = answers[""] ?? {};
  let best = null;
  for (const [key, answer] of Object.entries(answers)) {
    const held = Object.fromEntries(new URLSearchParams(key));
    let distance = 0;
    for (const [name, value] of asked) distance += apart(held[name], String(value));
    for (const name of Object.keys(held)) {
      if (!(name in values)) distance += apart(held[name], String(usual[name])) + 0.001;
    }
    if (best === null || distance < best.distance) best = { distance, answer };
  }
  isNearest = best !== null && best.distance >= 0.1;
  return best ? best.answer : { error: "this export is empty" };
}

function apart(held, asked) {
  if (held === asked) return 0;
  if (held === undefined) return 5;
  const [a, b] = [Number(held), Number(asked)];
  return Number.isFinite(a) && Number.isFinite(b) ? Math.abs(Math.log2((a + 1) / (b + 1))) : 100;
}
