// What the JSON schema of a job spec says of a place in it: which keys, which values, which faults.

import { get } from "../api/client";

export interface Schema {
  $ref?: string;
  type?: string | string[];
  properties?: Record<string, Schema>;
  patternProperties?: Record<string, Schema>;
  additionalProperties?: boolean | Schema;
  required?: string[];
  items?: Schema;
  anyOf?: Schema[];
  oneOf?: Schema[];
  enum?: unknown[];
  const?: unknown;
  default?: unknown;
  description?: string;
  minimum?: number;
  maximum?: number;
  exclusiveMinimum?: number;
}

export interface Fault {
  /** A JSON pointer into the spec. */
  pointer: string;
  detail: string;
  /** Of the key rather than of its value. */
  ofKey?: boolean;
}

export class SpecSchema {
  constructor(private readonly definitions: Record<string, Schema>) {}

  /** As the controller that answers has it. */
  static async load(): Promise<SpecSchema> {
    const document = await get<{ components: { schemas: Record<string, Schema> } }>("v1/openapi.json");
    return new SpecSchema(document.components.schemas);
  }

  /** All shapes that the value at `path` may have. */
  at(path: string[]): Schema[] {
    return path.reduce<Schema[]>((shapes, key) => shapes.flatMap((shape) => this.below(shape, key)), this.shapes({ $ref: "JobSpec" }));
  }

  /** The keys that may stand in the mapping at `path`, with what they are for. */
  keys(path: string[]): [string, Schema][] {
    return this.at(path).flatMap((shape) => Object.entries(shape.properties ?? {}));
  }

  /** The values that the schema names for `path`. */
  values(path: string[]): unknown[] {
    const named = this.at(path).flatMap((shape) => {
      if (shape.enum) return shape.enum;
      if (shape.const !== undefined) return [shape.const];
      return shape.type === "boolean" ? [true, false] : shape.type === "null" ? [null] : [];
    });
    return [...new Set(named)];
  }

  /** Everything in a spec that the schema does not allow. What only the controller knows is its own to say. */
  check(spec: unknown): Fault[] {
    return this.faults(this.shapes({ $ref: "JobSpec" }), spec, "");
  }

  /** A spec without what is as it would be anyway: what a person would have written. */
  withoutDefaults(spec: unknown, path: string[] = []): unknown {
    if (typeof spec !== "object" || spec === null || Array.isArray(spec)) return spec;
    const shapes = this.at(path);
    const kept = Object.entries(spec).flatMap(([key, value]): [string, unknown][] => {
      const own = shapes.map((shape) => shape.properties?.[key]).find((shape) => shape !== undefined);
      if (!own) return [[key, value]];
      // A field whose default is null has none in the schema.
      if (value === (own.default ?? null) || JSON.stringify(value) === JSON.stringify(own.default)) return [];
      const inner = this.withoutDefaults(value, [...path, key]);
      const isEmpty = typeof inner === "object" && inner !== null && Object.keys(inner).length === 0;
      return isEmpty ? [] : [[key, inner]];
    });
    return Object.fromEntries(kept);
  }

  private faults(shapes: Schema[], value: unknown, pointer: string): Fault[] {
    const fitting = shapes.filter((shape) => isOf(shape, value));
    if (fitting.length === 0) return [{ pointer, detail: `${say(value)}; expected ${expected(shapes)}` }];
    if (Array.isArray(value)) {
      const items = fitting.flatMap((shape) => (shape.items ? this.shapes(shape.items) : []));
      return items.length === 0 ? [] : value.flatMap((one, index) => this.faults(items, one, `${pointer}/${index}`));
    }
    if (typeof value !== "object" || value === null) return [];
    const known = fitting.flatMap((shape) => Object.keys(shape.properties ?? {}));
    const open = fitting.some((shape) => !shape.properties || shape.additionalProperties !== false || shape.patternProperties);
    const missing = fitting.length === 1 ? (fitting[0]?.required ?? []).filter((key) => !Object.hasOwn(value, key)) : [];
    return [
      ...missing.map((key) => ({ pointer, detail: `${key} is missing` })),
      ...Object.entries(value).flatMap(([key, one]): Fault[] => {
        const place = `${pointer}/${key.replaceAll("~", "~0").replaceAll("/", "~1")}`;
        const inner = fitting.flatMap((shape) => this.below(shape, key));
        if (inner.length > 0) return this.faults(inner, one, place);
        if (open) return [];
        const near = nearest(key, known);
        return [{ pointer: place, detail: `there is no field ${key}${near ? `; did you mean ${near}?` : ""}`, ofKey: true }];
      }),
    ];
  }

