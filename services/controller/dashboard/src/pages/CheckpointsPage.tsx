import { useMutation } from "@tanstack/react-query";
import { useId, useState } from "react";
import { blob, post, remove, token } from "../api/client";
import { refreshAll, useCheckpoints, useJobs, useJobsById } from "../api/queries";
import type { CheckpointView, JobView } from "../api/types";
import { RESUMABLE } from "../job/Actions";
import { jobHref, replaceQuery } from "../router";
import { Dialog } from "../ui/Dialog";
import { download } from "../ui/download";
import { bytes, dateTime, loss, shortId, whole } from "../ui/format";
import { Panel, Quiet, StateChip, Trouble } from "../ui/parts";
import { Ago } from "../ui/time";

const JOBS_AT_FIRST = 10;

/** The checkpoints of a job, or of the newest jobs that have any, and what can be done with them. */
export default function CheckpointsPage({ query }: { query: URLSearchParams }) {
  const wanted = query.get("job");
  const { data, error } = useJobs({ states: [], text: "", cursor: null, sort: "-created" });
  const [only] = useJobsById(wanted ? [wanted] : []);
  const having = (data?.items ?? []).filter((job) => job.latest_checkpoint !== null || job.id === wanted);
  const shown = wanted ? (only?.data ? [only.data] : []) : having.slice(0, JOBS_AT_FIRST);
  const failed = wanted ? (only?.error ?? null) : error;
  return (
    <div className="page">
      <div className="toolbar">
        <h1>Checkpoints</h1>
        <select
          aria-label="Job"
          value={wanted ?? ""}
          onChange={({ target }) => replaceQuery("checkpoints", new URLSearchParams(target.value ? { job: target.value } : {}))}
        >
          <option value="">newest jobs</option>
          {[...having, ...(only?.data && !having.some((job) => job.id === wanted) ? [only.data] : [])].map((job) => (
            <option key={job.id} value={job.id}>
              {job.name} {shortId(job.id)}
            </option>
          ))}
        </select>
      </div>
      {shown.length === 0 && failed ? <Trouble error={failed} /> : null}
      {shown.length === 0 && !failed && !data ? <Quiet>Loading…</Quiet> : null}
      {data && !wanted && shown.length === 0 ? (
        <div className="empty panel">
          <h2>No checkpoint is committed</h2>
          <p>Jobs commit checkpoints as their spec says, when they are paused, and at their end.</p>
        </div>
      ) : null}
      {shown.map((job) => (
        <OfJob key={job.id} job={job} />
      ))}
    </div>
  );
}

function OfJob({ job }: { job: JobView }) {
  const { data, error } = useCheckpoints(job);
  return (
    <Panel
      title={job.name}
      aside={
        <>
          <StateChip state={job.state} />
          <a href={jobHref(job.id)}>{shortId(job.id)}</a>
        </>
      }
    >
      {!data && error ? <Trouble error={error} /> : null}
      {data && data.items.length === 0 ? <Quiet>No checkpoints.</Quiet> : null}
      {data && data.items.length > 0 ? (
        <div className="scroller" tabIndex={0} role="region" aria-label={`Checkpoints of ${job.name}, newest first`}>
          <table className="checkpoints">
            <thead>
              <tr>
                <th scope="col">State</th>
                <th scope="col" className="number">Step</th>
                <th scope="col" className="number">Loss</th>
                <th scope="col" className="number">Size</th>
                <th scope="col" className="number">Ranks</th>
                <th scope="col" className="number">Age</th>
                <th scope="col">Actions</th>
              </tr>
            </thead>
            <tbody>
              {data.items.map((checkpoint) => (
                <Row key={checkpoint.id} job={job} checkpoint={checkpoint} />
              ))}
            </tbody>
          </table>
        </div>
      ) : null}
    </Panel>
  );
}

