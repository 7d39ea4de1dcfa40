"""The commands: serve, generate, chat, plan, eval, bench, replay."""
