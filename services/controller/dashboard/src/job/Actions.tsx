import { useMutation } from "@tanstack/react-query";
import { useId, useState } from "react";
import { post } from "../api/client";
import { isTerminal, refreshAll } from "../api/queries";
import type { JobState, JobView, ResumeRequest, StopRequest } from "../api/types";
import { Dialog } from "../ui/Dialog";
import { shortId } from "../ui/format";

type Order = "pause" | "resume" | "cancel" | "checkpoint";

/** In these states a job can be paused. */
export const PAUSABLE: ReadonlySet<JobState> = new Set<JobState>(["QUEUED", "PLACING", "STARTING", "RUNNING", "RESTARTING"]);
/** In these states a job can go on from a checkpoint. */
export const RESUMABLE: ReadonlySet<JobState> = new Set<JobState>(["PAUSED", "FAILED", "CANCELLED"]);

/** The orders that make sense now. What the controller answers is its own affair. */
export function Actions({ job }: { job: JobView }) {
  const [asked, setAsked] = useState<"pause" | "cancel" | null>(null);
  const order = useMutation({
    mutationFn: ({ what, body }: { what: Order; body?: StopRequest | ResumeRequest }) =>
      post(`v1/jobs/${job.id}/${what === "checkpoint" ? "checkpoints" : what}`, body),
    onSuccess: () => setAsked(null),
    onSettled: refreshAll,
  });

  function ask(what: "pause" | "cancel"): void {
    order.reset();
    setAsked(what);
  }

  return (
    <div className="actions" role="group" aria-label="Orders">
      {job.state === "RUNNING" ? (
        <button type="button" disabled={order.isPending} onClick={() => order.mutate({ what: "checkpoint" })}>
          Checkpoint now
        </button>
      ) : null}
      {PAUSABLE.has(job.state) ? (
        <button type="button" disabled={order.isPending} onClick={() => ask("pause")}>
          Pause…
        </button>
      ) : null}
      {RESUMABLE.has(job.state) ? (
        <button
          type="button"
          className={job.state === "PAUSED" ? "primary" : ""}
          title={job.latest_checkpoint ? "From its latest committed checkpoint" : "From the start: no checkpoint is committed"}
          disabled={order.isPending}
          onClick={() => order.mutate({ what: "resume", body: { from_checkpoint: null } satisfies ResumeRequest })}
        >
          Resume
        </button>
      ) : null}
      {isTerminal(job.state) ? null : (
        <button
          type="button"
          className="danger"
          disabled={order.isPending || job.state === "CANCELLING"}
          onClick={() => ask("cancel")}
        >
          Cancel…
        </button>
      )}
      {order.error && asked === null ? (
        <p className="trouble" role="alert">
          {order.error.message}{" "}
          <button type="button" className="dismiss" aria-label="Dismiss" onClick={() => order.reset()}>
            ×
          </button>
        </p>
      ) : null}
      {asked ? (
        <StopDialog
          job={job}
          what={asked}
          busy={order.isPending}
          error={order.error}
          onClose={() => {
            order.reset();
            setAsked(null);
          }}
          onStop={(body) => order.mutate({ what: asked, body })}
        />
      ) : null}
    </div>
  );
}

interface Choice {
  value: StopRequest["checkpoint"];
  label: string;
}

const CHOICES: Record<"pause" | "cancel", Choice[]> = {
  pause: [
    { value: "best_effort", label: "Take a checkpoint if that works" },
    { value: "required", label: "Require a checkpoint, else keep running" },
    { value: "none", label: "No checkpoint: steps since the last one are lost" },
  ],
  cancel: [
    { value: "best_effort", label: "Take a checkpoint if that works" },
    { value: "required", label: "Take a checkpoint, and report if it fails" },
    { value: "none", label: "No checkpoint: steps since the last one are lost" },
  ],
};

function StopDialog({
  job,
  what,
  busy,
  error,
  onClose,
  onStop,
}: {
  job: JobView;
  what: "pause" | "cancel";
  busy: boolean;
  error: Error | null;
  onClose: () => void;
  onStop: (body: StopRequest) => void;
}) {
  const [checkpoint, setCheckpoint] = useState<StopRequest["checkpoint"]>("best_effort");
  const [grace, setGrace] = useState("60");
  const field = useId();
  const seconds = Number(grace);
  const valid = grace.trim() !== "" && seconds >= 0 && seconds <= 86_400;
  const verb = what === "cancel" ? "Cancel" : "Pause";
  return (
    <Dialog title={`${verb} ${job.name}?`} onClose={onClose}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (valid) onStop({ checkpoint, grace_s: seconds });
        }}
      >
        <p>
          {what === "cancel"
            ? "The ranks stop and the job ends; its committed checkpoints stay."
            : "The ranks stop and free their slots; the job can be resumed."}{" "}
          <span className="muted">{shortId(job.id)}</span>
        </p>
        <fieldset>
          <legend>Before its ranks stop</legend>
          {CHOICES[what].map(({ value, label }) => (
            <label key={value}>
              <input
                type="radio"
                name={field}
                value={value}
                checked={checkpoint === value}
                onChange={() => setCheckpoint(value)}
              />
              {label}
            </label>
          ))}
        </fieldset>
        <label htmlFor={field}>
          Kill ranks that still run after{" "}
          <input
            id={field}
            type="number"
            min={0}
            max={86_400}
            step="any"
            value={grace}
            onChange={(event) => setGrace(event.target.value)}
          />{" "}
          seconds
        </label>
        {error ? (
          <p className="trouble" role="alert">
            {error.message}
          </p>
        ) : null}
        <div className="buttons">
          <button type="button" onClick={onClose}>
            Keep it running
          </button>
          <button type="submit" className={what === "cancel" ? "danger solid" : "primary"} disabled={busy || !valid}>
            {verb} job
          </button>
        </div>
      </form>
    </Dialog>
  );
}
