import { lazy, Suspense, useEffect } from "react";
import { token } from "./api/client";
import { connection, useConnection } from "./api/connection";
import { Banner } from "./pages/Banner";
import { JobsPage } from "./pages/JobsPage";
import { LoginPage } from "./pages/LoginPage";
import { type PageName, type Route, useRoute } from "./router";
import { Quiet } from "./ui/parts";
import { chooseTheme, type Theme, THEMES, useTheme } from "./ui/theme";

// Each page is a file of its own, which the browser asks for when the page is first opened.
const AccessPage = lazy(() => import("./pages/AccessPage"));
const CheckpointsPage = lazy(() => import("./pages/CheckpointsPage"));
const ComparePage = lazy(() => import("./pages/ComparePage"));
const JobPage = lazy(() => import("./pages/JobPage"));
const LogsPage = lazy(() => import("./pages/LogsPage"));
const NodesPage = lazy(() => import("./pages/NodesPage"));
const PlanPage = lazy(() => import("./pages/PlanPage"));
const PlansPage = lazy(() => import("./pages/PlansPage"));
const QueuePage = lazy(() => import("./pages/QueuePage"));
const SubmitPage = lazy(() => import("./pages/SubmitPage"));
const WebhooksPage = lazy(() => import("./pages/WebhooksPage"));

const MENU: { page: PageName; title: string; also: PageName[] }[] = [
  { page: "jobs", title: "Jobs", also: ["job", "logs"] },
  { page: "compare", title: "Compare", also: [] },
  { page: "queue", title: "Queue", also: [] },
  { page: "plans", title: "Plans", also: ["plan"] },
  { page: "checkpoints", title: "Checkpoints", also: [] },
  { page: "nodes", title: "Nodes", also: [] },
  { page: "webhooks", title: "Webhooks", also: [] },
  { page: "access", title: "Access", also: [] },
];
// The others know their own titles once they have their data.
const TITLES: Partial<Record<PageName, string>> = {
  ...Object.fromEntries(MENU.map(({ page, title }) => [page, title])),
  submit: "Submit",
  login: "Log in",
};

export function App() {
  const route = useRoute();
  const { needsToken } = useConnection();
  const { page } = route;

  useEffect(() => {
    const title = page && TITLES[page];
    if (title) document.title = `${title} · Meshloom`;
  }, [page]);

  return (
    <>
      <a className="skip" href="#main" onClick={skipToMain}>
        Skip to content
      </a>
      <header className="top">
        <a className="brand" href="#/jobs" aria-label="Meshloom, jobs">
          <Mark />
          <span>Meshloom</span>
        </a>
        <nav aria-label="Pages">
          {MENU.map((entry) => (
            <a key={entry.page} href={`#/${entry.page}`} aria-current={isHere(entry, page) ? "page" : undefined}>
              {entry.title}
            </a>
          ))}
        </nav>
        <a className="button primary" href="#/submit" aria-current={page === "submit" ? "page" : undefined}>
          Submit
        </a>
        <ThemeChoice />
        {token.get() !== null && !needsToken ? (
          <button type="button" onClick={logOut}>
            Log out
          </button>
        ) : null}
      </header>
      <Banner />
      <main id="main" tabIndex={-1}>
        {needsToken || page === "login" ? (
          <LoginPage />
        ) : (
          <Suspense fallback={<div className="page"><Quiet>Loading…</Quiet></div>}>
            <Page route={route} />
          </Suspense>
        )}
      </main>
    </>
  );
}

function ThemeChoice() {
  const theme = useTheme();
  return (
    <select className="theme" aria-label="Theme" title="Colours of the dashboard in this browser" value={theme} onChange={({ target }) => chooseTheme(target.value as Theme)}>
      {THEMES.map((name) => (
        <option key={name} value={name}>
          {name}
        </option>
      ))}
    </select>
  );
}

function Page({ route: { page, id, query } }: { route: Route }) {
  switch (page) {
    case "jobs":
      return <JobsPage query={query} />;
    case "job":
      return <JobPage key={id} id={id} />;
    case "logs":
      return <LogsPage key={id} id={id} query={query} />;
    case "compare":
      return <ComparePage query={query} />;
    case "submit":
      return <SubmitPage key={query.toString()} query={query} />;
    case "queue":
      return <QueuePage />;
    case "plans":
      return <PlansPage query={query} />;
    case "plan":
      return <PlanPage key={id} id={id} />;
    case "checkpoints":
      return <CheckpointsPage query={query} />;
    case "nodes":
      return <NodesPage />;
    case "webhooks":
      return <WebhooksPage />;
    case "access":
      return <AccessPage query={query} />;
    default:
      return (
        <div className="page">
          <Quiet>
            This page does not exist. <a href="#/jobs">All jobs</a>
          </Quiet>
        </div>
      );
  }
}

function isHere(entry: { page: PageName; also: PageName[] }, page: PageName | null): boolean {
  return page !== null && (entry.page === page || entry.also.includes(page));
}

function logOut(): void {
  token.clear();
  connection.unauthorized();
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
