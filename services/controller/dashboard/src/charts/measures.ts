// From the metrics of one run or several to curves over one axis: steps, or time.

import type { MetricsView, StepView } from "../api/types";
import type { Curve, Level, Mark } from "../ui/Chart";
import { bytes, compact, duration, loss as lossText, percent, perSecond, validationLoss } from "../ui/format";

export type Axis = "step" | "time";

/** What the charts know of a run. */
export interface Run {
  id: string;
  name: string;
  /** A custom property of the style sheet; of a run alone each measure has its own. */
  color: string | null;
  metrics: MetricsView;
}

/** One chart: its curves share the x values. */
export interface Measure {
  key: string;
  title: string;
  summary: string;
  x: number[];
  curves: Curve[];
  marks: Mark[];
  levels: Level[];
  fromZero: boolean;
  /** Whether a logarithmic scale is offered. */
  scales: boolean;
  format: (value: number | null | undefined) => string;
  /** Asked for by name: the two that are always there, and large. */
  large: boolean;
}

type Values = (number | null)[];

/** Points of one curve, by ascending step. `fences`: of which attempt each is, where that is known. */
interface Points {
  steps: number[];
  fences?: number[];
  values: Values;
}

interface LoopMeasure {
  key: keyof StepView;
  title: string;
  color: string;
  format: (value: number | null | undefined) => string;
  fromZero: boolean;
  large?: boolean;
}

const rate = (value: number | null | undefined) =>
  value === null || value === undefined ? "–" : value !== 0 && Math.abs(value) < 1e-2 ? value.toExponential(2) : lossText(value);
const share = (value: number | null | undefined) => (value === null || value === undefined ? "–" : percent(value));

const LOOP: LoopMeasure[] = [
  { key: "loss", title: "Loss", color: "--curve-train", format: lossText, fromZero: false, large: true },
  { key: "tokens_per_s", title: "Throughput", color: "--curve-speed", format: compact, fromZero: true, large: true },
  { key: "grad_norm", title: "Gradient norm", color: "--curve-train", format: lossText, fromZero: true },
  { key: "learning_rate", title: "Learning rate", color: "--curve-baseline", format: rate, fromZero: true },
  { key: "step_time_s", title: "Step time", color: "--curve-speed", format: duration, fromZero: true },
  { key: "data_wait_s", title: "Data wait", color: "--curve-validation", format: duration, fromZero: true },
  { key: "mfu", title: "MFU", color: "--curve-speed", format: share, fromZero: true },
  { key: "memory_bytes", title: "Memory", color: "--curve-validation", format: bytes, fromZero: true },
];
const VALIDATION = "validation/";

/** Every measure that any of the runs has, the loop's first. */
export function measuresOf(runs: Run[], axis: Axis, strength: number): Measure[] {
  const context = new Context(runs, axis, strength);
  const loop = LOOP.filter((one) => one.large || runs.some(({ metrics }) => metrics.items.some((item) => (item[one.key] ?? null) !== null)));
  const names = new Set(runs.flatMap(({ metrics }) => metrics.names.map((name) => (name.startsWith(VALIDATION) ? name.slice(VALIDATION.length) : name))));
  return [
    ...loop.map((one) => context.ofLoop(one)),
    ...[...names].sort().map((name) => context.ofUser(name)),
  ];
}

class Context {
  private readonly alone: boolean;
  private readonly clocks: Map<string, Clock>;

  constructor(
    private readonly runs: Run[],
    axis: Axis,
    private readonly strength: number,
  ) {
    this.alone = runs.length === 1;
    this.clocks = new Map(runs.map((run) => [run.id, axis === "step" ? (step: number) => step : clockOf(run.metrics.items)]));
  }

