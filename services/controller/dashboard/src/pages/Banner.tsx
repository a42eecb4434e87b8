import { useConnection } from "../api/connection";
import { clock, span } from "../ui/format";
import { useNow } from "../ui/time";

/** Says that what is shown is old, and how old. */
export function Banner() {
  const { downSince, detail } = useConnection();
  return (
    <div role="status" aria-live="polite">
      {downSince === null ? null : (
        <div className="banner">
          <strong>{detail === null ? "Controller unreachable" : "Controller unable to answer"}</strong> since{" "}
          {clock(downSince)} (<Since ms={downSince} />
          ). {detail === null ? "" : `${detail} `}This page shows its last answers. Running jobs are not affected.
        </div>
      )}
    </div>
  );
}

function Since({ ms }: { ms: number }) {
  useNow();
  return <>{span((Date.now() - ms) / 1_000)}</>;
}
