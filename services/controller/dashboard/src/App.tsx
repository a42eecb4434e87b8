import { useEffect } from "react";
import { useConnection } from "./api/connection";
import { Banner } from "./pages/Banner";
import { JobPage } from "./pages/JobPage";
import { JobsPage } from "./pages/JobsPage";
import { NodesPage } from "./pages/NodesPage";
import { PlanPage } from "./pages/PlanPage";
import { PlansPage } from "./pages/PlansPage";
import { TokenPrompt } from "./pages/TokenPrompt";
import { useRoute } from "./router";
import { Quiet } from "./ui/parts";

export function App() {
  const route = useRoute();
  const { needsToken } = useConnection();

  useEffect(() => {
    if (route.page === "jobs") document.title = "Jobs · Meshloom";
    if (route.page === "plans") document.title = "Plans · Meshloom";
    if (route.page === "nodes") document.title = "Nodes · Meshloom";
  }, [route.page]);

  return (
    <>
      <a className="skip" href="#main" onClick={skipToMain}>
        Skip to content
      </a>
      <header className="top">
        <a className="brand" href="#/jobs" aria-label="Meshloom, jobs">
          <Mark />
          Meshloom
        </a>
        <nav aria-label="Pages">
          <a href="#/jobs" aria-current={route.page === "jobs" || route.page === "job" ? "page" : undefined}>
            Jobs
          </a>
          <a href="#/plans" aria-current={route.page === "plans" || route.page === "plan" ? "page" : undefined}>
            Plans
          </a>
          <a href="#/nodes" aria-current={route.page === "nodes" ? "page" : undefined}>
            Nodes
          </a>
        </nav>
      </header>
      <Banner />
      <main id="main" tabIndex={-1}>
        {route.page === "jobs" ? <JobsPage query={route.query} /> : null}
        {route.page === "job" ? <JobPage key={route.id} id={route.id} /> : null}
        {route.page === "plans" ? <PlansPage query={route.query} /> : null}
        {route.page === "plan" ? <PlanPage key={route.id} id={route.id} /> : null}
        {route.page === "nodes" ? <NodesPage /> : null}
        {route.page === "nowhere" ? (
          <Quiet>
            Nothing is here. <a href="#/jobs">All jobs</a>
          </Quiet>
        ) : null}
      </main>
      {needsToken ? <TokenPrompt /> : null}
    </>
  );
}

// `#main` would be read as a page: move the focus without touching the address.
function skipToMain(event: React.MouseEvent): void {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

function Mark() {
  return (
    <svg className="mark" viewBox="0 0 32 32" aria-hidden="true">
      <g fill="none" strokeWidth="3.4" strokeLinecap="round">
        <path className="warp" d="M8 5v22M16 5v22M24 5v22" />
        <path className="weft" d="M5 11h6M13 11h6M21 11h6M5 21h22" />
      </g>
    </svg>
  );
}
