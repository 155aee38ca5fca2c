"""The OpenAI-compatible HTTP surface. Knows HTTP and JSON; placement and tokens are the router's."""
