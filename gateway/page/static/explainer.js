// The explanation of one open row, refreshed while the row is displayed and the page is connected.
import { el } from "./elements.js";

const AGAIN_MS = 2000;

export class Explainer {
  // query(subject): the query string; find(subject): the element for its sentences, undefined if it is not displayed.
  constructor(server, query, find, againMs = AGAIN_MS) {
    Object.assign(this, { server, query, find });
    setInterval(() => this.server.live && this.ask(), againMs);
  }

  // subject: what is open now; undefined for nothing.
  open(subject) {
    this.subject = subject;
    this.ask();
  }

  async ask() {
    const subject = this.subject;
    if (subject === undefined || subject === this.asked || !this.find(subject)) return;
    this.asked = subject;
    let lines;
    try {
      const { sentences } = await this.server.ask(`/page/explain?${this.query(subject)}`);
      lines = sentences.map((sentence) => el("p", {}, sentence));
    } catch (error) {
      lines = [el("p", { class: "soft" }, error.message)];
    }
    if (this.asked === subject) this.asked = undefined;
    this.show(this.find(subject), lines);
  }

  show(place, lines) {
    const words = lines.map((line) => line.textContent).join("\n");
    if (!place || place.dataset.shown === words) return;
    if (place.dataset.shown !== undefined) place.setAttribute("aria-live", "off"); // announce the first answer only
    place.dataset.shown = words;
    place.replaceChildren(...lines);
  }
}
