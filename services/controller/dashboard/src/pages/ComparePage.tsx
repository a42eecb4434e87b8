import { useMemo, useState } from "react";
import { useJobs, useJobsById } from "../api/queries";
import type { JobView } from "../api/types";
import { MetricCharts, runColor } from "../charts/MetricCharts";
import { jobHref, replaceQuery } from "../router";
import { axes, compact, DASH, duration, loss, perSecond, shortId, span, validationLoss, whole } from "../ui/format";
import { Panel, Quiet, StateChip, Trouble } from "../ui/parts";

const RUNS_AT_MOST = 8;

/** Runs laid over each other, and how their specs differ. */
export default function ComparePage({ query }: { query: URLSearchParams }) {
  const ids = (query.get("jobs") ?? "").split(",").filter((id) => id !== "").slice(0, RUNS_AT_MOST);
  const results = useJobsById(ids);
  const jobs = results.flatMap(({ data }) => (data ? [data] : []));
  const missing = results.flatMap(({ error, data }) => (error && !data ? [error] : []));
  // Progress makes new objects each second, which the charts need not know.
  const shape = jobs.map((job) => `${job.id} ${job.name} ${job.state}`).join("\n");
  const charted = useMemo(() => jobs, [shape]);

  function choose(next: string[]): void {
    replaceQuery("compare", new URLSearchParams(next.length > 0 ? { jobs: next.join(",") } : {}));
  }

  return (
    <div className="page">
      <div className="toolbar">
        <h1>Compare</h1>
        <ul className="runs" aria-label="Runs compared">
          {jobs.map((job) => (
            <li key={job.id}>
              <i aria-hidden="true" style={{ background: `var(${runColor(ids.indexOf(job.id))})` }} />
              <a href={jobHref(job.id)}>{job.name}</a> <span className="muted">{shortId(job.id)}</span>
              <button type="button" className="dismiss" aria-label={`Remove ${job.name}`} onClick={() => choose(ids.filter((id) => id !== job.id))}>
                ×
              </button>
            </li>
          ))}
        </ul>
        {ids.length < RUNS_AT_MOST ? <AddRun chosen={ids} onAdd={(id) => choose([...ids, id])} /> : null}
      </div>
      {missing.map((error, index) => (
        <Trouble key={index} error={error} />
      ))}
      {ids.length === 0 ? (
        <div className="empty panel">
          <h2>No run chosen</h2>
          <p>Add runs above, or select jobs on the jobs page and choose Compare.</p>
        </div>
      ) : null}
      {ids.length > 0 && jobs.length === 0 && missing.length === 0 ? <Quiet>Loading…</Quiet> : null}
      {jobs.length > 0 ? (
        <>
          <Figures jobs={jobs} />
          <MetricCharts jobs={charted} />
          <Specs jobs={jobs} />
        </>
      ) : null}
    </div>
  );
}

function AddRun({ chosen, onAdd }: { chosen: string[]; onAdd: (id: string) => void }) {
  const { data } = useJobs({ states: [], text: "", cursor: null, sort: "-created" });
  const offered = (data?.items ?? []).filter((job) => !chosen.includes(job.id));
  return (
    <select aria-label="Add a run" value="" disabled={offered.length === 0} onChange={(event) => event.target.value && onAdd(event.target.value)}>
      <option value="">Add a run…</option>
      {offered.map((job) => (
        <option key={job.id} value={job.id}>
          {job.name} {shortId(job.id)} · {job.state.toLowerCase()}
        </option>
      ))}
    </select>
  );
}

