// Numbers and times as people read them. A dash stands for "not known".

export const DASH = "–";

const known = (value: number | null | undefined): value is number =>
  value !== null && value !== undefined && Number.isFinite(value);

export function loss(value: number | null | undefined): string {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e4)) return value.toExponential(2);
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : size >= 0.1 ? 3 : 4);
}

/** The loss of a validation pass that was made: without a value it was no finite number. */
export function validationLoss(value: number | null): string {
  return value === null ? "not finite" : loss(value);
}

export function whole(value: number | null | undefined): string {
  return known(value) ? Math.round(value).toLocaleString("en-US") : DASH;
}

/** 12 345 → "12.3 k". */
export function compact(value: number | null | undefined): string {
  if (!known(value)) return DASH;
  for (const [size, sign] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]] as const) {
    if (Math.abs(value) >= size) return `${(value / size).toPrecision(3)} ${sign}`;
  }
  return trim(value);
}

/** The unit of throughput as a heading: "Tokens/s". */
export function perSecond(unit: string): string {
  return `${unit.charAt(0).toUpperCase()}${unit.slice(1)}/s`;
}

export function bytes(value: number | null | undefined): string {
  if (!known(value)) return DASH;
  for (const [power, sign] of [[40, "TiB"], [30, "GiB"], [20, "MiB"], [10, "KiB"]] as const) {
    if (value >= 2 ** power) return `${trim(value / 2 ** power)} ${sign}`;
  }
  return `${value} B`;
}

export function percent(part: number): string {
  return `${(100 * part).toFixed(part > 0 && part < 0.0995 ? 1 : 0)} %`;
}

/** 0.0123 → "12.3 ms", 75 → "1 m 15 s". */
export function duration(seconds: number | null | undefined): string {
  if (!known(seconds)) return DASH;
  if (seconds < 0) return "0 s";
  if (seconds < 1e-3) return `${trim(seconds * 1e6)} µs`;
  if (seconds < 1) return `${trim(seconds * 1e3)} ms`;
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  return span(seconds);
}

/** The same in whole seconds and up, for ages and what is left. */
export function span(seconds: number | null | undefined): string {
  if (!known(seconds)) return DASH;
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3_600) return `${Math.floor(s / 60)} m ${pad(s % 60)} s`;
  if (s < 86_400) return `${Math.floor(s / 3_600)} h ${pad(Math.floor((s % 3_600) / 60))} m`;
  return `${Math.floor(s / 86_400)} d ${pad(Math.floor((s % 86_400) / 3_600))} h`;
}

export function clock(ms: number): string {
  const at = new Date(ms);
  return `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
}

export function dateTime(iso: string): string {
  const at = new Date(iso);
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${clock(at.getTime())}`;
}

/** The part of an id that tells jobs apart: ULIDs begin with the time. */
export function shortId(id: string): string {
  return id.length > 12 ? `…${id.slice(-8)}` : id;
}

/** What an elastic job may have, in a tooltip; nothing for any other one. */
export function bounds(world: { min: number; max: number } | null): string | undefined {
  return world ? `elastic: from ${world.min} to ${world.max} ranks` : undefined;
}

/** A mesh as "dp_shard 4 × tp 2". */
export function axes(sizes: { dp_replicate: number; dp_shard: number; tp: number }): string {
  const wide = Object.entries(sizes).filter(([, size]) => size > 1);
  return wide.map(([axis, size]) => `${axis} ${size}`).join(" × ") || "one rank";
}

/** "rank_lost" → "rank lost". */
export function words(name: string): string {
  return name.replaceAll("_", " ").toLowerCase();
}

function trim(value: number): string {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2);
}

function pad(value: number): string {
  return String(value).padStart(2, "0");
}
