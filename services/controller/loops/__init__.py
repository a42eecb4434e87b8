"""What the controller does by itself: lead, apply facts, reconcile."""
