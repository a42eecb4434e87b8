import { useState } from "react";
import { useAnyEvent, useCapacity, useQueue } from "../api/queries";
import type { CapacityView, QueueEntry } from "../api/types";
import { jobHref } from "../router";
import { bounds, clock, DASH, dateTime, shortId, span } from "../ui/format";
import { Panel, Quiet, Stat, StateChip, Trouble } from "../ui/parts";
import { Ago, useNow } from "../ui/time";

// Each row tells its age once a second: thousands of them would leave the tab no time for anything else.
const ROWS_AT_ONCE = 50;

/** Who waits, why, and since when; and what is free. */
export default function QueuePage() {
  useAnyEvent();
  const { data, error } = useQueue();
  const { data: capacity } = useCapacity();
  const [most, setMost] = useState(ROWS_AT_ONCE);
  const items = data?.items ?? [];
  return (
    <div className="page">
      <div className="toolbar">
        <h1>Queue</h1>
        {data ? (
          <p className="summary">
            {items.length === 1 ? "1 job waits" : `${items.length} jobs wait`} for resources
          </p>
        ) : null}
      </div>
      {!data && error ? <Trouble error={error} /> : null}
      {!data && !error ? <Quiet>Loading…</Quiet> : null}
      {capacity ? <Capacity capacity={capacity} /> : null}
      {data && items.length === 0 ? (
        <div className="empty panel">
          <h2>No job waits</h2>
          <p>Jobs that need more slots than are free are listed here, in the order in which they start.</p>
        </div>
      ) : null}
      {items.length > 0 ? (
        <div className="scroller panel" tabIndex={0} role="region" aria-label="Jobs that wait, the next one first">
          <table className="queue">
            <thead>
              <tr>
                <th scope="col" className="number">No.</th>
                <th scope="col">Job</th>
                <th scope="col">Why it waits</th>
                <th scope="col" className="number">Ranks</th>
                <th scope="col" className="number">Priority</th>
                <th scope="col" className="number">Waiting for</th>
                <th scope="col" className="number">Expected start</th>
              </tr>
            </thead>
            <tbody>
              {items.slice(0, most).map((entry) => (
                <Row key={entry.job_id} entry={entry} />
              ))}
            </tbody>
          </table>
        </div>
      ) : null}
      {items.length > most ? (
        <div className="pager">
          <button type="button" onClick={() => setMost(most + ROWS_AT_ONCE)}>
            {items.length - most} more…
          </button>
        </div>
      ) : null}
    </div>
  );
}

function Row({ entry }: { entry: QueueEntry }) {
  return (
    <tr data-job={entry.job_id}>
      <th scope="row" className="number">{entry.position}</th>
      <td>
        <a className="name" href={jobHref(entry.job_id)}>
          {entry.name}
        </a>{" "}
        <StateChip state={entry.state} />
      </td>
      <td className="why-wide">
        {entry.reason}
        {entry.blocked_by.length > 0 ? (
          <div className="why">
            behind{" "}
            {entry.blocked_by.map((id) => (
              <a key={id} href={jobHref(id)} title={id}>
                {shortId(id)}{" "}
              </a>
            ))}
          </div>
        ) : null}
      </td>
      <td className="number" title={bounds(entry.world)}>
        {entry.ranks} <span className="muted">{entry.device}</span>
      </td>
      <td className="number">{entry.priority}</td>
      <td className="number" title={dateTime(entry.waiting_since)}>
        <Ago at={entry.waiting_since} />
      </td>
      <td className="number">{entry.expected_start_at ? <Start at={entry.expected_start_at} /> : DASH}</td>
    </tr>
  );
}

function Start({ at }: { at: string }) {
  const left = (Date.parse(at) - useNow()) / 1_000;
  return (
    <time dateTime={at} title={dateTime(at)}>
      {left > 0 ? `in ${span(left)}` : "now"} <span className="muted">{clock(Date.parse(at))}</span>
    </time>
  );
}

function Capacity({ capacity }: { capacity: CapacityView }) {
  return (
    <Panel title="Free now">
      <dl className="stats padded">
        <Stat label="CPU slots">
          {capacity.cpu_slots_free} of {capacity.cpu_slots}
        </Stat>
        {capacity.accelerators > 0 ? (
          <Stat label="Accelerators">
            {capacity.accelerators_free} of {capacity.accelerators}
          </Stat>
        ) : null}
        <Stat label="Largest job on one node" hint="Jobs that need more are spread over nodes, where their spec allows that">
          {Math.max(capacity.largest_cpu_gang, capacity.largest_cuda_gang)} ranks
        </Stat>
        <Stat label="Nodes">{capacity.nodes.length}</Stat>
      </dl>
    </Panel>
  );
}