function Figures({ jobs }: { jobs: JobView[] }) {
  const rows: [string, (job: JobView) => React.ReactNode][] = [
    ["State", (job) => <StateChip state={job.state} />],
    ["Step", (job) => `${whole(job.progress.step)} of ${job.progress.of === null ? "?" : whole(job.progress.of)}`],
    ["Loss", (job) => loss(job.progress.loss)],
    ["Validation loss", (job) => (job.evaluation ? `${validationLoss(job.evaluation.loss)} at step ${job.evaluation.step}` : DASH)],
    ["Throughput", (job) => `${compact(job.progress.tokens_per_s)} ${perSecond(job.progress.throughput_unit).toLowerCase()}`],
    ["Step time", (job) => duration(job.progress.step_time_s)],
    ["Ranks", (job) => job.world_size],
    ["Mesh", (job) => (job.plan ? axes(job.plan.sharding.mesh) : DASH)],
    ["Took", (job) => (job.started_at && job.ended_at ? span((Date.parse(job.ended_at) - Date.parse(job.started_at)) / 1_000) : DASH)],
  ];
  return (
    <Panel title="Results">
      <Side jobs={jobs} label="Results, side by side">
        {rows.map(([title, cell]) => (
          <tr key={title}>
            <th scope="row">{title}</th>
            {jobs.map((job) => (
              <td key={job.id}>{cell(job)}</td>
            ))}
          </tr>
        ))}
      </Side>
    </Panel>
  );
}

function Specs({ jobs }: { jobs: JobView[] }) {
  const [all, setAll] = useState(false);
  const flat = jobs.map((job) => new Map(leaves("", inWords(job.spec, jobs))));
  const pointers = [...new Set(flat.flatMap((leaf) => [...leaf.keys()]))].sort();
  const differs = (pointer: string) => new Set(flat.map((leaf) => leaf.get(pointer))).size > 1;
  const shown = all ? pointers : pointers.filter(differs);
  return (
    <Panel
      title="Specs"
      aside={
        <label>
          <input type="checkbox" checked={all} onChange={(event) => setAll(event.target.checked)} /> equal fields too
        </label>
      }
    >
      {shown.length === 0 ? <Quiet>{jobs.length > 1 ? "The specs are equal." : "One run has nothing to differ from."}</Quiet> : null}
      {shown.length > 0 ? (
        <Side jobs={jobs} label="Specs, side by side">
          {shown.map((pointer) => (
            <tr key={pointer} className={differs(pointer) ? "differs" : ""} data-pointer={pointer}>
              <th scope="row">
                <code>{pointer}</code>
              </th>
              {flat.map((leaf, index) => (
                <td key={index}>{leaf.has(pointer) ? <code>{leaf.get(pointer)}</code> : <span className="muted">not set</span>}</td>
              ))}
            </tr>
          ))}
        </Side>
      ) : null}
    </Panel>
  );
}

function Side({ jobs, label, children }: { jobs: JobView[]; label: string; children: React.ReactNode }) {
  return (
    <div className="scroller" tabIndex={0} role="region" aria-label={label}>
      <table className="side">
        <thead>
          <tr>
            <th scope="col">
              <span className="hidden">Field</span>
            </th>
            {jobs.map((job, index) => (
              <th key={job.id} scope="col">
                <i aria-hidden="true" style={{ background: `var(${runColor(index)})` }} /> {job.name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}

/** Where one run says in a word what another says in fields, they differ in the whole, not in each field. */
function inWords(spec: JobView["spec"], jobs: JobView[]): object {
  const words = (["plan", "mesh"] as const).filter((field) => jobs.some((job) => typeof job.spec[field] === "string"));
  const told = words.map((field) => [field, typeof spec[field] === "string" ? spec[field] : WRITTEN_OUT[field]]);
  return { ...spec, ...Object.fromEntries(told) };
}

const WRITTEN_OUT = { plan: "a layout of its own", mesh: "sizes of its own" };

/** Every value of a spec that holds no others, by its JSON pointer. */
function leaves(pointer: string, value: unknown): [string, string][] {
  if (typeof value !== "object" || value === null) return [[pointer, JSON.stringify(value) ?? ""]];
  const inner = Object.entries(value);
  if (inner.length === 0) return [[pointer, Array.isArray(value) ? "[]" : "{}"]];
  return inner.flatMap(([key, one]) => leaves(`${pointer}/${key.replaceAll("~", "~0").replaceAll("/", "~1")}`, one));
}
