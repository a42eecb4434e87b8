import type { ExitReason, FailureView } from "../api/types";
import { words } from "../ui/format";

/** The first rank to fail, and its own words. */
export function Failure({ failure, exitReason }: { failure: FailureView; exitReason: ExitReason | null }) {
  return (
    <section className="panel failure" aria-label="Failure">
      <h2>
        {failure.rank === null ? "Failed" : `Rank ${failure.rank} failed first`}
        {failure.node_id ? ` on ${failure.node_id}` : ""}
        {exitReason ? <span className="muted"> · {words(exitReason)}</span> : null}
      </h2>
      <p className="facts">{facts(failure).join(" · ")}</p>
      {failure.error ? <p className="error">{failure.error}</p> : null}
      {failure.traceback ? (
        <pre tabIndex={0} aria-label="Traceback">
          {failure.traceback}
        </pre>
      ) : null}
    </section>
  );
}

function facts(failure: FailureView): string[] {
  const told: string[] = [];
  if (failure.step !== null) told.push(`at step ${failure.step}`);
  if (failure.phase !== null) told.push(`in ${words(failure.phase)}`);
  if (failure.exit_code !== null) told.push(`exit code ${failure.exit_code}`);
  if (failure.signal !== null) told.push(`signal ${failure.signal}`);
  return told;
}
