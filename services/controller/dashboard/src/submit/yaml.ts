// A spec as YAML: where a JSON pointer stands in the text, and where in the spec the cursor stands.

import { isMap, isNode, type Node, type ParsedNode, parseDocument, type Document } from "yaml";
import type { Fault } from "./schema";

export interface Mistake {
  from: number;
  to: number;
  message: string;
}

export interface Parsed {
  /** Null where the text is no YAML. */
  spec: unknown;
  mistakes: Mistake[];
  document: Document.Parsed<ParsedNode>;
}

// Each bracket that nothing closes is one.
const MOST_MISTAKES = 100;

export function parse(text: string): Parsed {
  try {
    const document = parseDocument(text, { prettyErrors: false });
    const mistakes = document.errors.slice(0, MOST_MISTAKES).map(({ pos, message }) => ({ from: pos[0], to: pos[1], message }));
    return { document, mistakes, spec: mistakes.length > 0 ? null : document.toJS() };
  } catch (error) {
    // Of an alias that stands for nothing, for itself or for too much, and of thousands of brackets: no page may end by what is typed.
    const message = error instanceof Error ? error.message : String(error);
    return { document: parseDocument(""), mistakes: [{ from: 0, to: text.length, message }], spec: null };
  }
}

/** A fault at its place in the text. */
export function locate({ document }: Parsed, { pointer, detail, ofKey }: Fault): Mistake {
  const path = pointer.split("/").slice(1).map((part) => part.replaceAll("~1", "/").replaceAll("~0", "~"));
  // What is missing has no place: the nearest mapping that is there has.
  for (let length = path.length; length >= 0; length--) {
    const part = path.slice(0, length);
    const node = (ofKey && length === path.length ? keyAt(document, part) : document.getIn(part.map(index), true)) as Node | undefined;
    if (isNode(node) && node.range) {
      const [from, to] = node.range;
      const message = length === path.length ? detail : `${path.slice(length).join("/")}: ${detail}`;
      return { from, to: Math.max(to, from + 1), message };
    }
  }
  return { from: 0, to: 1, message: detail };
}

function index(part: string): string | number {
  return /^\d+$/.test(part) ? Number(part) : part;
}

function keyAt(document: Document.Parsed<ParsedNode>, path: string[]): Node | undefined {
  const parent = path.length === 1 ? document.contents : document.getIn(path.slice(0, -1).map(index), true);
  if (!isMap(parent)) return undefined;
  const pair = parent.items.find(({ key }) => String(key) === path.at(-1));
  return isNode(pair?.key) ? pair.key : undefined;
}

export interface Cursor {
  /** Of the mapping in which a key is being written, or of the value. */
  path: string[];
  what: "key" | "value";
  /** Where the word under the cursor begins. */
  from: number;
  /** Keys that the mapping has already, as far as the line shows. */
  taken: string[];
}

const ENTRY = /^(\s*)(?:- )?([A-Za-z_][\w.-]*):(.*)$/;

/** Where the cursor stands, by indentation and by the braces of its line: half-written text is no YAML. */
export function cursorAt(text: string, position: number): Cursor {
  const lineStart = text.lastIndexOf("\n", position - 1) + 1;
  const before = text.slice(lineStart, position);
  const lines = text.slice(0, lineStart).split("\n").slice(0, -1);
  const indent = /^\s*/.exec(before)?.[0].length ?? 0;
  const path = parents(lines, indent);

  let rest = before;
  const entry = ENTRY.exec(before);
  const inside: string[] = [];
  if (entry) {
    inside.push(entry[2] ?? "");
    rest = entry[3] ?? "";
    const open: string[] = [];
    for (const [, key, sign] of rest.matchAll(/(?:([A-Za-z_][\w.-]*):\s*)?([{}[\]])/g)) {
      if (sign === "{" || sign === "[") open.push(key ?? "");
      else open.pop();
    }
    const last = Math.max(rest.lastIndexOf("{"), rest.lastIndexOf(","), rest.lastIndexOf("["));
    if (open.length > 0) {
      // The first brace belongs to the line's own key.
      inside.push(...open.slice(1).filter((key) => key !== ""));
      const piece = rest.slice(last + 1);
      const pair = /^\s*([A-Za-z_][\w.-]*):\s*(\S*)$/.exec(piece);
      if (pair) return { path: [...path, ...inside, pair[1] ?? ""], what: "value", from: position - (pair[2] ?? "").length, taken: [] };
      const taken = [...rest.matchAll(/([A-Za-z_][\w.-]*):/g)].map((match) => match[1] ?? "");
      return { path: [...path, ...inside], what: "key", from: position - word(piece), taken };
    }
    return { path: [...path, ...inside], what: "value", from: position - word(rest), taken: [] };
  }
  const siblings = lines.flatMap((line) => {
    const found = ENTRY.exec(line);
    return found && (found[1] ?? "").length === indent ? [found[2] ?? ""] : [];
  });
  return { path, what: "key", from: position - word(before), taken: siblings };
}

function parents(lines: string[], indent: number): string[] {
  const path: string[] = [];
  let left = indent;
  for (const line of lines.toReversed()) {
    const found = ENTRY.exec(line);
    const depth = (found?.[1] ?? "").length;
    if (!found || depth >= left) continue;
    path.unshift(found[2] ?? "");
    left = depth;
    if (left === 0) break;
  }
  return path;
}

function word(text: string): number {
  return /[\w.-]*$/.exec(text)?.[0].length ?? 0;
}
