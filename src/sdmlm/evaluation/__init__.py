"""How good an estimator is: metrics, tables, baselines, comparison."""
