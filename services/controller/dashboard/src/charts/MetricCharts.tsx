import { useMutation } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { allMetrics, isTerminal, useMetrics } from "../api/queries";
import type { JobView } from "../api/types";
import { Chart, type Zoom } from "../ui/Chart";
import { download } from "../ui/download";
import { bytes, duration } from "../ui/format";
import { Trouble } from "../ui/parts";
import { type Axis, csvOf, type Measure, measuresOf, type Run } from "./measures";

const SMALL_HEIGHT = 168;
const SMALL_AT_FIRST = 12;
const RUN_COLORS = 8;
/** Powers of two: bytes are told in them. */
const BYTE_INCREMENTS = Array.from({ length: 53 }, (_, power) => 2 ** power);
const STRENGTHS: [string, number][] = [
  ["none", 0],
  ["light", 1],
  ["medium", 3],
  ["strong", 8],
];

/** The colour of a run among several: a custom property of the style sheet. */
export function runColor(index: number): string {
  return `--run-${(index % RUN_COLORS) + 1}`;
}

/** Charts of everything that was measured of some jobs; their cursors and zooms move together. */
export function MetricCharts({ jobs }: { jobs: JobView[] }) {
  const [axis, setAxis] = useState<Axis>("step");
  const [strength, setStrength] = useState(1);
  const [log, setLog] = useState(false);
  const [zoom, setZoom] = useState<Zoom>(null);
  const [all, setAll] = useState(false);
  const csv = useMutation({
    mutationFn: async () => csvOf(await Promise.all(jobs.map(async ({ id, name }) => ({ id, name, metrics: await allMetrics(id) })))),
    onSuccess: (text) => download(`${jobs.map((job) => job.name).join("-")}-metrics.csv`, new Blob([text], { type: "text/csv" })),
  });
  // The clock of a run begins with its first step, so a part alone has no times.
  const data = useMetrics(jobs, axis === "step" ? zoom : null);
  const names = jobs.map((job, index) => (jobs.some((other, at) => at !== index && other.name === job.name) ? `${job.name} ${job.id.slice(-5)}` : job.name));
  const told = names.join("\n");
  const measures = useMemo(() => {
    const runs = jobs.flatMap((job, index): Run[] => {
      const metrics = data[index];
      return metrics ? [{ id: job.id, name: names[index] ?? job.name, color: jobs.length > 1 ? runColor(index) : null, metrics }] : [];
    });
    return runs.length > 0 ? measuresOf(runs, axis, strength) : null;
  }, [data, axis, strength, told]);

  const nothing = measures?.every((measure) => measure.x.length === 0) ?? true;
  if (measures === null || (nothing && zoom === null)) return <NoCharts jobs={jobs} awaited={measures === null} />;
  const shown = measures.filter((measure) => measure.large || measure.x.length > 0);
  const small = shown.filter((measure) => !measure.large);
  const left = data.reduce((most, one) => Math.max(most, one?.names_left_out ?? 0), 0);
  const chart = (measure: Measure) => (
    <div className="panel" key={measure.key} data-metric={measure.key}>
      <Chart
        title={measure.title}
        summary={measure.summary}
        x={measure.x}
        curves={measure.curves}
        marks={measure.marks}
        levels={measure.levels}
        timed={axis === "time"}
        height={measure.large ? 236 : SMALL_HEIGHT}
        zoom={zoom}
        onZoom={setZoom}
        fromZero={measure.fromZero}
        units={measure.format === bytes || measure.format === duration}
        increments={measure.format === bytes ? BYTE_INCREMENTS : undefined}
        log={measure.scales && log}
        format={measure.format}
        controls={measure.scales ? <Scale log={log} onChange={setLog} /> : null}
      />
    </div>
  );
  return (
    <section className="metrics" aria-label="Charts">
      <div className="chart-tools" role="group" aria-label="Charts of metrics">
        <div className="toggle" role="group" aria-label="Axis">
          <button type="button" aria-pressed={axis === "step"} onClick={() => (setAxis("step"), setZoom(null))}>
            step
          </button>
          <button
            type="button"
            title="Time since the first step began, pauses between attempts included"
            aria-pressed={axis === "time"}
            onClick={() => (setAxis("time"), setZoom(null))}
          >
            time
          </button>
        </div>
        <label>
          Smoothing{" "}
          <select value={strength} onChange={(event) => setStrength(Number(event.target.value))}>
            {STRENGTHS.map(([name, value]) => (
              <option key={name} value={value}>
                {name}
              </option>
            ))}
          </select>
        </label>
        <button type="button" disabled={zoom === null} onClick={() => setZoom(null)}>
          Reset zoom
        </button>
        <button type="button" disabled={csv.isPending} onClick={() => csv.mutate()}>
          CSV
        </button>
        <span className="muted hint">Drag over a chart to zoom.</span>
      </div>
      {csv.error ? <Trouble error={csv.error} /> : null}
      <div className="charts">{shown.filter((measure) => measure.large).map(chart)}</div>
      {small.length > 0 ? <div className="charts small">{(all ? small : small.slice(0, SMALL_AT_FIRST)).map(chart)}</div> : null}
      {small.length > SMALL_AT_FIRST && !all ? (
        <button type="button" onClick={() => setAll(true)}>
          Show {small.length - SMALL_AT_FIRST} more charts
        </button>
      ) : null}
      {left > 0 ? <p className="quiet">{left} more metric names are not stored: a job may have 64.</p> : null}
    </section>
  );
}

function Scale({ log, onChange }: { log: boolean; onChange: (log: boolean) => void }) {
  return (
    <div className="toggle" role="group" aria-label="Scale of the loss">
      <button type="button" aria-pressed={!log} onClick={() => onChange(false)}>
        linear
      </button>
      <button type="button" aria-pressed={log} onClick={() => onChange(true)}>
        log
      </button>
    </div>
  );
}

function NoCharts({ jobs, awaited }: { jobs: JobView[]; awaited: boolean }) {
  const ended = jobs.every((job) => isTerminal(job.state));
  return (
    <div className="charts">
      {["Loss", "Throughput"].map((title) => (
        <section key={title} className={awaited ? "panel chart awaited" : "panel chart none"} aria-label={title}>
          <h2>{title}</h2>
          {awaited ? null : <p className="quiet">{ended ? "No steps were made." : "No steps yet."}</p>}
        </section>
      ))}
    </div>
  );
}
