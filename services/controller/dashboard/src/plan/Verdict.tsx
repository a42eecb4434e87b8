import type { PlanState } from "../api/types";

type Told = { state: PlanState; feasible: boolean | null };

/** Whether it fits, in a colour, a sign and a word. */
export function Verdict({ plan }: { plan: Told }) {
  const [tone, sign, word] = verdict(plan);
  return (
    <span className={`chip tone-${tone}`}>
      <span aria-hidden="true" className="sign">
        {sign}
      </span>
      {word}
    </span>
  );
}

export function verdict({ state, feasible }: Told): [string, string, string] {
  if (state === "PROBING") return ["turning", "◔", "probing"];
  if (state === "FAILED") return ["bad", "✕", "failed"];
  return feasible ? ["good", "✓", "feasible"] : ["bad", "✕", "infeasible"];
}
