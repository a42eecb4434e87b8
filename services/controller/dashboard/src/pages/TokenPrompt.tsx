import { type FormEvent, useId, useState } from "react";
import { token } from "../api/client";
import { connection } from "../api/connection";
import { refreshAll } from "../api/queries";
import { Dialog } from "../ui/Dialog";

/** Asked for when the controller answers 401. The token lives as long as this tab. */
export function TokenPrompt() {
  const [value, setValue] = useState("");
  const field = useId();
  const refused = token.get() !== null;

  function submit(event: FormEvent): void {
    event.preventDefault();
    if (!value.trim()) return;
    token.set(value.trim());
    connection.tokenGiven();
    refreshAll();
  }

  return (
    <Dialog title="Token needed" onClose={() => undefined}>
      <form onSubmit={submit}>
        <p>
          {refused
            ? "The controller did not accept this token."
            : "This controller asks for a token."}{" "}
          It is kept in this tab only.
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
        <div className="buttons">
          <button type="submit" className="primary" disabled={!value.trim()}>
            Use token
          </button>
        </div>
      </form>
    </Dialog>
  );
}
