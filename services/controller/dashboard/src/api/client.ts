// One door to the controller. Every GET is conditional: what a URL answered last is kept with its
// ETag, and a 304 returns the very same object, so that React renders nothing again.

import { connection } from "./connection";
import type { Problem } from "./types";

const KEPT_ANSWERS = 128;
const TIMEOUT_MS = 15_000;
const TOKEN_KEY = "meshloom.token";

interface Kept {
  etag: string;
  data: unknown;
}

const kept = new Map<string, Kept>();

/** The controller answered, and the answer was no. */
export class ProblemError extends Error {
  readonly status: number;
  readonly problem: Problem | null;

  constructor(status: number, problem: Problem | null, fallback: string) {
    super(problem?.detail || problem?.title || fallback);
    this.name = "ProblemError";
    this.status = status;
    this.problem = problem;
  }
}

/** No answer came. */
export class UnreachableError extends Error {
  constructor() {
    super("The controller does not answer.");
    this.name = "UnreachableError";
  }
}

export const token = {
  get: (): string | null => sessionStorage.getItem(TOKEN_KEY),
  set: (value: string): void => sessionStorage.setItem(TOKEN_KEY, value),
  clear: (): void => sessionStorage.removeItem(TOKEN_KEY),
};

/** Forgets what was answered to the token before. */
export function forgetAnswers(): void {
  kept.clear();
}

/** GET `path` (relative to the page, such as `v1/jobs`); an unchanged answer is the same object. */
export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  const before = kept.get(path);
  const headers: Record<string, string> = { Accept: "application/json" };
  if (before) headers["If-None-Match"] = before.etag;
  const response = await send(path, { headers, ...(signal ? { signal } : {}) });
  if (response.status === 304 && before) {
    remember(path, before);
    return before.data as T;
  }
  if (!response.ok) throw await refused(response);
  const data: unknown = await response.json();
  const etag = response.headers.get("ETag");
  if (etag) remember(path, { etag, data });
  return data as T;
}

/** POST, with a JSON body if there is one; gives what the controller answers. */
export async function post<T = unknown>(path: string, body?: object, headers: Record<string, string> = {}): Promise<T> {
  const response = await send(path, {
    method: "POST",
    headers: { ...(body ? { "Content-Type": "application/json" } : {}), ...headers },
    ...(body ? { body: JSON.stringify(body) } : {}),
  });
  if (!response.ok) throw await refused(response);
  return (await response.json()) as T;
}

/** DELETE; the answer has nothing that anybody reads. */
export async function remove(path: string): Promise<void> {
  const response = await send(path, { method: "DELETE" });
  if (!response.ok) throw await refused(response);
}

/** A file of `path`, whole, however long it takes. */
export async function blob(path: string): Promise<Blob> {
  const response = await send(path, {}, null);
  if (!response.ok) throw await refused(response);
  return response.blob();
}

/**
 * Server-sent events of `path` until they end or `signal` aborts. The browser's own EventSource cannot
 * show a token.
 *
 * Gives true where the controller says that nothing more will come.
 */
export async function stream(
  path: string,
  after: string | null,
  onOpen: () => void,
  onEntry: (data: string) => void,
  signal: AbortSignal,
): Promise<boolean> {
  const headers: Record<string, string> = { Accept: "text/event-stream" };
  if (after !== null) headers["Last-Event-ID"] = after;
  const response = await send(path, { headers, signal }, null);
  if (!response.ok) throw await refused(response);
  onOpen();
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = (await reader?.read()) ?? { done: true, value: "" };
    if (done) return false;
    text += value;
    const frames = text.split("\n\n");
    text = frames.pop() ?? "";
    for (const frame of frames) {
      const lines = frame.split("\n");
      const kind = lines.find((line) => line.startsWith("event: "))?.slice(7) ?? "";
      if (kind === "end") return true;
      if (kind === "refused") return false;
      const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      if (data.length > 0) onEntry(data.join("\n"));
    }
  }
}

/** `limitMs`: until when an answer must be there, all of it; null for one that goes on. */
async function send(path: string, init: RequestInit, limitMs: number | null = TIMEOUT_MS): Promise<Response> {
  const headers = new Headers(init.headers);
  const bearer = token.get();
  if (bearer) headers.set("Authorization", `Bearer ${bearer}`);
  const signals = [init.signal, limitMs === null ? null : AbortSignal.timeout(limitMs)].filter((one) => one instanceof AbortSignal);
  const signal = AbortSignal.any(signals);
  let response: Response;
  try {
    response = await fetch(new URL(path, document.baseURI), {
      ...init,
      headers,
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    connection.lost();
    throw new UnreachableError();
  }
  connection.answered(response);
  return response;
}

async function refused(response: Response): Promise<ProblemError> {
  let problem: Problem | null = null;
  try {
    if (response.headers.get("Content-Type")?.includes("json")) problem = (await response.json()) as Problem;
  } catch {
    // A proxy's own error page: the status says what there is to say.
  }
  const error = new ProblemError(response.status, problem, `HTTP ${response.status} ${response.statusText}`.trim());
  if (response.status === 401) connection.unauthorized();
  // Without a stream pages are polled: the controller is well.
  if (response.status >= 502 && problem?.code !== "too_many_streams") connection.unavailable(error.message);
  return error;
}

function remember(path: string, answer: Kept): void {
  kept.delete(path);
  kept.set(path, answer);
  for (const oldest of kept.keys()) {
    if (kept.size <= KEPT_ANSWERS) break;
    kept.delete(oldest);
  }
}