function Row({ job, checkpoint }: { job: JobView; checkpoint: CheckpointView }) {
  return (
    <tr data-checkpoint={checkpoint.id} className={checkpoint.id === job.latest_checkpoint ? "latest" : ""}>
      <td className="why-wide">
        <StateChip state={checkpoint.state} />
        {checkpoint.id === job.latest_checkpoint ? <span className="tag">latest</span> : null}
        {checkpoint.best ? <span className="tag">best</span> : null}
        {checkpoint.pinned ? <span className="tag">pinned</span> : null}
        <div className="why">
          <code>{checkpoint.id}</code>
        </div>
        {notes(checkpoint).map((note) => (
          <div key={note} className="why">
            {note}
          </div>
        ))}
        {checkpoint.export?.state === "DONE" ? <Exported checkpoint={checkpoint} made={checkpoint.export} /> : null}
      </td>
      <td className="number">{whole(checkpoint.step)}</td>
      <td className="number">{loss(checkpoint.loss)}</td>
      <td className="number">{bytes(checkpoint.bytes)}</td>
      <td className="number">{checkpoint.world_size}</td>
      <td className="number" title={dateTime(checkpoint.committed_at ?? checkpoint.created_at)}>
        <Ago at={checkpoint.committed_at ?? checkpoint.created_at} />
      </td>
      <td>
        <Orders job={job} checkpoint={checkpoint} />
      </td>
    </tr>
  );
}

function notes({ reason, verified_at, corrupt_file, held_by, export: made }: CheckpointView): string[] {
  return [
    reason,
    verified_at && `verified ${dateTime(verified_at)}`,
    corrupt_file && `differs or is missing: ${corrupt_file}`,
    held_by.length > 0 && `kept for ${held_by.map(shortId).join(", ")}, which begin from it`,
    made && made.state !== "DONE" && exporting(made),
  ].filter((note) => typeof note === "string" && note !== "") as string[];
}

function exporting(made: NonNullable<CheckpointView["export"]>): string {
  return made.state === "RUNNING" ? "export is running" : `export failed: ${made.reason ?? "no reason given"}`;
}

/** What an export has made, each file to be downloaded. */
function Exported({ checkpoint, made }: { checkpoint: CheckpointView; made: NonNullable<CheckpointView["export"]> }) {
  return (
    <div className="why">
      exported to {made.folder} ({bytes(made.bytes)}):
      <ul className="files" aria-label={`Files of the export of step ${checkpoint.step}`}>
        {made.files.map((name) => (
          <li key={name}>
            <FileLink path={`v1/checkpoints/${checkpoint.id}/files/${encodeURIComponent(name)}`} name={name} />
          </li>
        ))}
      </ul>
    </div>
  );
}

/** Without a token the browser downloads by itself; a token cannot be put on a link, so the page fetches the file. */
function FileLink({ path, name }: { path: string; name: string }) {
  const fetched = useMutation({ mutationFn: () => blob(path), onSuccess: (content) => download(name, content) });
  return (
    <>
      <a
        href={path}
        download={name}
        onClick={(event) => {
          if (token.get() === null) return;
          event.preventDefault();
          fetched.mutate();
        }}
      >
        {name}
      </a>
      {fetched.isPending ? <span className="muted"> downloading…</span> : null}
      {fetched.error ? (
        <span className="bad" role="alert">
          {" "}
          {fetched.error.message}
        </span>
      ) : null}
    </>
  );
}

type Asked = "clone" | "delete" | null;

