// What a rank is doing: word, two letters and colour. The colours are Okabe and Ito's, which stay
// apart for colour-blind eyes; the letters tell the phases apart without any colour.

export interface Phase {
  word: string;
  letters: string;
  /** Class name suffix: `phase-…` in the style sheet. */
  family: "start" | "data" | "idle" | "forward" | "pre" | "backward" | "optimizer" | "eval" | "checkpoint" | "done" | "failed";
}

const PHASES: Record<string, Phase> = {
  PENDING: { word: "pending", letters: "··", family: "idle" },
  SPAWNED: { word: "spawned", letters: "SP", family: "start" },
  INIT: { word: "init", letters: "IN", family: "start" },
  RENDEZVOUS: { word: "rendezvous", letters: "RV", family: "start" },
  BUILD: { word: "build", letters: "BU", family: "start" },
  LOAD: { word: "load", letters: "LD", family: "start" },
  DATA: { word: "data", letters: "DA", family: "data" },
  IDLE: { word: "idle", letters: "ID", family: "idle" },
  FORWARD: { word: "forward", letters: "FW", family: "forward" },
  PRE_BACKWARD: { word: "pre-backward", letters: "PB", family: "pre" },
  POST_BACKWARD: { word: "post-backward", letters: "BW", family: "backward" },
  OPTIMIZER: { word: "optimizer", letters: "OP", family: "optimizer" },
  EVAL: { word: "eval", letters: "EV", family: "eval" },
  CHECKPOINT: { word: "checkpoint", letters: "CK", family: "checkpoint" },
  TRACE: { word: "trace", letters: "TR", family: "eval" },
  SCRIPT: { word: "script", letters: "SC", family: "forward" },
  FINISHED: { word: "finished", letters: "✓", family: "done" },
  FAILED: { word: "failed", letters: "✕", family: "failed" },
};

export function phaseOf(name: string): Phase {
  return (
    PHASES[name.toUpperCase().replaceAll("-", "_")] ?? {
      word: name.toLowerCase(),
      letters: name.slice(0, 2).toUpperCase() || "?",
      family: "idle",
    }
  );
}
