import type { ExitReason, FailureView } from "../api/types";
import { words } from "../ui/format";
import { type Frame, framesOf, ownFrame } from "./traceback";

/** The first rank to fail: its error, the user's own last frame, and the rest folded away. */
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
      {failure.traceback ? <Traceback text={failure.traceback} /> : null}
    </section>
  );
}

/** The user's last frame in the open; the whole text behind one click. */
export function Traceback({ text }: { text: string }) {
  const frames = framesOf(text);
  const own = ownFrame(frames);
  const others = frames.filter((frame) => frame.foreign).length;
  return (
    <>
      {own ? <Place frame={own} /> : null}
      <details className="traceback" open={own === null}>
        <summary>
          Whole traceback
          {frames.length > 0 ? (
            <span className="muted">
              {" "}
              · {frames.length} {frames.length === 1 ? "frame" : "frames"}, {others} of Meshloom and libraries
            </span>
          ) : null}
        </summary>
        <pre tabIndex={0} role="region" aria-label="Traceback">
          {text}
        </pre>
      </details>
    </>
  );
}

function Place({ frame }: { frame: Frame }) {
  return (
    <div className="place" data-frame={`${frame.file}:${frame.line}`}>
      <p>
        in your code: <b>{frame.file}:{frame.line}</b>
        {frame.name ? <span className="muted"> in {frame.name}</span> : null}
      </p>
      {frame.code ? <code>{frame.code}</code> : null}
    </div>
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
