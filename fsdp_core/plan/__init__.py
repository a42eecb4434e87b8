"""Sharding plans: `plan.model` as plain data, without torch; `plan.apply` onto a module.

Nothing is imported here, so that a process without torch can read `fsdp_core.plan.model`.
"""
