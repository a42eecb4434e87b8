"""A job's steps as rows, or as a DataFrame."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from services.contract.api.views import MetricsView

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]  # its stubs are another package

Row = dict[str, Any]


class Metrics:
    """A job's steps, oldest first, each as a row of ``step``, ``fence`` and metrics.

    Rows have what the job's own loop measures (``loss``, ``step_time_s``, …) and the user's metrics
    by their names. A step that was made again in a later attempt has a row of each attempt
    (``fence``).

    Attributes:
        view: The answer of the API: also evaluations, units, and how many steps there are.
    """

    def __init__(self, view: MetricsView) -> None:
        self.view = view

    @property
    def rows(self) -> list[Row]:
        """One row a step and attempt."""
        rows: dict[tuple[int, int], Row] = {}
        for record in self.view.items:
            rows[record.step, record.fence] = record.model_dump(mode="json")
        for point in self.view.user_metrics:
            row = rows.setdefault(
                (point.step, point.fence), {"step": point.step, "fence": point.fence}
            )
            row.update(point.values)
        return [rows[key] for key in sorted(rows)]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dataframe(self) -> "pd.DataFrame":
        """A pandas DataFrame, a row a step, indexed by ``step``.

        Raises:
            ImportError: pandas is not installed; ``pip install 'meshloom[pandas]'``.
        """
        try:
            import pandas as pd  # noqa: PLC0415 an extra
        except ImportError as error:
            raise ImportError(
                "to_dataframe() needs pandas: pip install 'meshloom[pandas]'"
            ) from error
        return pd.DataFrame.from_records(self.rows, index="step" if self.rows else None)
