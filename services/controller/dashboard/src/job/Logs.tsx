import { memo, type ReactNode, useLayoutEffect, useRef, useState } from "react";
import { useLogs } from "../api/queries";
import type { JobView, LogView } from "../api/types";
import { logsHref } from "../router";
import { clock } from "../ui/format";
import { Panel, Quiet, Trouble } from "../ui/parts";

const RANKS_OFFERED = 4_096;

/** The last lines that the ranks wrote. Follows the end unless one has scrolled up. */
export function Logs({ job }: { job: JobView }) {
  const [rank, setRank] = useState<number | null>(null);
  const [stream, setStream] = useState<string | null>(null);
  const { data, error } = useLogs(job, { rank, stream, level: null, text: "" });
  const box = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const lines = data ?? [];

  useLayoutEffect(() => {
    if (box.current && follows.current) box.current.scrollTop = box.current.scrollHeight;
  }, [data]);

  return (
    <Panel
      title="Log"
      aside={
        <>
          <RankSelect world={job.world_size} rank={rank} onChange={setRank} />
          <StreamSelect stream={stream} onChange={setStream} />
          <a className="button" href={logsHref(job.id)}>
            Whole log
          </a>
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

export function RankSelect({ world, rank, onChange }: { world: number; rank: number | null; onChange: (rank: number | null) => void }) {
  return (
    <select aria-label="Rank" value={rank ?? ""} onChange={(event) => onChange(event.target.value === "" ? null : Number(event.target.value))}>
      <option value="">all ranks</option>
      {Array.from({ length: Math.min(world, RANKS_OFFERED) }, (_, number) => (
        <option key={number} value={number}>
          rank {number}
        </option>
      ))}
    </select>
  );
}

export function StreamSelect({ stream, onChange }: { stream: string | null; onChange: (stream: string | null) => void }) {
  return (
    <select aria-label="Stream" value={stream ?? ""} onChange={(event) => onChange(event.target.value || null)}>
      <option value="">both streams</option>
      <option value="stdout">stdout</option>
      <option value="stderr">stderr</option>
    </select>
  );
}

/** A line; what was searched for is marked in it. */
export const Line = memo(function Line({ line, search = "" }: { line: LogView; search?: string }) {
  return (
    <div className={`line ${line.level}`}>
      <span className="at">{clock(line.time_ms)}</span>
      <span className="who" title={`rank ${line.rank}, attempt ${line.fence}, ${line.stream}`}>
        {line.rank}
        {line.stream === "stderr" ? "!" : " "}
      </span>
      <span className="text">{search ? marked(line.text, search) : line.text}</span>
    </div>
  );
});

function marked(text: string, search: string): ReactNode[] {
  const parts: ReactNode[] = [];
  const [lower, wanted] = [text.toLowerCase(), search.toLowerCase()];
  let from = 0;
  for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, from)) {
    parts.push(text.slice(from, at), <mark key={at}>{text.slice(at, at + wanted.length)}</mark>);
    from = at + wanted.length;
  }
  return [...parts, text.slice(from)];
}
