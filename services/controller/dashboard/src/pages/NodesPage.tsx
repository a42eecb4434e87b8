import { useMutation } from "@tanstack/react-query";
import { useState } from "react";
import { post, remove } from "../api/client";
import { refreshAll, useNodes } from "../api/queries";
import type { NodeView } from "../api/types";
import { Measured } from "../node/Measured";
import { Pools } from "../node/Pools";
import { jobHref } from "../router";
import { Dialog } from "../ui/Dialog";
import { bytes, DASH, dateTime, shortId } from "../ui/format";
import { Quiet, Stat, StateChip, Trouble } from "../ui/parts";

export default function NodesPage() {
  const { data, error } = useNodes();
  const nodes = data?.items ?? [];
  const ready = nodes.filter((node) => node.state === "READY");
  const sum = (count: (node: NodeView) => number) => ready.reduce((total, node) => total + count(node), 0);
  const accelerators = sum((node) => node.inventory.accelerators.length);
  return (
    <div className="page">
      <div className="toolbar">
        <h1>Nodes</h1>
        {nodes.length > 0 ? (
          <p className="summary">
            {ready.length} of {nodes.length} ready · CPU slots {sum((node) => node.cpu_slots_used)} /{" "}
            {sum((node) => node.inventory.cpu_slots)} used
            {accelerators > 0 ? ` · accelerators ${sum((node) => node.accelerators_used)} / ${accelerators} used` : ""}
          </p>
        ) : null}
      </div>
      {!data && error ? <Trouble error={error} /> : null}
      {!data && !error ? <Quiet>Asking the controller…</Quiet> : null}
      {data && nodes.length === 0 ? (
        <div className="empty panel">
          <h2>No node has joined</h2>
          <p>Start an agent on each machine that is to run jobs:</p>
          <pre>
            <code>python -m services.worker.agent</code>
          </pre>
        </div>
      ) : null}
      <Pools />
      <ul className="nodes">
        {nodes.map((node) => (
          <NodeCard key={node.id} node={node} />
        ))}
      </ul>
    </div>
  );
}

function NodeCard({ node }: { node: NodeView }) {
  const { inventory } = node;
  return (
    <li className="panel node" data-node={node.id}>
      <header>
        <h2>{node.id}</h2>
        <StateChip state={node.state} />
        <Orders node={node} />
      </header>
      <Slots what="CPU slots" used={node.cpu_slots_used} of={inventory.cpu_slots} />
      {inventory.accelerators.length > 0 ? (
        <Slots
          what="Accelerators"
          used={node.accelerators_used}
          of={inventory.accelerators.length}
          detail={models(node)}
        />
      ) : (
        <p className="slots muted">No accelerator</p>
      )}
      <dl className="stats">
        <Stat label="Memory">{bytes(inventory.memory_bytes)}</Stat>
        <Stat label="Cores">{inventory.cpu_count}</Stat>
        <Stat label="Lease" hint="The agent renews it with each heartbeat; when it expires, the node counts as lost.">
          {node.lease_s === null ? "expired" : `${Math.ceil(node.lease_s)} s left`}
        </Stat>
        <Stat label="Host">{inventory.hostname}</Stat>
        <Stat label="Joined" hint={dateTime(node.joined_at)}>
          {dateTime(node.joined_at).slice(5, 16)}
        </Stat>
        <Stat label="Versions">
          {Object.entries(inventory.versions)
            .map(([name, version]) => `${name} ${version}`)
            .join(", ") || DASH}
        </Stat>
      </dl>
      {Object.entries(node.measured).map(([device, found]) => (
        <Measured key={device} device={device} found={found} />
      ))}
      <p className="jobs-here">
        {node.jobs.length === 0 ? <span className="muted">No jobs</span> : "Jobs: "}
        {node.jobs.map((id) => (
          <a key={id} href={jobHref(id)} title={id}>
            {shortId(id)}
          </a>
        ))}
      </p>
    </li>
  );
}

/** Drain it and take it back; one that is lost can be forgotten. */
function Orders({ node }: { node: NodeView }) {
  const [asks, setAsks] = useState(false);
  const path = `v1/nodes/${encodeURIComponent(node.id)}`;
  const order = useMutation({
    mutationFn: (what: "drain" | "undrain" | "forget") => (what === "forget" ? remove(path) : post(`${path}/${what}`)),
    onSuccess: () => setAsks(false),
    onSettled: refreshAll,
  });
  return (
    <div className="row-actions">
      {node.state === "READY" ? (
        <button type="button" onClick={() => setAsks(true)}>
          Drain…
        </button>
      ) : null}
      {node.state === "DRAINING" ? (
        <button type="button" disabled={order.isPending} onClick={() => order.mutate("undrain")}>
          Undrain
        </button>
      ) : null}
      {node.state === "LOST" ? (
        <button type="button" disabled={order.isPending} title="Take it off this list until it joins again" onClick={() => order.mutate("forget")}>
          Forget
        </button>
      ) : null}
      {order.error && !asks ? (
        <p className="trouble" role="alert">
          {order.error.message}
        </p>
      ) : null}
      {asks ? (
        <Dialog title={`Drain ${node.id}?`} onClose={() => setAsks(false)}>
          <p>
            It takes no more jobs. {node.jobs.length > 0 ? `Its ${node.jobs.length} running ${node.jobs.length === 1 ? "job takes a checkpoint and moves" : "jobs take a checkpoint and move"} to another node.` : "No job runs on it."}
          </p>
          {order.error ? <Trouble error={order.error} /> : null}
          <div className="buttons">
            <button type="button" onClick={() => setAsks(false)}>
              Close
            </button>
            <button type="button" className="primary" disabled={order.isPending} onClick={() => order.mutate("drain")}>
              Drain
            </button>
          </div>
        </Dialog>
      ) : null}
    </div>
  );
}

const BOXES = 64;

function Slots({ what, used, of, detail }: { what: string; used: number; of: number; detail?: string }) {
  const each = Math.max(1, Math.ceil(of / BOXES));
  return (
    <div className="slots" role="meter" aria-label={what} aria-valuemin={0} aria-valuemax={of} aria-valuenow={used}>
      <span>
        {what}{" "}
        <b>
          {used} / {of}
        </b>
        {detail ? <span className="muted"> {detail}</span> : null}
      </span>
      <span className="boxes" aria-hidden="true">
        {Array.from({ length: Math.ceil(of / each) }, (_, index) => (
          <i key={index} className={index * each < used ? "used" : ""} />
        ))}
      </span>
    </div>
  );
}

function models(node: NodeView): string {
  const counts = new Map<string, number>();
  for (const device of node.inventory.accelerators) {
    const text = `${device.name}, ${bytes(device.memory_bytes)}`;
    counts.set(text, (counts.get(text) ?? 0) + 1);
  }
  return [...counts].map(([text, count]) => `${count} × ${text}`).join("; ");
}
