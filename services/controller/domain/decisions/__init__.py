"""What becomes of a job by an event: one module for each kind of event, and one function for all."""
