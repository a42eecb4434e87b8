// Pages by the part after `#`, so that any static server will do.

import { useSyncExternalStore } from "react";

export const PAGES = ["jobs", "job", "logs", "compare", "submit", "queue", "plans", "plan", "checkpoints", "nodes", "webhooks", "access", "login"] as const;
export type PageName = (typeof PAGES)[number];

export interface Route {
  /** Null where the address names no page. */
  page: PageName | null;
  /** Of a job or a plan; else empty. */
  id: string;
  query: URLSearchParams;
}

const LISTS: Record<string, PageName> = {
  "": "jobs",
  jobs: "jobs",
  compare: "compare",
  submit: "submit",
  queue: "queue",
  plans: "plans",
  checkpoints: "checkpoints",
  nodes: "nodes",
  webhooks: "webhooks",
  access: "access",
  login: "login",
};
const ITEMS: Record<string, PageName> = { "jobs/": "job", "jobs/logs": "logs", "plans/": "plan" };

export function parseRoute(hash: string): Route {
  const [path = "", search = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [first = "", id, part = "", ...rest] = path.split("/").filter((piece) => piece !== "");
  const query = new URLSearchParams(search);
  const known = id === undefined ? (LISTS[first] ?? null) : (ITEMS[`${first}/${part}`] ?? null);
  return { page: rest.length > 0 ? null : known, id: id === undefined ? "" : decoded(id), query };
}

/** A hand-written address may hold a percent sign that means nothing. */
function decoded(id: string): string {
  try {
    return decodeURIComponent(id);
  } catch {
    return id;
  }
}

export function jobHref(id: string): string {
  return `#/jobs/${encodeURIComponent(id)}`;
}

export function logsHref(id: string): string {
  return `${jobHref(id)}/logs`;
}

export function planHref(id: string): string {
  return `#/plans/${encodeURIComponent(id)}`;
}

export function compareHref(ids: string[]): string {
  return `#/compare?jobs=${ids.map(encodeURIComponent).join(",")}`;
}

export function checkpointsHref(job: string): string {
  return `#/checkpoints?job=${encodeURIComponent(job)}`;
}

export function submitHref(from: string): string {
  return `#/submit?from=${encodeURIComponent(from)}`;
}

/** The same page with another query: replaced, so that typing leaves no history. */
export function replaceQuery(page: string, query: URLSearchParams): void {
  // A comma is legible, and no part of an id.
  const search = query.toString().replaceAll("%2C", ",");
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
