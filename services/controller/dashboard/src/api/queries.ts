// What is asked, and how often. Nothing is asked while the tab is hidden (TanStack's default).

import { keepPreviousData, QueryClient, useQuery } from "@tanstack/react-query";
import { get } from "./client";
import { connection } from "./connection";
import { follow } from "./follow";
import type {
  AttemptList,
  DiagnosisView,
  CheckpointList,
  EventView,
  JobPage,
  JobState,
  JobView,
  LogView,
  MetricsView,
  NodeList,
  PlanList,
  PlanState,
  PlanView,
  RankList,
  TraceList,
} from "./types";

const LIVE_MS = 1_000;
const CALM_MS = 2_000;
const SLOW_MS = 5_000;
const ENDED_MS = 10_000;
const UNREACHABLE_MS = 2_000;

const TERMINAL: ReadonlySet<JobState> = new Set<JobState>(["SUCCEEDED", "FAILED", "CANCELLED"]);
const AT_REST: ReadonlySet<JobState> = new Set<JobState>([...TERMINAL, "PAUSED"]);

export function isTerminal(state: JobState): boolean {
  return TERMINAL.has(state);
}

/** No rank of a job in this state computes. */
export function isAtRest(state: JobState): boolean {
  return AT_REST.has(state);
}

export const queryClient = new QueryClient({
  defaultOptions: {
    queries: {
      // The poll itself is the retry; a lost answer must not pause it when the system says offline.
      retry: false,
      networkMode: "always",
      staleTime: 500,
      gcTime: 5 * 60_000,
    },
    mutations: { retry: false, networkMode: "always" },
  },
});

interface Polled<T> {
  data: T | undefined;
  error: Error | null;
}

/** Until the next question: all alike while no one answers, forever without a token. */
function paced(everyMs: number): number | false {
  const { downSince, needsToken } = connection.get();
  if (needsToken) return false;
  return downSince === null ? everyMs : UNREACHABLE_MS;
}

function usePolled<T>(path: string, everyMs: number | ((data: T | undefined) => number)): Polled<T> {
  const { data, error } = useQuery({
    queryKey: [path],
    queryFn: ({ signal }) => get<T>(path, signal),
    // A 304 gives the very same object: there is nothing to compare.
    refetchInterval: (query) => paced(typeof everyMs === "number" ? everyMs : everyMs(query.state.data)),
  });
  return { data, error };
}

export interface JobFilter {
  states: JobState[];
  text: string;
  cursor: string | null;
}

export function useJobs(filter: JobFilter): Polled<JobPage> {
  const query = new URLSearchParams({ limit: "50" });
  for (const state of filter.states) query.append("state", state);
  // `team=demo` asks for a label, anything else for a name or an id.
  if (filter.text) query.set(filter.text.includes("=") ? "label" : "q", filter.text);
  if (filter.cursor) query.set("cursor", filter.cursor);
  const path = `v1/jobs?${query}`;
  const { data, error } = useQuery({
    queryKey: [path],
    queryFn: ({ signal }) => get<JobPage>(path, signal),
    // The old rows stay until the new filter's have come: no flicker while one types.
    placeholderData: keepPreviousData,
    refetchInterval: ({ state }) =>
      paced(!state.data || state.data.items.some((job) => !isAtRest(job.state)) ? LIVE_MS : SLOW_MS),
  });
  return { data, error };
}

export function useJob(id: string): Polled<JobView> {
  return usePolled<JobView>(`v1/jobs/${encodeURIComponent(id)}`, (job) =>
    job && isTerminal(job.state) ? ENDED_MS : LIVE_MS,
  );
}

export function useRanks(job: JobView): Polled<RankList> {
  return usePolled(`v1/jobs/${job.id}/ranks`, isAtRest(job.state) ? ENDED_MS : LIVE_MS);
}

/** The verdict on the newest attempt in trouble; asked for only where there is one to expect. */
export function useDiagnosis(job: JobView, expected: boolean): Polled<DiagnosisView> {
  const path = `v1/jobs/${job.id}/diagnosis`;
  const { data, error } = useQuery({
    queryKey: [path],
    queryFn: ({ signal }) => get<DiagnosisView>(path, signal),
    enabled: expected,
    refetchInterval: () => paced(isAtRest(job.state) ? ENDED_MS : CALM_MS),
  });
  return { data, error };
}

export function useMetrics(job: JobView): Polled<MetricsView> {
  return usePolled(`v1/jobs/${job.id}/metrics?max_points=800`, isAtRest(job.state) ? ENDED_MS : CALM_MS);
}

export function useCheckpoints(job: JobView): Polled<CheckpointList> {
  return usePolled(`v1/jobs/${job.id}/checkpoints`, isTerminal(job.state) ? ENDED_MS : CALM_MS);
}

export function useTraces(job: JobView): Polled<TraceList> {
  return usePolled(`v1/jobs/${job.id}/traces`, isAtRest(job.state) ? ENDED_MS : CALM_MS);
}

export function useAttempts(job: JobView): Polled<AttemptList> {
  return usePolled(`v1/jobs/${job.id}/attempts`, isTerminal(job.state) ? ENDED_MS : CALM_MS);
}

export function useNodes(): Polled<NodeList> {
  return usePolled("v1/nodes", CALM_MS);
}

export function usePlans(states: PlanState[], cursor: string | null): Polled<PlanList> {
  const query = new URLSearchParams({ limit: "50" });
  for (const state of states) query.append("state", state);
  if (cursor) query.set("cursor", cursor);
  const path = `v1/plans?${query}`;
  const { data, error } = useQuery({
    queryKey: [path],
    queryFn: ({ signal }) => get<PlanList>(path, signal),
    placeholderData: keepPreviousData,
    refetchInterval: ({ state }) =>
      paced(state.data?.items.some((plan) => plan.state === "PROBING") ? LIVE_MS : SLOW_MS),
  });
  return { data, error };
}

/** A plan changes until it is worked out, and never again. */
export function usePlan(id: string): Polled<PlanView> {
  return usePolled<PlanView>(`v1/plans/${encodeURIComponent(id)}`, (plan) =>
    plan && plan.state !== "PROBING" ? ENDED_MS : LIVE_MS,
  );
}

/** Asks for all that is shown once more, now: after an order, or when a job changed its state. */
export function refreshAll(): void {
  void queryClient.invalidateQueries();
}

const EVENTS_SHOWN = 500;
const LINES_SHOWN = 500;
const PAGE = 1_000;

export function useEvents(job: JobView): Polled<EventView[]> {
  return useFollowed<EventView>(`v1/jobs/${job.id}/events?limit=${PAGE}`, EVENTS_SHOWN, isTerminal(job.state) ? ENDED_MS : CALM_MS);
}

export function useLogs(job: JobView, rank: number | null, stream: string | null): Polled<LogView[]> {
  const query = new URLSearchParams({ limit: String(PAGE) });
  if (rank !== null) query.set("rank", String(rank));
  if (stream !== null) query.set("stream", stream);
  return useFollowed<LogView>(`v1/jobs/${job.id}/logs?${query}`, LINES_SHOWN, isAtRest(job.state) ? ENDED_MS : CALM_MS);
}

function useFollowed<T extends { id: string }>(path: string, keep: number, everyMs: number): Polled<T[]> {
  const { data, error } = useQuery({
    queryKey: [path],
    queryFn: ({ signal }) => follow<T>(path, keep, signal),
    structuralSharing: false,
    refetchInterval: () => paced(everyMs),
  });
  return { data, error };
}
