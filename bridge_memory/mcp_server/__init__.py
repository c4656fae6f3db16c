"""``bridge-memory mcp``: the commands' answers as a Model Context Protocol server, for coding assistants."""
