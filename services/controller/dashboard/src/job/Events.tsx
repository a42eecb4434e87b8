import { memo } from "react";
import { useEvents } from "../api/queries";
import type { EventView, JobView } from "../api/types";
import { clock, dateTime } from "../ui/format";
import { Panel, Quiet, Trouble } from "../ui/parts";

/** What happened, newest on top. */
export function Events({ job }: { job: JobView }) {
  const { data, error } = useEvents(job);
  const newestFirst = [...(data ?? [])].reverse();
  return (
    <Panel title="Events" aside={newestFirst.length > 0 ? newestFirst.length : null}>
      {!data && error ? <Trouble error={error} /> : null}
      {data && newestFirst.length === 0 ? <Quiet>No events yet.</Quiet> : null}
      {newestFirst.length > 0 ? (
        <ol className="timeline scroller tall" tabIndex={0} aria-label="Events, newest first">
          {newestFirst.map((event) => (
            <Entry key={event.id} event={event} />
          ))}
        </ol>
      ) : null}
    </Panel>
  );
}

const Entry = memo(function Entry({ event }: { event: EventView }) {
  return (
    <li className={`event ${weight(event)}`}>
      <time dateTime={event.at} title={dateTime(event.at)}>
        {clock(Date.parse(event.at))}
      </time>
      <span className="kind">{event.kind}</span>
      <span className="message">
        {event.message}
        <span className="muted"> {event.actor}</span>
      </span>
    </li>
  );
});

function weight({ kind }: EventView): string {
  if (/fail|lost|refus|abort|corrupt/.test(kind)) return "bad";
  if (/commit|succe|running|first_step/.test(kind)) return "good";
  return "";
}
