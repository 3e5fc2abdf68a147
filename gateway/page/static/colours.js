// The colours of cells and bars, from the style sheet, for the light and the dark scheme.

export const TENANT_COLOURS = 8;
export const AGE_COLOURS = 6;
export const KIND_COLOURS = ["tenant-1", "tenant-2", "tenant-7", "tenant-3"]; // as blocks.js has KINDS
const dark = matchMedia("(prefers-color-scheme: dark)");
let read = new Map();

export function colour(name) {
  let value = read.get(name);
  if (value === undefined) {
    value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    read.set(name, value);
  }
  return value;
}

// For elements: follows the colour scheme automatically.
export const shade = (name) => `var(--${name})`;
export const tenantShade = (number) => shade(`tenant-${number % TENANT_COLOURS}`);

export function onScheme(redraw) {
  dark.addEventListener("change", () => {
    read = new Map();
    redraw();
  });
}

// A colour of the style sheet (#rrggbb), mixed with another by `share`, for ImageData: 0xAABBGGRR.
export function pixel(name, other = name, share = 0) {
  const from = parse(colour(name));
  const to = parse(colour(other));
  const [r, g, b] = from.map((value, at) => Math.round(value + (to[at] - value) * share));
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

const parse = (hex) => [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
