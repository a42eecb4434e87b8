import { useMutation } from "@tanstack/react-query";
import { useState } from "react";
import { post } from "../api/client";
import { refreshAll, useDiagnosis } from "../api/queries";
import type { JobView } from "../api/types";
import { dateTime, words } from "../ui/format";
import { Panel, Quiet, Trouble } from "../ui/parts";

/** The diagnosis of the newest attempt that failed; running ranks are inspected on demand. */
export function Diagnosis({ job }: { job: JobView }) {
  const [asked, setAsked] = useState(false);
  const ask = useMutation({
    mutationFn: () => post(`v1/jobs/${job.id}/diagnose`),
    onSuccess: () => setAsked(true),
    onSettled: refreshAll,
  });
  // A job that failed before its first attempt has no ranks to diagnose; the failure says all.
  const inTrouble = (job.state === "FAILED" && job.attempt > 0) || job.restarts > 0;
  const { data } = useDiagnosis(job, asked || inTrouble);
  const runs = job.state === "RUNNING";
  if (!runs && !inTrouble && !data) return null;
  return (
    <Panel
      title="Diagnosis"
      aside={
        runs ? (
          <button type="button" disabled={ask.isPending} onClick={() => ask.mutate()}>
            Inspect the ranks
          </button>
        ) : null
      }
    >
      {ask.error ? <Trouble error={ask.error} /> : null}
      {data ? (
        <div className="diagnosis" data-verdict={data.verdict}>
          <p className="verdict">
            <b>{data.verdict === "none" ? "no problems detected" : words(data.verdict)}</b>
            {data.rank === null ? null : (
              <>
                {" "}
                · rank {data.rank} on {data.node_id}
              </>
            )}
            <span className="muted">
              {" "}
              · attempt {data.attempt}, {data.live ? "inspected" : "ended"} {dateTime(data.at)}
            </span>
          </p>
          <p>{data.summary}</p>
          <ul>
            {data.evidence.map((line) => (
              <li key={line}>{line}</li>
            ))}
          </ul>
          <p className="advice">{data.advice}</p>
          {data.stacks.map((entry) => (
            <details key={entry.rank}>
              <summary>Python stacks of rank {entry.rank}</summary>
              <pre tabIndex={0}>{entry.text}</pre>
            </details>
          ))}
        </div>
      ) : (
        <Quiet>{asked ? "The agents inspect the ranks…" : "No problems found."}</Quiet>
      )}
    </Panel>
  );
}
