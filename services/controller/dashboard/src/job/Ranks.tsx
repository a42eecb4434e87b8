import { useMemo, useState } from "react";
import { serverNow } from "../api/connection";
import { isAtRest, useNodes, useRanks } from "../api/queries";
import type { JobView, NodeView, RankView } from "../api/types";
import { bytes, compact, DASH, dateTime, duration, perSecond, span, whole } from "../ui/format";
import { Bar, Panel, Quiet, Trouble } from "../ui/parts";
import { useNow } from "../ui/time";
import { type Phase, phaseOf } from "./phases";

const FEW = 8;
const ROWS_AT_FIRST = 64;
const CELLS_AT_MOST = 4_096;
// An agent beats each second and more often: three silent ones are worth a word.
const UNHEARD_S = 4;
const UNMOVED_S = 15;
// More workers that read ahead would shorten steps by that share and more.
const NOTABLE_WAIT = 0.1;

/** One row per rank: where each stands, and who is behind. */
export function Ranks({ job }: { job: JobView }) {
  const { data, error } = useRanks(job);
  const { data: nodes } = useNodes();
  const [all, setAll] = useState(false);
  const memoryOf = useMemo(() => capacities(nodes?.items ?? []), [nodes]);
  const items = data?.items ?? [];
  const foremost = Math.max(0, ...items.map((rank) => rank.step));
  const shown = all ? items : items.slice(0, ROWS_AT_FIRST);
  return (
    <Panel
      title="Ranks"
      aside={
        data && items.length > 0 ? (
          <>
            {items.length} of attempt {data.attempt}
          </>
        ) : null
      }
    >
      {!data && error ? <Trouble error={error} /> : null}
      {data && items.length === 0 ? (
        <Quiet>{isAtRest(job.state) ? "No rank runs." : "Ranks are listed as soon as their node has started them."}</Quiet>
      ) : null}
      {items.length > FEW ? <PhaseGrid ranks={items} /> : null}
      {items.length > 0 ? (
        <div className="scroller" tabIndex={0} role="region" aria-label="Ranks, by number">
          <table className="ranks">
            <thead>
              <tr>
                <th scope="col" className="number">Rank</th>
                <th scope="col">Phase</th>
                <th scope="col">Unit</th>
                <th scope="col" className="number">Step</th>
                <th scope="col" className="number">Step time</th>
                <th scope="col" className="number" title="How much later than the first rank it comes to a collective, on average">
                  Lag
                </th>
                <th scope="col">Memory</th>
                <th scope="col" className="number">{perSecond(job.progress.throughput_unit)}</th>
                <th scope="col">Where</th>
                <th scope="col">Last seen</th>
              </tr>
            </thead>
            <tbody>
              {shown.map((rank) => (
                <RankRow
                  key={rank.rank}
                  rank={rank}
                  live={!isAtRest(job.state)}
                  foremost={foremost}
                  capacity={memoryOf(rank)}
                />
              ))}
            </tbody>
          </table>
        </div>
      ) : null}
      {items.length > shown.length ? (
        <button type="button" className="more" onClick={() => setAll(true)}>
          Show all {items.length} ranks
        </button>
      ) : null}
    </Panel>
  );
}

