"""What travels over REST: resources, bodies of requests, errors' places."""