  ofLoop({ key, title, color, format, fromZero, large = false }: LoopMeasure): Measure {
    const told: Told[] = [];
    const marks: Mark[] = [];
    for (const run of this.runs) {
      const { standing, lost } = splitByFence(run.metrics.items);
      const points = (records: StepView[]): Points => ({
        steps: records.map((record) => record.step),
        fences: records.map((record) => record.fence),
        values: records.map((record) => (record[key] as number | null | undefined) ?? null),
      });
      told.push(...this.trained(run, points(standing), color, this.unit(key, run)));
      if (key !== "loss") {
        if (this.alone) marks.push(...this.marksOf(run, run.metrics.items));
        continue;
      }
      if (this.alone && lost.length > 0) {
        told.push({ run, points: points(lost), curve: { label: "lost steps", color: "--muted", width: 1.25, dash: [3, 3], silent: true } });
      }
      const { evaluations } = run.metrics;
      if (evaluations.length > 0) {
        told.push(this.validated(run, { steps: evaluations.map(({ step }) => step), values: evaluations.map(({ loss }) => loss) }));
      }
      if (this.alone) marks.push(...this.marksOf(run, run.metrics.items), ...this.breaksOf(run));
    }
    const first = this.runs[0];
    return {
      key,
      title,
      summary: this.alone && first ? loopSummary(key, title, first.metrics, format) : this.overlaid(title, told, format),
      ...this.aligned(told),
      marks,
      levels: key === "loss" && this.alone && first ? baselines(first.metrics) : [],
      fromZero,
      scales: key === "loss",
      format,
      large,
    };
  }

  /** What the user's code measures under one name, in training and in validation. */
  ofUser(name: string): Measure {
    const told: Told[] = [];
    const summary: string[] = [];
    for (const run of this.runs) {
      for (const [key, where] of [[name, ""], [VALIDATION + name, "in validation "]] as const) {
        // Names are the user's: one may be that of a method of every object.
        const records = run.metrics.user_metrics.filter(({ values }) => Object.hasOwn(values, key));
        if (records.length === 0) continue;
        const points = { steps: records.map(({ step }) => step), values: records.map(({ values }) => values[key] ?? null) };
        told.push(...(where ? [this.validated(run, points)] : this.trained(run, points, "--curve-train", "train")));
        const last = points.values.findLastIndex((value) => value !== null);
        if (last >= 0) summary.push(`${this.alone ? "" : `${run.name} `}${where}${lossText(points.values[last])} at step ${points.steps[last]}`);
      }
    }
    const first = this.runs[0];
    return {
      key: `user:${name}`,
      title: name,
      summary: `${name}: ${summary.join(", ")}.`,
      ...this.aligned(told),
      marks: this.alone && first ? this.marksOf(first, first.metrics.user_metrics) : [],
      levels: [],
      fromZero: false,
      scales: false,
      format: lossText,
      large: false,
    };
  }

  private trained(run: Run, points: Points, color: string, label: string): Told[] {
    const paint = run.color ?? color;
    const plain = { label: this.alone ? label : run.name, color: paint };
    if (this.strength === 0) return [{ run, points, curve: { ...plain, width: 1.5 } }];
    const smooth = { steps: points.steps, values: smoothed(points.values, this.strength) };
    return [
      { run, points, curve: { ...plain, width: 1, alpha: this.alone ? 0.4 : 0.22, silent: !this.alone, hidden: !this.alone } },
      { run, points: smooth, curve: { label: this.alone ? "smoothed" : run.name, color: paint, width: 2 } },
    ];
  }

  private validated(run: Run, points: Points): Told {
    const label = this.alone ? "validation" : `${run.name} validation`;
    return { run, points, curve: { label, color: run.color ?? "--curve-validation", width: 1.25, dots: true, hidden: !this.alone } };
  }

  private unit(key: keyof StepView, run: Run): string {
    if (key === "loss") return "train";
    return key === "tokens_per_s" ? perSecond(run.metrics.throughput_unit).toLowerCase() : "measured";
  }

  private at(run: Run, step: number, fence?: number): number {
    return this.clocks.get(run.id)?.(step, fence) ?? step;
  }

