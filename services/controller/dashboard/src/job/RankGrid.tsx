import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "react";
import { useNodes, useRanks } from "../api/queries";
import type { JobView, RankPlacement, RankView } from "../api/types";
import { useIsDark } from "../ui/theme";
import { bytes, duration } from "../ui/format";
import { Panel } from "../ui/parts";
import { type Phase, phaseOf } from "./phases";
import { capacities } from "./Ranks";
import { type Cell, coordinates, type Grouping, type Layout, layoutOf, wideAxes } from "./rankLayout";

type Shade = "phase" | "lag" | "memory";
const SHADES: Shade[] = ["phase", "lag", "memory"];
const FROM_LETTERS = 22;
const FROM_COORDINATES = 36;
// Until a rank costs that share of a step its lag is no colour at all.
const LAG_OF_STEP = 0.05;

/** All ranks at one glance, drawn on a canvas: two are large, four thousand small. */
export function RankGrid({ job }: { job: JobView }) {
  const { data } = useRanks(job);
  const { data: nodes } = useNodes();
  const [shade, setShade] = useState<Shade>("phase");
  const [grouping, setGrouping] = useState<Grouping>("mesh");
  const [pointed, setPointed] = useState<number | null>(null);
  const [width, setWidth] = useState(0);
  const holder = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const dark = useIsDark();
  const plan = job.plan;
  const mesh = plan?.sharding.mesh;
  const capacityOf = useMemo(() => capacities(nodes?.items ?? []), [nodes]);
  const ranks = useMemo(() => new Map((data?.items ?? []).map((rank) => [rank.rank, rank])), [data]);
  // The plan is a new object with each poll, and the same plan within an attempt.
  const layout = useMemo(
    () => (plan && mesh && width > 0 ? layoutOf(plan.ranks, mesh, grouping, width) : null),
    [job.id, job.attempt, plan?.ranks.length, grouping, width],
  );
  const scale = useMemo(() => scaleOf(shade, [...ranks.values()], capacityOf), [shade, ranks, capacityOf]);

  useLayoutEffect(() => {
    const element = holder.current;
    if (!element) return;
    const observer = new ResizeObserver(() => setWidth(element.clientWidth));
    observer.observe(element);
    return () => observer.disconnect();
  }, [plan === null]);

  useEffect(() => {
    if (canvas.current && layout && mesh) draw(canvas.current, layout, { ranks, shade, scale, pointed, place: (rank) => wideAxes(mesh).map((axis) => coordinates(rank, mesh)[axis]).join("·") });
  }, [layout, ranks, shade, scale, pointed, dark]);

  if (!plan || !mesh || plan.ranks.length < 2) return null;
  const seats = new Map(plan.ranks.map((seat) => [seat.rank, seat]));
  const axes = wideAxes(mesh);
  const seat = pointed === null ? undefined : seats.get(pointed);
  return (
    <Panel
      title="Mesh"
      aside={
        <>
          <span>{axes.map((axis) => `${axis} ${mesh[axis]}`).join(" × ")}</span>
          <Choice label="Group by" options={["mesh", "node"]} value={grouping} onChange={setGrouping} />
          <Choice label="Colour by" options={SHADES} value={shade} onChange={setShade} />
        </>
      }
    >
      <div className="rank-grid">
        <Legend shade={shade} ranks={plan.ranks.map(({ rank }) => ranks.get(rank))} scale={scale} />
        <div ref={holder} className="holder">
          <canvas
            ref={canvas}
            role="img"
            tabIndex={0}
            aria-label={`${plan.ranks.length} ranks on ${new Set(plan.ranks.map(({ node_id }) => node_id)).size} nodes, coloured by ${shade}. Arrow keys go from rank to rank.`}
            onPointerMove={(event) => setPointed(layout ? cellAt(layout, event.nativeEvent.offsetX, event.nativeEvent.offsetY) : null)}
            onPointerLeave={() => setPointed(null)}
            onKeyDown={(event) => {
              const next = layout && moved(layout, pointed, event.key);
              if (next === null) return;
              event.preventDefault();
              setPointed(next);
            }}
          />
        </div>
        <p className="pointed" aria-live="polite">
          {seat ? told(seat, ranks.get(seat.rank), axes.map((axis) => `${axis} ${coordinates(seat.rank, mesh)[axis]}`).join(", ")) : <span className="muted">Point at a rank, or use the arrow keys.</span>}
        </p>
      </div>
    </Panel>
  );
}

