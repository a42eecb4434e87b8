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

/** POST, with a JSON body if there is one; orders are idempotent, and only errors are read. */
export async function post(path: string, body?: object): Promise<void> {
  const response = await send(path, {
    method: "POST",
    ...(body ? { headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) } : {}),
  });
  if (!response.ok) throw await refused(response);
}

async function send(path: string, init: RequestInit): Promise<Response> {
  const headers = new Headers(init.headers);
  const bearer = token.get();
  if (bearer) headers.set("Authorization", `Bearer ${bearer}`);
  const limit = AbortSignal.timeout(TIMEOUT_MS);
  const signal = init.signal ? AbortSignal.any([init.signal, limit]) : limit;
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
  if (response.status >= 502) connection.unavailable(error.message);
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
