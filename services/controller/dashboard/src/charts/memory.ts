// The memory of a job's ranks over time, as far as this page saw it: the API keeps the newest samples only.

import { useMemo } from "react";
import { useRanks } from "../api/queries";
import type { JobView } from "../api/types";
import type { MemorySample } from "./measures";

const SAMPLES_KEPT = 2_000;
const histories = new Map<string, MemorySample[]>();

export function useMemoryHistory(job: JobView): MemorySample[] {
  const { data } = useRanks(job);
  return useMemo(() => {
    const known = histories.get(job.id) ?? [];
    const ranks = (data?.items ?? []).filter((rank) => rank.memory_bytes > 0);
    const step = ranks.reduce((most, rank) => Math.max(most, rank.step), 0);
    if (ranks.length === 0 || step <= (known.at(-1)?.step ?? -1)) return known;
    const used = ranks.map((rank) => rank.memory_bytes);
    const sample = { step, most: used.reduce((a, b) => Math.max(a, b)), least: used.reduce((a, b) => Math.min(a, b)) };
    const next = [...known, sample].slice(-SAMPLES_KEPT);
    histories.set(job.id, next);
    return next;
  }, [data, job.id]);
}
