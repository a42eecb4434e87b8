import { useMemo, useState } from "react";
import { serverNow } from "../api/connection";
import { isAtRest, useNodes, useRanks } from "../api/queries";
import type { JobView, NodeView, RankView } from "../api/types";
import { bytes, compact, DASH, dateTime, duration, perSecond, span, whole } from "../ui/format";
import { Bar, Panel, Quiet, Trouble } from "../ui/parts";
import { useNow } from "../ui/time";
import { phaseOf } from "./phases";

const ROWS = 64;

type Order = "rank" | "lag" | "memory" | "step time";
const ORDERS: Order[] = ["rank", "lag", "memory", "step time"];
const BY: Record<Order, (rank: RankView) => number> = {
  rank: (rank) => -rank.rank,
  lag: (rank) => rank.arrival_lag_s ?? -1,
  memory: (rank) => rank.memory_bytes,
  "step time": (rank) => rank.step_time_s ?? -1,
};
// An agent beats each second and more often: three silent ones are worth a word.
const UNHEARD_S = 4;
const UNMOVED_S = 15;
// More workers that read ahead would shorten steps by that share and more.
const NOTABLE_WAIT = 0.1;

/** One row per rank: where each stands, and who is behind. */
export function Ranks({ job }: { job: JobView }) {
  const { data, error } = useRanks(job);
  const { data: nodes } = useNodes();
  const [order, setOrder] = useState<Order>("rank");
  const [first, setFirst] = useState(0);
  const memoryOf = useMemo(() => capacities(nodes?.items ?? []), [nodes]);
  const items = data?.items ?? [];
  const foremost = items.reduce((most, rank) => Math.max(most, rank.step), 0);
  const sorted = order === "rank" ? items : [...items].sort((one, other) => BY[order](other) - BY[order](one));
  const start = first < sorted.length ? first : 0;
  const shown = sorted.slice(start, start + ROWS);
  return (
    <Panel
      title="Ranks"
      aside={
        data && items.length > 0 ? (
          <>
            {items.length} of attempt {data.attempt}
            <select aria-label="Order of the ranks" value={order} onChange={(event) => (setOrder(event.target.value as Order), setFirst(0))}>
              {ORDERS.map((one) => (
                <option key={one} value={one}>
                  by {one === "rank" ? "number" : one}
                </option>
              ))}
            </select>
          </>
        ) : null
      }
    >
      {!data && error ? <Trouble error={error} /> : null}
      {data && items.length === 0 ? (
        <Quiet>{isAtRest(job.state) ? "No rank runs." : "Ranks are listed as soon as their node has started them."}</Quiet>
      ) : null}
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
      {items.length > ROWS ? (
        <div className="pager">
          <button type="button" disabled={start === 0} onClick={() => setFirst(Math.max(0, start - ROWS))}>
            ← Before
          </button>
          <span className="muted">
            {start + 1}–{start + shown.length} of {items.length}
          </span>
          <button type="button" disabled={start + ROWS >= items.length} onClick={() => setFirst(start + ROWS)}>
            Next →
          </button>
        </div>
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

/** How much memory a rank's bar is measured against: its accelerator's, or its node's. */
export function capacities(nodes: NodeView[]): (rank: RankView) => number | null {
  const byId = new Map(nodes.map((node) => [node.id, node.inventory]));
  return (rank) => {
    const inventory = byId.get(rank.node_id);
    if (!inventory) return null;
    const index = /^cuda:(\d+)$/.exec(rank.device)?.[1];
    if (index === undefined) return inventory.memory_bytes || null;
    return inventory.accelerators.find((device) => device.index === Number(index))?.memory_bytes ?? null;
  };
}
