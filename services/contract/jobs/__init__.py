"""What people ask for: specs, and where and how a job runs."""
