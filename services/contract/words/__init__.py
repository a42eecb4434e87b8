"""Words that all speak: identifiers, states, bounds, problems."""
