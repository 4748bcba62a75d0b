"""Measuring and predicting what protection costs: bench, study, report and plan. A worker needs none of it."""
