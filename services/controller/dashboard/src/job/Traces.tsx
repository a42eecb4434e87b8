import { useTraces } from "../api/queries";
import type { JobView, TraceView } from "../api/types";
import { bytes, dateTime } from "../ui/format";
import { Panel, StateChip } from "../ui/parts";
import { Ago } from "../ui/time";

/** What ranks recorded of their steps; few jobs have any, so there is no panel without. */
export function Traces({ job }: { job: JobView }) {
  const { data } = useTraces(job);
  const items = data?.items ?? [];
  if (items.length === 0) return null;
  return (
    <Panel title="Traces" aside={items.length}>
      <div className="scroller tall" tabIndex={0} role="region" aria-label="Traces, newest first">
        <table>
          <thead>
            <tr>
              <th scope="col">State</th>
              <th scope="col">Steps</th>
              <th scope="col" className="number">Ranks</th>
              <th scope="col" className="number">Size</th>
              <th scope="col" className="number">Age</th>
            </tr>
          </thead>
          <tbody>
            {items.map((trace) => (
              <tr key={trace.id} title={trace.id} data-trace={trace.id}>
                <td className="why-wide">
                  <StateChip state={trace.state} />
                  {trace.reason ? <div className="why">{trace.reason}</div> : null}
                  {trace.files.map((file) => (
                    <div key={file.rank} className="why">
                      rank {file.rank} on {file.node_id}: <code>{file.path}</code>
                    </div>
                  ))}
                </td>
                <td>{steps(trace)}</td>
                <td className="number">{trace.ranks.length}</td>
                <td className="number">{bytes(trace.bytes)}</td>
                <td className="number" title={dateTime(trace.created_at)}>
                  <Ago at={trace.created_at} />
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

/** Those of the first file, for ranks begin a step apart at most; before there is one, how many. */
function steps(trace: TraceView): string {
  const file = trace.files[0];
  if (!file) return `${trace.steps} of them`;
  return file.first_step === file.last_step ? `${file.first_step}` : `${file.first_step}–${file.last_step}`;
}
