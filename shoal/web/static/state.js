// What is shown is in the address, so that a link shows the same.

/** Return a value of the address. */
export function get(name, fallback = "") {
  return new URLSearchParams(location.search).get(name) ?? fallback;
}

/** Return the values of the address with some names, without those that are not there. */
export function all(...names) {
  const values = {};
  for (const name of names) if (get(name) !== "") values[name] = get(name);
  return values;
}

/** Change values of the address; null takes one out. */
export function put(values) {
  const search = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === "") search.delete(name);
    else search.set(name, value);
  }
  const text = search.toString();
  try {
    history.replaceState(null, "", text ? `?${text}` : location.pathname);
  } catch {
    // Some browsers let no page from a disk change its address: the page works without.
  }
}
