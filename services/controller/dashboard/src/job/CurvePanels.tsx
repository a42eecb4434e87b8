import { useMemo, useState } from "react";
import { isTerminal, useMetrics } from "../api/queries";
import type { JobView, MetricsView } from "../api/types";
import { Chart, type Curve, type Level } from "../ui/Chart";
import { compact, loss as lossText, validationLoss } from "../ui/format";
import { toCurves, toUserCurves, type UserCurves } from "./curves";

/** Loss and throughput by step; their cursors move together. */
export function CurvePanels({ job }: { job: JobView }) {
  const { data } = useMetrics(job);
  if (!data || (data.items.length === 0 && data.evaluations.length === 0 && data.names.length === 0)) {
    return (
      <div className="charts">
        {["Loss", "Throughput"].map((title) => (
          <section key={title} className={data ? "panel chart none" : "panel chart awaited"} aria-label={title}>
            <h2>{title}</h2>
            {data ? (
              <p className="quiet">
                {isTerminal(job.state) ? "The job made no steps." : "No steps yet."}
              </p>
            ) : null}
          </section>
        ))}
      </div>
    );
  }
  return <Charts metrics={data} />;
}

function Charts({ metrics }: { metrics: MetricsView }) {
  const [log, setLog] = useState(false);
  const curves = useMemo(() => toCurves(metrics), [metrics]);
  const lossCurves = useMemo<Curve[]>(
    () => [
      { label: "train", color: "--curve-train", values: curves.loss, width: 1, alpha: 0.4 },
      { label: "smoothed", color: "--curve-train", values: curves.smoothLoss, width: 2 },
      ...(curves.hasLost
        ? [{ label: "lost steps", color: "--muted", values: curves.lostLoss, width: 1.25, dash: [3, 3], silent: true }]
        : []),
      { label: "validation", color: "--curve-validation", values: curves.validation, width: 1.25, dots: true },
    ],
    [curves],
  );
  const speedCurves = useMemo<Curve[]>(
    () => [
      { label: `${metrics.throughput_unit}/s`, color: "--curve-speed", values: curves.throughput, width: 1, alpha: 0.4 },
      { label: "smoothed", color: "--curve-speed", values: curves.smoothThroughput, width: 2 },
    ],
    [curves, metrics.throughput_unit],
  );
  const userCharts = useMemo(() => toUserCurves(metrics), [metrics]);
  const levels = useMemo(() => baselines(metrics), [metrics]);
  return (
    <div className="charts">
      <div className="panel">
        <Chart
          title="Loss"
          summary={lossSummary(metrics)}
          steps={curves.steps}
          curves={lossCurves}
          marks={curves.marks}
          levels={levels}
          log={log}
          format={lossText}
          controls={
            <div className="toggle" role="group" aria-label="Scale of the loss">
              <button type="button" aria-pressed={!log} onClick={() => setLog(false)}>
                linear
              </button>
              <button type="button" aria-pressed={log} onClick={() => setLog(true)}>
                log
              </button>
            </div>
          }
        />
      </div>
      <div className="panel">
        <Chart
          title="Throughput"
          summary={speedSummary(metrics)}
          steps={curves.steps}
          curves={speedCurves}
          marks={curves.marks}
          fromZero
          format={compact}
        />
      </div>
      {userCharts.map((chart) => (
        <div className="panel" key={chart.name} data-metric={chart.name}>
          <UserChart chart={chart} />
        </div>
      ))}
      {metrics.names_left_out > 0 ? (
        <p className="quiet">Of {metrics.names_left_out} further names nothing is kept: a job may have 64.</p>
      ) : null}
    </div>
  );
}

/** What the user's code measures under one name, in training and in validation. */
function UserChart({ chart }: { chart: UserCurves }) {
  const curves = useMemo<Curve[]>(
    () => [
      ...(chart.hasTraining
        ? [{ label: "train", color: "--curve-train", values: chart.training, width: 1.5 }]
        : []),
      ...(chart.hasValidation
        ? [{ label: "validation", color: "--curve-validation", values: chart.validation, width: 1.25, dots: true }]
        : []),
    ],
    [chart],
  );
  return (
    <Chart title={chart.name} summary={userSummary(chart)} steps={chart.steps} curves={curves} marks={chart.marks} format={lossText} />
  );
}

function userSummary({ name, steps, training, validation }: UserCurves): string {
  const last = (values: (number | null)[]) => values.findLastIndex((value) => value !== null);
  const told = ([["", training], ["in validation ", validation]] as const)
    .filter(([, values]) => last(values) >= 0)
    .map(([where, values]) => `${where}${lossText(values[last(values)])} at step ${steps[last(values)]}`);
  return `${name}: ${told.join(", ")}.`;
}

function baselines(metrics: MetricsView): Level[] {
  return Object.entries(metrics.evaluations.at(-1)?.baselines ?? {}).map(([name, y]) => ({
    y,
    label: `${name} ${lossText(y)}`,
    color: "--curve-baseline",
  }));
}

function lossSummary({ items, evaluations }: MetricsView): string {
  const first = items[0];
  const last = items.at(-1);
  const told = first && last ? `Training loss from ${lossText(first.loss)} at step ${first.step} to ${lossText(last.loss)} at step ${last.step}.` : "";
  const evaluation = evaluations.at(-1);
  return evaluation ? `${told} Validation loss ${validationLoss(evaluation.loss)} after step ${evaluation.step}.`.trim() : told;
}

function speedSummary({ items, throughput_unit }: MetricsView): string {
  const last = items.at(-1);
  return last ? `Throughput, ${compact(last.tokens_per_s)} ${throughput_unit} a second at step ${last.step}.` : "Throughput";
}
