// Text that grows older by itself: one shared tick a second, none while the tab is hidden.

import { useSyncExternalStore } from "react";
import { serverNow } from "../api/connection";
import { dateTime, span } from "./format";

let second = serverNow();
let timer: ReturnType<typeof setInterval> | undefined;
const listeners = new Set<() => void>();

function tick(): void {
  if (document.hidden) return;
  second = serverNow();
  for (const listener of listeners) listener();
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  timer ??= setInterval(tick, 1_000);
  return () => {
    listeners.delete(listener);
    if (listeners.size === 0) {
      clearInterval(timer);
      timer = undefined;
    }
  };
}

/** The controller's time in milliseconds, updated each second. */
export function useNow(): number {
  return useSyncExternalStore(subscribe, () => second);
}

export function Ago({ at, suffix = "" }: { at: string; suffix?: string }) {
  const age = (useNow() - Date.parse(at)) / 1_000;
  return (
    <time dateTime={at} title={dateTime(at)}>
      {span(age)}
      {suffix}
    </time>
  );
}

/** From one moment to another, or to now. */
export function Elapsed({ from, to }: { from: string; to: string | null }) {
  const now = useNow();
  return <span className="elapsed">{span(((to ? Date.parse(to) : now) - Date.parse(from)) / 1_000)}</span>;
}
