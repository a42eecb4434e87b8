import { usePools } from "../api/queries";
import type { PoolView } from "../api/types";
import { jobHref } from "../router";
import { DASH, shortId } from "../ui/format";
import { Panel } from "../ui/parts";
import { Ago } from "../ui/time";

type Reservation = PoolView["reservations"][number];

/** The pools that bring nodes, and what is reserved of them; nothing where there are none. */
export function Pools() {
  const { data } = usePools();
  const pools = data?.items ?? [];
  if (pools.length === 0) return null;
  return (
    <Panel title="Pools">
      <div className="scroller" tabIndex={0} role="region" aria-label="Pools, in the order in which they are asked">
        <table>
          <thead>
            <tr>
              <th scope="col">Pool</th>
              <th scope="col">Kind</th>
              <th scope="col">Nodes</th>
              <th scope="col">State</th>
              <th scope="col">For</th>
              <th scope="col" className="number">Since</th>
              <th scope="col">Why</th>
            </tr>
          </thead>
          <tbody>
            {pools.flatMap((pool) =>
              [...(pool.reservations.length > 0 ? pool.reservations : [null]), ...pool.ended].map((reservation) => (
                <Row key={`${pool.name} ${reservation?.id}`} pool={pool} reservation={reservation} />
              )),
            )}
          </tbody>
        </table>
      </div>
    </Panel>
  );
}

function Row({ pool, reservation }: { pool: PoolView; reservation: Reservation | null }) {
  const isOver = reservation !== null && reservation.ended_at !== null;
  const trouble = pool.trouble === null || isOver ? "" : `the pool does not answer: ${pool.trouble}`;
  const reasons = [reservation?.reason ?? "", trouble].filter((reason) => reason !== "");
  return (
    <tr data-pool={pool.name}>
      <th scope="row">{pool.name}</th>
      <td>{pool.kind}</td>
      <td title={reservation?.node_ids.join(", ")}>
        {reservation?.node_ids.length ?? 0} of {pool.max_nodes}
      </td>
      <td>{reservation?.state.toLowerCase() ?? DASH}</td>
      <td>
        {reservation?.job_id ? (
          <a href={jobHref(reservation.job_id)} title={reservation.job_id}>
            {shortId(reservation.job_id)}
          </a>
        ) : (
          DASH
        )}
      </td>
      <td className="number">{reservation ? <Ago at={reservation.ended_at ?? reservation.requested_at} /> : DASH}</td>
      <td>{reasons.join("; ") || DASH}</td>
    </tr>
  );
}
