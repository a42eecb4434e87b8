// Pages by the part after `#`, so that any static server will do.

import { useSyncExternalStore } from "react";

export type Route =
  | { page: "jobs"; query: URLSearchParams }
  | { page: "job"; id: string }
  | { page: "nodes" }
  | { page: "plans"; query: URLSearchParams }
  | { page: "plan"; id: string }
  | { page: "nowhere"; hash: string };

export function parseRoute(hash: string): Route {
  const [path = "", search = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [first = "", second, ...rest] = path.split("/").filter((part) => part !== "");
  if (first === "" || (first === "jobs" && second === undefined)) return { page: "jobs", query: new URLSearchParams(search) };
  if (first === "jobs" && second !== undefined && rest.length === 0) return { page: "job", id: decodeURIComponent(second) };
  if (first === "nodes" && second === undefined) return { page: "nodes" };
  if (first === "plans" && second === undefined) return { page: "plans", query: new URLSearchParams(search) };
  if (first === "plans" && second !== undefined && rest.length === 0) return { page: "plan", id: decodeURIComponent(second) };
  return { page: "nowhere", hash };
}

export function jobHref(id: string): string {
  return `#/jobs/${encodeURIComponent(id)}`;
}

export function planHref(id: string): string {
  return `#/plans/${encodeURIComponent(id)}`;
}

/** The jobs page with these filters in its address: replaced, so that typing leaves no history. */
export function replaceJobsQuery(query: URLSearchParams): void {
  replaceQuery("jobs", query);
}

/** The same of another page. */
export function replaceQuery(page: string, query: URLSearchParams): void {
  const search = query.toString();
  history.replaceState(null, "", search ? `#/${page}?${search}` : `#/${page}`);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

function subscribe(listener: () => void): () => void {
  addEventListener("hashchange", listener);
  return () => removeEventListener("hashchange", listener);
}

export function useRoute(): Route {
  return parseRoute(useSyncExternalStore(subscribe, () => location.hash));
}
