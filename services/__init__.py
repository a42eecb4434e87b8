"""The services of Meshloom: controller, worker (agent and rank), command line, local stack."""
