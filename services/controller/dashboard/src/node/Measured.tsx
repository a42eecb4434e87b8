import type { MeasuredView, NodeFacts } from "../api/types";
import { compact, dateTime, duration, percent } from "../ui/format";
import { Stat } from "../ui/parts";
import { Ago } from "../ui/time";

/** What a node found when it last measured its devices: step times are estimated from it. */
export function Measured({ device, found }: { device: string; found: MeasuredView }) {
  return (
    <section className="measured" aria-label={`Measured on ${device}`}>
      <h3>
        {device === "cpu" ? "CPUs" : "GPUs"} measured{" "}
        <span className="muted" title={dateTime(found.measured_at)}>
          <Ago at={found.measured_at} /> ago
        </span>
      </h3>
      {found.facts ? <Figures facts={found.facts} /> : <p className="muted">Not measured: {found.failure ?? "it did not say why"}</p>}
    </section>
  );
}

function Figures({ facts }: { facts: NodeFacts }) {
  const fastest = Math.max(...Object.values(facts.matmul_flops), 1);
  return (
    <>
      <ul className="rates" aria-label="Matrix products, of each rank">
        {Object.entries(facts.matmul_flops).map(([dtype, rate]) => (
          <li key={dtype}>
            <span>{dtype}</span>
            <span className="track" aria-hidden="true">
              <i style={{ width: `${(100 * rate) / fastest}%` }} />
            </span>
            <b>{compact(rate)}FLOP/s</b>
          </li>
        ))}
      </ul>
      <dl className="stats" title={`Of each rank, while all ${facts.ranks} that the node seats are at work`}>
        <Stat label="Memory">{compact(facts.memory_bandwidth)}B/s</Stat>
        <Stat label="Link" hint="What a rank sends to another one of the node">
          {compact(facts.link_bandwidth)}B/s
        </Stat>
        <Stat label="Network" hint="Between processes of this node by TCP: between nodes it is not measured">
          {compact(facts.network_bandwidth)}B/s
        </Stat>
        <Stat label="Latency" hint="What a collective takes at least">
          {duration(facts.collective_latency)}
        </Stat>
        <Stat label="Overlap" hint="How much of an exchange computation hides">
          {percent(facts.overlap)}
        </Stat>
      </dl>
    </>
  );
}