  private below(shape: Schema, key: string): Schema[] {
    const own = shape.properties && Object.hasOwn(shape.properties, key) ? shape.properties[key] : undefined;
    if (own) return this.shapes(own);
    if (shape.items && /^\d+$/.test(key)) return this.shapes(shape.items);
    return typeof shape.additionalProperties === "object" ? this.shapes(shape.additionalProperties) : [];
  }

  /** A schema without references and alternatives. A description goes down to the alternatives. */
  private shapes(schema: Schema): Schema[] {
    const { $ref, anyOf, oneOf, ...rest } = schema;
    if ($ref) {
      const found = this.definitions[$ref.replace(/^.*\//, "")];
      return found ? this.shapes({ ...found, ...rest }) : [rest];
    }
    const alternatives = anyOf ?? oneOf;
    if (!alternatives) return [rest];
    return alternatives.flatMap((one) => this.shapes(one)).map((one) => (rest.description ? { ...one, description: rest.description } : one));
  }
}

function isOf(shape: Schema, value: unknown): boolean {
  if (shape.const !== undefined) return shape.const === value;
  if (shape.enum) return shape.enum.includes(value);
  const types = shape.type === undefined ? [] : [shape.type].flat();
  const is = (type: string): boolean => {
    if (type === "object") return typeof value === "object" && value !== null && !Array.isArray(value);
    if (type === "array") return Array.isArray(value);
    if (type === "null") return value === null;
    if (type === "integer") return Number.isInteger(value);
    return typeof value === type;
  };
  if (types.length > 0 && !types.some(is)) return false;
  if (typeof value !== "number") return true;
  return (
    value >= (shape.minimum ?? -Infinity) &&
    value <= (shape.maximum ?? Infinity) &&
    (shape.exclusiveMinimum === undefined || value > shape.exclusiveMinimum)
  );
}

function say(value: unknown): string {
  if (Array.isArray(value)) return "a list stands here";
  if (typeof value === "object" && value !== null) return "a mapping stands here";
  return `${JSON.stringify(value)} stands here`;
}

function expected(shapes: Schema[]): string {
  const words = shapes.map((shape) => {
    if (shape.const !== undefined) return JSON.stringify(shape.const);
    if (shape.enum) return shape.enum.map((one) => JSON.stringify(one)).join(" or ");
    const low = shape.minimum ?? shape.exclusiveMinimum;
    const bounds = [low === undefined ? "" : shape.minimum === undefined ? `above ${low}` : `from ${low}`, shape.maximum === undefined ? "" : `to ${shape.maximum}`];
    const type = [shape.type ?? "anything"].flat().join(" or ").replace("object", "a mapping").replace("array", "a list");
    return [type, ...bounds].filter((part) => part !== "").join(" ");
  });
  return [...new Set(words)].join(" or ") || "nothing";
}

/** The known key that differs in two letters at most. */
function nearest(key: string, known: string[]): string | null {
  const best = known.map((one) => [distance(key.toLowerCase(), one.toLowerCase()), one] as const).sort((a, b) => a[0] - b[0])[0];
  return best && best[0] <= 2 ? best[1] : null;
}

/** Levenshtein's: how many letters to change, add or take away. */
function distance(one: string, other: string): number {
  let row = Array.from({ length: other.length + 1 }, (_, index) => index);
  for (let i = 1; i <= one.length; i++) {
    const next = [i];
    for (let j = 1; j <= other.length; j++) {
      const swap = (row[j - 1] ?? 0) + (one[i - 1] === other[j - 1] ? 0 : 1);
      next.push(Math.min(swap, (row[j] ?? 0) + 1, (next[j - 1] ?? 0) + 1));
    }
    row = next;
  }
  return row[other.length] ?? 0;
}
