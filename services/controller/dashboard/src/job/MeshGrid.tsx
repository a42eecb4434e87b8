import { useRanks } from "../api/queries";
import type { JobView, MeshPlan, RankPlacement } from "../api/types";
import { Panel } from "../ui/parts";
import { phaseOf } from "./phases";

const CELLS_A_ROW = 8;
const SEATS_AT_MOST = 1_024;

/** Which rank sits where: a box a node, a cell a rank, tp groups side by side. */
export function MeshGrid({ job }: { job: JobView }) {
  const { data } = useRanks(job);
  const plan = job.plan;
  if (!plan || plan.ranks.length < 2) return null;
  const mesh = plan.sharding.mesh;
  const phases = new Map((data?.items ?? []).map((rank) => [rank.rank, rank.phase]));
  const axes = wideAxes(mesh);
  const seats = plan.ranks.slice(0, SEATS_AT_MOST);
  return (
    <Panel title="Mesh" aside={axes.map((axis) => `${axis} ${mesh[axis]}`).join(" × ")}>
      <div className="mesh">
        {[...byNode(seats)].map(([node, ranks]) => (
          <section key={node} className="mesh-node" aria-label={`Ranks on ${node}`}>
            <h3>{node}</h3>
            <ol style={{ gridTemplateColumns: `repeat(${columns(mesh, ranks.length)}, max-content)` }}>
              {ranks.map((seat) => {
                const phase = phaseOf(phases.get(seat.rank) ?? "PENDING");
                const place = coordinates(seat.rank, mesh);
                return (
                  <li
                    key={seat.rank}
                    className={`phase-${phase.family}`}
                    title={`rank ${seat.rank} on ${seat.device}: ${axes.map((axis) => `${axis} ${place[axis]}`).join(", ")}; ${phase.word}`}
                  >
                    <b>{seat.rank}</b>
                    <span>{axes.map((axis) => place[axis]).join("·")}</span>
                  </li>
                );
              })}
            </ol>
          </section>
        ))}
      </div>
      {plan.ranks.length > seats.length ? (
        <p className="muted">The first {SEATS_AT_MOST} of {plan.ranks.length} ranks.</p>
      ) : null}
    </Panel>
  );
}

type Axis = "dp_replicate" | "dp_shard" | "tp";
const AXES: Axis[] = ["dp_replicate", "dp_shard", "tp"];

function wideAxes(mesh: MeshPlan): Axis[] {
  const wide = AXES.filter((axis) => mesh[axis] > 1);
  return wide.length > 0 ? wide : ["dp_shard"];
}

/** Where a rank stands along each axis; tp is innermost. */
function coordinates(rank: number, mesh: MeshPlan): Record<Axis, number> {
  return {
    tp: rank % mesh.tp,
    dp_shard: Math.floor(rank / mesh.tp) % mesh.dp_shard,
    dp_replicate: Math.floor(rank / (mesh.tp * mesh.dp_shard)),
  };
}

/** A copy of the model a row where that is narrow enough, else a tp group. */
function columns(mesh: MeshPlan, seats: number): number {
  const copy = mesh.dp_shard * mesh.tp;
  if (mesh.dp_replicate > 1 && copy <= CELLS_A_ROW) return copy;
  return mesh.tp > 1 ? mesh.tp : Math.min(seats, CELLS_A_ROW);
}

function byNode(seats: RankPlacement[]): Map<string, RankPlacement[]> {
  const nodes = new Map<string, RankPlacement[]>();
  for (const seat of seats) nodes.set(seat.node_id, [...(nodes.get(seat.node_id) ?? []), seat]);
  return nodes;
}
