// From step records to curves over ascending steps.

import type { Mark } from "../ui/Chart";
import type { Evaluation, MetricsView, StepView } from "../api/types";

export interface Curves {
  steps: number[];
  loss: (number | null)[];
  smoothLoss: (number | null)[];
  /** Steps that a later attempt made again: what the first try had. */
  lostLoss: (number | null)[];
  throughput: (number | null)[];
  smoothThroughput: (number | null)[];
  validation: (number | null)[];
  /** Where attempts begin, and where the loss stops being a number. */
  marks: Mark[];
  hasLost: boolean;
}

export function toCurves(metrics: MetricsView): Curves {
  const { standing, lost } = splitByFence(metrics.items);
  const evaluations = new Map<number, Evaluation>(metrics.evaluations.map((e) => [e.step, e]));
  const steps = [...new Set([...standing.keys(), ...lost.keys(), ...evaluations.keys()])].sort((a, b) => a - b);
  const pick = <T>(from: Map<number, T>, field: (value: T) => number | null): (number | null)[] =>
    steps.map((step) => {
      const value = from.get(step);
      return value === undefined ? null : (field(value) ?? null);
    });
  const loss = pick(standing, (record) => record.loss);
  const throughput = pick(standing, (record) => record.tokens_per_s);
  return {
    steps,
    loss,
    smoothLoss: smoothed(loss),
    lostLoss: pick(lost, (record) => record.loss),
    throughput,
    smoothThroughput: smoothed(throughput),
    validation: pick(evaluations, (evaluation) => evaluation.loss),
    marks: [...restartsOf(metrics.items), ...breaksOf(metrics.items)],
    hasLost: lost.size > 0,
  };
}

/** One of the user's metrics: what training told by step, and what validation passes told. */
export interface UserCurves {
  name: string;
  steps: number[];
  training: (number | null)[];
  validation: (number | null)[];
  hasTraining: boolean;
  hasValidation: boolean;
  marks: Mark[];
}

const VALIDATION = "validation/";

export function toUserCurves(metrics: MetricsView): UserCurves[] {
  const bases = metrics.names.map((name) => (name.startsWith(VALIDATION) ? name.slice(VALIDATION.length) : name));
  const marks = restartsOf(metrics.user_metrics);
  return [...new Set(bases)].sort().map((name) => {
    // Names are the user's: one may be that of a method of every object.
    const of = (values: Record<string, number | null>, key: string) => (Object.hasOwn(values, key) ? (values[key] ?? null) : null);
    const told = metrics.user_metrics.filter(
      ({ values }) => Object.hasOwn(values, name) || Object.hasOwn(values, VALIDATION + name),
    );
    return {
      name,
      steps: told.map(({ step }) => step),
      training: told.map(({ values }) => of(values, name)),
      validation: told.map(({ values }) => of(values, VALIDATION + name)),
      hasTraining: metrics.names.includes(name),
      hasValidation: metrics.names.includes(VALIDATION + name),
      marks,
    };
  });
}

/** A record stands unless a later attempt made its step, or an earlier one, again. */
function splitByFence(records: StepView[]): { standing: Map<number, StepView>; lost: Map<number, StepView> } {
  const standing = new Map<number, StepView>();
  const lost = new Map<number, StepView>();
  const firstStep = new Map<number, number>();
  for (const { fence, step } of records) firstStep.set(fence, Math.min(step, firstStep.get(fence) ?? Infinity));
  for (const record of records) {
    let overtaken = false;
    for (const [fence, step] of firstStep) overtaken ||= fence > record.fence && step <= record.step;
    (overtaken ? lost : standing).set(record.step, record);
  }
  return { standing, lost };
}

function restartsOf(records: { step: number; fence: number }[]): Mark[] {
  const marks: Mark[] = [];
  let fence = records[0]?.fence;
  for (const record of records) {
    if (fence !== undefined && record.fence > fence) {
      fence = record.fence;
      marks.push({ x: record.step, label: `attempt ${fence}` });
    }
  }
  return marks;
}

function breaksOf(records: StepView[]): Mark[] {
  const first = records.find((record, index) => record.loss === null && records[index - 1]?.loss !== null);
  return first ? [{ x: first.step, label: "loss not finite" }] : [];
}

/** The mean of the points around each: centred, so that a steep curve is not drawn too late. */
function smoothed(values: (number | null)[]): (number | null)[] {
  const present = values.flatMap((value, index) => (value === null ? [] : [{ value, index }]));
  const reach = Math.min(20, Math.ceil(present.length / 60));
  const sums = [0];
  for (const { value } of present) sums.push((sums.at(-1) ?? 0) + value);
  const result: (number | null)[] = values.map(() => null);
  present.forEach(({ index }, at) => {
    // Short of points on the left, where losses fall fast, the window shrinks on both sides alike.
    const left = Math.min(reach, at);
    const right = Math.min(left, present.length - 1 - at);
    result[index] = ((sums[at + right + 1] ?? 0) - (sums[at - left] ?? 0)) / (left + right + 1);
  });
  return result;
}
