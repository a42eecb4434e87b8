import { useCheckpoints } from "../api/queries";
import type { JobView } from "../api/types";
import { checkpointsHref } from "../router";
import { bytes, dateTime, loss, whole } from "../ui/format";
import { Panel, Quiet, StateChip, Trouble } from "../ui/parts";
import { Ago } from "../ui/time";

export function Checkpoints({ job }: { job: JobView }) {
  const { data, error } = useCheckpoints(job);
  const items = data?.items ?? [];
  return (
    <Panel title="Checkpoints" aside={
        items.length > 0 ? (
          <>
            {items.length}{" "}
            <a className="button" href={checkpointsHref(job.id)}>
              Manage
            </a>
          </>
        ) : null
      }>
      {!data && error ? <Trouble error={error} /> : null}
      {data && items.length === 0 ? <Quiet>No checkpoints yet.</Quiet> : null}
      {items.length > 0 ? (
        <div className="scroller tall" tabIndex={0} role="region" aria-label="Checkpoints, newest first">
          <table>
            <thead>
              <tr>
                <th scope="col">State</th>
                <th scope="col" className="number">Step</th>
                <th scope="col" className="number">Loss</th>
                <th scope="col" className="number">Size</th>
                <th scope="col" className="number">World</th>
                <th scope="col" className="number">Attempt</th>
                <th scope="col" className="number">Age</th>
              </tr>
            </thead>
            <tbody>
              {items.map((checkpoint) => {
                const latest = checkpoint.id === job.latest_checkpoint;
                return (
                  <tr key={checkpoint.id} className={latest ? "latest" : ""} title={checkpoint.id} data-checkpoint={checkpoint.id}>
                    <td className="why-wide">
                      <StateChip state={checkpoint.state} />
                      {latest ? <span className="tag">latest</span> : null}
                      {checkpoint.state === "WRITING" || checkpoint.state === "SEALED" ? (
                        <span className="muted">
                          {" "}
                          {checkpoint.votes} of {checkpoint.world_size} votes
                        </span>
                      ) : null}
                      {checkpoint.reason ? <div className="why">{checkpoint.reason}</div> : null}
                    </td>
                    <td className="number">{whole(checkpoint.step)}</td>
                    <td className="number">{loss(checkpoint.loss)}</td>
                    <td className="number">{bytes(checkpoint.bytes)}</td>
                    <td className="number">{checkpoint.world_size}</td>
                    <td className="number">{checkpoint.fence}</td>
                    <td className="number" title={dateTime(checkpoint.committed_at ?? checkpoint.created_at)}>
                      <Ago at={checkpoint.committed_at ?? checkpoint.created_at} />
                    </td>
                  </tr>
                );
              })}
            </tbody>
          </table>
        </div>
      ) : null}
    </Panel>
  );
}
