// The counts of a pool and its tiers as one line of text.
import { bytes, count, many, percent } from "./words.js";

export function poolText(pool) {
  const { blocks, referenced, cached, quarantined, free } = pool;
  const use = [`${count(referenced)} of ${many(blocks, "block")} held (${percent(referenced / blocks)})`];
  use.push(`${count(cached)} cached`);
  if (quarantined) use.push(`${count(quarantined)} quarantined`);
  use.push(`${count(free)} free`);
  const kinds = [
    [pool.state_blocks, "states"],
    [pool.checkpoint_blocks, "checkpoints"],
    [pool.window_blocks, "windows"],
  ];
  const kindTexts = kinds.filter(([held]) => held).map(([held, name]) => `${name} ${count(held)}`);
  const size = `${bytes(blocks * pool.bytes_per_block)}, ${pool.kv_dtype}`;
  return [use.join(", "), ...kindTexts, size, hostText(pool), diskText(pool.disk)].filter(Boolean).join(" · ");
}

function hostText(pool) {
  if (!pool.host_blocks) return "";
  const missed = pool.host_missed_tags_total + pool.host_missed_checksums_total;
  const moved = `${count(pool.host_saved_total)} saved, ${count(pool.host_loaded_total)} loaded, ${count(missed)} missed`;
  const swapped = pool.host_swapped_total
    ? `, ${many(pool.host_swapped_total, "request")} swapped in (${bytes(pool.host_swapped_blocks_total * pool.bytes_per_block)}, ` +
      `${(pool.host_swap_saved_us_total / 1e6).toFixed(1)} s saved)`
    : "";
  return `host tier: ${count(pool.host_cached)} of ${many(pool.host_blocks, "block")} cached, ${moved}${swapped}`;
}

function diskText(disk) {
  if (!disk) return "";
  const missed = disk.missed_tags_total + disk.missed_checksums_total;
  return (
    `disk tier${disk.off ? " (off)" : ""}: ${count(disk.cached)} of ${many(disk.blocks, "block")} cached, ` +
    `${count(disk.saved_total)} saved, ${count(disk.loaded_total)} loaded, ${count(missed)} missed, ` +
    `${count(disk.failed_total)} failed`
  );
}
