import { useMutation } from "@tanstack/react-query";
import { useId, useState } from "react";
import { post, remove } from "../api/client";
import { refreshAll, useWebhooks } from "../api/queries";
import type { WebhookCreated, WebhookRequest, WebhookView } from "../api/types";
import { Dialog } from "../ui/Dialog";
import { DASH, dateTime, whole } from "../ui/format";
import { Panel, Quiet, Trouble } from "../ui/parts";
import { Ago } from "../ui/time";

type WebhookFormat = WebhookView["format"];
const FORMATS: [WebhookFormat, string][] = [
  ["standard", "signed JSON, as Standard Webhooks describes"],
  ["slack", "a text for an incoming webhook of Slack"],
];

/** Where events of jobs are sent: one's own, for operators all. */
export default function WebhooksPage() {
  const { data, error } = useWebhooks();
  const [asks, setAsks] = useState(false);
  const items = data?.items ?? [];
  return (
    <div className="page">
      <div className="toolbar">
        <h1>Webhooks</h1>
      </div>
      <Panel
        title="Events are sent to"
        aside={
          <button type="button" onClick={() => setAsks(true)}>
            New webhook…
          </button>
        }
      >
        {!data && error ? <Trouble error={error} /> : null}
        {data && items.length === 0 ? <Quiet>No webhooks. One sends events of jobs to a URL: signed, in order, at least once.</Quiet> : null}
        {items.length > 0 ? (
          <div className="scroller" tabIndex={0} role="region" aria-label="Webhooks, oldest first">
            <table>
              <thead>
                <tr>
                  <th scope="col">Receiver</th>
                  <th scope="col">Events</th>
                  <th scope="col">Made by</th>
                  <th scope="col" className="number">Delivered</th>
                  <th scope="col" className="number">Dropped</th>
                  <th scope="col" className="number">Last delivery</th>
                  <th scope="col">
                    <span className="hidden">Actions</span>
                  </th>
                </tr>
              </thead>
              <tbody>
                {items.map((hook) => (
                  <Row key={hook.id} hook={hook} />
                ))}
              </tbody>
            </table>
          </div>
        ) : null}
        {asks ? <NewWebhook onClose={() => setAsks(false)} /> : null}
      </Panel>
    </div>
  );
}

function Row({ hook }: { hook: WebhookView }) {
  const [asks, setAsks] = useState(false);
  const drop = useMutation({ mutationFn: () => remove(`v1/webhooks/${hook.id}`), onSuccess: () => setAsks(false), onSettled: refreshAll });
  const trouble = hook.disabled ? "disabled: the receiver answered 410 Gone" : hook.last_error && `the last try failed: ${hook.last_error}`;
  return (
    <tr data-webhook={hook.id} className={hook.disabled ? "stale" : ""}>
      <th scope="row" className="why-wide" title={hook.id}>
        {hook.url}
        {trouble ? <div className="why bad">{trouble}</div> : null}
      </th>
      <td>
        {hook.kinds.length > 0 ? hook.kinds.join(", ") : "all"}
        {hook.labels.length > 0 ? <span className="muted"> of {hook.labels.join(", ")}</span> : null}
      </td>
      <td>{hook.created_by}</td>
      <td className="number">{whole(hook.delivered)}</td>
      <td className="number">{whole(hook.dropped)}</td>
      <td className="number" title={hook.delivered_at ? dateTime(hook.delivered_at) : undefined}>
        {hook.delivered_at ? <Ago at={hook.delivered_at} /> : DASH}
      </td>
      <td className="number">
        <button type="button" className="danger" onClick={() => setAsks(true)}>
          Remove…
        </button>
        {asks ? (
          <Dialog title={`Remove the webhook to ${hook.url}?`} onClose={() => setAsks(false)}>
            <p>Nothing more is sent there.</p>
            {drop.error ? <Trouble error={drop.error} /> : null}
            <div className="buttons">
              <button type="button" onClick={() => setAsks(false)}>
                Keep it
              </button>
              <button type="button" className="danger solid" disabled={drop.isPending} onClick={() => drop.mutate()}>
                Remove
              </button>
            </div>
          </Dialog>
        ) : null}
      </td>
    </tr>
  );
}

function NewWebhook({ onClose }: { onClose: () => void }) {
  const [url, setUrl] = useState("");
  const [kinds, setKinds] = useState("");
  const [labels, setLabels] = useState("");
  const [format, setFormat] = useState<WebhookFormat>("standard");
  const ids = [useId(), useId(), useId(), useId()] as const;
  const make = useMutation({
    mutationFn: () => post<WebhookCreated>("v1/webhooks", { url, kinds: listed(kinds), labels: listed(labels), format } satisfies WebhookRequest),
    onSettled: refreshAll,
  });
  if (make.data) return <Secret made={make.data} onClose={onClose} />;
  return (
    <Dialog title="New webhook" onClose={onClose}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          make.mutate();
        }}
      >
        <label htmlFor={ids[0]}>URL of the receiver</label>
        <input id={ids[0]} type="url" required autoFocus value={url} onChange={(event) => setUrl(event.target.value)} />
        <label htmlFor={ids[1]}>
          Kinds of events <span className="muted">(such as job.failed, checkpoint.*; empty: all)</span>
        </label>
        <input id={ids[1]} value={kinds} onChange={(event) => setKinds(event.target.value)} />
        <label htmlFor={ids[2]}>
          Labels of jobs <span className="muted">(such as team=vision; empty: any)</span>
        </label>
        <input id={ids[2]} value={labels} onChange={(event) => setLabels(event.target.value)} />
        <label htmlFor={ids[3]}>Format</label>
        <select id={ids[3]} value={format} onChange={(event) => setFormat(event.target.value as WebhookFormat)}>
          {FORMATS.map(([name, what]) => (
            <option key={name} value={name}>
              {name}: {what}
            </option>
          ))}
        </select>
        {make.error ? <Trouble error={make.error} /> : null}
        <div className="buttons">
          <button type="button" onClick={onClose}>
            Close
          </button>
          <button type="submit" className="primary" disabled={make.isPending || !url}>
            Add webhook
          </button>
        </div>
      </form>
    </Dialog>
  );
}

function Secret({ made, onClose }: { made: WebhookCreated; onClose: () => void }) {
  return (
    <Dialog title={`Secret of the webhook to ${made.url}`} onClose={onClose}>
      <p>The receiver checks with it who sent an event. Copy it now: it is not shown again.</p>
      <input readOnly aria-label="New secret" className="secret" value={made.secret} onFocus={(event) => event.target.select()} />
      <div className="buttons">
        <button type="button" onClick={() => void navigator.clipboard.writeText(made.secret)}>
          Copy
        </button>
        <button type="button" className="primary" onClick={onClose}>
          Done
        </button>
      </div>
    </Dialog>
  );
}

/** What was typed between commas or spaces. */
function listed(text: string): string[] {
  return text.split(/[,\s]+/).filter((part) => part !== "");
}
