// The state of every block: reference count, tenant, kind, and the age of its content.
import { columns } from "./unpack.js";

export const FREE = 0;
export const CACHED = 1;
export const QUARANTINED = 2; // without holders until a step completes
export const HELD = 3;
export const SHARED = 4;
export const STATES = ["free", "cached", "quarantined", "held", "shared"];
const BY_SERVER_STATE = [FREE, HELD, QUARANTINED, CACHED]; // places in BLOCK_STATES of protocol/layout.py
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
    this.states = new Uint8Array(count);
    this.sinceMs = new Float64Array(count);
  }

  // Applies a frame. Returns the changed ids, null if all changed, undefined if the frame does not follow ours.
  async take(frame) {
    if (frame.base !== 0 && frame.base !== this.frame) return undefined;
    const { ids, holders, owners, ages, kinds, states } = await columns(frame);
    if (this.count !== frame.count) this.resize(frame.count);
    const now = performance.now();
    const age = Float64Array.from({ length: 256 }, (_, step) => now - 1000 * seconds(step));
    for (let i = 0; i < holders.length; i += 1) {
      const block = ids === null ? i : ids[i];
      this.holders[block] = holders[i];
      this.owners[block] = owners[i];
      this.kinds[block] = kinds[i];
      this.states[block] = states[i];
      this.sinceMs[block] = age[ages[i]];
    }
    this.frame = frame.frame;
    return ids;
  }

  state(block) {
    const state = BY_SERVER_STATE[this.states[block]];
    return state === HELD && this.holders[block] > 1 ? SHARED : state;
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
