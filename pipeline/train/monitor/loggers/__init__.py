"""Loggers: everything that the metrics of a run are written to, one module for each tracker."""