  /** All curves over the union of their x values. */
  private aligned(told: Told[]): { x: number[]; curves: Curve[] } {
    const places = told.map(({ run, points }) => points.steps.map((step, index) => this.at(run, step, points.fences?.[index])));
    const x = [...new Set(places.flat())].sort((a, b) => a - b);
    const index = new Map(x.map((value, at) => [value, at]));
    const curves = told.map(({ points, curve }, which) => {
      const values: Values = x.map(() => null);
      places[which]?.forEach((place, at) => {
        const into = index.get(place);
        if (into !== undefined) values[into] = points.values[at] ?? null;
      });
      return { ...curve, values };
    });
    return { x, curves };
  }

  /** Where attempts begin. */
  private marksOf(run: Run, records: { step: number; fence: number }[]): Mark[] {
    const marks: Mark[] = [];
    let fence = records[0]?.fence;
    for (const record of records) {
      if (fence !== undefined && record.fence > fence) {
        fence = record.fence;
        marks.push({ x: this.at(run, record.step, record.fence), label: `attempt ${fence}` });
      }
    }
    return marks;
  }

  /** Where the loss stops being a number. */
  private breaksOf(run: Run): Mark[] {
    const { items } = run.metrics;
    const first = items.find((record, index) => record.loss === null && items[index - 1]?.loss !== null);
    return first ? [{ x: this.at(run, first.step, first.fence), label: "loss not finite" }] : [];
  }

  private overlaid(title: string, told: Told[], format: Measure["format"]): string {
    const last = told
      .filter(({ curve }) => !curve.silent)
      .map(({ curve, points }) => `${curve.label} ${format(points.values.findLast((value) => value !== null))}`);
    return `${title}: ${last.join(", ")}.`;
  }
}

interface Told {
  run: Run;
  points: Points;
  curve: Omit<Curve, "values">;
}

/** Seconds at a step, of one attempt or of those whose steps stand. */
type Clock = (step: number, fence?: number) => number;

/**
 * Seconds since a run's first step began, the pauses between attempts included; between known steps
 * in proportion. Where an older agent told no times: the sum of step times.
 */
function clockOf(records: StepView[]): Clock {
  const { standing } = splitByFence(records);
  const first = standing[0];
  const start = (first?.time_ms ?? 0) - (first?.step_time_s ?? 0) * 1_000;
  const timed = records.every((record) => (record.time_ms ?? null) !== null);
  const told = new Map(timed ? records.map(({ fence, step, time_ms }) => [`${fence}/${step}`, ((time_ms ?? 0) - start) / 1_000]) : []);
  const steps = [(first?.step ?? 1) - 1];
  const seconds = [0];
  for (const { step, fence, step_time_s } of standing) {
    const before = steps.at(-1) ?? 0;
    if (step <= before) continue;
    const summed = (seconds.at(-1) ?? 0) + step_time_s * (steps.length === 1 ? 1 : step - before);
    steps.push(step);
    // A node's clock may be set back.
    seconds.push(Math.max(told.get(`${fence}/${step}`) ?? summed, seconds.at(-1) ?? 0));
  }
  return (step, fence) => {
    const exact = told.get(`${fence}/${step}`);
    if (exact !== undefined) return exact;
    const above = steps.findIndex((known) => known >= step);
    if (above < 0) return seconds.at(-1) ?? 0;
    if (above === 0 || steps[above] === step) return seconds[above] ?? 0;
    const [low = 0, high = 1] = [steps[above - 1], steps[above]];
    const [from = 0, to = 0] = [seconds[above - 1], seconds[above]];
    return from + ((to - from) * (step - low)) / (high - low);
  };
}

