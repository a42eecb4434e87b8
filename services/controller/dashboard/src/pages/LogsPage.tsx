import { useMutation } from "@tanstack/react-query";
import { useEffect, useLayoutEffect, useRef, useState } from "react";
import { allLines, isTerminal, type LineFilter, useJob, useLiveLogs } from "../api/queries";
import type { JobView } from "../api/types";
import { Line, RankSelect, StreamSelect } from "../job/Logs";
import { jobHref, replaceQuery } from "../router";
import { download } from "../ui/download";
import { Quiet, StateChip, Trouble } from "../ui/parts";
import { Search } from "../ui/Search";

const LEVELS = ["debug", "info", "warning", "error"];
const AT_END_PX = 24;

/** All that the ranks of a job wrote, as it comes. */
export default function LogsPage({ id, query }: { id: string; query: URLSearchParams }) {
  const { data: job, error } = useJob(id);
  useEffect(() => {
    if (job) document.title = `Log of ${job.name} · Meshloom`;
  }, [job]);
  if (!job) return <div className="page">{error ? <Trouble error={error} /> : <Quiet>Loading…</Quiet>}</div>;
  return <Log job={job} query={query} />;
}

function Log({ job, query }: { job: JobView; query: URLSearchParams }) {
  const rank = query.get("rank");
  const filter: LineFilter = {
    rank: rank === null || !/^\d+$/.test(rank) ? null : Number(rank),
    stream: query.get("stream"),
    level: query.get("level"),
    text: query.get("text") ?? "",
  };
  const { data, error } = useLiveLogs(job, filter);
  const [follows, setFollows] = useState(true);
  const box = useRef<HTMLDivElement>(null);
  const lines = data ?? [];
  const save = useMutation({
    mutationFn: () => allLines(job.id, filter),
    onSuccess: (text) => download(`${job.name}-${job.id}.log`, new Blob([text, "\n"], { type: "text/plain" })),
  });

  useLayoutEffect(() => {
    if (box.current && follows) box.current.scrollTop = box.current.scrollHeight;
  }, [data, follows]);

  function change(name: string, value: string | null): void {
    const next = new URLSearchParams(query);
    if (value) next.set(name, value);
    else next.delete(name);
    replaceQuery(`jobs/${job.id}/logs`, next);
  }

  const filtered = filter.rank !== null || filter.stream !== null || filter.level !== null || filter.text !== "";
  return (
    <div className="page logs">
      <div className="toolbar">
        <h1>
          Log of <a href={jobHref(job.id)}>{job.name}</a>
        </h1>
        <StateChip state={job.state} />
        <RankSelect world={job.world_size} rank={filter.rank} onChange={(value) => change("rank", value === null ? null : String(value))} />
        <StreamSelect stream={filter.stream} onChange={(value) => change("stream", value)} />
        <select aria-label="Level" value={filter.level ?? ""} onChange={(event) => change("level", event.target.value || null)}>
          <option value="">all levels</option>
          {LEVELS.slice(1).map((level) => (
            <option key={level} value={level}>
              {level === "error" ? "errors" : `${level} and worse`}
            </option>
          ))}
        </select>
        <Search text={filter.text} onChange={(value) => change("text", value)} aria-label="Search the log" placeholder="Search" maxLength={200} />
        <label className="check">
          <input type="checkbox" checked={follows} onChange={(event) => setFollows(event.target.checked)} /> Follow
        </label>
        <button type="button" disabled={save.isPending} onClick={() => save.mutate()}>
          Download
        </button>
      </div>
      {save.error ? <Trouble error={save.error} /> : null}
      {!data && error ? <Trouble error={error} /> : null}
      {data && lines.length === 0 ? (
        <Quiet>{filtered ? "No line matches." : isTerminal(job.state) ? "The ranks wrote nothing." : "No lines yet."}</Quiet>
      ) : null}
      <div
        ref={box}
        className="log scroller panel whole"
        tabIndex={0}
        role="log"
        aria-label="Log lines"
        aria-live="off"
        onScroll={({ currentTarget: at }) => {
          const isAtEnd = at.scrollHeight - at.scrollTop - at.clientHeight < AT_END_PX;
          if (!isAtEnd && follows) setFollows(false);
        }}
      >
        {lines.map((line) => (
          <Line key={line.id} line={line} search={filter.text} />
        ))}
      </div>
    </div>
  );
}
