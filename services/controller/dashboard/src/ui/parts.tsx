// Small pieces that every page is made of.

import type { ReactNode } from "react";
import type { CheckpointState, JobState, NodeState, TraceState } from "../api/types";
import { percent } from "./format";

type Tone = "good" | "live" | "turning" | "waiting" | "still" | "bad";

// Each state has its own sign beside its colour, and its word: colour alone tells nothing.
const TONES: Record<JobState | CheckpointState | NodeState | TraceState, [Tone, string]> = {
  QUEUED: ["waiting", "○"],
  PLACING: ["turning", "◔"],
  STARTING: ["turning", "◑"],
  RUNNING: ["live", "●"],
  PAUSING: ["turning", "◗"],
  PAUSED: ["still", "‖"],
  RESTARTING: ["turning", "↻"],
  CANCELLING: ["turning", "◗"],
  CANCELLED: ["still", "⊘"],
  SUCCEEDED: ["good", "✓"],
  FAILED: ["bad", "✕"],
  WRITING: ["turning", "◔"],
  SEALED: ["turning", "◕"],
  COMMITTED: ["good", "✓"],
  ABORTED: ["still", "⊘"],
  CORRUPT: ["bad", "✕"],
  DELETING: ["still", "◗"],
  REQUESTED: ["waiting", "○"],
  RECORDING: ["live", "●"],
  DONE: ["good", "✓"],
  READY: ["good", "✓"],
  DRAINING: ["turning", "◗"],
  LOST: ["bad", "✕"],
};

export function StateChip({ state }: { state: JobState | CheckpointState | NodeState | TraceState }) {
  const [tone, sign] = TONES[state] ?? (["still", "?"] as const);
  return (
    <span className={`chip tone-${tone}`}>
      <span aria-hidden="true" className="sign">
        {sign}
      </span>
      {state.toLowerCase()}
    </span>
  );
}

export function toneOf(state: JobState): Tone {
  return TONES[state]?.[0] ?? "still";
}

export function Bar({ part, label, tone = "live" }: { part: number; label: string; tone?: Tone }) {
  const value = Number.isFinite(part) ? Math.min(1, Math.max(0, part)) : 0;
  return (
    <div
      className={`bar tone-${tone}`}
      role="progressbar"
      aria-label={label}
      aria-valuemin={0}
      aria-valuemax={100}
      aria-valuenow={Math.round(100 * value)}
      title={`${label}: ${percent(value)}`}
    >
      <div className="fill" style={{ width: `${100 * value}%` }} />
    </div>
  );
}

export function Panel({
  title,
  aside,
  children,
  className = "",
}: {
  title: string;
  aside?: ReactNode;
  children: ReactNode;
  className?: string;
}) {
  return (
    <section className={`panel ${className}`} aria-label={title}>
      <header>
        <h2>{title}</h2>
        {aside ? <div className="aside">{aside}</div> : null}
      </header>
      {children}
    </section>
  );
}

export function Stat({ label, children, hint }: { label: string; children: ReactNode; hint?: string }) {
  return (
    <div className="stat" title={hint}>
      <dt>{label}</dt>
      <dd>{children}</dd>
    </div>
  );
}

/** To the newest and the older ones of a list; nothing where there is one page. */
export function Pager({ next, onTurn, paged }: { next: string | null; onTurn: (cursor: string | null) => void; paged: boolean }) {
  if (!paged && !next) return null;
  return (
    <div className="pager">
      {paged ? (
        <button type="button" onClick={() => onTurn(null)}>
          ← Newest
        </button>
      ) : null}
      {next ? (
        <button type="button" onClick={() => onTurn(next)}>
          Older →
        </button>
      ) : null}
    </div>
  );
}

export function Quiet({ children }: { children: ReactNode }) {
  return <p className="quiet">{children}</p>;
}

/** An error in a place where there is nothing older to show. */
export function Trouble({ error }: { error: Error }) {
  return (
    <p className="trouble" role="alert">
      {error.message}
    </p>
  );
}