/** A record stands unless a later attempt made its step, or an earlier one, again. */
function splitByFence(records: StepView[]): { standing: StepView[]; lost: StepView[] } {
  const firstStep = new Map<number, number>();
  for (const { fence, step } of records) firstStep.set(fence, Math.min(step, firstStep.get(fence) ?? Infinity));
  const standing: StepView[] = [];
  const lost: StepView[] = [];
  for (const record of records) {
    let overtaken = false;
    for (const [fence, step] of firstStep) overtaken ||= fence > record.fence && step <= record.step;
    (overtaken ? lost : standing).push(record);
  }
  return { standing, lost };
}

/** The mean of the points around each: centred, so that a steep curve is not drawn too late. */
function smoothed(values: Values, strength: number): Values {
  const present = values.flatMap((value, index) => (value === null ? [] : [{ value, index }]));
  const reach = Math.min(20 * strength, Math.ceil((strength * present.length) / 60));
  const sums = [0];
  for (const { value } of present) sums.push((sums.at(-1) ?? 0) + value);
  const result: Values = values.map(() => null);
  present.forEach(({ index }, at) => {
    // Short of points on the left, where losses fall fast, the window shrinks on both sides alike.
    const left = Math.min(reach, at);
    const right = Math.min(left, present.length - 1 - at);
    result[index] = ((sums[at + right + 1] ?? 0) - (sums[at - left] ?? 0)) / (left + right + 1);
  });
  return result;
}

function baselines(metrics: MetricsView): Level[] {
  return Object.entries(metrics.evaluations.at(-1)?.baselines ?? {}).map(([name, y]) => ({
    y,
    label: `${name} ${lossText(y)}`,
    color: "--curve-baseline",
  }));
}

function loopSummary(key: keyof StepView, title: string, metrics: MetricsView, format: Measure["format"]): string {
  const { items, evaluations, throughput_unit } = metrics;
  const first = items[0];
  const last = items.at(-1);
  if (key === "loss") {
    const told = first && last ? `Training loss from ${lossText(first.loss)} at step ${first.step} to ${lossText(last.loss)} at step ${last.step}.` : "Loss.";
    const evaluation = evaluations.at(-1);
    return evaluation ? `${told} Validation loss ${validationLoss(evaluation.loss)} after step ${evaluation.step}.` : told;
  }
  if (!last) return `${title}.`;
  const unit = key === "tokens_per_s" ? ` ${throughput_unit} a second` : "";
  return `${title}, ${format(last[key] as number | null)}${unit} at step ${last.step}.`;
}

/** All numbers of some runs as comma-separated values, a row for each run and step. */
export function csvOf(runs: { name: string; id: string; metrics: MetricsView }[]): string {
  const figures = ["attempt", "loss", "tokens_per_s", "grad_norm", "learning_rate", "step_time_s", "data_wait_s", "mfu", "memory_bytes", "time_ms"] as const;
  const names = [...new Set(runs.flatMap(({ metrics }) => metrics.names))].sort();
  const rows: (string | number | null)[][] = [["run", "job_id", "step", ...figures, "validation_loss", ...names]];
  for (const { name, id, metrics } of runs) {
    const loop = new Map(metrics.items.map((item) => [item.step, item]));
    const passes = new Map(metrics.evaluations.map((pass) => [pass.step, pass.loss]));
    const user = new Map<number, Map<string, number | null>>();
    for (const { step, values } of metrics.user_metrics) {
      user.set(step, new Map([...(user.get(step) ?? []), ...Object.entries(values)]));
    }
    for (const step of [...new Set([...loop.keys(), ...passes.keys(), ...user.keys()])].sort((a, b) => a - b)) {
      const item = loop.get(step);
      rows.push([
        name,
        id,
        step,
        ...figures.map((figure) => (figure === "attempt" ? item?.fence : item?.[figure]) ?? null),
        passes.get(step) ?? null,
        ...names.map((metric) => user.get(step)?.get(metric) ?? null),
      ]);
    }
  }
  return rows.map((row) => row.map(cell).join(",")).join("\r\n");
}

/** A cell; text that a spreadsheet would take for a formula is quoted as text. */
function cell(value: string | number | null): string {
  if (value === null) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
