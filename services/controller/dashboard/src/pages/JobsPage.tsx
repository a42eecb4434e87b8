import { useEffect, useState } from "react";
import { isTerminal, useJobs } from "../api/queries";
import type { JobState, JobView } from "../api/types";
import { jobHref, replaceJobsQuery } from "../router";
import { bounds, compact, dateTime, DASH, loss, percent, shortId, perSecond, span, validationLoss, whole } from "../ui/format";
import { Bar, Pager, Quiet, StateChip, toneOf, Trouble } from "../ui/parts";
import { Ago } from "../ui/time";

// What people look for, each with the states that it means.
const GROUPS: { name: string; states: JobState[] }[] = [
  { name: "Running", states: ["RUNNING"] },
  { name: "Waiting", states: ["QUEUED", "PLACING", "STARTING", "RESTARTING"] },
  { name: "Stopping", states: ["PAUSING", "CANCELLING"] },
  { name: "Paused", states: ["PAUSED"] },
  { name: "Succeeded", states: ["SUCCEEDED"] },
  { name: "Failed", states: ["FAILED"] },
  { name: "Cancelled", states: ["CANCELLED"] },
];

export function JobsPage({ query }: { query: URLSearchParams }) {
  const shown = new Set((query.get("show") ?? "").split(",").filter((name) => name !== ""));
  const text = query.get("q") ?? "";
  const cursor = query.get("cursor");
  const states = GROUPS.filter((group) => shown.has(group.name.toLowerCase())).flatMap((group) => group.states);
  const { data, error } = useJobs({ states, text, cursor });
  const filtered = states.length > 0 || text !== "";

  function change(edit: (next: URLSearchParams) => void): void {
    const next = new URLSearchParams(query);
    next.delete("cursor");
    edit(next);
    replaceJobsQuery(next);
  }

  function toggle(name: string): void {
    const next = new Set(shown);
    if (!next.delete(name)) next.add(name);
    change((params) => (next.size > 0 ? params.set("show", [...next].join(",")) : params.delete("show")));
  }

  return (
    <div className="page">
      <div className="toolbar">
        <h1>Jobs</h1>
        <div className="filters" role="group" aria-label="Filter by state">
          {GROUPS.map(({ name }) => (
            <button
              key={name}
              type="button"
              className="filter"
              aria-pressed={shown.has(name.toLowerCase())}
              onClick={() => toggle(name.toLowerCase())}
            >
              {name}
            </button>
          ))}
        </div>
        <Search text={text} onChange={(q) => change((params) => (q ? params.set("q", q) : params.delete("q")))} />
      </div>

      {!data && error ? <Trouble error={error} /> : null}
      {!data && !error ? <Quiet>Asking the controller…</Quiet> : null}
      {data && data.items.length === 0 ? filtered || cursor ? <NoMatch /> : <NoJobs /> : null}
      {data && data.items.length > 0 ? <JobTable jobs={data.items} /> : null}

      {data ? (
        <Pager
          paged={Boolean(cursor)}
          next={data.next_cursor}
          onTurn={(turned) => change((params) => (turned ? params.set("cursor", turned) : undefined))}
        />
      ) : null}
    </div>
  );
}

function Search({ text, onChange }: { text: string; onChange: (text: string) => void }) {
  const [typed, setTyped] = useState(text);
  useEffect(() => {
    if (typed === text) return;
    const timer = setTimeout(() => onChange(typed.trim()), 200);
    return () => clearTimeout(timer);
  }, [typed, text, onChange]);
  return (
    <input
      type="search"
      className="search"
      placeholder="Name, id or label=value"
      aria-label="Filter jobs by text"
      value={typed}
      onChange={(event) => setTyped(event.target.value)}
    />
  );
}

function JobTable({ jobs }: { jobs: JobView[] }) {
  return (
    <div className="scroller panel" tabIndex={0} role="region" aria-label="Jobs, newest first">
      <table className="jobs">
        <thead>
          <tr>
            <th scope="col">State</th>
            <th scope="col">Job</th>
            <th scope="col" className="wide">Progress</th>
            <th scope="col" className="number">Loss</th>
            <th scope="col" className="number">Tokens/s</th>
            <th scope="col" className="number">ETA</th>
            <th scope="col" className="number">Ranks</th>
            <th scope="col" className="number">Age</th>
          </tr>
        </thead>
        <tbody>
          {jobs.map((job) => (
            <JobRow key={job.id} job={job} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function JobRow({ job }: { job: JobView }) {
  const { step, of } = job.progress;
  const part = of !== null && of > 0 ? step / of : 0;
  const live = job.state === "RUNNING";
  return (
    <tr
      data-job={job.id}
      onClick={(event) => {
        if (!(event.target as Element).closest("a")) location.hash = jobHref(job.id);
      }}
    >
      <td data-cell="state">
        <StateChip state={job.state} />
      </td>
      <td data-cell="job">
        <a className="name" href={jobHref(job.id)}>
          {job.name}
        </a>
        <span className="id" title={job.id}>
          {shortId(job.id)}
        </span>
        {Object.entries(job.labels).map(([key, value]) => (
          <span key={key} className="label">
            {key}={value}
          </span>
        ))}
        {why(job) ? (
          <div className="why" title={why(job)}>
            {why(job)}
          </div>
        ) : null}
      </td>
      <td data-cell="progress" className="wide">
        <div className="progress">
          <Bar part={part} label={`Progress of ${job.name}`} tone={toneOf(job.state)} />
          <span className="figures">
            {whole(step)} / {of === null ? "?" : whole(of)}
            {of === null ? null : <span className="muted"> {percent(part)}</span>}
          </span>
        </div>
      </td>
      <td data-cell="loss" data-label="loss" className="number">
        {loss(job.progress.loss)}
        {job.evaluation ? (
          <div className="under" title={`validation after step ${job.evaluation.step}`}>
            val {validationLoss(job.evaluation.loss)}
          </div>
        ) : null}
      </td>
      <td data-cell="tokens" data-label="tok/s" className="number">
        <span title={perSecond(job.progress.throughput_unit)}>{compact(job.progress.tokens_per_s)}</span>
      </td>
      <td data-cell="eta" data-label="left" className="number">
        {live ? span(job.progress.eta_s) : DASH}
      </td>
      <td data-cell="ranks" data-label="ranks" className="number" title={bounds(job.world)}>
        {job.world_size}
      </td>
      <td data-cell="age" data-label="age" className="number" title={dateTime(job.created_at)}>
        <Ago at={job.created_at} />
      </td>
    </tr>
  );
}

function why(job: JobView): string {
  if (job.state === "RUNNING" || job.state === "SUCCEEDED") return "";
  if (isTerminal(job.state)) return job.failure?.error ?? job.reason ?? "";
  return job.reason ?? "";
}

function NoJobs() {
  return (
    <div className="empty panel">
      <h2>No job yet</h2>
      <p>Submit one here or from a terminal:</p>
      <pre>
        <code>meshloom submit examples/stdlib-gpt.yaml</code>
      </pre>
      <p className="muted">
        Or over REST: <code>POST {new URL("v1/jobs", document.baseURI).pathname}</code> with a job spec as JSON.
      </p>
    </div>
  );
}

function NoMatch() {
  return (
    <div className="empty panel">
      <h2>No job matches</h2>
      <p>
        <a href="#/jobs">Show all jobs</a>
      </p>
    </div>
  );
}