function Choice<T extends string>({ label, options, value, onChange }: { label: string; options: T[]; value: T; onChange: (value: T) => void }) {
  return (
    <span className="toggle" role="group" aria-label={label}>
      {options.map((option) => (
        <button key={option} type="button" aria-pressed={option === value} onClick={() => onChange(option)}>
          {option}
        </button>
      ))}
    </span>
  );
}

interface Scale {
  /** From 0 to 1; null: not known of this rank. */
  part: (rank: RankView) => number | null;
  from: string;
  to: string;
}

function scaleOf(shade: Shade, ranks: RankView[], capacityOf: (rank: RankView) => number | null): Scale {
  if (shade === "lag") {
    const step = ranks.reduce((most, rank) => Math.max(most, rank.step_time_s ?? 0), 0);
    const most = ranks.reduce((late, rank) => Math.max(late, rank.arrival_lag_s ?? 0), LAG_OF_STEP * step);
    return { part: ({ arrival_lag_s: lag }) => (lag === null || most === 0 ? null : lag / most), from: "0 s", to: duration(most) };
  }
  const known = ranks.map((rank) => rank.memory_bytes);
  const fullest = known.reduce((most, used) => Math.max(most, used), 1);
  const limits = ranks.map(capacityOf);
  const limit = limits.every((one) => one !== null) && limits.length > 0 ? limits.reduce<number>((most, one) => Math.max(most, one ?? 0), 0) : 0;
  // On a host's memory a rank's share is a hair: then the fullest rank is the end of the scale.
  const most = limit > 0 && fullest > 0.1 * limit ? limit : fullest;
  return { part: (rank) => (rank.memory_bytes > 0 ? rank.memory_bytes / most : null), from: "0", to: bytes(most) };
}

function Legend({ shade, ranks, scale }: { shade: Shade; ranks: (RankView | undefined)[]; scale: Scale }) {
  if (shade !== "phase") {
    return (
      <p className="legend">
        {scale.from} <span className={`ramp ramp-${shade}`} aria-hidden="true" /> {scale.to}
      </p>
    );
  }
  const counts = new Map<Phase, number>();
  for (const rank of ranks) {
    const phase = phaseOf(rank?.phase ?? "PENDING");
    counts.set(phase, (counts.get(phase) ?? 0) + 1);
  }
  return (
    <p className="legend">
      {[...counts]
        .sort((one, other) => other[1] - one[1])
        .map(([phase, count]) => (
          <span key={phase.word} className={`phase phase-${phase.family}`}>
            {count} {phase.word}
          </span>
        ))}
    </p>
  );
}

function told(seat: RankPlacement, rank: RankView | undefined, place: string): string {
  const parts = [`rank ${seat.rank} on ${seat.node_id} ${seat.device}`, place, phaseOf(rank?.phase ?? "PENDING").word];
  if (rank) {
    parts.push(`step ${rank.step}`);
    if (rank.arrival_lag_s !== null) parts.push(`lag ${duration(rank.arrival_lag_s)}${rank.is_straggler ? ", straggler" : ""}`);
    if (rank.memory_bytes > 0) parts.push(bytes(rank.memory_bytes));
  }
  return parts.join(" · ");
}

function cellAt({ cells, cell }: Layout, x: number, y: number): number | null {
  return cells.find((one) => x >= one.x && x < one.x + cell && y >= one.y && y < one.y + cell)?.rank ?? null;
}