function RankRow({
  rank,
  live,
  foremost,
  capacity,
}: {
  rank: RankView;
  live: boolean;
  foremost: number;
  capacity: number | null;
}) {
  useNow();
  const silence = live ? silenceOf(rank) : null;
  const phase = phaseOf(rank.phase);
  const behind = foremost - rank.step;
  return (
    <tr data-rank={rank.rank} className={silence?.stale ? "stale" : ""}>
      <th scope="row" className="number">
        {rank.rank}
      </th>
      <td>
        <span className={`phase phase-${phase.family}`}>{phase.word}</span>
      </td>
      <td className="unit" title={rank.unit ?? ""}>
        {rank.unit ?? DASH}
      </td>
      <td className="number">
        {whole(rank.step)}
        {behind > 1 ? <span className="behind"> −{behind}</span> : null}
      </td>
      <td className="number" title={dataWait(rank)}>
        {duration(rank.step_time_s)}
        {waitsForData(rank) ? <span className="behind"> waits for data</span> : null}
      </td>
      <td className="number">
        <span className={rank.is_straggler ? "lag" : "muted"} title={lateness(rank)}>
          {duration(rank.arrival_lag_s)}
          {rank.is_straggler ? " straggler" : ""}
        </span>
      </td>
      <td className="used">
        {capacity ? (
          <Bar part={rank.memory_bytes / capacity} label={`Memory of rank ${rank.rank}, of ${bytes(capacity)}`} />
        ) : null}
        <span>{rank.memory_bytes > 0 ? bytes(rank.memory_bytes) : DASH}</span>
      </td>
      <td className="number">{compact(rank.tokens_per_s)}</td>
      <td className="where" title={rank.pid === null ? "" : `pid ${rank.pid}`}>
        {rank.node_id} <span className="muted">{rank.device}</span>
      </td>
      <td className={silence ? "seen silent" : "seen"} title={rank.last_seen_at ? dateTime(rank.last_seen_at) : ""}>
        {silence?.told ?? (live ? "now" : rank.last_seen_at ? "ended" : DASH)}
      </td>
    </tr>
  );
}

/** Whether a good part of its steps is spent waiting for samples. */
function waitsForData(rank: RankView): boolean {
  return (rank.data_wait_s ?? 0) > NOTABLE_WAIT * (rank.step_time_s ?? Infinity);
}

/** How much of the last step was that, in words. */
function dataWait(rank: RankView): string {
  return rank.data_wait_s === null ? "" : `${duration(rank.data_wait_s)} of it waiting for data`;
}

/** For what share of the time the others wait for a rank, in words. */
function lateness(rank: RankView): string {
  if (rank.straggler_score === null) return "";
  return `others wait for it ${Math.round(100 * rank.straggler_score)} % of the time`;
}

interface Silence {
  told: string;
  /** What the row shows may be over. */
  stale: boolean;
}

/** What is worth saying about a rank that has not been heard of, or does not move; else null. */
function silenceOf(rank: RankView): Silence | null {
  if (rank.last_seen_at === null) return { told: "not started", stale: true };
  const unheard = (serverNow() - Date.parse(rank.last_seen_at)) / 1_000;
  if (unheard > UNHEARD_S) return { told: `silent for ${span(unheard)}`, stale: true };
  if (rank.beat_age_s === null || rank.beat_age_s <= UNMOVED_S) return null;
  return { told: `no progress for ${span(rank.beat_age_s)}`, stale: false };
}

/** All ranks at one glance: a cell each, its letters and colour the phase. */
function PhaseGrid({ ranks }: { ranks: RankView[] }) {
  const counts = new Map<Phase, number>();
  for (const rank of ranks) counts.set(phaseOf(rank.phase), (counts.get(phaseOf(rank.phase)) ?? 0) + 1);
  const most = [...counts].sort((one, other) => other[1] - one[1]);
  return (
    <div className="phase-grid">
      <p className="counts">
        {most.map(([phase, count]) => (
          <span key={phase.word} className={`phase phase-${phase.family}`}>
            {count} {phase.word}
          </span>
        ))}
      </p>
      <div className="cells" aria-hidden="true">
        {ranks.slice(0, CELLS_AT_MOST).map((rank) => {
          const phase = phaseOf(rank.phase);
          return (
            <span
              key={rank.rank}
              className={`cell phase-${phase.family}${rank.is_straggler ? " lagging" : ""}`}
              title={`rank ${rank.rank}: ${phase.word}, step ${rank.step}`}
            >
              {phase.letters}
            </span>
          );
        })}
      </div>
    </div>
  );
}

/** How much memory a rank's bar is measured against: its accelerator's, or its node's. */
function capacities(nodes: NodeView[]): (rank: RankView) => number | null {
  const byId = new Map(nodes.map((node) => [node.id, node.inventory]));
  return (rank) => {
    const inventory = byId.get(rank.node_id);
    if (!inventory) return null;
    const index = /^cuda:(\d+)$/.exec(rank.device)?.[1];
    if (index === undefined) return inventory.memory_bytes || null;
    return inventory.accelerators.find((device) => device.index === Number(index))?.memory_bytes ?? null;
  };
}
