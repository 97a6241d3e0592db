"""`pipeline report --live`: a report that follows runs while they train."""
