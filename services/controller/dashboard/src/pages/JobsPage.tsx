import { useMutation } from "@tanstack/react-query";
import { useEffect, useRef, useState } from "react";
import { post } from "../api/client";
import { isTerminal, refreshAll, useAnyEvent, useJobs, useSparkline } from "../api/queries";
import type { JobState, JobView } from "../api/types";
import { PAUSABLE, RESUMABLE } from "../job/Actions";
import { compareHref, jobHref, replaceQuery } from "../router";
import { bounds, compact, dateTime, DASH, loss, percent, shortId, perSecond, span, validationLoss, whole } from "../ui/format";
import { Bar, Pager, Quiet, StateChip, toneOf, Trouble } from "../ui/parts";
import { Search } from "../ui/Search";
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

// What the controller can sort by; the heading that it stands under.
const ORDERS: [string, string][] = [
  ["-created", "newest first"],
  ["created", "oldest first"],
  ["-updated", "last changed first"],
  ["updated", "longest unchanged first"],
  ["-priority", "highest priority first"],
  ["priority", "lowest priority first"],
];

export function JobsPage({ query }: { query: URLSearchParams }) {
  const shown = new Set((query.get("show") ?? "").split(",").filter((name) => name !== ""));
  const text = query.get("q") ?? "";
  const cursor = query.get("cursor");
  const states = GROUPS.filter((group) => shown.has(group.name.toLowerCase())).flatMap((group) => group.states);
  const sort = query.get("sort") ?? "-created";
  useAnyEvent();
  const { data, error } = useJobs({ states, text, cursor, sort });
  const [chosen, setChosen] = useState<ReadonlySet<string>>(new Set());
  const filtered = states.length > 0 || text !== "";

  function change(edit: (next: URLSearchParams) => void): void {
    const next = new URLSearchParams(query);
    next.delete("cursor");
    edit(next);
    replaceQuery("jobs", next);
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
        <select
          aria-label="Order"
          value={sort}
          onChange={({ target }) => change((params) => (target.value === "-created" ? params.delete("sort") : params.set("sort", target.value)))}
        >
          {ORDERS.map(([value, title]) => (
            <option key={value} value={value}>
              {title}
            </option>
          ))}
        </select>
        <Search
          text={text}
          onChange={(typed) => change((params) => (typed.trim() ? params.set("q", typed.trim()) : params.delete("q")))}
          placeholder="Name, id, label=value, owner:name"
          aria-label="Filter jobs by text"
        />
      </div>

      {!data && error ? <Trouble error={error} /> : null}
      {!data && !error ? <Quiet>Asking the controller…</Quiet> : null}
      {data && data.items.length === 0 ? filtered || cursor ? <NoMatch /> : <NoJobs /> : null}
      {data && data.items.length > 0 ? (
        <>
          <Bulk jobs={data.items.filter((job) => chosen.has(job.id))} onDone={() => setChosen(new Set())} />
          <JobTable jobs={data.items} chosen={chosen} onChoose={setChosen} />
        </>
      ) : null}

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

/** Orders to all chosen jobs that can take them; each answers for itself. */
function Bulk({ jobs, onDone }: { jobs: JobView[]; onDone: () => void }) {
  const [asks, setAsks] = useState(false);
  const order = useMutation({
    mutationFn: async ({ what, to }: { what: "pause" | "resume" | "cancel"; to: JobView[] }) => {
      const body = what === "resume" ? { from_checkpoint: null } : { checkpoint: "best_effort", grace_s: 60 };
      const done = await Promise.allSettled(to.map((job) => post(`v1/jobs/${job.id}/${what}`, body)));
      const failed = done.flatMap((one, index) => (one.status === "rejected" ? [`${to[index]?.name}: ${one.reason.message}`] : []));
      if (failed.length > 0) throw new Error(failed.join("; "));
    },
    onSuccess: onDone,
    onSettled: () => {
      setAsks(false);
      refreshAll();
    },
  });
  if (jobs.length === 0) return null;
  const able = {
    pause: jobs.filter((job) => PAUSABLE.has(job.state)),
    resume: jobs.filter((job) => RESUMABLE.has(job.state)),
    cancel: jobs.filter((job) => !isTerminal(job.state)),
  };
  const button = (what: keyof typeof able, title: string, act: () => void, className = "") => (
    <button type="button" className={className} disabled={order.isPending || able[what].length === 0} onClick={act}>
      {title} {able[what].length > 0 ? able[what].length : ""}
    </button>
  );
  return (
    <div className="bulk panel" role="group" aria-label="Chosen jobs">
      <b>{jobs.length} chosen</b>
      {button("pause", "Pause", () => order.mutate({ what: "pause", to: able.pause }))}
      {button("resume", "Resume", () => order.mutate({ what: "resume", to: able.resume }))}
      {asks ? (
        button("cancel", "Cancel now", () => order.mutate({ what: "cancel", to: able.cancel }), "danger solid")
      ) : (
        button("cancel", "Cancel", () => setAsks(true), "danger")
      )}
      <a className="button" href={compareHref(jobs.slice(0, 8).map((job) => job.id))}>
        Compare
      </a>
      <button type="button" onClick={onDone}>
        Choose none
      </button>
      {order.error ? (
        <p className="trouble" role="alert">
          {order.error.message}
        </p>
      ) : null}
    </div>
  );
}

interface Choice {
  chosen: ReadonlySet<string>;
  onChoose: (ids: ReadonlySet<string>) => void;
}

function JobTable({ jobs, chosen, onChoose }: { jobs: JobView[] } & Choice) {
  const every = jobs.every((job) => chosen.has(job.id));
  return (
    <div className="scroller panel" tabIndex={0} role="region" aria-label="Jobs">
      <table className="jobs">
        <thead>
          <tr>
            <th scope="col">
              <input
                type="checkbox"
                aria-label="Choose all jobs"
                checked={every}
                onChange={() => onChoose(every ? new Set() : new Set(jobs.map((job) => job.id)))}
              />
            </th>
            <th scope="col">State</th>
            <th scope="col">Job</th>
            <th scope="col" className="wide">Progress</th>
            <th scope="col" className="number">Loss</th>
            <th scope="col"><span className="hidden">Curve of the loss</span></th>
            <th scope="col" className="number">Tokens/s</th>
            <th scope="col" className="number">ETA</th>
            <th scope="col" className="number">Ranks</th>
            <th scope="col" className="number">Age</th>
          </tr>
        </thead>
        <tbody>
          {jobs.map((job) => (
            <JobRow key={job.id} job={job} chosen={chosen} onChoose={onChoose} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function JobRow({ job, chosen, onChoose }: { job: JobView } & Choice) {
  const { step, of } = job.progress;
  const part = of !== null && of > 0 ? step / of : 0;
  const live = job.state === "RUNNING";
  return (
    <tr
      data-job={job.id}
      onClick={(event) => {
        if (!(event.target as Element).closest("a, input, label")) location.hash = jobHref(job.id);
      }}
    >
      <td data-cell="choice">
        <input
          type="checkbox"
          aria-label={`Choose ${job.name}`}
          checked={chosen.has(job.id)}
          onChange={() => {
            const next = new Set(chosen);
            if (!next.delete(job.id)) next.add(job.id);
            onChoose(next);
          }}
        />
      </td>
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
      <td data-cell="curve">
        <Sparkline job={job} />
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

const WIDTH = 96;
const HEIGHT = 24;

/** The loss so far; asked for when the row comes into sight. */
function Sparkline({ job }: { job: JobView }) {
  const box = useRef<HTMLDivElement>(null);
  const [visible, setVisible] = useState(false);
  useEffect(() => {
    if (!box.current) return;
    const observer = new IntersectionObserver(([entry]) => setVisible(entry?.isIntersecting ?? false));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const values = useSparkline(job, visible);
  const known = values.filter((value) => value !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const line = values.flatMap((value, index) =>
    value === null ? [] : [`${((WIDTH * index) / Math.max(1, values.length - 1)).toFixed(1)},${(2 + ((HEIGHT - 4) * (high - value)) / (high - low || 1)).toFixed(1)}`],
  );
  return (
    <div ref={box} className="sparkline">
      {known.length > 1 ? (
        <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`Loss from ${loss(known[0])} to ${loss(known.at(-1))}`}>
          <polyline points={line.join(" ")} />
        </svg>
      ) : null}
    </div>
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
      <p>
        <a className="button primary" href="#/submit">
          Write a spec
        </a>
      </p>
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