function Orders({ job, checkpoint }: { job: JobView; checkpoint: CheckpointView }) {
  const [asked, setAsked] = useState<Asked>(null);
  const path = `v1/checkpoints/${checkpoint.id}`;
  const order = useMutation({
    mutationFn: (what: "verify" | "pin" | "unpin" | "export" | "resume" | "delete") => {
      if (what === "delete") return remove(path);
      if (what === "resume") return post(`v1/jobs/${job.id}/resume`, { from_checkpoint: checkpoint.id });
      return post(`${path}/${what}`);
    },
    onSuccess: () => setAsked(null),
    onSettled: refreshAll,
  });
  if (checkpoint.state !== "COMMITTED" && checkpoint.state !== "CORRUPT") return null;
  const busy = order.isPending;
  const committed = checkpoint.state === "COMMITTED";
  return (
    <div className="row-actions" role="group" aria-label={`Actions on the checkpoint of step ${checkpoint.step}`}>
      <button type="button" disabled={busy} onClick={() => order.mutate("verify")}>
        Verify
      </button>
      {committed ? (
        <>
          <button type="button" disabled={busy} onClick={() => order.mutate(checkpoint.pinned ? "unpin" : "pin")}>
            {checkpoint.pinned ? "Unpin" : "Pin"}
          </button>
          <button type="button" disabled={busy || checkpoint.export?.state === "RUNNING"} onClick={() => order.mutate("export")}>
            Export
          </button>
          {RESUMABLE.has(job.state) ? (
            <button type="button" disabled={busy} title="The job goes on from this step" onClick={() => order.mutate("resume")}>
              Resume from
            </button>
          ) : null}
          <button type="button" title="A new job begins with it" onClick={() => setAsked("clone")}>
            Clone from…
          </button>
        </>
      ) : null}
      <button type="button" className="danger" disabled={busy} onClick={() => setAsked("delete")}>
        Delete…
      </button>
      {order.error && asked === null ? (
        <p className="trouble" role="alert">
          {order.error.message}
        </p>
      ) : null}
      {asked === "clone" ? <CloneDialog job={job} checkpoint={checkpoint} onClose={() => setAsked(null)} /> : null}
      {asked === "delete" ? (
        <Dialog title={`Delete the checkpoint of step ${checkpoint.step}?`} onClose={() => setAsked(null)}>
          <p>
            Its {bytes(checkpoint.bytes)} are removed from the storage. <span className="muted">{checkpoint.id}</span>
          </p>
          {order.error ? <Trouble error={order.error} /> : null}
          <div className="buttons">
            <button type="button" onClick={() => setAsked(null)}>
              Keep it
            </button>
            <button type="button" className="danger solid" disabled={busy} onClick={() => order.mutate("delete")}>
              Delete
            </button>
          </div>
        </Dialog>
      ) : null}
    </div>
  );
}

function CloneDialog({ job, checkpoint, onClose }: { job: JobView; checkpoint: CheckpointView; onClose: () => void }) {
  const [name, setName] = useState(job.name);
  const [steps, setSteps] = useState("");
  const [first, second] = [useId(), useId()];
  const clone = useMutation({
    mutationFn: () => {
      const overrides = { ...(name !== job.name ? { name } : {}), ...(steps ? { train: { steps: Number(steps) } } : {}) };
      return post<JobView>(`v1/jobs/${job.id}/clone`, { from_checkpoint: checkpoint.id, overrides });
    },
    onSuccess: (made) => {
      location.hash = jobHref(made.id);
    },
  });
  return (
    <Dialog title={`Clone ${job.name} from step ${checkpoint.step}`} onClose={onClose}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          clone.mutate();
        }}
      >
        <label htmlFor={first}>Name</label>
        <input id={first} value={name} maxLength={63} onChange={(event) => setName(event.target.value)} />
        <label htmlFor={second}>
          Steps <span className="muted">(empty: as before)</span>
        </label>
        <input id={second} type="number" min={1} value={steps} onChange={(event) => setSteps(event.target.value)} />
        {clone.error ? <Trouble error={clone.error} /> : null}
        <div className="buttons">
          <button type="button" onClick={onClose}>
            Close
          </button>
          <button type="submit" className="primary" disabled={clone.isPending || !name}>
            Clone job
          </button>
        </div>
      </form>
    </Dialog>
  );
}
