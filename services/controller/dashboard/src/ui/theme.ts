// Light or dark: as the system has it, or as a person chose in this browser.

import { useSyncExternalStore } from "react";

export type Theme = "system" | "light" | "dark";
export const THEMES: Theme[] = ["system", "light", "dark"];

const KEPT_AS = "meshloom.theme";
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();

function kept(): Theme {
  try {
    return THEMES.find((theme) => theme === localStorage.getItem(KEPT_AS)) ?? "system";
  } catch {
    // A browser may refuse to keep anything: then the choice lives as long as the tab.
    return "system";
  }
}

let chosen = kept();

/** The colours follow `data-theme` of the document, which is always one of the two. */
function apply(): void {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  for (const listener of listeners) listener();
}

function isDark(): boolean {
  return chosen === "dark" || (chosen === "system" && system.matches);
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function chooseTheme(theme: Theme): void {
  chosen = theme;
  try {
    localStorage.setItem(KEPT_AS, theme);
  } catch {
    // As above.
  }
  apply();
}

export function useTheme(): Theme {
  return useSyncExternalStore(subscribe, () => chosen);
}

/** Whether the dark colours are shown: what is on a canvas must be drawn again when they change. */
export function useIsDark(): boolean {
  return useSyncExternalStore(subscribe, isDark);
}

system.addEventListener("change", apply);
// Another tab of the same dashboard may choose, too.
addEventListener("storage", ({ key }) => {
  if (key !== KEPT_AS) return;
  chosen = kept();
  apply();
});
apply();
