// Whether the controller answers, since when it does not, and what time it is there.

import { useSyncExternalStore } from "react";

export interface Connection {
  /** Milliseconds of this browser's clock; null while the controller answers. */
  downSince: number | null;
  /** What an answering but unable controller said (502 to 504). */
  detail: string | null;
  needsToken: boolean;
}

let current: Connection = { downSince: null, detail: null, needsToken: false };
let clockLead: number | null = null;
const listeners = new Set<() => void>();

function change(next: Connection): void {
  if (next.downSince === current.downSince && next.detail === current.detail && next.needsToken === current.needsToken)
    return;
  current = next;
  for (const listener of listeners) listener();
}

export const connection = {
  get: (): Connection => current,

  subscribe(listener: () => void): () => void {
    listeners.add(listener);
    return () => listeners.delete(listener);
  },

  lost(): void {
    change({ ...current, downSince: current.downSince ?? Date.now(), detail: null });
  },

  unavailable(detail: string): void {
    change({ ...current, downSince: current.downSince ?? Date.now(), detail });
  },

  unauthorized(): void {
    change({ ...current, needsToken: true });
  },

  tokenGiven(): void {
    change({ ...current, needsToken: false });
  },

  answered(response: Response): void {
    setClock(response.headers.get("Date"));
    if (response.status >= 502) return;
    change({ downSince: null, detail: null, needsToken: response.status === 401 || current.needsToken });
  },
};

// `Date` is cut to whole seconds, so each answer bounds the lead of the controller's clock from
// below; the largest bound is the closest. A jump of either clock starts over.
function setClock(header: string | null): void {
  const there = header ? Date.parse(header) : Number.NaN;
  if (Number.isNaN(there)) return;
  const bound = there - Date.now();
  if (clockLead === null || bound > clockLead || bound < clockLead - 5_000) clockLead = bound;
}

/** The controller's time, in milliseconds: ages are told by its clock, not by this browser's. */
export function serverNow(): number {
  return Date.now() + (clockLead ?? 0);
}

export function useConnection(): Connection {
  return useSyncExternalStore(connection.subscribe, connection.get);
}
