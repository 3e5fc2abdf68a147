// Formats numbers and times for people, without line breaks between a number and its unit.
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const clock = new Intl.DateTimeFormat("en", {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
});

export const count = (value) => grouped.format(value);

export const many = (value, one, more = `${one}s`) => `${count(value)} ${value === 1 ? one : more}`;

export function short(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e6) return compact.format(value);
  return value >= 100 || Number.isInteger(value) ? count(value) : value.toPrecision(value >= 10 ? 3 : 2);
}

export const percent = (share) => (share > 0 && share < 0.01 ? "<\u00a01\u00a0%" : `${Math.round(100 * share)}\u00a0%`);

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; value >= 1024 && at < units.length - 1; at += 1) value /= 1024;
  return `${value >= 100 || at === 0 ? Math.round(value) : value.toPrecision(3)}\u00a0${units[at]}`;
}

export function duration(seconds) {
  if (seconds < 10) return `${Math.max(0, seconds).toFixed(1)}\u00a0s`;
  if (seconds < 100) return `${Math.round(seconds)}\u00a0s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)}\u00a0min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)}\u00a0h` : `${Math.round(seconds / 86400)}\u00a0days`;
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return `${(value / 1000).toPrecision(value >= 1e5 ? 4 : 3)}\u00a0s`;
  if (value >= 100) return `${count(value)}\u00a0ms`;
  return `${value.toPrecision(value >= 10 ? 3 : 2)}\u00a0ms`;
}

export const time = (ms) => clock.format(new Date(ms));
