"""HTML reports: a page in a single file, with plots and tables."""

from sdmlm.report.estimator import Example, write_report

__all__ = ["Example", "write_report"]
