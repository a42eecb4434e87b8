"""Programs of ours that are run for one answer: profiles of models, self-tests."""
