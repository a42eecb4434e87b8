import { usePlans } from "../api/queries";
import type { PlanState, PlanSummary } from "../api/types";
import { Verdict } from "../plan/Verdict";
import { planHref, replaceQuery } from "../router";
import { axes, bytes, DASH, dateTime, duration, shortId } from "../ui/format";
import { Bar, Pager, Quiet, Trouble } from "../ui/parts";
import { Ago } from "../ui/time";

const STATES: PlanState[] = ["PROBING", "READY", "FAILED"];

export default function PlansPage({ query }: { query: URLSearchParams }) {
  const shown = new Set((query.get("show") ?? "").split(",").filter((name) => name !== ""));
  const cursor = query.get("cursor");
  const states = STATES.filter((state) => shown.has(state.toLowerCase()));
  const { data, error } = usePlans(states, cursor);

  function change(edit: (next: URLSearchParams) => void): void {
    const next = new URLSearchParams(query);
    next.delete("cursor");
    edit(next);
    replaceQuery("plans", next);
  }

  function toggle(name: string): void {
    const next = new Set(shown);
    if (!next.delete(name)) next.add(name);
    change((params) => (next.size > 0 ? params.set("show", [...next].join(",")) : params.delete("show")));
  }

  return (
    <div className="page">
      <div className="toolbar">
        <h1>Plans</h1>
        <div className="filters" role="group" aria-label="Filter by state">
          {STATES.map((state) => (
            <button
              key={state}
              type="button"
              className="filter"
              aria-pressed={shown.has(state.toLowerCase())}
              onClick={() => toggle(state.toLowerCase())}
            >
              {state.charAt(0) + state.slice(1).toLowerCase()}
            </button>
          ))}
        </div>
      </div>
      {!data && error ? <Trouble error={error} /> : null}
      {!data && !error ? <Quiet>Asking the controller…</Quiet> : null}
      {data && data.items.length === 0 ? <NoPlans filtered={states.length > 0 || cursor !== null} /> : null}
      {data && data.items.length > 0 ? <PlanTable plans={data.items} /> : null}
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

function PlanTable({ plans }: { plans: PlanSummary[] }) {
  return (
    <div className="scroller panel" tabIndex={0} role="region" aria-label="Plans, newest first">
      <table className="jobs plans">
        <thead>
          <tr>
            <th scope="col">Verdict</th>
            <th scope="col">Plan</th>
            <th scope="col" className="wide">
              Peak memory / limit
            </th>
            <th scope="col">Mesh</th>
            <th scope="col" className="number">
              Step
            </th>
            <th scope="col" className="number">
              Ranks
            </th>
            <th scope="col" className="number">
              Age
            </th>
          </tr>
        </thead>
        <tbody>
          {plans.map((plan) => (
            <PlanRow key={plan.id} plan={plan} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

function PlanRow({ plan }: { plan: PlanSummary }) {
  const { peak_bytes, memory_limit_bytes } = plan;
  const part = peak_bytes !== null && memory_limit_bytes ? peak_bytes / memory_limit_bytes : null;
  return (
    <tr
      data-plan={plan.id}
      onClick={(event) => {
        if (!(event.target as Element).closest("a")) location.hash = planHref(plan.id);
      }}
    >
      <td data-cell="state">
        <Verdict plan={plan} />
      </td>
      <td data-cell="job">
        <a className="name" href={planHref(plan.id)}>
          {plan.name}
        </a>
        <span className="id" title={plan.id}>
          {shortId(plan.id)}
        </span>
        <div className="why muted">{plan.reason}</div>
      </td>
      <td data-cell="progress">
        {part === null ? (
          DASH
        ) : (
          <div className="progress">
            <Bar part={part} label="Peak memory / limit" tone={part > 1 ? "bad" : "live"} />
            <span>
              {bytes(peak_bytes)} <span className="muted">of {bytes(memory_limit_bytes)}</span>
            </span>
          </div>
        )}
      </td>
      <td data-cell="mesh" data-label="mesh">
        {plan.mesh ? axes(plan.mesh) : DASH}
      </td>
      <td data-cell="step" data-label="step" className="number">
        {duration(plan.step_time_s)}
      </td>
      <td data-cell="ranks" data-label="ranks" className="number">
        {plan.ranks}
      </td>
      <td data-cell="age" data-label="age" className="number" title={dateTime(plan.created_at)}>
        <Ago at={plan.created_at} />
      </td>
    </tr>
  );
}

function NoPlans({ filtered }: { filtered: boolean }) {
  return (
    <div className="empty panel">
      <h2>{filtered ? "No plan matches" : "No plan in the last seven days"}</h2>
      {filtered ? (
        <a href="#/plans">Show all plans</a>
      ) : (
        <>
          <p>A plan predicts the mesh, memory and step time of a job. It allocates nothing.</p>
          <pre>
            <code>meshloom plan examples/stdlib-gpt.yaml</code>
          </pre>
        </>
      )}
    </div>
  );
}
