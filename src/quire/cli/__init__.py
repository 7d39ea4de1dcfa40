"""Commands: serve, generate, chat, plan, eval."""
