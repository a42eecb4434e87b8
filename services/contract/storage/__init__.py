"""What lies in storage: the commit chain, manifests, job cards, tokenised text."""
