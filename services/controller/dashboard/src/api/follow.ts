// Lists that only grow, oldest first: what was read is not asked for again. Any entry's id is a
// cursor, so that each poll asks for what came behind the last one, mostly nothing: 304.

import { get, ProblemError } from "./client";

interface Page<T> {
  items: T[];
  next_cursor: string | null;
}

interface Trail<T> {
  shown: T[];
  after: string | null;
}

const KEPT_TRAILS = 12;
const GONE = 410;

const trails = new Map<string, Trail<unknown>>();

/** The newest `keep` items of `path`; the same array as before where there is nothing new. */
export async function follow<T extends { id: string }>(path: string, keep: number, signal?: AbortSignal): Promise<T[]> {
  let known = trails.get(path) as Trail<T> | undefined;
  let trail: Trail<T> = known ?? { shown: [], after: null };
  for (let more = true; more; ) {
    const page = await read<T>(path, trail, signal);
    const now = trails.get(path) as Trail<T> | undefined;
    if (now && now !== known) {
      // A stream was quicker: what came by it must not come twice.
      known = trail = now;
      continue;
    }
    const last = page.items.at(-1);
    if (last) trail = { shown: [...trail.shown, ...page.items].slice(-keep), after: last.id };
    remember(path, trail);
    known = trail;
    more = last !== undefined && page.next_cursor !== null;
  }
  return trail.shown;
}

/** Forgets what was read with the token before. */
export function forgetTrails(): void {
  trails.clear();
}

/** Up to where a list was read. */
export function lastOf(path: string): string | null {
  return trails.get(path)?.after ?? null;
}

/** What was read of a list. */
export function shownOf(path: string): unknown[] {
  return trails.get(path)?.shown ?? [];
}

/** One more entry, which came by a stream. */
export function append<T extends { id: string }>(path: string, entry: T, keep: number): void {
  const trail = (trails.get(path) as Trail<T> | undefined) ?? { shown: [], after: null };
  if (trail.after === entry.id) return;
  remember(path, { shown: [...trail.shown, entry].slice(-keep), after: entry.id });
}

async function read<T>(path: string, { after }: Trail<T>, signal?: AbortSignal): Promise<Page<T>> {
  const cursor = after === null ? "" : `${path.includes("?") ? "&" : "?"}cursor=${encodeURIComponent(after)}`;
  try {
    return await get<Page<T>>(`${path}${cursor}`, signal);
  } catch (error) {
    // What came behind the cursor was trimmed meanwhile: the next poll starts over.
    if (error instanceof ProblemError && error.status === GONE) trails.delete(path);
    throw error;
  }
}

function remember(path: string, trail: Trail<unknown>): void {
  trails.delete(path);
  trails.set(path, trail);
  for (const oldest of trails.keys()) {
    if (trails.size <= KEPT_TRAILS) break;
    trails.delete(oldest);
  }
}
