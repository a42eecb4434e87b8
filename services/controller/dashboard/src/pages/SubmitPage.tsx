import { useMutation, useQuery } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { stringify } from "yaml";
import { post, ProblemError } from "../api/client";
import { useJobsById, usePlan } from "../api/queries";
import type { JobView, PlanView } from "../api/types";
import { Verdict } from "../plan/Verdict";
import { jobHref, planHref } from "../router";
import { Editor } from "../submit/Editor";
import { type Fault, SpecSchema } from "../submit/schema";
import { locate, type Mistake, parse } from "../submit/yaml";
import { axes, bytes, duration } from "../ui/format";
import { Panel, Quiet, Stat, Trouble } from "../ui/parts";

const DRAFT = "meshloom.draft";
const TEMPLATE = `# A job: a model, its data, and how to train it. Control-Space completes.
name: my-job
model: {factory: decoder, args: {dim: 128, layers: 4, heads: 4}}
data: {factory: stdlib_bytes, args: {seq_len: 256}}
optimizer: {factory: adamw, args: {lr: 3.0e-3}}
train: {steps: 480, global_batch: 8}
resources: {ranks: 2, device: auto}
checkpoint: {every_steps: 160}
`;

/** Write a spec, see its faults as one writes, plan it, submit it. */
export default function SubmitPage({ query }: { query: URLSearchParams }) {
  const from = query.get("from");
  const [origin] = useJobsById(from ? [from] : []);
  const schema = useQuery({ queryKey: ["spec schema"], queryFn: SpecSchema.load, staleTime: Infinity });
  const failed = origin?.error ?? schema.error;
  if (!schema.data || (from && !origin?.data)) {
    return <div className="page">{failed ? <Trouble error={failed} /> : <Quiet>Loading…</Quiet>}</div>;
  }
  const text = origin?.data
    ? `# A copy of ${origin.data.id}\n${stringify(schema.data.withoutDefaults(origin.data.spec))}`
    : (sessionStorage.getItem(DRAFT) ?? TEMPLATE);
  return <Form first={text} schema={schema.data} />;
}

function Form({ first, schema }: { first: string; schema: SpecSchema }) {
  const [text, setText] = useState(first);
  const [refused, setRefused] = useState<{ text: string; faults: Fault[] } | null>(null);
  const parsed = useMemo(() => parse(text), [text]);
  const mistakes = useMemo<Mistake[]>(() => {
    if (parsed.mistakes.length > 0) return parsed.mistakes;
    // The controller checks more than the schema says, and words it better: its answer to this text comes first.
    const faults = refused?.text === text ? refused.faults : schema.check(parsed.spec);
    return faults.map((fault) => locate(parsed, fault));
  }, [parsed, refused, schema, text]);

  const onError = (error: Error) => {
    if (error instanceof ProblemError && error.problem?.errors) setRefused({ text, faults: error.problem.errors });
  };
  const check = useMutation({ mutationFn: () => post<JobView>("v1/jobs?dry_run=true", parsed.spec as object), onError });
  const plan = useMutation({ mutationFn: () => post<PlanView>("v1/plans", parsed.spec as object), onError });
  const submit = useMutation({
    mutationFn: (body: object) => post<JobView>("v1/jobs", body),
    onError,
    onSuccess: (job) => {
      sessionStorage.removeItem(DRAFT);
      location.hash = jobHref(job.id);
    },
  });
  const orders = [check, plan, submit];
  const busy = orders.some((order) => order.isPending);
  const error = orders.map((order) => order.error).find((one) => one !== null);
  const ready = parsed.mistakes.length === 0 && typeof parsed.spec === "object" && parsed.spec !== null && !busy;

  function start(act: () => void): void {
    for (const order of orders) order.reset();
    act();
  }

  return (
    <div className="page submit">
      <div className="toolbar">
        <h1>Submit a job</h1>
        <div className="buttons">
          <button type="button" disabled={!ready} onClick={() => start(() => check.mutate())}>
            Check
          </button>
          <button type="button" disabled={!ready} onClick={() => start(() => plan.mutate())}>
            Plan
          </button>
          <button type="button" className="primary" disabled={!ready} onClick={() => start(() => submit.mutate(parsed.spec as object))}>
            Submit job
          </button>
        </div>
      </div>
      <Editor
        text={first}
        label="Job spec as YAML"
        schema={schema}
        mistakes={mistakes}
        onChange={(next) => {
          sessionStorage.setItem(DRAFT, next);
          setText(next);
        }}
      />
      <div aria-live="polite">
        {mistakes.length > 0 ? (
          <Panel title={mistakes.length === 1 ? "1 error" : `${mistakes.length} errors`}>
            <ul className="mistakes" aria-label="Errors in the spec">
              {mistakes.map(({ from: at, message }) => (
                <li key={`${at} ${message}`}>
                  <span className="muted">line {text.slice(0, at).split("\n").length}</span> {message}
                </li>
              ))}
            </ul>
          </Panel>
        ) : null}
        {error && refused?.text !== text ? <Trouble error={error} /> : null}
        {check.data && check.variables === undefined && mistakes.length === 0 ? <p className="fine">The controller accepts this spec.</p> : null}
      </div>
      {plan.data ? <Preview id={plan.data.id} onSubmit={(id) => submit.mutate({ plan_id: id })} busy={busy} /> : null}
    </div>
  );
}

function Preview({ id, busy, onSubmit }: { id: string; busy: boolean; onSubmit: (id: string) => void }) {
  const { data: plan, error } = usePlan(id);
  if (!plan) return error ? <Trouble error={error} /> : <Quiet>Planning…</Quiet>;
  const peak = Math.max(...plan.memory.map((group) => group.peak.total), 0);
  return (
    <Panel
      title="Plan"
      aside={
        <>
          <a className="button" href={planHref(plan.id)}>
            Whole plan
          </a>
          {plan.feasible ? (
            <button type="button" className="primary" disabled={busy} onClick={() => onSubmit(plan.id)}>
              Submit this plan
            </button>
          ) : null}
        </>
      }
    >
      <div className="preview" aria-live="polite">
        <p>
          <Verdict plan={plan} /> {plan.reason}
        </p>
        {plan.failure ? <p className="bad">{plan.failure.advice}</p> : null}
        <dl className="stats">
          {plan.mesh ? <Stat label="Mesh">{axes(plan.mesh)}</Stat> : null}
          {peak > 0 ? (
            <Stat label="Peak memory / limit">
              {bytes(peak)} / {bytes(plan.memory_limit_bytes)}
            </Stat>
          ) : null}
          {plan.step_time ? <Stat label="Step time">{duration(plan.step_time.total_s)}</Stat> : null}
          {plan.micro_batch !== null ? (
            <Stat label="Micro-batch">
              {plan.micro_batch} × {plan.accumulation}
            </Stat>
          ) : null}
        </dl>
      </div>
    </Panel>
  );
}
