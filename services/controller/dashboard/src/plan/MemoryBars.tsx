import type { MemoryView, PlanView, RankMemory } from "../api/types";
import { bytes, percent, words } from "../ui/format";
import { Panel } from "../ui/parts";

type Kind = Exclude<keyof MemoryView, "total">;

// From what stays all the time to what comes and goes within a step.
const KINDS: Kind[] = [
  "parameters",
  "buffers",
  "optimizer",
  "gradients",
  "unsharded",
  "whole_gradients",
  "activations",
  "communication",
  "workspace",
];
const RANKS_NAMED = 8;
// Below this share of the scale a bar shows that there is room, and no more.
const TOO_SMALL = 0.25;

/** A bar for each group of ranks that need the same, all to one scale, with the limit on it. */
export function MemoryBars({ plan }: { plan: PlanView }) {
  const limit = plan.memory_limit_bytes;
  // Of a GPU: what the limit leaves to its allocator's fragments and to the process itself.
  const reserve = plan.memory_reserve_bytes ?? 0;
  const scale = Math.max((limit ?? 0) + reserve, ...plan.memory.map((group) => group.peak.total), 1);
  const fullest = plan.memory.reduce((most, group) => (group.peak.total > most.peak.total ? group : most));
  const seen = KINDS.filter((kind) => plan.memory.some((group) => group.peak[kind] > 0));
  return (
    <Panel title="Peak memory of a rank" aside={<span>{limit === null ? "" : `limit ${bytes(limit)}`}</span>}>
      <div className="memory-bars">
        {plan.memory.map((group) => (
          <Group key={group.ranks.join()} group={group} scale={scale} limit={limit} reserve={reserve} />
        ))}
        <ul className="legend" aria-label={`Kinds of memory, of ${named(fullest.ranks)}`}>
          {seen.map((kind) => (
            <li key={kind}>
              <i className={`kind-${kind}`} aria-hidden="true" />
              {words(kind)} <b>{bytes(fullest.peak[kind])}</b>
            </li>
          ))}
          {reserve > 0 ? (
            <li>
              <i className="reserve" aria-hidden="true" />
              left to fragments and the process <b>{bytes(reserve)}</b>
            </li>
          ) : null}
        </ul>
      </div>
    </Panel>
  );
}

function Group({ group, scale, limit, reserve }: { group: RankMemory; scale: number; limit: number | null; reserve: number }) {
  const { peak } = group;
  const over = limit !== null && peak.total > limit;
  const where = group.where + (group.unit ? ` of ${group.unit}` : "");
  return (
    <figure className="group">
      <figcaption>
        <span>{named(group.ranks)}</span>
        <b className={over ? "over" : ""}>{bytes(peak.total)}</b>
        {limit === null ? null : <span className="muted">{percent(peak.total / limit)} of the limit</span>}
        <span className="muted">in {where}</span>
      </figcaption>
      <div
        className="stack"
        role="meter"
        aria-label={`Memory of ${named(group.ranks)}`}
        aria-valuemin={0}
        aria-valuemax={Math.round(scale)}
        aria-valuenow={peak.total}
        aria-valuetext={KINDS.filter((kind) => peak[kind] > 0)
          .map((kind) => `${words(kind)} ${bytes(peak[kind])}`)
          .join(", ")}
      >
        <Parts peak={peak} scale={scale} />
        {limit !== null && reserve > 0 ? (
          <span className="reserve" style={{ left: `${(100 * limit) / scale}%`, width: `${(100 * reserve) / scale}%` }} />
        ) : null}
        {limit !== null ? <span className="limit" style={{ left: `${(100 * limit) / scale}%` }} /> : null}
      </div>
      {peak.total < TOO_SMALL * scale ? (
        <div className="stack enlarged" aria-hidden="true" title="The same, enlarged">
          <Parts peak={peak} scale={peak.total} />
        </div>
      ) : null}
      <p className="muted">
        {peak.total < TOO_SMALL * scale ? "The thin bar is enlarged. " : ""}
        {bytes(group.resting.total)} between steps
        {group.host_bytes > 0 ? `, and ${bytes(group.host_bytes)} of host memory` : ""}
      </p>
    </figure>
  );
}

function Parts({ peak, scale }: { peak: MemoryView; scale: number }) {
  return KINDS.filter((kind) => peak[kind] > 0).map((kind) => (
    <i
      key={kind}
      className={`kind-${kind}`}
      style={{ width: `${(100 * peak[kind]) / scale}%` }}
      title={`${words(kind)}: ${bytes(peak[kind])}`}
    />
  ));
}

function named(ranks: number[]): string {
  if (ranks.length === 1) return `rank ${ranks[0]}`;
  if (ranks.length <= RANKS_NAMED) return `ranks ${ranks.join(", ")}`;
  return `ranks ${ranks[0]} … ${ranks[ranks.length - 1]} (${ranks.length})`;
}
