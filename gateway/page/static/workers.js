// Workers: the state of each, and the use of its device memory.
import { tenantShade } from "./colours.js";
import { byId, el, keyed, part, swatch, text } from "./elements.js";
import { bytes, count, percent } from "./words.js";

// Purposes in the order of the bar; others are appended.
const PURPOSES = ["weights", "pool", "graphs", "other", "free"];
const shade = (at) => tenantShade(at + 1);

export function showWorkers({ rows, absent }) {
  const parent = byId("workers");
  const items = [
    ...rows.map((row) => ({ ...row, key: row.name })),
    ...absent.map((row) => ({ ...row, key: `absent ${row.name}` })),
  ];
  if (!items.length) {
    if (!parent.querySelector(".empty")) parent.append(el("p", { class: "empty" }, "No worker is connected."));
  } else parent.querySelector(".empty")?.remove();
  keyed(parent, items, (item) => item.key, make, update);
}

function make() {
  const kernels = el("details", {}, el("summary", {}, "kernels"), el("dl", {}));
  const head = el("div", { class: "head" }, el("b", {}), el("span", { class: "soft" }), el("span", { class: "pill" }));
  return el(
    "div",
    { class: "worker" },
    head,
    el("div", { class: "bar", "aria-hidden": "true" }),
    el("div", { class: "soft told" }),
    el("div", { class: "soft drafts" }),
    kernels,
  );
}

function update(node, item) {
  text(node.querySelector("b"), item.name);
  text(node.querySelector(".head .soft"), item.pid ? `process ${item.pid}` : "");
  const pill = node.querySelector(".pill");
  const busy = item.busy_s > 2 ? `, ${item.busy_s} s on one step` : "";
  text(pill, item.state === "loading" ? `loading ${percent(item.progress)}` : `${item.state}${busy}`);
  pill.dataset.state = item.state === "ready" ? (busy ? "notice" : "live") : item.state === "gone" ? "lost" : "notice";
  const memory = Object.entries(item.memory ?? {}).sort(
    ([a], [b]) => (PURPOSES.indexOf(a) + 1 || 9) - (PURPOSES.indexOf(b) + 1 || 9),
  );
  const bar = node.querySelector(".bar");
  bar.hidden = !memory.length;
  bar.replaceChildren(...memory.map(([purpose, held], at) => part(held, shade(at), `${purpose} ${bytes(held)}`)));
  const told = node.querySelector(".told");
  const said = item.how ?? (item.state === "loading" ? item.phase : "");
  const words = said || JSON.stringify(memory);
  if (told.dataset.shown !== words) {
    told.dataset.shown = words;
    told.replaceChildren(
      ...(said
        ? [said]
        : memory.map(([purpose, held], at) => el("span", {}, swatch(shade(at)), `${purpose} ${bytes(held)}`))),
    );
  }
  text(node.querySelector(".drafts"), draftsText(item.drafts));
  const kernels = node.querySelector("details");
  const pairs = Object.entries(item.kernels ?? {});
  kernels.hidden = !pairs.length;
  if (kernels.dataset.shown !== JSON.stringify(pairs)) {
    kernels.dataset.shown = JSON.stringify(pairs);
    kernels
      .querySelector("dl")
      .replaceChildren(...pairs.flatMap(([what, kernel]) => [el("dt", {}, what), el("dd", {}, kernel)]));
  }
}

// drafts: the most for a request in a step, and how many tokens were verified and accepted; null without drafts.
function draftsText(drafts) {
  if (!drafts) return "";
  const [most, verified, accepted] = drafts;
  const found = verified
    ? `${count(accepted)} of ${count(verified)} accepted (${percent(accepted / verified)})`
    : "none verified yet";
  return `drafts: at most ${most} for a request in a step, ${found}`;
}
