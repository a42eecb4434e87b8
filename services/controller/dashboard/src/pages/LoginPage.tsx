import { type FormEvent, useId, useState } from "react";
import { token } from "../api/client";
import { connection, useConnection } from "../api/connection";
import { forgetAll } from "../api/queries";

/** Shown when the controller answers 401, in the place of the page, and by itself at `#/login`. */
export function LoginPage() {
  const { needsToken } = useConnection();
  const [value, setValue] = useState("");
  const field = useId();
  const refused = needsToken && token.get() !== null;

  function submit(event: FormEvent): void {
    event.preventDefault();
    if (!value.trim()) return;
    forgetAll();
    token.set(value.trim());
    connection.tokenGiven();
    if (location.hash.startsWith("#/login")) location.hash = "#/jobs";
  }

  return (
    <div className="page">
      <form className="panel login" onSubmit={submit}>
        <h1>Log in</h1>
        <p role={refused ? "alert" : undefined} className={refused ? "bad" : "muted"}>
          {refused
            ? "The controller did not accept this token."
            : needsToken
              ? "This controller asks for a token."
              : "This controller answers without a token; you may use one to act as somebody else."}
        </p>
        <label htmlFor={field}>Bearer token</label>
        <input
          id={field}
          type="password"
          autoComplete="off"
          spellCheck={false}
          autoFocus
          value={value}
          onChange={(event) => setValue(event.target.value)}
        />
        <p className="muted">
          It is kept in this tab only. An operator makes one on the Access page or by <code>meshloom tokens create</code>.
        </p>
        <div className="buttons">
          <button type="submit" className="primary" disabled={!value.trim()}>
            Use token
          </button>
        </div>
      </form>
    </div>
  );
}
