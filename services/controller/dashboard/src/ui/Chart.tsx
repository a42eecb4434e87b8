// uPlot in a React house: made again when its shape or the colours change, fed when data comes.

import { useEffect, useId, useLayoutEffect, useRef } from "react";
import uPlot from "uplot";
import { download } from "./download";
import { duration } from "./format";
import { useIsDark } from "./theme";
import "uplot/dist/uPlot.min.css";

export interface Curve {
  label: string;
  /** A custom property of the style sheet, such as `--curve-train`. */
  color: string;
  values: (number | null)[];
  width?: number;
  /** Opacity of the line. */
  alpha?: number;
  dash?: number[];
  dots?: boolean;
  /** Left out of the read-out under the title. */
  silent?: boolean;
  /** Left out of the legend. */
  hidden?: boolean;
}

/** The part of the x axis that is shown; null: all of it. */
export type Zoom = [number, number] | null;

export interface Mark {
  x: number;
  label: string;
}

export interface Level {
  y: number;
  label: string;
  color: string;
}

interface Props {
  title: string;
  summary: string;
  /** Ascending: steps, or with `timed` seconds of training. */
  x: number[];
  curves: Curve[];
  timed?: boolean;
  /** Values on the axis are written as in the read-out: bytes and durations have their own units. */
  units?: boolean;
  /** How far apart values on the axis may be; as in decimal numbers if not given. */
  increments?: number[] | undefined;
  height?: number;
  zoom?: Zoom;
  onZoom?: (zoom: Zoom) => void;
  marks?: Mark[];
  levels?: Level[];
  log?: boolean;
  fromZero?: boolean;
  format: (value: number | null | undefined) => string;
  controls?: React.ReactNode;
}

const HEIGHT = 236;
// Fewer points than this make no line that one could see.
const FEW_POINTS = 3;
const CURSOR_GROUP = uPlot.sync("steps");