/** The rank to which an arrow key leads; null where it leads nowhere. */
function moved({ cells, cell }: Layout, from: number | null, key: string): number | null {
  const steps: Record<string, [number, number]> = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const step = steps[key];
  if (!step) return null;
  const start = cells.find(({ rank }) => rank === from);
  if (!start) return cells[0]?.rank ?? null;
  const [dx, dy] = step;
  // The nearest one in that direction; aside counts more than ahead, so that rows and columns are kept.
  const far = (one: Cell): number => {
    const ahead = (one.x - start.x) * dx + (one.y - start.y) * dy;
    const aside = Math.abs((one.x - start.x) * dy) + Math.abs((one.y - start.y) * dx);
    return ahead < cell / 2 ? Infinity : ahead + 3 * aside;
  };
  const best = cells.reduce((one, other) => (far(other) < far(one) ? other : one), start);
  return far(best) === Infinity ? null : best.rank;
}

interface Shown {
  ranks: Map<number, RankView>;
  shade: Shade;
  scale: Scale;
  pointed: number | null;
  place: (rank: number) => string;
}

function draw(canvas: HTMLCanvasElement, { cells, blocks, cell, width, height }: Layout, { ranks, shade, scale, pointed, place }: Shown): void {
  const ratio = devicePixelRatio;
  canvas.width = Math.ceil(width * ratio);
  canvas.height = Math.ceil(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  if (!ctx) return;
  const style = getComputedStyle(document.documentElement);
  const paints = new Map<string, string>();
  const paint = (name: string): string => {
    const known = paints.get(name) ?? style.getPropertyValue(name).trim();
    paints.set(name, known);
    return known;
  };
  ctx.scale(ratio, ratio);
  ctx.clearRect(0, 0, width, height);
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  ctx.fillStyle = paint("--muted");
  ctx.font = "600 11px ui-sans-serif, system-ui, sans-serif";
  const titled = blocks.some((block) => cells.some((one) => one.y > block.y && one.x === block.x));
  if (titled) for (const block of blocks) ctx.fillText(block.title, block.x, block.y + 8);
  const gap = cell >= 13 ? 2 : 1;
  const side = cell - gap;
  ctx.textAlign = "center";
  for (const { rank, x, y } of cells) {
    const view = ranks.get(rank);
    const phase = phaseOf(view?.phase ?? "PENDING");
    const part = shade === "phase" || !view ? null : scale.part(view);
    ctx.globalAlpha = 1;
    ctx.fillStyle = paint("--grid");
    ctx.fillRect(x, y, side, side);
    ctx.fillStyle = paint(shade === "phase" ? `--phase-${phase.family}` : shade === "lag" ? "--bad" : "--live");
    if (shade === "phase") ctx.globalAlpha = cell >= FROM_LETTERS ? 0.32 : 0.85;
    else ctx.globalAlpha = part === null ? 0 : 0.08 + 0.85 * Math.min(1, part);
    ctx.fillRect(x, y, side, side);
    ctx.globalAlpha = 1;
    if (cell >= FROM_LETTERS) {
      if (shade === "phase") ctx.fillRect(x, y + side - 3, side, 3);
      ctx.fillStyle = paint("--text");
      const rows = cell >= FROM_COORDINATES ? 2 : 1;
      ctx.font = `600 ${cell >= FROM_COORDINATES ? 12 : 10}px ui-sans-serif, system-ui, sans-serif`;
      ctx.fillText(String(rank), x + side / 2, y + (rows === 2 ? 0.34 : 0.48) * side, side - 2);
      if (rows === 2) {
        ctx.font = "10px ui-sans-serif, system-ui, sans-serif";
        ctx.fillText(shade === "phase" ? phase.letters : place(rank), x + side / 2, y + 0.7 * side, side - 2);
      }
    }
    if (view?.is_straggler || rank === pointed) {
      ctx.strokeStyle = paint(rank === pointed ? "--text" : "--bad");
      ctx.lineWidth = 2;
      ctx.strokeRect(x + 1, y + 1, side - 2, side - 2);
    }
  }
}
