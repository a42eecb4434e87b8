import { useEffect, useMemo } from "react";
import { ProblemError } from "../api/client";
import { refreshAll, useJob } from "../api/queries";
import type { EstimateView, JobView } from "../api/types";
import { MetricCharts } from "../charts/MetricCharts";
import { Actions } from "../job/Actions";
import { Attempts } from "../job/Attempts";
import { Checkpoints } from "../job/Checkpoints";
import { Diagnosis } from "../job/Diagnosis";
import { Events } from "../job/Events";
import { Failure } from "../job/Failure";
import { Logs } from "../job/Logs";
import { RankGrid } from "../job/RankGrid";
import { Ranks } from "../job/Ranks";
import { Traces } from "../job/Traces";
import { checkpointsHref, compareHref, logsHref, planHref, submitHref } from "../router";
import { axes, bytes, compact, DASH, dateTime, duration, loss, percent, perSecond, span, validationLoss, whole, words } from "../ui/format";
import { Bar, Quiet, Stat, StateChip, toneOf, Trouble } from "../ui/parts";
import { Ago, Elapsed } from "../ui/time";

export default function JobPage({ id }: { id: string }) {
  const { data: job, error } = useJob(id);
  useEffect(() => {
    document.title = job ? `${job.name} ${job.state.toLowerCase()} · Meshloom` : "Job · Meshloom";
  }, [job]);
  const state = job?.state;
  useEffect(() => {
    if (state) refreshAll();
  }, [state]);

  if (!job) {
    const missing = error instanceof ProblemError && error.status === 404;
    return (
      <div className="page">
        {error ? <Trouble error={error} /> : <Quiet>Asking the controller…</Quiet>}
        {missing ? <a href="#/jobs">All jobs</a> : null}
      </div>
    );
  }
  const gone = error instanceof ProblemError && error.status === 404;
  return (
    <div className="page job">
      {gone ? <p className="trouble">This job was deleted. This page shows its last state.</p> : null}
      {job.telemetry_away ? (
        <p className="trouble">The Redis for telemetry does not answer, or the agents write to another one. The step is that of the job's record, and no curve is shown.</p>
      ) : null}
      <Head job={job} />
      {job.failure ? <Failure failure={job.failure} exitReason={job.exit_reason} /> : null}
      <Metrics job={job} />
      <RankGrid job={job} />
      <Ranks job={job} />
      <Diagnosis job={job} />
      <div className="columns">
        <Checkpoints job={job} />
        <Attempts job={job} />
        <Traces job={job} />
        <Events job={job} />
        <Logs job={job} />
      </div>
      <SpecPanel job={job} />
    </div>
  );
}

function Metrics({ job }: { job: JobView }) {
  const { id, name, state } = job;
  // Progress makes a new object each second, which the charts need not know.
  const jobs = useMemo(() => [job], [id, name, state]);
  return <MetricCharts jobs={jobs} />;
}