export function Chart(props: Props) {
  const { title, summary, x, curves, log = false, fromZero = false, timed = false, units = false, increments, height = HEIGHT, controls } = props;
  const zoom = props.zoom ?? null;
  const holder = useRef<HTMLDivElement>(null);
  const readout = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const heading = useId();
  const dark = useIsDark();
  // Read by uPlot's hooks at drawing time, so that new marks need no new plot.
  const latest = useRef(props);
  latest.current = props;

  const few = curves.map((curve) => curve.values.filter((value) => value !== null).length < FEW_POINTS);
  const shape = curves.map((curve, index) => `${curve.label} ${curve.color} ${few[index]}`).join("|");
  const data: uPlot.AlignedData = [x, ...curves.map((curve) => curve.values)];
  const dataNow = useRef(data);
  dataNow.current = data;

  useLayoutEffect(() => {
    const element = holder.current;
    if (!element) return;
    const style = getComputedStyle(document.documentElement);
    const paint = (name: string) => style.getPropertyValue(name).trim();
    const chart = new uPlot(
      {
        width: element.clientWidth || 320,
        height,
        legend: { show: false },
        padding: [10, 12, 0, 0],
        cursor: {
          sync: { key: CURSOR_GROUP.key, setSeries: false },
          y: false,
          drag: { x: true, y: false, setScale: false, dist: 6 },
          bind: { dblclick: () => () => (latest.current.onZoom?.(null), null) },
          points: { size: 6 },
        },
        scales: {
          x: { time: false, range: (_self, min, max) => latest.current.zoom ?? spread(min, max) },
          y: {
            distr: log ? 3 : 1,
            range: (_self, min, max) => valueRange(min, max, log, fromZero, latest.current.levels ?? []),
          },
        },
        axes: [
          axis(paint, (values) => values.map((value) => (timed ? duration(value) : Number.isInteger(value) ? value.toLocaleString("en-US") : ""))),
          {
            ...axis(paint, (values) => values.map(units ? latest.current.format : tickText)),
            ...(increments ? { incrs: increments } : {}),
            ...(log ? { splits: (_self, _axis, min, max) => logTicks(min, max), filter: (_self, splits) => splits } : {}),
          },
        ],
        series: [
          {},
          ...curves.map(
            (curve, index): uPlot.Series => ({
              label: curve.label,
              stroke: faded(paint(curve.color), curve.alpha ?? 1),
              width: curve.width ?? 1.5,
              spanGaps: true,
              ...(curve.dash ? { dash: curve.dash } : {}),
              points: curve.dots
                ? { show: true, size: 7, fill: paint(curve.color), stroke: paint("--surface"), width: 1.5 }
                : { show: few[index] ?? false, size: 6 },
            }),
          ),
        ],
        hooks: {
          drawClear: [(self) => drawGuides(self, latest.current, paint)],
          setSelect: [(self) => selected(self, latest.current)],
          setCursor: [(self) => tellCursor(self, readout.current, latest.current)],
        },
      },
      dataNow.current,
      element,
    );
    plot.current = chart;
    tellCursor(chart, readout.current, latest.current);
    const observer = new ResizeObserver(() => {
      if (element.clientWidth > 0) chart.setSize({ width: element.clientWidth, height });
    });
    observer.observe(element);
    return () => {
      observer.disconnect();
      chart.destroy();
      plot.current = null;
    };
  }, [shape, log, fromZero, dark, timed, units, increments, height]);

  useEffect(() => {
    const chart = plot.current;
    if (!chart || chart.data === dataNow.current) return;
    chart.setData(dataNow.current);
    tellCursor(chart, readout.current, latest.current);
  }, [x, curves]);

  const [from, to] = zoom ?? [null, null];
  useEffect(() => {
    const chart = plot.current;
    const [first, last] = [x[0], x.at(-1)];
    if (!chart || first === undefined || last === undefined) return;
    const [low, high] = spread(from ?? first, to ?? last);
    chart.setScale("x", { min: low, max: high });
  }, [from, to]);

  return (
    <figure className="chart" aria-labelledby={heading}>
      <figcaption>
        <h2 id={heading}>{title}</h2>
        <ul className="keys" aria-hidden="true">
          {curves.filter((curve) => !curve.hidden).map((curve, index) => (
            <li key={index}>
              <i
                className={curve.dots ? "dot" : curve.dash ? "dashes" : "line"}
                style={{ color: `var(${curve.color})`, opacity: curve.alpha ?? 1 }}
              />
              {curve.label}
            </li>
          ))}
        </ul>
        <span className="tools">
          {controls}
          <button type="button" className="tool" aria-label={`PNG of ${title}`} onClick={() => keepPicture(plot.current, props)}>
            PNG
          </button>
        </span>
      </figcaption>
      <div ref={readout} className="readout" aria-hidden="true" />
      <div
        ref={holder}
        className="plot"
        role="img"
        aria-label={summary}
        tabIndex={0}
        aria-keyshortcuts="ArrowLeft ArrowRight + - 0"
        title="Drag to zoom, double-click for all. Keys: ← → read values, + − zoom, 0 all."
        onKeyDown={(event) => {
          if (plot.current && pressed(plot.current, event.key, props)) event.preventDefault();
        }}
      />
    </figure>
  );
}

function axis(paint: (name: string) => string, values: (splits: number[]) => string[]): uPlot.Axis {
  return {
    stroke: paint("--muted"),
    font: "11px ui-sans-serif, system-ui, sans-serif",
    grid: { stroke: paint("--grid"), width: 1 },
    ticks: { show: false },
    border: { show: false },
    gap: 6,
    size: (_self, texts) => (texts ? Math.max(30, 12 + 6.6 * Math.max(...texts.map((text) => text?.length ?? 0))) : 30),
    values: (_self, splits) => values(splits),
  };
}

/** A range of some width: of a single step uPlot would make endless ticks. */
function spread(min: number | null, max: number | null): [number, number] {
  const [low, high] = [min ?? 0, max ?? 1];
  if (isWide(low, high)) return [low, high];
  const room = Math.max(1, NARROWEST * Math.abs(low));
  return [low - room, low + room];
}

/** Of their size: between numbers that are closer uPlot makes endless ticks, for 1e16 + 0.5 is 1e16. */
const NARROWEST = 1e-12;

