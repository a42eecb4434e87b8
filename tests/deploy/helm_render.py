"""``python -m tests.deploy.helm_render CHART``: Helm as a program, since it starts threads of Go.

Reads values as JSON, and writes what Helm finds at fault and the rendered templates, as JSON: ``{"faults", "rendered"}``,
or ``{"refused"}``.
"""

import json
import sys

import helm_python


def main() -> None:
    """Render one chart as the release ``full`` in the namespace ``meshloom``."""
    chart_folder, values = sys.argv[1], json.load(sys.stdin)
    try:
        with helm_python.Chart.load(chart_folder) as chart:
            chart.validate_schema(values)
            rendered = chart.render(values, name="full", namespace="meshloom")
    except helm_python.HelmError as error:
        json.dump({"refused": str(error)}, sys.stdout)
        return
    found = helm_python.lint(chart_folder, values, strict=True, kube_version="v1.33.0")
    faults = [each["error"] for each in found["messages"] if each["severity"] > 1]
    json.dump({"faults": faults, "rendered": rendered}, sys.stdout)


if __name__ == "__main__":
    main()
