import { memo, useLayoutEffect, useRef, useState } from "react";
import { useLogs } from "../api/queries";
import type { JobView, LogView } from "../api/types";
import { clock } from "../ui/format";
import { Panel, Quiet, Trouble } from "../ui/parts";

const RANKS_OFFERED = 1_024;

/** The last lines that the ranks wrote. Follows the end unless one has scrolled up. */
export function Logs({ job }: { job: JobView }) {
  const [rank, setRank] = useState<number | null>(null);
  const [stream, setStream] = useState<string | null>(null);
  const { data, error } = useLogs(job, rank, stream);
  const box = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const world = job.world_size;
  const lines = data ?? [];

  useLayoutEffect(() => {
    if (box.current && follows.current) box.current.scrollTop = box.current.scrollHeight;
  }, [data]);

  return (
    <Panel
      title="Log"
      aside={
        <>
          <select
            aria-label="Rank"
            value={rank ?? ""}
            onChange={(event) => setRank(event.target.value === "" ? null : Number(event.target.value))}
          >
            <option value="">all ranks</option>
            {Array.from({ length: Math.min(world, RANKS_OFFERED) }, (_, number) => (
              <option key={number} value={number}>
                rank {number}
              </option>
            ))}
          </select>
          <select aria-label="Stream" value={stream ?? ""} onChange={(event) => setStream(event.target.value || null)}>
            <option value="">both streams</option>
            <option value="stdout">stdout</option>
            <option value="stderr">stderr</option>
          </select>
        </>
      }
    >
      {!data && error ? <Trouble error={error} /> : null}
      {data && lines.length === 0 ? <Quiet>No line{rank !== null || stream ? " matches" : " yet"}.</Quiet> : null}
      {lines.length > 0 ? (
        <div
          ref={box}
          className="log scroller tall"
          tabIndex={0}
          role="region"
          aria-label="Last log lines"
          onScroll={({ currentTarget: at }) => {
            follows.current = at.scrollHeight - at.scrollTop - at.clientHeight < 24;
          }}
        >
          {lines.map((line) => (
            <Line key={line.id} line={line} />
          ))}
        </div>
      ) : null}
    </Panel>
  );
}

const Line = memo(function Line({ line }: { line: LogView }) {
  return (
    <div className={`line ${line.level}`}>
      <span className="at">{clock(line.time_ms)}</span>
      <span className="who" title={`rank ${line.rank}, attempt ${line.fence}, ${line.stream}`}>
        {line.rank}
        {line.stream === "stderr" ? "!" : " "}
      </span>
      <span className="text">{line.text}</span>
    </div>
  );
});
