"""The coordinator's web service: routes, authentication, limits and pages on one port."""
