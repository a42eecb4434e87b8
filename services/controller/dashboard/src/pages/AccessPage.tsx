import { useMutation } from "@tanstack/react-query";
import { useId, useState } from "react";
import { post, remove } from "../api/client";
import { refreshAll, useAudit, useTokens } from "../api/queries";
import type { AuditEntryView, Scope, TokenCreated, TokenRequest, TokenView } from "../api/types";
import { replaceQuery } from "../router";
import { Dialog } from "../ui/Dialog";
import { DASH, dateTime } from "../ui/format";
import { Pager, Panel, Quiet, Trouble } from "../ui/parts";
import { Ago } from "../ui/time";

const SCOPES: [Scope, string][] = [
  ["viewer", "sees everything, changes nothing"],
  ["submitter", "submits jobs and controls its own"],
  ["operator", "everything: all jobs, nodes, tokens"],
  ["agent", "speaks for the node of this name"],
];
const DAY_S = 86_400;

/** Who may do what, and who did what: for operators. */
export default function AccessPage({ query }: { query: URLSearchParams }) {
  return (
    <div className="page">
      <div className="toolbar">
        <h1>Access</h1>
      </div>
      <Tokens />
      <Audit cursor={query.get("cursor")} />
    </div>
  );
}

function Tokens() {
  const { data, error } = useTokens();
  const [asks, setAsks] = useState(false);
  const items = data?.items ?? [];
  return (
    <Panel
      title="Tokens"
      aside={
        <button type="button" onClick={() => setAsks(true)}>
          New token…
        </button>
      }
    >
      {!data && error ? <Trouble error={error} /> : null}
      {data && items.length === 0 ? <Quiet>No tokens were made.</Quiet> : null}
      {items.length > 0 ? (
        <div className="scroller" tabIndex={0} role="region" aria-label="Tokens, oldest first">
          <table>
            <thead>
              <tr>
                <th scope="col">Subject</th>
                <th scope="col">Scope</th>
                <th scope="col">Label</th>
                <th scope="col">Made by</th>
                <th scope="col" className="number">Age</th>
                <th scope="col">Expires</th>
                <th scope="col">
                  <span className="hidden">Actions</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {items.map((token) => (
                <TokenRow key={token.id} token={token} />
              ))}
            </tbody>
          </table>
        </div>
      ) : null}
      {asks ? <NewToken onClose={() => setAsks(false)} /> : null}
    </Panel>
  );
}

function TokenRow({ token }: { token: TokenView }) {
  const [asks, setAsks] = useState(false);
  const revoke = useMutation({ mutationFn: () => remove(`v1/tokens/${token.id}`), onSuccess: () => setAsks(false), onSettled: refreshAll });
  return (
    <tr data-token={token.id} className={token.expired ? "stale" : ""}>
      <th scope="row" title={token.id}>
        {token.subject}
      </th>
      <td>{token.scope}</td>
      <td>{token.label || DASH}</td>
      <td>{token.created_by}</td>
      <td className="number" title={dateTime(token.created_at)}>
        <Ago at={token.created_at} />
      </td>
      <td>{token.expires_at ? `${token.expired ? "expired " : ""}${dateTime(token.expires_at)}` : "never"}</td>
      <td className="number">
        <button type="button" className="danger" onClick={() => setAsks(true)}>
          Revoke…
        </button>
        {asks ? (
          <Dialog title={`Revoke the token of ${token.subject}?`} onClose={() => setAsks(false)}>
            <p>Whoever uses it is refused from now on.</p>
            {revoke.error ? <Trouble error={revoke.error} /> : null}
            <div className="buttons">
              <button type="button" onClick={() => setAsks(false)}>
                Keep it
              </button>
              <button type="button" className="danger solid" disabled={revoke.isPending} onClick={() => revoke.mutate()}>
                Revoke
              </button>
            </div>
          </Dialog>
        ) : null}
      </td>
    </tr>
  );
}

