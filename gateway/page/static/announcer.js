// Announces the level of the summary to screen readers: a bad one at once, the others when they last.
// A busy service moves between "all is well" and "waiting" every second; each change would interrupt the reader.
const STEADY_MS = 5000;

export class Announcer {
  // say(): announces the current sentence.
  constructor(say, steadyMs = STEADY_MS) {
    this.say = say;
    this.steadyMs = steadyMs;
    this.level = this.announced = "notice"; // as in index.html
  }

  see(level) {
    if (level === this.level) return;
    this.level = level;
    if (this.announced === "bad" && level !== "bad" && this.due) return; // better for as long, whether good or notice
    clearTimeout(this.due);
    this.due = undefined;
    if (level === this.announced) return;
    if (level === "bad") this.announce();
    else this.due = setTimeout(() => this.announce(), this.steadyMs);
  }

  announce() {
    this.due = undefined;
    this.announced = this.level;
    this.say();
  }
}
