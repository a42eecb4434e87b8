"""What the controller does by itself: lead, heed facts, reconcile."""
