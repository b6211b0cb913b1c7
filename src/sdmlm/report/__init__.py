"""Reports for people: a self-contained HTML page with plots and tables."""

from sdmlm.report.estimator import Example, write_report

__all__ = ["Example", "write_report"]
