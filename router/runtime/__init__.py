"""The asyncio side: executes the core's effects and reports events back to it."""