function isWide(low: number, high: number): boolean {
  return high - low > NARROWEST * Math.max(Math.abs(low), Math.abs(high));
}

/** Zoom into what was dragged over, in all charts. */
function selected(self: uPlot, { onZoom }: Props): void {
  const { left, width } = self.select;
  if (width < 1) return;
  const zoom: Zoom = [self.posToVal(left, "x"), self.posToVal(left + width, "x")];
  self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  onZoom?.(zoom);
}

/** What a mouse does, by keys; whether the key means anything. */
function pressed(self: uPlot, key: string, { x, onZoom }: Props): boolean {
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const at = self.cursor.idx ?? x.length - 1;
    const next = Math.min(Math.max(at + (key === "ArrowLeft" ? -1 : 1), 0), x.length - 1);
    self.setCursor({ left: self.valToPos(x[next] ?? 0, "x"), top: 0 });
    return true;
  }
  if (key === "0") onZoom?.(null);
  else if (key === "+" || key === "=") onZoom?.(scaled(self, 0.5));
  else if (key === "-") onZoom?.(scaled(self, 2));
  else return false;
  return true;
}

/** The shown part, `factor` times as wide around the cursor or the middle; null where that is all. */
function scaled(self: uPlot, factor: number): Zoom {
  const { min = 0, max = 1 } = self.scales["x"] ?? {};
  const [low, high] = [min ?? 0, max ?? 1];
  const idx = self.cursor.idx;
  const center = (idx === null || idx === undefined ? undefined : self.data[0][idx]) ?? (low + high) / 2;
  const half = ((high - low) * factor) / 2;
  const xs = self.data[0];
  const [first = 0, last = 1] = [xs[0], xs.at(-1)];
  const [from, to] = [Math.max(center - half, first), Math.min(center + half, last)];
  return from <= first && to >= last ? null : [from, to];
}

/** The chart as a picture, with its title and legend, on the page's own colours. */
function keepPicture(self: uPlot | null, { title, curves }: Props): void {
  if (!self) return;
  const source = self.ctx.canvas;
  const ratio = devicePixelRatio;
  const head = 30 * ratio;
  const picture = document.createElement("canvas");
  picture.width = source.width;
  picture.height = source.height + head;
  const ctx = picture.getContext("2d");
  if (!ctx) return;
  const style = getComputedStyle(document.documentElement);
  const paint = (name: string) => style.getPropertyValue(name).trim();
  ctx.fillStyle = paint("--surface");
  ctx.fillRect(0, 0, picture.width, picture.height);
  ctx.drawImage(source, 0, head);
  ctx.textBaseline = "middle";
  let at = 10 * ratio;
  const write = (text: string, color: string, weight: number): void => {
    ctx.font = `${weight} ${12 * ratio}px ui-sans-serif, system-ui, sans-serif`;
    ctx.fillStyle = paint(color);
    ctx.fillText(text, at, head / 2);
    at += ctx.measureText(text).width + 14 * ratio;
  };
  write(title, "--text", 650);
  for (const curve of curves) if (!curve.hidden) write(curve.label, curve.color, 500);
  picture.toBlob((blob) => blob && download(`${title}.png`, blob));
}

/** Round numbers between `min` and `max`, as many as there is room for. */
function logTicks(min: number, max: number): number[] {
  const densest = [[1, 1.5, 2, 3, 4, 5, 7], [1, 2, 5], [1]];
  for (const digits of densest) {
    const ticks: number[] = [];
    for (let power = Math.floor(Math.log10(min)); power <= Math.ceil(Math.log10(max)); power++) {
      for (const digit of digits) ticks.push(Number((digit * 10 ** power).toPrecision(2)));
    }
    const inside = ticks.filter((tick) => tick >= min && tick <= max);
    if (inside.length <= 8 || digits.length === 1) return inside;
  }
  return [];
}

