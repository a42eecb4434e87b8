"""What the controller sends over HTTP."""
