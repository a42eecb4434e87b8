import { isTerminal, useAttempts } from "../api/queries";
import type { AttemptView, JobView } from "../api/types";
import { axes, DASH, dateTime, duration, whole, words } from "../ui/format";
import { Panel, Quiet, Trouble } from "../ui/parts";
import { Elapsed } from "../ui/time";

export function Attempts({ job }: { job: JobView }) {
  const { data, error } = useAttempts(job);
  const newestFirst = [...(data?.items ?? [])].reverse();
  return (
    <Panel title="Attempts" aside={newestFirst.length > 0 ? newestFirst.length : null}>
      {!data && error ? <Trouble error={error} /> : null}
      {data && newestFirst.length === 0 ? (
        <Quiet>
          {isTerminal(job.state) ? "The job ended before its first attempt." : "No attempts yet: the job waits for resources."}
        </Quiet>
      ) : null}
      {newestFirst.length > 0 ? (
        <div className="scroller tall" tabIndex={0} role="region" aria-label="Attempts, newest first">
          <table>
            <thead>
              <tr>
                <th scope="col" className="number">No.</th>
                <th scope="col">End</th>
                <th scope="col" className="number">Steps</th>
                <th scope="col" className="number">Lost</th>
                <th scope="col" className="number">World</th>
                <th scope="col" className="number" title="From the start of the attempt to its first step">
                  To 1st step
                </th>
                <th scope="col" className="number">Took</th>
              </tr>
            </thead>
            <tbody>
              {newestFirst.map((attempt) => (
                <tr key={attempt.fence} title={`on ${attempt.node_ids.join(", ")}`}>
                  <th scope="row" className="number">{attempt.fence}</th>
                  <td className="why-wide">
                    {end(attempt)}
                    {attempt.resumed_from ? <div className="why">from {attempt.resumed_from.replace(/^.*-s0*(\d+)-a0*(\d+)$/, "step $1 of attempt $2")}</div> : null}
                    {attempt.failure?.error && attempt.failure.error !== job.failure?.error ? <div className="why">{attempt.failure.error}</div> : null}
                  </td>
                  <td className="number">{steps(attempt)}</td>
                  <td className="number">{attempt.lost_steps === null ? DASH : whole(attempt.lost_steps)}</td>
                  <td className="number" title={attempt.mesh ? axes(attempt.mesh) : undefined}>{attempt.world_size}</td>
                  <td className="number">
                    {attempt.first_step_at
                      ? duration((Date.parse(attempt.first_step_at) - Date.parse(attempt.started_at)) / 1_000)
                      : DASH}
                  </td>
                  <td className="number" title={dateTime(attempt.started_at)}>
                    <Elapsed from={attempt.started_at} to={attempt.ended_at} />
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : null}
    </Panel>
  );
}

function end(attempt: AttemptView): string {
  if (attempt.exit_reason) return words(attempt.exit_reason);
  return attempt.ended_at ? "ended" : "running";
}

function steps(attempt: AttemptView): string {
  if (attempt.first_step === null) return DASH;
  return `${whole(attempt.first_step)}–${attempt.last_step === null ? "" : whole(attempt.last_step)}`;
}