function NewToken({ onClose }: { onClose: () => void }) {
  const [subject, setSubject] = useState("");
  const [scope, setScope] = useState<Scope>("submitter");
  const [label, setLabel] = useState("");
  const [days, setDays] = useState("90");
  const ids = [useId(), useId(), useId(), useId()] as const;
  const make = useMutation({
    mutationFn: () =>
      post<TokenCreated>("v1/tokens", { subject, scope, label, expires_in_s: days ? Math.round(Number(days) * DAY_S) : null } satisfies TokenRequest),
    onSettled: refreshAll,
  });
  if (make.data) return <Secret made={make.data} onClose={onClose} />;
  return (
    <Dialog title="New token" onClose={onClose}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          make.mutate();
        }}
      >
        <label htmlFor={ids[0]}>Subject: who will hold it</label>
        <input id={ids[0]} required autoFocus value={subject} onChange={(event) => setSubject(event.target.value)} />
        <label htmlFor={ids[1]}>Scope</label>
        <select id={ids[1]} value={scope} onChange={(event) => setScope(event.target.value as Scope)}>
          {SCOPES.map(([name, what]) => (
            <option key={name} value={name}>
              {name}: {what}
            </option>
          ))}
        </select>
        <label htmlFor={ids[2]}>Label</label>
        <input id={ids[2]} maxLength={200} value={label} onChange={(event) => setLabel(event.target.value)} />
        <label htmlFor={ids[3]}>
          Days until it expires <span className="muted">(empty: never)</span>
        </label>
        <input id={ids[3]} type="number" min={0.01} step="any" value={days} onChange={(event) => setDays(event.target.value)} />
        {make.error ? <Trouble error={make.error} /> : null}
        <div className="buttons">
          <button type="button" onClick={onClose}>
            Close
          </button>
          <button type="submit" className="primary" disabled={make.isPending || !subject}>
            Make token
          </button>
        </div>
      </form>
    </Dialog>
  );
}

function Secret({ made, onClose }: { made: TokenCreated; onClose: () => void }) {
  return (
    <Dialog title={`Token of ${made.subject}`} onClose={onClose}>
      <p>Copy it now: it is not shown again.</p>
      <input readOnly aria-label="New token" className="secret" value={made.token} onFocus={(event) => event.target.select()} />
      <div className="buttons">
        <button type="button" onClick={() => void navigator.clipboard.writeText(made.token)}>
          Copy
        </button>
        <button type="button" className="primary" onClick={onClose}>
          Done
        </button>
      </div>
    </Dialog>
  );
}

function Audit({ cursor }: { cursor: string | null }) {
  const { data, error } = useAudit(cursor);
  return (
    <Panel title="Audit trail">
      {!data && error ? <Trouble error={error} /> : null}
      {data && data.items.length === 0 ? <Quiet>No request changed anything yet.</Quiet> : null}
      {data && data.items.length > 0 ? (
        <div className="scroller" tabIndex={0} role="region" aria-label="Audit trail, newest first">
          <table className="audit">
            <thead>
              <tr>
                <th scope="col">Time</th>
                <th scope="col">Who</th>
                <th scope="col">Request</th>
                <th scope="col">Outcome</th>
              </tr>
            </thead>
            <tbody>
              {data.items.map((entry) => (
                <AuditRow key={entry.id} entry={entry} />
              ))}
            </tbody>
          </table>
        </div>
      ) : null}
      {data ? (
        <Pager paged={cursor !== null} next={data.next_cursor} onTurn={(to) => replaceQuery("access", new URLSearchParams(to ? { cursor: to } : {}))} />
      ) : null}
    </Panel>
  );
}

function AuditRow({ entry }: { entry: AuditEntryView }) {
  return (
    <tr>
      <td className="number-left">{dateTime(entry.at)}</td>
      <td>
        {entry.actor ?? <span className="muted">nobody</span>} <span className="muted">{entry.scope}</span>
      </td>
      <td>
        <code title={entry.request_id}>
          {entry.method} {entry.path}
        </code>
      </td>
      <td className={entry.outcome === "done" ? "" : "bad"}>
        {entry.outcome} <span className="muted">{entry.status}</span>
        {entry.left_out > 0 ? <span className="muted"> and {entry.left_out} more before it</span> : null}
      </td>
    </tr>
  );
}
