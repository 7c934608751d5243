"""The report as one HTML file: no scripts, nothing to fetch, pictures inside."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from perdure.report import chart
from perdure.report.model import Report
from perdure.report.terminal import outcome, where


def render_page(report: Report, title: str) -> str:
    """The page of a report; everything that came from the logs is escaped."""
    environment = Environment(
        loader=PackageLoader("perdure.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = lambda seconds: "–" if seconds is None else chart.duration(seconds)
    environment.filters["percent"] = lambda share: "–" if share is None else f"{share:.1%}"
    return environment.get_template("page.html.j2").render(
        title=title,
        report=report,
        pictures=chart.draw(report),
        outcome=outcome(report),
        where=where,
        recomputed=sum(fault.recomputed_micro_batches for fault in report.faults),
        chart=chart,
    )
