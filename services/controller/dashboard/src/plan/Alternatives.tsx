import type { PlanView } from "../api/types";
import { bytes, DASH, duration } from "../ui/format";
import { Panel } from "../ui/parts";

interface Row {
  title: string;
  micro_batch: number;
  peak_bytes: number | null;
  step_time_s: number | null;
  fits: boolean;
  lost_because: string | null;
}

/** The chosen layout and those that lost, memory and time as bars to one scale each. */
export function Alternatives({ plan }: { plan: PlanView }) {
  const rows: Row[] = [...chosen(plan), ...plan.alternatives];
  // One layout that needs ten times the limit must not make all others a hair.
  const most = Math.min(
    Math.max(...rows.map((row) => row.peak_bytes ?? 0), 1),
    2 * (plan.memory_limit_bytes ?? Number.POSITIVE_INFINITY),
  );
  const slowest = Math.max(...rows.map((row) => row.step_time_s ?? 0), 1e-9);
  return (
    <Panel title="Layouts compared">
      <div className="scroller" tabIndex={0} role="region" aria-label="Layouts">
        <table className="layouts">
          <thead>
            <tr>
              <th scope="col">Layout</th>
              <th scope="col" className="number">
                Micro-batch
              </th>
              <th scope="col">Peak of a rank</th>
              <th scope="col">Step</th>
              <th scope="col">Why not</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row, index) => (
              <tr key={index} className={row.lost_because === null ? "chosen" : ""} data-layout={row.title}>
                <th scope="row">{row.title}</th>
                <td className="number">{row.micro_batch}</td>
                <td>
                  <Figure part={(row.peak_bytes ?? 0) / most} bad={!row.fits} text={bytes(row.peak_bytes)} />
                </td>
                <td>
                  <Figure
                    part={(row.step_time_s ?? 0) / slowest}
                    bad={false}
                    text={row.step_time_s === null ? DASH : duration(row.step_time_s)}
                  />
                </td>
                <td>{row.lost_because ?? (plan.feasible ? "chosen" : "does not fit either")}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function chosen(plan: PlanView): Row[] {
  if (plan.micro_batch === null) return [];
  return [
    {
      title: plan.feasible ? "this plan" : "closest to the limit",
      micro_batch: plan.micro_batch,
      peak_bytes: Math.max(...plan.memory.map((group) => group.peak.total), 0) || null,
      step_time_s: plan.step_time?.total_s ?? null,
      fits: plan.memory.every((group) => group.peak.total <= (plan.memory_limit_bytes ?? Number.POSITIVE_INFINITY)),
      lost_because: null,
    },
  ];
}

function Figure({ part, bad, text }: { part: number; bad: boolean; text: string }) {
  return (
    <span className="figure">
      <span className="track" aria-hidden="true">
        <i className={bad ? "bad" : ""} style={{ width: `${100 * Math.min(part, 1)}%` }} />
      </span>
      {text}
    </span>
  );
}
