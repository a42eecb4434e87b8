"""Profiles models and measures nodes before any rank runs."""
