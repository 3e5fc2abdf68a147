// The state of every block: reference count, tenant, kind, and the age of its content.
import { columns } from "./unpack.js";

export const FREE = 0;
export const CACHED = 1; // or quarantined until a step completes: the tables do not distinguish them
export const HELD = 2;
export const SHARED = 3;
export const STATES = ["free", "cached", "held", "shared"];
export const KINDS = ["KV of tokens", "recurrent state", "checkpoint of a state", "KV of a window"];
export const AGE_LIMITS_S = [1, 10, 60, 600, 3600];

const seconds = (age) => 2 ** (age / 16) - 1;

export class Blocks {
  constructor() {
    this.frame = 0;
    this.resize(0);
  }

  resize(count) {
    this.count = count;
    this.holders = new Uint8Array(count);
    this.owners = new Uint16Array(count);
    this.kinds = new Uint8Array(count);
    this.sinceMs = new Float64Array(count);
  }

  // Applies a frame. Returns the changed ids, null if all changed, undefined if the frame does not follow ours.
  async take(frame) {
    if (frame.base !== 0 && frame.base !== this.frame) return undefined;
    const { ids, holders, owners, ages, kinds } = await columns(frame);
    if (this.count !== frame.count) this.resize(frame.count);
    const now = performance.now();
    const age = Float64Array.from({ length: 256 }, (_, step) => now - 1000 * seconds(step));
    for (let i = 0; i < holders.length; i += 1) {
      const block = ids === null ? i : ids[i];
      this.holders[block] = holders[i];
      this.owners[block] = owners[i];
      this.kinds[block] = kinds[i];
      this.sinceMs[block] = age[ages[i]];
    }
    this.frame = frame.frame;
    return ids;
  }

  state(block) {
    if (this.owners[block] === 0) return FREE;
    const holders = this.holders[block];
    return holders === 0 ? CACHED : holders === 1 ? HELD : SHARED;
  }

  ageS(block) {
    return (performance.now() - this.sinceMs[block]) / 1000;
  }

  ageStep(block) {
    const age = this.ageS(block);
    const step = AGE_LIMITS_S.findIndex((limit) => age < limit);
    return step < 0 ? AGE_LIMITS_S.length : step;
  }
}
