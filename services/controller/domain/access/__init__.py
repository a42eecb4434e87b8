"""What subjects may do and keep: tokens, rates, quotas of uploaded code."""
