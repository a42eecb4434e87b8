import { useMemo, useState } from "react";
import { isTerminal, useMetrics } from "../api/queries";
import type { JobView, MetricsView } from "../api/types";
import { Chart, type Curve, type Level } from "../ui/Chart";
import { compact, loss as lossText, validationLoss } from "../ui/format";
import { toCurves } from "./curves";

/** Loss and throughput by step; their cursors move together. */
export function CurvePanels({ job }: { job: JobView }) {
  const { data } = useMetrics(job);
  if (!data || (data.items.length === 0 && data.evaluations.length === 0)) {
    return (
      <div className="charts">
        {["Loss", "Throughput"].map((title) => (
          <section key={title} className={data ? "panel chart none" : "panel chart awaited"} aria-label={title}>
            <h2>{title}</h2>
            {data ? (
              <p className="quiet">
                {isTerminal(job.state) ? "No step was made." : "The curve begins with the first step."}
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
      { label: "tokens/s", color: "--curve-speed", values: curves.throughput, width: 1, alpha: 0.4 },
      { label: "smoothed", color: "--curve-speed", values: curves.smoothThroughput, width: 2 },
    ],
    [curves],
  );
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
    </div>
  );
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

function speedSummary({ items }: MetricsView): string {
  const last = items.at(-1);
  return last ? `Throughput, ${compact(last.tokens_per_s)} tokens a second at step ${last.step}.` : "Throughput";
}
