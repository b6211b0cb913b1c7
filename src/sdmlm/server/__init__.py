"""The server: OpenAI's API with evidence on every answer, and a page. `sdmlm serve` starts it (extra `serve`)."""