function tickText(value: number): string {
  const size = Math.abs(value);
  if (size >= 1e6) return `${Number((value / 1e6).toFixed(2))}M`;
  if (size >= 1e3) return `${Number((value / 1e3).toFixed(2))}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(0);
  return String(Number(value.toPrecision(4)));
}

function valueRange(min: number | null, max: number | null, log: boolean, fromZero: boolean, levels: Level[]): [number, number] {
  let low = min ?? 0;
  let high = max ?? 1;
  for (const level of levels) {
    low = Math.min(low, level.y);
    high = Math.max(high, level.y);
  }
  if (log) {
    low = low > 0 ? low : 1e-3;
    high = high > low ? high : low * 10;
    return [low / 1.08, high * 1.08];
  }
  if (fromZero) return [0, high > 0 ? high * 1.12 : 1];
  const room = isWide(low, high) ? 0.06 * (high - low) : Math.max(0.5, 0.1 * Math.abs(high));
  return [low - room, high + room];
}

function drawGuides(self: uPlot, { marks = [], levels = [] }: Props, paint: (name: string) => string): void {
  const { ctx, bbox } = self;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${10.5 * ratio}px ui-sans-serif, system-ui, sans-serif`;
  ctx.textBaseline = "bottom";
  ctx.lineWidth = ratio;
  ctx.setLineDash([3 * ratio, 4 * ratio]);
  // A label that would lie on the one before it is left out; its line stays.
  let free = Number.NEGATIVE_INFINITY;
  for (const mark of marks) {
    const x = Math.round(self.valToPos(mark.x, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = paint("--muted");
    line(ctx, x, bbox.top, x, bbox.top + bbox.height);
    ctx.fillStyle = paint("--muted");
    ctx.textAlign = x > bbox.left + 0.8 * bbox.width ? "right" : "left";
    const { width } = ctx.measureText(mark.label);
    const start = ctx.textAlign === "left" ? x + 4 * ratio : x - 4 * ratio - width;
    if (start < free) continue;
    free = start + width + 4 * ratio;
    ctx.fillText(mark.label, x + (ctx.textAlign === "left" ? 4 : -4) * ratio, bbox.top + 12 * ratio);
  }
  for (const level of levels) {
    const y = Math.round(self.valToPos(level.y, "y", true));
    if (y < bbox.top || y > bbox.top + bbox.height) continue;
    ctx.strokeStyle = paint(level.color);
    line(ctx, bbox.left, y, bbox.left + bbox.width, y);
    ctx.textAlign = "right";
    // A patch of the background behind the text: grid lines must not cross the letters.
    const text = ctx.measureText(level.label).width;
    ctx.fillStyle = paint("--surface");
    ctx.fillRect(bbox.left + bbox.width - text - 4 * ratio, y - 15 * ratio, text + 4 * ratio, 14 * ratio);
    ctx.fillStyle = paint(level.color);
    ctx.fillText(level.label, bbox.left + bbox.width, y - 2 * ratio);
  }
  ctx.restore();
}

function line(ctx: CanvasRenderingContext2D, x0: number, y0: number, x1: number, y1: number): void {
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
}

/** What stands under the cursor, or the last figures where there is none. */
function tellCursor(self: uPlot, element: HTMLElement | null, { x, curves, format, timed }: Props): void {
  if (!element) return;
  const pointed = self.cursor.idx;
  const at = pointed ?? x.length - 1;
  const step = x[at];
  if (step === undefined) {
    element.textContent = "";
    return;
  }
  const told = curves
    .filter((curve) => !curve.silent)
    .map((curve) => [curve.label, curve.values[at] ?? (pointed === null || pointed === undefined ? lastOf(curve.values) : null)] as const)
    .filter(([, value]) => value !== null)
    .map(([label, value]) => `${label} ${format(value)}`);
  element.textContent = [timed ? `after ${duration(step)}` : `step ${step.toLocaleString("en-US")}`, ...told].join("  ·  ");
}

function lastOf(values: (number | null)[]): number | null {
  return values.findLast((value) => value !== null) ?? null;
}

function faded(color: string, alpha: number): string {
  return alpha >= 1 ? color : `color-mix(in srgb, ${color} ${Math.round(100 * alpha)}%, transparent)`;
}
