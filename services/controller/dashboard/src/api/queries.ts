// What is asked, and how often. Nothing is asked while the tab is hidden (TanStack's default).

import { keepPreviousData, QueryClient, useQueries, useQuery } from "@tanstack/react-query";
import { useEffect, useRef, useState, useSyncExternalStore } from "react";
import { forgetAnswers, get, stream } from "./client";
import { connection } from "./connection";
import { append, follow, forgetTrails, lastOf, shownOf } from "./follow";
import type {
  AttemptList,
  AuditPage,
  CapacityView,
  DiagnosisView,
  CheckpointList,
  EventView,
  JobPage,
  JobState,
  JobView,
  LogView,
  MetricsPart,
  MetricsView,
  NodeList,
  PlanList,
  PlanState,
  PlanView,
  PoolList,
  QueueView,
  RankList,
  TokenList,
  TraceList,
  WebhookList,
} from "./types";

const LIVE_MS = 1_000;
const CALM_MS = 2_000;
const SLOW_MS = 5_000;
const ENDED_MS = 10_000;
const SPARKLINE_MS = 15_000;
const RECONNECT_MS = 5_000;
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
  sort: string;
}

export function useJobs(filter: JobFilter): Polled<JobPage> {
  const query = new URLSearchParams({ limit: "50", sort: filter.sort });
  for (const state of filter.states) query.append("state", state);
  // `team=demo` asks for a label, `owner:ada` for an owner, anything else for a name or an id.
  for (const word of filter.text.split(/\s+/).filter((part) => part !== "")) {
    if (word.startsWith("owner:")) query.set("owner", word.slice(6));
    else if (word.includes("=")) query.append("label", word);
    else query.set("q", [query.get("q"), word].filter(Boolean).join(" "));
  }
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

/** The same of several; one that is not there does not hide the others. */
export function useJobsById(ids: string[]): Polled<JobView>[] {
  return useQueries({
    queries: ids.map((id) => {
      const path = `v1/jobs/${encodeURIComponent(id)}`;
      return {
        queryKey: [path],
        queryFn: ({ signal }: { signal: AbortSignal }) => get<JobView>(path, signal),
        refetchInterval: ({ state }: { state: { data: JobView | undefined } }) =>
          paced(state.data && isTerminal(state.data.state) ? ENDED_MS : LIVE_MS),
      };
    }),
  });
}

/** The more ranks there are, the longer the answer, and the rarer the question. */
export function useRanks(job: JobView): Polled<RankList> {
  const everyMs = job.world_size > 1_024 ? SLOW_MS : job.world_size > 128 ? CALM_MS : LIVE_MS;
  return usePolled(`v1/jobs/${job.id}/ranks`, isAtRest(job.state) ? ENDED_MS : everyMs);
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

const POINTS = 800;
const POINTS_AT_MOST = 10_000;

/** Of each job its metrics; `steps` alone if given, and so in more detail. */
export function useMetrics(jobs: { id: string; state: JobState }[], steps: [number, number] | null): (MetricsView | undefined)[] {
  const range = steps ? `&from_step=${Math.max(0, Math.floor(steps[0]))}&to_step=${Math.ceil(steps[1])}` : "";
  return useQueries({
    queries: jobs.map(({ id, state }) => {
      const path = `v1/jobs/${encodeURIComponent(id)}/metrics?max_points=${POINTS}${range}`;
      return {
        queryKey: ["metrics", id, range],
        queryFn: ({ signal }: { signal: AbortSignal }) => get<MetricsView>(path, signal),
        placeholderData: (before: MetricsView | undefined) => before,
        structuralSharing: false,
        refetchInterval: () => paced(isAtRest(state) ? ENDED_MS : CALM_MS),
      };
    }),
    combine: sameWhereSame,
  });
}

// TanStack keeps the array as long as no result changes.
function sameWhereSame(results: { data: MetricsView | undefined }[]): (MetricsView | undefined)[] {
  return results.map((result) => result.data);
}

/** Every step of a job, none left out, by as many requests as that takes. */
export async function allMetrics(id: string): Promise<MetricsView> {
  const part = (from: number) =>
    get<MetricsView>(`v1/jobs/${encodeURIComponent(id)}/metrics?max_points=${POINTS_AT_MOST}&from_step=${from}&to_step=${from + POINTS_AT_MOST - 1}`);
  const last = (await get<JobView>(`v1/jobs/${encodeURIComponent(id)}`)).progress.step;
  let whole = await part(0);
  for (let from = POINTS_AT_MOST; from <= last; from += POINTS_AT_MOST) {
    const more = await part(from);
    whole = {
      ...more,
      items: [...whole.items, ...more.items],
      evaluations: [...whole.evaluations, ...more.evaluations],
      user_metrics: [...whole.user_metrics, ...more.user_metrics],
    };
  }
  return whole;
}

/** The loss alone, few points of it: for a curve of a finger's breadth. */
export function useSparkline(job: JobView, visible: boolean): (number | null)[] {
  const path = `v1/jobs/${job.id}/metrics?name=loss&max_points=48`;
  const { data } = useQuery({
    queryKey: ["sparkline", job.id],
    queryFn: ({ signal }) => get<MetricsPart>(path, signal),
    enabled: visible && job.progress.step > 0,
    staleTime: isAtRest(job.state) ? Infinity : SPARKLINE_MS,
    refetchInterval: () => (isAtRest(job.state) ? false : paced(SPARKLINE_MS)),
  });
  return (data?.items ?? []).map((item) => item["loss"] ?? null);
}

export function useCheckpoints(job: { id: string; state: JobState }): Polled<CheckpointList> {
  return usePolled<CheckpointList>(`v1/jobs/${job.id}/checkpoints`, (list) =>
    isTerminal(job.state) && !list?.items.some(({ export: made }) => made?.state === "RUNNING") ? ENDED_MS : CALM_MS,
  );
}

export function useQueue(): Polled<QueueView> {
  return usePolled("v1/queue", CALM_MS);
}

export function useCapacity(): Polled<CapacityView> {
  return usePolled("v1/capacity", CALM_MS);
}

export function usePools(): Polled<PoolList> {
  return usePolled("v1/pools", CALM_MS);
}

export function useWebhooks(): Polled<WebhookList> {
  return usePolled("v1/webhooks", SLOW_MS);
}

export function useTokens(): Polled<TokenList> {
  return usePolled("v1/tokens", ENDED_MS);
}

export function useAudit(cursor: string | null): Polled<AuditPage> {
  return usePolled(`v1/audit?limit=50${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`, SLOW_MS);
}

export function useTraces(job: JobView): Polled<TraceList> {
  return usePolled(`v1/jobs/${job.id}/traces`, isAtRest(job.state) ? ENDED_MS : CALM_MS);
}

export function useAttempts(job: JobView): Polled<AttemptList> {
  return usePolled(`v1/jobs/${job.id}/attempts`, isTerminal(job.state) ? ENDED_MS : CALM_MS);
}

export function useNodes(): Polled<NodeList> {
  const { data, error } = useQuery({
    queryKey: ["v1/nodes"],
    queryFn: ({ signal }) => allNodes(signal),
    refetchInterval: () => paced(CALM_MS),
  });
  return { data, error };
}

/** Page after page: most clusters have one, whose 304 gives the very same object. */
async function allNodes(signal: AbortSignal): Promise<NodeList> {
  const first = await get<NodeList>("v1/nodes?limit=1000", signal);
  let cursor = first.next_cursor;
  if (!cursor) return first;
  const items = [...first.items];
  while (cursor) {
    const page: NodeList = await get<NodeList>(`v1/nodes?limit=1000&cursor=${encodeURIComponent(cursor)}`, signal);
    items.push(...page.items);
    cursor = page.next_cursor;
  }
  return { ...first, items, next_cursor: null };
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

/** Forgets every answer, and drops the questions that wait for one: another subject may ask from now on. */
export function forgetAll(): void {
  queryClient.clear();
  forgetAnswers();
  forgetTrails();
}

const EVENTS_SHOWN = 500;
const LINES_SHOWN = 500;
const LIVE_LINES_SHOWN = 5_000;
const PAGE = 1_000;

/** What happened to a job: at once by a stream, and where that breaks by polling. */
export function useEvents(job: JobView): Polled<EventView[]> {
  // An event is a change of the job, or of something that the page shows of it.
  const onEntry = () => void queryClient.invalidateQueries({ predicate: ({ queryKey }) => isOfJob(String(queryKey[0]), job.id) });
  return useLive<EventView>(`v1/jobs/${job.id}/events`, EVENTS_SHOWN, isTerminal(job.state), onEntry);
}

function isOfJob(path: string, id: string): boolean {
  const whole = `v1/jobs/${id}`;
  return path === whole || [`${whole}/checkpoints`, `${whole}/attempts`, `${whole}/diagnosis`].includes(path);
}

export interface LineFilter {
  rank: number | null;
  stream: string | null;
  level: string | null;
  text: string;
}

export function logsPath(job: string, { rank, stream: from, level, text }: LineFilter): string {
  const query = new URLSearchParams();
  if (rank !== null) query.set("rank", String(rank));
  if (from !== null) query.set("stream", from);
  if (level !== null) query.set("level", level);
  if (text) query.set("text", text);
  const search = query.toString();
  return `v1/jobs/${encodeURIComponent(job)}/logs${search ? `?${search}` : ""}`;
}

/** The last lines, polled: the job page leaves its stream to the events. */
export function useLogs(job: JobView, filter: LineFilter): Polled<LogView[]> {
  const path = logsPath(job.id, filter);
  return useFollowed<LogView>(paged(path), LINES_SHOWN, isAtRest(job.state) ? ENDED_MS : CALM_MS);
}

/** The same as they come, and more of them. */
export function useLiveLogs(job: JobView, filter: LineFilter): Polled<LogView[]> {
  return useLive<LogView>(logsPath(job.id, filter), LIVE_LINES_SHOWN, isTerminal(job.state));
}

/** Every line that matches, as text. */
export async function allLines(job: string, filter: LineFilter): Promise<string> {
  const lines = await follow<LogView>(paged(logsPath(job, filter)), Infinity);
  return lines.map((line) => `${new Date(line.time_ms).toISOString()} rank ${line.rank} ${line.stream} ${line.text}`).join("\n");
}

function paged(path: string): string {
  return `${path}${path.includes("?") ? "&" : "?"}limit=${PAGE}`;
}

function useFollowed<T extends { id: string }>(path: string, keep: number, everyMs: number | false): Polled<T[]> {
  const { data, error } = useQuery({
    queryKey: [path],
    queryFn: ({ signal }) => follow<T>(path, keep, signal),
    structuralSharing: false,
    refetchInterval: () => (everyMs === false ? false : paced(everyMs)),
  });
  return { data, error };
}

/** A list that grows: what there is by pages, what comes by a stream, and by polling while there is none. */
function useLive<T extends { id: string }>(path: string, keep: number, ended: boolean, onEntry?: () => void): Polled<T[]> {
  const [streams, setStreams] = useState(false);
  const list = paged(path);
  const polled = useFollowed<T>(list, keep, streams ? false : ended ? ENDED_MS : CALM_MS);
  const told = useRef(onEntry);
  told.current = onEntry;
  const visible = useSyncExternalStore(onVisibility, () => !document.hidden);
  const isThere = polled.data !== undefined;
  useEffect(() => {
    if (!visible || ended || !isThere) return;
    const stop = new AbortController();
    void keepFollowing<T>(path, list, keep, stop.signal, setStreams, () => told.current?.());
    return () => {
      stop.abort();
      setStreams(false);
    };
  }, [path, list, keep, ended, visible, isThere]);
  return polled;
}

async function keepFollowing<T extends { id: string }>(
  path: string,
  list: string,
  keep: number,
  signal: AbortSignal,
  onState: (streams: boolean) => void,
  onEntry: () => void,
): Promise<void> {
  const live = path.includes("/logs") ? `${path}${path.includes("?") ? "&" : "?"}follow=true` : path;
  while (!signal.aborted) {
    try {
      const ended = await stream(
        live,
        lastOf(list),
        () => onState(true),
        (text) => {
          append(list, JSON.parse(text) as T, keep);
          queryClient.setQueryData([list], shownOf(list));
          onEntry();
        },
        signal,
      );
      if (ended) return;
    } catch {
      // Refused, as when too many streams are open, or broken off: polling goes on, and we come back.
    }
    if (signal.aborted) return;
    onState(false);
    await new Promise((resume) => setTimeout(resume, RECONNECT_MS));
  }
}

/** Asks for lists of jobs again as soon as something happens to any job; they are polled all the same. */
export function useAnyEvent(): void {
  const visible = useSyncExternalStore(onVisibility, () => !document.hidden);
  useEffect(() => {
    if (!visible) return;
    const stop = new AbortController();
    void listen(stop.signal);
    return () => stop.abort();
  }, [visible]);
}

const LISTS_OF_JOBS = /^v1\/(jobs\?|queue$|capacity$)/;

async function listen(signal: AbortSignal): Promise<void> {
  const onEntry = () => void queryClient.invalidateQueries({ predicate: ({ queryKey }) => LISTS_OF_JOBS.test(String(queryKey[0])) });
  while (!signal.aborted) {
    try {
      await stream("v1/events", null, () => undefined, onEntry, signal);
    } catch {
      // Refused or broken off: polling goes on, and we come back.
    }
    if (!signal.aborted) await new Promise((resume) => setTimeout(resume, RECONNECT_MS));
  }
}

function onVisibility(listener: () => void): () => void {
  document.addEventListener("visibilitychange", listener);
  return () => document.removeEventListener("visibilitychange", listener);
}