function Head({ job }: { job: JobView }) {
  const { step, of, eta_s } = job.progress;
  const part = of !== null && of > 0 ? step / of : 0;
  return (
    <section className="panel head" aria-label="Job">
      <div className="title">
        <h1>{job.name}</h1>
        <StateChip state={job.state} />
        {job.exit_reason && words(job.exit_reason) !== job.state.toLowerCase() ? (
          <span className="exit">{words(job.exit_reason)}</span>
        ) : null}
        <code className="id">{job.id}</code>
        <Actions job={job} />
        <nav className="links" aria-label="More on this job">
          <a href={logsHref(job.id)}>Log</a>
          <a href={compareHref([job.id])}>Compare</a>
          <a href={checkpointsHref(job.id)}>Checkpoints</a>
          <a href={submitHref(job.id)}>Copy the spec</a>
        </nav>
      </div>
      <p className="reason">{reason(job)}</p>
      <div className="bigbar">
        <Bar part={part} label="Progress" tone={toneOf(job.state)} />
        <div className="figures">
          <span>
            step <b>{whole(step)}</b>
            {of === null ? null : ` of ${whole(of)}`}
          </span>
          <span>{of === null ? null : percent(part)}</span>
          <span className="eta">
            {job.state === "RUNNING" && eta_s !== null ? (
              <>
                about <b>{span(eta_s)}</b> left
              </>
            ) : null}
          </span>
        </div>
      </div>
      <dl className="stats">
        <Stat label="Loss" hint={`Mean over the global batch${job.progress.loss_unit === "nats" ? ", nats a token" : ""}`}>
          <b>{loss(job.progress.loss)}</b>
        </Stat>
        <Stat label="Validation" hint={job.evaluation ? `after step ${job.evaluation.step}` : "no validation pass yet"}>
          {job.evaluation ? <b>{validationLoss(job.evaluation.loss)}</b> : DASH}
        </Stat>
        <Stat label={perSecond(job.progress.throughput_unit)}>{compact(job.progress.tokens_per_s)}</Stat>
        {job.progress.mfu !== null ? (
          <Stat label="MFU" hint="Operations that the model needs, of those that its devices could have made">
            {percent(job.progress.mfu)}
          </Stat>
        ) : null}
        <Stat label="Step time">{duration(job.progress.step_time_s)}</Stat>
        {job.estimate ? <PeakMemory estimate={job.estimate} /> : null}
        <Stat label="Ranks">
          {job.world_size}
          {job.world ? <span className="muted"> of {job.world.min}–{job.world.max}</span> : null}
        </Stat>
        <Stat label="Mesh" hint={job.estimate?.reason ?? ""}>
          {mesh(job)}
        </Stat>
        {job.replicas ? (
          <Stat label="Replicas" hint="Of a job that continues without lost ones">
            {job.replicas.present}
            <span className="muted"> of {job.replicas.count} present</span>
          </Stat>
        ) : null}
        <Stat label="Attempt" hint="Its number is the fence">
          {job.attempt || DASH}
          {job.restarts > 0 ? <span className="muted"> ({job.restarts} {job.restarts === 1 ? "restart" : "restarts"})</span> : null}
        </Stat>
        <Stat label="Submitted" hint={dateTime(job.created_at)}>
          <Ago at={job.created_at} suffix=" ago" />
        </Stat>
        <Stat label={job.ended_at ? "Took" : "Running for"}>
          {job.started_at ? <Elapsed from={job.started_at} to={job.ended_at} /> : DASH}
        </Stat>
        <Stat label="Owner">{job.owner}</Stat>
        {Object.keys(job.labels).length > 0 ? (
          <Stat label="Labels">
            {Object.entries(job.labels).map(([key, value]) => (
              <span key={key} className="label">
                {key}={value}
              </span>
            ))}
          </Stat>
        ) : null}
      </dl>
    </section>
  );
}

/** What the job's plan estimated of its fullest rank beside what was measured of any. */
function PeakMemory({ estimate }: { estimate: EstimateView }) {
  const what = estimate.measured_as === "resident_growth" ? "what the process took more in a step than before it built the model" : "memory that was allocated";
  const ratio = estimate.ratio === null ? "" : `: ${estimate.ratio} times as much as estimated`;
  const fragments = estimate.measured_fragments_bytes;
  const compared = ratio + (fragments == null ? "" : `; the allocator held ${bytes(fragments)} more, as fragments`);
  const seen = estimate.measured_peak_bytes === null ? "nothing measured yet" : `measured is ${what}${compared}`;
  return (
    <Stat label="Peak memory" hint={`The plan estimates it in ${estimate.where}; ${seen}`}>
      {bytes(estimate.measured_peak_bytes)}{" "}
      <span className="muted">
        (<a href={planHref(estimate.plan_id)}>planned</a> {bytes(estimate.peak.total)})
      </span>
    </Stat>
  );
}

/** Why the job stands where it does. Its error is told once, by the failure card. */
function reason(job: JobView): string {
  const error = job.failure?.error;
  if (job.reason && error && job.reason.includes(error)) return "";
  return job.reason ?? sentence(job);
}

function sentence(job: JobView): string {
  if (job.state === "RUNNING") return `Attempt ${job.attempt} is training.`;
  if (job.state === "SUCCEEDED") return job.spec.entrypoint ? "The script has ended." : "All steps are done.";
  return "";
}

function mesh(job: JobView): string {
  const sizes = job.plan?.sharding.mesh ?? (job.spec.mesh === "auto" ? null : job.spec.mesh);
  return sizes ? axes(sizes) : "auto";
}

function SpecPanel({ job }: { job: JobView }) {
  const newest = job.latest_checkpoint;
  return (
    <details className="panel spec">
      <summary>Spec</summary>
      {newest ? <p className="muted">Latest committed checkpoint: {newest}</p> : null}
      <pre>{JSON.stringify(job.spec, null, 2)}</pre>
    </details>
  );
}

