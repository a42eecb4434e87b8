import { useMutation } from "@tanstack/react-query";
import { useEffect } from "react";
import { post } from "../api/client";
import { usePlan } from "../api/queries";
import type { JobView, PlanView } from "../api/types";
import { Traceback } from "../job/Failure";
import { Alternatives } from "../plan/Alternatives";
import { MemoryBars } from "../plan/MemoryBars";
import { Verdict, verdict } from "../plan/Verdict";
import { jobHref } from "../router";
import { axes, bytes, compact, dateTime, duration, perSecond, whole, words } from "../ui/format";
import { Panel, Quiet, Stat, Trouble } from "../ui/parts";

export default function PlanPage({ id }: { id: string }) {
  const { data: plan, error } = usePlan(id);
  useEffect(() => {
    document.title = plan ? `${plan.spec.name} ${verdict(plan)[2]} · Meshloom` : "Plan · Meshloom";
  }, [plan]);
  if (!plan) {
    return (
      <div className="page">
        {error ? <Trouble error={error} /> : <Quiet>Asking the controller…</Quiet>}
        {error ? <a href="#/plans">All plans</a> : null}
      </div>
    );
  }
  return (
    <div className="page plan">
      <Head plan={plan} />
      {plan.failure?.traceback ? (
        <Panel title="Error in the model's code">
          <div className="failure-text">
            <Traceback text={plan.failure.traceback} />
          </div>
        </Panel>
      ) : null}
      {plan.memory.length > 0 ? <MemoryBars plan={plan} /> : null}
      {plan.alternatives.length > 0 ? <Alternatives plan={plan} /> : null}
      {plan.units.length > 0 ? <Units plan={plan} /> : null}
      {plan.traffic.length > 0 ? <Traffic plan={plan} /> : null}
    </div>
  );
}

function Head({ plan }: { plan: PlanView }) {
  const advice = plan.failure ? [plan.failure.advice] : plan.advice;
  const time = plan.step_time;
  return (
    <section className="panel head" aria-label="Plan">
      <div className="title">
        <h1>{plan.spec.name}</h1>
        <Verdict plan={plan} />
        <code className="id">{plan.id}</code>
        <SubmitPlan plan={plan} />
      </div>
      <p className="reason">{plan.reason}</p>
      {plan.placement ? <p className="muted">{plan.placement}</p> : null}
      {advice.map((line) => (
        <p key={line} className="muted">
          {line}
        </p>
      ))}
      <dl className="stats">
        {plan.mesh ? <Stat label="Mesh">{axes(plan.mesh)}</Stat> : null}
        {plan.micro_batch !== null ? (
          <Stat label="Micro-batch">
            {plan.micro_batch} × {plan.accumulation}
          </Stat>
        ) : null}
        <Stat label="Step" hint={time ? `${duration(time.compute_s)} of computation, ${duration(time.optimizer_s)} of the optimizer` : ""}>
          {time ? duration(time.total_s) : "not known"}
        </Stat>
        {time ? <Stat label={perSecond(time.throughput_unit)}>{compact(time.tokens_per_s)}</Stat> : null}
        {plan.state === "READY" ? <Stat label="Room now">{plan.ranks.length > 0 ? seats(plan) : "none"}</Stat> : null}
        <Stat label="Profiled on">
          {plan.probe.node_id} <span className="muted">{plan.probe.cached ? "before" : duration(plan.probe.took_s)}</span>
        </Stat>
        <Stat label="Owner">{plan.owner}</Stat>
        <Stat label="Until">{dateTime(plan.expires_at)}</Stat>
      </dl>
    </section>
  );
}

function SubmitPlan({ plan }: { plan: PlanView }) {
  const submit = useMutation({
    mutationFn: () => post<JobView>("v1/jobs", { plan_id: plan.id }),
    onSuccess: (job) => {
      location.hash = jobHref(job.id);
    },
  });
  if (!plan.feasible) return null;
  return (
    <div className="actions">
      <button type="button" className="primary" disabled={submit.isPending} onClick={() => submit.mutate()}>
        Submit
      </button>
      {submit.error ? <Trouble error={submit.error} /> : null}
    </div>
  );
}

function seats(plan: PlanView): string {
  const counts = new Map<string, number>();
  for (const { node_id } of plan.ranks) counts.set(node_id, (counts.get(node_id) ?? 0) + 1);
  return [...counts].map(([node, count]) => `${count} on ${node}`).join(", ");
}

function Units({ plan }: { plan: PlanView }) {
  return (
    <Panel title="Units">
      <div className="scroller tall" tabIndex={0} role="region" aria-label="Units">
        <table>
          <thead>
            <tr>
              <th scope="col">Modules</th>
              <th scope="col" className="number">
                Parameters
              </th>
              <th scope="col" className="number">
                Kept by a rank
              </th>
              <th scope="col">After forward</th>
              <th scope="col">Options</th>
            </tr>
          </thead>
          <tbody>
            {plan.units.map((unit) => (
              <tr key={unit.modules.join()}>
                <th scope="row">{unit.modules.filter(Boolean).join(", ") || "(root)"}</th>
                <td className="number">{whole(unit.parameters)}</td>
                <td className="number">{bytes(unit.rank_bytes)}</td>
                <td>{kept(unit.reshard_after_forward)}</td>
                <td>
                  {[
                    unit.param_dtype,
                    ...(["recompute", "offload", "compile"] as const).filter((name) => unit[name]).map(words),
                    unit.shared_memory && SHARED[unit.shared_memory],
                  ]
                    .filter(Boolean)
                    .join(", ")}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

const SHARED = { copy: "copied from shared memory", storage: "one copy a host" };

function kept(reshards: boolean | number): string {
  if (typeof reshards === "number") return `slices over ${reshards} ranks`;
  return reshards ? "slices" : "kept whole";
}

function Traffic({ plan }: { plan: PlanView }) {
  const most = Math.max(...plan.traffic.map((axis) => axis.bytes_sent), 1);
  return (
    <Panel title="Traffic of a rank in a step">
      <ul className="rates sent">
        {plan.traffic.map((axis) => (
          <li key={axis.axis}>
            <span>{axis.axis}</span>
            <span className="track" aria-hidden="true">
              <i style={{ width: `${(100 * axis.bytes_sent) / most}%` }} />
            </span>
            <b>
              {bytes(axis.bytes_sent)} in {axis.collectives} {axis.collectives === 1 ? "collective" : "collectives"}
              {axis.seconds === null ? "" : `, ${duration(axis.seconds)} without overlap`}
            </b>
          </li>
        ))}
      </ul>
    </Panel>
  );
}
