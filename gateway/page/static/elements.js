// Builds elements from data: names from outside become text, never markup.

export const byId = (id) => document.getElementById(id);

// el("td", { class: "name", title: "..." }, "text", child): a key with the prefix "on" is a listener.
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

// Bars and swatches: the policy forbids style attributes in markup, not setting the style of an element.
export function part(share, colour, title) {
  const made = el("span", { title });
  made.style.flexGrow = String(share);
  made.style.background = colour;
  return made;
}

export function swatch(colour) {
  const made = el("i", { class: "swatch", "aria-hidden": "true" });
  made.style.background = colour;
  return made;
}

// Keeps one node per key, in order, so that open and focused nodes stay so.
export function keyed(parent, items, keyOf, make, update) {
  const known = (parent.keyed ??= new Map());
  const wanted = new Set(items.map(keyOf));
  for (const [key, node] of known) {
    if (!wanted.has(key)) {
      node.remove();
      known.delete(key);
    }
  }
  let before = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let node = known.get(key);
    if (!node) known.set(key, (node = make(item)));
    update(node, item);
    if (node === before) before = before.nextElementSibling;
    else parent.insertBefore(node, before);
  }
}
